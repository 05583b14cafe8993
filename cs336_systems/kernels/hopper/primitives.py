"""What the Hopper kernels share: rings of buffers, layouts, turns on the tensor cores."""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

from cs336_systems.kernels.primitives import Constexprs
from cs336_systems.kernels.tiles import WARPGROUP_ROWS

ROWS = gl.constexpr(WARPGROUP_ROWS)


@dataclass(frozen=True)
class ForwardTiling(Constexprs):
    """What Hopper's forward is compiled for."""

    D_TILE_SIZE: gl.constexpr  # D padded to a power of two
    Q_TILE_SIZE: gl.constexpr  # rows of a query tile: ROWS for each attender
    K_TILE_SIZE: gl.constexpr  # rows of a key tile
    IS_CAUSAL: gl.constexpr
    HEAD_GROUP: gl.constexpr  # see `assigned_tile`
    ATTENDERS: gl.constexpr  # warpgroups that attend
    STAGES: gl.constexpr  # of the rings of K and V
    REGISTERS: gl.constexpr  # of each thread that attends
    Q_IN_REGISTERS: gl.constexpr  # or else in shared memory


@dataclass(frozen=True)
class BackwardTiling(Constexprs):
    """What Hopper's backward kernels are compiled for."""

    D: gl.constexpr  # columns of q, k, v and o
    D_TILE_SIZE: gl.constexpr  # D padded to a power of two
    Q_TILE_SIZE: gl.constexpr  # rows of a query tile
    K_TILE_SIZE: gl.constexpr  # keys of a program: ROWS for each of two warpgroups
    IS_CAUSAL: gl.constexpr
    HEAD_GROUP: gl.constexpr  # see `assigned_tile`
    STAGES: gl.constexpr  # query tiles in shared memory
    dS_STAGES: gl.constexpr  # buffers of dS that the warpgroups hand over
    dQ_STAGES: gl.constexpr  # buffers of what is added to dQ
    REGISTERS: gl.constexpr  # of each thread that owns keys


@aggregate
class Ring:
    """Buffers in shared memory that the copy engine fills in turn, and that several warpgroups read.

    Use number i is of buffer i % stages. A barrier's phase is 0 while the first use is under way, then 1, then 0.
    """

    buffers: gl.shared_memory_descriptor  # (stages, 1, 1, rows, D)
    filled: gl.shared_memory_descriptor  # (stages, 1)
    free: gl.shared_memory_descriptor  # (stages, 1)
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, filled, free, stages):
        self.buffers = buffers
        self.filled = filled
        self.free = free
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def fill(self, i, x, batch, head, row):
        """As soon as the buffer of use i is free: let the copy engine read rows from `row` on into it."""
        rows: gl.constexpr = self.buffers.shape[3]
        width: gl.constexpr = self.buffers.shape[4]
        stage = i % self.stages
        wait_free(self.free, i)
        mbarrier.expect(self.filled.index(stage), rows * width * 2)
        tma.async_copy_global_to_shared(x, [batch, head, row, 0], self.filled.index(stage), self.buffers.index(stage))

    @gluon.jit
    def get(self, i):
        """The buffer of use i, as a matrix, once it is filled."""
        wait_filled(self.filled, i)
        return matrix_of(self.buffers, i % self.stages)

    @gluon.jit
    def release(self, i):
        """Say that this warpgroup reads use i no more."""
        mbarrier.arrive(self.free.index(i % self.stages), count=1)


@gluon.jit
def make_ring(x, stages: gl.constexpr, readers: gl.constexpr):
    """A ring for tiles of the descriptor x, each of them read by `readers` warpgroups."""
    block: gl.constexpr = x.block_type.shape
    buffers = gl.allocate_shared_memory(x.dtype, [stages, 1, 1, block[2], block[3]], x.layout)
    return Ring(buffers, make_barriers(stages, 1), make_barriers(stages, readers), stages)


@gluon.jit
def make_barriers(stages: gl.constexpr, arrivals: gl.constexpr):
    """(stages, 1): barriers that complete a phase with so many arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(barriers.index(stage), count=arrivals)
    return barriers


@gluon.jit
def wait_filled(filled, i):
    """Wait until use i of a ring's buffers is filled."""
    mbarrier.wait(filled.index(i % filled.shape[0]), i // filled.shape[0] & 1)


@gluon.jit
def wait_free(free, i):
    """Wait until the use before use i of its buffer is over.

    The first use waits for nothing: a barrier that has completed no phase counts as having completed one of parity 1.
    """
    mbarrier.wait(free.index(i % free.shape[0]), (i // free.shape[0] & 1) ^ 1)


@gluon.jit
def matrix_of(buffers, index):
    """One of the buffers (…, 1, 1, rows, columns), as the copy engine takes them, as a matrix (rows, columns)."""
    rows: gl.constexpr = buffers.shape[3]
    columns: gl.constexpr = buffers.shape[4]
    return buffers.index(index).reshape([rows, columns])


@gluon.constexpr_function
def product_layout(columns):
    """How a warpgroup holds a matrix product (ROWS, columns): each warp 16 rows, each row spread over four threads."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def operand_layout(columns):
    """How a warpgroup holds a left operand of 16-bit numbers whose product has so many columns."""
    return gl.DotOperandLayout(0, product_layout(columns), 2)


@gluon.jit
def row_max(S):
    """The maximum of each row, in four chains a thread instead of one long one."""
    rows: gl.constexpr = S.shape[0]
    columns: gl.constexpr = S.shape[1]
    in_chains = gl.max(gl.reshape(S, [rows, columns // 16, 16]), 1)
    return gl.convert_layout(gl.max(in_chains, 1), gl.SliceLayout(1, S.type.layout))


@gluon.jit
def partial_row_sums(P):
    """(rows, 8): sums over every eighth column, each within one thread, so that no threads exchange anything."""
    rows: gl.constexpr = P.shape[0]
    columns: gl.constexpr = P.shape[1]
    return gl.sum(gl.reshape(P, [rows, columns // 8, 8]), 1)


@gluon.jit
def wait_for_turn(W: gl.constexpr):
    """Wait until another warpgroup passes the turn on to warpgroup W.

    The barrier counts 256 threads: 128 that wait and 128 that pass the turn on. `turn` has an element for each thread
    of a warpgroup, so that each executes the instruction once. (Ids of barriers below 8 are the compiler's.)
    """
    turn = gl.full([128], 8 + W, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.u32 $0, $1;", "=r,r", [turn], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def pass_turn(W: gl.constexpr):
    """Let warpgroup W go on, as soon as it waits. (At a program's end one turn is left that nobody takes.)"""
    turn = gl.full([128], 8 + W, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.u32 $0, $1;", "=r,r", [turn], dtype=gl.int32, is_pure=False, pack=1
    )
