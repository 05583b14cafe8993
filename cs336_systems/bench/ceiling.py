"""What torch.matmul reaches here on large square matrices, for scale: measured as the implementations are."""

from dataclasses import asdict
from pathlib import Path

import torch

from cs336_systems.bench.measure import Budget, release_memory, time_call
from cs336_systems.bench.record import Environment, Row, RowFile, now
from cs336_systems.bench.workload import dtype_name

CEILING = "matmul"  # the `implementation` of its rows
SIZES = {"cuda": 8192, "cpu": 1024}


def measure_ceiling(path: Path | None, dtype: torch.dtype, device: torch.device, budget: Budget) -> Row:
    """Time (n, n) by (n, n) in `dtype`, at the float32 precision now set, and keep the row in `path`, if there is one.

    In the row n_queries, n_keys and d are n; FLOPs are 2·n³.
    """
    environment = Environment.capture(device)
    n = SIZES[device.type]
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    timing = time_call(lambda: a @ b, device, budget)
    row = Row(
        implementation=CEILING,
        pass_="forward",
        batch=1,
        heads=1,
        n_queries=n,
        n_keys=n,
        d=n,
        dtype=dtype_name(dtype),
        causal=False,
        **asdict(timing),
        warmup=budget.warmup_passes(),
        tflops=2 * n**3 / timing.median_ms / 1e9,
        status="ok",
        **asdict(environment),
        time=now(),
    )
    del a, b
    release_memory(device)
    if path is not None:
        RowFile(path).put(row)
    return row
