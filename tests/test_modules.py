"""softmax and scaled_dot_product_attention of cs336_basics, against torch.nn.functional."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cs336_basics.modules import scaled_dot_product_attention, softmax

from .reference import Case, Inputs, assert_within_budget, run_attention

CPU = torch.device("cpu")
INFINITY = float("inf")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_softmax_over_any_axis(dim):
    """The axis is the one that was asked for, counted from either end."""
    x = random(3, 4, 5)
    torch.testing.assert_close(softmax(x, dim), F.softmax(x, dim))


def test_softmax_of_a_vector():
    """One dimension, no leading ones."""
    torch.testing.assert_close(softmax(random(7), 0), F.softmax(random(7), 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_softmax_keeps_the_dtype(dtype):
    """The result has the input's dtype and, in half precision, the accuracy of a sum in float32."""
    x = random(2, 3000).to(dtype)
    result = softmax(x, -1)
    assert result.dtype == dtype
    torch.testing.assert_close(result, F.softmax(x, -1))


@pytest.mark.parametrize("shift", [1e4, -1e4, 3e38, -3e38], ids=str)
def test_softmax_is_stable(shift):
    """exp(x) alone would overflow or vanish; softmax does not depend on a common shift."""
    x = torch.full((2, 4), shift)
    x[:, 0] = x[:, 0] / 2
    torch.testing.assert_close(softmax(x, -1), F.softmax(x, -1))


def test_softmax_with_minus_infinity():
    """-inf entries get 0; a row of nothing but -inf gets zeros, not NaN, in value and gradient."""
    x = random(3, 4)
    x[0, 1] = x[2, :] = -INFINITY
    x.requires_grad_()
    result = softmax(x, -1)
    torch.testing.assert_close(result[:2], F.softmax(x[:2], -1))
    assert not result[2].any()
    (result * random(3, 4)).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and not x.grad[2].any()


@pytest.mark.parametrize("dim", [0, -1])
def test_softmax_gradient(dim):
    """Subtracting the maximum leaves no trace in the gradient, ties among the largest included."""
    x = random(4, 5).double()
    x[:, 1] = x[:, 2] = 3
    assert torch.autograd.gradcheck(lambda x: softmax(x, dim), x.requires_grad_())


def test_softmax_without_entries():
    """An empty batch stays an empty batch."""
    assert softmax(torch.zeros(0, 5), -1).shape == (0, 5)


MASKS = {
    "full": (2, 3, 6, 9),
    "one-for-all-heads": (2, 1, 6, 9),
    "without-leading": (6, 9),
    "by-key": (2, 1, 1, 9),
    "by-query": (6, 1),
}


@pytest.mark.parametrize("mask_shape", MASKS.values(), ids=MASKS)
def test_attention_with_any_broadcastable_mask(mask_shape):
    """True keeps a key; masks broadcast to (…, queries, keys); value and gradients."""
    inputs = Case((2, 3), 6, 9, 8).draw(torch.float64, CPU)
    mask = random(*mask_shape) > 0
    mask[..., 0] = True
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    o = scaled_dot_product_attention(q, k, v, mask)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(o, expected)
    gradients, expected_gradients = (torch.autograd.grad(x, (q, k, v), inputs.dO) for x in (o, expected))
    torch.testing.assert_close(gradients, expected_gradients)


@pytest.mark.parametrize("leading", [(), (2,), (2, 3), (2, 1, 3), (0,)], ids=str)
def test_attention_with_any_leading_dimensions(leading):
    """None to three leading dimensions, and an empty one; no mask keeps every key."""
    inputs = Case(leading, 6, 9, 8).draw(torch.float32, CPU)

    def attention(q, k, v, is_causal):
        return scaled_dot_product_attention(q, k, v)

    assert_within_budget(run_attention(attention, inputs, False), inputs, False)


