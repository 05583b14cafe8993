"""launch: what a second launch for tensors of one layout reuses, and what it must not."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems import flash_triton, launch, launch_hopper, layouts, user_tiles
from cs336_systems.bench.measure import float32_precision
from cs336_systems.kernels.tiles import HOPPER, KIB, Gpu, Tile

from .layouts import LAYOUTS, batch_last, contiguous, off_by_one_element, slice_of_fused, transposed
from .machine import DEVICE, INTERPRETED, both_causal, flash_function, mock_gpu, needs_gpu, needs_triton
from .reference import TENSORS, Case, Inputs, run_attention

TILE = Tile(64, 64, 4, 2, by_descriptor=True)
SHAPE = (2, 3, 40, 16)

pytestmark = needs_triton


class FakeKernel:
    """Stands in for a kernel, for what Triton compiles of it and for the launcher in C, and records each launch."""

    def __init__(self, like: Any) -> None:
        self.arg_names = like.arg_names
        self.calls: list[tuple[Any, ...]] = []
        self.observed: list[tuple[Any, ...]] = []  # metadata and the hooks of each launch in C
        self.options: list[dict[str, Any]] = []  # Triton's, of each launch through its front end
        self.launcher: dict[str, Any] = {}  # what differs about the launcher
        self.encodes = True

    def __getitem__(self, grid):
        def launched(*arguments, **options):
            self.calls.append(("front end", *grid, *flat(arguments)))
            self.options.append(options)
            return self.compiled(sum(hasattr(x, "base") for x in arguments))

        return launched

    def compiled(self, n_descriptors: int) -> Any:
        def launcher(*arguments):
            blocks, _, _, stream, function, *_ = arguments
            assert (stream, function) == ("stream", "function")
            self.observed.append(arguments[10:13])
            self.calls.append(("in C", blocks, *arguments[13:]))

        def wrapped(*arguments):
            launcher(*arguments)

        facts = {"global_scratch_size": 0, "profile_scratch_size": 0, "launch_pdl": False} | self.launcher
        run = SimpleNamespace(launch=wrapped, **facts)
        return SimpleNamespace(
            run=run,
            function="function",
            packed_metadata=(4, 1, 0),
            launch_metadata=lambda grid, stream: (grid, stream),
            metadata=SimpleNamespace(tensordesc_meta=[{}] * n_descriptors if self.encodes else None),
        )


def flat(arguments: tuple[Any, ...]) -> list[Any]:
    """Arguments of the front end as the launcher in C takes them: addresses, and descriptors encoded and spread out."""
    spread = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            spread.append(argument.data_ptr())
        elif hasattr(argument, "base"):
            spread.extend(encoded(argument))
        elif isinstance(argument, tuple):
            spread.append((argument[0].data_ptr(), *argument[1:]))
        else:
            spread.append(argument)
    return spread


def encoded(descriptor: Any, encoding: Any = None) -> list[Any]:
    """In place of the driver's encoding: what it would be made of."""
    shape, strides = tuple(descriptor.shape), tuple(descriptor.strides)
    return [(descriptor.base.data_ptr(), shape, strides, descriptor.padding), *shape, *strides]


@pytest.fixture
def kernel(monkeypatch) -> FakeKernel:
    """In place of the forward kernel, on a GPU that is not there, with nothing prepared."""
    if not launch.TRITON_IS_TESTED:
        pytest.skip("launches are prepared for Triton 3.6")
    from cs336_systems import prepared

    monkeypatch.setattr(launch, "tiles_for", lambda q: launch._change(HOPPER[2, 64]))
    fake = FakeKernel(launch.forward_kernels.flash_forward_kernel)
    monkeypatch.setattr(launch, "forward_kernels", SimpleNamespace(flash_forward_kernel=fake))
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    mock_gpu(monkeypatch, Gpu("mocked", (9, 0), 227 * KIB))
    monkeypatch.setattr(prepared, "make_tensordesc_arg", encoded)
    current = torch.empty(0, device=DEVICE).device.index
    active = SimpleNamespace(get_current_stream=lambda device: "stream", get_current_device=lambda: current)
    monkeypatch.setattr(prepared, "driver", SimpleNamespace(active=active))
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
    launch._launches.clear()
    results.append(launch.launch_forward(*second, True, TILE))
    (how_1, *_), (how_2, blocks, *after), (how_3, n, *expected) = kernel.calls
    assert (how_1, how_2, how_3) == ("front end", "in C", "front end")
    assert blocks == n
    renamed = {x.data_ptr(): y.data_ptr() for x, y in zip(results[2], results[1], strict=True)}

    def with_outputs_of_the_second(value):
        return tuple(map(with_outputs_of_the_second, value)) if isinstance(value, tuple) else renamed.get(value, value)

    assert tuple(after) == with_outputs_of_the_second(tuple(expected))


