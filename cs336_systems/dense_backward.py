"""The assignment's first backward: attention recomputed densely, in plain PyTorch under torch.compile.

One step before the tiled backward: the forward no longer keeps P, but this backward makes the whole (n_queries, n_keys)
matrix again. It stays to show what the Triton backward is worth.
"""

import math

import torch

from cs336_systems.differentiable_once import differentiable_once
from cs336_systems.flash_triton import FlashAttention2Triton
from cs336_systems.implementation import compiled_at_first_call
from cs336_systems.inputs import Keys, PerQuery, Queries, require_as_saved, without_autocast


def dense_backward(
    q: Queries,
    k: Keys,
    v: Keys,
    o: Queries,
    dO: Queries,
    L: PerQuery,
    is_causal: bool,
) -> tuple[Queries, Keys, Keys]:
    """dq, dk, dv by equations 13 to 19, without tiles (their text: `flash_pytorch.flash_backward`).

    Args:
        q, k, v, o, dO, L: inputs, output, output's gradient and log-sum-exp (natural logarithm) of the forward.
        is_causal: query i sees key j where i >= j.
    """
    scale = q.shape[-1] ** -0.5
    delta = (dO.float() * o.float()).sum(-1, keepdim=True)
    S = ((q * scale) @ k.mT).float()  # (13), scaled first: Q K^T itself may overflow float16
    if is_causal:
        queries = torch.arange(q.shape[-2], device=q.device)
        keys = torch.arange(k.shape[-2], device=q.device)
        S = S.masked_fill(queries[:, None] < keys, -math.inf)
    # No score of the query is above -inf: with L = inf its P is 0, not that of -inf - (-inf).
    P = torch.exp(S - torch.where(L.isneginf(), math.inf, L)[..., None])  # (14)
    dv = P.to(q.dtype).mT @ dO  # (15)
    dP = (dO @ v.mT).float()  # (16)
    dS = (scale * P * (dP - delta)).to(q.dtype)  # (17)
    return dS @ k, dS.mT @ q, dv  # (18), (19)


compiled_dense_backward = compiled_at_first_call(dense_backward)


class FlashAttention2TritonDenseBackward(torch.autograd.Function):
    """`.apply(q, k, v, is_causal=False) -> o`: the forward of `FlashAttention2Triton`, the dense backward.

    Inputs and errors are as there; the backward takes memory O(n_queries·n_keys).
    """

    forward = FlashAttention2Triton.forward

    @staticmethod
    @differentiable_once
    def backward(ctx, dO):
        q, k, v, o, L = (x.resolve_neg() for x in ctx.saved_tensors)  # torch.compile overlooks that bit
        require_as_saved(q, k, v, o, dO, L)
        with without_autocast(q):
            dq, dk, dv = compiled_dense_backward(q, k, v, o, dO.resolve_neg(), L, ctx.is_causal)
        return dq, dk, dv, None, None
