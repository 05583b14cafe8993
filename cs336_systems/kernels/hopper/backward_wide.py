"""Algorithm 2 on Hopper for rows of 128 numbers, whose dK and dV leave no registers for a third warpgroup's dQ.

As in `backward.py`, but the first warpgroup only loads. The two that own 64 keys each exchange their dS through shared
memory, and each forms half of dQ's columns:

    loader                      K V once;  q dO L delta  …
    keys 0 (64 keys)            S^T, dP^T, dV, dK;  dQ_i[:, :64] += dS K[:, :64]  -> global memory, by the copy engine
    keys 1 (64 keys)            the same for its keys;  dQ_i[:, 64:] += dS K[:, 64:]
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cs336_systems.kernels.hopper.backward import PARTS, add_to_global, constant_weights, load_queries
from cs336_systems.kernels.hopper.primitives import LOG2_E, ROWS, operand_layout, product_layout
from cs336_systems.kernels.primitives import assigned_tile


@gluon.jit
def flash_backward_hopper_wide_kernel(
    q, k, v, dO, parts, dq_sum, dk, dv, n_heads, n_batch_heads, n_queries, n_keys, scale,
    D_TILE_SIZE: gl.constexpr, Q_TILE_SIZE: gl.constexpr, K_TILE_SIZE: gl.constexpr, IS_CAUSAL: gl.constexpr,
    HEAD_GROUP: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Algorithm 2 for the keys j, …, j + K_TILE_SIZE - 1 of one head: arguments as in `flash_backward_hopper_kernel`,
    but dq_sum comes in tiles of Q_TILE_SIZE rows and half the columns.
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
    # Two stages: who writes dS of step + 2 has waited for dS of step + 1, which came after the other's dQ of step.
    dS_tiles = gl.allocate_shared_memory(q.dtype, [4, ROWS, Q_TILE_SIZE], gl.NVMMASharedLayout(128, 16, 2))
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 1, 1, Q_TILE_SIZE, D_TILE_SIZE // 2], dq_sum.layout)
    weights = gl.allocate_shared_memory(q.dtype, [2, ROWS, PARTS], gl.NVMMASharedLayout(32, 16, 2))
    weights.index(0).store(constant_weights(j, n_keys, q.dtype))
    weights.index(1).store(constant_weights(j + ROWS, n_keys, q.dtype))
    keys_filled = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dS_filled = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_filled, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    for stage in gl.static_range(2):
        mbarrier.init(dS_filled.index(stage), count=2)
    fence_async_shared()

    gl.warp_specialize(
        [
            (_warpgroup, (
                w, q, k, v, dO, parts, dq_sum, dk, dv, q_tiles, k_tiles, v_tiles, dO_tiles, part_tiles, dS_tiles,
                dq_tiles, weights, keys_filled, filled, free, dS_filled, batch, head, j, first_tile, n_steps, part_row,
                scale, D_TILE_SIZE, Q_TILE_SIZE, IS_CAUSAL, STAGES,
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
    weights, keys_filled, filled, free, dS_filled, batch, head, j, first_tile, n_steps, part_row, scale,
    D_TILE_SIZE: gl.constexpr, Q_TILE_SIZE: gl.constexpr, IS_CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The first warpgroup loads, the others own keys."""
    if W == 0:
        _load(
            q, k, v, dO, parts, q_tiles, k_tiles, v_tiles, dO_tiles, part_tiles, keys_filled, filled, free, batch, head,
            j, first_tile, n_steps, part_row, D_TILE_SIZE, Q_TILE_SIZE, STAGES,
        )  # fmt: skip
    else:
        _form_gradients(
            W - 1, dk, dv, dq_sum, q_tiles, k_tiles, v_tiles, dO_tiles, part_tiles, dS_tiles, dq_tiles, weights,
            keys_filled, filled, free, dS_filled, batch, head, j, first_tile, n_steps, scale,
            D_TILE_SIZE, Q_TILE_SIZE, IS_CAUSAL, STAGES,
        )  # fmt: skip


