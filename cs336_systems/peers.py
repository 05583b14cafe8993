"""What a PyTorch user would otherwise call: SDPA, as it is or held to one of its backends, and FlexAttention.

Each is `attention(q, k, v, is_causal) -> o` over tensors (batch, heads, n, d), to be measured beside our own. Causal
masks are aligned at the top left, as ours are.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from cs336_systems.implementation import AttentionFunction, compiled_at_first_call, first_line

Q = Float[Tensor, "batch heads n_queries d"]
KV = Float[Tensor, "batch heads n_keys d"]

HALF = (torch.float16, torch.bfloat16)
PROBE_LENGTH = 128


def default_sdpa(q: Q, k: KV, v: KV, is_causal: bool = False) -> Q:
    """PyTorch's scaled_dot_product_attention with the backend of its own choice."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def sdpa(backend: SDPBackend) -> AttentionFunction:
    """PyTorch's scaled_dot_product_attention, which may choose `backend` and no other.

    The choice costs some 10 microseconds of host time a forward.
    """

    def attention(q: Q, k: KV, v: KV, is_causal: bool = False) -> Q:
        with sdpa_kernel(backend):
            return default_sdpa(q, k, v, is_causal)

    return attention


def refusal_of(function: AttentionFunction) -> Callable[[torch.device, torch.dtype, int], str | None]:
    """A `refusal` that asks `function` itself, by a small forward and backward."""

    @lru_cache
    def refusal(device: torch.device, dtype: torch.dtype, d: int) -> str | None:
        x = torch.zeros(1, 1, PROBE_LENGTH, d, dtype=dtype, device=device, requires_grad=True)
        try:
            function(x, x, x, True).sum().backward()
        except RuntimeError as error:
            return first_line(error)
        return None

    return refusal


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


@lru_cache(maxsize=8)
def _causal_blocks(n_queries: int, n_keys: int, device: torch.device) -> BlockMask:
    return create_block_mask(_causal, None, None, n_queries, n_keys, device=device)


_compiled_flex_attention = compiled_at_first_call(flex_attention, dynamic=False)


def flex(q: Q, k: KV, v: KV, is_causal: bool = False) -> Q:
    """FlexAttention under torch.compile; the causal mask of blocks is made once for each pair of lengths."""
    block_mask = _causal_blocks(q.shape[-2], k.shape[-2], q.device) if is_causal else None
    o = _compiled_flex_attention(q, k, v, block_mask=block_mask)
    assert isinstance(o, Tensor)  # not the pair that it returns where the log-sum-exp is asked for
    return o


@contextmanager
def flex_context() -> Generator[None]:
    """When the block ends, the masks of blocks are let go."""
    yield
    _causal_blocks.cache_clear()


def flex_refusal(device: torch.device, dtype: torch.dtype, d: int) -> str | None:
    """FlexAttention has no backward on a CPU."""
    return None if device.type == "cuda" else f"FlexAttention needs a GPU for its backward, got {device}"
