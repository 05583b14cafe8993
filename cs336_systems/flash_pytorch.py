"""FlashAttention-2 (Dao 2023, arXiv 2307.08691) in plain PyTorch, tile by tile, on any device.

This is the readable specification of the Triton kernels: each statement carries the line number of Algorithm 1 or 2 in
the handout of CS336's assignment 2, and the kernels in `kernels/` carry the same ones. (The paper has the same steps
under other numbers: its line 9 is 10 to 12 here.) With scale = 1 / sqrt(d),

    S = scale · Q K^T       (4)        P = softmax of S by rows   (5)
    O = P V                 (6)        L_i = log sum_j exp S_ij   (12)

No more than one (Bq, Bk) tile of S exists at a time, so memory is O(n·d), forward and backward. In the code i and j are
the first query and the first key of a tile, where the handout numbers the tiles.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cs336_systems.differentiable_once import differentiable_once
from cs336_systems.inputs import (
    Keys,
    PerQuery,
    Queries,
    attention_inputs,
    refuse_repeated_when_compiled,
    require_as_saved,
    without_autocast,
)

Q_TILE_SIZE = 128
K_TILE_SIZE = 128

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _scores(q_i: Tensor, k_j: Tensor, i: int, j: int, is_causal: bool) -> Tensor:
    """The tile of S = scale · Q K^T that begins at query i and key j, with -inf where a query comes before a key."""
    S = q_i.shape[-1] ** -0.5 * (q_i @ k_j.mT)
    last_key = j + k_j.shape[-2] - 1
    if is_causal and i < last_key:  # otherwise every query of the tile sees every key of it
        queries = i + torch.arange(q_i.shape[-2], device=S.device)
        keys = j + torch.arange(k_j.shape[-2], device=S.device)
        S = S.masked_fill(queries[:, None] < keys, -math.inf)
    return S


def flash_forward(
    q: Queries,
    k: Keys,
    v: Keys,
    is_causal: bool,
    q_tile_size: int = Q_TILE_SIZE,
    k_tile_size: int = K_TILE_SIZE,
) -> tuple[Queries, PerQuery]:
    """Algorithm 1: the output O and the log-sum-exp L (natural logarithm) of every query.

    Args:
        q: queries; k, v: keys and values with the leading dimensions of q.
        is_causal: query i sees key j where i >= j (aligned at the top left when n_queries != n_keys).
        q_tile_size, k_tile_size: Bq and Bk; any sizes, they need not divide the lengths.

    Returns:
        o in the dtype of q; L in float32 (float64 for float64). With no keys at all o = 0 and L = -inf.
    """
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    dtype = _accumulator_dtype(q.dtype)
    o = torch.empty_like(q)
    L = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)

    for i in range(0, n_queries, q_tile_size):
        queries = slice(i, min(i + q_tile_size, n_queries))
        q_i = q[..., queries, :].to(dtype)  # line 5
        o_i = torch.zeros_like(q_i)  # line 6
        l = torch.zeros_like(q_i[..., :1])
        m = torch.full_like(l, -math.inf)

        # line 7; key tiles after the tile's last query are masked throughout and never visited
        for j in range(0, min(n_keys, queries.stop) if is_causal else n_keys, k_tile_size):
            k_j = k[..., j : j + k_tile_size, :].to(dtype)  # line 8
            v_j = v[..., j : j + k_tile_size, :].to(dtype)
            S = _scores(q_i, k_j, i, j, is_causal)  # line 9
            m_new = torch.maximum(m, S.amax(-1, keepdim=True))  # line 10
            # As long as all scores of a query are -inf, their exponentials are 0, not those of -inf - (-inf).
            shift = torch.where(m_new == -math.inf, 0, m_new)
            P = torch.exp(S - shift)  # line 11: P~, that is P before the division by l
            l = torch.exp(m - shift) * l + P.sum(-1, keepdim=True)  # line 12
            o_i = torch.exp(m - shift) * o_i + P @ v_j  # line 13
            m = m_new

        o[..., queries, :] = o_i / torch.where(l == 0, 1, l)  # lines 15 and 17; l = 0 where no score is above -inf
        L[..., queries] = (m + torch.log(l)).squeeze(-1)  # lines 16 and 18
    return o, L


def flash_backward(
    q: Queries,
    k: Keys,
    v: Keys,
    o: Queries,
    dO: Queries,
    L: PerQuery,
    is_causal: bool,
    needs: Sequence[bool] = (True, True, True),
    q_tile_size: int = Q_TILE_SIZE,
    k_tile_size: int = K_TILE_SIZE,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Algorithm 2: the gradients of q, k and v from the forward's o and L and the output's gradient dO.

    With delta the row sum of dO ∘ O (which equals that of P ∘ dP):

        S = scale · Q K^T   (13)    P = exp(S - L)                        (14)    dV = P^T dO   (15)
        dP = dO V^T         (16)    dS = scale · P ∘ (dP - delta)         (17)
        dQ = dS K           (18)    dK = dS^T Q                           (19)

    Args:
        q, k, v, o, dO, L, is_causal: as `flash_forward` took and gave them.
        needs: which of dq, dk, dv are wanted; the others are not computed.
        q_tile_size, k_tile_size: Bq and Bk.

    Returns:
        dq, dk, dv, each in the dtype and shape of its input, or None where it is not wanted.
    """
    needs_dq, needs_dk, needs_dv = needs
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    dtype = _accumulator_dtype(q.dtype)
    scale = q.shape[-1] ** -0.5
    delta = (dO.to(dtype) * o.to(dtype)).sum(-1)  # line 2
    # No score of the query is above -inf: with L = inf its P is 0, not that of -inf - (-inf).
    L = torch.where(L.isneginf(), math.inf, L)
    dq = torch.zeros_like(q, dtype=dtype)
    dk, dv = torch.empty_like(k), torch.empty_like(v)

    for j in range(0, n_keys, k_tile_size):  # line 6
        keys = slice(j, min(j + k_tile_size, n_keys))
        k_j, v_j = k[..., keys, :].to(dtype), v[..., keys, :].to(dtype)  # line 7
        dk_j, dv_j = torch.zeros_like(k_j), torch.zeros_like(v_j)  # line 8

        # line 9; query tiles before the key tile's first key see none of it and are never visited
        for i in range(j // q_tile_size * q_tile_size if is_causal else 0, n_queries, q_tile_size):
            queries = slice(i, i + q_tile_size)
            q_i, dO_i = q[..., queries, :].to(dtype), dO[..., queries, :].to(dtype)  # line 10
            L_i, delta_i = L[..., queries, None], delta[..., queries, None]
            S = _scores(q_i, k_j, i, j, is_causal)  # line 11 (13)
            P = torch.exp(S - L_i)  # line 12 (14)
            if needs_dv:
                dv_j += P.mT @ dO_i  # line 13 (15)
            if needs_dq or needs_dk:
                dP = dO_i @ v_j.mT  # line 14 (16)
                dS = scale * P * (dP - delta_i)  # line 15 (17)
            if needs_dq:
                dq[..., queries, :] += dS @ k_j  # line 16 (18)
            if needs_dk:
                dk_j += dS.mT @ q_i  # line 17 (19)

        dk[..., keys, :] = dk_j  # line 19
        dv[..., keys, :] = dv_j
    return dq.to(q.dtype) if needs_dq else None, dk if needs_dk else None, dv if needs_dv else None


class FlashAttention2Pytorch(torch.autograd.Function):
    """`FlashAttention2Pytorch.apply(q, k, v, is_causal=False) -> o`, differentiable once, on any device.

    q is (..., n_queries, d), k and v are (..., n_keys, d), in float16, bfloat16, float32 or float64, with any strides.
    For the backward it keeps q, k, v, o and the log-sum-exp L of shape (..., n_queries). A second derivative raises.
    torch.compile unrolls the loops over tiles; where lengths change it needs dynamic=False. A graph of
    torch.jit.trace is right for the lengths that it was traced with, and for no others.

    Q K^T has to be finite in float32 before it is scaled. Gradients lose accuracy as L grows, by the rounding of a
    float32: scores of 1e4 cost 1e-3 of P, and from 1e8 on P may sum to more than 1.
    Errors: see `cs336_systems.inputs.attention_inputs`, `refuse_repeated_when_compiled`, `require_as_saved`.
    """

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        refuse_repeated_when_compiled(q, k, v)
        q, k, v = attention_inputs(q, k, v, is_causal, DTYPES)
        with without_autocast(q):  # the accumulators stay in float32
            o, L = flash_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, L)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    @differentiable_once
    def backward(ctx, dO):
        q, k, v, o, L = ctx.saved_tensors
        require_as_saved(q, k, v, o, dO, L)
        with without_autocast(q):
            dq, dk, dv = flash_backward(q, k, v, o, dO, L, ctx.is_causal, ctx.needs_input_grad[:3])
        return dq, dk, dv, None
