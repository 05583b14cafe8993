"""Which tile sizes a kernel is launched with: frozen tables, and pure functions that pick from them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import torch

from cs336_systems.inputs import MAX_HEAD_DIM

KIB = 1024
SMALLEST_TILE_SIZE = 16


@dataclass(frozen=True)
class Gpu:
    """What the choice of portable tiles depends on, as the device reports it."""

    name: str
    capability: tuple[int, int]
    shared_memory: int  # bytes that one program may use

    @property
    def uses_tensor_cores(self) -> bool:
        """Whether Triton multiplies on tensor cores: from Ampere on. Triton 3.6 leaves Turing's unused."""
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


GpuClass = Literal["turing", "ampere", "a100", "ada", "hopper", "blackwell", "blackwell-consumer"]

# What the tables are for, one GPU of each class.
GPUS: dict[GpuClass, Gpu] = {
    "turing": Gpu("Turing", (7, 5), 64 * KIB),
    "ampere": Gpu("Ampere, consumer", (8, 6), 99 * KIB),
    "a100": Gpu("A100", (8, 0), 163 * KIB),
    "ada": Gpu("Ada", (8, 9), 99 * KIB),
    "hopper": Gpu("Hopper", (9, 0), 227 * KIB),
    "blackwell": Gpu("Blackwell, data centre", (10, 0), 227 * KIB),
    "blackwell-consumer": Gpu("Blackwell, consumer", (12, 0), 99 * KIB),
}


class AnyTile(Protocol):
    """What `launch` asks of a tile, portable or Hopper's own."""

    @property
    def q_tile_size(self) -> int:
        """Rows of a query tile."""
        ...

    @property
    def k_tile_size(self) -> int:
        """Rows of a key tile."""
        ...

    @property
    def head_group(self) -> int:
        """Heads worked on side by side under a causal mask."""
        ...

    def constants(self, is_causal: bool) -> dict[str, Any]:
        """Fields of the kernel's tiling that depend on the tile and the mask."""
        ...

    def options(self) -> dict[str, Any]:
        """Triton's options."""
        ...


def _common(tile: AnyTile, is_causal: bool) -> dict[str, Any]:
    """The fields that all tilings have."""
    return {
        "Q_TILE_SIZE": tile.q_tile_size,
        "K_TILE_SIZE": tile.k_tile_size,
        "IS_CAUSAL": is_causal,
        # Groups are there to start the longest tiles of several heads first. Without a mask all tiles are alike.
        "HEAD_GROUP": tile.head_group if is_causal else 1,
    }


@dataclass(frozen=True)
class Tile:
    """How a portable kernel is launched."""

    q_tile_size: int  # rows of a query tile
    k_tile_size: int  # rows of a key tile
    num_warps: int  # per program
    num_stages: int  # of the software pipeline that loads tiles ahead
    head_group: int = 4  # heads worked on side by side under a causal mask, see `primitives.assigned_tile`
    by_descriptor: bool = False  # whether tiles are fetched by the copy engine; pays where both sizes suit wgmma
    max_registers: int | None = None  # per thread; fewer let more programs share a multiprocessor
    skip_masked: bool = True  # whether tiles that the causal mask hides are left out; for the ladder of benchmarks

    def constants(self, is_causal: bool) -> dict[str, Any]:
        return _common(self, is_causal) | {"SKIP_MASKED": self.skip_masked}

    def options(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.max_registers}


# What Hopper's matrix instructions take, a warpgroup each: rows of an accumulator, and columns of operands in one step.
WARPGROUP_ROWS = 64
STEP_COLUMNS = 16


class _OnHopper:
    def options(self) -> dict[str, Any]:
        return {"num_warps": 4}  # of the warpgroup that loads; the others' are the kernel's


