"""Algorithm 1 of FlashAttention-2: the forward pass, one program for each query tile of each head.

Line numbers are the handout's (see `flash_pytorch`). Two things differ from its text:

- Line 9 leaves the scale out. It is positive, so line 10 scales the row's maximum alone, and in line 11 the scale and m
  together cost one multiply-add a score. (float32 rounds in between, see `launch`.)
- 16-bit inputs take exponentials and logarithms in base 2 (see `primitives.to_base`). m is then log2(e) times the
  handout's, and line 16 turns L back into the natural logarithm.
"""

import triton
import triton.language as tl

from cs336_systems.kernels.primitives import (
    assigned_tile, exp_in_base, from_base, load_tile, log_in_base, store_per_query, store_tile, to_base, visible,
    visible_keys,
)  # fmt: skip


@triton.jit
def flash_forward_kernel(q, k, v, o, L_ptr, n_heads, n_batch_heads, n_queries, n_keys, scale, T: tl.constexpr):
    """Algorithm 1 for the queries i, …, i + Q_TILE_SIZE - 1 of one head.

    q, o: (batch, heads, n_queries, D); k, v: (batch, heads, n_keys, D); see `primitives`. L_ptr: float32, contiguous
    (batch, heads, n_queries), natural logarithm. scale: 1 / sqrt(D). T: a `primitives.Tiling`.
    """
    n_tiles = tl.cdiv(n_queries, T.Q_TILE_SIZE)
    tile, batch, head = assigned_tile(n_tiles, n_heads, n_batch_heads, T.HEAD_GROUP)
    i = (n_tiles - 1 - tile) * T.Q_TILE_SIZE  # causal work grows with i: the longest tile starts first
    score_scale = to_base(scale, T)

    q_i = load_tile(q, batch, head, i, n_queries, T.Q_TILE_SIZE, T, CHECK_ROWS=True)  # line 5
    o_i = tl.zeros([T.Q_TILE_SIZE, T.D_TILE_SIZE], tl.float32)  # line 6
    l = tl.zeros([T.Q_TILE_SIZE], tl.float32)
    m = tl.full([T.Q_TILE_SIZE], float("-inf"), tl.float32)

    # line 7: the key tiles that every query sees whole, then those on the diagonal or the ragged edge
    diagonal, end = visible_keys(i, n_keys, T)
    o_i, l, m = attend(o_i, l, m, q_i, k, v, batch, head, i, 0, diagonal, n_keys, score_scale, T, MASKED=False)
    o_i, l, m = attend(o_i, l, m, q_i, k, v, batch, head, i, diagonal, end, n_keys, score_scale, T, MASKED=True)

    o_i = o_i / tl.where(l == 0.0, 1.0, l)[:, None]  # line 15; l = 0 if no score is above -inf
    L_i = from_base(m + log_in_base(l, T), T)  # line 16
    store_tile(o, batch, head, i, n_queries, o_i, T.Q_TILE_SIZE, T)  # line 17
    store_per_query(L_ptr, batch, head, n_heads, i, n_queries, L_i, T.Q_TILE_SIZE)  # line 18


@triton.jit
def attend(
    o_i, l, m, q_i, k, v, batch, head, i, begin, end, n_keys, score_scale, T: tl.constexpr, MASKED: tl.constexpr
):
    """Lines 8 to 13 for the key tiles from `begin` to `end`: (o_i, l, m)."""
    queries = i + tl.arange(0, T.Q_TILE_SIZE)
    for j in tl.range(begin, end, T.K_TILE_SIZE):
        k_j = load_tile(k, batch, head, j, n_keys, T.K_TILE_SIZE, T, CHECK_ROWS=MASKED)  # line 8
        S = tl.dot(q_i, tl.trans(k_j), input_precision=T.INPUT_PRECISION)  # line 9, times scale in lines 10 and 11
        if MASKED:
            keys = j + tl.arange(0, T.K_TILE_SIZE)
            S = tl.where(visible(queries[:, None], keys[None, :], n_keys, T.IS_CAUSAL), S, float("-inf"))
        m_new = tl.maximum(m, tl.max(S, 1) * score_scale)  # line 10
        # A row without a finite score yet: subtract 0, so that exp gives 0 and not NaN.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        P = exp_in_base(S * score_scale - shift[:, None], T)  # line 11: P~, P before the division by l
        rescale = exp_in_base(m - shift, T)  # exp(m - m') of lines 12 and 13
        l = rescale * l + tl.sum(P, 1)  # line 12
        # line 8 for V, later than in the handout: the load overlaps the softmax
        v_j = load_tile(v, batch, head, j, n_keys, T.K_TILE_SIZE, T, CHECK_ROWS=MASKED)
        o_i = tl.dot(P.to(v_j.dtype), v_j, rescale[:, None] * o_i, input_precision=T.INPUT_PRECISION)  # line 13
        m = m_new
    return o_i, l, m
