"""Leading dimensions, empty tensors and strides, small and huge, of what the FlashAttention-2 Functions take."""

import gc
import mmap
import sys

import pytest
import torch
import torch.nn.functional as F

from cs336_systems import launch, layouts

from .layouts import LAYOUTS, column_major, off_by_one_element, slice_of_fused, transposed, windows
from .machine import DEVICE, NATIVE, both_causal, both_flash, flash_function, needs_gpu, needs_triton
from .reference import TENSORS, Case, Inputs, assert_within_budget, largest_error, run_attention

STRIDED = Case((2, 16), 513, 513, 64) if NATIVE else Case((2, 3), 37, 37, 16)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@both_flash
def test_strides_of_inputs_and_gradient(flash, layout):
    """Values count, not where they lie."""
    inputs = STRIDED.draw(torch.float32, DEVICE)
    laid_out = Inputs(*(layout(x) for x in inputs))
    assert all(torch.equal(x, y) for x, y in zip(laid_out, inputs, strict=True))
    assert_within_budget(run_attention(flash_function(flash), laid_out, True), inputs, True)


@both_flash
def test_a_different_layout_for_each_input(flash):
    """One launch takes q transposed, k contiguous, v from a fused projection, dO by columns."""
    q, k, v, dO = inputs = STRIDED.draw(torch.float16, DEVICE)
    mixed = Inputs(transposed(q), k, slice_of_fused(v), column_major(dO))
    assert_within_budget(run_attention(flash_function(flash), mixed, True), inputs, True)


@pytest.mark.parametrize("n_queries", [1, 100])
@pytest.mark.parametrize("d", [64, 128, 256])
@both_causal
@both_flash
def test_one_key_beside_queries_off_by_one_element(flash, is_causal, d, n_queries):
    """ptxas 12.8 crashes on a causal kernel that reads one key by descriptor and queries by pointer."""
    inputs = Case((3, 1), n_queries, 1, d).draw(torch.float16, DEVICE)
    beside = inputs._replace(q=off_by_one_element(inputs.q))
    assert_within_budget(run_attention(flash_function(flash), beside, is_causal), inputs, is_causal)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@both_flash
def test_windows_that_overlap(flash, dtype):
    """Memory order would put the rows of o inside of its columns, where no copy engine writes."""
    inputs = Inputs(*map(windows, Case((2, 3), 32, 40, 64).draw(dtype, DEVICE)))
    assert inputs.q.stride()[-2:] == (1, 1) and layouts.empty_output_like(inputs.q).is_contiguous()
    assert_within_budget(run_attention(flash_function(flash), inputs, True), inputs, True)


EXPANSIONS = {
    "heads": lambda x: x[:, :1].expand_as(x),
    "batch": lambda x: x[:1].expand_as(x),
    "rows": lambda x: x[..., :1, :].expand_as(x),
    "columns": lambda x: x[..., :1].expand_as(x),
}


@pytest.mark.parametrize("over", ["heads", "batch"])
def test_expanded_inputs_are_not_copied(over):
    """The copy engine reads steps of 0; outputs are written, and have none."""
    x = EXPANSIONS[over](STRIDED.draw(torch.float16, DEVICE).k)
    assert 0 in x.stride() and layouts.readable(x) is x and layouts.copyable_strides(x) == x.stride()
    assert 0 not in layouts.empty_output_like(x).stride()


def test_expanded_rows_are_copied():
    """Rows in one place are slow to read, unless there is but one."""
    x = EXPANSIONS["rows"](STRIDED.draw(torch.float16, DEVICE).k)
    copy = layouts.readable(x)
    assert x.stride(-2) == 0 and copy.is_contiguous() and torch.equal(copy, x)
    single = x[..., :1, :]
    assert single.stride(-2) == 0 and layouts.readable(single) is single


@pytest.mark.parametrize("over", EXPANSIONS)
@both_flash
def test_expanded_inputs(flash, over):
    """Stride 0 over heads (as grouped queries have), batch, rows or columns; gradients are full size."""
    inputs = Inputs(*(EXPANSIONS[over](x) for x in STRIDED.draw(torch.float32, DEVICE)))
    assert_within_budget(run_attention(flash_function(flash), inputs, True), inputs, True)


@both_flash
def test_gradient_of_a_sum(flash):
    """o.sum().backward() hands over one element with stride 0 everywhere."""
    inputs = STRIDED.draw(torch.float32, DEVICE)
    inputs = inputs._replace(dO=torch.ones((), device=DEVICE).expand_as(inputs.q))
    assert inputs.dO.stride() == (0, 0, 0, 0)
    assert_within_budget(run_attention(flash_function(flash), inputs, False), inputs, False)


@both_flash
def test_gradient_through_transpose_and_projection(flash):
    """Behind o.transpose(1, 2) and a linear layer dO is transposed, and counts as its dense copy."""
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
    """Any number of leading dimensions, none too; o and L keep them."""
    inputs = Case(leading, 20, 35, 16).draw(torch.float32, DEVICE)
    result = run_attention(flash_function(flash), inputs, is_causal)
    assert result.L is not None and result.L.shape == (*leading, 20)
    assert_within_budget(result, inputs, is_causal)


@both_flash
def test_leading_dimensions_that_no_view_can_merge(flash):
    """Three leading dimensions, transposed among themselves, have no single stride."""
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
        Case((2, 1, 2), 0, 7, 16),
        Case((2, 0, 2), 5, 7, 16),
        Case((), 130, 0, 3),
    ],
    ids=str,
)
@both_causal
@both_flash
def test_empty_tensors(flash, is_causal, case):
    """No keys give o = 0, L = -inf and dq = 0; no queries give dk = dv = 0; no heads nothing."""
    inputs = case.draw(torch.float32, DEVICE)
    result = run_attention(flash_function(flash), inputs, is_causal)
    assert result.L is not None
    assert_within_budget(result, inputs, is_causal)


