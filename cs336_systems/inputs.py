"""What the attentions ask of their inputs, and their backwards of what was saved, checked before any work is done."""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

MAX_HEAD_DIM = 256

Queries = Float[Tensor, "... n_queries d"]
Keys = Float[Tensor, "... n_keys d"]
PerQuery = Float[Tensor, "... n_queries"]


def attention_inputs(
    q: Queries, k: Keys, v: Keys, is_causal: bool, dtypes: Collection[torch.dtype], largest_d: int | None = MAX_HEAD_DIM
) -> tuple[Queries, Keys, Keys]:
    """Cast q, k, v for autocast where it is on, and check that they can be attended over.

    Args:
        q: (..., n_queries, d) with 1 <= d <= largest_d; any number of leading dimensions, none included.
        k, v: (..., n_keys, d) with the leading dimensions of q.
        is_causal: True or False.
        dtypes: what the implementation computes in.
        largest_d: the largest head dim; None where there is none.

    Returns:
        q, k, v; under autocast in the autocast dtype (float64 stays, as in PyTorch's own autocast).

    Raises:
        TypeError: something that is no tensor, or no bool; a dtype outside `dtypes`; mixed dtypes.
        ValueError: mixed devices; fewer than two dimensions; shapes that do not belong together; d out of range.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.layout != torch.strided or x.is_nested:
            raise TypeError(f"{name} must be a dense tensor, got {'a nested one' if x.is_nested else x.layout}")

    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be True or False, got {described(is_causal)}")

    if (cast_to := autocast_dtype(q)) is not None:
        q, k, v = (x.to(cast_to) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))

    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"q, k and v have dtype {q.dtype}; allowed: {allowed}")
    if complaint := _complaint_of_shapes(q, k, v, largest_d):
        raise ValueError(f"{complaint}, got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    return q, k, v


def require_as_saved(q: Queries, k: Keys, v: Keys, o: Queries, dO: Queries, L: PerQuery) -> None:
    """Check that what a backward was given belongs together.

    A hook on saved tensors may give back anything, and a kernel would read past the end of what is too small.

    Raises:
        RuntimeError: it does not.
    """
    fits = (
        q.shape == o.shape == dO.shape
        and k.shape == v.shape == (*q.shape[:-2], k.shape[-2], q.shape[-1])
        and L.shape == q.shape[:-1]
        and q.dtype == k.dtype == v.dtype == o.dtype == dO.dtype
        and L.dtype == torch.promote_types(q.dtype, torch.float32)
        and q.device == k.device == v.device == o.device == dO.device == L.device
    )
    if not fits:
        named = zip(("q", "k", "v", "o", "dO", "L"), (q, k, v, o, dO, L), strict=True)
        given = ", ".join(f"{name} {tuple(x.shape)} {x.dtype} on {x.device}" for name, x in named)
        raise RuntimeError(
            "what was saved for the backward has to come back from a hook on saved tensors in the shape, dtype and "
            f"device that it had, got {given}"
        )


def described(x: object) -> str:
    """One line that says what an argument is: a tensor by its shape and dtype, never by its values."""
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)} and dtype {x.dtype}"
    if x is None or isinstance(x, (bool, int, float, str)):
        return repr(x)
    of, name = type(x).__module__, type(x).__qualname__
    return f"a {name}" if of == "builtins" else f"a {of}.{name}"


def refuse_jit_tracing() -> None:
    """Raise under torch.jit.trace, which replaces the sizes of a shape by tensors and records no kernel.

    Raises:
        RuntimeError: torch.jit.trace (or what calls it: TensorBoard's add_graph, the old ONNX export) is running.
    """
    if torch.jit.is_tracing():
        raise RuntimeError("torch.jit.trace cannot record the Triton kernels; torch.export.export can")


PRECISION_NAMES = {"none": "highest", "ieee": "highest", "tf32": "high", "bf16": "medium"}


def float32_matmul_precision(device_type: str) -> str:
    """How PyTorch multiplies float32 matrices on a device: "highest", "high" (TF32) or "medium" (bfloat16, CPU only).

    It reads `torch.backends.*.matmul.fp32_precision`, which also holds what was set by the older names,
    `torch.set_float32_matmul_precision` and `allow_tf32`. `torch.get_float32_matmul_precision()` raises where the newer
    names were used, and may be out of date (torch 2.11).
    """
    backends: Any = torch.backends  # whose settings no type checker sees
    backend = backends.cuda if device_type == "cuda" else backends.mkldnn
    return PRECISION_NAMES[backend.matmul.fp32_precision]


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast casts to on the device of x; None where it is off."""
    device_type = "cuda" if x.is_cuda else x.device.type  # which takes longer to tell
    is_on = device_type != "meta" and torch.is_autocast_enabled(device_type)  # meta has no autocast
    return torch.get_autocast_dtype(device_type) if is_on else None


def _complaint_of_shapes(q: Queries, k: Keys, v: Keys, largest_d: int | None) -> str | None:
    """What is wrong with the shapes; None where nothing is."""
    of_q, of_k, of_v = q.shape, k.shape, v.shape  # asking a tensor takes longer than comparing what it says
    if min(len(of_q), len(of_k), len(of_v)) < 2:
        return "q, k and v must have at least two dimensions (..., n, d)"
    if of_k != of_v:
        return "k and v must have the same shape (..., n_keys, d)"
    if of_q != of_k:
        if of_q[:-2] != of_k[:-2]:
            return "q, k and v must have the same leading dimensions"
        if of_q[-1] != of_k[-1]:
            return "q, k and v must have the same head dim d"
    d = of_q[-1]
    if d < 1 or (largest_d is not None and d > largest_d):
        return f"the head dim d must be {'at least 1' if largest_d is None else f'between 1 and {largest_d}'}"
    return None


def refuse_repeated_when_compiled(q: Queries, k: Keys, v: Keys) -> None:
    """Raise where torch.compile would silently lose a gradient of a tensor that is more than one of q, k and v.

    Dynamo (torch 2.11) gives such a tensor only one of the gradients that an autograd.Function forms for it.

    Raises:
        RuntimeError: under torch.compile, where one of them requires a gradient. Without fullgraph=True the graph
            breaks there, and the attention runs outside of it, with the right gradients.
    """
    if torch.compiler.is_compiling() and (q is k or k is v or q is v) and any(x.requires_grad for x in (q, k, v)):
        raise RuntimeError(
            "q, k and v are not three tensors, and torch.compile would lose a gradient of the one that is given twice; "
            "give it once as it is, and then as x.view_as(x)"
        )


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context in which operations on the device of x run in the dtypes of their inputs."""
    device_type = x.device.type
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)