@gluon.jit
def _load(
    q, k, v, dO, parts, q_tiles, k_tiles, v_tiles, dO_tiles, part_tiles, keys_filled, filled, free, batch, head,
    j, first_tile, n_steps, part_row, D_TILE_SIZE: gl.constexpr, Q_TILE_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Lines 7 and 10."""
    mbarrier.expect(keys_filled, 4 * ROWS * D_TILE_SIZE * 2)
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(k, [batch, head, j + half * ROWS, 0], keys_filled, k_tiles.index(half))
        tma.async_copy_global_to_shared(v, [batch, head, j + half * ROWS, 0], keys_filled, v_tiles.index(half))
    for step in range(n_steps):
        mbarrier.wait(free.index(step % STAGES), (step // STAGES & 1) ^ 1)
        load_queries(
            q, dO, parts, q_tiles, dO_tiles, part_tiles, filled, batch, head, first_tile, part_row, step, True,
            D_TILE_SIZE, Q_TILE_SIZE, STAGES,
        )  # fmt: skip


@gluon.jit
def _form_gradients(
    W: gl.constexpr, dk, dv, dq_sum, q_tiles, k_tiles, v_tiles, dO_tiles, part_tiles, dS_tiles, dq_tiles, weights,
    keys_filled, filled, free, dS_filled, batch, head, j, first_tile, n_steps, scale,
    D_TILE_SIZE: gl.constexpr, Q_TILE_SIZE: gl.constexpr, IS_CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Lines 8 to 19 for the keys j + W · ROWS, …, of one warpgroup, and its half of dQ's columns."""
    D_LAYOUT: gl.constexpr = product_layout(D_TILE_SIZE)
    keys = j + W * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, product_layout(Q_TILE_SIZE)))
    dk_j = gl.zeros([ROWS, D_TILE_SIZE], gl.float32, D_LAYOUT)  # line 8
    dv_j = gl.zeros([ROWS, D_TILE_SIZE], gl.float32, D_LAYOUT)
    mbarrier.wait(keys_filled, 0)

    weights = weights.index(W)
    # line 9: first the queries on the diagonal, unless there are none at all, then those that see all of these keys
    N_MASKED: gl.constexpr = 2 * ROWS // Q_TILE_SIZE if IS_CAUSAL else 0
    if n_steps > 0:
        for step in gl.static_range(N_MASKED):
            dk_j, dv_j = _step(
                W, step, dk_j, dv_j, keys, dq_sum, q_tiles, k_tiles, v_tiles, dO_tiles, part_tiles, dS_tiles, dq_tiles,
                weights, filled, free, dS_filled, batch, head, first_tile, scale,
                D_TILE_SIZE, Q_TILE_SIZE, STAGES, MASKED=True,
            )  # fmt: skip
    for step in range(N_MASKED, n_steps):
        dk_j, dv_j = _step(
            W, step, dk_j, dv_j, keys, dq_sum, q_tiles, k_tiles, v_tiles, dO_tiles, part_tiles, dS_tiles, dq_tiles,
            weights, filled, free, dS_filled, batch, head, first_tile, scale,
            D_TILE_SIZE, Q_TILE_SIZE, STAGES, MASKED=False,
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
    W: gl.constexpr, step, dk_j, dv_j, keys, dq_sum, q_tiles, k_tiles, v_tiles, dO_tiles, part_tiles, dS_tiles,
    dq_tiles, weights, filled, free, dS_filled, batch, head, first_tile, scale,
    D_TILE_SIZE: gl.constexpr, Q_TILE_SIZE: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Lines 10 to 17 for one query tile."""
    S_LAYOUT: gl.constexpr = product_layout(Q_TILE_SIZE)
    HALF: gl.constexpr = D_TILE_SIZE // 2
    zeros = gl.zeros([ROWS, Q_TILE_SIZE], gl.float32, S_LAYOUT)
    stage, i = step % STAGES, (first_tile + step) * Q_TILE_SIZE
    q_i = q_tiles.index(stage).reshape([Q_TILE_SIZE, D_TILE_SIZE])
    dO_i = dO_tiles.index(stage).reshape([Q_TILE_SIZE, D_TILE_SIZE])
    k_j = k_tiles.index(W).reshape([ROWS, D_TILE_SIZE])
    v_j = v_tiles.index(W).reshape([ROWS, D_TILE_SIZE])
    mbarrier.wait(filled.index(stage), step // STAGES & 1)
    S_T = warpgroup_mma(k_j, q_i.permute((1, 0)), zeros, use_acc=False, is_async=True)  # line 11, unscaled, less L
    S_T = warpgroup_mma(weights, part_tiles.index(2 * stage).permute((1, 0)), S_T, is_async=True)
    dP_T = warpgroup_mma(v_j, dO_i.permute((1, 0)), zeros, use_acc=False, is_async=True)  # line 14, less delta
    dP_T = warpgroup_mma(weights, part_tiles.index(2 * stage + 1).permute((1, 0)), dP_T, is_async=True)
    S_T = warpgroup_mma_wait(2, deps=[S_T])
    P_T = gl.exp2(S_T * (scale * LOG2_E))  # line 12
    if MASKED:
        queries = i + gl.arange(0, Q_TILE_SIZE, gl.SliceLayout(0, S_LAYOUT))
        P_T = gl.where(queries[None, :] >= keys[:, None], P_T, 0.0)
    P_operand = gl.convert_layout(P_T.to(dO_i.dtype), operand_layout(D_TILE_SIZE))
    dv_next = warpgroup_mma(P_operand, dO_i, dv_j, is_async=True)  # line 13
    dP_T = warpgroup_mma_wait(1, deps=[dP_T])
    dS_T = (P_T * dP_T).to(q_i.dtype)  # line 15, unscaled
    dk_next = warpgroup_mma(gl.convert_layout(dS_T, operand_layout(D_TILE_SIZE)), q_i, dk_j, is_async=True)  # line 17
    dS_stage = step % 2
    dS_tiles.index(2 * dS_stage + W).store(dS_T)
    fence_async_shared()
    mbarrier.arrive(dS_filled.index(dS_stage), count=1)
    mbarrier.wait(dS_filled.index(dS_stage), step // 2 & 1)
    dq_i = gl.zeros([Q_TILE_SIZE, HALF], gl.float32, product_layout(HALF))
    for half in gl.static_range(2):  # line 16: (queries, 64 keys) (64 keys, half of D), for both halves of the keys
        dS = dS_tiles.index(2 * dS_stage + half).permute((1, 0))
        columns = k_tiles.index(half).reshape([ROWS, D_TILE_SIZE]).slice(W * HALF, HALF, 1)
        dq_i = warpgroup_mma(dS, columns, dq_i, use_acc=half > 0, is_async=True)
    dk_j, dv_j, dq_i = warpgroup_mma_wait(0, deps=[dk_next, dv_next, dq_i])
    mbarrier.arrive(free.index(stage), count=1)
    tma.store_wait(0)  # the buffer has been added
    dq_tile = dq_tiles.index(W)
    dq_tile.reshape([Q_TILE_SIZE, HALF]).store(dq_i)
    fence_async_shared()
    add_to_global(dq_sum, [batch, head, i, W * HALF], dq_tile)
    return dk_j, dv_j
