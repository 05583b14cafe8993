"""Algorithm 2 on Hopper in one pass: P and dP are formed once, five matmuls instead of the portable kernels' seven.

A program owns 128 keys and walks over the queries that see them. Two warpgroups of 64 keys each form S^T, dP^T, dV and
dK in registers, and hand dS to a third through shared memory. That one forms dQ = dS K of the query tile, and lets the
copy engine add it to dQ in global memory, in float32: whoever comes first is first, so the last bits of dQ differ from
run to run. It also loads: it issues copies while its products run.

    loader and dQ               K V once;  q dO L delta  …          dQ_i += dS K  -> global memory, by the copy engine
    keys 0 (64 keys)            S^T = K q^T - L, dP^T = V dO^T - delta, dV += P^T dO, dK += dS^T q  -> dV, dK
    keys 1 (64 keys)            the same for the next 64 keys

L and delta come as products as well. Reading them from shared memory, a number for each column of S^T, costs more than
a matmul: instead each is split into three parts of the inputs' dtype, PARTS columns with zeros behind, and S^T - L
becomes K q^T + weights · parts^T, one more step of the same product.

Two kernels of plain Triton stand around it: `flash_backward_hopper_prepare_kernel` makes delta (line 2) and the parts
and clears dQ, `flash_backward_hopper_finish_kernel` scales dQ and rounds it to its dtype.
"""

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cs336_systems.kernels.hopper.primitives import LOG2_E, ROWS, operand_layout, product_layout
from cs336_systems.kernels.primitives import (
    assigned_tile,
    load_per_query,
    load_tile,
    per_query,
    store_tile,
)

PARTS = gl.constexpr(16)  # columns of the split L and delta: what one step of a product takes


@triton.jit
def flash_backward_hopper_prepare_kernel(
    o, dO, L_ptr, parts_ptr, dq_sum, n_heads, n_batch_heads, n_queries, scale,
    D: tl.constexpr, D_TILE_SIZE: tl.constexpr, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr,
):  # fmt: skip
    """Line 2, and L and delta in parts, for K_TILE_SIZE queries of one head; their rows of dq_sum are set to zero.

    o, dO: (batch, heads, n_queries, D); dq_sum: float32, (batch, heads, n_queries, D_TILE_SIZE). L_ptr: float32,
    contiguous (batch, heads, n_queries), natural logarithm. parts_ptr: (batch · heads, query tiles, 2, Q_TILE_SIZE,
    PARTS) in the dtype of dO: -L in the units of unscaled scores, and -delta; as many query tiles as fill tiles of
    K_TILE_SIZE.
    """
    n_tiles = tl.cdiv(n_queries, K_TILE_SIZE)
    tile, batch, head = assigned_tile(n_tiles, n_heads, n_batch_heads, 1)
    i = tile * K_TILE_SIZE
    o_i = load_tile(o, batch, head, i, n_queries, D, K_TILE_SIZE, D_TILE_SIZE, CHECK_ROWS=True)
    dO_i = load_tile(dO, batch, head, i, n_queries, D, K_TILE_SIZE, D_TILE_SIZE, CHECK_ROWS=True)
    delta_i = tl.sum(o_i.to(tl.float32) * dO_i.to(tl.float32), 1)  # line 2
    L_i = load_per_query(per_query(L_ptr, batch, head, n_heads, n_queries), i, n_queries, K_TILE_SIZE, CHECK=True)
    # Where there is no query, or none of its scores is above -inf: with an L as large as parts can be its P is 0.
    rows = tl.arange(0, K_TILE_SIZE)
    seen = (i + rows < n_queries) & (L_i != float("-inf"))
    LARGEST: tl.constexpr = _largest(dO_i.dtype)
    L_i = tl.clamp(tl.where(seen, L_i / scale, LARGEST), -LARGEST, LARGEST)

    first = ((tl.cast(batch, tl.int64) * n_heads + head) * n_tiles + tile) * 2 * K_TILE_SIZE * PARTS
    row_of_L = rows // Q_TILE_SIZE * 2 * Q_TILE_SIZE + rows % Q_TILE_SIZE
    pointers = parts_ptr + first + row_of_L[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
    tl.store(pointers, _in_parts(-L_i, _hiding(dO_i.dtype)[0], dO_i.dtype))
    tl.store(pointers + Q_TILE_SIZE * PARTS, _in_parts(-delta_i, 0.0, dO_i.dtype))
    zeros = tl.zeros([K_TILE_SIZE, D_TILE_SIZE], tl.float32)
    store_tile(dq_sum, batch, head, i, n_queries, zeros, D_TILE_SIZE, K_TILE_SIZE, D_TILE_SIZE)


@triton.jit
def _in_parts(x, last: tl.constexpr, dtype: tl.constexpr):
    """(rows, PARTS): three numbers of `dtype` whose sum, each times its `_weight`, is x to the last bits of float32;
    zeros; and `last`.
    """
    column = tl.arange(0, PARTS)[None, :]
    result = tl.where(column == PARTS - 1, last, tl.zeros([x.shape[0], PARTS], tl.float32)).to(dtype)
    for part in tl.static_range(3):
        weight = _weight(part, dtype)
        rounded = (x / weight).to(dtype)
        result = tl.where(column == part, rounded[:, None], result)
        x = x - rounded.to(tl.float32) * weight
    return result


@triton.constexpr_function
def _weight(part, dtype):
    """What part number `part` counts for. bfloat16 has float32's range, and 8 bits: three parts make 24. float16 has 11
    bits but ends at 65504, and below 2^-14 has fewer: weights keep each part where there are all, from 2^-31 to 2^30.
    """
    return 1.0 if dtype == tl.bfloat16 else (2.0**15, 2.0**4, 2.0**-6)[part]


@triton.constexpr_function
def _largest(dtype):
    """The largest L, in the units of unscaled scores, that is split into parts: past it, it is taken for this one."""
    return 1e20 if dtype == tl.bfloat16 else 1.9e9


@triton.constexpr_function
def _hiding(dtype):
    """(part, weight) whose product takes so much from a score that its P is 0 for the smallest L as well."""
    return (1.0, -1e30) if dtype == tl.bfloat16 else (2.0**15, -65504.0)


@builtin
def add_to_global(x, coordinates, tile, _semantic=None):
    """Let the copy engine add a tile in shared memory to x in global memory. (Gluon has no name of its own for it.)"""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, x.handle, coordinates, tile.handle)


