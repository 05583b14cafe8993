"""The attention implementations by name: the one table that knows them all.

Every entry is a function `attention(q, k, v, is_causal) -> o` over tensors (..., n, d), with what it needs to run.
Benchmarks, models and tests look implementations up here and nowhere else.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_basics.modules import scaled_dot_product_attention
from cs336_systems.flash_pytorch import FlashAttention2Pytorch
from cs336_systems.flash_triton import FlashAttention2Triton, is_interpreted

AttentionFunction = Callable[[Tensor, Tensor, Tensor, bool], Tensor]

HALF_AND_FLOAT = frozenset({torch.float16, torch.bfloat16, torch.float32})


@dataclass(frozen=True)
class Implementation:
    """An attention function and what a caller has to know before choosing it.

    `saved_scores` and `saved_float32_scores` are how many (n_queries, n_keys) matrices per head it keeps for its
    backward in the inputs' dtype and in float32, counted from its equations; the benchmarks predict memory from them
    and print the measured figure beside.
    """

    name: str
    function: AttentionFunction
    description: str
    dtypes: frozenset[torch.dtype] = HALF_AND_FLOAT
    needs_gpu: bool = False
    compiled: bool = False
    saved_scores: int = 0
    saved_float32_scores: int = 0

    def saved_bytes_per_score(self, dtype: torch.dtype) -> int:
        """Bytes kept for the backward of each score, for inputs of `dtype`."""
        float32_or_more = torch.promote_types(dtype, torch.float32)
        return self.saved_scores * dtype.itemsize + self.saved_float32_scores * float32_or_more.itemsize

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this implementation cannot run there, or None where it can."""
        if self.needs_gpu and device.type != "cuda":
            return f"{self.name} needs a GPU, and the device is {device}"
        if dtype not in self.dtypes:
            allowed = ", ".join(sorted(str(d).removeprefix("torch.") for d in self.dtypes))
            return f"{self.name} takes {allowed}, not {str(dtype).removeprefix('torch.')}"
        return None


def naive_attention(
    q: Float[Tensor, "... n_queries d"],
    k: Float[Tensor, "... n_keys d"],
    v: Float[Tensor, "... n_keys d"],
    is_causal: bool = False,
) -> Float[Tensor, "... n_queries d"]:
    """softmax(Q K^T / sqrt(d)) V with all scores in memory; causal: query i sees key j where i >= j."""
    mask = None
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return scaled_dot_product_attention(q, k, v, mask)


# One shape, one graph: a benchmark resets the compiler between shapes instead of letting it generalise over them.
compiled_attention = torch.compile(naive_attention, fullgraph=True, dynamic=False)


def flash_pytorch_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return FlashAttention2Pytorch.apply(q, k, v, is_causal)


def flash_triton_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return FlashAttention2Triton.apply(q, k, v, is_causal)


ATTENTION: dict[str, Implementation] = {
    implementation.name: implementation
    for implementation in (
        Implementation(
            name="naive",
            function=naive_attention,
            description="softmax(Q K^T / sqrt(d)) V, one PyTorch operation after another",
            dtypes=HALF_AND_FLOAT | {torch.float64},
            saved_scores=1,  # P
            saved_float32_scores=1,  # exp(S - m)
        ),
        Implementation(
            name="compiled",
            function=compiled_attention,
            description="the naive attention under torch.compile",
            dtypes=HALF_AND_FLOAT | {torch.float64},
            compiled=True,
            saved_scores=2,  # S and P
        ),
        Implementation(
            name="flash_pytorch",
            function=flash_pytorch_attention,
            description="FlashAttention-2 tile by tile in plain PyTorch",
            dtypes=HALF_AND_FLOAT | {torch.float64},
        ),
        Implementation(
            name="flash_triton",
            function=flash_triton_attention,
            description="FlashAttention-2 in Triton, forward and backward",
            needs_gpu=not is_interpreted(),
        ),
    )
}
