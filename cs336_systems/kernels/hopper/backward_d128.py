"""Algorithm 2 on Hopper for rows of 128 numbers, whose dK and dV leave no registers for a third warpgroup's dQ.

As in `backward_d64.py`, but the first warpgroup only loads. The two that own 64 keys each exchange their dS through
shared memory, and each forms half of dQ's columns:

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

from cs336_systems.kernels.hopper.backward_parts import (
    Work,
    add_to_global,
    make_handover,
    make_key_tiles,
    make_query_ring,
    query_tile_range,
)
from cs336_systems.kernels.hopper.primitives import (
    ROWS,
    make_barriers,
    matrix_of,
    operand_layout,
    product_layout,
    wait_free,
)
from cs336_systems.kernels.primitives import LOG2_E, assigned_tile


@gluon.jit
def flash_backward_hopper_d128_kernel(
    q, k, v, dO, parts, dq_sum, dk, dv, n_heads, n_batch_heads, n_queries, n_keys, scale,
    T: gl.constexpr,
):  # fmt: skip
    """Algorithm 2 for the keys j, …, j + K_TILE_SIZE - 1 of one head.

    Arguments as in `flash_backward_hopper_d64_kernel`, but dq_sum in tiles of Q_TILE_SIZE rows and half the columns.
    """
    # Causal work shrinks with the key index: the first tile is the longest and goes first.
    tile, batch, head = assigned_tile(gl.cdiv(n_keys, T.K_TILE_SIZE), n_heads, n_batch_heads, T.HEAD_GROUP)
    j = tile * T.K_TILE_SIZE  # line 6
    n_tiles, first_tile = query_tile_range(j, n_queries, T)
    part_row = (batch * n_heads + head) * n_tiles * 2 * T.Q_TILE_SIZE

    key_tiles, query_ring = make_key_tiles(k, v, j, n_keys), make_query_ring(q, dO, parts, T.STAGES)
    # Two stages of dS: who writes that of step + 2 has waited for that of step + 1, which the other handed over after
    # its products of this step.
    handover = make_handover(q, 2)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 1, 1, T.Q_TILE_SIZE, T.D_TILE_SIZE // 2], dq_sum.layout)
    free = make_barriers(T.STAGES, 2)
    fence_async_shared()

    work = Work(batch, head, j, first_tile, n_tiles - first_tile, scale)
    gl.warp_specialize(
        [
            (_load, (q, k, v, dO, parts, key_tiles, query_ring, free, work, part_row)),
            (_form_gradients, (0, dk, dv, dq_sum, key_tiles, query_ring, handover, free, dq_tiles, work, T)),
            (_form_gradients, (1, dk, dv, dq_sum, key_tiles, query_ring, handover, free, dq_tiles, work, T)),
        ],
        [4, 4],
        [T.REGISTERS, T.REGISTERS],
    )  # fmt: skip


@gluon.jit
def _load(q, k, v, dO, parts, key_tiles, query_ring, free, work, part_row):
    """Lines 7 and 10."""
    key_tiles.load(k, v, work)
    for step in range(work.n_steps):
        wait_free(free, step)
        query_ring.load(step, True, q, dO, parts, work, part_row)


@gluon.jit
def _form_gradients(
    W: gl.constexpr, dk, dv, dq_sum, key_tiles, query_ring, handover, free, dq_tiles, work, T: gl.constexpr
):  # fmt: skip
    """Lines 8 to 19, without line 10, for the keys j + W · ROWS, …, of one warpgroup, and its half of dQ's columns."""
    D_LAYOUT: gl.constexpr = product_layout(T.D_TILE_SIZE)
    keys = work.j + W * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, product_layout(T.Q_TILE_SIZE)))
    dk_j = gl.zeros([ROWS, T.D_TILE_SIZE], gl.float32, D_LAYOUT)  # line 8
    dv_j = gl.zeros([ROWS, T.D_TILE_SIZE], gl.float32, D_LAYOUT)
    key_tiles.wait()
    # line 9: first the queries on the diagonal, unless there are none at all, then those that see all of these keys
    N_MASKED: gl.constexpr = 2 * ROWS // T.Q_TILE_SIZE if T.IS_CAUSAL else 0
    if work.n_steps > 0:
        for step in gl.static_range(N_MASKED):
            dk_j, dv_j = _step(
                W, step, dk_j, dv_j, keys, dq_sum, key_tiles, query_ring, handover, free, dq_tiles, work, T,
                MASKED=True,
            )  # fmt: skip
    for step in range(N_MASKED, work.n_steps):
        dk_j, dv_j = _step(
            W, step, dk_j, dv_j, keys, dq_sum, key_tiles, query_ring, handover, free, dq_tiles, work, T, MASKED=False
        )
    key_tiles.store_gradient(W, dv, dv_j, work)
    key_tiles.store_gradient(W, dk, dk_j * work.scale, work)


