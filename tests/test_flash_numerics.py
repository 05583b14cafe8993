"""What the FlashAttention-2 Functions compute where numbers are hard.

Shapes that agree with the other implementations are in test_agreement.py.
"""

import math
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from cs336_systems import launch, launch_hopper
from cs336_systems.attention import ATTENTION
from cs336_systems.bench.measure import float32_precision
from cs336_systems.bench.record import Environment
from cs336_systems.dense_backward import FlashAttention2TritonDenseBackward
from cs336_systems.flash_pytorch import FlashAttention2Pytorch, flash_backward, flash_forward
from cs336_systems.inputs import float32_matmul_precision
from cs336_systems.kernels.tiles import KIB, Gpu

from .machine import (
    DEVICE,
    INTERPRETED,
    INTERPRETER_BFLOAT16,
    NATIVE,
    TRITON_INSTALLED,
    both_causal,
    both_flash,
    flash_function,
    mock_gpu,
    needs_gpu,
    needs_triton,
    skip_if,
    triton_missing_reason,
    without_inductor_on_cpu,
)
from .reference import (
    TENSORS,
    Case,
    Inputs,
    Result,
    assert_within_budget,
    dense_attention,
    largest_error,
    largest_magnitude,
    run_attention,
)


def equal(a: Result, b: Result, flash: str = "") -> bool:
    """Whether two runs gave the same bits.

    With `flash` "triton", dq from the Hopper kernels has to be close only: they sum it in no fixed order.
    """
    pairs = {name: (getattr(a, name), getattr(b, name)) for name in TENSORS}
    if flash == "triton" and NATIVE and launch_hopper.suits(a.o.device, a.o.dtype, a.o.shape[-1]):
        dq, other_dq = pairs.pop("dq")
        if not largest_error(dq, other_dq) <= 2e-2 * largest_magnitude(other_dq):
            return False
    return all(torch.equal(x, y) for x, y in pairs.values())


@contextmanager
def deterministic_algorithms():
    """Deterministic mode, in which torch.empty gives NaN rather than whatever the memory holds."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


# Tiles.


@both_causal
@pytest.mark.parametrize("case", [Case((2,), 80, 80, 8), Case((2,), 33, 50, 8), Case((), 50, 33, 8)], ids=str)
@pytest.mark.parametrize(
    "tiles",
    [(16, 64), (64, 16), (1, 1), (7, 13), (80, 80), (16, 16), (128, 3)],
    ids=lambda tiles: "{}x{}".format(*tiles),
)
def test_any_pair_of_tile_sizes(tiles, case, is_causal):
    """Wherever tile edges fall against the diagonal and the ends, the tiled version is right."""
    inputs = case.draw(torch.float32, DEVICE)
    q, k, v, dO = inputs
    sizes = {"q_tile_size": tiles[0], "k_tile_size": tiles[1]}
    o, L = flash_forward(q, k, v, is_causal, **sizes)
    gradients = flash_backward(q, k, v, o, dO, L, is_causal, **sizes)
    assert_within_budget(Result(o, L, *gradients), inputs, is_causal)


@both_flash
def test_causal_flag_is_not_remembered(flash):
    """Full, causal and full again on one shape, forward and backward; no launch reuses another's masking."""
    inputs = Case((1,), 256, 256, 64).draw(torch.float32, DEVICE)
    results = []
    for is_causal in (False, True, False):
        results.append(run_attention(flash_function(flash), inputs, is_causal))
        assert_within_budget(results[-1], inputs, is_causal)
    assert equal(results[0], results[2])


# Large and small logits.


