"""Which tile sizes a kernel is launched with: frozen tables, and pure functions that pick from them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

KIB = 1024
SMALLEST_TILE_SIZE = 16


@dataclass(frozen=True)
class Gpu:
    """What the choice of tiles depends on, as the device reports it."""

    name: str
    capability: tuple[int, int]
    shared_memory: int  # bytes that one program may use

    @property
    def has_tf32(self) -> bool:
        return self.capability >= (8, 0)

    def check(self, dtype: torch.dtype) -> None:
        """Raise TypeError for a dtype, ValueError for a GPU, that the kernels have no instructions for."""
        if self.capability < (7, 5):
            raise ValueError(f"{self.name} has compute capability {self.capability}; the kernels need (7, 5) or later")
        if dtype == torch.bfloat16 and self.capability < (8, 0):
            raise TypeError(
                f"{self.name} (compute capability {self.capability}) has no {dtype}; allowed there: torch.float16, "
                "torch.float32"
            )


@dataclass(frozen=True)
class Tile:
    """How a kernel is launched."""

    q_tile_size: int  # rows of a query tile
    k_tile_size: int  # rows of a key tile
    num_warps: int  # per program
    num_stages: int  # of the software pipeline that loads tiles ahead
    head_group: int = 4  # heads worked on side by side, see `primitives.assigned_tile`
    by_descriptor: bool = False  # whether tiles are fetched by the copy engine; pays where both sizes suit wgmma
    max_registers: int | None = None  # per thread; fewer let more programs share a multiprocessor


@dataclass(frozen=True)
class Tiles:
    """A tile for each kernel that goes over tiles of S."""

    forward: Tile
    dk_dv: Tile
    dq: Tile


# delta reads two rows a query and keeps nothing: one tile serves everywhere.
DELTA = Tile(q_tile_size=64, k_tile_size=1, num_warps=4, num_stages=1)


def padded_head_dim(d: int) -> int:
    """The width of a tile: a power of two, and no less than a matrix instruction takes."""
    return max(16, 1 << (d - 1).bit_length())


# The interpreter runs NumPy on whole tiles: few of them, but unlike in shape, so that short tests meet every edge.
INTERPRETER = Tiles(
    forward=Tile(64, 32, 1, 1, by_descriptor=True), dk_dv=Tile(32, 64, 1, 1, by_descriptor=True), dq=Tile(64, 32, 1, 1)
)

# (bytes per element, padded head dim) -> tiles. Small tiles win: several programs on one multiprocessor hide one
# another's softmax and loads better than one large tile does.

# Timed on an H200, but for width 16, which follows 32, and float32 at 16 and 32, which follow 64.
HOPPER = {
    (2, 16): Tiles(Tile(64, 64, 4, 3, 4, True), Tile(64, 64, 4, 3, 8, True), Tile(64, 64, 4, 3, 4, True)),
    (2, 32): Tiles(Tile(64, 64, 4, 3, 4, True), Tile(64, 64, 4, 3, 8, True), Tile(64, 64, 4, 3, 4, True)),
    (2, 64): Tiles(Tile(64, 128, 4, 2, 4, True), Tile(64, 64, 4, 3, 8, True, 168), Tile(128, 64, 8, 3, 4, True)),
    (2, 128): Tiles(Tile(64, 64, 4, 3, 4, True), Tile(64, 64, 4, 2, 8, True), Tile(64, 64, 4, 2, 4, True)),
    (2, 256): Tiles(Tile(128, 64, 8, 2, 4, True), Tile(32, 32, 4, 2), Tile(32, 64, 4, 2)),
    (4, 16): Tiles(Tile(64, 64, 4, 2), Tile(32, 32, 4, 2), Tile(64, 32, 4, 2)),
    (4, 32): Tiles(Tile(64, 64, 4, 2), Tile(32, 32, 4, 2), Tile(64, 32, 4, 2)),
    (4, 64): Tiles(Tile(64, 64, 4, 2), Tile(32, 32, 4, 2), Tile(64, 32, 4, 2)),
    (4, 128): Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    (4, 256): Tiles(Tile(16, 32, 4, 2), Tile(16, 16, 8, 2), Tile(16, 16, 8, 2)),
}

# Compiled, not timed.
AMPERE = {
    (2, 16): Tiles(Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2)),
    (2, 32): Tiles(Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2)),
    (2, 64): Tiles(Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2)),
    (2, 128): Tiles(Tile(64, 64, 4, 2), Tile(32, 32, 4, 2), Tile(64, 32, 4, 2)),
    (2, 256): Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    (4, 16): Tiles(Tile(32, 32, 4, 2), Tile(32, 16, 4, 2), Tile(32, 32, 4, 2)),
    (4, 32): Tiles(Tile(32, 32, 4, 2), Tile(32, 16, 4, 2), Tile(32, 32, 4, 2)),
    (4, 64): Tiles(Tile(32, 32, 4, 2), Tile(32, 16, 4, 2), Tile(32, 32, 4, 2)),
    (4, 128): Tiles(Tile(32, 16, 4, 2), Tile(16, 16, 4, 2), Tile(16, 16, 4, 2)),
    (4, 256): Tiles(Tile(16, 16, 4, 2), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}

# Compiled, not timed. No tensor-core matmul and no asynchronous copies here in Triton 3.6.
TURING = {
    (2, 16): Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    (2, 32): Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    (2, 64): Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    (2, 128): Tiles(Tile(32, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    (2, 256): Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    (4, 16): Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    (4, 32): Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    (4, 64): Tiles(Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)),
    (4, 128): Tiles(Tile(32, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    (4, 256): Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}


def table_for(gpu: Gpu) -> dict[tuple[int, int], Tiles]:
    """Hopper's tables where there is as much shared memory (Hopper, data-centre Blackwell), else by generation."""
    if gpu.capability >= (9, 0) and gpu.shared_memory >= 227 * KIB:
        return HOPPER
    return AMPERE if gpu.capability >= (8, 0) else TURING


