"""What torch.matmul reaches here on large square matrices, for scale: always timed by the same method."""

from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch

from cs336_systems.bench.measure import Budget, Duration, Passes, Timing, release_memory, time_call
from cs336_systems.bench.record import Environment, Record, Row, RowFile, now
from cs336_systems.bench.sweep import classify
from cs336_systems.bench.workload import AttentionShape

CEILING = "matmul"  # the `implementation` of its rows
SIZES = {"cuda": 8192, "cpu": 1024}
# Whatever the caller's own budget: a GPU takes a second under load to reach its power cap, and then its clocks fall.
LEAST_MS = 1000
BUDGETS: dict[str, Budget] = {"cuda": Duration(1500, 1500), "cpu": Passes(0, 2)}
CEILING_METHOD = {
    "cuda": "The matmul is timed for 1.5 s after 1.5 s of warm-up, so that the GPU has reached its power cap.",
    "cpu": "The matmul is timed twice after one pass of warm-up.",
}


def measure_ceiling(path: Path | None, dtype: torch.dtype, device: torch.device) -> Row:
    """Time (n, n) by (n, n) in `dtype`, at the float32 precision now set, unless `path`, if there is one, has that row.

    In the row n_queries, n_keys and d are n; FLOPs are 2·n³. Where it fails the row says so. A row on a GPU that was
    timed for less than a second is measured again. The method is CEILING_METHOD.

    Raises:
        BusyError: another process measures into the folder of `path`.
    """
    n = SIZES[device.type]
    shape = AttentionShape(1, 1, n, n, n, dtype, False)
    row = Row.of(CEILING, "forward", shape, Environment.capture(device))
    with nullcontext() if path is None else RowFile.opened(path) as file:
        known = file.rows.get(row.key) if file else None
        if known is not None and _is_long_enough(known, device):
            return known
        try:
            timing = _time_matmul(n, dtype, device)
        except Exception as error:
            status, message = classify(error)
            row = replace(row, status=status, message=message, time=now())
        else:
            tflops = 2 * n**3 / timing.median_ms / 1e9
            warmup = BUDGETS[device.type].warmup_passes()
            row = replace(row, status="ok", tflops=tflops, warmup=warmup, time=now(), **asdict(timing))
        release_memory(device)
        if file is not None:
            file.put(row)
    return row


def ceiling_note(row: Row) -> str:
    """What tables say of a row of `measure_ceiling`: the matrices, TFLOP/s and the method."""
    precision = f", float32 precision {row.float32_precision}" if row.dtype == "float32" else ""
    what = f"torch.matmul of two {row.d} x {row.d} matrices in {row.dtype}{precision}"
    if row.tflops is None:
        return f"For scale: {what}: {row.status} ({row.message})."
    tensor_cores = " It uses no tensor cores." if _is_without_tensor_cores(row) else ""
    return f"For scale: {what}: {row.tflops:.3g} TFLOP/s.{tensor_cores} {method_of(row)}"


def method_of(row: Record) -> str:
    """How the matmul was timed that a row is or relates to."""
    return CEILING_METHOD["cuda" if row.driver else "cpu"]


def ceiling_name(row: Row) -> str:
    """What a figure's legend calls the matmul, which a kernel on tensor cores can outrun where it uses none."""
    if _is_without_tensor_cores(row):
        return f"{CEILING} without tensor cores"
    tf32 = " with TF32" if row.dtype == "float32" and row.driver else ""
    return f"{CEILING} in {row.dtype}{tf32}"


def _is_without_tensor_cores(row: Row) -> bool:
    """Whether a GPU's ordinary arithmetic multiplied the row's matrices."""
    return row.driver is not None and row.dtype == "float32" and row.float32_precision == "highest"


def _is_long_enough(row: Row, device: torch.device) -> bool:
    """Whether a row need not be measured again."""
    if row.status != "ok" or row.median_ms is None:
        return False
    return device.type == "cpu" or row.median_ms * (row.iterations or 0) >= LEAST_MS


def _time_matmul(n: int, dtype: torch.dtype, device: torch.device) -> Timing:
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    a @ b  # the first takes longer, and on a CPU there is no other warm-up
    return time_call(lambda: a @ b, device, BUDGETS[device.type])
