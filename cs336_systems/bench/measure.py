"""The one place where benchmarks time a pass and read memory, on a GPU and on a CPU."""

import gc
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from cs336_systems.bench.workload import MIB, AttentionShape, Pass, require_at_least
from cs336_systems.implementation import AttentionFunction

_CPU_TIME = "Time: time.perf_counter around each pass, caches warm from the pass before."
FLUSH_BYTES = 256 * MIB  # as much as do_bench; every L2 cache is smaller
LEAST_PASSES = 10  # of which percentiles still say something

MEMORY_METHOD = {
    "cuda": "Memory before backward: bytes allocated while the graph of one forward is alive, less those before its "
    "inputs were made, after warm-up.",
    "cpu": "Memory before backward: the CPU's allocator keeps no count, so it is the bytes of q, k, v, o and each "
    "further storage that autograd saves (torch.autograd.graph.saved_tensors_hooks).",
}
PREDICTION_METHOD = (
    "Predicted: q, k, v, o, and the (n_queries, n_keys) matrices per head that the equations keep, or L where none is "
    "kept; neither masks nor a scaled copy of q."
)
GRAPH_METHOD = "CUDA graph: the pass is captured once and replayed, so that the host's launches are not in the time."
BACKWARD_METHOD = (
    "The backward is timed again and again on one kept graph: nothing is freed on the way, so it may run out of memory "
    "where a single one would not."
)


class Budget(Protocol):
    """How much is measured for one row."""

    time_method: ClassVar[Mapping[str, str]]
    """How times are taken, by the kind of device: a note for the reports."""

    def times(self, run: Callable[[], object], device: torch.device) -> list[float]:
        """Warm up, then time `run()` again and again: milliseconds."""
        ...

    def warmup_passes(self) -> int | None:
        """The untimed passes before, where they are a number that is known beforehand."""
        ...

    def is_met_by(self, iterations: int | None) -> bool:
        """Whether a row of so many timed passes (None: unknown, or nothing was timed) need not be measured again."""
        ...


@dataclass(frozen=True)
class Passes:
    """A number of passes: `warmup` that are not timed, then `iterations` that are.

    Raises:
        ValueError: `warmup` below 0 or `iterations` below 1.
    """

    warmup: int = 10
    iterations: int = 100

    time_method: ClassVar[Mapping[str, str]] = {
        "cuda": "Time: CUDA events around each pass; before it, outside of the timed part, a buffer of 256 MiB is "
        "zeroed, so inputs are read from a cold L2 cache.",
        "cpu": _CPU_TIME,
    }

    def __post_init__(self) -> None:
        require_at_least(0, "warmup", self.warmup)
        require_at_least(1, "iterations", self.iterations)

    def times(self, run: Callable[[], object], device: torch.device) -> list[float]:
        for _ in range(self.warmup):
            run()
        return _TIMERS[device.type](run, device, self.iterations)

    def warmup_passes(self) -> int | None:
        return self.warmup

    def is_met_by(self, iterations: int | None) -> bool:
        return iterations is None or iterations >= self.iterations


@dataclass(frozen=True)
class Duration:
    """A span of time: about `warmup` ms of passes that are not timed, then about `rep` ms of passes that are, on a GPU
    at least LEAST_PASSES of them. Rows stay on record whatever their span was.

    Raises:
        ValueError: `warmup` below 0 or `rep` below 1.
    """

    warmup: int = 25
    rep: int = 100

    time_method: ClassVar[Mapping[str, str]] = {
        "cuda": "Time: triton.testing.do_bench, which zeroes a buffer of 256 MiB before each pass, outside of the "
        "timed part, so inputs are read from a cold L2 cache.",
        "cpu": _CPU_TIME,
    }

    def __post_init__(self) -> None:
        require_at_least(0, "warmup", self.warmup)
        require_at_least(1, "rep", self.rep)

    def times(self, run: Callable[[], object], device: torch.device) -> list[float]:
        if device.type == "cuda":
            from triton.testing import do_bench  # not everywhere that this module is imported

            times = do_bench(run, warmup=self.warmup, rep=self.rep, return_mode="all")
            return times + _times_on_gpu(run, device, max(0, LEAST_PASSES - len(times)))
        _times_for(run, self.warmup)
        return _times_for(run, self.rep)

    def warmup_passes(self) -> int | None:
        return None

    def is_met_by(self, iterations: int | None) -> bool:
        return True


@dataclass(frozen=True)
class Timing:
    """Median, 20th and 80th percentile of one pass in milliseconds, and how many were timed."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    iterations: int

    @classmethod
    def of(cls, times: Sequence[float]) -> "Timing":
        """Of the times of single passes in milliseconds."""
        at = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
        return cls(*torch.tensor(times, dtype=torch.float64).quantile(at).tolist(), iterations=len(times))


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


def _course_forward_backward(
    function: AttentionFunction, shape: AttentionShape, device: torch.device
) -> Callable[[], object]:
    """What the course's leaderboard times: q, k, v are parts of one leaf, whose .grad grows, and dO is expanded."""
    q, k, v = torch.stack([x.detach() for x in shape.inputs(device)]).requires_grad_()

    def run() -> None:
        o = function(q, k, v, shape.causal)
        o.sum().backward()

    return run


