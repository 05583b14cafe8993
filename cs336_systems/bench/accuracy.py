"""Correctness before speed: an implementation against a reference in float64, within an error budget."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_systems.bench.workload import AttentionShape
from cs336_systems.implementation import AttentionFunction

CHECK_BATCH = 2
MOST_CHECKED_HEADS = 16  # more than the kernels work on side by side
CHECK_LENGTH = 208  # ragged for tiles from 32 rows on; divisible by 16, as timed lengths are: Triton compiles for that

# Rounding errors of one draw are partly luck, and what is right must not be called wrong; a wrong mask, scale or
# precision is off by a hundred times as much. The tests hold our own implementations to the budget without it.
SLACK = 4


class WrongResultError(Exception):
    """An implementation's output or gradients are further from the reference than the error budget allows."""


def error_budget(dense: Float[Tensor, "..."], exact: Float[Tensor, "..."], dtype: torch.dtype) -> float:
    """Largest absolute error allowed: SLACK·(2·max|dense - exact| + eps(dtype)·max|exact|).

    `dense` is the plain attention's result in `dtype`, `exact` the same in float64. The second term is one rounding of
    `dtype`: without it an implementation would have to hit values that the dense one meets exactly by luck.
    """
    return SLACK * (2 * max_error(dense, exact) + torch.finfo(dtype).eps * _largest(exact[exact.isfinite()]))


def max_error(actual: Float[Tensor, "..."], exact: Float[Tensor, "..."]) -> float:
    """max|actual - exact| in float64; NaN where either holds a NaN, 0 where both are empty.

    Equal infinities count as no error: L is -inf where a query sees no key.

    Raises:
        WrongResultError: the shapes differ.
    """
    if actual.shape != exact.shape:
        raise WrongResultError(f"shape is {tuple(actual.shape)}, not {tuple(exact.shape)}")
    return _largest(torch.where(actual == exact, 0.0, actual.double() - exact.double()))


def _largest(values: Float[Tensor, "..."]) -> float:
    return values.double().abs().max().item() if values.numel() else 0.0


def attention_and_gradients(
    function: AttentionFunction,
    inputs: tuple[Float[Tensor, "... n_queries d"], Float[Tensor, "... n_keys d"], Float[Tensor, "... n_keys d"]],
    dO: Float[Tensor, "... n_queries d"],
    causal: bool,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """One forward and backward of `function` in `dtype`.

    Args:
        inputs: q, k and v, in any dtype.
        dO: the gradient of the output.

    Returns:
        The tensors "o", "dq", "dk" and "dv", in `dtype`.
    """
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs)
    o = function(q, k, v, causal)
    gradients = torch.autograd.grad(o, (q, k, v), dO.to(dtype))
    return {"o": o.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def require_within(
    actual: Mapping[str, Tensor], exact: Mapping[str, Tensor], allowed: Mapping[str, float], where: str = ""
) -> None:
    """Check that no tensor is further from the exact one of its name than is allowed.

    Raises:
        WrongResultError: one is, or is NaN; the message begins with `where` and names each, by how much, and what is
            allowed.
    """
    errors = {name: max_error(value, exact[name]) for name, value in actual.items()}
    complaints = [
        f"{name} is off by {error:.1e} where {allowed[name]:.1e} is allowed"
        for name, error in errors.items()
        if not error <= allowed[name] < math.inf  # a NaN compares as False, so it never passes
    ]
    if complaints:
        raise WrongResultError(where + "; ".join(complaints))


def require_correct(
    function: AttentionFunction, reference: AttentionFunction, shape: AttentionShape, device: torch.device
) -> None:
    """Check o, dq, dk and dv at a small size of the dtype, head dim and mask of `shape`.

    Raises:
        WrongResultError: a tensor is off, or NaN; the message names each, by how much, and what the budget was.
    """
    heads = min(shape.heads, MOST_CHECKED_HEADS)
    small = replace(shape, batch=CHECK_BATCH, heads=heads, n_queries=CHECK_LENGTH, n_keys=CHECK_LENGTH)
    arguments = (small.inputs(device), small.output_gradient(device), small.causal)
    exact = attention_and_gradients(reference, *arguments, torch.float64)
    dense = attention_and_gradients(reference, *arguments, shape.dtype)
    actual = attention_and_gradients(function, *arguments, shape.dtype)

    allowed = {name: error_budget(dense[name], exact[name], shape.dtype) for name in actual}
    require_within(actual, exact, allowed, f"wrong at d {small.d}, length {CHECK_LENGTH}: ")
