"""Hopper's own kernels: right where they apply, and never used where they do not."""

import math
import runpy
import warnings
from dataclasses import replace

import pytest
import torch

from cs336_systems import launch, launch_hopper, layouts
from cs336_systems.flash_triton import FlashAttention2Triton
from cs336_systems.kernels.tiles import HOPPER_OWN, KIB, Gpu, HopperForward, padded_head_dim

from .layouts import LAYOUTS, contiguous, windows
from .machine import NATIVE, both_causal, mock_gpu, needs_triton
from .reference import Case, Inputs, Result, assert_within_budget, run_attention

HOPPER = NATIVE and torch.cuda.get_device_capability() == (9, 0) and launch.TRITON_IS_TESTED
CUDA = torch.device("cuda")
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0, and Triton 3.6")
each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


@pytest.fixture(autouse=True)
def turned_on(monkeypatch):
    monkeypatch.setattr(launch_hopper, "TURNED_ON", True)


@pytest.fixture
def on_hopper(monkeypatch):
    """As if this machine had a Hopper GPU, where compiled kernels can be launched."""
    monkeypatch.setattr(launch, "TRITON_IS_TESTED", True)
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    mock_gpu(monkeypatch, Gpu("mocked", (9, 0), 227 * KIB))
    return monkeypatch


@pytest.mark.parametrize("d", [40, 64, 72, 128])
@each_dtype
def test_suits(on_hopper, dtype, d):
    assert launch_hopper.suits(CUDA, dtype, d)


@pytest.mark.parametrize(
    ("device", "dtype", "d"),
    [
        ("cpu", torch.bfloat16, 64),
        ("cuda", torch.float32, 64),
        ("cuda", torch.bfloat16, 60),
        ("cuda", torch.bfloat16, 32),
        ("cuda", torch.bfloat16, 136),
    ],
    ids=["CPU", "float32", "rows off 16 bytes", "narrow", "wide"],
)
def test_does_not_suit(on_hopper, device, dtype, d):
    assert not launch_hopper.suits(torch.device(device), dtype, d)


@pytest.mark.parametrize("gpu", [Gpu("Ada", (8, 9), 99 * KIB), Gpu("Blackwell", (10, 0), 227 * KIB)])
def test_does_not_suit_another_gpu(on_hopper, gpu):
    mock_gpu(on_hopper, gpu)
    assert not launch_hopper.suits(CUDA, torch.bfloat16, 64)


def test_does_not_suit_the_interpreter(on_hopper):
    on_hopper.setattr(launch, "is_interpreted", lambda: True)
    assert not launch_hopper.suits(CUDA, torch.bfloat16, 64)


def test_does_not_suit_another_triton(on_hopper):
    """That is said, once."""
    on_hopper.setattr(launch, "TRITON_IS_TESTED", False)
    with pytest.warns(UserWarning, match=r"tested with Triton 3\.6, and here is .*: the portable ones are used"):
        assert not launch_hopper.suits(CUDA, torch.bfloat16, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not launch_hopper.suits(CUDA, torch.bfloat16, 64)


def test_applies(monkeypatch):
    monkeypatch.setattr(launch_hopper, "suits", lambda *_: True)
    q, none = torch.empty(4, 64), torch.empty(0, 64)
    assert launch_hopper.applies(q, q)
    assert not launch_hopper.applies(none, q) and not launch_hopper.applies(q, none)
    with launch.tiles_changed_by(lambda tiles: tiles):
        assert not launch_hopper.applies(q, q), "these are for the portable kernels"
    monkeypatch.setattr(launch_hopper, "suits", lambda *_: False)
    assert not launch_hopper.applies(q, q)
    monkeypatch.setattr(launch_hopper, "TURNED_ON", False)
    monkeypatch.setattr(launch_hopper, "suits", lambda *_: True)
    assert not launch_hopper.applies(q, q)


@pytest.mark.parametrize(
    ("hopper", "wanted", "deterministic", "own"),
    [
        (True, "qkv", False, ["forward", "backward"]),
        (False, "qkv", False, []),
        (True, "q", False, ["forward"]),
        (True, "kv", False, ["forward"]),
        (True, "qkv", True, ["forward"]),
    ],
    ids=["default", "turned off", "only dq", "only dk and dv", "deterministic"],
)
@needs_triton
def test_who_computes_what(monkeypatch, hopper, wanted, deterministic, own):
    """Hopper's backward forms all gradients at once, and not the same bits each time."""
    used = []

    def stand_in(name, portable):
        def launched(*arguments, **options):
            used.append(name)
            return portable(*arguments, **options)

        return launched

    def backward(*arguments, **options):
        return launch.launch_backward(*arguments, True, True, **options)

    monkeypatch.setattr(launch_hopper, "applies", lambda q, k: True)
    monkeypatch.setattr(launch_hopper, "launch_forward", stand_in("forward", launch.launch_forward))
    monkeypatch.setattr(launch_hopper, "launch_backward", stand_in("backward", backward))
    device = CUDA if NATIVE else torch.device("cpu")
    inputs = Case((2,), 20, 20, 64).draw(torch.float16, device)
    leaves = [x.requires_grad_(name in wanted) for name, x in zip("qkv", inputs[:3], strict=True)]
    torch.use_deterministic_algorithms(deterministic)
    try:
        o = FlashAttention2Triton.apply(*leaves, True, hopper)
        gradients = torch.autograd.grad(o, [x for x in leaves if x.requires_grad], inputs.dO)
    finally:
        torch.use_deterministic_algorithms(False)
    assert used == own and len(gradients) == len(wanted)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if NATIVE else [])])