CHANGED = {
    "dtype": lambda: (*drawn(dtype=torch.bfloat16), True, TILE),
    "length": lambda: (*drawn((2, 3, 41, 16)), True, TILE),
    "heads": lambda: (*drawn((3, 2, 40, 16)), True, TILE),
    "strides": lambda: (*drawn(layout=transposed), True, TILE),
    "strides of v": lambda: (*drawn()[:2], drawn(layout=slice_of_fused)[2], True, TILE),
    "alignment of v": lambda: (*drawn()[:2], drawn(layout=off_by_one_element)[2], True, TILE),
    "causal": lambda: (*drawn(), False, TILE),
    "tile": lambda: (*drawn(), True, Tile(64, 64, 4, 3, by_descriptor=True)),
    "tile of the table": lambda: (*drawn(), True),
}


@pytest.mark.parametrize("changed", CHANGED.values(), ids=CHANGED)
def test_what_differs_goes_through_the_front_end(kernel, changed):
    launch.launch_forward(*drawn(), True, TILE)
    launch.launch_forward(*changed())
    launch.launch_forward(*drawn(), True, TILE)
    assert [how for how, *_ in kernel.calls] == ["front end", "front end", "in C"]


def test_changed_tiles_are_not_mixed_up(kernel):
    for change in (lambda tiles: tiles, lambda tiles: replace(tiles, forward=TILE)):
        with launch.tiles_changed_by(change):
            launch.launch_forward(*drawn(), is_causal=True)
    launch.launch_forward(*drawn(), is_causal=True)
    launch.launch_forward(*drawn(), is_causal=True)
    assert [how for how, *_ in kernel.calls] == ["front end", "front end", "front end", "in C"]


def test_precision_is_asked_for_anew(kernel):
    for precision in ("highest", "high"):
        with float32_precision(precision):
            launch.launch_forward(*drawn(dtype=torch.float32), True, TILE)
    assert [how for how, *_ in kernel.calls] == ["front end", "front end"]


def test_other_versions_of_triton_launch_by_their_front_end(kernel, monkeypatch):
    monkeypatch.setattr(launch, "TRITON_IS_TESTED", False)
    for _ in range(2):
        launch.launch_forward(*drawn(), True, TILE)
    assert [how for how, *_ in kernel.calls] == ["front end", "front end"]


@pytest.mark.parametrize("fact", ["global_scratch_size", "profile_scratch_size", "launch_pdl", "descriptors"])
def test_what_cannot_be_prepared_goes_through_the_front_end(kernel, fact):
    """Kernels with scratch memory of Triton's; descriptors that come apart into pointers, where nothing copies them."""
    kernel.encodes = fact != "descriptors"
    kernel.launcher = {} if fact == "descriptors" else {fact: 128}
    for _ in range(2):
        launch.launch_forward(*drawn(), True, TILE)
    assert [how for how, *_ in kernel.calls] == ["front end", "front end"]


def test_products_are_rounded_before_sums_in_float32_alone(kernel):
    for dtype in (torch.float32, torch.float16):
        launch.launch_forward(*drawn(dtype=dtype), True, TILE)
    assert [options["enable_fp_fusion"] for options in kernel.options] == [False, True]


@both_causal
def test_heads_are_in_groups_under_a_mask_alone(kernel, is_causal):
    for _ in range(2):
        launch.launch_forward(*drawn(), is_causal, replace(TILE, head_group=4))
    assert [call[-1].HEAD_GROUP.value for call in kernel.calls] == 2 * [4 if is_causal else 1]


def test_more_programs_than_a_launch_has(kernel, monkeypatch):
    monkeypatch.setattr(launch, "MAX_PROGRAMS", 5)
    launch.launch_forward(*drawn((1, 5, 40, 16)), True, TILE)
    with pytest.raises(ValueError, match="6 heads of 40 rows take 6 programs; a launch has at most 5"):
        launch.launch_forward(*drawn((1, 6, 40, 16)), True, TILE)