@dataclass(frozen=True)
class HopperForward(_OnHopper):
    """How Hopper's own forward is launched."""

    attenders: int  # warpgroups, of WARPGROUP_ROWS queries each
    k_tile_size: int  # rows of a key tile
    num_stages: int  # of the rings of K and V; more than the key tiles that fit between the first query and the last
    registers: int  # of each thread that attends
    head_group: int  # as in `Tile`; in the table the most that `HopperTiles.forward_for` may choose
    q_in_registers: bool  # or else in shared memory

    @property
    def q_tile_size(self) -> int:
        return WARPGROUP_ROWS * self.attenders

    def constants(self, is_causal: bool) -> dict[str, Any]:
        return _common(self, is_causal) | {
            "ATTENDERS": self.attenders,
            "STAGES": self.num_stages,
            "REGISTERS": self.registers,
            "Q_IN_REGISTERS": self.q_in_registers,
        }


@dataclass(frozen=True)
class HopperBackward(_OnHopper):
    """How Hopper's own backward is launched: two warpgroups own WARPGROUP_ROWS keys each."""

    q_tile_size: int  # rows of a query tile
    num_stages: int  # query tiles in shared memory
    registers: int  # of each thread that owns keys
    head_group: int  # as in `Tile`; in the table the most that `HopperTiles.backward_for` may choose
    # For head dims to 64; beyond, the kernel's are fixed.
    dS_stages: int = 2  # of what the two hand over
    dQ_stages: int = 2  # of what is added to dQ

    k_tile_size: ClassVar[int] = 2 * WARPGROUP_ROWS

    def constants(self, is_causal: bool) -> dict[str, Any]:
        return _common(self, is_causal) | {
            "STAGES": self.num_stages,
            "dS_STAGES": self.dS_stages,
            "dQ_STAGES": self.dQ_stages,
            "REGISTERS": self.registers,
        }


# Bytes that the heads of a group may have of what all their tiles read or add to. Hopper's L2 holds 50 or 60 MiB; the
# forward may have more, for it only reads, K and V, and its programs read the same parts at much the same time.
BYTES_OF_A_GROUP = {"forward": 64 * KIB**2, "backward": 16 * KIB**2}
# Below this gain the forward keeps its longer tiles, which read K and V fewer times.
LEAST_GAIN = 1.1


@dataclass(frozen=True)
class HopperTiles:
    """A tile for each of Hopper's own kernels, and one more for the forward where there are few of its tiles."""

    forward: HopperForward
    forward_of_few: HopperForward  # shorter
    backward: HopperBackward

    def forward_for(
        self, n_queries: int, width: int, n_batch_heads: int, is_causal: bool, multiprocessors: int
    ) -> HopperForward:
        """The forward's, by which of the two leaves the busiest multiprocessor less to do (timed with a causal mask),
        with as many heads side by side as BYTES_OF_A_GROUP allows.

        Args:
            width: elements of a padded row.
        """

        def most_rows(tile: HopperForward) -> float:
            """Rows of S of full length that one multiprocessor does, one program at a time."""
            if is_causal:  # long tiles start first and short ones fill the gaps: an even share, but one tile at least
                return max(tile.q_tile_size, n_batch_heads * n_queries / 2 / multiprocessors)
            n_tiles = n_batch_heads * math.ceil(n_queries / tile.q_tile_size)
            return tile.q_tile_size * math.ceil(n_tiles / multiprocessors)

        gains = most_rows(self.forward) > LEAST_GAIN * most_rows(self.forward_of_few)
        tile = self.forward_of_few if gains else self.forward
        head = n_queries * width * (2 + 2)  # K and V, where there are as many keys as queries
        return replace(tile, head_group=_fitting_group(tile.head_group, head, BYTES_OF_A_GROUP["forward"]))

    def backward_for(self, n_queries: int, width: int) -> HopperBackward:
        """The backward's, with as many heads side by side as BYTES_OF_A_GROUP allows.

        Args:
            width: elements of a padded row.
        """
        head = n_queries * width * (2 + 2 + 4)  # Q, dO, and dQ in float32; L and delta are left out
        group = _fitting_group(self.backward.head_group, head, BYTES_OF_A_GROUP["backward"])
        return replace(self.backward, head_group=group)


