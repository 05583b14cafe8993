"""bench.accuracy: what is wrong is caught, in the output and in each gradient, and NaN never passes."""

import math
from dataclasses import replace

import pytest
import torch

from cs336_systems.bench.accuracy import (
    MOST_CHECKED_HEADS,
    SLACK,
    WrongResultError,
    error_budget,
    max_error,
    require_correct,
)

from .bench_examples import CPU, plain_attention, shape


class _Spoilt(torch.autograd.Function):
    """Identity whose gradient is scaled: spoils one gradient and no value."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, *grad_outputs):
        return grad_outputs[0] * ctx.factor, None


def test_budget_is_twice_dense_and_one_rounding_with_slack():
    exact = torch.tensor([4.0, -2.0], dtype=torch.float64)
    dense = torch.tensor([4.0, -1.5])
    assert error_budget(dense, exact, torch.float32) == pytest.approx(
        SLACK * (1.0 + 4 * torch.finfo(torch.float32).eps), rel=1e-12
    )
    assert error_budget(exact, exact, torch.bfloat16) == SLACK * 4 * 2**-7


def test_errors_of_infinities_and_nan():
    infinite = torch.tensor([-math.inf, 1.0], dtype=torch.float64)
    assert max_error(infinite.float(), infinite) == 0
    assert error_budget(infinite.float(), infinite, torch.float32) < 1e-6
    assert max_error(torch.tensor([0.0, 1.0]), infinite) == math.inf
    assert math.isnan(max_error(torch.tensor([math.nan, 1.0]), torch.ones(2).double()))
    with pytest.raises(WrongResultError, match=r"shape is \(1,\), not \(2,\)"):
        max_error(torch.ones(1), torch.ones(2))


def test_many_heads_are_checked_on_a_few():
    """What fits in memory when it is timed must not run out of it when it is checked."""
    heads = []

    def counted(q, k, v, is_causal):
        heads.append(q.shape[1])
        return plain_attention(q, k, v, is_causal)

    require_correct(counted, plain_attention, replace(shape(), heads=20_000), CPU)
    assert heads == [MOST_CHECKED_HEADS]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right_attention_passes(dtype, causal):
    def scaled_first(q, k, v, is_causal):
        return plain_attention(q.float(), k.float(), v.float(), is_causal).to(q.dtype)

    require_correct(scaled_first, plain_attention, shape(dtype=dtype, causal=causal), CPU)


@pytest.mark.parametrize("spoilt", [0, 1, 2])
def test_one_wrong_gradient_is_named(spoilt):
    def wrong(*arguments):
        *qkv, is_causal = arguments
        qkv[spoilt] = _Spoilt.apply(qkv[spoilt], 1.01)
        return plain_attention(*qkv, is_causal)

    with pytest.raises(WrongResultError) as caught:
        require_correct(wrong, plain_attention, shape(), CPU)
    named = {name for name in ("o", "dq", "dk", "dv") if f"{name} is off" in str(caught.value)}
    assert named == {("dq", "dk", "dv")[spoilt]}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, k, v, is_causal: plain_attention(q, k, v, not is_causal),
        lambda q, k, v, is_causal: plain_attention(q, k, v, is_causal) * math.nan,
        lambda q, k, v, is_causal: plain_attention(q, k, v, is_causal) + 1e-5,
        lambda q, k, v, is_causal: plain_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), is_causal).float(),
    ],
    ids=["mask", "nan", "offset", "precision"],
)
def test_wrong_attention_is_caught(wrong):
    with pytest.raises(WrongResultError, match="o is off"):
        require_correct(wrong, plain_attention, shape(), CPU)


def test_reference_that_is_nan_lets_nothing_pass():
    with pytest.raises(WrongResultError):
        require_correct(plain_attention, lambda q, k, v, c: plain_attention(q, k, v, c) * math.nan, shape(), CPU)