def test_launches_are_those_of_one_device():
    x, elsewhere = torch.empty(2, 3), torch.empty(2, 3, device="meta")
    assert launch.launches_for(True, None, x) is launch.launches_for(True, None, x.clone())
    assert launch.launches_for(True, None, x) is not launch.launches_for(True, None, elsewhere)


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_profilers_see_prepared_launches(kernel, which):
    from triton import knobs

    def hook(metadata):
        pass

    for _ in range(2):
        launch.launch_forward(*drawn(), True, TILE)
    chain = getattr(knobs.runtime, which)
    chain.add(hook)
    try:
        launch.launch_forward(*drawn(), True, TILE)
    finally:
        chain.remove(hook)
    unseen, (metadata, *hooks) = kernel.observed
    assert unseen == (None, None, None)
    assert metadata[1] == "stream" and hooks == [knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook]


PORTABLE_KERNELS = {"flash_forward_kernel", "flash_backward_dq_kernel", "flash_backward_dk_dv_kernel"}


@needs_gpu
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("hopper", [True, False])
def test_profilers_see_later_launches_by_name(hopper, d):
    """PyTorch's profiler and Triton's hooks: every kernel of a forward and backward whose launches are prepared."""
    from triton import knobs

    inputs = Case((1, 2), 100, 100, d).draw(torch.float16, DEVICE)

    def attention(q, k, v, is_causal):
        return flash_function("triton")(q, k, v, is_causal, hopper)

    with launch.launched_kernels() as launched:
        run_attention(attention, inputs, True)
    names = [each.metadata.name for each in launched]
    by_hopper = hopper and launch_hopper.TURNED_ON and launch_hopper.suits(DEVICE, torch.float16, d)
    assert all("hopper" in name for name in names) if by_hopper else set(names) == PORTABLE_KERNELS
    seen: dict[str, list[str]] = {"enter": [], "exit": []}
    hooks = {way: lambda metadata, way=way: seen[way].append(metadata.get()["name"]) for way in seen}
    chains = {"enter": knobs.runtime.launch_enter_hook, "exit": knobs.runtime.launch_exit_hook}
    for way, hook in hooks.items():
        chains[way].add(hook)
    torch.cuda.synchronize()
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
            run_attention(attention, inputs, True)
            inputs.q.sin()
            torch.cuda.synchronize()
    finally:
        for way, hook in hooks.items():
            chains[way].remove(hook)
    assert seen == {"enter": names, "exit": names}
    profiled = [event.name for event in profiler.events() if event.device_type == DeviceType.CUDA]
    if not any("sin_kernel" in name for name in profiled):
        pytest.skip("the profiler sees no kernels here, PyTorch's neither")
    assert sorted(name for name in profiled if name in names) == sorted(names)


def test_descriptors_are_encoded_once_for_each_address(kernel, monkeypatch):
    from cs336_systems import prepared

    made = []
    monkeypatch.setattr(prepared, "make_tensordesc_arg", lambda *what: made.append(what) or encoded(*what))
    monkeypatch.setattr(prepared, "MOST_ENCODED", 2)
    monkeypatch.setattr(prepared, "MOST_FILLED", 0)  # or a launch that finds its arguments asks for no descriptors
    q, k, v = drawn()
    for _ in range(3):
        launch.launch_forward(q, k, v, True, TILE)
    assert len(made) == 3, "the first launch is the front end's, the second encodes, the third finds it all"
    others = [drawn() for _ in range(3)]
    for each in (*others, (q, k, v)):
        launch.launch_forward(*each, True, TILE)
    assert len(made) == 15, "after two addresses all are forgotten, and q's among them"


@needs_triton
@pytest.mark.parametrize(("n", "by_descriptor", "described"), [(8, True, True), (8, False, False), (6, True, False)])
def test_rows_of_L_come_by_descriptor_where_they_begin_at_16_bytes(n, by_descriptor, described):
    argument: Any = launch._per_query_in_tiles(torch.zeros(2, 3, n), replace(TILE, by_descriptor=by_descriptor))
    assert isinstance(argument, torch.Tensor) != described
    if described:
        assert argument.shape == [2, 3, 1, n] and argument.strides[:2] == [3 * n, n]
        assert argument.block_shape == [1, 1, 1, TILE.q_tile_size]


