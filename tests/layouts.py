"""The same (…, n, d) values laid out in other ways in memory. Where a layout leaves gaps they hold NaN."""

import torch


def contiguous(x):
    """As drawn."""
    return x


def transposed(x):
    """(batch, heads, n, d) in the memory order (batch, n, heads, d), as projections leave it."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def slice_of_fused(x):
    """The middle third of a fused (…, n, 3 d) projection."""
    nan = torch.full_like(x, float("nan"))
    return torch.cat([nan, x, nan], -1).chunk(3, -1)[1]


def every_second_row(x):
    """Rows that are not neighbours."""
    return torch.stack([x, torch.full_like(x, float("nan"))], dim=-2).flatten(-3, -2)[..., ::2, :]


def column_major(x):
    """A last stride that is not 1."""
    return x.mT.contiguous().mT


def off_by_one_element(x):
    """An address that is a multiple of no vector load."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)


def batch_last(x):
    """Leading dimensions that do not collapse into one, in the order opposite to memory."""
    order = [x.ndim - 2, x.ndim - 1, *reversed(range(x.ndim - 2))]
    return x.permute(order).contiguous().permute([order.index(i) for i in range(x.ndim)])


def negative_view(x):
    """Memory holds -x, and a bit says so: as in the imaginary part of a conjugate."""
    return torch._neg_view(-x)


def windows(x):
    """Rows that overlap, each one element after the last. (Not x's values, but the first of them.)"""
    *_, n, d = x.shape
    return x.flatten(-2)[..., : n + d - 1].unfold(-1, d, 1)


LAYOUTS = [transposed, slice_of_fused, every_second_row, column_major, off_by_one_element, batch_last, negative_view]
