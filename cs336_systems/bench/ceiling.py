"""What torch.matmul reaches here on large square matrices, for scale: measured as the implementations are."""

from dataclasses import asdict, replace
from pathlib import Path

import torch

from cs336_systems.bench.measure import Budget, Timing, release_memory, time_call
from cs336_systems.bench.record import Environment, Row, RowFile, now
from cs336_systems.bench.sweep import classify
from cs336_systems.bench.workload import dtype_name

CEILING = "matmul"  # the `implementation` of its rows
SIZES = {"cuda": 8192, "cpu": 1024}


def measure_ceiling(path: Path | None, dtype: torch.dtype, device: torch.device, budget: Budget) -> Row:
    """Time (n, n) by (n, n) in `dtype`, at the float32 precision now set, unless `path`, if there is one, has that row.

    In the row n_queries, n_keys and d are n; FLOPs are 2·n³. Where it fails the row says so.
    """
    environment = Environment.capture(device)
    n = SIZES[device.type]
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
        status="skipped",
        **asdict(environment),
        time=now(),
    )
    file = None if path is None else RowFile(path)
    known = file.rows.get(row.key) if file else None
    if known is not None and known.status == "ok":
        return known
    try:
        timing = _time_matmul(n, dtype, device, budget)
    except Exception as error:
        status, message = classify(error)
        row = replace(row, status=status, message=message)
    else:
        tflops = 2 * n**3 / timing.median_ms / 1e9
        row = replace(row, status="ok", tflops=tflops, warmup=budget.warmup_passes(), **asdict(timing))
    release_memory(device)
    if file is not None:
        file.put(row)
    return row


def _time_matmul(n: int, dtype: torch.dtype, device: torch.device, budget: Budget) -> Timing:
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    a @ b  # the first takes longer, and a budget may have no warm-up
    return time_call(lambda: a @ b, device, budget)
