"""Tile choices: pure functions of what a GPU reports, and every entry of the tables by itself."""

import contextlib
import itertools

import pytest
import torch

from cs336_systems import launch
from cs336_systems.flash_triton import FlashAttention2Triton
from cs336_systems.kernels import tiles
from cs336_systems.kernels.tiles import GPUS, KIB, TABLES, Gpu, Tile, Tiles
from cs336_systems.user_tiles import pick_tiles

from .machine import DEVICE, INTERPRETED, NATIVE, both_causal, needs_triton
from .reference import Case, Inputs, Result, assert_within_budget, dense_attention, run_attention

every_gpu = pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS.keys())


def bounds(gpu: Gpu, chosen: Tiles, d: int, dtype: torch.dtype) -> list[int]:
    """The most shared memory that each kernel takes with the chosen tiles."""
    width = tiles.padded_head_dim(d)
    return [
        tiles.shared_memory_bound(kernel, getattr(chosen, kernel.name), width, dtype, gpu) for kernel in tiles.KERNELS
    ]


@pytest.mark.parametrize("d", [0, -1, 257, 512])
def test_no_tiles_for_other_head_dims(d):
    with pytest.raises(ValueError, match=f"the head dim is {d}; allowed are 1 to 256"):
        tiles.shipped_tiles(tiles.GPUS["hopper"], d, torch.float16)


@every_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
def test_every_choice_fits(gpu, dtype):
    """For every head dim a tile that shared memory holds, or one error that says what is missing."""
    for d in range(1, 257):
        if gpu.capability == (7, 5) and dtype == torch.float32 and d > 128:
            with pytest.raises(ValueError, match=r"Turing has 65536 bytes of shared memory .* may need \d+"):
                pick_tiles(gpu, d, dtype)
        else:
            assert max(bounds(gpu, pick_tiles(gpu, d, dtype), d, dtype)) <= gpu.shared_memory


@pytest.mark.parametrize("shared_memory", [64 * KIB, 80 * KIB, 99 * KIB, 163 * KIB], ids="{}".format)
def test_less_shared_memory_means_smaller_tiles(shared_memory):
    """A table's entry is cut down to what a smaller device of its class has."""
    small = Gpu("small", (8, 6), shared_memory)
    for d, dtype in itertools.product((16, 64, 128), (torch.bfloat16, torch.float32)):
        assert max(bounds(small, pick_tiles(small, d, dtype), d, dtype)) <= shared_memory


def test_stages_go_before_tile_sizes():
    """A shallower pipeline costs less than smaller tiles; sizes are halved, the larger first, down to 16."""
    gpu = Gpu("any", (8, 0), 100)
    seen = []

    def needs_too_much(tile: Tile) -> int:
        seen.append((tile.q_tile_size, tile.k_tile_size, tile.num_stages))
        return 101

    with pytest.raises(
        ValueError, match=r"any has 100 bytes of shared memory for a program; the smallest tile .* may need 101"
    ):
        tiles.fitted(Tile(64, 32, 4, 2), needs_too_much, gpu)
    assert list(dict.fromkeys(seen)) == [(64, 32, 2), (64, 32, 1), (32, 32, 1), (16, 32, 1), (16, 16, 1)]


@pytest.mark.parametrize("d", [1, 15, 16, 17, 64, 80, 129, 256])
def test_padded_head_dim(d):
    width = tiles.padded_head_dim(d)
    assert width >= max(d, 16) and width & (width - 1) == 0
    assert width == 16 or width < 2 * d


def test_bfloat16_needs_ampere():
    """A clear error before any compilation."""
    with pytest.raises(TypeError, match=r"Turing \(compute capability \(7, 5\)\) has no torch.bfloat16"):
        pick_tiles(GPUS["turing"], 64, torch.bfloat16)
    for name in GPUS.keys() - {"turing"}:
        pick_tiles(GPUS[name], 64, torch.bfloat16)


def test_gpus_before_turing_are_refused():
    with pytest.raises(ValueError, match=r"compute capability \(7, 0\); the kernels need \(7, 5\)"):
        pick_tiles(Gpu("V100", (7, 0), 96 * KIB), 64, torch.float16)


