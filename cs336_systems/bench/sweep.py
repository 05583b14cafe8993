"""A grid of shapes x implementations x passes, measured into a JSONL file that a later run continues."""

import time
from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cs336_systems.bench.accuracy import require_correct
from cs336_systems.bench.compilation import CompileWatch, watched
from cs336_systems.bench.measure import (
    PLAIN,
    Budget,
    Harness,
    Passes,
    Timing,
    available_bytes,
    memory_before_backward,
    release_memory,
    time_pass,
)
from cs336_systems.bench.record import AnyRecord, Environment, Record, Row, RowFile, Status
from cs336_systems.bench.workload import MIB, AttentionShape, Pass
from cs336_systems.implementation import AttentionFunction, Implementation, first_line
from cs336_systems.inputs import float32_matmul_precision

# The others are tried again: what was an error may be mended, and what was unsupported or skipped costs nothing to ask.
# An oom row is tried again where more memory is free, see `fill`.
FINAL_STATUSES: frozenset[Status] = frozenset({"ok", "oom"})
OUT_OF_MEMORY_TEXTS = ("CUDA out of memory", "CUDA error: out of memory", "Triton Error [CUDA]: out of memory")
LONGEST_MESSAGE = 500
MORE_FREE_MIB = 256  # above what this process itself may take meanwhile, for kernels that are loaded
MOST_NAMED = 8  # rows in one line of the console


class DeviceLostError(RuntimeError):
    """The GPU has failed for good (an illegal access, say): nothing measured after it would mean anything."""


class SweepInterrupted(KeyboardInterrupt):
    """Ctrl-C during a sweep; the message says what is on record by then and how to go on."""


@dataclass(frozen=True)
class Case:
    """One row to be measured."""

    implementation: Implementation
    shape: AttentionShape
    pass_: Pass
    setting: str = ""  # the sweep's precision and variant, for messages

    def __str__(self) -> str:
        s = self.shape
        length = s.n_queries if s.n_queries == s.n_keys else f"{s.n_queries} x {s.n_keys}"
        shape = f"batch {s.batch}, d {s.d}, length {length}, {s.dtype_name}"
        return ", ".join(filter(None, (f"{self.implementation.name} {self.pass_}", shape, self.setting)))


def joined(message: str | None, note: str) -> str:
    """`note` after what a row has to say already."""
    return f"{message}; {note}" if message else note


@dataclass(frozen=True)
class Measured:
    """How a case ended, and what was measured by then."""

    status: Status
    message: str | None = None
    memory_mib: float | None = None
    timing: Timing | None = None
    tflops: float | None = None

    def noting(self, note: str) -> "Measured":
        """The same with `note` after what its message says."""
        return replace(self, message=joined(self.message, note))


@dataclass(frozen=True)
class Sweep:
    """What to measure.

    `reference` is the plain attention that each implementation has to agree with first. `variant` tells these rows
    from others of the same shapes in one file, as when memory is limited; `harness` says what a pass is.
    """

    implementations: Sequence[Implementation]
    shapes: Sequence[AttentionShape]
    passes: Sequence[Pass]
    reference: AttentionFunction
    device: torch.device
    budget: Budget = field(default_factory=Passes)
    variant: str | None = None
    harness: Harness = field(default_factory=lambda: PLAIN)

    @property
    def cases(self) -> list[Case]:
        """Implementations next to one another, so that clocks drift little between them."""
        precision = float32_matmul_precision(self.device.type)
        setting = ", ".join(filter(None, ("" if precision == "highest" else f"precision {precision}", self.variant)))
        return [Case(i, s, p, setting) for s in self.shapes for i in self.implementations for p in self.passes]

    def run(self, path: Path, fresh: bool = False, console: Console | None = None) -> list[Row]:
        """`run_all` of this one."""
        return run_all([self], path, fresh, console)

    def _row(self, case: Case, environment: Environment, measured: Measured) -> Row:
        saved = case.implementation.saved_bytes_per_score(case.shape.dtype)
        return Row.of(
            case.implementation.name,
            case.pass_,
            case.shape,
            environment,
            self.variant,
            **asdict(measured.timing) | {"warmup": self.budget.warmup_passes()} if measured.timing else {},
            tflops=measured.tflops,
            memory_mib=measured.memory_mib,
            predicted_memory_mib=case.shape.bytes_before_backward(saved) / MIB,
            status=measured.status,
            message=measured.message,
        )

    def _measure(
        self,
        implementation: Implementation,
        shape: AttentionShape,
        passes: Sequence[Pass],
        checked: set[tuple[object, ...]],
    ) -> dict[Pass, Measured]:
        """How each pass ends, compiled once for all: a failure in timing is that pass's, any other all passes'."""
        if reason := implementation.unsupported_reason(self.device, shape.dtype, shape.d):
            return dict.fromkeys(passes, Measured("unsupported", reason))
        needed = shape.peak_bytes(implementation.saved_bytes_per_score(shape.dtype))
        available = available_bytes() if self.device.type == "cpu" else None
        if available is not None and needed > available:
            message = f"needs {gib(needed)}, available are {gib(available)}"
            return dict.fromkeys(passes, Measured("skipped", message))

        try:
            check = (implementation, shape.heads, shape.d, shape.dtype, shape.causal)
            if check not in checked:
                with watched(implementation.compiled):
                    require_correct(implementation.function, self.reference, shape, self.device)
                checked.add(check)
            with watched(implementation.compiled) as watch:
                memory_mib = memory_before_backward(implementation.function, shape, self.device) / MIB
                return {pass_: self._time(implementation, shape, pass_, memory_mib, watch) for pass_ in passes}
        except Exception as error:
            # Only texts leave this block: the exception holds the frames, and they hold the row's tensors.
            return dict.fromkeys(passes, Measured(*classify(error)))

    def _time(
        self, implementation: Implementation, shape: AttentionShape, pass_: Pass, memory_mib: float, watch: CompileWatch
    ) -> Measured:
        """How timing one pass ends; what a failure leaves is kept."""
        try:
            timing = time_pass(
                implementation.function, shape, pass_, self.device, self.budget, watch.warm, self.harness
            )
            watch.check_no_recompile()
        except Exception as error:
            return Measured(*classify(error), memory_mib)
        tflops = shape.flops(pass_) / timing.median_ms / 1e9
        return Measured("ok", remarks(watch, implementation), memory_mib, timing, tflops)