@both_causal
@both_flash
def test_scores_that_overflow_half_precision(flash, is_causal):
    """q k^T is 102,400, past float16's largest number, and o is still the mean of the visible values."""
    inputs = Case((2, 2), 64, 64, 64).draw(torch.float16, DEVICE)
    inputs.q.fill_(40)
    inputs.k.fill_(40)
    result, exact = run_attention(flash_function(flash), inputs, is_causal), dense_attention(inputs, is_causal)
    assert result.L is not None and exact.L is not None
    assert result.dq is not None and result.dk is not None and result.dv is not None and exact.dv is not None
    half, single = torch.finfo(torch.float16).eps, torch.finfo(torch.float32).eps
    assert largest_error(result.o, exact.o) <= 2 * half * exact.o.abs().max()
    assert largest_error(result.L, exact.L) <= 2 * single * exact.L.max()
    # A rounding of L = 12,804 in float32 is a relative error of 1e-3 in P.
    assert largest_error(result.dv, exact.dv) <= 4 * half * exact.dv.abs().max()
    assert result.dq.isfinite().all() and result.dk.isfinite().all()


@needs_triton
@both_causal
@pytest.mark.parametrize("size", [1024.0, 8000.0])
def test_scores_that_float32_hardly_resolves(size, is_causal):
    """At scores of 8e6 and 5e8 neighbouring float32 numbers are 1 and 32 apart: gradients lose their scale, but are
    finite.
    """
    inputs = Case((2, 2), 64, 64, 64).draw(torch.float16, DEVICE)
    inputs.q.fill_(size)
    inputs.k.fill_(size)
    result, exact = run_attention(flash_function("triton"), inputs, is_causal), dense_attention(inputs, is_causal)
    assert largest_error(result.o, exact.o) <= 2 * torch.finfo(torch.float16).eps * exact.o.abs().max()
    for gradient in (result.dq, result.dk, result.dv):
        assert gradient is not None and gradient.isfinite().all()


@needs_triton
@both_causal
def test_scores_that_overflow_half_precision_in_the_dense_backward(is_causal, monkeypatch):
    """There Q K^T is a float16 matrix: infinite, and the gradients NaN, were q not scaled first."""
    without_inductor_on_cpu(monkeypatch)
    inputs = Case((2, 2), 64, 64, 64).draw(torch.float16, DEVICE)
    inputs.q.fill_(40)
    inputs.k.fill_(40)
    result = run_attention(FlashAttention2TritonDenseBackward.apply, inputs, is_causal)
    exact = dense_attention(inputs, is_causal).o
    assert largest_error(result.o, exact) <= 2 * torch.finfo(torch.float16).eps * exact.abs().max()
    for gradient in (result.dq, result.dk, result.dv):
        assert gradient is not None and gradient.isfinite().all()


