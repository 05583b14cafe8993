"""Variants of kernels against one another: each checked, timed and recorded, then ranked.

What a variant is does not matter here: a `Trial` brings its own check, run and name.
"""

import statistics
import time
from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pydantic.dataclasses
import torch
from rich.console import Console
from rich.progress import Progress

from cs336_systems.bench.measure import Budget, Timing, release_memory, time_call
from cs336_systems.bench.record import Environment, Row, RowFile, Status
from cs336_systems.bench.report import Table, code_notes, environments, passes, say, short_message, spread, time_cell
from cs336_systems.bench.sweep import (
    DeviceLostError,
    Measured,
    classify,
    counted_on_interrupt,
    kept_lines,
    lost_for_good,
)
from cs336_systems.bench.workload import AttentionShape, Pass

KIB = 1024
# A kernel too large for a GPU stays so; an error may be mended, and memory may be free another time.
FINAL_STATUSES: frozenset[Status] = frozenset({"ok", "unsupported"})
FINALISTS = 5
ROUNDS = 3
FINAL_METHOD = (
    f"The fastest {FINALISTS} of each kernel and the marked ones are timed once more at the end, one after another in "
    f"{ROUNDS} rounds, so that drifting clocks meet them alike; what counts is the median round."
)


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes; None where nothing is compiled, as in the interpreter."""

    registers: int | None = None  # per thread
    spills: int | None = None  # registers per thread that are kept in memory instead
    shared_memory: int | None = None  # bytes per program

    @classmethod
    def of(cls, row: "TrialRow") -> "Resources":
        return cls(row.registers, row.spills, row.shared_memory)


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True)
class TrialRow(Row):
    """One variant of a kernel with its `Resources`; `rounds` says in how many it was timed, in turns with others."""

    registers: int | None = None
    spills: int | None = None
    shared_memory: int | None = None
    rounds: int | None = None


@dataclass(frozen=True)
class Trial:
    """One variant of a kernel."""

    kernel: str  # `implementation` of its row
    pass_: Pass
    variant: str
    flops: float
    check: Callable[[], None]  # raises where the results are wrong
    run: Callable[[], object]  # what is timed
    resources: Callable[[], Resources]  # of what runs

    def __str__(self) -> str:
        return f"{self.kernel} {self.variant}"


Prepare = Callable[[Sequence[Trial]], Generator[tuple[Trial, Measured | None]]]
"""Does beforehand what takes long or may go wrong; yields trials, each with how it failed, or None."""


@dataclass(frozen=True)
class Search:
    """The trials at one shape, and how long each is timed."""

    trials: Sequence[Trial]
    shape: AttentionShape
    device: torch.device
    budget: Budget
    marked: Collection[tuple[str, str]] = ()  # kernel and variant of those that are finalists whatever their time
    prepare: Prepare | None = None

    def run(self, path: Path, fresh: bool, console: Console) -> list[TrialRow]:
        """Measure what `path` does not hold yet.

        Args:
            path: the JSONL file of the rows.
            fresh: start over instead of going on with the rows in `path`.
            console: where progress is shown.

        Returns:
            The rows of the trials, in their order.

        Raises:
            RecordError: `path` holds something else.
            BusyError: another process measures into the same folder.
            DeviceLostError: the GPU failed for good; the row is recorded.
            SweepInterrupted: Ctrl-C.
        """
        again = f"start again{' without --fresh' if fresh else ''} to go on"
        with RowFile.opened(path, fresh, TrialRow) as file:
            run = _Run(self, file, Environment.capture(self.device), console)
            with counted_on_interrupt(run.file, [run.key(trial) for trial in self.trials], again):
                run.measure_missing()
        return [row for trial in self.trials if (row := run.row(trial))]


@dataclass(frozen=True)
class _Run:
    search: Search
    file: RowFile[TrialRow]
    environment: Environment
    console: Console

    def measure_missing(self) -> None:
        """Measure each trial whose row is missing or not final, and then the finalists again."""
        trials = self.search.trials
        kept = {trial: row for trial in trials if (row := self.row(trial)) and row.status in FINAL_STATUSES}
        for line in kept_lines(self.file, kept, len(trials), self.environment):
            self.say(line)
        todo = [trial for trial in trials if trial not in kept]
        todo = self.prepared(todo)
        # What failed in an earlier run goes last: if it takes the GPU down again, all others are on record by then.
        todo.sort(key=lambda trial: self.row(trial) is not None)
        start = time.monotonic()
        for done, trial in enumerate(todo, start=1):
            self.record(trial, *self.measured(trial))
            left = (time.monotonic() - start) / done * (len(todo) - done)
            self.say(f"[{done}/{len(todo)}, {left:.0f} s left] {trial}: {_result(self.row(trial))}")
        changed = {trial.kernel for trial in todo}
        for kernel in dict.fromkeys(trial.kernel for trial in trials):
            if kernel in changed or not self.had_its_rounds(kernel):
                self.time_again(self.finalists(kernel))

    def prepared(self, todo: Sequence[Trial]) -> list[Trial]:
        """Those of the trials that are still worth measuring; the others get their rows here."""
        if self.search.prepare is None or not todo:
            return list(todo)
        hopeless, n_prepared = [], 0
        with (
            Progress(console=self.console, disable=not self.console.is_terminal, transient=True) as progress,
            closing(self.search.prepare(todo)) as prepared,
        ):
            self.say(f"{len(todo)} are compiled before the first is timed.")
            for trial, failure in progress.track(prepared, len(todo), description="compiling"):
                n_prepared += 1
                if failure is not None:
                    hopeless.append(trial)
                    self.record(trial, failure)
                    self.say(f"{trial}: {_result(self.row(trial))}")
        if n_prepared < len(todo):
            self.say(f"{len(todo) - n_prepared} could not be compiled beforehand; they are when they are timed.")
        return [trial for trial in todo if trial not in hopeless]

    def measured(self, trial: Trial) -> tuple[Measured, Resources]:
        try:
            trial.check()
            timing = time_call(trial.run, self.search.device, self.search.budget)
            return self.ok(trial, timing), trial.resources()
        except Exception as error:
            # Only texts leave this block: the exception holds the frames, and they hold tensors.
            return Measured(*classify(error)), Resources()

    def ok(self, trial: Trial, timing: Timing) -> Measured:
        return Measured("ok", timing=timing, tflops=trial.flops / timing.median_ms / 1e9)

    def finalists(self, kernel: str) -> list[Trial]:
        """The kernel's fastest trials and the marked ones."""
        rows = {trial: row for trial in self.search.trials if (row := self.row(trial)) and trial.kernel == kernel}
        fastest = ranked(list(rows.values()))[:FINALISTS]
        return [
            trial
            for trial, row in rows.items()
            if row.status == "ok" and (row in fastest or (kernel, trial.variant) in self.search.marked)
        ]

    def had_its_rounds(self, kernel: str) -> bool:
        """Whether as many trials of the kernel as there are finalists were timed in rounds: the search may have been
        killed before.
        """
        rows = [row for trial in self.search.trials if trial.kernel == kernel and (row := self.row(trial))]
        timed = [row for row in rows if row.status == "ok"]
        return sum(row.rounds is not None for row in timed) >= min(FINALISTS, len(timed))

    def time_again(self, trials: Sequence[Trial]) -> None:
        """Replace the times of trials that were found right by those of rounds in which they take turns."""
        timings: dict[Trial, list[Timing]] = {trial: [] for trial in trials}
        failures: dict[Trial, Measured] = {}
        for _ in range(ROUNDS):
            for trial in [trial for trial in timings if trial not in failures]:
                try:
                    timings[trial].append(time_call(trial.run, self.search.device, self.search.budget))
                except Exception as error:
                    failures[trial] = Measured(*classify(error))
        for trial, rounds in timings.items():
            row = self.row(trial)
            assert row is not None
            measured = failures.get(trial) or self.ok(trial, _median_of(rounds))
            self.record(trial, measured, Resources.of(row), len(rounds))

    def record(
        self, trial: Trial, measured: Measured, resources: Resources = Resources(), rounds: int | None = None
    ) -> None:
        """Put the trial's row into the file.

        Raises:
            DeviceLostError: the GPU failed for good; the row is there, as an error.
        """
        lost = None
        try:
            release_memory(self.search.device)
        except RuntimeError as error:
            lost = lost_for_good(error)
            measured = Measured("error", measured.message).noting(lost)
        timing = measured.timing
        self.file.put(
            TrialRow.of(
                trial.kernel,
                trial.pass_,
                self.search.shape,
                self.environment,
                trial.variant,
                **asdict(timing) | {"warmup": self.search.budget.warmup_passes()} if timing else {},
                **asdict(resources),
                rounds=rounds,
                tflops=measured.tflops,
                status=measured.status,
                message=measured.message,
            )
        )
        if lost:
            raise DeviceLostError(f"the search ends at {trial}: {lost}; the rows are in {self.file.path}")

    def key(self, trial: Trial) -> Hashable:
        return Row.of(trial.kernel, trial.pass_, self.search.shape, self.environment, trial.variant).key

    def row(self, trial: Trial) -> TrialRow | None:
        return self.file.rows.get(self.key(trial))

    def say(self, line: str) -> None:
        say(self.console, line)