def remarks(watch: CompileWatch, implementation: Implementation) -> str | None:
    """What a time of the implementation has to say."""
    return "; ".join(filter(None, (watch.note, implementation.remark))) or None


def run_all(sweeps: Sequence[Sweep], path: Path, fresh: bool = False, console: Console | None = None) -> list[Row]:
    """Measure what `path` does not hold yet of sweeps on one device, one after another, with one budget.

    Args:
        sweeps: told apart by their variants.
        path: the JSONL file of the rows.
        fresh: start over instead of going on with the rows in `path`.
        console: where progress is shown.

    Returns:
        The sweeps' rows, in the order of their `cases`.

    Raises:
        RecordError: `path` holds something else.
        BusyError: another process measures into the same folder.
        DeviceLostError: the GPU failed for good; the row is recorded.
        SweepInterrupted: Ctrl-C.
    """
    device, budget = sweeps[0].device, sweeps[0].budget
    environment = Environment.capture(device)
    sweep_of = {case: sweep for sweep in sweeps for case in sweep.cases}
    keys = {case: sweep._row(case, environment, Measured("skipped")).key for case, sweep in sweep_of.items()}
    checked: set[tuple[object, ...]] = set()

    def measure(cases: Sequence[Case]) -> list[Row]:
        sweep, implementation, shape = sweep_of[cases[0]], cases[0].implementation, cases[0].shape
        with implementation.context():
            found = sweep._measure(implementation, shape, [case.pass_ for case in cases], checked)
        return [sweep._row(case, environment, found[case.pass_]) for case in cases]

    with RowFile.opened(path, fresh) as file:
        fill(
            file,
            keys,
            lambda row: row.status in FINAL_STATUSES and budget.is_met_by(row.iterations),
            lambda case: (case.implementation, case.shape, case.setting),
            measure,
            device,
            environment,
            console or Console(),
        )
    return [file.rows[key] for key in keys.values()]


