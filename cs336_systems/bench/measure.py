"""The one place where benchmarks time a pass and read memory, on a GPU and on a CPU."""

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cs336_systems.bench.workload import AttentionShape, Pass, require_at_least
from cs336_systems.implementation import AttentionFunction

TIME_METHOD = {
    "cuda": "Time: CUDA events around each pass; before it, outside of the timed part, a buffer as large as the L2 "
    "cache is zeroed, so inputs are read from a cold cache.",
    "cpu": "Time: time.perf_counter around each pass, caches warm from the pass before.",
}
MEMORY_METHOD = {
    "cuda": "Memory before backward: bytes allocated while the graph of one forward is alive, less those before its "
    "inputs were made, after warm-up.",
    "cpu": "Memory before backward: the CPU's allocator keeps no count, so it is the bytes of q, k, v, o and each "
    "further storage that autograd saves (torch.autograd.graph.saved_tensors_hooks).",
}
PREDICTION_METHOD = (
    "Predicted: q, k, v, o, L (flash only), and each (n_queries, n_keys) matrix per head that the equations keep; no "
    "masks."
)


@dataclass(frozen=True)
class Budget:
    """How many passes a measurement makes: `warmup` that are not timed, then `iterations` that are.

    Raises:
        ValueError: `warmup` below 0 or `iterations` below 1.
    """

    warmup: int = 10
    iterations: int = 100

    def __post_init__(self) -> None:
        require_at_least(0, "warmup", self.warmup)
        require_at_least(1, "iterations", self.iterations)


@dataclass(frozen=True)
class Timing:
    """Median, 20th and 80th percentile of one pass, in milliseconds."""

    median_ms: float
    p20_ms: float
    p80_ms: float


def _forward(function: AttentionFunction, shape: AttentionShape, device: torch.device) -> Callable[[], object]:
    q, k, v = shape.inputs(device)
    return lambda: function(q, k, v, shape.causal)


def _backward(function: AttentionFunction, shape: AttentionShape, device: torch.device) -> Callable[[], object]:
    q, k, v = shape.inputs(device)
    dO = shape.output_gradient(device)
    o = function(q, k, v, shape.causal)
    # Not o.backward(): that would add to q.grad, k.grad and v.grad in the timed part from the second time on.
    return lambda: torch.autograd.grad(o, (q, k, v), dO, retain_graph=True)


def _forward_backward(function: AttentionFunction, shape: AttentionShape, device: torch.device) -> Callable[[], object]:
    q, k, v = shape.inputs(device)
    dO = shape.output_gradient(device)
    return lambda: torch.autograd.grad(function(q, k, v, shape.causal), (q, k, v), dO)


_PREPARE = {"forward": _forward, "backward": _backward, "forward_backward": _forward_backward}


def time_pass(
    function: AttentionFunction,
    shape: AttentionShape,
    pass_: Pass,
    device: torch.device,
    budget: Budget,
    after_first: Callable[[], object] = lambda: None,
) -> Timing:
    """Time one pass of `function` over the seeded inputs of `shape`.

    The forward builds its graph, as in training; the backward runs again and again on one kept graph. One pass more
    than `budget` says comes first, and then a call of `after_first`: torch.compile compiles a backward when it first
    runs, which must not be timed where no warm-up is asked for.
    """
    run = _PREPARE[pass_](function, shape, device)
    run()
    after_first()
    return time_call(run, device, budget)


def time_call(run: Callable[[], object], device: torch.device, budget: Budget) -> Timing:
    """Time `run()` as TIME_METHOD states for the kind of device."""
    for _ in range(budget.warmup):
        run()
    times = _TIMERS[device.type](run, device, budget.iterations)
    median, p20, p80 = torch.tensor(times).quantile(torch.tensor([0.5, 0.2, 0.8])).tolist()
    return Timing(median, p20, p80)


def _times_on_gpu(run: Callable[[], object], device: torch.device, iterations: int) -> list[float]:
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(l2_bytes, dtype=torch.uint8, device=device)
    marks = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(iterations)]
    for start, end in marks:
        flush.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in marks]


def _times_on_cpu(run: Callable[[], object], device: torch.device, iterations: int) -> list[float]:
    times = []
    for _ in range(iterations):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return times


_TIMERS = {"cuda": _times_on_gpu, "cpu": _times_on_cpu}


def memory_before_backward(function: AttentionFunction, shape: AttentionShape, device: torch.device) -> int:
    """Bytes alive between one forward and its backward, read as MEMORY_METHOD states for the kind of device."""
    # Warm-up: compilers and cuBLAS allocate on first use, and that is no part of what a forward saves.
    function(*shape.inputs(device), shape.causal)
    return _MEMORY_READERS[device.type](function, shape, device)


def _memory_on_gpu(function: AttentionFunction, shape: AttentionShape, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    baseline = torch.cuda.memory_allocated(device)
    q, k, v = shape.inputs(device)
    o = function(q, k, v, shape.causal)
    torch.cuda.synchronize(device)
    alive = torch.cuda.memory_allocated(device) - baseline
    del o  # until here it holds the graph
    return alive


def _memory_on_cpu(function: AttentionFunction, shape: AttentionShape, device: torch.device) -> int:
    storages: dict[int, int] = {}  # address -> bytes; views of one storage count once

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the saved tensor itself would make a cycle where it is the function's output

    q, k, v = shape.inputs(device)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        o = function(q, k, v, shape.causal)
    for tensor in (q, k, v, o):
        count(tensor)
    return sum(storages.values())


_MEMORY_READERS = {"cuda": _memory_on_gpu, "cpu": _memory_on_cpu}


def release_memory(device: torch.device) -> int:
    """Give back what the last measurement left, and return the bytes that are still allocated (0 on a CPU).

    Raises:
        RuntimeError: the GPU has failed for good; after an illegal access every later call raises.
    """
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def available_bytes() -> int | None:
    """Main memory that a program can take now; else all that the machine has; None where the system says neither."""
    try:
        with open("/proc/meminfo", encoding="utf-8") as lines:
            fields = dict(line.split(":") for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no os.sysconf
        return None