def shared_memory_bound(held: int, streamed: int, tile: Tile, width: int, dtype: torch.dtype, gpu: Gpu) -> int:
    """Bytes of shared memory that a kernel needs at most, as seen in every entry of the tables when compiled.

    Args:
        held: rows of the tensors whose tile stays (q in the forward, k and v for dk and dv, ...), together.
        streamed: rows of each of the two tensors that the loop loads, buffered `num_stages` deep.
        width: elements of a padded row.
    """
    streamed *= tile.num_stages
    # Float32 products, and all products without tensor cores, go by way of copies in another layout.
    copied = 2 * max(tile.q_tile_size, tile.k_tile_size) if dtype == torch.float32 or not gpu.has_tf32 else 0
    L_and_delta = 8 * streamed
    barriers = KIB
    return (held + 2 * streamed + copied) * width * dtype.itemsize + L_and_delta + barriers


def fitted(tile: Tile, bound: Callable[[Tile], int], gpu: Gpu) -> Tile:
    """`tile`, or the first of its successors that fits: fewer stages, then half the larger tile size, down to 16.

    Raises:
        ValueError: not even the smallest fits.
    """
    while bound(tile) > gpu.shared_memory:
        if tile.num_stages > 1:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        elif tile.q_tile_size >= tile.k_tile_size and tile.q_tile_size > SMALLEST_TILE_SIZE:
            tile = replace(tile, q_tile_size=tile.q_tile_size // 2)
        elif tile.k_tile_size > SMALLEST_TILE_SIZE:
            tile = replace(tile, k_tile_size=tile.k_tile_size // 2)
        else:
            raise ValueError(
                f"{gpu.name} has {gpu.shared_memory} bytes of shared memory for a program; the smallest tile needs "
                f"{bound(tile)}"
            )
    return tile


@lru_cache
def pick_tiles(gpu: Gpu, d: int, dtype: torch.dtype) -> Tiles:
    """The tiles for tensors (…, n, d) of `dtype` on `gpu`.

    Raises:
        TypeError, ValueError: `gpu` cannot run the kernels in that dtype (`Gpu.check`), or has too little memory.
    """
    gpu.check(dtype)
    width = padded_head_dim(d)
    tiles = table_for(gpu)[dtype.itemsize, width]

    def fit(tile: Tile, rows: Callable[[Tile], tuple[int, int]]) -> Tile:
        return fitted(tile, lambda tile: shared_memory_bound(*rows(tile), tile, width, dtype, gpu), gpu)

    return Tiles(
        forward=fit(tiles.forward, lambda tile: (tile.q_tile_size, tile.k_tile_size)),
        dk_dv=fit(tiles.dk_dv, lambda tile: (2 * tile.k_tile_size, tile.q_tile_size)),
        dq=fit(tiles.dq, lambda tile: (2 * tile.q_tile_size, tile.k_tile_size)),
    )