def test_parts_add_up(dtype):
    """L and delta, split into numbers of a half type, keep float32's precision whatever their size."""
    if not launch.TRITON_IS_TESTED:
        pytest.skip("the kernels are for Triton 3.6")
    import triton.language as tl

    from cs336_systems.kernels.hopper.backward_parts import split_of

    device = CUDA if NATIVE else torch.device("cpu")
    n, d = 70, 64
    tile = HOPPER_OWN[64].backward
    L = torch.linspace(-12, 12, n, device=device).exp() * torch.tensor([1.0, -1.0], device=device).repeat(n // 2)
    L[3] = -math.inf
    L[4:6] = torch.tensor([1.2e9, -1.2e9])
    L[6:8] = torch.tensor([3e9, -3e9])  # more than float16's parts can say
    o, dO = torch.randn(2, n, d, device=device).to(dtype)
    usual_L, usual_o, lost_L, lost_delta = L.clone(), o.clone(), [9, 10], [10, 11, 12, 13]
    L[lost_L] = math.nan
    o[lost_delta, 5] = torch.tensor([math.nan, math.nan, math.inf, -math.inf], device=device, dtype=dtype)
    parts, dq_sum = launch_hopper.preprocess(o, dO, L, launch.launches_for(False, tile, o, dO, L))
    counting = [1.0] * 3 if dtype == torch.bfloat16 else [2.0**15] * 6 + [2.0**4, 2.0**-6]
    weights = torch.tensor(counting + [0.0] * (16 - len(counting)), dtype=torch.float64, device=device)
    parts = parts.double().view(-1, 2, tile.q_tile_size, 16).transpose(0, 1).flatten(1, 2)
    got_L, got_delta = parts @ weights
    for got, lost in ((got_L, lost_L), (got_delta, lost_delta)):
        assert (~got.isfinite()).nonzero().flatten().tolist() == lost, "what is not finite stays so, and no other"
    L, o = usual_L, usual_o
    L[lost_L] = o[lost_delta] = 0  # and the rest is as without it
    got_L[lost_L] = got_delta[lost_delta] = 0
    expected = -L.double() * d**0.5
    small = expected.abs() < 2**24
    assert ((got_L[:n] - expected)[small].abs() <= 2.0**-23 * expected[small].abs() + 2.0**-30).all()
    assert (got_L[4:6] - expected[4:6]).abs().max() < 2e-6 * 1e10 and (got_L[4:6] < expected[4:6]).all(), "rounded up"
    assert (got_L[n:] < -9e9).all() and got_L[3] < -9e9, "where nothing is seen P is 0"
    assert got_L[6] < -1e10 and got_L[7] > 1e10 and got_L.isfinite().all()
    part, weight = split_of(tl.float16 if dtype == torch.float16 else tl.bfloat16).hiding
    assert (parts[0, :, len(counting) :] == part).all(), "what hides keys past the last"
    assert ((got_L + (16 - len(counting)) * part * weight) < -1e9).all(), "from every query"
    delta = -(o.double() * dO.double()).sum(-1)
    assert (got_delta[:n] - delta).abs().max() < 1e-5 and not got_delta[n:].any()
    assert not dq_sum.any()


@pytest.mark.parametrize(
    ("batch_heads", "n", "is_causal", "few"),
    [
        (1, 8192, True, True), (1, 32768, True, True), (1, 65536, True, False), (16, 1536, True, True),
        (16, 4096, True, False), (1, 16384, False, True), (16, 1536, False, False), (16, 16384, False, False),
    ],
)  # fmt: skip
def test_few_queries_go_in_shorter_tiles(batch_heads, n, is_causal, few):
    tiles = HOPPER_OWN[64]
    expected = tiles.forward_of_few if few else tiles.forward
    found = tiles.forward_for(n, 64, batch_heads, is_causal, 132)
    assert replace(found, head_group=expected.head_group) == expected
    assert tiles.forward_of_few.q_tile_size < tiles.forward.q_tile_size


@pytest.mark.parametrize(
    ("n", "width", "group"),
    [(1, 64, 4), (8192, 64, 4), (8193, 64, 2), (65536, 64, 2), (4096, 128, 4), (8192, 128, 2), (16384, 128, 2)],
)
def test_longer_heads_go_in_smaller_groups_in_the_backward(n, width, group):
    expected = replace(HOPPER_OWN[width].backward, head_group=group)
    assert HOPPER_OWN[width].backward_for(n, width) == expected
    assert launch_hopper._backward_tile(torch.empty(2, n, width, device="meta"), True) == expected
    assert expected.constants(True)["HEAD_GROUP"] == group and expected.constants(False)["HEAD_GROUP"] == 1


@pytest.mark.parametrize(
    ("n", "width", "group"),
    [(1024, 64, 8), (32768, 64, 8), (32769, 64, 4), (131072, 64, 2), (1024, 128, 2), (65536, 128, 2)],
)
def test_longer_heads_go_in_smaller_groups_in_the_forward(monkeypatch, n, width, group):
    monkeypatch.setattr(launch_hopper, "_multiprocessors", lambda device: 132)
    expected = replace(HOPPER_OWN[width].forward, head_group=group)
    assert launch_hopper._forward_tile(torch.empty(16, n, width, device="meta"), True).head_group == group
    assert HOPPER_OWN[width].forward_for(n, width, 16 * 132, True, 132) == expected


@needs_triton
@pytest.mark.parametrize("layout", [contiguous, *LAYOUTS, windows])
def test_copies_are_copyable_and_outputs_are_laid_out_as_promised(layout, monkeypatch):
    """What the copy engine cannot read is copied; outputs have the strides that the custom ops promise all the same."""
    seen = []

    def first(kernel, tile, is_causal, tensors):
        seen.append(tensors)
        return None, None

    monkeypatch.setattr(launch, "_launch_first", first)
    monkeypatch.setattr(launch_hopper, "_multiprocessors", lambda device: 132)
    q, k, v, dO = (layouts.readable(layout(torch.randn(2, 3, 40, 64).half())) for _ in range(4))
    o, L = launch_hopper.launch_forward(q, k, v, True)
    gradients = launch_hopper.launch_backward(q, k, v, o, dO, L, True)
    assert all(layouts.copyable_strides(x) for x in seen[0])
    assert all(layouts.copyable_strides(x) for x in seen[2][:4])
    for got, like in zip((o, *gradients), (q, q, k, v), strict=True):
        assert got.stride() == layouts.empty_output_like(like).stride() and layouts.copyable_strides(got)


@pytest.mark.parametrize(("value", "turned_on"), [("0", False), ("1", True), ("", True)])
def test_the_environment_turns_them_on_and_off(value, turned_on, monkeypatch):
    """When the module is imported; here a second time, beside the one that is in use."""
    monkeypatch.setenv("CS336_HOPPER", value)
    assert runpy.run_path(launch_hopper.__file__)["TURNED_ON"] is turned_on


def test_another_value_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("CS336_HOPPER", "yes")
    with pytest.raises(ValueError, match="CS336_HOPPER is 'yes'; allowed: 0, 1"):
        runpy.run_path(launch_hopper.__file__)


@needs_triton
def test_copies_have_launches_of_their_own(monkeypatch):
    """Inputs that have to be copied leave outputs in their own memory order: not those of contiguous inputs."""
    launched = []

    class Prepared:
        compiled = None

        def __init__(self, tensors):
            self.strides = [x.stride() for x in tensors]

        def launch(self, *tensors):
            launched.append((self.strides, [x.stride() for x in tensors]))

    monkeypatch.setattr(launch, "_launches", {})
    monkeypatch.setattr(launch, "_launch_first", lambda kernel, tile, causal, tensors: (None, Prepared(tensors)))
    monkeypatch.setattr(launch_hopper, "_multiprocessors", lambda device: 132)
    whole, heads_inside = torch.zeros(2, 3, 40, 64).half(), torch.zeros(2, 40, 3, 65).half()[..., 1:].transpose(1, 2)
    for x in (heads_inside, whole, heads_inside, whole):
        o, L = launch_hopper.launch_forward(x, x, x, True)
        launch_hopper.launch_backward(x, x, x, o, x, L, True)
    assert launched and all(prepared == given for prepared, given in launched)


# On a Hopper GPU

RAGGED = [
    ((1, 1), 1, 1), ((2, 3), 64, 64), ((1, 2), 65, 63), ((3,), 127, 129), ((2, 2), 192, 128), ((1, 5), 193, 257),
    ((2,), 300, 17), ((2,), 17, 300), ((1, 3), 1000, 1000), ((2, 1, 2), 129, 400), ((1, 2), 640, 128),
]  # fmt: skip


def run_on_hopper(inputs: Inputs, is_causal: bool, tile: HopperForward | None = None) -> Result:
    """Both passes, once it is sure that they are Hopper's own; without a tile of the forward, by the table."""
    q, k, v, dO = map(layouts.readable, inputs)
    assert launch_hopper.applies(q, k)
    o, L = launch_hopper.launch_forward(q, k, v, is_causal, tile)
    return Result(o, L, *launch_hopper.launch_backward(q, k, v, o, dO, L, is_causal))


@needs_hopper
@both_causal
@each_dtype
@pytest.mark.parametrize("d", [40, 64, 96, 128])
@pytest.mark.parametrize(("leading", "n_queries", "n_keys"), RAGGED, ids=str)
def test_ragged(leading, n_queries, n_keys, d, dtype, is_causal):
    inputs, tiles = Case(leading, n_queries, n_keys, d).draw(dtype, CUDA), HOPPER_OWN[padded_head_dim(d)]
    for tile in {tiles.forward, tiles.forward_of_few}:
        assert_within_budget(run_on_hopper(inputs, is_causal, tile), inputs, is_causal)


@needs_hopper
@both_causal
@pytest.mark.parametrize("layout", [contiguous, *LAYOUTS])
@pytest.mark.parametrize("d", [64, 128])
def test_layouts(d, layout, is_causal):
    inputs = Inputs(*map(layout, Case((2, 3), 150, 200, d).draw(torch.bfloat16, CUDA)))
    result = run_attention(FlashAttention2Triton.apply, inputs, is_causal)
    assert_within_budget(result, inputs, is_causal)


@needs_hopper
@both_causal
@pytest.mark.parametrize("d", [64, 128])
def test_expanded_heads(d, is_causal):
    """Keys and values that all heads share are read where they are, with a stride of 0."""
    q, k, v, dO = Case((2, 3), 150, 200, d).draw(torch.bfloat16, CUDA)
    k, v = k[:, :1].expand_as(k), v[:, :1].expand_as(v)
    assert layouts.copyable_strides(k) == (k.stride(0), 0, d, 1)
    inputs = Inputs(q, k, v, dO)
    assert_within_budget(run_on_hopper(inputs, is_causal), inputs, is_causal)


@needs_hopper
@both_causal
@each_dtype
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 5.0, 30.0])
def test_large_logits(sharpness, d, dtype, is_causal):
    q, k, v, dO = Case((2, 2), 200, 260, d).draw(dtype, CUDA)
    inputs = Inputs(q * sharpness, k, v, dO)
    assert_within_budget(run_on_hopper(inputs, is_causal), inputs, is_causal)