def _fitting_group(heads: int, bytes_of_a_head: int, available: int) -> int:
    """The table's number of heads side by side, halved until they fit; not below two, which one never beat by 1 %."""
    while heads > 2 and heads * bytes_of_a_head > available:
        heads //= 2
    return heads


@dataclass(frozen=True)
class Tiles:
    """A tile for each kernel that goes over tiles of S."""

    forward: Tile
    dk_dv: Tile
    dq: Tile


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
#
# Compiled by Triton 3.6.0, causal or not, an entry spills nothing unless a comment says so. All are in
# runs/h200/compiled_kernels.md. Where products go through mma (Ampere, float32 on most) warps split an accumulator by
# rows, 16 each, and do the same work twice where there are fewer rows; a tile of fewer rows than columns is split by
# columns, and P and dS pass through shared memory. A limit of 248 registers lets no further program in: ptxas chooses
# differently and saves the last few bytes.

# Timed on an H200 (runs/h200/kernel_log.md; 16-bit widths 64 and 128 are ranked in runs/h200/autotune/): all but the
# backward at width 16, which follows 32, and float32 at 256, whose forward and dk_dv were timed when its products were
# three TF32 ones, and its dq not at all.
HOPPER = {
    **dict.fromkeys(
        [(2, 16), (2, 32)],
        Tiles(
            forward=Tile(64, 128, 4, 3, by_descriptor=True),
            dk_dv=Tile(64, 64, 4, 3, head_group=8, by_descriptor=True),
            dq=Tile(64, 64, 4, 3, by_descriptor=True),
        ),
    ),
    # dk_dv spills 8 bytes, of which its main loop loads one word; dq, not causal, 16, outside of its loops.
    (2, 64): Tiles(
        forward=Tile(64, 128, 4, 2, by_descriptor=True),
        dk_dv=Tile(64, 64, 4, 3, by_descriptor=True, max_registers=168),
        dq=Tile(128, 64, 4, 3, head_group=8, by_descriptor=True),
    ),
    # Forward spills 72 bytes, causal 96; with 8 warps and 128 registers it spills nothing and takes 1.03 to 1.05 times
    # as long.
    (2, 128): Tiles(
        forward=Tile(128, 64, 4, 2, by_descriptor=True),
        dk_dv=Tile(64, 64, 4, 2, by_descriptor=True),
        dq=Tile(128, 64, 8, 3, by_descriptor=True),
    ),
    # dk_dv spills 232 to 240 bytes, dq 48 to 64; the best that spill nothing (32x32 4w 3s, 64x64 8w 2s) take 1.44 and
    # 1.73 times as long.
    (2, 256): Tiles(
        forward=Tile(128, 64, 8, 2, by_descriptor=True),
        dk_dv=Tile(64, 64, 8, 2, by_descriptor=True),
        dq=Tile(64, 64, 4, 2, by_descriptor=True),
    ),
    # dk_dv spills 200 to 208 bytes at width 32 and 8 to 88 at 16; the best that spills nothing at 32 (32x64 4w 3s)
    # takes 1.35 times as long.
    **dict.fromkeys(
        [(4, 16), (4, 32)],
        Tiles(forward=Tile(64, 64, 4, 3), dk_dv=Tile(64, 64, 4, 2), dq=Tile(64, 64, 4, 3)),
    ),
    # dk_dv spills 160 to 168 bytes, dq 88 to 136; the best that spill nothing (16x64 4w 3s, 128x32 8w 3s) take 1.29
    # times as long.
    (4, 64): Tiles(forward=Tile(128, 64, 8, 3), dk_dv=Tile(32, 64, 4, 2), dq=Tile(64, 64, 4, 2)),
    # Forward spills 16 to 24 bytes (64x16 4w 2s, which spills none, takes 1.55 times as long), dk_dv 416 to 424, dq 128
    # to 192.
    (4, 128): Tiles(forward=Tile(64, 32, 4, 1), dk_dv=Tile(32, 32, 4, 2), dq=Tile(32, 32, 4, 2)),
    # The parts of three bfloat16 fit nowhere: forward spills 376 bytes, dk_dv 520 to 528, dq 248 to 264.
    (4, 256): Tiles(forward=Tile(16, 32, 4, 2), dk_dv=Tile(16, 16, 8, 2), dq=Tile(16, 16, 8, 1)),
}