@pytest.mark.parametrize(("rows", "described"), [(1, False), (2, True)])
@pytest.mark.parametrize("takes", [launch._in_query_tiles, launch._in_key_tiles])
def test_a_single_row_comes_by_pointer(takes, rows, described):
    """ptxas crashes on a causal forward that reads one key by descriptor and queries by pointer."""
    x = torch.empty(2, 3, rows, 64, dtype=torch.float16, device=DEVICE)
    assert hasattr(takes(x, TILE), "block_shape") == described


def test_arguments_are_kept_for_the_same_addresses(kernel, monkeypatch):
    from cs336_systems import prepared

    monkeypatch.setattr(prepared, "MOST_FILLED", 2)
    filled, fill = [], prepared.Prepared._fill
    monkeypatch.setattr(prepared.Prepared, "_fill", lambda self, *what: filled.append(what[0]) or fill(self, *what))
    tensors = [(drawn(), layouts.empty_outputs(drawn()[0])) for _ in range(4)]
    launches = launch.launches_for(True, TILE, *tensors[0][0])
    for inputs, outputs in (tensors[0], *tensors[:2], *tensors[:2], *tensors, tensors[0]):
        launch.launch_kernel(launch._FORWARD, launches, inputs, outputs)
    addresses = [tuple(x.data_ptr() for x in (*inputs, *outputs)) for inputs, outputs in tensors]
    assert filled == [*addresses, addresses[0]], "after two all are forgotten"
    assert len(launches.prepared[launch._FORWARD].arguments_at) <= 2
    _, first, second, first_kept, second_kept, first_again, *_ = kernel.calls
    assert (first_kept, second_kept, first_again) == (first, second, first), "kept or not, they are the same"


def test_what_is_prepared_does_not_grow_without_end(kernel, monkeypatch):
    monkeypatch.setattr(launch, "MOST_LAUNCHES", 2)
    for n in range(1, 6):
        launch.launch_forward(*drawn((1, 1, n, 16)), True, TILE)
        assert len(launch._launches) <= 2
    launch.launch_forward(*drawn((1, 1, 5, 16)), True, TILE)
    assert kernel.calls[-1][0] == "in C"


def test_each_launch_is_reported(kernel):
    with launch.launched_kernels() as launched:
        launch.launch_forward(*drawn(), True, TILE)
        with launch.launched_kernels() as inner:
            launch.launch_forward(*drawn(), True, TILE)
    assert (len(launched), len(inner)) == (2, 1)


def test_a_table_that_is_written_counts_at_once(kernel, monkeypatch, tmp_path):
    """Also for layouts that were launched before."""
    monkeypatch.setattr(user_tiles, "times_written", user_tiles.times_written)
    for _ in range(2):
        launch.launch_forward(*drawn(), is_causal=True)
    user_tiles.write_user_table(tmp_path / "tiles.json", Gpu("mocked", (9, 0), 227 * KIB), 16, torch.float16, {})
    launch.launch_forward(*drawn(), is_causal=True)
    assert [how for how, *_ in kernel.calls] == ["front end", "in C", "front end"]


@pytest.mark.parametrize("layout", [contiguous, *LAYOUTS])
@both_causal
def test_again_is_as_the_first_time(is_causal, layout):
    """Forward and backward for tensors at other addresses, once with all prepared and once with nothing."""
    first, second = (Case((1, 2), 20, 17, 64).draw(torch.float16, DEVICE, seed=seed) for seed in (1, 2))
    apply = flash_function("triton")
    run_attention(apply, Inputs(*map(layout, first)), is_causal)
    kept = len(launch._launches)
    assert INTERPRETED or not launch.TRITON_IS_TESTED or kept
    inputs = Inputs(*map(layout, second))
    again = run_attention(apply, inputs, is_causal)
    assert len(launch._launches) == kept
    launch._launches.clear()
    anew = run_attention(apply, inputs, is_causal)
    assert all(torch.equal(getattr(again, name), getattr(anew, name)) for name in TENSORS)


