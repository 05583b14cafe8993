"""Algorithm 2 of FlashAttention-2, the backward pass, in two kernels, neither of which needs atomics.

Line and equation numbers are the handout's (see `flash_pytorch`).

`flash_backward_dq_kernel` comes first. It owns one query tile per program, computes its delta (line 2), and walks over
the keys it sees, with the loops of Algorithm 2 exchanged. `flash_backward_dk_dv_kernel` owns one key tile and walks
over the queries that see it. Both recompute P and dP, seven matmuls in all instead of five; in return every output tile
has one writer, and gradients are bit-equal from run to run.

As in the forward pass, exponentials are in base 2 for 16-bit inputs: P = exp2(log2(e) · S - log2(e) · L), where the
first kernel forms log2(e) · L for the second too. The factor `scale` of dS (17) is common to all of dK and dQ and is
applied once, to the finished sums.
"""

import triton
import triton.language as tl

from cs336_systems.kernels.primitives import (
    assigned_tile, exp_in_base, load_per_query, load_tile, store_per_query, store_tile, to_base, visible, visible_keys,
    visible_queries,
)  # fmt: skip


@triton.jit
def flash_backward_dq_kernel(
    q, k, v, o, dO, L_ptr, dq, L_base_ptr, delta_ptr, n_heads, n_batch_heads, n_queries, n_keys, scale,
    T: tl.constexpr, WANTS_DQ: tl.constexpr,
):  # fmt: skip
    """Algorithm 2 with its loops exchanged for the queries i, …, i + Q_TILE_SIZE - 1 of one head: their delta, their L
    in the base of the exponentials, and, with WANTS_DQ, their dQ.

    q, o, dO, dq: (batch, heads, n_queries, D); k, v: (batch, heads, n_keys, D). L_ptr, L_base_ptr, delta_ptr: float32,
    contiguous (batch, heads, n_queries). scale: 1 / sqrt(D). T: a `primitives.Tiling`.
    """
    n_tiles = tl.cdiv(n_queries, T.Q_TILE_SIZE)
    tile, batch, head = assigned_tile(n_tiles, n_heads, n_batch_heads, T.HEAD_GROUP)
    i = (n_tiles - 1 - tile) * T.Q_TILE_SIZE  # line 9; causal work grows with i: the longest tile starts first
    score_scale = to_base(scale, T)

    o_i = load_tile(o, batch, head, i, n_queries, T.Q_TILE_SIZE, T, CHECK_ROWS=True)
    dO_i = load_tile(dO, batch, head, i, n_queries, T.Q_TILE_SIZE, T, CHECK_ROWS=True)  # line 10
    delta_i = tl.sum(o_i.to(tl.float32) * dO_i.to(tl.float32), 1)  # line 2
    L_i = finite_exponents(load_per_query(L_ptr, batch, head, n_heads, i, n_queries, T.Q_TILE_SIZE, CHECK=True), T)
    store_per_query(delta_ptr, batch, head, n_heads, i, n_queries, delta_i, T.Q_TILE_SIZE)
    store_per_query(L_base_ptr, batch, head, n_heads, i, n_queries, L_i, T.Q_TILE_SIZE)

    if WANTS_DQ:
        q_i = load_tile(q, batch, head, i, n_queries, T.Q_TILE_SIZE, T, CHECK_ROWS=True)  # line 10
        dq_i = tl.zeros([T.Q_TILE_SIZE, T.D_TILE_SIZE], tl.float32)
        # line 6: the key tiles that the forward visits, in the same two parts
        diagonal, end = visible_keys(i, n_keys, T)
        dq_i = accumulate_dq(
            dq_i, q_i, dO_i, L_i, delta_i, k, v, batch, head, i, 0, diagonal, n_keys, score_scale, T, MASKED=False
        )
        dq_i = accumulate_dq(
            dq_i, q_i, dO_i, L_i, delta_i, k, v, batch, head, i, diagonal, end, n_keys, score_scale, T, MASKED=True
        )
        store_tile(dq, batch, head, i, n_queries, dq_i * scale, T.Q_TILE_SIZE, T)