@contextmanager
def counted_on_interrupt(file: RowFile[AnyRecord], keys: Collection[Hashable], again: str) -> Generator[None]:
    """Ctrl-C in the block says how many of these rows are on record by then, and how to go on: SweepInterrupted."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        held = sum(key in file.rows for key in keys)
        raise SweepInterrupted(f"interrupted; {held} of {len(keys)} rows are in {file.path}; {again}") from interrupt


AnyCase = TypeVar("AnyCase", bound=Hashable)


def fill(
    file: RowFile[AnyRecord],
    keys: Mapping[AnyCase, Hashable],
    is_final: Callable[[AnyRecord], bool],
    group_of: Callable[[AnyCase], object],
    measure: Callable[[Sequence[AnyCase]], list[AnyRecord]],
    device: torch.device,
    environment: Environment,
    console: Console,
) -> None:
    """Measure each case whose row in `file` is missing or not final, and put its row there.

    A row that ran out of memory is measured again where more is free now than was then.

    Args:
        keys: the cases in the order in which they are measured, and the keys of their rows.
        group_of: cases one after another with the same group are measured together.
        measure: cases of one group -> their rows.

    Raises:
        DeviceLostError: the GPU failed for good; the row is recorded.
        SweepInterrupted: Ctrl-C.
    """
    baseline = release_memory(device)
    free_mib = free_memory_mib(device)
    kept = {
        case: row
        for case, key in keys.items()
        if (row := file.rows.get(key)) and is_final(row) and not _has_more(row, free_mib)
    }
    todo = [case for case in keys if case not in kept]
    for line in kept_lines(file, kept, len(keys), environment):
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    again = "start again without --fresh to go on"
    with counted_on_interrupt(file, keys.values(), again), _progress(console) as progress:
        task, start, done = progress.add_task("", total=len(todo)), time.monotonic(), 0
        for _, group in groupby(todo, key=group_of):
            cases = list(group)
            progress.update(task, description=str(cases[0]))
            free_mib = free_memory_mib(device)
            rows = measure(cases)
            rows[-1], lost = _release(device, baseline, rows[-1])
            if free_mib is not None and not lost:
                free_mib = min(free_mib, free_memory_mib(device) or 0)  # another process may have taken it meanwhile
            for case, measured in zip(cases, rows, strict=True):
                row = replace(measured, free_mib=free_mib) if measured.status == "oom" else measured
                file.put(row)
                done += 1
                left = (time.monotonic() - start) / done * (len(todo) - done)
                line = f"[{done}/{len(todo)}, {left:.0f} s left] {case}: {_result(row)}"
                progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
            progress.advance(task, len(cases))
            if lost:
                raise DeviceLostError(f"the sweep ends at {cases[-1]}: {lost}; the rows are in {file.path}")


def free_memory_mib(device: torch.device) -> float | None:
    """MiB of the GPU's memory that nobody holds; None on a CPU, where no row is oom."""
    return torch.cuda.mem_get_info(device)[0] / MIB if device.type == "cuda" else None


def _has_more(row: Record, free_mib: float | None) -> bool:
    """Whether the row ran out of memory, and more is free now."""
    if row.status != "oom" or row.free_mib is None or free_mib is None:
        return False
    return free_mib > row.free_mib + MORE_FREE_MIB


def kept_lines(
    file: RowFile[AnyRecord], kept: Mapping[AnyCase, AnyRecord], wanted: int, environment: Environment
) -> list[str]:
    """What a run says of rows that it does not measure again, if there are any: how many, and how old they are."""
    if not kept:
        return []
    versions = (environment.torch, environment.triton)
    ages = {
        "of other code": sum(row.source != environment.source for row in kept.values()),
        "of another torch or triton": sum((row.torch, row.triton) != versions for row in kept.values()),
    }
    older = "".join(f", {count} {age}" for age, count in ages.items() if count)
    lines = [f"{file.path} holds {len(kept)} of {wanted} rows{older}; --fresh measures them again."]
    if full := [str(case) for case, row in kept.items() if row.status == "oom"]:
        more = f"; and {len(full) - MOST_NAMED} more" if len(full) > MOST_NAMED else ""
        named = f"{'; '.join(full[:MOST_NAMED])}{more}"
        lines.append(f"Kept as out of memory, since no more memory is known to be free now: {named}.")
    return lines


def _release(device: torch.device, baseline: int, last: AnyRecord) -> tuple[AnyRecord, str | None]:
    """Bring memory back to `baseline` before the next row.

    Returns:
        The last row, with a note where that failed; and what happened where the GPU can no longer be used at all.
    """
    try:
        held = release_memory(device) - baseline
    except RuntimeError as error:
        lost = lost_for_good(error)
        return replace(last, status="error", message=joined(last.message, lost), **dict.fromkeys(last.MEASURED)), lost
    if held > MIB:
        note = f"{held / MIB:.1f} MiB stayed allocated after it"
        return replace(last, message=joined(last.message, note)), None
    return last, None


def lost_for_good(error: BaseException) -> str:
    """What a row says of a GPU that can no longer be used at all."""
    return f"the GPU failed for good: {first_line(error)[:LONGEST_MESSAGE]}"


def classify(error: BaseException) -> tuple[Status, str]:
    """Status and message of a row that failed.

    Out of memory is torch.OutOfMemoryError, or a RuntimeError with CUDA's or Triton's own text, and nothing else. A
    kernel that wants more shared memory than the GPU has (Triton's OutOfResources) is unsupported there. The message of
    PyTorch's says how much was free and who held the rest.
    """
    text = str(error)
    status: Status = "error"
    said = first_line(error)
    if "out of resource: shared memory" in text:
        status = "unsupported"
    elif isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(known in text for known in OUT_OF_MEMORY_TEXTS)
    ):
        status = "oom"
        said = said.partition(" Of the allocated memory")[0]  # then come the allocator's own figures and advice
    return status, f"{type(error).__name__}: {said[:LONGEST_MESSAGE]}"


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _result(row: Record) -> str:
    result = f"{row.median_ms:.3f} ms" if row.median_ms is not None else row.status
    return f"{result} ({row.message})" if row.message else result


def _progress(console: Console) -> Progress:
    """A live bar with the time left; nothing but the lines of finished rows where the output is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