def ranked(rows: Collection[TrialRow]) -> list[TrialRow]:
    """Those that were timed, the fastest first."""
    return sorted((row for row in rows if row.median_ms is not None), key=lambda row: row.median_ms or 0.0)


def ranking(
    rows: Sequence[TrialRow], title: str, marks: Mapping[str, str], method: Sequence[str], shown: int | None = None
) -> Table:
    """One kernel's variants, the fastest first, then those that failed; what failed says why under the table.

    Args:
        rows: of one kernel at one shape.
        marks: what to call some variants; beside it stands how far each is from the best.
        method: notes on how it was measured.
        shown: how many of the fastest are shown; marked ones and failures always are.
    """
    timed = ranked(rows)
    lines, left_out = [], 0
    for rank, row in enumerate(timed, start=1):
        if shown is not None and rank > shown and row.variant not in marks:
            left_out += 1
            continue
        lines.append([str(rank), *_cells(row, timed[0], marks)])
    untimed = [row for row in rows if row.median_ms is None]
    lines += [["-", *_cells(row, None, marks)] for row in untimed]
    headers = ["rank", "tile", "ms", "over the best", "TFLOP/s", "registers", "spills", "shared KiB", "mark"]
    notes = [
        f"{left_out} more that are slower are left out here." if left_out else "",
        *method,
        passes(rows),
        spread(rows),
        *(f"{row.variant}, {row.status}: {short_message(row)}" for row in untimed),
        *environments(rows),
        *code_notes(rows),
    ]
    return Table(title, headers, lines, [note for note in notes if note])


