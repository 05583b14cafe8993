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

AttentionFunction = Callable[[Tensor, Tensor, Tensor, bool], Tensor]

HALF_AND_FLOAT = frozenset({torch.float16, torch.bfloat16, torch.float32})


@dataclass(frozen=True)
class Implementation:
    """An attention function and what a caller has to know before choosing it.

    `saved_score_matrices` is how many (n_queries, n_keys) matrices per head it keeps for its backward, counted from
    its equations; the benchmarks predict memory from it and print the measured figure beside.
    """

    name: str
    function: AttentionFunction
    description: str
    dtypes: frozenset[torch.dtype] = HALF_AND_FLOAT
    needs_gpu: bool = False
    compiled: bool = False
    saved_score_matrices: int = 0

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this implementation cannot run there, or None where it can."""
        if self.needs_gpu and device.type != "cuda":
            return f"{self.name} needs a GPU, and the device is {device}"
        if dtype not in self.dtypes:
            allowed = ", ".join(sorted(str(d).removeprefix("torch.") for d in self.dtypes))
            return f"{self.name} takes {allowed}, not {str(dtype).removeprefix('torch.')}"
        return None
