"""Algorithm 2 on Hopper in one pass: P and dP are formed once, five matmuls instead of the portable kernels' seven.

A program owns 128 keys and walks over the queries that see them. Two warpgroups of 64 keys each form S^T, dP^T, dV and
dK in registers, and hand dS to a third through shared memory. That one forms dQ = dS K of the query tile, and lets the
copy engine add it to dQ in global memory, in float32: whoever comes first is first, so the last bits of dQ differ from
run to run. It also loads: it issues copies while its products run.

    loader and dQ               K V once;  q dO L delta  …          dQ_i += dS K  -> global memory, by the copy engine
    keys 0 (64 keys)            S^T = K q^T - L, dP^T = V dO^T - delta, dV += P^T dO, dK += dS^T q  -> dV, dK
    keys 1 (64 keys)            the same for the next 64 keys

How L and delta are subtracted, and the two plain kernels around this one, are in `backward_parts.py`.
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
def flash_backward_hopper_d64_kernel(
    q, k, v, dO, parts, dq_sum, dk, dv, n_heads, n_batch_heads, n_queries, n_keys, scale,
    T: gl.constexpr,
):  # fmt: skip
    """Algorithm 2 for the keys j, …, j + K_TILE_SIZE - 1 of one head.

    Descriptors: q, dO of (batch, heads, n_queries, D) and dq_sum of (…, D_TILE_SIZE), float32, in tiles of Q_TILE_SIZE;
    k, v, dk, dv of (batch, heads, n_keys, D) in tiles of ROWS; parts of (rows, PART_COLUMNS). scale: 1 / sqrt(D). T: a
    `BackwardTiling`; K_TILE_SIZE is 2 ROWS, a multiple of Q_TILE_SIZE.
    """
    # Causal work shrinks with the key index: the first tile is the longest and goes first.
    tile, batch, head = assigned_tile(gl.cdiv(n_keys, T.K_TILE_SIZE), n_heads, n_batch_heads, T.HEAD_GROUP)
    j = tile * T.K_TILE_SIZE  # line 6
    n_tiles, first_tile = query_tile_range(j, n_queries, T)
    part_row = (batch * n_heads + head) * n_tiles * 2 * T.Q_TILE_SIZE

    key_tiles, query_ring = make_key_tiles(k, v, j, n_keys), make_query_ring(q, dO, parts, T.STAGES)
    handover = make_handover(q, T.dS_STAGES)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [T.dQ_STAGES, 1, 1, T.Q_TILE_SIZE, T.D_TILE_SIZE], dq_sum.layout)
    dS_free = make_barriers(T.dS_STAGES, 1)
    fence_async_shared()

    work = Work(batch, head, j, first_tile, n_tiles - first_tile, scale)
    gl.warp_specialize(
        [
            (_load_and_form_dq, (
                q, k, v, dO, parts, dq_sum, key_tiles, query_ring, handover, dS_free, dq_tiles, work, part_row, T,
            )),
            (_form_dk_dv, (0, dk, dv, key_tiles, query_ring, handover, dS_free, work, T)),
            (_form_dk_dv, (1, dk, dv, key_tiles, query_ring, handover, dS_free, work, T)),
        ],
        [4, 4],
        [T.REGISTERS, T.REGISTERS],
    )  # fmt: skip


@gluon.jit
def _load_and_form_dq(
    q, k, v, dO, parts, dq_sum, key_tiles, query_ring, handover, dS_free, dq_tiles, work, part_row,
    T: gl.constexpr,
):  # fmt: skip
    """Lines 7, 10 and 16: dQ_i += dS K, summed over the two halves of the keys."""
    zeros = gl.zeros([T.Q_TILE_SIZE, T.D_TILE_SIZE], gl.float32, product_layout(T.D_TILE_SIZE))
    key_tiles.load(k, v, work)
    for step in gl.static_range(query_ring.stages):
        query_ring.load(step, step < work.n_steps, q, dO, parts, work, part_row)
    key_tiles.wait()
    for step in range(work.n_steps):
        handover.wait(step)
        dq_i = warpgroup_mma(handover.dS(0, step), key_tiles.k_j(0), zeros, use_acc=False, is_async=True)  # line 16
        dq_i = warpgroup_mma(handover.dS(1, step), key_tiles.k_j(1), dq_i, is_async=True)
        # Both warpgroups have handed over dS of this step, so neither reads the tiles of step - 1 any more.
        later = step - 1 + query_ring.stages
        wanted = (step > 0) & (later < work.n_steps)
        query_ring.load(later, wanted, q, dO, parts, work, part_row)
        dq_i = warpgroup_mma_wait(0, deps=[dq_i])
        mbarrier.arrive(dS_free.index(step % handover.stages), count=1)
        tma.store_wait(T.dQ_STAGES - 1)  # the copy engine has read this buffer
        matrix_of(dq_tiles, step % T.dQ_STAGES).store(dq_i)
        fence_async_shared()
        i = (work.first_tile + step) * T.Q_TILE_SIZE
        add_to_global(dq_sum, [work.batch, work.head, i, 0], dq_tiles.index(step % T.dQ_STAGES))
    tma.store_wait(0)


@gluon.jit
def _form_dk_dv(W: gl.constexpr, dk, dv, key_tiles, query_ring, handover, dS_free, work, T: gl.constexpr):
    """Lines 8 to 19, without lines 10 and 16, for the keys j + W · ROWS, …, of one warpgroup."""
    S_LAYOUT: gl.constexpr = product_layout(T.Q_TILE_SIZE)
    D_LAYOUT: gl.constexpr = product_layout(T.D_TILE_SIZE)
    keys = work.j + W * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    zeros = gl.zeros([ROWS, T.Q_TILE_SIZE], gl.float32, S_LAYOUT)
    dk_j = gl.zeros([ROWS, T.D_TILE_SIZE], gl.float32, D_LAYOUT)  # line 8
    dv_j = gl.zeros([ROWS, T.D_TILE_SIZE], gl.float32, D_LAYOUT)
    # K and the weights are the same for all query tiles. As left operands in registers they are not read again for each
    # product from shared memory, which is as busy here as the tensor cores. (V has room there only if dS is formed from
    # a rounded P, and then nothing is gained: runs/h200/kernel_log.md.)
    weights = key_tiles.weights.index(W).load(operand_layout(T.Q_TILE_SIZE))
    key_tiles.wait()
    k_j = key_tiles.k_j(W).load(operand_layout(T.Q_TILE_SIZE))

    S_T = zeros
    if work.n_steps > 0:
        query_ring.wait(0)
        S_T = warpgroup_mma_wait(0, deps=[query_ring.scores(0, k_j, weights, zeros)])
    # line 9: first the queries on the diagonal, then those that see every key of this tile
    n_masked = gl.minimum(2 * ROWS // T.Q_TILE_SIZE, work.n_steps) if T.IS_CAUSAL else 0
    for step in range(n_masked):
        S_T, dk_j, dv_j = _step(
            W, step, S_T, dk_j, dv_j, k_j, weights, zeros, keys, key_tiles, query_ring, handover, dS_free, work, T,
            MASKED=True,
        )  # fmt: skip
    for step in range(n_masked, work.n_steps):
        S_T, dk_j, dv_j = _step(
            W, step, S_T, dk_j, dv_j, k_j, weights, zeros, keys, key_tiles, query_ring, handover, dS_free, work, T,
            MASKED=False,
        )  # fmt: skip
    key_tiles.store_gradient(W, dv, dv_j, work)
    key_tiles.store_gradient(W, dk, dk_j * work.scale, work)


@gluon.jit
def _step(
    W: gl.constexpr, step, S_T, dk_j, dv_j, k_j, weights, zeros, keys, key_tiles, query_ring, handover, dS_free, work,
    T: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Lines 11 to 17, without line 16, for one query tile, whose S^T - L is S_T; returns the next one's, dK and dV."""
    D_LAYOUT: gl.constexpr = operand_layout(T.D_TILE_SIZE)
    q_i, dO_i = query_ring.q_i(step), query_ring.dO_i(step)
    dP_T = query_ring.dP(step, key_tiles.v_j(W), weights, zeros)  # line 14
    P_T = gl.exp2(S_T * (work.scale * LOG2_E))  # line 12
    if MASKED:
        i = (work.first_tile + step) * T.Q_TILE_SIZE
        queries = i + gl.arange(0, T.Q_TILE_SIZE, gl.SliceLayout(0, S_T.type.layout))
        P_T = gl.where(queries[None, :] >= keys[:, None], P_T, 0.0)
    dv_next = warpgroup_mma(gl.convert_layout(P_T.to(dO_i.dtype), D_LAYOUT), dO_i, dv_j, is_async=True)  # line 13
    # After the last step its scores are formed once more, for nothing.
    next_step = gl.minimum(step + 1, work.n_steps - 1)
    query_ring.wait(next_step)
    S_next = query_ring.scores(next_step, k_j, weights, zeros)  # line 11
    dP_T = warpgroup_mma_wait(3, deps=[dP_T])  # in flight stay dV, and the two products of the next scores
    dS_T = (P_T * dP_T).to(q_i.dtype)  # line 15, unscaled
    wait_free(dS_free, step)
    handover.put(W, step, dS_T)
    dk_next = warpgroup_mma(gl.convert_layout(dS_T, D_LAYOUT), q_i, dk_j, is_async=True)  # line 17
    # Sums that stay in flight into the next round of the loop would make the assembler wait after each product.
    dk_j, dv_j, S_T = warpgroup_mma_wait(0, deps=[dk_next, dv_next, S_next])
    return S_T, dk_j, dv_j
