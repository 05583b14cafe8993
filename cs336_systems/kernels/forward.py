"""Algorithm 1 of FlashAttention-2: the forward pass, one program for each query tile of each head.

Line numbers are the handout's (see `flash_pytorch`). Exponentials and logarithms are in base 2 for 16-bit inputs (see
`primitives.to_base`): m is then log2(e) times the handout's, and L is turned back to the natural logarithm.
"""

import triton
import triton.language as tl

from cs336_systems.kernels.primitives import (
    assigned_tile,
    exp_in_base,
    from_base,
    load_tile,
    log_in_base,
    store_per_query,
    store_tile,
    to_base,
    visible,
    visible_keys,
)


@triton.jit
def flash_forward_kernel(
    q, k, v, o, L_ptr, n_heads, n_batch_heads, n_queries, n_keys, scale,
    D: tl.constexpr, D_TILE_SIZE: tl.constexpr, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr, INPUT_PRECISION: tl.constexpr, BASE_2: tl.constexpr, HEAD_GROUP: tl.constexpr,
    SKIP_MASKED: tl.constexpr,
):  # fmt: skip
    """Algorithm 1 for the queries i, …, i + Q_TILE_SIZE - 1 of one head.

    q, o: (batch, heads, n_queries, D); k, v: (batch, heads, n_keys, D); see `primitives`. L_ptr: float32, contiguous
    (batch, heads, n_queries), natural logarithm. scale: 1 / sqrt(D).
    """
    n_tiles = tl.cdiv(n_queries, Q_TILE_SIZE)
    tile, batch, head = assigned_tile(n_tiles, n_heads, n_batch_heads, HEAD_GROUP)
    # Causal work grows with the query index: the last tile is the longest and goes first.
    i = (n_tiles - 1 - tile) * Q_TILE_SIZE
    score_scale = to_base(scale, BASE_2)

    q_i = load_tile(q, batch, head, i, n_queries, D, Q_TILE_SIZE, D_TILE_SIZE, CHECK_ROWS=True)  # line 5
    o_i = tl.zeros([Q_TILE_SIZE, D_TILE_SIZE], tl.float32)  # line 6
    l = tl.zeros([Q_TILE_SIZE], tl.float32)
    m = tl.full([Q_TILE_SIZE], float("-inf"), tl.float32)

    # line 7: the key tiles of which every query sees every key; then those on the diagonal or the ragged edge. Tiles
    # after the last query are masked throughout and never visited.
    unmasked_end, end = visible_keys(i, n_keys, Q_TILE_SIZE, K_TILE_SIZE, IS_CAUSAL, SKIP_MASKED)
    o_i, l, m = _accumulate_o(
        o_i, l, m, q_i, k, v, batch, head, i, 0, unmasked_end, n_keys, score_scale,
        D, D_TILE_SIZE, Q_TILE_SIZE, K_TILE_SIZE, IS_CAUSAL, INPUT_PRECISION, BASE_2, MASKED=False,
    )  # fmt: skip
    o_i, l, m = _accumulate_o(
        o_i, l, m, q_i, k, v, batch, head, i, unmasked_end, end, n_keys, score_scale,
        D, D_TILE_SIZE, Q_TILE_SIZE, K_TILE_SIZE, IS_CAUSAL, INPUT_PRECISION, BASE_2, MASKED=True,
    )  # fmt: skip

    o_i = o_i / tl.where(l == 0.0, 1.0, l)[:, None]  # line 15; l = 0 where no score is above -inf
    L_i = from_base(m + log_in_base(l, BASE_2), BASE_2)  # line 16
    store_tile(o, batch, head, i, n_queries, o_i, D, Q_TILE_SIZE, D_TILE_SIZE)  # line 17
    store_per_query(L_ptr, batch, head, n_heads, i, n_queries, L_i, Q_TILE_SIZE)  # line 18


@triton.jit
def _accumulate_o(
    o_i, l, m, q_i, k, v, batch, head, i, first_key, end_key, n_keys, score_scale,
    D: tl.constexpr, D_TILE_SIZE: tl.constexpr, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr, INPUT_PRECISION: tl.constexpr, BASE_2: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Lines 8 to 13 for the key tiles from first_key to end_key."""
    queries = i + tl.arange(0, Q_TILE_SIZE)
    for j in tl.range(first_key, end_key, K_TILE_SIZE):
        k_j = load_tile(k, batch, head, j, n_keys, D, K_TILE_SIZE, D_TILE_SIZE, CHECK_ROWS=MASKED)  # line 8
        # line 9, unscaled: the scale is positive, so line 10 may scale the row's maximum alone; in line 11 scale and m
        # together cost one multiply-add a score (float32 rounds in between, see `launch`)
        S = tl.dot(q_i, tl.trans(k_j), input_precision=INPUT_PRECISION)
        if MASKED:
            keys = j + tl.arange(0, K_TILE_SIZE)
            S = tl.where(visible(queries[:, None], keys[None, :], n_keys, IS_CAUSAL), S, float("-inf"))
        m_new = tl.maximum(m, tl.max(S, 1) * score_scale)  # line 10
        # As long as all scores of a query are -inf, their exponentials are 0, not those of -inf - (-inf).
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        P = exp_in_base(S * score_scale - shift[:, None], BASE_2)  # line 11: P~, that is P before the division by l
        rescale = exp_in_base(m - shift, BASE_2)  # exp(m - m') of lines 12 and 13
        l = rescale * l + tl.sum(P, 1)  # line 12
        v_j = load_tile(v, batch, head, j, n_keys, D, K_TILE_SIZE, D_TILE_SIZE, CHECK_ROWS=MASKED)  # line 8
        o_i = tl.dot(P.to(v_j.dtype), v_j, rescale[:, None] * o_i, input_precision=INPUT_PRECISION)  # line 13
        m = m_new
    return o_i, l, m