def test_attention_with_values_of_another_width():
    """d_v need not be d: the scale is that of the queries and keys."""
    q, k, v = random(2, 6, 8), random(2, 9, 8), random(2, 9, 5)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 4, 6, 8), (2, 2, 9, 8), (2, 2, 9, 8)),
        ((2, 6, 24), (2, 9, 16), (2, 9, 16)),
        ((2, 6, 8), (2, 9, 8), (2, 7, 8)),
        ((2, 6, 8), (2, 9, 8), (3, 9, 8)),
        ((2, 6, 0), (3, 9, 0), (3, 9, 5)),
    ],
    ids=["fewer heads", "other width", "other length", "other batch", "no width"],
)
def test_attention_of_shapes_that_do_not_belong_together(q, k, v):
    """One line names the shapes, and no value; with and without a mask."""
    for mask in (None, torch.ones(q[-2], k[-2], dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"^Q, K and V must be .*$") as error:
            scaled_dot_product_attention(random(*q), random(*k), random(*v), mask)
        assert all(str(shape) in str(error.value) for shape in (q, k, v)) and "\n" not in str(error.value)


def test_attention_of_fully_masked_rows():
    """A query that sees no key gives zeros, with no NaN in the value or in any gradient."""
    q, k, v = (x.requires_grad_() for x in Case((2,), 6, 9, 8).draw(torch.float32, CPU)[:3])
    mask = torch.ones(6, 9, dtype=torch.bool)
    mask[2] = mask[5] = False
    o = scaled_dot_product_attention(q, k, v, mask)
    assert not o[:, [2, 5]].any()
    seen = [0, 1, 3, 4]
    torch.testing.assert_close(o[:, seen], F.scaled_dot_product_attention(q[:, seen], k, v))
    o.square().sum().backward()
    for x in (q, k, v):
        assert x.grad is not None and x.grad.isfinite().all()
    assert q.grad is not None and not q.grad[:, [2, 5]].any()


@pytest.mark.parametrize("masked", [False, True])
def test_attention_without_keys(masked):
    """With no keys at all o = 0."""
    inputs = Case((2,), 3, 0, 4).draw(torch.float32, CPU)
    mask = torch.ones(3, 0, dtype=torch.bool) if masked else None
    assert torch.equal(scaled_dot_product_attention(*inputs[:3], mask), torch.zeros(2, 3, 4))


def test_attention_with_logits_below_any_finite_fill():
    """Masked scores are -inf; true scores of -1e10 still win over them."""
    q, k = torch.full((4, 16), 5e4), torch.full((4, 16), -5e4)
    v = random(4, 16)
    o = scaled_dot_product_attention(q, k, v, torch.ones(4, 4, dtype=torch.bool).tril())
    torch.testing.assert_close(o, v.cumsum(0) / torch.arange(1, 5)[:, None])


def test_attention_of_large_half_precision_scores():
    """Q k^T of 102,400 overflows float16 unless it is scaled before it is rounded."""
    inputs = Case((2,), 64, 64, 64).draw(torch.float16, CPU)
    forties = torch.full_like(inputs.q, 40)
    inputs = Inputs(forties, forties, inputs.v, inputs.dO)
    o = scaled_dot_product_attention(*inputs[:3])
    mean = inputs.v.float().mean(dim=-2, keepdim=True)
    torch.testing.assert_close(o.float(), mean.expand_as(o), rtol=2e-3, atol=2e-3)


def test_errors_of_torch_come_through_einx():
    """Out of memory has to be recognised as such, and checkpointing ends a recomputation by an exception of its own."""

    class OutOfMemory(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.bmm.default:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return func(*args, **(kwargs or {}))

    q, k, v = (torch.randn(2, 9, 8, requires_grad=True) for _ in range(3))
    with OutOfMemory(), pytest.raises(torch.OutOfMemoryError):
        scaled_dot_product_attention(q, k, v)
    expected = torch.autograd.grad(scaled_dot_product_attention(q, k, v).square().sum(), (q, k, v))
    o = checkpoint(scaled_dot_product_attention, q, k, v, use_reentrant=False)
    for gradient, wanted in zip(torch.autograd.grad(o.square().sum(), (q, k, v)), expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_values_of_no_size():
    q = torch.zeros(2, 3, 4)
    assert scaled_dot_product_attention(q, q, torch.zeros(2, 3, 0)).shape == (2, 3, 0)