@both_causal
@pytest.mark.parametrize(
    ("logit", "dtype"),
    [
        (-(2.0**15), torch.float16),
        (-(2.0**25), torch.float16),
        (-(2.0**25), torch.float32),
        (-(2.0**35), torch.float32),
    ],
    ids=["float16-3e4", "float16-3e7", "float32-3e7", "float32-3e10"],
)
@both_flash
def test_logits_below_any_finite_fill(flash, logit, dtype, is_causal):
    """Where all scores lie below -1e4, -1e6 or -1e9, a masked key with such a fill would take all the weight.

    n is a multiple of no tile size: the zeros that pad the last tile of keys would win as well. All numbers are powers
    of two, so that the scores are equal exactly, whatever the order of summation.
    """
    inputs = Case((2,), 37, 37, 16).draw(dtype, DEVICE)
    exponent = round(math.log2(-logit)) - 2  # scores are 16 q k / sqrt(16)
    inputs.q.fill_(-(2.0 ** (exponent // 2)))
    inputs.k.fill_(2.0 ** (exponent - exponent // 2))
    result, exact = run_attention(flash_function(flash), inputs, is_causal), dense_attention(inputs, is_causal)
    assert result.L is not None and exact.L is not None
    assert largest_error(result.o, exact.o) <= 16 * torch.finfo(dtype).eps * inputs.v.abs().max()
    torch.testing.assert_close(result.L, exact.L.float(), rtol=1e-6, atol=0)
    # One rounding of L may be more than exp can take; it is not to be upwards.
    for gradient in (result.dq, result.dk, result.dv):
        assert gradient is not None and gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@both_causal
@pytest.mark.parametrize(
    ("shift_of_k", "shift_of_v", "spread_of_v"),
    [(0, 1, 0), (0, 100, 1), (30, 0, 1)],
    ids=["v is 1", "v around 100", "k around 30"],
)
@both_flash
def test_keys_and_values_around_a_large_number(flash, shift_of_k, shift_of_v, spread_of_v, is_causal, dtype):
    """With v of 1 every output is 1; around 100, and with scores that share a large part, differences count."""
    skip_if(INTERPRETER_BFLOAT16 if flash == "triton" and INTERPRETED and dtype == torch.bfloat16 else None)
    q, k, v, dO = Case((1,), 256, 256, 64).draw(dtype, DEVICE)
    inputs = Inputs(q, k + shift_of_k, v * spread_of_v + shift_of_v, dO)
    assert_within_budget(run_attention(flash_function(flash), inputs, is_causal), inputs, is_causal)


@both_flash
def test_one_logit_far_above_the_rest(flash):
    """Line 13: when the last key tile brings the maximum, all that was summed before is scaled to nothing."""
    inputs = Case((1,), 20, 150, 16).draw(torch.float32, DEVICE)
    inputs.q.fill_(10)
    inputs.k[..., -1, :] = 10
    result = run_attention(flash_function(flash), inputs, False)
    torch.testing.assert_close(result.o, inputs.v[..., -1:, :].expand_as(result.o))
    assert_within_budget(replace(result, dq=None, dk=None), inputs, False)
    # One key has all the weight, so these are differences of equal numbers, times a q and k of 10.
    for gradient in (result.dq, result.dk):
        assert gradient is not None and largest_error(gradient, torch.zeros_like(gradient)) < 1e-4


# Precision.


@both_causal
@both_flash
def test_float32_has_no_tf32_error(flash, is_causal):
    """At the precision "highest" float32 is float32; TF32 would be off by 1e-3."""
    inputs = Case((1, 1), 128, 128, 32).draw(torch.float32, DEVICE)
    with float32_precision("highest"):
        result = run_attention(flash_function(flash), inputs, is_causal)
    exact = dense_attention(inputs, is_causal)
    for name in TENSORS:
        assert largest_error(getattr(result, name), getattr(exact, name)) < 1e-5, name
    with float32_precision("highest"):
        assert_within_budget(result, inputs, is_causal)


@needs_gpu
@both_flash
def test_tf32_where_it_was_asked_for(flash):
    """At the precision "high" the result may have TF32's error, and no more."""
    inputs = Case((1, 1), 128, 128, 32).draw(torch.float32, DEVICE)
    with float32_precision("high"):
        result = run_attention(flash_function(flash), inputs, True)
    exact = dense_attention(inputs, True)
    for name in TENSORS:
        assert largest_error(getattr(result, name), getattr(exact, name)) < 1e-2, name


@pytest.mark.parametrize(
    ("capability", "dtype", "precision", "expected"),
    [
        ((9, 0), torch.float32, "highest", "bf16x6"),
        ((9, 0), torch.float32, "high", "tf32"),
        ((9, 0), torch.float32, "medium", "tf32"),
        ((7, 5), torch.float32, "highest", "ieee"),
        ((7, 5), torch.float32, "high", "ieee"),
        ((9, 0), torch.float16, "high", "ieee"),
    ],
)
def test_how_float32_is_multiplied(capability, dtype, precision, expected, monkeypatch):
    """Which product each precision asks for, also where there is no GPU to run it."""
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    mock_gpu(monkeypatch, Gpu("mocked", capability, 99 * KIB))
    with float32_precision(precision):
        assert launch._input_precision(torch.empty(2, 16, dtype=dtype)) == expected


BACKENDS: Any = torch.backends  # whose settings no type checker sees


@pytest.fixture
def precision_settings():
    """PyTorch's settings of float32's precision, as they are at the start, and afterwards what they were."""
    with float32_precision("highest"):
        BACKENDS.cuda.matmul.fp32_precision = BACKENDS.mkldnn.matmul.fp32_precision = "none"
        yield BACKENDS
        BACKENDS.fp32_precision = "none"


SETTINGS = {  # what is set, and how float32 is multiplied on a GPU and on a CPU then
    "nothing": (lambda backends: None, "highest", "highest"),
    "TF32": (lambda backends: setattr(backends.cuda.matmul, "fp32_precision", "tf32"), "high", "highest"),
    "no TF32": (lambda backends: setattr(backends.cuda.matmul, "fp32_precision", "ieee"), "highest", "highest"),
    "everywhere TF32": (lambda backends: setattr(backends, "fp32_precision", "tf32"), "high", "high"),
    "bfloat16 on a CPU": (
        lambda backends: setattr(backends.mkldnn.matmul, "fp32_precision", "bf16"), "highest", "medium",
    ),
    "allow_tf32": (lambda backends: setattr(backends.cuda.matmul, "allow_tf32", True), "high", "highest"),
    "older name": (lambda backends: torch.set_float32_matmul_precision("high"), "high", "high"),
    "older name, medium": (lambda backends: torch.set_float32_matmul_precision("medium"), "high", "medium"),
    "newer after older": (
        lambda backends: (
            torch.set_float32_matmul_precision("high"), setattr(backends.cuda.matmul, "fp32_precision", "ieee"),
        ),
        "highest", "high",
    ),
    "older after newer": (
        lambda backends: (
            setattr(backends.cuda.matmul, "fp32_precision", "tf32"), torch.set_float32_matmul_precision("highest"),
        ),
        "highest", "highest",
    ),
}  # fmt: skip


def all_settings() -> list[object]:
    """All that says how PyTorch multiplies float32, or that asking for it raises."""

    def asked(setting):
        try:
            return setting()
        except RuntimeError:
            return "raises"

    cuda, cpu = BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul
    older = asked(torch.get_float32_matmul_precision), asked(lambda: cuda.allow_tf32)
    return [*older, cuda.fp32_precision, cpu.fp32_precision, BACKENDS.fp32_precision]


@pytest.mark.parametrize(("change", "on_gpu", "on_cpu"), SETTINGS.values(), ids=SETTINGS)
def test_precision_set_by_any_name(change, on_gpu, on_cpu, precision_settings, monkeypatch):
    """It is read wherever it counts, also where torch.get_float32_matmul_precision() raises, and put back as it was."""
    change(precision_settings)
    assert (float32_matmul_precision("cuda"), float32_matmul_precision("cpu")) == (on_gpu, on_cpu)
    assert Environment.capture(torch.device("cpu")).float32_precision == on_cpu
    if TRITON_INSTALLED:
        monkeypatch.setattr(launch, "is_interpreted", lambda: False)
        mock_gpu(monkeypatch, Gpu("mocked", (9, 0), 227 * KIB))
        assert launch._input_precision(torch.empty(2, 16)) == ("bf16x6" if on_gpu == "highest" else "tf32")
    before = all_settings()
    for precision in ("highest", "high", "medium"):
        with float32_precision(precision):
            assert float32_matmul_precision("cpu") == precision == torch.get_float32_matmul_precision()
        assert all_settings() == before


def test_a_setting_for_all_backends_counts_after_a_block_too(precision_settings):
    """What followed it before a `float32_precision` follows it afterwards."""
    precision_settings.fp32_precision = "tf32"
    with float32_precision("highest"):
        pass
    precision_settings.fp32_precision = "ieee"
    assert float32_matmul_precision("cuda") == float32_matmul_precision("cpu") == "highest"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("d", [16, 64, 128])
@both_flash
def test_delta_is_summed_in_float32(flash, d, dtype):
    """Over a single key dP = delta = 2048 + d - 1, a number that neither half type has, and so dq = dk = 0.

    Summed in the inputs' dtype, or kept in it, delta is off by 1 at least, and each entry of dq by 1 / sqrt(d).
    """
    skip_if(INTERPRETER_BFLOAT16 if flash == "triton" and INTERPRETED and dtype == torch.bfloat16 else None)
    q, k, v, dO = (torch.ones(2, n, d, dtype=dtype, device=DEVICE) for n in (40, 1, 1, 40))
    dO[..., 0] = 2048
    result = run_attention(flash_function(flash), Inputs(q, k, v, dO), False)
    assert result.dq is not None and result.dk is not None and torch.equal(result.o, torch.ones_like(q))
    assert result.dq.abs().max() < 0.01 and result.dk.abs().max() < 40 * 0.01


@both_causal
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@both_flash
def test_half_precision_of_same_sign_inputs(flash, dtype, is_causal):
    """With inputs in [0, 1) nothing averages out, and accumulators in half precision would show."""
    if flash == "triton" and INTERPRETED and dtype == torch.bfloat16:
        pytest.skip(INTERPRETER_BFLOAT16)
    n = 1024 if NATIVE else 256
    inputs = Case((1,), n, n, 128).draw(dtype, DEVICE, uniform=True)
    assert_within_budget(run_attention(flash_function(flash), inputs, is_causal), inputs, is_causal)


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64],
    ids=["float16", "bfloat16", "float32", "float64"],
)
@both_flash
def test_results_are_in_the_inputs_dtype(flash, dtype):
    """o and the gradients have the inputs' dtype; L is float32, or float64 for float64."""
    if flash == "triton" and dtype == torch.float64:
        pytest.skip("the Triton version takes no float64; test_flash_inputs.py has its error")
    if flash == "triton" and INTERPRETED and dtype == torch.bfloat16:
        pytest.skip(INTERPRETER_BFLOAT16)
    inputs = Case((2,), 20, 30, 16).draw(dtype, DEVICE)
    result = run_attention(flash_function(flash), inputs, True)
    assert result.L is not None and result.L.dtype == torch.promote_types(dtype, torch.float32)
    for name in ("o", "dq", "dk", "dv"):
        assert getattr(result, name).dtype == dtype, name


@needs_triton
@pytest.mark.skipif(not INTERPRETED, reason="this is about the interpreter")
def test_interpreter_refuses_bfloat16():
    """The interpreter would return garbage in bfloat16, so the call says so instead."""
    inputs = Case((2,), 32, 32, 16).draw(torch.bfloat16, DEVICE)
    with pytest.raises(TypeError, match="bfloat16"):
        run_attention(flash_function("triton"), inputs, False)


# Reproducibility, and memory that nobody wrote.


@both_flash
def test_repeated_runs_are_bit_equal(flash):
    """dq sums over many key tiles, dk and dv over many query tiles; no atomics, so no order to vary."""
    inputs = Case((1, 2), 200, 200, 64).draw(torch.float32, DEVICE)
    first, second = (run_attention(flash_function(flash), inputs, True) for _ in range(2))
    assert equal(first, second)
    assert_within_budget(first, inputs, True)


def fresh_memory_filled(monkeypatch: pytest.MonkeyPatch, value: float) -> set[int]:
    """Tensors that nobody has written hold `value` from now on; the addresses of such tensors are put into the set."""
    addresses: set[int] = set()

    def filled(make):
        def made(*arguments, **options):
            x = make(*arguments, **options)
            addresses.add(x.data_ptr())
            return x.fill_(min(value, torch.finfo(x.dtype).max)) if x.is_floating_point() else x

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))
    return addresses


WRITTEN = [
    *[(Case((2,), *lengths, 16), torch.float32) for lengths in ((65, 65), (3, 150), (150, 3))],
    *[(Case((2,), *lengths, 64), torch.float16) for lengths in ((1, 70), (70, 1))],
    *[(Case((2,), 50, 70, d), torch.float16) for d in (33, 40, 64, 72, 128)],
    *[(Case((2,), 50, 70, d), torch.float32) for d in (33, 40, 64, 72, 128) if NATIVE],
]


@pytest.mark.parametrize(("case", "dtype"), WRITTEN, ids=str)
@both_causal
@both_flash
def test_every_element_is_written(flash, is_causal, case, dtype, monkeypatch):
    """Whatever fresh memory holds, none of it is left in any result, nor has any of it been read.

    With 3 queries and 150 causal keys, whole tiles of dk and dv are of keys that no query sees: zeros, not leftovers.
    """
    inputs, results = case.draw(dtype, DEVICE), []
    for value in (0.0, float("nan"), 3e38):
        with monkeypatch.context() as patch:
            filled = fresh_memory_filled(patch, value)
            results.append(run_attention(flash_function(flash), inputs, is_causal))
        assert {x.data_ptr() for x in (results[-1].o, results[-1].L, results[-1].dk, results[-1].dv)} <= filled
    assert_within_budget(results[0], inputs, is_causal)
    assert all(equal(results[0], other, flash) for other in results[1:])


@pytest.mark.parametrize("case", [Case((2,), 65, 65, 16), Case((2,), 3, 150, 3)], ids=str)
@both_causal
@both_flash
def test_deterministic_mode_changes_nothing(flash, is_causal, case):
    """There torch.empty gives NaN rather than whatever the memory holds."""
    inputs = case.draw(torch.float32, DEVICE)
    plain = run_attention(flash_function(flash), inputs, is_causal)
    with deterministic_algorithms():
        assert equal(plain, run_attention(flash_function(flash), inputs, is_causal))


@pytest.mark.parametrize("case", [Case((2, 2), 33, 50, 3), Case((2, 2), 65, 20, 16)], ids=str)
@both_causal
@both_flash
def test_nothing_outside_the_inputs_counts(flash, is_causal, case):
    """Inputs lie in memory that is NaN before, after and between their rows, and none gets in."""

    def among_nans(x):
        *leading, n, d = x.shape
        memory = torch.full((*leading, n + 64, d + 5), float("nan"), dtype=x.dtype, device=x.device)
        view = memory[..., 32 : 32 + n, 2 : 2 + d]
        view.copy_(x)
        return view

    inputs = case.draw(torch.float32, DEVICE)
    surrounded = Inputs(*(among_nans(x) for x in inputs))
    assert_within_budget(run_attention(flash_function(flash), surrounded, is_causal), inputs, is_causal)


@needs_gpu
@needs_triton
def test_more_heads_than_a_launch_grid_has_rows():
    """65,536 heads, where the second dimension of a launch ends at 65,535."""
    inputs = Case((16384, 4), 16, 16, 16).draw(torch.float16, DEVICE)
    assert_within_budget(run_attention(flash_function("triton"), inputs, True), inputs, True)


@both_causal
def test_float64_is_float64(is_causal):
    """The tiled version accumulates float64 in float64."""
    inputs = Case((2,), 150, 140, 8).draw(torch.float64, DEVICE)
    result, exact = run_attention(FlashAttention2Pytorch.apply, inputs, is_causal), dense_attention(inputs, is_causal)
    for name in TENSORS:
        assert largest_error(getattr(result, name), getattr(exact, name)) < 1e-13, name


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("factor", [3, 10], ids="times{}".format)
@both_flash
def test_peaked_softmax_in_float32(flash, factor, d):
    """With large scores one key has nearly all the weight, and P = exp(S - L) in the backward is near 1 only if S is
    rounded as it was when L was made of it.
    """
    for seed in range(3):
        q, k, v, dO = Case((1,), 128, 128, d).draw(torch.float32, DEVICE, seed)
        inputs = Inputs(q * factor, k * factor, v, dO)
        assert_within_budget(run_attention(flash_function(flash), inputs, False), inputs, False)


@pytest.mark.parametrize("alike", [False, True], ids=["each its own", "one dO for all queries"])
@pytest.mark.parametrize("d", [1, 3, 64])
@both_flash
def test_one_key_of_many_queries_in_float32(flash, d, alike):
    """dk is zero, and what is computed the roundings of dP and delta, summed over all queries: in the worst case, one
    dO and q of one sign, as many roundings the same way.
    """
    for drawn in range(2 if flash == "triton" and INTERPRETED else 8):
        inputs = Case((3,), 482, 1, d).draw(torch.float32, DEVICE, seed=drawn, uniform=alike)
        if alike:
            inputs = inputs._replace(dO=inputs.dO[:, :1].expand_as(inputs.dO))
        assert_within_budget(run_attention(flash_function(flash), inputs, False), inputs, False)


@both_causal
@both_flash
def test_scores_of_minus_infinity_at_the_start(flash, is_causal):
    """A query whose first tile of keys has no finite score waits for the next; -inf - (-inf) would be NaN for good."""
    q, k, v, _ = Case((1,), 100, 150, 16).draw(torch.float32, DEVICE)
    k[:, :140] = -1e25
    o = flash_function(flash)(q.abs() * 1e15, k, v, is_causal)
    if is_causal:
        assert not o.any()  # no query sees a finite score
    else:
        exact = dense_attention(Inputs(q.abs() * 1e15, k, v, torch.zeros_like(q)), False)
        torch.testing.assert_close(o.double(), exact.o, rtol=0, atol=1e-5)


@pytest.mark.parametrize("flash", ["pytorch", pytest.param("triton", marks=needs_triton), "dense backward"])
def test_gradients_of_a_query_without_a_finite_score(flash, monkeypatch):
    """Its P is 0: exp(-inf - (-inf)) would make NaN of all of dk and dv, and of dq itself."""
    if flash == "dense backward":
        skip_if(triton_missing_reason())
        without_inductor_on_cpu(monkeypatch)
        attention = FlashAttention2TritonDenseBackward.apply
    else:
        attention = flash_function(flash)
    q, k, v, dO = Case((1,), 40, 40, 16).draw(torch.float32, DEVICE)
    q, k = q * 1e-19, -k.abs() * 1e19
    q[:, 7] = 1e20
    result = run_attention(attention, Inputs(q, k, v, dO), False)
    for gradient in (result.dq, result.dk, result.dv):
        assert gradient is not None and gradient.isfinite().all()
    assert result.dq is not None and not result.dq[:, 7].any()


@both_flash
def test_keys_of_minus_infinity_at_the_end(flash):
    """Padding by keys of -inf: they have no weight and no gradient, also beside queries past a ragged edge, whose zeros
    times -inf are NaN. dq is not compared: dS = 0 times such a key is NaN in it.
    """
    q, k, v, dO = Case((1,), 100, 150, 16).draw(torch.float32, DEVICE)
    q[..., 0] = 1
    k[:, -20:, 0] = float("-inf")
    result = run_attention(flash_function(flash), Inputs(q, k, v, dO), False)
    assert result.dk is not None and result.dv is not None
    assert not result.dk[:, -20:].any() and not result.dv[:, -20:].any()
    without = dense_attention(Inputs(q, k[:, :-20], v[:, :-20], dO), False)
    torch.testing.assert_close(result.o.double(), without.o, rtol=0, atol=1e-5)


# NaN and infinity have to be seen.

HALF_TYPES = (torch.float16, torch.bfloat16)

SPOILT_ROW, SPOILT_COLUMN = 70, 5
SPOILT_HEADS = [(name, value) for value in (math.nan, math.inf) for name in Inputs._fields]


def not_finite(x: torch.Tensor, where: torch.Tensor) -> bool:
    """Whether no entry of x that `where` picks is finite; it has to pick some."""
    assert where.any()
    return not x[where.expand_as(x)].isfinite().any()


def untouched(x: torch.Tensor, before: torch.Tensor, name: str, in_any_order: bool) -> bool:
    """Whether the bits are the same, or of a dq that is summed in no fixed order the numbers nearly."""
    if name == "dq" and in_any_order:
        return largest_error(x, before) <= 2e-2 * largest_magnitude(before)
    return torch.equal(x, before)


@pytest.mark.parametrize(
    ("dtype", "d"),
    [(torch.float32, 16), (torch.float16, 64), (torch.bfloat16, 64), *[(t, 128) for t in HALF_TYPES if NATIVE]],
    ids=str,
)
@both_causal
@pytest.mark.parametrize("name", ["naive", "flash_pytorch", "flash_triton"])
def test_what_is_not_finite_is_seen(name, is_causal, dtype, d):
    """One entry of row 70 of q, k, v or dO is NaN or infinity, each in a head of its own, beside heads without any.

    A query is spoilt where the entry makes its scores, its output or its dP not finite. Then none of its dq is finite,
    nor any of dk of the keys that it sees; of o, L and dv it depends on the tensor. Heads without such an entry keep
    their bits, and so does what does not depend on the tensor. More of a spoilt head may be lost: in a tile an entry
    that is masked, or has no weight, is multiplied by 0, and 0 times NaN is NaN.
    """
    skip_if(ATTENTION[name].unsupported_reason(DEVICE, dtype, d))
    attention, n, heads = ATTENTION[name].function, 150, len(SPOILT_HEADS) + 1
    one = Case((1,), n, n, d).draw(dtype, DEVICE)
    clean = Inputs(*(x.repeat(heads, 1, 1) for x in one))
    spoilt = Inputs(*(x.clone() for x in clean))
    for head, (changed, value) in enumerate(SPOILT_HEADS):
        getattr(spoilt, changed)[head, SPOILT_ROW, SPOILT_COLUMN] = value
    # The interpreter's kernels compute each head by itself, slowly: there one is enough.
    usual = run_attention(attention, one if name == "flash_triton" and INTERPRETED else clean, is_causal)
    result, exact = run_attention(attention, spoilt, is_causal), dense_attention(spoilt, is_causal)
    assert exact.dv is not None
    in_any_order = name == "flash_triton" and NATIVE and launch_hopper.suits(DEVICE, dtype, d)
    rows, columns = (torch.arange(size, device=DEVICE) for size in (n, d))
    sees = rows[:, None] >= rows if is_causal else torch.ones(n, n, dtype=torch.bool, device=DEVICE)
    here = columns == SPOILT_COLUMN

    for head in range(heads):
        changed, value = SPOILT_HEADS[head] if head < len(SPOILT_HEADS) else (None, 0)
        got, before = ({t: getattr(x, t) for t in TENSORS if getattr(x, t) is not None} for x in (result, usual))
        got, before = {t: x[head] for t, x in got.items()}, {t: x[min(head, len(x) - 1)] for t, x in before.items()}
        kept = {"q": "", "k": "", "v": "L dv", "dO": "o L", None: "o L dq dk dv"}[changed].split()
        for tensor in set(kept) & set(got):
            assert untouched(got[tensor], before[tensor], tensor, in_any_order), (tensor, changed, value)
        if changed is None:
            continue

        queries = rows == SPOILT_ROW if changed in ("q", "dO") else sees[:, SPOILT_ROW]
        if changed == "k":  # a score of -infinity is no weight: NaN and +infinity spoil a query
            queries = queries & ~exact.o[head].isfinite().all(-1)
        keys = sees[queries].any(0)
        lost = {"dq": queries[:, None], "dk": keys[:, None]}
        if changed == "v":
            lost["o"] = queries[:, None] & here
        elif changed == "dO":
            lost["dv"] = keys[:, None] & here
        else:
            # Beside a score of +infinity the others have no weight, and their dv may be finite.
            lost |= {"o": queries[:, None], "L": queries, "dv": keys[:, None] & ~exact.dv[head].isfinite()}
        for tensor in set(lost) & set(got):
            assert not_finite(got[tensor], lost[tensor]), (tensor, changed, value)
