"""The attention implementations by name: the one table that knows them all, and what each of them needs to run.

Every entry's function is `attention(q, k, v, is_causal) -> o` over tensors (..., n, d).
"""

from collections.abc import Collection

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend

from cs336_basics.modules import scaled_dot_product_attention
from cs336_systems import flash_pytorch, flash_triton, launch, peers
from cs336_systems.implementation import Implementation, compiled_at_first_call, first_line
from cs336_systems.inputs import MAX_HEAD_DIM, attention_inputs


def naive_attention(
    q: Float[Tensor, "... n_queries d"],
    k: Float[Tensor, "... n_keys d"],
    v: Float[Tensor, "... n_keys d"],
    is_causal: bool = False,
) -> Float[Tensor, "... n_queries d"]:
    """softmax(Q K^T / sqrt(d)) V with all scores in memory; causal: query i sees key j where i >= j.

    Raises: as `cs336_systems.inputs.attention_inputs` says; any head dim is allowed.
    """
    q, k, v = attention_inputs(q, k, v, is_causal, flash_pytorch.DTYPES, largest_d=None)
    mask = None
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return scaled_dot_product_attention(q, k, v, mask)


# One shape, one graph: a benchmark resets the compiler between shapes instead of letting it generalise over them.
compiled_attention = compiled_at_first_call(naive_attention, dynamic=False)


def kernel_refusal(device: torch.device, dtype: torch.dtype, d: int) -> str | None:
    """Why the Triton kernels cannot run there: the error that a call would raise, without the call."""
    if launch.triton is None:
        return "Triton is not installed"
    try:
        launch.tiles_for(torch.empty(0, d, dtype=dtype, device=device))
    except (TypeError, ValueError, RuntimeError) as error:
        return first_line(error)
    return None


def _sdpa(name: str, backend: SDPBackend, description: str, dtypes: Collection[torch.dtype]) -> Implementation:
    function = peers.sdpa(backend)
    return Implementation(name, function, f"PyTorch's SDPA, {description}", dtypes, refusal=peers.refusal_of(function))


PEERS = (
    _sdpa("sdpa_flash", SDPBackend.FLASH_ATTENTION, "FlashAttention-2 in CUDA C++", peers.HALF),
    _sdpa("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION, "cuDNN's kernels", peers.HALF),
    _sdpa("sdpa_efficient", SDPBackend.EFFICIENT_ATTENTION, "memory-efficient attention", flash_triton.DTYPES),
    Implementation(
        name="flex",
        function=peers.flex,
        description="FlexAttention under torch.compile; its causal mask, made before, is in neither time nor memory",
        dtypes=flash_triton.DTYPES,
        refusal=peers.flex_refusal,
        compiled=True,
        context=peers.flex_context,
    ),
)

INTERPRETED = "in Triton's interpreter, whose times say nothing about a GPU"

ATTENTION: dict[str, Implementation] = {
    implementation.name: implementation
    for implementation in (
        Implementation(
            name="naive",
            function=naive_attention,
            description="softmax(Q K^T / sqrt(d)) V, one PyTorch operation after another, the mask made in each call",
            dtypes=flash_pytorch.DTYPES,
            saved_scores=1,  # P
            saved_float32_scores=1,  # exp(S - m)
        ),
        Implementation(
            name="compiled",
            function=compiled_attention,
            description="the naive attention under torch.compile",
            dtypes=flash_pytorch.DTYPES,
            compiled=True,
            saved_scores=2,  # S and P
        ),
        Implementation(
            name="flash_pytorch",
            function=flash_pytorch.FlashAttention2Pytorch.apply,
            description="FlashAttention-2 tile by tile in plain PyTorch",
            dtypes=flash_pytorch.DTYPES,
            largest_d=MAX_HEAD_DIM,
        ),
        Implementation(
            name="flash_triton",
            function=flash_triton.FlashAttention2Triton.apply,
            description="FlashAttention-2 in Triton, forward and backward; float32, on tensor cores, in bfloat16 parts",
            dtypes=flash_triton.DTYPES,
            largest_d=MAX_HEAD_DIM,
            refusal=kernel_refusal,
            remark=INTERPRETED if launch.is_interpreted() else None,
        ),
        Implementation(
            name="sdpa",
            function=peers.default_sdpa,
            description="PyTorch's SDPA with the backend of its own choice",
            dtypes=flash_pytorch.DTYPES,
        ),
        *PEERS,
    )
}