@needs_hopper
@both_causal
@pytest.mark.parametrize("d", [64, 128])
def test_every_element_is_written(d, is_causal):
    """Memory that nobody filled holds NaN in deterministic mode."""
    inputs = Case((2, 2), 193, 257, d).draw(torch.bfloat16, CUDA)
    torch.use_deterministic_algorithms(True)
    try:
        result = run_on_hopper(inputs, is_causal)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_within_budget(result, inputs, is_causal)


@needs_hopper
@pytest.mark.parametrize("d", [64, 128])
def test_the_same_again(d):
    """o, L, dk and dv are bit-equal in 1000 runs; dq is added up in no fixed order, and stays within the budget."""
    inputs = Case((2, 4), 517, 517, d).draw(torch.bfloat16, CUDA)
    again = first = run_on_hopper(inputs, True)
    assert first.L is not None and first.dk is not None and first.dv is not None
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    for _ in range(1000):
        again = run_on_hopper(inputs, True)
        assert again.L is not None and again.dk is not None and again.dv is not None
        for x, y in ((first.o, again.o), (first.L, again.L), (first.dk, again.dk), (first.dv, again.dv)):
            wrong += (x != y).sum()
    assert not wrong.item()
    assert_within_budget(again, inputs, True)


@needs_hopper
def test_portable_kernels_where_they_were_asked_for():
    """With hopper=False the launches are those of the portable kernels."""
    inputs = Case((2, 2), 100, 100, 64).draw(torch.bfloat16, CUDA)
    q, k, v = inputs[:3]
    with launch.launched_kernels() as own:
        FlashAttention2Triton.apply(q, k, v, True)
    with launch.launched_kernels() as portable:
        FlashAttention2Triton.apply(q, k, v, True, False)
    assert [x.metadata.name for x in own] == ["flash_forward_hopper_kernel"]
    assert [x.metadata.name for x in portable] == ["flash_forward_kernel"]