_WIDE_FORWARD = HopperForward(
    attenders=2, k_tile_size=128, num_stages=2, registers=240, head_group=2, q_in_registers=True
)
# For Hopper's own kernels, by padded head dim; what was timed is in runs/h200/kernel_log.md.
HOPPER_OWN = {
    64: HopperTiles(
        HopperForward(attenders=3, k_tile_size=128, num_stages=3, registers=160, head_group=8, q_in_registers=False),
        HopperForward(attenders=2, k_tile_size=128, num_stages=3, registers=160, head_group=8, q_in_registers=False),
        HopperBackward(q_tile_size=64, num_stages=4, registers=216, head_group=4, dS_stages=3),
    ),
    128: HopperTiles(
        _WIDE_FORWARD,
        _WIDE_FORWARD,
        HopperBackward(q_tile_size=64, num_stages=2, registers=240, head_group=4),
    ),
}

# Hopper's, but for one tile that does not fit, and for float32, whose products Triton 3.6 compiles differently there:
# of Hopper's forward for width 64 it leaves 4 registers and no loop. Compiled, not timed. At 128 in 16 bits Hopper's
# dk_dv spills 16 bytes where not causal; float32 at 256 spills 360 (forward), 520 to 544 (dk_dv) and 224 to 232 (dq).
BLACKWELL = {
    **HOPPER,
    (2, 256): replace(HOPPER[2, 256], dk_dv=Tile(64, 32, 8, 2)),  # Hopper's takes 257 KiB of shared memory there
    (4, 16): Tiles(forward=Tile(64, 64, 4, 2), dk_dv=Tile(32, 32, 4, 2), dq=Tile(64, 32, 4, 2, max_registers=168)),
    (4, 32): Tiles(forward=Tile(64, 64, 4, 2), dk_dv=Tile(16, 32, 4, 2), dq=Tile(64, 32, 4, 2, max_registers=168)),
    (4, 64): Tiles(forward=Tile(32, 32, 4, 2), dk_dv=Tile(16, 32, 4, 2), dq=Tile(32, 32, 4, 2)),
    # dk_dv spills 8 bytes, dq 8 to 32.
    (4, 128): Tiles(
        forward=Tile(32, 32, 4, 1, max_registers=248),
        dk_dv=Tile(16, 16, 4, 3, max_registers=248),
        dq=Tile(16, 32, 4, 1, max_registers=248),
    ),
}

# Consumer Ampere, Ada and Blackwell. Compiled, not timed.
AMPERE = {
    (2, 16): Tiles(forward=Tile(64, 64, 4, 2), dk_dv=Tile(32, 64, 4, 2), dq=Tile(64, 64, 4, 2)),
    (2, 32): Tiles(forward=Tile(64, 64, 4, 2, max_registers=168), dk_dv=Tile(32, 64, 4, 2), dq=Tile(64, 64, 4, 2)),
    (2, 64): Tiles(forward=Tile(64, 64, 4, 2), dk_dv=Tile(32, 64, 4, 2), dq=Tile(64, 32, 4, 2)),
    (2, 128): Tiles(forward=Tile(128, 32, 8, 2), dk_dv=Tile(16, 128, 8, 2), dq=Tile(128, 32, 8, 2)),
    (2, 256): Tiles(forward=Tile(64, 64, 8, 1), dk_dv=Tile(32, 32, 8, 2), dq=Tile(32, 64, 8, 1)),
    (4, 16): Tiles(forward=Tile(64, 32, 4, 2), dk_dv=Tile(32, 64, 4, 2), dq=Tile(64, 32, 4, 2)),
    (4, 32): Tiles(forward=Tile(64, 32, 4, 2), dk_dv=Tile(16, 64, 4, 2), dq=Tile(64, 32, 4, 2)),
    (4, 64): Tiles(forward=Tile(32, 32, 4, 2), dk_dv=Tile(16, 32, 4, 3), dq=Tile(32, 32, 4, 2)),
    # dk_dv spills 8 bytes (Blackwell up to 16), dq up to 16 (Blackwell 32); forward on Blackwell 16 where not causal.
    (4, 128): Tiles(
        forward=Tile(32, 32, 4, 1, max_registers=248),
        dk_dv=Tile(16, 16, 4, 2),
        dq=Tile(16, 32, 4, 1, max_registers=248),
    ),
    # Forward spills 96 to 216 bytes (Blackwell 80 to 248), dk_dv 480 (568 to 632), dq 248 to 256 (272 to 280).
    (4, 256): Tiles(forward=Tile(16, 16, 4, 1), dk_dv=Tile(16, 16, 8, 1), dq=Tile(16, 16, 8, 1)),
}

