"""Every implementation, causal and not, in every dtype, on ragged and unequal lengths, against float64.

On the interpreter sizes are small and bfloat16 is skipped; on a GPU the same cases run in every dtype, and larger ones.
"""

import pytest
import torch

from cs336_systems.attention import ATTENTION
from cs336_systems.dense_backward import FlashAttention2TritonDenseBackward

from .layouts import negative_view
from .machine import (
    DEVICE,
    both_causal,
    compile_missing_reason,
    needs_gpu,
    needs_triton,
    skip_if,
)
from .reference import Case, Inputs, assert_within_budget, run_attention

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16

every_dtype = pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=["float32", "float16", "bfloat16"])
every_implementation = pytest.mark.parametrize("name", ["naive", "flash_pytorch", "flash_triton"])

# Ragged and unequal, below, at and above one tile, longer on either side, and with a last tile of one row.
SMALL_CASES = [
    Case((2, 2), 65, 65, 16),
    Case((2,), 33, 100, 16),
    Case((2,), 129, 31, 32),
    Case((3,), 2, 5, 64),
]
# Each stands for its kind: one column, below the smallest tl.dot, no power of two, and the largest.
HEAD_DIMS = [1, 3, 16, 40, 64, 80, 96, 128, 256]
LARGE_CASES = [
    Case((2, 3), 192, 192, 16),
    Case((2, 3), 4250, 4250, 16),
    Case((1, 4), 1024, 1024, 64),
    Case((2, 2), 1000, 777, 128),
    Case((2, 2), 300, 1333, 80),
    Case((1, 2), 515, 515, 256),
    Case((40,), 130, 130, 96),
]


def skip_unless_runnable(name: str, dtype: torch.dtype, d: int) -> None:
    """Skips where this machine cannot run the implementation in this dtype and head dim, with the reason."""
    skip_if(ATTENTION[name].unsupported_reason(DEVICE, dtype, d))
    if ATTENTION[name].compiled:
        skip_if(compile_missing_reason())


def check(name: str, case: Case, dtype: torch.dtype, is_causal: bool) -> None:
    skip_unless_runnable(name, dtype, case.d)
    inputs = case.draw(dtype, DEVICE)
    assert_within_budget(run_attention(ATTENTION[name].function, inputs, is_causal), inputs, is_causal)


@both_causal
@every_dtype
@pytest.mark.parametrize("case", SMALL_CASES, ids=str)
@every_implementation
def test_ragged_and_unequal_lengths(name, case, dtype, is_causal):
    """Tile edges that fall inside the lengths, and the diagonal where queries and keys differ in number."""
    check(name, case, dtype, is_causal)


@every_dtype
@pytest.mark.parametrize("d", HEAD_DIMS, ids="d{}".format)
@every_implementation
def test_head_dims(name, d, dtype):
    """Any d from 1 to 256, with the scale of the true d, not of the padded one."""
    check(name, Case((2,), 40, 50, d), dtype, is_causal=True)


@both_causal
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 63, 64, 128, 150])
@every_implementation
def test_lengths_around_tiles(name, n, is_causal):
    """Lengths just below, at and above tile sizes."""
    check(name, Case((2,), n, n, 16), FLOAT32, is_causal)


@pytest.mark.parametrize(
    ("dtype", "is_causal"), [(FLOAT32, True), (BFLOAT16, False)], ids=["float32-causal", "bfloat16-full"]
)
def test_compiled(dtype, is_causal):
    """The compiled attention on few shapes: on a CPU each takes seconds to compile."""
    check("compiled", Case((2,), 33, 50, 16), dtype, is_causal)


@needs_triton
@both_causal
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16], ids=["float32", "float16"])
def test_dense_backward(dtype, is_causal):
    """The assignment's first backward, dense and compiled, behind the kernels' forward; each case is compiled anew."""
    skip_if(compile_missing_reason())
    torch.compiler.reset()
    inputs = Case((2,), 33, 50, 16).draw(dtype, DEVICE)
    assert_within_budget(run_attention(FlashAttention2TritonDenseBackward.apply, inputs, is_causal), inputs, is_causal)


@needs_triton
def test_dense_backward_of_a_gradient_that_is_a_negative_view():
    """torch.compile overlooks the bit that says so; and all five arguments get their gradient, or none."""
    skip_if(compile_missing_reason())
    torch.compiler.reset()
    q, k, v, dO = Case((2,), 33, 50, 16).draw(FLOAT32, DEVICE)
    inputs = Inputs(q, k, v, negative_view(dO))

    def attention(q, k, v, is_causal):
        return FlashAttention2TritonDenseBackward.apply(q, k, v, is_causal, False)

    assert_within_budget(run_attention(attention, inputs, True), inputs, True)


@needs_gpu
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", SMALL_CASES + LARGE_CASES, ids=str)
def test_compiled_on_a_gpu(case, dtype):
    """The compiled attention on every shape, each compiled anew: with a past the compiler would generalise lengths."""
    torch.compiler.reset()
    check("compiled", case, dtype, is_causal=True)


@needs_gpu
@both_causal
@every_dtype
@pytest.mark.parametrize("case", LARGE_CASES, ids=str)
@every_implementation
def test_large(name, case, dtype, is_causal):
    """Many tiles a row and many heads, in every dtype."""
    check(name, case, dtype, is_causal)


@pytest.mark.parametrize("name", ["naive", "compiled", "flash_pytorch", "flash_triton"])
def test_causal_is_top_left(name):
    """With 2 queries and 5 keys the first query sees the first key alone, so o[0] = v[0]."""
    case = Case((), 2, 5, 16)
    skip_unless_runnable(name, FLOAT32, case.d)
    inputs = case.draw(FLOAT32, DEVICE)
    result = run_attention(ATTENTION[name].function, inputs, True)
    torch.testing.assert_close(result.o[0], inputs.v[0])
    assert result.dk is not None and result.dv is not None
    assert not result.dk[2:].any() and not result.dv[2:].any(), "keys that no query sees have a gradient"
    assert_within_budget(result, inputs, True)