def _forward_backward_in_graph(
    function: AttentionFunction, shape: AttentionShape, device: torch.device
) -> Callable[[], object]:
    run = _forward_backward(function, shape, device)
    with torch.cuda.device(device):
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            run()  # first calls compile, and cuDNN plans, neither of which can be captured
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()

    def replay() -> object:
        graph.replay()
        return run  # so that it lives on, and with it the tensors that the graph reads

    return replay


Harness = Mapping[Pass, Callable[[AttentionFunction, AttentionShape, torch.device], Callable[[], object]]]
"""How each pass is prepared: pass -> (function, shape, device) -> what is timed."""

PLAIN: Harness = {"forward": _forward, "backward": _backward, "forward_backward": _forward_backward}
COURSE: Harness = {"forward_backward": _course_forward_backward}
IN_GRAPH: Harness = {"forward_backward": _forward_backward_in_graph}


def time_pass(
    function: AttentionFunction,
    shape: AttentionShape,
    pass_: Pass,
    device: torch.device,
    budget: Budget,
    after_first: Callable[[], object] = lambda: None,
    harness: Harness = PLAIN,
) -> Timing:
    """Time one pass of `function` over the seeded inputs of `shape`.

    The forward builds its graph, as in training; the backward runs again and again on one kept graph. One pass more
    than `budget` says comes first, and then a call of `after_first`: torch.compile compiles a backward when it first
    runs, which must not be timed where no warm-up is asked for.
    """
    run = harness[pass_](function, shape, device)
    run()
    after_first()
    return time_call(run, device, budget)


def times_of(run: Callable[[], object], device: torch.device, budget: Budget) -> list[float]:
    """The time of each timed pass of `run()` in milliseconds."""
    # Events and the buffer that flushes the cache belong to the current GPU.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return budget.times(run, device)


def time_call(run: Callable[[], object], device: torch.device, budget: Budget) -> Timing:
    """Time `run()` as the budget's `time_method` states for the kind of device."""
    return Timing.of(times_of(run, device, budget))


def _times_on_gpu(run: Callable[[], object], device: torch.device, iterations: int) -> list[float]:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
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


def _times_for(run: Callable[[], object], duration_ms: float) -> list[float]:
    """Times on a CPU of as many passes as fill the duration, one at least."""
    times = _times_on_cpu(run, torch.device("cpu"), 1)
    while sum(times) < duration_ms:
        times += _times_on_cpu(run, torch.device("cpu"), 1)
    return times


def memory_before_backward(function: AttentionFunction, shape: AttentionShape, device: torch.device) -> int:
    """Bytes alive between one forward and its backward, read as MEMORY_METHOD states for the kind of device."""
    # Warm-up: compilers and cuBLAS allocate on first use, and that is no part of what a forward saves.
    function(*shape.inputs(device), shape.causal)
    return _MEMORY_READERS[device.type](function, shape, device)


def _memory_on_gpu(function: AttentionFunction, shape: AttentionShape, device: torch.device) -> int:
    gc.collect()  # what only cycles hold could be freed between the two readings
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


@dataclass
class Peak:
    """The most bytes that were allocated at once; None on a CPU, whose allocator keeps no count."""

    bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Generator[Peak]:
    """The peak of what is allocated in the block, with what was there before; read when the block ends."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield peak
    if device.type == "cuda":
        peak.bytes = torch.cuda.max_memory_allocated(device)


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


@contextmanager
def float32_precision(precision: str) -> Generator[None]:
    """In the block, float32 matmuls have this precision: "highest" without TF32, "high" with.

    Afterwards PyTorch's settings are what they were, whether set by the older name or by the newer ones.
    """
    backends: Any = torch.backends  # whose settings no type checker sees
    by_newer_names = [(of, of.fp32_precision) for of in (backends.cuda.matmul, backends.mkldnn.matmul)]
    try:
        by_older_name = torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer names say something else
        by_older_name = "highest"
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(by_older_name)
        for of, value in by_newer_names:
            of.fp32_precision = "none" if value == backends.fp32_precision else value


def limit_memory(device: torch.device, gib: float) -> None:
    """Let this process have no more than `gib` GiB of the GPU's memory, as on a smaller card.

    The limit holds for PyTorch's allocator. On a real card of that size the CUDA context takes some 0.5 GiB more.

    Raises:
        ValueError: not a GPU, or `gib` is not between 0 and what the GPU has.
    """
    if device.type != "cuda":
        raise ValueError(f"--memory-limit-gib needs a GPU, got {device}")
    index = torch.cuda.current_device() if device.index is None else device.index
    total = torch.cuda.get_device_properties(index).total_memory
    if not 0 < gib * 2**30 <= total:
        raise ValueError(f"--memory-limit-gib is {gib:g}; allowed is more than 0 and at most {total / 2**30:.1f}")
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total, index)


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
