"""Which tile sizes a kernel is launched with: frozen tables, and pure functions that pick from them."""

from dataclasses import dataclass
from functools import lru_cache

import torch

KIB = 1024


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
    """How a kernel is launched: rows of its tiles, warps per program, stages of its software pipeline, and how many
    heads are worked on side by side (see `primitives.assigned_tile`)."""

    q_tile_size: int
    k_tile_size: int
    num_warps: int
    num_stages: int
    head_group: int = 4


@dataclass(frozen=True)
class Tiles:
    """A tile for each kernel."""

    forward: Tile
    delta: Tile
    dk_dv: Tile
    dq: Tile


def padded_head_dim(d: int) -> int:
    """The width of a tile: a power of two, and no less than a matrix instruction takes."""
    return max(16, 1 << (d - 1).bit_length())


DELTA = Tile(q_tile_size=64, k_tile_size=1, num_warps=4, num_stages=1)

# The interpreter runs NumPy on whole tiles: few of them, but unlike in shape, so that short tests meet every kind of edge.
INTERPRETER = Tiles(forward=Tile(64, 32, 1, 1), delta=DELTA, dk_dv=Tile(32, 64, 1, 1), dq=Tile(64, 32, 1, 1))

# (bytes per element, padded head dim) -> tiles. Small tiles win: several programs per multiprocessor hide one another's
# softmax and loads better than one large tile does.
HOPPER = {
    (2, 16): Tiles(Tile(128, 64, 4, 3), DELTA, Tile(64, 64, 4, 2), Tile(64, 64, 4, 3)),
    (2, 32): Tiles(Tile(128, 64, 4, 3), DELTA, Tile(64, 64, 4, 2), Tile(64, 64, 4, 3)),
    (2, 64): Tiles(Tile(128, 64, 4, 3), DELTA, Tile(64, 64, 4, 2), Tile(64, 64, 4, 3)),
    (2, 128): Tiles(Tile(64, 64, 4, 3), DELTA, Tile(32, 64, 4, 2), Tile(64, 64, 4, 2)),
    (2, 256): Tiles(Tile(64, 32, 4, 2), DELTA, Tile(32, 32, 4, 2), Tile(32, 64, 4, 2)),
    (4, 16): Tiles(Tile(64, 32, 4, 2), DELTA, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    (4, 32): Tiles(Tile(64, 32, 4, 2), DELTA, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    (4, 64): Tiles(Tile(64, 32, 4, 2), DELTA, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    (4, 128): Tiles(Tile(32, 32, 4, 2), DELTA, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    (4, 256): Tiles(Tile(32, 32, 4, 2), DELTA, Tile(16, 32, 4, 2), Tile(32, 16, 4, 2)),
}


@lru_cache
def pick_tiles(gpu: Gpu, d: int, dtype: torch.dtype) -> Tiles:
    """The tiles for tensors (…, n, d) of `dtype` on `gpu`.

    Raises:
        TypeError, ValueError: `gpu` cannot run the kernels in that dtype, see `Gpu.check`.
    """
    gpu.check(dtype)
    return HOPPER[dtype.itemsize, padded_head_dim(d)]