# Consumer Ampere's, with larger tiles and deeper pipelines where there is more shared memory. Compiled, not timed.
# float32 at 128 spills 16 to 24 bytes (dq), at 256 152 to 264 (forward), 464 (dk_dv) and 280 to 296 (dq).
A100 = {
    **AMPERE,
    (2, 32): Tiles(forward=Tile(128, 64, 8, 2), dk_dv=Tile(32, 64, 4, 2), dq=Tile(128, 64, 8, 2, max_registers=128)),
    (2, 64): Tiles(forward=Tile(128, 64, 4, 3), dk_dv=Tile(32, 64, 4, 2), dq=Tile(64, 32, 4, 2, max_registers=128)),
    (2, 128): Tiles(forward=Tile(128, 64, 8, 3), dk_dv=Tile(64, 64, 8, 2), dq=Tile(128, 32, 8, 2)),
    (2, 256): Tiles(forward=Tile(64, 64, 8, 2), dk_dv=Tile(64, 32, 8, 2, max_registers=248), dq=Tile(32, 64, 8, 2)),
    (4, 64): replace(AMPERE[4, 64], forward=Tile(64, 32, 4, 2)),
}

# Compiled, not timed.
TURING = {
    (2, 16): Tiles(
        forward=Tile(128, 16, 4, 1, max_registers=128),
        dk_dv=Tile(32, 64, 4, 1),
        dq=Tile(64, 32, 4, 1, max_registers=168),
    ),
    (2, 32): Tiles(forward=Tile(64, 32, 4, 1), dk_dv=Tile(16, 64, 4, 1), dq=Tile(64, 32, 4, 1)),
    (2, 64): Tiles(forward=Tile(64, 16, 8, 1), dk_dv=Tile(16, 32, 8, 1), dq=Tile(32, 16, 4, 1)),
    (2, 128): Tiles(forward=Tile(32, 16, 4, 1), dk_dv=Tile(16, 16, 8, 1), dq=Tile(16, 16, 8, 1)),
    # Of the smallest tiles dk_dv spills 928 to 944 bytes, dq 328 to 336.
    (2, 256): Tiles(forward=Tile(16, 16, 8, 1), dk_dv=Tile(16, 16, 8, 1), dq=Tile(16, 16, 8, 1)),
    (4, 16): Tiles(forward=Tile(64, 32, 4, 1), dk_dv=Tile(32, 64, 4, 1), dq=Tile(64, 32, 4, 1)),
    (4, 32): Tiles(forward=Tile(64, 32, 4, 1), dk_dv=Tile(16, 64, 4, 1), dq=Tile(64, 32, 4, 1)),
    (4, 64): Tiles(forward=Tile(64, 16, 8, 1), dk_dv=Tile(16, 32, 4, 1), dq=Tile(32, 16, 4, 1)),
    # At 256 float32 needs more shared memory than Turing has: `fitted` says so.
    **dict.fromkeys(
        [(4, 128), (4, 256)],
        Tiles(forward=Tile(16, 16, 4, 1), dk_dv=Tile(16, 16, 8, 1), dq=Tile(16, 16, 8, 1)),
    ),
}