@gluon.jit
def _step(
    W: gl.constexpr, step, dk_j, dv_j, keys, dq_sum, key_tiles, query_ring, handover, free, dq_tiles, work,
    T: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Lines 11 to 17 for one query tile."""
    HALF: gl.constexpr = T.D_TILE_SIZE // 2
    S_LAYOUT: gl.constexpr = product_layout(T.Q_TILE_SIZE)
    D_LAYOUT: gl.constexpr = operand_layout(T.D_TILE_SIZE)
    zeros = gl.zeros([ROWS, T.Q_TILE_SIZE], gl.float32, S_LAYOUT)
    i = (work.first_tile + step) * T.Q_TILE_SIZE
    weights, q_i, dO_i = key_tiles.weights.index(W), query_ring.q_i(step), query_ring.dO_i(step)
    query_ring.wait(step)
    S_T = query_ring.scores(step, key_tiles.k_j(W), weights, zeros)  # line 11
    dP_T = query_ring.dP(step, key_tiles.v_j(W), weights, zeros)  # line 14
    S_T = warpgroup_mma_wait(2, deps=[S_T])
    P_T = gl.exp2(S_T * (work.scale * LOG2_E))  # line 12
    if MASKED:
        queries = i + gl.arange(0, T.Q_TILE_SIZE, gl.SliceLayout(0, S_LAYOUT))
        P_T = gl.where(queries[None, :] >= keys[:, None], P_T, 0.0)
    dv_next = warpgroup_mma(gl.convert_layout(P_T.to(dO_i.dtype), D_LAYOUT), dO_i, dv_j, is_async=True)  # line 13
    dP_T = warpgroup_mma_wait(1, deps=[dP_T])
    dS_T = (P_T * dP_T).to(q_i.dtype)  # line 15, unscaled
    dk_next = warpgroup_mma(gl.convert_layout(dS_T, D_LAYOUT), q_i, dk_j, is_async=True)  # line 17
    handover.put(W, step, dS_T)
    handover.wait(step)
    dq_i = gl.zeros([T.Q_TILE_SIZE, HALF], gl.float32, product_layout(HALF))
    for half in gl.static_range(2):  # line 16, for both halves of the keys
        columns_of_k = key_tiles.k_j(half).slice(W * HALF, HALF, 1)
        dq_i = warpgroup_mma(handover.dS(half, step), columns_of_k, dq_i, use_acc=half > 0, is_async=True)
    dk_j, dv_j, dq_i = warpgroup_mma_wait(0, deps=[dk_next, dv_next, dq_i])
    mbarrier.arrive(free.index(step % T.STAGES), count=1)
    tma.store_wait(0)  # the copy engine has read the buffer
    matrix_of(dq_tiles, W).store(dq_i)
    fence_async_shared()
    add_to_global(dq_sum, [work.batch, work.head, i, W * HALF], dq_tiles.index(W))
    return dk_j, dv_j