def distinct(kernel: str) -> list[tuple[int, int, Tile]]:
    """(bytes per element, d, tile): every choice on this GPU, or every pair of tile sizes in any table."""
    if NATIVE:
        gpu = launch.gpu_of(DEVICE)
        chosen = set()
        for (size, d), dtype in itertools.product(tiles.table_for(gpu), (torch.float16, torch.float32)):
            if dtype.itemsize == size:
                with contextlib.suppress(ValueError):  # too little shared memory; test_every_choice_fits knows where
                    chosen.add((size, d, getattr(pick_tiles(gpu, d, dtype), kernel)))
        return sorted(chosen, key=repr)
    entries = [getattr(entry, kernel) for table in TABLES for entry in table.values()]
    sizes = sorted({(tile.q_tile_size, tile.k_tile_size) for tile in entries})
    return [(4, 16, Tile(*pair, 1, 1, by_descriptor=fetched)) for pair in sizes for fetched in (False, True)]


def tile_id(value) -> str:
    if isinstance(value, Tile):
        return f"{value.q_tile_size}x{value.k_tile_size}-{value.num_warps}w-{value.num_stages}s"
    return str(value)


def inputs_for(size: int, d: int, tile: Tile):
    """Ragged lengths over more than one tile, no longer in the interpreter; the queries more than the keys."""
    dtype = {2: torch.float16 if INTERPRETED else torch.bfloat16, 4: torch.float32}[size]
    n = min(150, 2 * max(tile.q_tile_size, tile.k_tile_size) + 22) if INTERPRETED else 150
    return Case((2,), n, n - 17, d).draw(dtype, DEVICE)


@needs_triton
@both_causal
@pytest.mark.parametrize(("size", "d", "tile"), distinct("forward"), ids=tile_id)
def test_forward_tile(size, d, tile, is_causal):
    """Every entry of the tables, alone, is right: the forward."""
    inputs = inputs_for(size, d, tile)
    o, L = launch.launch_forward(*inputs[:3], is_causal, tile)
    assert_within_budget(Result(o, L, interpreted=INTERPRETED), inputs, is_causal)


def gradient_of_q(inputs: Inputs, is_causal: bool, tile: Tile | None):
    """What launch_dq makes of the exact o and L, and that o for a Result that only holds gradients."""
    q, k, v, dO = inputs
    exact = dense_attention(inputs, is_causal)
    assert exact.L is not None
    return *launch.launch_dq(q, k, v, exact.o.to(q.dtype), dO, exact.L.float(), is_causal, tile=tile), exact.o


@needs_triton
@both_causal
@pytest.mark.parametrize(("size", "d", "tile"), distinct("dk_dv"), ids=tile_id)
def test_dk_dv_tile(size, d, tile, is_causal):
    """Every entry of the tables, alone, is right: dk and dv."""
    inputs = inputs_for(size, d, tile)
    _, L_base, delta, o = gradient_of_q(inputs, is_causal, None)
    dk, dv = launch.launch_dk_dv(*inputs, L_base, delta, is_causal, tile)
    assert_within_budget(Result(o, dk=dk, dv=dv, interpreted=INTERPRETED), inputs, is_causal)


@needs_triton
@both_causal
@pytest.mark.parametrize(("size", "d", "tile"), distinct("dq"), ids=tile_id)
def test_dq_tile(size, d, tile, is_causal):
    """Every entry of the tables, alone, is right: dq."""
    inputs = inputs_for(size, d, tile)
    dq, _, _, o = gradient_of_q(inputs, is_causal, tile)
    assert_within_budget(Result(o, dq=dq, interpreted=INTERPRETED), inputs, is_causal)


@needs_triton
@both_causal
def test_without_skipping_masked_tiles(is_causal):
    """The ladder's slow rungs compute the same: every tile is visited, and compared with the mask."""
    slow = Tile(64, 32, 1, 1, skip_masked=False)
    inputs = inputs_for(4, 16, slow)
    with launch.tiles_changed_by(lambda _: Tiles(slow, slow, slow)):
        result = run_attention(FlashAttention2Triton.apply, inputs, is_causal)
    assert_within_budget(result, inputs, is_causal)


@needs_triton
def test_changed_tiles_are_launched(monkeypatch):
    """In the forward and in the backward, which runs in a thread of autograd's; and no longer than the block lasts."""
    launched = []
    original = launch._launch_first
    monkeypatch.setattr(
        launch, "_launch_first", lambda kernel, tile, *rest: (launched.append(tile), original(kernel, tile, *rest))[1]
    )
    forced = Tiles(Tile(16, 32, 1, 1), Tile(32, 16, 1, 1), Tile(16, 16, 1, 1))
    inputs = Case((2,), 40, 40, 16).draw(torch.float32, DEVICE)
    with launch.tiles_changed_by(lambda _: forced):
        run_attention(FlashAttention2Triton.apply, inputs, True)
    assert set(launched) == {forced.forward, forced.dk_dv, forced.dq}
    assert launch.tiles_for(inputs.q) != forced