TABLES = (HOPPER, BLACKWELL, A100, AMPERE, TURING)


def table_for(gpu: Gpu) -> dict[tuple[int, int], Tiles]:
    """By generation; the tables of data-centre GPUs only where there is as much shared memory as they have."""
    if gpu.capability >= (9, 0) and gpu.shared_memory >= 227 * KIB:
        return BLACKWELL if gpu.capability >= (10, 0) else HOPPER
    if gpu.capability >= (8, 0) and gpu.shared_memory >= 163 * KIB:
        return A100
    return AMPERE if gpu.capability >= (8, 0) else TURING


@dataclass(frozen=True)
class Kernel:
    """What of a kernel decides how much shared memory it needs."""

    name: str  # the field of `Tiles`
    held: Callable[[Tile], int]  # rows of the tiles that stay, together: Q; or K and V; or Q and dO
    streamed: Callable[[Tile], int]  # rows of each of the two tiles that the loop loads
    copied_on_blackwell: int  # how many of these two Triton 3.6 copies there, for products with their transposes


KERNELS = (
    Kernel("forward", lambda tile: tile.q_tile_size, lambda tile: tile.k_tile_size, copied_on_blackwell=0),
    Kernel("dk_dv", lambda tile: 2 * tile.k_tile_size, lambda tile: tile.q_tile_size, copied_on_blackwell=2),
    Kernel("dq", lambda tile: 2 * tile.q_tile_size, lambda tile: tile.k_tile_size, copied_on_blackwell=1),
)


def shared_memory_bound(kernel: Kernel, tile: Tile, width: int, dtype: torch.dtype, gpu: Gpu) -> int:
    """The shared memory of a kernel in bytes: from width 64 on an upper bound.

    There it is up to 2.4 times what Triton 3.6 allots to an entry of the tables. For widths 16 and 32 Triton may allot
    up to 17 KiB more than this, which fits all the same.

    Args:
        width: elements of a padded row.
    """
    buffered = 2 * kernel.streamed(tile) * tile.num_stages
    # Operands of float32 products, and of all products without tensor cores, also pass through copies.
    copied = 0 if gpu.uses_tensor_cores and dtype != torch.float32 else 2 * max(tile.q_tile_size, tile.k_tile_size)
    if gpu.capability >= (10, 0) and tile.by_descriptor:
        copied += kernel.copied_on_blackwell * kernel.streamed(tile)
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


def shipped_tiles(gpu: Gpu, d: int, dtype: torch.dtype) -> Tiles:
    """What the shipped tables have for tensors (…, n, d) of `dtype` on `gpu`, cut to fit.

    Raises:
        TypeError, ValueError: `gpu` cannot run the kernels in that dtype (`Gpu.check`), or has too little memory; d is
            not one that there are kernels for.
    """
    gpu.check(dtype)
    if not 1 <= d <= MAX_HEAD_DIM:
        raise ValueError(f"the head dim is {d}; allowed are 1 to {MAX_HEAD_DIM}")
    return cut_to_fit(table_for(gpu)[dtype.itemsize, padded_head_dim(d)], gpu, d, dtype)


def cut_to_fit(tiles: Tiles, gpu: Gpu, d: int, dtype: torch.dtype) -> Tiles:
    """`tiles`, each `fitted` to the shared memory of `gpu` for tensors (…, n, d) of `dtype`.

    Raises:
        ValueError: as for `fitted`.
    """
    width = padded_head_dim(d)

    def fit(kernel: Kernel) -> Tile:
        return fitted(
            getattr(tiles, kernel.name), lambda tile: shared_memory_bound(kernel, tile, width, dtype, gpu), gpu
        )

    return Tiles(**{kernel.name: fit(kernel) for kernel in KERNELS})
