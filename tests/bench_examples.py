"""Small implementations, shapes and rows that the tests of `bench` share."""

from typing import Any

import torch
from torch import Tensor

from cs336_systems.bench.measure import Passes
from cs336_systems.bench.record import Row
from cs336_systems.bench.sweep import Sweep
from cs336_systems.bench.workload import DTYPES, AttentionShape
from cs336_systems.implementation import AttentionFunction, Implementation

CPU = torch.device("cpu")
SHORT = Passes(warmup=1, iterations=2)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Dense attention whose graph keeps exactly q, k, v, the probabilities and, when causal, a mask."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores[0, 0], dtype=torch.bool).tril(), float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def example(
    name: str = "plain",
    function: AttentionFunction = plain_attention,
    compiled: bool = False,
    reason: str | None = None,
) -> Implementation:
    """The implementation that a test needs, measurable anywhere unless there is a reason against it."""
    return Implementation(
        name,
        function,
        description="an example",
        dtypes=frozenset(DTYPES.values()),
        refusal=lambda device, dtype, d: reason,
        compiled=compiled,
        saved_scores=1,
    )


def shape(n: int = 16, d: int = 8, dtype: torch.dtype = torch.float32, causal: bool = True) -> AttentionShape:
    return AttentionShape(batch=2, heads=1, n_queries=n, n_keys=n, d=d, dtype=dtype, causal=causal)


def sweep(
    *implementations: Implementation, shapes: tuple[AttentionShape, ...] = (shape(),), passes=("forward",)
) -> Sweep:
    return Sweep(implementations, shapes, passes, reference=plain_attention, device=CPU, budget=SHORT)


def row(**changes: Any) -> Row:
    """A row that was measured on a GPU, but for `changes`."""
    values: dict[str, Any] = {
        "implementation": "naive", "pass_": "forward", "batch": 8, "heads": 1, "n_queries": 256, "n_keys": 256,
        "d": 64, "dtype": "float32", "causal": True, "status": "ok", "median_ms": 2.0, "p20_ms": 1.99, "p80_ms": 2.0,
        "tflops": 1.5, "memory_mib": 10.0, "predicted_memory_mib": 9.5, "gpu": "NVIDIA H200", "driver": "570.1",
        "torch": "2.11.0", "triton": "3.6.0", "commit": "abc123", "dirty": False, "float32_precision": "highest",
        "time": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    return Row(**(values | changes))
