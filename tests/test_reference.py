"""The reference and the budget are themselves right: a wrong result must not pass, and a right one must."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from .machine import both_causal
from .reference import (
    TENSORS,
    Case,
    Inputs,
    Result,
    assert_within_budget,
    dense_attention,
    error_budgets,
    largest_error,
    one_by_one,
    run_attention,
)

CPU = torch.device("cpu")
CASE = Case((2, 3), 9, 14, 8)


@both_causal
def test_reference_is_pytorch_math_attention(is_causal):
    """o and the gradients are those of PyTorch's own attention, top-left causal, in float64."""
    inputs = CASE.draw(torch.float64, CPU)

    def sdpa(q, k, v, is_causal):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    expected = run_attention(sdpa, inputs, is_causal)
    result = dense_attention(inputs, is_causal)
    for name in ("o", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name), rtol=1e-12, atol=1e-12)


def test_reference_log_sum_exp_is_natural():
    """L is the natural logarithm: of n equal scores s it is s + ln n."""
    q = torch.ones(3, 4)
    result = dense_attention(Inputs(q, torch.ones(5, 4), torch.ones(5, 4), q), False)
    assert result.L is not None
    torch.testing.assert_close(result.L, torch.full((3,), 2.0).double() + torch.tensor(5.0).double().log())


def test_reference_without_keys():
    """With no keys o = 0 and L = -inf, and dq = 0."""
    result = dense_attention(Case((2,), 3, 0, 4).draw(torch.float32, CPU), True)
    assert result.L is not None and result.dq is not None and result.dk is not None
    assert torch.equal(result.o, torch.zeros(2, 3, 4).double())
    assert torch.equal(result.L, torch.full((2, 3), float("-inf")).double())
    assert torch.equal(result.dq, torch.zeros(2, 3, 4).double()) and result.dk.shape == (2, 0, 4)


def correct_result(dtype: torch.dtype) -> tuple[Result, Inputs]:
    inputs = CASE.draw(dtype, CPU)
    return dense_attention(inputs, True, dtype), inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_budget_accepts_dense_attention(dtype):
    """Dense attention in the dtype is within its own budget."""
    result, inputs = correct_result(dtype)
    assert_within_budget(result, inputs, True)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize(
    "wrong", [float("nan"), float("inf"), float("-inf"), None], ids=["nan", "inf", "minus-inf", "off"]
)
def test_budget_rejects_one_wrong_entry(name, wrong):
    """NaN, an extra infinity, or an error of 1e-3 in one entry of any tensor is over budget."""
    result, inputs = correct_result(torch.float32)
    tensor = getattr(result, name).clone()
    entry = (1, 2, 3)
    tensor[entry] = tensor[entry] + 1e-3 if wrong is None else wrong
    with pytest.raises(AssertionError, match=rf"^{name}: error"):
        assert_within_budget(replace(result, **{name: tensor}), inputs, True)


def test_budget_rejects_a_missing_infinity():
    """L = -inf is expected where there is no key: a finite or NaN L there is over budget, whatever its size."""
    inputs = Case((), 3, 0, 4).draw(torch.float32, CPU)
    exact = dense_attention(inputs, False, torch.float32)
    assert_within_budget(exact, inputs, False)
    for wrong in (0.0, float("nan"), float("inf")):
        with pytest.raises(AssertionError, match=r"^L: error"):
            assert_within_budget(replace(exact, L=torch.full((3,), wrong)), inputs, False)


@pytest.mark.parametrize("name", ["dq", "dk"])
def test_budget_rejects_a_delta_that_does_not_cancel(name):
    """With one key dP - delta is zero: a delta off by 1e-5 of itself is over budget, also summed over many queries."""
    inputs = Case((3,), 482, 1, 3).draw(torch.float32, CPU)
    exact = dense_attention(inputs, False)
    delta = (inputs.dO * inputs.v).sum(dim=-1, keepdim=True)
    dS = 1e-5 * delta * 3**-0.5
    wrong = {"dq": dS @ inputs.k, "dk": dS.mT @ inputs.q}
    with pytest.raises(AssertionError, match=rf"^{name}: error"):
        assert_within_budget(replace(exact, **{name: wrong[name]}), inputs, False)


@pytest.mark.parametrize(("name", "factor"), [("dq", 1000), ("dk", 0.001)])
def test_budget_rejects_zeros_where_scales_differ(name, factor):
    """The larger q is beside k, the smaller is dq beside dk: what dk may be off by would be all of dq."""
    inputs = Case((), 64, 64, 32).draw(torch.float32, CPU)
    inputs = inputs._replace(q=inputs.q * factor, k=inputs.k / factor)
    exact = dense_attention(inputs, False)
    with pytest.raises(AssertionError, match=rf"^{name}: error"):
        assert_within_budget(replace(exact, **{name: torch.zeros_like(getattr(exact, name))}), inputs, False)


def test_budget_rejects_the_other_causal_rule():
    """Bottom-right alignment, the other rule in use, is over budget where lengths differ."""
    inputs = CASE.draw(torch.float32, CPU)
    bottom_right = torch.ones(9, 14, dtype=torch.bool).tril(diagonal=14 - 9)
    o = F.scaled_dot_product_attention(*inputs[:3], attn_mask=bottom_right)
    with pytest.raises(AssertionError, match=r"^o: error"):
        assert_within_budget(Result(o, None, None, None, None), inputs, True)


def test_wrong_shape_is_an_error():
    """A result that would only broadcast against the reference is refused."""
    with pytest.raises(AssertionError, match="shape"):
        largest_error(torch.zeros(1, 4), torch.zeros(3, 4))


def worst_sums(d: int) -> Inputs:
    """After a first term of 1 the others, just below half of its last place, are all rounded away one by one."""
    q, k = torch.full((40, d), 0.99 * 2.0**-24), torch.ones(1, d)
    q[:, 0] = 1
    return Inputs(q, k, k, q)


@pytest.mark.parametrize("d", [64, 256])
def test_one_by_one_reaches_gamma(d):
    """No order of summation errs more: of d terms gamma_d |a|·|b|."""
    q, k, _, _ = worst_sums(d)
    exact = q.double() @ k.double().mT
    error, gamma = largest_error(one_by_one(q, k.mT), exact), d * 2.0**-24 / (1 - d * 2.0**-24)
    assert 0.9 * gamma < error <= gamma * exact.max()


@pytest.mark.parametrize("d", [64, 256])
def test_interpreter_budget_accepts_any_order_of_summation(d):
    """Also where NumPy's library adds in a worse order than PyTorch's."""
    inputs = worst_sums(d)
    result = dense_attention(inputs, False, torch.float32, True, one_by_one)
    assert_within_budget(replace(result, interpreted=True), inputs, False)


def test_interpreter_budget_is_for_the_interpreter_in_float32_alone():
    inputs, budgets = Case((2,), 40, 50, 64).draw(torch.float32, CPU, uniform=True), {}
    for dtype in (torch.float32, torch.float16):
        usual, interpreted = (error_budgets(inputs.to(dtype), True, dtype, each) for each in (False, True))
        budgets[dtype] = [interpreted[name] / usual[name] for name in TENSORS]
    assert budgets[torch.float16] == [1] * 5
    assert max(budgets[torch.float32]) > 1 and max(budgets[torch.float32]) < 20, "TF32's error is 2^13 times float32's"