@gluon.jit
def flash_backward_hopper_kernel(
    q, k, v, dO, parts, dq_sum, dk, dv, n_heads, n_batch_heads, n_queries, n_keys, scale,
    D_TILE_SIZE: gl.constexpr, Q_TILE_SIZE: gl.constexpr, K_TILE_SIZE: gl.constexpr, IS_CAUSAL: gl.constexpr,
    HEAD_GROUP: gl.constexpr, STAGES: gl.constexpr, dS_STAGES: gl.constexpr, dQ_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Algorithm 2 for the keys j, …, j + K_TILE_SIZE - 1 of one head.

    Descriptors: q, dO of (batch, heads, n_queries, D) and dq_sum of (…, D_TILE_SIZE), float32, in tiles of Q_TILE_SIZE;
    k, v, dk, dv of (batch, heads, n_keys, D) in tiles of ROWS; parts of (rows, PARTS), see the first kernel. scale:
    1 / sqrt(D). K_TILE_SIZE: 2 ROWS, a multiple of Q_TILE_SIZE. REGISTERS: of each thread that owns keys.
    """
    # Causal work shrinks with the key index: the first tile is the longest and goes first.
    tile, batch, head = assigned_tile(gl.cdiv(n_keys, K_TILE_SIZE), n_heads, n_batch_heads, HEAD_GROUP)
    j = tile * K_TILE_SIZE  # line 6
    n_query_tiles = gl.cdiv(n_queries, K_TILE_SIZE) * (K_TILE_SIZE // Q_TILE_SIZE)
    first_tile = gl.minimum(j // Q_TILE_SIZE, n_query_tiles) if IS_CAUSAL else 0
    n_steps = n_query_tiles - first_tile
    part_row = ((batch * n_heads + head) * n_query_tiles + first_tile) * 2 * Q_TILE_SIZE

    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, Q_TILE_SIZE, D_TILE_SIZE], q.layout)
    dO_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, Q_TILE_SIZE, D_TILE_SIZE], dO.layout)
    part_tiles = gl.allocate_shared_memory(q.dtype, [2 * STAGES, Q_TILE_SIZE, PARTS], parts.layout)
    k_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, ROWS, D_TILE_SIZE], k.layout)
    v_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, ROWS, D_TILE_SIZE], v.layout)
    dS_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dS_tiles = gl.allocate_shared_memory(q.dtype, [2 * dS_STAGES, ROWS, Q_TILE_SIZE], dS_layout)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [dQ_STAGES, 1, 1, Q_TILE_SIZE, D_TILE_SIZE], dq_sum.layout)
    keys_filled = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dS_filled = gl.allocate_shared_memory(gl.int64, [dS_STAGES, 1], mbarrier.MBarrierLayout())
    dS_free = gl.allocate_shared_memory(gl.int64, [dS_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_filled, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
    for stage in gl.static_range(dS_STAGES):
        mbarrier.init(dS_filled.index(stage), count=2)
        mbarrier.init(dS_free.index(stage), count=1)
    weights = gl.allocate_shared_memory(q.dtype, [2, ROWS, PARTS], gl.NVMMASharedLayout(32, 16, 2))
    weights.index(0).store(constant_weights(j, n_keys, q.dtype))
    weights.index(1).store(constant_weights(j + ROWS, n_keys, q.dtype))
    fence_async_shared()

    gl.warp_specialize(
        [
            (_warpgroup, (
                w, q, k, v, dO, parts, dq_sum, dk, dv, q_tiles, k_tiles, v_tiles, dO_tiles, part_tiles, dS_tiles,
                dq_tiles, weights, keys_filled, filled, dS_filled, dS_free, batch, head, j, first_tile, n_steps,
                part_row, scale, D_TILE_SIZE, Q_TILE_SIZE, IS_CAUSAL, STAGES, dS_STAGES, dQ_STAGES,
            ))
            for w in (0, 1, 2)
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


@gluon.jit
def _warpgroup(
    W: gl.constexpr,
    q, k, v, dO, parts, dq_sum, dk, dv, q_tiles, k_tiles, v_tiles, dO_tiles, part_tiles, dS_tiles, dq_tiles,
    weights, keys_filled, filled, dS_filled, dS_free, batch, head, j, first_tile, n_steps, part_row, scale,
    D_TILE_SIZE: gl.constexpr, Q_TILE_SIZE: gl.constexpr, IS_CAUSAL: gl.constexpr, STAGES: gl.constexpr,
    dS_STAGES: gl.constexpr, dQ_STAGES: gl.constexpr,
):  # fmt: skip
    """The first warpgroup loads and forms dQ, the others own keys."""
    if W == 0:
        _load_and_form_dq(
            q, k, v, dO, parts, dq_sum, q_tiles, k_tiles, v_tiles, dO_tiles, part_tiles, dS_tiles, dq_tiles,
            keys_filled, filled, dS_filled, dS_free, batch, head, j, first_tile, n_steps, part_row,
            D_TILE_SIZE, Q_TILE_SIZE, STAGES, dS_STAGES, dQ_STAGES,
        )  # fmt: skip
    else:
        _form_dk_dv(
            W - 1, dk, dv, q_tiles, k_tiles, v_tiles, dO_tiles, part_tiles, dS_tiles, weights, keys_filled, filled,
            dS_filled, dS_free, batch, head, j, first_tile, n_steps, scale,
            D_TILE_SIZE, Q_TILE_SIZE, IS_CAUSAL, STAGES, dS_STAGES,
        )  # fmt: skip


@gluon.jit
def _load_and_form_dq(
    q, k, v, dO, parts, dq_sum, q_tiles, k_tiles, v_tiles, dO_tiles, part_tiles, dS_tiles, dq_tiles,
    keys_filled, filled, dS_filled, dS_free, batch, head, j, first_tile, n_steps, part_row,
    D_TILE_SIZE: gl.constexpr, Q_TILE_SIZE: gl.constexpr, STAGES: gl.constexpr, dS_STAGES: gl.constexpr,
    dQ_STAGES: gl.constexpr,
):  # fmt: skip
    """Lines 7, 10 and 16: dQ_i += dS K, with K's two halves in the two tiles of dS."""
    LAYOUT: gl.constexpr = product_layout(D_TILE_SIZE)
    zeros = gl.zeros([Q_TILE_SIZE, D_TILE_SIZE], gl.float32, LAYOUT)
    mbarrier.expect(keys_filled, 4 * ROWS * D_TILE_SIZE * 2)
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(k, [batch, head, j + half * ROWS, 0], keys_filled, k_tiles.index(half))
        tma.async_copy_global_to_shared(v, [batch, head, j + half * ROWS, 0], keys_filled, v_tiles.index(half))
    for step in gl.static_range(STAGES):
        load_queries(
            q, dO, parts, q_tiles, dO_tiles, part_tiles, filled, batch, head, first_tile, part_row, step,
            step < n_steps, D_TILE_SIZE, Q_TILE_SIZE, STAGES,
        )  # fmt: skip
    mbarrier.wait(keys_filled, 0)
    for step in range(n_steps):
        stage = step % dS_STAGES
        mbarrier.wait(dS_filled.index(stage), step // dS_STAGES & 1)
        # Each product is (queries, 64 keys) (64 keys, D).
        k_0 = k_tiles.index(0).reshape([ROWS, D_TILE_SIZE])
        k_1 = k_tiles.index(1).reshape([ROWS, D_TILE_SIZE])
        dq_i = warpgroup_mma(dS_tiles.index(2 * stage).permute((1, 0)), k_0, zeros, use_acc=False, is_async=True)
        dq_i = warpgroup_mma(dS_tiles.index(2 * stage + 1).permute((1, 0)), k_1, dq_i, is_async=True)
        # Who has handed over dS of this step is done with what step - 1 read: that buffer is free.
        later = step - 1 + STAGES
        load_queries(
            q, dO, parts, q_tiles, dO_tiles, part_tiles, filled, batch, head, first_tile, part_row, later,
            (step > 0) & (later < n_steps), D_TILE_SIZE, Q_TILE_SIZE, STAGES,
        )  # fmt: skip
        dq_i = warpgroup_mma_wait(0, deps=[dq_i])
        mbarrier.arrive(dS_free.index(stage), count=1)
        tma.store_wait(dQ_STAGES - 1)  # this buffer has been added
        dq_tile = dq_tiles.index(step % dQ_STAGES)
        dq_tile.reshape([Q_TILE_SIZE, D_TILE_SIZE]).store(dq_i)
        fence_async_shared()
        add_to_global(dq_sum, [batch, head, (first_tile + step) * Q_TILE_SIZE, 0], dq_tile)
    tma.store_wait(0)


@gluon.jit
def load_queries(
    q, dO, parts, q_tiles, dO_tiles, part_tiles, filled, batch, head, first_tile, part_row, step, wanted,
    D_TILE_SIZE: gl.constexpr, Q_TILE_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Line 10: the query tile of a step, with its L and delta in parts."""
    stage = step % STAGES
    i = (first_tile + step) * Q_TILE_SIZE
    row = part_row + step * 2 * Q_TILE_SIZE
    arrived = filled.index(stage)
    mbarrier.expect(arrived, 2 * Q_TILE_SIZE * (D_TILE_SIZE + PARTS) * 2, pred=wanted)
    tma.async_copy_global_to_shared(q, [batch, head, i, 0], arrived, q_tiles.index(stage), pred=wanted)
    tma.async_copy_global_to_shared(parts, [row, 0], arrived, part_tiles.index(2 * stage), pred=wanted)
    tma.async_copy_global_to_shared(
        parts, [row + Q_TILE_SIZE, 0], arrived, part_tiles.index(2 * stage + 1), pred=wanted
    )
    tma.async_copy_global_to_shared(dO, [batch, head, i, 0], arrived, dO_tiles.index(stage), pred=wanted)


@gluon.jit
def _form_dk_dv(
    W: gl.constexpr, dk, dv, q_tiles, k_tiles, v_tiles, dO_tiles, part_tiles, dS_tiles, weights, keys_filled, filled,
    dS_filled, dS_free, batch, head, j, first_tile, n_steps, scale,
    D_TILE_SIZE: gl.constexpr, Q_TILE_SIZE: gl.constexpr, IS_CAUSAL: gl.constexpr, STAGES: gl.constexpr,
    dS_STAGES: gl.constexpr,
):  # fmt: skip
    """Lines 8 to 19 without 16 for the keys j + W · ROWS, …, of one warpgroup."""
    S_LAYOUT: gl.constexpr = product_layout(Q_TILE_SIZE)
    D_LAYOUT: gl.constexpr = product_layout(D_TILE_SIZE)
    keys = j + W * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    zeros = gl.zeros([ROWS, Q_TILE_SIZE], gl.float32, S_LAYOUT)
    dk_j = gl.zeros([ROWS, D_TILE_SIZE], gl.float32, D_LAYOUT)  # line 8
    dv_j = gl.zeros([ROWS, D_TILE_SIZE], gl.float32, D_LAYOUT)
    weights = weights.index(W)
    mbarrier.wait(keys_filled, 0)
    k_j = k_tiles.index(W).reshape([ROWS, D_TILE_SIZE]).load(operand_layout(Q_TILE_SIZE))
    v_j = v_tiles.index(W).reshape([ROWS, D_TILE_SIZE])

    S_T = zeros
    if n_steps > 0:
        mbarrier.wait(filled.index(0), 0)
        S_next = _scores(k_j, weights, q_tiles, part_tiles, 0, zeros, D_TILE_SIZE, Q_TILE_SIZE, STAGES)
        S_T = warpgroup_mma_wait(0, deps=[S_next])
    # line 9: first the queries on the diagonal, then those that see every key of this tile
    n_masked = gl.minimum(2 * ROWS // Q_TILE_SIZE, n_steps) if IS_CAUSAL else 0
    for step in range(n_masked):
        S_T, dk_j, dv_j = _step(
            W, step, n_steps, S_T, dk_j, dv_j, k_j, v_j, weights, zeros, keys, q_tiles, dO_tiles, part_tiles, dS_tiles,
            filled, dS_filled, dS_free, first_tile, scale, D_TILE_SIZE, Q_TILE_SIZE, STAGES, dS_STAGES, MASKED=True,
        )  # fmt: skip
    for step in range(n_masked, n_steps):
        S_T, dk_j, dv_j = _step(
            W, step, n_steps, S_T, dk_j, dv_j, k_j, v_j, weights, zeros, keys, q_tiles, dO_tiles, part_tiles, dS_tiles,
            filled, dS_filled, dS_free, first_tile, scale, D_TILE_SIZE, Q_TILE_SIZE, STAGES, dS_STAGES, MASKED=False,
        )  # fmt: skip

    # line 19, through the buffer of V, which nobody reads any more; rows past n_keys are left out
    v_tile = v_tiles.index(W)
    for result in gl.static_range(2):
        v_tile.reshape([ROWS, D_TILE_SIZE]).store((dv_j if result == 0 else dk_j * scale).to(q_tiles.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dv if result == 0 else dk, [batch, head, j + W * ROWS, 0], v_tile)
        tma.store_wait(0)


@gluon.jit
def _step(
    W: gl.constexpr, step, n_steps, S_T, dk_j, dv_j, k_j, v_j, weights, zeros, keys, q_tiles, dO_tiles, part_tiles,
    dS_tiles, filled, dS_filled, dS_free, first_tile, scale,
    D_TILE_SIZE: gl.constexpr, Q_TILE_SIZE: gl.constexpr, STAGES: gl.constexpr, dS_STAGES: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Lines 10 to 17 for one query tile, whose S^T - L has been formed; returns that of the next one."""
    D_LAYOUT: gl.constexpr = operand_layout(D_TILE_SIZE)
    stage = step % STAGES
    q_i = q_tiles.index(stage).reshape([Q_TILE_SIZE, D_TILE_SIZE])
    dO_i = dO_tiles.index(stage).reshape([Q_TILE_SIZE, D_TILE_SIZE])
    dP_T = warpgroup_mma(v_j, dO_i.permute((1, 0)), zeros, use_acc=False, is_async=True)  # line 14, less delta
    dP_T = warpgroup_mma(weights, part_tiles.index(2 * stage + 1).permute((1, 0)), dP_T, is_async=True)
    P_T = gl.exp2(S_T * (scale * LOG2_E))  # line 12
    if MASKED:
        queries = (first_tile + step) * Q_TILE_SIZE + gl.arange(0, Q_TILE_SIZE, gl.SliceLayout(0, S_T.type.layout))
        P_T = gl.where(queries[None, :] >= keys[:, None], P_T, 0.0)
    dv_next = warpgroup_mma(gl.convert_layout(P_T.to(dO_i.dtype), D_LAYOUT), dO_i, dv_j, is_async=True)  # line 13
    # After the last step its scores are formed once more, for nothing.
    next_step = gl.minimum(step + 1, n_steps - 1)
    mbarrier.wait(filled.index(next_step % STAGES), next_step // STAGES & 1)
    S_next = _scores(k_j, weights, q_tiles, part_tiles, next_step, zeros, D_TILE_SIZE, Q_TILE_SIZE, STAGES)
    dP_T = warpgroup_mma_wait(3, deps=[dP_T])
    dS_T = (P_T * dP_T).to(q_i.dtype)  # line 15, unscaled
    dS_stage = step % dS_STAGES
    mbarrier.wait(dS_free.index(dS_stage), (step // dS_STAGES & 1) ^ 1)
    dS_tiles.index(2 * dS_stage + W).store(dS_T)
    fence_async_shared()
    mbarrier.arrive(dS_filled.index(dS_stage), count=1)
    dk_next = warpgroup_mma(gl.convert_layout(dS_T, D_LAYOUT), q_i, dk_j, is_async=True)  # line 17
    # Sums that stay in flight into the next round of the loop would make the assembler wait after each product.
    dk_j, dv_j, S_T = warpgroup_mma_wait(0, deps=[dk_next, dv_next, S_next])
    return S_T, dk_j, dv_j


@gluon.jit
def _scores(
    k_j, weights, q_tiles, part_tiles, step, zeros,
    D_TILE_SIZE: gl.constexpr, Q_TILE_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Line 11, unscaled, and less L: K q^T + weights · parts^T, begun."""
    stage = step % STAGES
    q_i = q_tiles.index(stage).reshape([Q_TILE_SIZE, D_TILE_SIZE])
    S_T = warpgroup_mma(k_j, q_i.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma(weights, part_tiles.index(2 * stage).permute((1, 0)), S_T, is_async=True)


@gluon.jit
def constant_weights(j, n_keys, dtype: gl.constexpr):
    """(ROWS, PARTS): for each key from j on, what the parts count for, and zeros.

    Keys past n_keys come as zeros. The last part, which is the same for every query, hides them: their P is 0.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    keys = j + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, PARTS, gl.SliceLayout(0, LAYOUT))[None, :]
    weights = gl.zeros([ROWS, PARTS], gl.float32, LAYOUT)
    for part in gl.static_range(3):
        weights = gl.where(column == part, _weight(part, dtype), weights)
    weights = gl.where((column == PARTS - 1) & (keys >= n_keys)[:, None], _hiding(dtype)[1], weights)
    return weights.to(dtype)


@triton.jit
def flash_backward_hopper_finish_kernel(
    dq, dq_sum, n_heads, n_batch_heads, n_queries, scale,
    D: tl.constexpr, D_TILE_SIZE: tl.constexpr, Q_TILE_SIZE: tl.constexpr,
):  # fmt: skip
    """dQ = scale · (sum of dS K), in its dtype, for one query tile of one head."""
    tile, batch, head = assigned_tile(tl.cdiv(n_queries, Q_TILE_SIZE), n_heads, n_batch_heads, 1)
    i = tile * Q_TILE_SIZE
    sums = load_tile(dq_sum, batch, head, i, n_queries, D, Q_TILE_SIZE, D_TILE_SIZE, CHECK_ROWS=True)
    store_tile(dq, batch, head, i, n_queries, sums * scale, D, Q_TILE_SIZE, D_TILE_SIZE)