@triton.jit
def finite_exponents(L_i, T: tl.constexpr):
    """L in the base of the exponentials, such that exp(S - L) is finite."""
    # A row without a finite score: with L = inf its P is 0, and not NaN from -inf - (-inf).
    L_i = to_base(tl.where(L_i == float("-inf"), float("inf"), L_i), T)
    if T.BASE_2:
        # From 2^25 on float32 resolves L and S to 4 at best: exp2(S - L) must not come out as inf.
        L_i = tl.where(tl.abs(L_i) < 2.0**25, L_i, L_i + tl.abs(L_i) * 2.0**-21)
    return L_i


@triton.jit
def accumulate_dq(
    dq_i, q_i, dO_i, L_i, delta_i, k, v, batch, head, i, begin, end, n_keys, score_scale,
    T: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Lines 7 and 11 to 16, without line 13, for the key tiles from `begin` to `end`."""
    queries = i + tl.arange(0, T.Q_TILE_SIZE)
    for j in tl.range(begin, end, T.K_TILE_SIZE):
        k_j = load_tile(k, batch, head, j, n_keys, T.K_TILE_SIZE, T, CHECK_ROWS=MASKED)  # line 7
        v_j = load_tile(v, batch, head, j, n_keys, T.K_TILE_SIZE, T, CHECK_ROWS=MASKED)
        S = tl.dot(q_i, tl.trans(k_j), input_precision=T.INPUT_PRECISION)  # line 11 (13), times scale in line 12
        P = exp_in_base(S * score_scale - L_i[:, None], T)  # line 12 (14)
        if MASKED:
            keys = j + tl.arange(0, T.K_TILE_SIZE)
            P = tl.where(visible(queries[:, None], keys[None, :], n_keys, T.IS_CAUSAL), P, 0.0)
        dP = tl.dot(dO_i, tl.trans(v_j), input_precision=T.INPUT_PRECISION)  # line 14 (16)
        dS = P * (dP - delta_i[:, None])  # line 15 (17), times scale in the end
        dq_i = tl.dot(dS.to(k_j.dtype), k_j, dq_i, input_precision=T.INPUT_PRECISION)  # line 16 (18)
    return dq_i


@triton.jit
def flash_backward_dk_dv_kernel(
    q, k, v, dO, L_base, delta, dk, dv, n_heads, n_batch_heads, n_queries, n_keys, scale, T: tl.constexpr
):
    """Algorithm 2 without line 16 for the keys j, …, j + K_TILE_SIZE - 1 of one head: their dK and dV.

    q, dO: (batch, heads, n_queries, D); k, v, dk, dv: (batch, heads, n_keys, D). L_base, delta: float32, (batch, heads,
    n_queries), from the first kernel; see `load_per_query`. scale: 1 / sqrt(D). T: a `primitives.Tiling`.
    """
    # Causal work shrinks with j: the first tile is the longest and starts first.
    tile, batch, head = assigned_tile(tl.cdiv(n_keys, T.K_TILE_SIZE), n_heads, n_batch_heads, T.HEAD_GROUP)
    j = tile * T.K_TILE_SIZE  # line 6
    score_scale = to_base(scale, T)

    k_j = load_tile(k, batch, head, j, n_keys, T.K_TILE_SIZE, T, CHECK_ROWS=True)  # line 7
    v_j = load_tile(v, batch, head, j, n_keys, T.K_TILE_SIZE, T, CHECK_ROWS=True)
    dk_j = tl.zeros([T.K_TILE_SIZE, T.D_TILE_SIZE], tl.float32)  # line 8
    dv_j = tl.zeros([T.K_TILE_SIZE, T.D_TILE_SIZE], tl.float32)

    # line 9: the query tiles that see every key of this tile, then those on the diagonal and the ragged last one.
    # Keys past n_keys need no mask: each owns a row of dK and dV, and those rows are never stored.
    begin, unmasked_begin, unmasked_end = visible_queries(j, n_queries, T)
    dk_j, dv_j = accumulate_dk_dv(
        dk_j, dv_j, k_j, v_j, q, dO, L_base, delta, batch, head, n_heads,
        j, begin, unmasked_begin, unmasked_end, n_queries, score_scale, T, MASKED=False,
    )  # fmt: skip
    dk_j, dv_j = accumulate_dk_dv(
        dk_j, dv_j, k_j, v_j, q, dO, L_base, delta, batch, head, n_heads,
        j, begin, unmasked_begin, unmasked_end, n_queries, score_scale, T, MASKED=True,
    )  # fmt: skip

    store_tile(dk, batch, head, j, n_keys, dk_j * scale, T.K_TILE_SIZE, T)  # line 19
    store_tile(dv, batch, head, j, n_keys, dv_j, T.K_TILE_SIZE, T)


@triton.jit
def accumulate_dk_dv(
    dk_j, dv_j, k_j, v_j, q, dO, L_base, delta, batch, head, n_heads,
    j, begin, unmasked_begin, unmasked_end, n_queries, score_scale, T: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Lines 10 to 17, without line 16, for the unmasked query tiles or, if MASKED, for those before and after them:

        begin | masked | unmasked_begin | unmasked | unmasked_end | masked | n_queries

    S, P, dP and dS are formed transposed, keys along the rows: P^T and dS^T are then the left operands that lines 13
    and 17 want. Queries past n_queries are loaded as zeros, with their dO, L and delta; their P is set to 0 all the
    same, since zero times a key of -inf would make it NaN.
    """
    if MASKED:
        # One loop over the masked tiles on both sides of the unmasked ones, so that its body is compiled once.
        n_unmasked = unmasked_end - unmasked_begin
        first, end = begin, n_queries - n_unmasked
    else:
        first, end = unmasked_begin, unmasked_end
    for step in tl.range(first, end, T.Q_TILE_SIZE):
        i = tl.where(step < unmasked_begin, step, step + n_unmasked) if MASKED else step
        q_i = load_tile(q, batch, head, i, n_queries, T.Q_TILE_SIZE, T, CHECK_ROWS=MASKED)  # line 10
        dO_i = load_tile(dO, batch, head, i, n_queries, T.Q_TILE_SIZE, T, CHECK_ROWS=MASKED)
        L_i = load_per_query(L_base, batch, head, n_heads, i, n_queries, T.Q_TILE_SIZE, CHECK=MASKED)
        delta_i = load_per_query(delta, batch, head, n_heads, i, n_queries, T.Q_TILE_SIZE, CHECK=MASKED)
        S_T = transposed_scores(q_i, k_j, T)  # line 11 (13), times scale in line 12
        P_T = exp_in_base(S_T * score_scale - L_i[None, :], T)  # line 12 (14)
        if MASKED:
            # Not by `visible`: counted from i, queries are constants, which takes fewer registers; keys need no end.
            queries = tl.arange(0, T.Q_TILE_SIZE)
            P_T = tl.where((queries < n_queries - i)[None, :], P_T, 0.0)
            if T.IS_CAUSAL:
                keys = j - i + tl.arange(0, T.K_TILE_SIZE)
                P_T = tl.where(queries[None, :] >= keys[:, None], P_T, 0.0)
        dv_j = tl.dot(P_T.to(dO_i.dtype), dO_i, dv_j, input_precision=T.INPUT_PRECISION)  # line 13 (15)
        dP_T = tl.dot(v_j, tl.trans(dO_i), input_precision=T.INPUT_PRECISION)  # line 14 (16)
        dS_T = P_T * (dP_T - delta_i[None, :])  # line 15 (17), times scale in the end
        dk_j = tl.dot(dS_T.to(q_i.dtype), q_i, dk_j, input_precision=T.INPUT_PRECISION)  # line 17 (19)
    return dk_j, dv_j


@triton.jit
def transposed_scores(q_i, k_j, T: tl.constexpr):
    """S^T = K Q^T, unscaled.

    In float32 it is the transpose of Q K^T, rounded as the forward rounded it. L comes of those scores, and where one
    key has all the weight exp(S - L) is 1 only if S is the very same number.
    """
    if q_i.dtype == tl.float32:
        return tl.trans(tl.dot(q_i, tl.trans(k_j), input_precision=T.INPUT_PRECISION))
    else:
        return tl.dot(k_j, tl.trans(q_i), input_precision=T.INPUT_PRECISION)