def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is checked from now on; nothing was launched before."""
    checked: list[Any] = []
    check = flash_triton.attention_inputs

    def counted(*inputs):
        checked.append(inputs)
        return check(*inputs)

    monkeypatch.setattr(flash_triton, "attention_inputs", counted)
    monkeypatch.setattr(launch, "_launches", {})
    return checked


def test_inputs_are_checked_once_for_each_layout(monkeypatch):
    checked = looked_at(monkeypatch)
    apply = flash_function("triton")
    for shape, times in ((SHAPE, 1), (SHAPE, 1), ((1, 3, 20, 16), 2), (SHAPE, 2)):
        q, k, v = (x.requires_grad_() for x in drawn(shape))
        o = apply(q, k, v, True)
        o.backward(torch.ones_like(o))
        assert len(checked) == times
    apply(*drawn(), False)
    assert len(checked) == 3
    q, k, v = (x.mT.contiguous().mT for x in drawn())
    launch.launch_forward(q, k, v, True)  # without a check
    apply(q, k, v, True)
    assert len(checked) == 4


def test_inputs_are_compared_once_a_pass(monkeypatch):
    looked_at(monkeypatch)
    compared, compare = [], launch._likeness
    monkeypatch.setattr(launch, "_likeness", lambda *what: compared.append(what) or compare(*what))
    for _ in range(2):
        compared.clear()
        q, k, v = (x.requires_grad_() for x in drawn())
        o = flash_function("triton")(q, k, v, True)
        o.backward(torch.ones_like(o))
    assert [len(inputs) for *_, inputs in compared] == [3, 6]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda q, k, v: (q, k, v, 1), "is_causal must be True or False, got 1"),
        (lambda q, k, v: (q, k, v.float(), True), "must have one dtype"),
        (lambda q, k, v: (q, k.to("meta"), v, True), "must be on one device"),
        (lambda q, k, v: (q, k[:1], v[:1], True), "the same leading dimensions"),
        (lambda q, k, v: (q, k[..., :8, :], v, True), "k and v must have the same shape"),
        (lambda q, k, v: (q, k.to_sparse(), v, True), "k must be a dense tensor, got torch.sparse_coo"),
        (lambda q, k, v: (q, torch.nested.nested_tensor([*k]), v, True), "k must be a dense tensor, got a nested one"),
        (lambda q, k, v: (q, k, [v], True), "v must be a tensor, got list"),
    ],
    ids=["integer", "dtype", "device", "heads", "lengths", "sparse", "nested", "list"],
)
def test_nothing_else_gets_in_with_what_was_admitted(change, error, monkeypatch):
    looked_at(monkeypatch)
    q, k, v = drawn()
    for _ in range(2):
        flash_function("triton")(q, k, v, True)
    with pytest.raises((TypeError, ValueError), match=error):
        flash_function("triton")(*change(q, k, v))


def test_what_was_admitted_is_still_cast_and_negated(monkeypatch):
    looked_at(monkeypatch)
    apply, usual_dtype = flash_function("triton"), torch.get_autocast_dtype(DEVICE.type)
    q, k, v = drawn(dtype=torch.float32)
    for _ in range(2):
        apply(q, k, v, True)
        with torch.autocast(DEVICE.type, torch.float16):
            assert apply(q, k, v, True).dtype == torch.float16
        assert apply(q, k, v, True).dtype == torch.float32
        assert torch.equal(apply(torch._neg_view(-q), k, v, True), apply(q, k, v, True))
    asked = []
    monkeypatch.setattr(flash_triton, "attention_inputs", lambda *inputs: asked.append(inputs) or inputs[:3])
    half, single = drawn(), drawn(dtype=torch.float32)
    for inputs, dtype, times in ((half, torch.float16, 0), (half, torch.bfloat16, 1), (single, usual_dtype, 2)):
        with torch.autocast(DEVICE.type, dtype):
            apply(*inputs, True)
        assert len(asked) == times, "what autocast leaves as it is in one dtype is cast in another"


def test_a_call_under_a_dispatch_mode_is_an_op_whatever_was_admitted(monkeypatch):
    looked_at(monkeypatch)
    q, k, v = drawn()
    flash_function("triton")(q, k, v, True)
    with FlopCounterMode(display=False) as counter:
        flash_function("triton")(q, k, v, True)
    assert counter.get_total_flops() == 4 * 2 * 3 * 40 * 40 * 16
