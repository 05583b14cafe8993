"""What both of Hopper's backward kernels share: the plain kernels around them, and what passes through shared memory.

L and delta come as matrix products. Reading them from shared memory, a number for each column of S^T, costs more than
a matmul: instead each is split into parts of the inputs' dtype, PART_COLUMNS columns, and S^T - L becomes K q^T +
weights · parts^T, one more step of the same product.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.language.core import _aggregate as aggregate

from cs336_systems.kernels.hopper.primitives import ROWS, make_barriers, matrix_of, wait_filled
from cs336_systems.kernels.primitives import assigned_tile, load_per_query, load_tile, store_tile, tile_pointers
from cs336_systems.kernels.tiles import STEP_COLUMNS

PART_COLUMNS = gl.constexpr(STEP_COLUMNS)  # of the split L and delta


@dataclass(frozen=True)
class Split:
    """How float32 numbers are split into numbers of a 16-bit type."""

    weights: tuple[float, ...]  # what each part counts for
    largest_part: float
    largest: float  # an L past it, in the units of unscaled scores, is taken for this one
    hiding: tuple[float, float]  # (part, weight) of each column that is left: their products make P 0, whatever L


# bfloat16 has float32's range, and 8 bits: three parts make 24. float16 has 11 bits, ends at 65504 and loses bits below
# 2^-14: six parts of weight 2^15 reach 2^33, and the last weight leaves an error of at most 2^-31.
BFLOAT16 = gl.constexpr(Split((1.0,) * 3, 3e38, 1e20, (1.0, -1e30)))
FLOAT16 = gl.constexpr(Split((2.0**15,) * 6 + (2.0**4, 2.0**-6), 65504.0, 1.2e10, (2.0**15, -65504.0)))


@triton.constexpr_function
def split_of(dtype):
    return (BFLOAT16 if dtype == tl.bfloat16 else FLOAT16).value


@triton.jit
def flash_backward_hopper_preprocess_kernel(
    o, dO, L_ptr, parts_ptr, dq_sum, n_heads, n_batch_heads, n_queries, scale, T: tl.constexpr
):
    """Line 2, and L and delta in parts, for K_TILE_SIZE queries of one head; their rows of dq_sum are set to zero.

    o, dO: (batch, heads, n_queries, D); dq_sum: float32, (batch, heads, n_queries, D_TILE_SIZE). L_ptr: float32,
    contiguous (batch, heads, n_queries), natural logarithm. parts_ptr: (batch · heads, query tiles, 2, Q_TILE_SIZE,
    PART_COLUMNS) in the dtype of dO: -L in the units of unscaled scores, and -delta; as many query tiles as fill tiles
    of K_TILE_SIZE. T: a `BackwardTiling`.
    """
    n_tiles = tl.cdiv(n_queries, T.K_TILE_SIZE)
    tile, batch, head = assigned_tile(n_tiles, n_heads, n_batch_heads, 1)
    i = tile * T.K_TILE_SIZE
    o_i = load_tile(o, batch, head, i, n_queries, T.K_TILE_SIZE, T, CHECK_ROWS=True)
    dO_i = load_tile(dO, batch, head, i, n_queries, T.K_TILE_SIZE, T, CHECK_ROWS=True)
    delta_i = tl.sum(o_i.to(tl.float32) * dO_i.to(tl.float32), 1)  # line 2
    L_i = load_per_query(L_ptr, batch, head, n_heads, i, n_queries, T.K_TILE_SIZE, CHECK=True)
    # Where there is no query, or none of its scores is above -inf: with an L as large as parts can be its P is 0.
    rows = tl.arange(0, T.K_TILE_SIZE)
    seen = (i + rows < n_queries) & (L_i != float("-inf"))
    # From 2^24 on float32 resolves L and S to 2 at best: exp(S - L) must not come out as inf.
    in_reach = tl.where(tl.abs(L_i) < 2.0**24, L_i, L_i + tl.abs(L_i) * 2.0**-20)
    SPLIT: tl.constexpr = split_of(dO_i.dtype)
    in_range = tl.clamp(tl.where(seen, in_reach / scale, SPLIT.largest), -SPLIT.largest, SPLIT.largest)
    L_i = tl.where(L_i == L_i, in_range, L_i)  # clamp makes a number of NaN, and gradients would hide it

    first = ((tl.cast(batch, tl.int64) * n_heads + head) * n_tiles + tile) * 2 * T.K_TILE_SIZE * PART_COLUMNS
    row_of_L = rows // T.Q_TILE_SIZE * 2 * T.Q_TILE_SIZE + rows % T.Q_TILE_SIZE
    pointers = parts_ptr + first + row_of_L[:, None] * PART_COLUMNS + tl.arange(0, PART_COLUMNS)[None, :]
    tl.store(pointers, _in_parts(-L_i, SPLIT.hiding[0], dO_i.dtype))
    tl.store(pointers + T.Q_TILE_SIZE * PART_COLUMNS, _in_parts(-delta_i, 0.0, dO_i.dtype))
    zeros = tl.zeros([T.K_TILE_SIZE, T.D_TILE_SIZE], tl.float32)
    pointers = tile_pointers(dq_sum, batch, head, i, T.K_TILE_SIZE, T.D_TILE_SIZE)
    tl.store(pointers, zeros, mask=(i + rows < n_queries)[:, None])


@triton.jit
def _in_parts(x, rest: tl.constexpr, dtype: tl.constexpr):
    """(rows, PART_COLUMNS): parts whose sum, each times its weight, is x to float32's last bits; then `rest`.

    Of an infinity and of NaN the sum is NaN.
    """
    column = tl.arange(0, PART_COLUMNS)[None, :]
    result = tl.full([x.shape[0], PART_COLUMNS], rest, tl.float32).to(dtype)
    SPLIT: tl.constexpr = split_of(dtype)
    for part in tl.static_range(len(SPLIT.weights)):
        weight = SPLIT.weights[part]
        in_range = tl.clamp(x / weight, -SPLIT.largest_part, SPLIT.largest_part)
        rounded = tl.where(tl.abs(x) < float("inf"), in_range, x).to(dtype)
        result = tl.where(column == part, rounded[:, None], result)
        x = x - rounded.to(tl.float32) * weight
    return result


@triton.jit
def flash_backward_hopper_postprocess_kernel(dq, dq_sum, n_heads, n_batch_heads, n_queries, scale, T: tl.constexpr):
    """dQ = scale · (sum of dS K), in its dtype, for one query tile of one head."""
    tile, batch, head = assigned_tile(tl.cdiv(n_queries, T.Q_TILE_SIZE), n_heads, n_batch_heads, 1)
    i = tile * T.Q_TILE_SIZE
    sums = load_tile(dq_sum, batch, head, i, n_queries, T.Q_TILE_SIZE, T, CHECK_ROWS=True)
    store_tile(dq, batch, head, i, n_queries, sums * scale, T.Q_TILE_SIZE, T)


@builtin
def add_to_global(x, coordinates, tile, _semantic=None):
    """Let the copy engine add a tile in shared memory to x in global memory. (Gluon has no name of its own for it.)"""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, x.handle, coordinates, tile.handle)


@aggregate
class Work:
    """What one program computes: the keys from j on, of one head, over n_steps query tiles from first_tile on."""

    batch: gl.tensor
    head: gl.tensor
    j: gl.tensor
    first_tile: gl.tensor
    n_steps: gl.tensor
    scale: gl.tensor

    @gluon.constexpr_function
    def __init__(self, batch, head, j, first_tile, n_steps, scale):
        self.batch = batch
        self.head = head
        self.j = j
        self.first_tile = first_tile
        self.n_steps = n_steps
        self.scale = scale


@aggregate
class KeyTiles:
    """This program's 2 · ROWS keys, a half for each of two warpgroups, and the weights of the parts for each key."""

    k_tiles: gl.shared_memory_descriptor  # (2, 1, 1, ROWS, D)
    v_tiles: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor  # (2, ROWS, PART_COLUMNS)
    filled: gl.shared_memory_descriptor  # one barrier: K and V have arrived

    @gluon.constexpr_function
    def __init__(self, k_tiles, v_tiles, weights, filled):
        self.k_tiles = k_tiles
        self.v_tiles = v_tiles
        self.weights = weights
        self.filled = filled

    @gluon.jit
    def load(self, k, v, work):
        """Line 7."""
        width: gl.constexpr = self.k_tiles.shape[4]
        mbarrier.expect(self.filled, 4 * ROWS * width * 2)
        for half in gl.static_range(2):
            rows = [work.batch, work.head, work.j + half * ROWS, 0]
            tma.async_copy_global_to_shared(k, rows, self.filled, self.k_tiles.index(half))
            tma.async_copy_global_to_shared(v, rows, self.filled, self.v_tiles.index(half))

    @gluon.jit
    def wait(self):
        mbarrier.wait(self.filled, 0)

    @gluon.jit
    def k_j(self, half: gl.constexpr):
        """K of one half, (ROWS, D)."""
        return matrix_of(self.k_tiles, half)

    @gluon.jit
    def v_j(self, half: gl.constexpr):
        """V of one half, (ROWS, D)."""
        return matrix_of(self.v_tiles, half)

    @gluon.jit
    def store_gradient(self, half: gl.constexpr, x, gradient, work):
        """Line 19 for one half, through the buffer of V, which nobody reads any more; rows past n_keys are left out."""
        self.v_j(half).store(gradient.to(x.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(x, [work.batch, work.head, work.j + half * ROWS, 0], self.v_tiles.index(half))
        tma.store_wait(0)


@gluon.jit
def make_key_tiles(k, v, j, n_keys):
    """Room for the keys j, …, j + 2 · ROWS - 1."""
    k_tiles = gl.allocate_shared_memory(k.dtype, [2, 1, 1, ROWS, k.block_type.shape[3]], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [2, 1, 1, ROWS, v.block_type.shape[3]], v.layout)
    weights = gl.allocate_shared_memory(k.dtype, [2, ROWS, PART_COLUMNS], gl.NVMMASharedLayout(32, 16, 2))
    for half in gl.static_range(2):
        weights.index(half).store(_weights(j + half * ROWS, n_keys, k.dtype))
    filled = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(filled, count=1)
    return KeyTiles(k_tiles, v_tiles, weights, filled)


@gluon.jit
def _weights(j, n_keys, dtype: gl.constexpr):
    """(ROWS, PART_COLUMNS): for each key from j on, what the parts count for.

    The columns that are left are the same for every query. They hide keys past n_keys, which come as zeros and would
    have scores of 0: their P is 0. For all other keys they count for nothing.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    keys = j + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, PART_COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
    SPLIT: gl.constexpr = split_of(dtype)
    weights = gl.where((keys >= n_keys)[:, None], SPLIT.hiding[1], gl.zeros([ROWS, PART_COLUMNS], gl.float32, LAYOUT))
    for part in gl.static_range(len(SPLIT.weights)):
        weights = gl.where(column == part, SPLIT.weights[part], weights)
    return weights.to(dtype)


@aggregate
class QueryRing:
    """The query tiles that see these keys, one a step: Q, dO, and L and delta in parts, `stages` steps in a ring."""

    q_tiles: gl.shared_memory_descriptor  # (stages, 1, 1, Q_TILE_SIZE, D)
    dO_tiles: gl.shared_memory_descriptor
    part_tiles: gl.shared_memory_descriptor  # (2 · stages, Q_TILE_SIZE, PART_COLUMNS): L, delta, L, delta, …
    filled: gl.shared_memory_descriptor  # (stages, 1): all four have arrived
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, q_tiles, dO_tiles, part_tiles, filled, stages):
        self.q_tiles = q_tiles
        self.dO_tiles = dO_tiles
        self.part_tiles = part_tiles
        self.filled = filled
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def load(self, step, wanted, q, dO, parts, work, part_row):
        """Line 10 for one step, nothing unless wanted. part_row: where this head's parts begin."""
        rows: gl.constexpr = self.q_tiles.shape[3]
        width: gl.constexpr = self.q_tiles.shape[4]
        i = (work.first_tile + step) * rows
        at = [work.batch, work.head, i, 0]
        stage = step % self.stages
        arrived = self.filled.index(stage)
        mbarrier.expect(arrived, 2 * rows * (width + PART_COLUMNS) * 2, pred=wanted)
        tma.async_copy_global_to_shared(q, at, arrived, self.q_tiles.index(stage), pred=wanted)
        for which in gl.static_range(2):
            part_tile = self.part_tiles.index(2 * stage + which)
            row = part_row + 2 * i + which * rows
            tma.async_copy_global_to_shared(parts, [row, 0], arrived, part_tile, pred=wanted)
        tma.async_copy_global_to_shared(dO, at, arrived, self.dO_tiles.index(stage), pred=wanted)

    @gluon.jit
    def wait(self, step):
        wait_filled(self.filled, step)

    @gluon.jit
    def q_i(self, step):
        """Q, (Q_TILE_SIZE, D)."""
        return matrix_of(self.q_tiles, step % self.stages)

    @gluon.jit
    def dO_i(self, step):
        """dO, (Q_TILE_SIZE, D)."""
        return matrix_of(self.dO_tiles, step % self.stages)

    @gluon.jit
    def scores(self, step, k_j, weights, zeros):
        """Line 11, unscaled and less L, transposed: K q^T + weights · parts^T, begun.

        k_j, weights: in registers or in shared memory.
        """
        L_i = self.part_tiles.index(2 * (step % self.stages))
        S_T = warpgroup_mma(k_j, self.q_i(step).permute((1, 0)), zeros, use_acc=False, is_async=True)
        return warpgroup_mma(weights, L_i.permute((1, 0)), S_T, is_async=True)

    @gluon.jit
    def dP(self, step, v_j, weights, zeros):
        """Line 14 less delta, transposed: V dO^T + weights · parts^T, begun; as `scores`."""
        delta_i = self.part_tiles.index(2 * (step % self.stages) + 1)
        dP_T = warpgroup_mma(v_j, self.dO_i(step).permute((1, 0)), zeros, use_acc=False, is_async=True)
        return warpgroup_mma(weights, delta_i.permute((1, 0)), dP_T, is_async=True)


@gluon.jit
def make_query_ring(q, dO, parts, stages: gl.constexpr):
    """Room for `stages` tiles of each of the descriptors."""
    block: gl.constexpr = q.block_type.shape
    q_tiles = gl.allocate_shared_memory(q.dtype, [stages, 1, 1, block[2], block[3]], q.layout)
    dO_tiles = gl.allocate_shared_memory(q.dtype, [stages, 1, 1, block[2], block[3]], dO.layout)
    part_tiles = gl.allocate_shared_memory(q.dtype, [2 * stages, block[2], PART_COLUMNS], parts.layout)
    return QueryRing(q_tiles, dO_tiles, part_tiles, make_barriers(stages, 1), stages)


@aggregate
class Handover:
    """dS^T of both halves of the keys, as the warpgroups that form dQ read it, `stages` steps in a ring."""

    tiles: gl.shared_memory_descriptor  # (2 · stages, ROWS, Q_TILE_SIZE)
    filled: gl.shared_memory_descriptor  # (stages, 1): both halves are there
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, filled, stages):
        self.tiles = tiles
        self.filled = filled
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def put(self, half: gl.constexpr, step, dS_T):
        """Hand over one half of a step, in a buffer that is known to be free."""
        stage = step % self.stages
        self.tiles.index(2 * stage + half).store(dS_T)
        fence_async_shared()
        mbarrier.arrive(self.filled.index(stage), count=1)

    @gluon.jit
    def wait(self, step):
        wait_filled(self.filled, step)

    @gluon.jit
    def dS(self, half: gl.constexpr, step):
        """(Q_TILE_SIZE, ROWS)"""
        return self.tiles.index(2 * (step % self.stages) + half).permute((1, 0))


@gluon.jit
def make_handover(q, stages: gl.constexpr):
    """Room for tiles of as many queries as those of the descriptor q."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    tiles = gl.allocate_shared_memory(q.dtype, [2 * stages, ROWS, q.block_type.shape[2]], layout)
    return Handover(tiles, make_barriers(stages, 2), stages)


@gluon.jit
def query_tile_range(j, n_queries, T: gl.constexpr):
    """(n_tiles, first): how many query tiles there are, counted up to a multiple of 2 · ROWS queries, as `parts` is
    padded; and the first that sees key j, n_tiles if none does.
    """
    per_key_tile: gl.constexpr = 2 * ROWS // T.Q_TILE_SIZE
    n_tiles = gl.cdiv(n_queries, 2 * ROWS) * per_key_tile
    return n_tiles, gl.minimum(j // T.Q_TILE_SIZE, n_tiles) if T.IS_CAUSAL else 0