def print_rankings(tables: Sequence[Table], console: Console) -> None:
    """The tables one under another; a note that stands under one is not said again under the next."""
    said: set[str] = set()
    for table in tables:
        replace(table, notes=[note for note in table.notes if note not in said]).print(console)
        said.update(table.notes)


def _cells(row: TrialRow, best: TrialRow | None, marks: Mapping[str, str]) -> list[str]:
    """What stands in the row's line, but for its rank."""
    variant = row.variant or "-"
    over = "-"
    if best and best.median_ms and row.median_ms:
        over = f"+{100 * (row.median_ms / best.median_ms - 1):.1f} %"
    mark = marks.get(variant, "")
    if mark and best:
        mark += ", the best" if row is best else f", {over} over the best"
    taken = [row.registers, row.spills, None if row.shared_memory is None else f"{row.shared_memory / KIB:.1f}"]
    return [
        variant,
        time_cell(row),
        over,
        "-" if row.tflops is None else f"{row.tflops:.3g}",
        *("-" if figure is None else str(figure) for figure in taken),
        mark,
    ]


def _median_of(rounds: Sequence[Timing]) -> Timing:
    """The median of each figure, over rounds with all their passes; if a round is one pass, the rounds' own figures."""
    if all(timing.iterations == 1 for timing in rounds):
        return Timing.of([timing.median_ms for timing in rounds])
    return Timing(
        statistics.median(timing.median_ms for timing in rounds),
        statistics.median(timing.p20_ms for timing in rounds),
        statistics.median(timing.p80_ms for timing in rounds),
        sum(timing.iterations for timing in rounds),
    )


def _result(row: TrialRow | None) -> str:
    if row is None or row.median_ms is None:
        return f"{row.status} ({row.message})" if row else "-"
    return f"{row.median_ms:.3f} ms"
