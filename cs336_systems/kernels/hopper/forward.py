"""Algorithm 1 on Hopper: one warpgroup loads, others attend, each over 64 queries (see the package's picture).

Line numbers are the handout's, names those of `kernels/forward.py`. Exponentials and logarithms are in base 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from cs336_systems.kernels.hopper.primitives import (
    ROWS,
    make_ring,
    matrix_of,
    operand_layout,
    partial_row_sums,
    pass_turn,
    product_layout,
    row_max,
    wait_for_turn,
)
from cs336_systems.kernels.primitives import LN_2, LOG2_E, assigned_tile, per_query, visible


@gluon.jit
def flash_forward_hopper_kernel(q, k, v, o, L_ptr, n_heads, n_batch_heads, n_queries, n_keys, scale, T: gl.constexpr):
    """Algorithm 1 for the queries i, …, i + Q_TILE_SIZE - 1 of one head.

    q, o: descriptors of (batch, heads, n_queries, D) in tiles of ROWS; k, v: of (batch, heads, n_keys, D), n_keys >= 1,
    in tiles of K_TILE_SIZE >= ROWS. L_ptr: float32, contiguous (batch, heads, n_queries), natural logarithm. scale:
    1 / sqrt(D). T: a `ForwardTiling`.
    """
    n_tiles = gl.cdiv(n_queries, T.Q_TILE_SIZE)
    tile, batch, head = assigned_tile(n_tiles, n_heads, n_batch_heads, T.HEAD_GROUP)
    # Causal work grows with the query index: the last tile is the longest and goes first.
    i = (n_tiles - 1 - tile) * T.Q_TILE_SIZE
    L = per_query(L_ptr, batch, head, n_heads, n_queries)

    gl.static_assert(T.ATTENDERS == 2 or T.ATTENDERS == 3, "partitions are written out for these below")
    # A warpgroup skips key tiles beyond its queries without waiting. There must be fewer of them than stages, because a
    # barrier has one phase bit and could not tell a skipped use from the next.
    gl.static_assert((T.Q_TILE_SIZE - ROWS + T.K_TILE_SIZE - 1) // T.K_TILE_SIZE < T.STAGES)
    q_tiles = make_ring(q, T.ATTENDERS, 1)
    k_tiles = make_ring(k, T.STAGES, T.ATTENDERS)
    v_tiles = make_ring(v, T.STAGES, T.ATTENDERS)
    o_tiles = gl.allocate_shared_memory(o.dtype, [T.ATTENDERS, 1, 1, ROWS, T.D_TILE_SIZE], o.layout)
    fence_async_shared()

    n_visible = gl.minimum(n_keys, i + T.Q_TILE_SIZE) if T.IS_CAUSAL else n_keys
    n_key_tiles = gl.cdiv(n_visible, T.K_TILE_SIZE)
    gl.warp_specialize(
        [
            (_warpgroup, (
                w, q, k, v, o, L, q_tiles, k_tiles, v_tiles, o_tiles, batch, head, i, n_key_tiles, n_queries, n_keys,
                scale * LOG2_E, T,
            ))
            for w in ((0, 1, 2) if T.ATTENDERS == 2 else (0, 1, 2, 3))
        ],
        [4, 4] if T.ATTENDERS == 2 else [4, 4, 4],
        [T.REGISTERS, T.REGISTERS] if T.ATTENDERS == 2 else [T.REGISTERS, T.REGISTERS, T.REGISTERS],
    )  # fmt: skip


@gluon.jit
def _warpgroup(
    W: gl.constexpr,
    q, k, v, o, L, q_tiles, k_tiles, v_tiles, o_tiles, batch, head, i, n_key_tiles, n_queries, n_keys, score_scale,
    T: gl.constexpr,
):  # fmt: skip
    """The first warpgroup loads, the others attend."""
    if W == 0:
        _load(q, k, v, q_tiles, k_tiles, v_tiles, batch, head, i, n_key_tiles, T)
    else:
        _attend(
            W - 1, q_tiles, k_tiles, v_tiles, o_tiles, o, L, batch, head, i, n_key_tiles, n_queries, n_keys,
            score_scale, T,
        )  # fmt: skip


@gluon.jit
def _load(q, k, v, q_tiles, k_tiles, v_tiles, batch, head, i, n_key_tiles, T: gl.constexpr):
    """Lines 5 and 8. Key tiles come from the last to the first, so that masks are done with at the start."""
    for w in gl.static_range(T.ATTENDERS):
        q_tiles.fill(w, q, batch, head, i + w * ROWS)
    for step in range(n_key_tiles):
        j = (n_key_tiles - 1 - step) * T.K_TILE_SIZE
        k_tiles.fill(step, k, batch, head, j)
        v_tiles.fill(step, v, batch, head, j)


@gluon.jit
def _attend(
    W: gl.constexpr,
    q_tiles, k_tiles, v_tiles, o_tiles, o, L, batch, head, i, n_key_tiles, n_queries, n_keys, score_scale,
    T: gl.constexpr,
):  # fmt: skip
    """Lines 6 to 18, without line 8, for the queries i + W · ROWS, …, of one warpgroup.

    S of one key tile is issued together with P V of the tile before; both run while other warpgroups take exponentials.
    """
    S_LAYOUT: gl.constexpr = product_layout(T.K_TILE_SIZE)
    O_LAYOUT: gl.constexpr = product_layout(T.D_TILE_SIZE)
    NEXT: gl.constexpr = (W + 1) % T.ATTENDERS
    i += W * ROWS
    zeros = gl.zeros([ROWS, T.K_TILE_SIZE], gl.float32, S_LAYOUT)
    o_i = gl.zeros([ROWS, T.D_TILE_SIZE], gl.float32, O_LAYOUT)  # line 6
    l = partial_row_sums(zeros)
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))

    # line 7: the key tiles that come after all of these queries are other warpgroups'
    n_visible = gl.minimum(n_keys, i + ROWS) if T.IS_CAUSAL else n_keys
    first = n_key_tiles - gl.cdiv(n_visible, T.K_TILE_SIZE)
    if W == T.ATTENDERS - 1:
        pass_turn(0)
    for step in range(first):
        wait_for_turn(W)
        pass_turn(NEXT)
        k_tiles.release(step)
        v_tiles.release(step)

    q_i = q_tiles.get(W)
    if T.Q_IN_REGISTERS:
        q_i = q_i.load(operand_layout(T.K_TILE_SIZE))
    k_j = k_tiles.get(first)
    wait_for_turn(W)
    S = warpgroup_mma(q_i, k_j.permute((1, 0)), zeros, use_acc=False, is_async=True)  # line 9, unscaled
    pass_turn(NEXT)
    S = warpgroup_mma_wait(0, deps=[S])
    k_tiles.release(first)
    # Only the first of its tiles reaches beyond what all of these queries see: the diagonal, or the ragged edge.
    queries = i + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    keys = (n_key_tiles - 1 - first) * T.K_TILE_SIZE + gl.arange(0, T.K_TILE_SIZE, gl.SliceLayout(0, S_LAYOUT))
    S = gl.where(visible(queries[:, None], keys[None, :], n_keys, T.IS_CAUSAL), S, float("-inf"))
    P, m, l, o_i = _softmax(S, m, l, o_i, score_scale, v_tiles.buffers.dtype)

    for step in range(first + 1, n_key_tiles):
        k_j = k_tiles.get(step)
        v_j = v_tiles.get(step - 1)
        wait_for_turn(W)
        o_next = warpgroup_mma(P, v_j, o_i, is_async=True)  # line 13
        S = warpgroup_mma(q_i, k_j.permute((1, 0)), zeros, use_acc=False, is_async=True)  # line 9 of the next tile
        pass_turn(NEXT)
        o_i = warpgroup_mma_wait(1, deps=[o_next])
        v_tiles.release(step - 1)
        S = warpgroup_mma_wait(0, deps=[S])
        k_tiles.release(step)
        P, m, l, o_i = _softmax(S, m, l, o_i, score_scale, v_tiles.buffers.dtype)

    v_j = v_tiles.get(n_key_tiles - 1)
    o_next = warpgroup_mma(P, v_j, o_i, is_async=True)  # line 13 of the last tile
    o_i = warpgroup_mma_wait(0, deps=[o_next])

    l_i = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, S_LAYOUT))
    divisor = gl.convert_layout(gl.where(l_i == 0.0, 1.0, l_i), gl.SliceLayout(1, O_LAYOUT))
    o_i = o_i / divisor[:, None]  # line 15; l = 0 where all scores are -inf
    matrix_of(o_tiles, W).store(o_i.to(o.dtype))
    fence_async_shared()
    # line 17; rows past n_queries are left out
    tma.async_copy_shared_to_global(o, [batch, head, i, 0], o_tiles.index(W))
    gl.store(L + queries, (m + gl.log2(l_i)) * LN_2, mask=queries < n_queries)  # lines 16 and 18
    tma.store_wait(0)


@gluon.jit
def _softmax(S, m, l, o_i, score_scale, dtype: gl.constexpr):
    """Lines 10 to 12, and the rescaling of line 13: (P~, m, l, exp(m - m') O).

    P~ comes in the dtype of V, as the left operand of P~ V: it stays in registers.
    """
    m_new = gl.maximum(m, row_max(S) * score_scale)  # line 10
    # A row without a finite score yet: subtract 0, so that exp2 gives 0 and not NaN.
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    P = gl.exp2(S * score_scale - shift[:, None])  # line 11
    rescale = gl.exp2(m - shift)
    l = gl.convert_layout(rescale, gl.SliceLayout(1, l.type.layout))[:, None] * l + partial_row_sums(P)  # line 12
    o_i = o_i * gl.convert_layout(rescale, gl.SliceLayout(1, o_i.type.layout))[:, None]
    return gl.convert_layout(P.to(dtype), operand_layout(o_i.shape[1])), m_new, l, o_i
