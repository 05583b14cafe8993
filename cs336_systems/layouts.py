"""How tensors lie in memory, as far as the kernels care: as batch, heads, rows and columns, with any strides."""

import math
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_systems.inputs import PerQuery, Queries


def as_4d(x: Float[Tensor, "... n d"]) -> Float[Tensor, "batch heads n d"]:
    """A view of x with its leading dimensions as batch and heads."""
    if x.ndim == 4:
        return x
    if x.ndim == 2:
        return x[None, None]
    return x.view(math.prod(x.shape[:-3]), *x.shape[-3:])


def readable(x: Float[Tensor, "... n d"]) -> Float[Tensor, "... n d"]:
    """x, copied where the kernels could not read it, or not well.

    That is where the elements of a row do not lie side by side, for each is read many times; where all rows lie in one
    place, as those of a gradient of o.mean(dim=-2), for then all programs read the same few addresses (on an H200 the
    backward took 1.3 to 2.7 times as long); where the strides of more than two leading dimensions are not those of a
    batch and heads; and where signs are yet to be flipped.
    """
    rows_apart = x.stride(-2) != 0 or x.shape[-2] == 1
    as_it_is = x.stride(-1) == 1 and rows_apart and (x.ndim <= 4 or _merges(x))
    return (x if as_it_is else x.contiguous()).resolve_neg()


def _merges(x: Float[Tensor, "... heads n d"]) -> bool:
    """Whether all dimensions before the last three are as good as one, with a stride of its own."""
    leading = [(size, step) for size, step in zip(x.shape[:-3], x.stride(), strict=False) if size != 1]
    return all(step == size_in * step_in for (_, step), (size_in, step_in) in pairwise(leading))


def empty_output_like(x: Float[Tensor, "... n d"]) -> Float[Tensor, "... n d"]:
    """An uninitialised tensor of x's shape, up to four dimensions in x's memory order where that keeps rows whole.

    It does not where windows of x overlap, one element apart.
    """
    if x.ndim <= 4:
        in_order = torch.empty_like(x)
        if in_order.stride(-1) == 1:
            return in_order
    return x.new_empty(x.shape)


def empty_outputs(q: Queries) -> tuple[Queries, PerQuery]:
    """Uninitialised o and L (float32) for the queries q."""
    return empty_output_like(q), q.new_empty(tuple(q.shape[:-1]), dtype=torch.float32)  # a torch.Size takes longer


def copyable_strides(x: Float[Tensor, "... n d"]) -> tuple[int, ...] | None:
    """The strides of x as (batch, heads, n, d), by which Hopper's copy engine can read it; None where it cannot.

    It wants an address and steps that are multiples of 16 bytes, a last step of 1, and some elements. Steps of 0, as of
    expanded heads, are among them (tried on an H200), for reading alone: outputs are new tensors, which have none.
    """
    x = as_4d(x)
    elements_in_16_bytes = 16 // x.element_size()
    steps = [
        step if size > 1 else elements_in_16_bytes  # a dimension of size 1 may have any stride
        for step, size in zip(x.stride()[:-1], x.shape[:-1], strict=True)
    ]
    aligned = x.data_ptr() % 16 == 0 and all(step % elements_in_16_bytes == 0 for step in steps)
    return (*steps, 1) if aligned and x.stride(-1) == 1 and x.numel() > 0 else None
