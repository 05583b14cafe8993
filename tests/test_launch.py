"""launch: what a second launch for tensors of one layout reuses, and what it must not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cs336_systems import launch, layouts
from cs336_systems.kernels.tiles import KIB, Gpu, Tile

from .layouts import LAYOUTS, batch_last, contiguous, off_by_one_element, slice_of_fused, transposed
from .machine import DEVICE, INTERPRETED, both_causal, flash_function, needs_triton
from .reference import TENSORS, Case, Inputs, run_attention

TILE = Tile(64, 64, 4, 2, by_descriptor=True)
SHAPE = (2, 3, 40, 16)

pytestmark = needs_triton


class FakeKernel:
    """Stands in for a kernel and for what Triton compiles of it, and records how each is called."""

    def __init__(self, like: Any) -> None:
        self.arg_names = like.arg_names
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid):
        def launched(*arguments, **options):
            self.calls.append(("front end", *grid, *map(plain, arguments)))
            return self.compiled

        return launched

    @property
    def compiled(self):
        def of(grid):
            return lambda *arguments: self.calls.append(("compiled", *grid, *map(plain, arguments)))

        return type("Compiled", (), {"__getitem__": staticmethod(of)})()


def plain(argument: Any) -> Any:
    """An argument with addresses in place of tensors, as the kernel sees it."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if hasattr(argument, "base"):  # a descriptor
        return plain(argument.base), tuple(argument.shape), tuple(argument.strides), argument.padding
    return tuple(map(plain, argument)) if isinstance(argument, tuple) else argument


@pytest.fixture
def kernel(monkeypatch) -> FakeKernel:
    """In place of the forward kernel, on a GPU that is not there, with nothing prepared."""
    fake = FakeKernel(launch.forward_kernels.flash_forward_kernel)
    monkeypatch.setattr(launch, "forward_kernels", SimpleNamespace(flash_forward_kernel=fake))
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    monkeypatch.setattr(launch, "gpu_of", lambda device: Gpu("mocked", (9, 0), 227 * KIB))
    monkeypatch.setattr(launch, "TESTED_TRITON", True)
    monkeypatch.setattr(launch, "_prepared", {})
    return fake


def drawn(shape=SHAPE, dtype=torch.float16, layout=contiguous):
    return tuple(layout(torch.randn(shape, device=DEVICE).to(dtype)) for _ in range(3))


@pytest.mark.parametrize("layout", [contiguous, *LAYOUTS])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 2, 3)], ids=str)
def test_a_second_launch_takes_the_addresses_of_its_own_tensors(kernel, leading, layout):
    if len(leading) < 2 and layout in (transposed, batch_last):
        pytest.skip("there are no two dimensions to exchange")
    first, second = (tuple(map(layouts.readable, drawn((*leading, 40, 16), layout=layout))) for _ in range(2))
    results = [launch.launch_forward(*each, True, TILE) for each in (first, second)]
    launch._prepared.clear()
    results.append(launch.launch_forward(*second, True, TILE))
    (how_1, *_), (how_2, blocks, *after), (how_3, n, *expected) = kernel.calls
    assert (how_1, how_2, how_3) == ("front end", "compiled", "front end")
    assert (blocks, *after[:2]) == (n, 1, 1)
    renamed = {x.data_ptr(): y.data_ptr() for x, y in zip(results[2], results[1], strict=True)}

    def with_outputs_of_the_second(value):
        return tuple(map(with_outputs_of_the_second, value)) if isinstance(value, tuple) else renamed.get(value, value)

    assert tuple(after[2:]) == with_outputs_of_the_second(tuple(expected))


def test_outputs_of_other_strides_go_through_the_front_end(kernel):
    """A caller may lay out its outputs as it likes, whatever the inputs' layout."""
    q, k, v = drawn()
    for o in (torch.empty_like(q), q.new_empty(2, 3, 16, 40).mT, torch.empty_like(q)):
        launch.launch_kernel(launch._FORWARD, TILE, True, (q, k, v), (o, q.new_empty(SHAPE[:-1])))
    assert [how for how, *_ in kernel.calls] == ["front end", "front end", "compiled"]


@pytest.mark.parametrize(
    "changed",
    [
        lambda: (*drawn(dtype=torch.bfloat16), True, TILE),
        lambda: (*drawn((2, 3, 41, 16)), True, TILE),
        lambda: (*drawn((3, 2, 40, 16)), True, TILE),
        lambda: (*drawn(layout=transposed), True, TILE),
        lambda: (*drawn()[:2], drawn(layout=slice_of_fused)[2], True, TILE),
        lambda: (*drawn()[:2], drawn(layout=off_by_one_element)[2], True, TILE),
        lambda: (*drawn(), False, TILE),
        lambda: (*drawn(), True, Tile(64, 64, 4, 3, by_descriptor=True)),
    ],
    ids=["dtype", "length", "heads", "strides", "strides of v", "alignment of v", "causal", "tile"],
)
def test_what_differs_goes_through_the_front_end(kernel, changed):
    launch.launch_forward(*drawn(), True, TILE)
    launch.launch_forward(
        *changed(),
    )
    launch.launch_forward(*drawn(), True, TILE)
    assert [how for how, *_ in kernel.calls] == ["front end", "front end", "compiled"]


def test_precision_is_asked_for_anew(kernel):
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            launch.launch_forward(*drawn(dtype=torch.float32), True, TILE)
    finally:
        torch.set_float32_matmul_precision(before)
    assert [how for how, *_ in kernel.calls] == ["front end", "front end"]


def test_other_versions_of_triton_launch_by_their_front_end(kernel, monkeypatch):
    monkeypatch.setattr(launch, "TESTED_TRITON", False)
    for _ in range(2):
        launch.launch_forward(*drawn(), True, TILE)
    assert [how for how, *_ in kernel.calls] == ["front end", "front end"]


def test_what_is_prepared_does_not_grow_without_end(kernel, monkeypatch):
    monkeypatch.setattr(launch, "MOST_PREPARED", 2)
    for n in range(1, 6):
        launch.launch_forward(*drawn((1, 1, n, 16)), True, TILE)
        assert len(launch._prepared) <= 2
    launch.launch_forward(*drawn((1, 1, 5, 16)), True, TILE)
    assert kernel.calls[-1][0] == "compiled"


def test_each_launch_is_reported(kernel):
    with launch.launched_kernels() as launched:
        for _ in range(2):
            launch.launch_forward(*drawn(), True, TILE)
    assert len(launched) == 2


@pytest.mark.parametrize("layout", [contiguous, *LAYOUTS])
@both_causal
def test_again_is_as_the_first_time(is_causal, layout):
    """Forward and backward for tensors at other addresses, once with all prepared and once with nothing."""
    first, second = (Case((1, 2), 20, 17, 64).draw(torch.float16, DEVICE, seed=seed) for seed in (1, 2))
    apply = flash_function("triton")
    run_attention(apply, Inputs(*map(layout, first)), is_causal)
    kept = len(launch._prepared)
    assert INTERPRETED or not launch.TESTED_TRITON or kept
    inputs = Inputs(*map(layout, second))
    again = run_attention(apply, inputs, is_causal)
    assert len(launch._prepared) == kept
    launch._prepared.clear()
    anew = run_attention(apply, inputs, is_causal)
    assert all(torch.equal(getattr(again, name), getattr(anew, name)) for name in TENSORS)
