"""Rulings 1 and 6: leading dimensions, empty tensors and strides of what the FlashAttention-2 Functions take."""

import pytest
import torch
import torch.nn.functional as F

from .machine import DEVICE, NATIVE, both_causal, both_flash, flash_function
from .reference import Case, Inputs, assert_within_budget, run_attention

STRIDED = Case((2, 16), 513, 513, 64) if NATIVE else Case((2, 3), 37, 37, 16)


def transposed(x):
    """(batch, heads, n, d) in the memory order (batch, n, heads, d), as projections leave it."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def slice_of_fused(x):
    """The middle third of a fused (…, n, 3 d) projection."""
    return torch.cat([torch.full_like(x, float("nan")), x, torch.full_like(x, float("nan"))], dim=-1).chunk(3, dim=-1)[
        1
    ]


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
    return x.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)


LAYOUTS = [transposed, slice_of_fused, every_second_row, column_major, off_by_one_element, batch_last]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@both_flash
def test_strides_of_inputs_and_gradient(flash, layout):
    """Ruling 6; B11: values count, not where they lie."""
    inputs = STRIDED.draw(torch.float32, DEVICE)
    laid_out = Inputs(*(layout(x) for x in inputs))
    assert all(torch.equal(x, y) for x, y in zip(laid_out, inputs, strict=True))
    assert_within_budget(run_attention(flash_function(flash), laid_out, True), inputs, True)


@both_flash
def test_a_different_layout_for_each_input(flash):
    """Ruling 6; B11: q transposed, k contiguous, v from a fused projection, dO by columns."""
    q, k, v, dO = inputs = STRIDED.draw(torch.float16, DEVICE)
    mixed = Inputs(transposed(q), k, slice_of_fused(v), column_major(dO))
    assert_within_budget(run_attention(flash_function(flash), mixed, True), inputs, True)


EXPANSIONS = {
    "heads": lambda x: x[:, :1].expand_as(x),
    "batch": lambda x: x[:1].expand_as(x),
    "rows": lambda x: x[..., :1, :].expand_as(x),
    "columns": lambda x: x[..., :1].expand_as(x),
}


@pytest.mark.parametrize("over", EXPANSIONS)
@both_flash
def test_expanded_inputs(flash, over):
    """Ruling 6: stride 0 over heads (as grouped queries have), batch, rows or columns; gradients are full size."""
    inputs = Inputs(*(EXPANSIONS[over](x) for x in STRIDED.draw(torch.float32, DEVICE)))
    assert_within_budget(run_attention(flash_function(flash), inputs, True), inputs, True)


@both_flash
def test_gradient_of_a_sum(flash):
    """Ruling 6: o.sum().backward() hands over one element with stride 0 everywhere."""
    inputs = STRIDED.draw(torch.float32, DEVICE)
    inputs = inputs._replace(dO=torch.ones((), device=DEVICE).expand_as(inputs.q))
    assert inputs.dO.stride() == (0, 0, 0, 0)
    assert_within_budget(run_attention(flash_function(flash), inputs, False), inputs, False)


@both_flash
def test_gradient_through_transpose_and_projection(flash):
    """Ruling 6; B13: behind o.transpose(1, 2) and a linear layer dO is transposed, and counts as its dense copy."""
    inputs = Case((2, 4), 32, 32, 128).draw(torch.float32, DEVICE)
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    arrived = []
    o = flash_function(flash)(q, k, v, True)
    o.register_hook(arrived.append)
    F.linear(o.transpose(1, 2), inputs.dO[0, 0, :, :128]).square().sum().backward()
    (dO,) = arrived
    assert not dO.is_contiguous()
    expected = run_attention(flash_function(flash), inputs._replace(dO=dO.contiguous()), True)
    for x, gradient in ((q, expected.dq), (k, expected.dk), (v, expected.dv)):
        torch.testing.assert_close(x.grad, gradient)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
@both_causal
@both_flash
def test_leading_dimensions(flash, is_causal, leading):
    """Ruling 1: any number of leading dimensions, none too; o and L keep them."""
    inputs = Case(leading, 20, 35, 16).draw(torch.float32, DEVICE)
    result = run_attention(flash_function(flash), inputs, is_causal)
    assert result.L is not None and result.L.shape == (*leading, 20)
    assert_within_budget(result, inputs, is_causal)


@both_flash
def test_leading_dimensions_that_no_view_can_merge(flash):
    """Rulings 1 and 6: three leading dimensions, transposed among themselves, have no single stride."""
    inputs = Case((2, 3, 2), 17, 17, 16).draw(torch.float32, DEVICE)
    permuted = Inputs(*(x.permute(2, 1, 0, 3, 4).contiguous().permute(2, 1, 0, 3, 4) for x in inputs))
    assert_within_budget(run_attention(flash_function(flash), permuted, True), inputs, True)


@pytest.mark.parametrize(
    "case",
    [
        Case((2,), 5, 0, 16),
        Case((2,), 0, 5, 16),
        Case((2,), 0, 0, 16),
        Case((0,), 5, 7, 16),
        Case((2, 0), 5, 7, 16),
        Case((), 130, 0, 3),
    ],
    ids=str,
)
@both_causal
@both_flash
def test_empty_tensors(flash, is_causal, case):
    """Rulings 1 and 3; B05: no keys give o = 0, L = -inf and dq = 0; no queries give dk = dv = 0; no heads nothing."""
    inputs = case.draw(torch.float32, DEVICE)
    result = run_attention(flash_function(flash), inputs, is_causal)
    assert result.L is not None
    assert_within_budget(result, inputs, is_causal)
