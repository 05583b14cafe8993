"""Algorithm 1 of FlashAttention-2: the forward pass, one program per query tile of one head.

Exponentials and logarithms are in base 2 for 16-bit inputs, see `primitives.exp_in_base`: m then belongs to
log2(e) · S, and only L is turned back to the natural logarithm.
"""

import triton
import triton.language as tl

from cs336_systems.kernels.primitives import (
    LN_2,
    assigned_tile,
    exp_in_base,
    load_tile,
    log_in_base,
    scale_in_base,
    store_tile,
    visible,
    visible_keys,
)


@triton.jit
def flash_forward_kernel(
    q,
    k,
    v,
    o,
    L_ptr,
    n_heads,
    n_batch_heads,
    n_queries,
    n_keys,
    scale,
    D: tl.constexpr,
    D_TILE_SIZE: tl.constexpr,
    Q_TILE_SIZE: tl.constexpr,
    K_TILE_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BASE_2: tl.constexpr,
    HEAD_GROUP: tl.constexpr,
):
    """O and L of the queries i, …, i + Q_TILE_SIZE - 1 of one head."""
    n_tiles = tl.cdiv(n_queries, Q_TILE_SIZE)
    tile, batch, head = assigned_tile(n_tiles, n_heads, n_batch_heads, HEAD_GROUP)
    # Causal work grows with the query index: the last tile is the longest and goes first.
    i = (n_tiles - 1 - tile) * Q_TILE_SIZE

    q_i = load_tile(q, batch, head, i, n_queries, D, Q_TILE_SIZE, D_TILE_SIZE, True)  # line 5
    o_i = tl.zeros([Q_TILE_SIZE, D_TILE_SIZE], tl.float32)  # line 6
    l = tl.zeros([Q_TILE_SIZE], tl.float32)
    m = tl.full([Q_TILE_SIZE], float("-inf"), tl.float32)

    # line 7: whole key tiles that every query of this tile sees; then those on the diagonal or the ragged edge. Tiles
    # after the last query are masked throughout and never visited.
    end, unmasked_end = visible_keys(i, n_keys, Q_TILE_SIZE, K_TILE_SIZE, IS_CAUSAL)
    scale = scale_in_base(scale, BASE_2)
    o_i, l, m = _attend(
        o_i, l, m, q_i, k, v, batch, head, i, 0, unmasked_end, n_keys, scale,
        D, D_TILE_SIZE, Q_TILE_SIZE, K_TILE_SIZE, IS_CAUSAL, INPUT_PRECISION, BASE_2, MASKED=False,
    )  # fmt: skip
    o_i, l, m = _attend(
        o_i, l, m, q_i, k, v, batch, head, i, unmasked_end, end, n_keys, scale,
        D, D_TILE_SIZE, Q_TILE_SIZE, K_TILE_SIZE, IS_CAUSAL, INPUT_PRECISION, BASE_2, MASKED=True,
    )  # fmt: skip

    o_i = o_i / tl.where(l == 0.0, 1.0, l)[:, None]  # line 15; l = 0 where there are no keys
    L_i = m + log_in_base(l, BASE_2)  # line 16
    if BASE_2:
        L_i = L_i * LN_2
    store_tile(o, batch, head, i, n_queries, o_i, D, Q_TILE_SIZE, D_TILE_SIZE)  # line 17
    queries = i + tl.arange(0, Q_TILE_SIZE)
    L_head = L_ptr + (batch.to(tl.int64) * n_heads + head) * n_queries
    tl.store(L_head + queries, L_i, mask=queries < n_queries)  # line 18


@triton.jit
def _attend(
    o_i, l, m, q_i, k, v, batch, head, i, first_key, end_key, n_keys, scale,
    D: tl.constexpr, D_TILE_SIZE: tl.constexpr, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr, INPUT_PRECISION: tl.constexpr, BASE_2: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Lines 8 to 13 for the key tiles from first_key to end_key."""
    queries = i + tl.arange(0, Q_TILE_SIZE)
    for j in tl.range(first_key, end_key, K_TILE_SIZE):
        k_j = load_tile(k, batch, head, j, n_keys, D, K_TILE_SIZE, D_TILE_SIZE, MASKED)  # line 8
        S = tl.dot(q_i, tl.trans(k_j), input_precision=INPUT_PRECISION)  # line 9, unscaled
        if MASKED:
            S = tl.where(
                visible(queries[:, None], j + tl.arange(0, K_TILE_SIZE)[None, :], n_keys, IS_CAUSAL), S, float("-inf")
            )
        m_new = tl.maximum(m, tl.max(S, 1) * scale)  # line 10
        P = exp_in_base(S * scale - m_new[:, None], BASE_2)  # line 11
        rescale = exp_in_base(m - m_new, BASE_2)
        l = rescale * l + tl.sum(P, 1)  # line 12
        v_j = load_tile(v, batch, head, j, n_keys, D, K_TILE_SIZE, D_TILE_SIZE, MASKED)
        o_i = tl.dot(P.to(v_j.dtype), v_j, rescale[:, None] * o_i, input_precision=INPUT_PRECISION)  # line 13
        m = m_new
    return o_i, l, m
