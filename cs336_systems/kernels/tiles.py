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
    def has_tensor_cores(self) -> bool:
        """Whether Triton multiplies by tensor core (TF32 among their types); Triton 3.6 leaves Turing's unused."""
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
    skip_masked: bool = True  # whether tiles that the causal mask hides are left out; for the ladder of benchmarks


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


# The interpreter runs NumPy on whole tiles: few of them, and oblong, so that short tests meet every edge. The forward's
# and dk_dv's are alike, since NumPy rounds a product differently in another shape (see `backward._transposed_scores`).
INTERPRETER = Tiles(
    forward=Tile(64, 32, 1, 1, by_descriptor=True),
    dk_dv=Tile(64, 32, 1, 1, by_descriptor=True),
    dq=Tile(64, 32, 1, 1),
)

# The tables: (bytes per element, padded head dim) -> tiles. Mostly small tiles win: several programs on one
# multiprocessor hide one another's softmax and loads better than one large tile does.

# Timed on an H200 but for width 16, which follows 32, and float32 at 16 and 32, which follow 64.
HOPPER = {
    **dict.fromkeys(
        [(2, 16), (2, 32)],
        Tiles(
            forward=Tile(64, 64, 4, 3, by_descriptor=True),
            dk_dv=Tile(64, 64, 4, 3, head_group=8, by_descriptor=True),
            dq=Tile(64, 64, 4, 3, by_descriptor=True),
        ),
    ),
    (2, 64): Tiles(
        forward=Tile(64, 128, 4, 2, by_descriptor=True),
        dk_dv=Tile(64, 64, 4, 3, head_group=8, by_descriptor=True, max_registers=168),
        dq=Tile(128, 64, 8, 3, by_descriptor=True),
    ),
    (2, 128): Tiles(
        forward=Tile(64, 64, 4, 3, by_descriptor=True),
        dk_dv=Tile(64, 64, 4, 2, head_group=8, by_descriptor=True),
        dq=Tile(64, 64, 4, 2, by_descriptor=True),
    ),
    (2, 256): Tiles(forward=Tile(128, 64, 8, 2, by_descriptor=True), dk_dv=Tile(32, 32, 4, 2), dq=Tile(32, 64, 4, 2)),
    **dict.fromkeys(
        [(4, 16), (4, 32), (4, 64)],
        Tiles(forward=Tile(64, 64, 4, 2), dk_dv=Tile(32, 32, 4, 2), dq=Tile(64, 32, 4, 2)),
    ),
    (4, 128): Tiles(forward=Tile(32, 32, 4, 2), dk_dv=Tile(32, 32, 4, 2), dq=Tile(32, 32, 4, 2)),
    (4, 256): Tiles(forward=Tile(16, 32, 4, 2), dk_dv=Tile(16, 16, 8, 2), dq=Tile(16, 16, 8, 2)),
}

# Compiled, not timed.
AMPERE = {
    **dict.fromkeys(
        [(2, 16), (2, 32), (2, 64)],
        Tiles(forward=Tile(64, 64, 4, 2), dk_dv=Tile(64, 32, 4, 2), dq=Tile(64, 32, 4, 2)),
    ),
    (2, 128): Tiles(forward=Tile(64, 64, 4, 2), dk_dv=Tile(32, 32, 4, 2), dq=Tile(64, 32, 4, 2)),
    (2, 256): Tiles(forward=Tile(32, 32, 4, 2), dk_dv=Tile(32, 32, 4, 2), dq=Tile(32, 32, 4, 2)),
    **dict.fromkeys(
        [(4, 16), (4, 32), (4, 64)],
        Tiles(forward=Tile(32, 32, 4, 2), dk_dv=Tile(32, 16, 4, 2), dq=Tile(32, 32, 4, 2)),
    ),
    (4, 128): Tiles(forward=Tile(32, 16, 4, 2), dk_dv=Tile(16, 16, 4, 2), dq=Tile(16, 16, 4, 2)),
    (4, 256): Tiles(forward=Tile(16, 16, 4, 2), dk_dv=Tile(16, 16, 8, 1), dq=Tile(16, 16, 8, 1)),
}