@pytest.fixture
def memory_given_back():
    """Leaves the GPU's memory to other processes: PyTorch's allocator would keep the largest blocks."""
    yield
    if NATIVE:
        gc.collect()
        torch.cuda.empty_cache()


def untouched_memory(n: int, dtype: torch.dtype) -> torch.Tensor:
    """A buffer of n elements on the device. On a CPU it takes no memory but for the pages that are touched."""
    if NATIVE:
        try:
            return torch.empty(n, dtype=dtype, device=DEVICE)
        except torch.OutOfMemoryError:
            pytest.skip(f"needs {n * dtype.itemsize / 2**30:.0f} GiB of free GPU memory")
    if sys.platform != "linux":
        pytest.skip("needs Linux, to reserve addresses without memory")
    no_reserve = 0x4000  # MAP_NORESERVE, which Python's mmap does not name
    try:
        memory = mmap.mmap(-1, n * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    except OSError as error:
        pytest.skip(f"needs addresses for {n * dtype.itemsize / 2**30:.0f} GiB: {error}")
    return torch.frombuffer(memory, dtype=dtype)


def far_apart(inputs: Inputs, dim: int, step: int) -> Inputs:
    """The inputs side by side in one buffer, `step` elements from one index of dimension `dim` to the next.

    They begin 2^31 elements after the buffer's beginning: an offset that wraps around in 32 bits is still inside of it,
    and what is there is not theirs, but no crash.
    """
    before = 0 if NATIVE else 2**31
    buffer = untouched_memory(before + step * (inputs.q.shape[dim] - 1) + inputs.q[0].numel() * 4, inputs.q.dtype)
    views = []
    for position, x in enumerate(inputs):
        strides = [4 * stride for stride in x.stride()]  # four tensors share each row
        strides[dim], strides[-1] = step, 1
        view = buffer.as_strided(x.shape, strides, before + position * x.shape[-1])
        views.append(view.copy_(x))
    return Inputs(*views)


far_apart_along = pytest.mark.parametrize(
    ("case", "dim", "step"),  # in elements; so many steps pass 2^31
    [
        (Case((5, 2), 40, 40, 16), 0, 2**29),
        (Case((5,), 40, 40, 16), 0, 2**29),
        (Case((1,), 5, 5, 16), 1, 2**29),
        (Case((1,), 70, 70, 16), 1, 2**25),
    ],
    ids=["batch", "heads", "rows", "tiles"],
)


@pytest.mark.parametrize("off", [64, 65], ids=["aligned", "unaligned"])
@far_apart_along
@pytest.mark.usefixtures("memory_given_back")
@both_flash
def test_offsets_past_32_bits(flash, case, dim, step, off):
    """Over more than 4 GiB an offset computed in 32 bits would wrap. Aligned steps go by descriptor."""
    compact = case.draw(torch.float16, DEVICE)
    apart = far_apart(compact, dim, step + off)
    assert_within_budget(run_attention(flash_function(flash), apart, True), compact, True)


@far_apart_along
@pytest.mark.usefixtures("memory_given_back")
@needs_triton
def test_offsets_of_outputs_past_32_bits(case, dim, step):
    """Kernels write where an output's strides say. Those of the Function's own outputs leave no gaps."""
    q, k, v, dO = compact = case.draw(torch.float16, DEVICE)
    expected = run_attention(lambda *inputs: flash_function("triton")(*inputs, False), compact, True)
    o, dq, dk, dv = far_apart(Inputs(*map(torch.zeros_like, compact)), dim, step + 65)
    L, L_base, delta = (torch.empty(q.shape[:-1], dtype=torch.float32, device=DEVICE) for _ in range(3))
    for kernel, inputs, outputs in (
        (launch._FORWARD, (q, k, v), (o, L)),
        (launch._DQ, (q, k, v, expected.o, dO, L), (dq, L_base, delta)),
        (launch._DK_DV, (q, k, v, dO, L_base, delta), (dk, dv)),
    ):
        launch.launch_kernel(kernel, launch.launches_for(True, None, *inputs, *outputs), inputs, outputs)
    for name, got in (("o", o), ("dq", dq), ("dk", dk), ("dv", dv)):
        assert torch.equal(got, getattr(expected, name)), name


@needs_gpu
@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.usefixtures("memory_given_back")
def test_more_than_two_to_the_31_elements(hopper):
    """4,160 heads of 8192 x 64 are 2.2e9 elements: the last head is what it is alone, forward and backward.

    But for the order in which Hopper's own kernels add up dq.
    """
    case = Case((65, 64), 8192, 8192, 64)
    shape = (*case.leading, case.n_queries, case.d)

    def attention(q, k, v, is_causal):
        return flash_function("triton")(q, k, v, is_causal, hopper)

    try:
        inputs = Inputs(*(torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(4)))
        everything = run_attention(attention, inputs, True)
    except torch.OutOfMemoryError:
        pytest.skip("needs some 45 GiB of free GPU memory")
    alone = run_attention(attention, Inputs(*(x[-1, -1].clone() for x in inputs)), True)
    for name in TENSORS:
        last, one = getattr(everything, name)[-1, -1], getattr(alone, name)
        assert torch.equal(last, one) or (hopper and name == "dq" and largest_error(last, one) < 2e-2 * one.abs().max())