# Compiled, not timed.
TURING = {
    **dict.fromkeys(
        [(2, 16), (2, 32), (2, 64)],
        Tiles(forward=Tile(32, 32, 4, 1), dk_dv=Tile(32, 32, 8, 1), dq=Tile(32, 32, 8, 1)),
    ),
    (2, 128): Tiles(forward=Tile(32, 16, 4, 1), dk_dv=Tile(16, 16, 4, 1), dq=Tile(16, 16, 4, 1)),
    (2, 256): Tiles(forward=Tile(16, 16, 8, 1), dk_dv=Tile(16, 16, 8, 1), dq=Tile(16, 16, 8, 1)),
    **dict.fromkeys(
        [(4, 16), (4, 32), (4, 64)],
        Tiles(forward=Tile(32, 32, 4, 1), dk_dv=Tile(16, 32, 4, 1), dq=Tile(32, 16, 4, 1)),
    ),
    # At 256 float32 needs more shared memory than Turing has: `fitted` says so.
    **dict.fromkeys(
        [(4, 128), (4, 256)],
        Tiles(forward=Tile(16, 16, 4, 1), dk_dv=Tile(16, 16, 4, 1), dq=Tile(16, 16, 4, 1)),
    ),
}


def table_for(gpu: Gpu) -> dict[tuple[int, int], Tiles]:
    """Hopper's table where there is as much shared memory (Hopper, data-centre Blackwell), else by generation."""
    if gpu.capability >= (9, 0) and gpu.shared_memory >= 227 * KIB:
        return HOPPER
    return AMPERE if gpu.capability >= (8, 0) else TURING


@dataclass(frozen=True)
class Kernel:
    """What of a kernel decides how much shared memory it needs."""

    name: str  # the field of `Tiles`
    held: Callable[[Tile], int]  # rows of the tiles that stay, together: Q; or K and V; or Q and dO
    streamed: Callable[[Tile], int]  # rows of each of the two tiles that the loop loads


KERNELS = (
    Kernel("forward", held=lambda tile: tile.q_tile_size, streamed=lambda tile: tile.k_tile_size),
    Kernel("dk_dv", held=lambda tile: 2 * tile.k_tile_size, streamed=lambda tile: tile.q_tile_size),
    Kernel("dq", held=lambda tile: 2 * tile.q_tile_size, streamed=lambda tile: tile.k_tile_size),
)


def shared_memory_bound(kernel: Kernel, tile: Tile, width: int, dtype: torch.dtype, gpu: Gpu) -> int:
    """An upper bound, in bytes, on the shared memory of a kernel, where that is more than some 10 KiB.

    Above what Triton 3.6 allots to every entry of the tables, by up to a factor of 4.

    Args:
        width: elements of a padded row.
    """
    buffered = 2 * kernel.streamed(tile) * tile.num_stages
    # Operands of float32 products, and of all products without tensor cores, also pass through copies.
    copied = 0 if gpu.has_tensor_cores and dtype != torch.float32 else 2 * max(tile.q_tile_size, tile.k_tile_size)
    rows_of_L_and_delta = 4 * buffered
    barriers = KIB
    return (kernel.held(tile) + buffered + copied) * width * dtype.itemsize + rows_of_L_and_delta + barriers


def fitted(tile: Tile, bound: Callable[[Tile], int], gpu: Gpu) -> Tile:
    """`tile`, or the first of its successors that fits: fewer stages, then half the larger tile size, down to 16.

    Args:
        bound: bytes of shared memory that a kernel needs at most with a tile.

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
                f"{gpu.name} has {gpu.shared_memory} bytes of shared memory for a program; the smallest tile of this "
                f"head dim and dtype may need {bound(tile)}"
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

    def fit(kernel: Kernel) -> Tile:
        return fitted(
            getattr(tiles, kernel.name), lambda tile: shared_memory_bound(kernel, tile, width, dtype, gpu), gpu
        )

    return Tiles(**{kernel.name: fit(kernel) for kernel in KERNELS})
