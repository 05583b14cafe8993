"""A run's rows -> the tables that it prints and the file of all that this machine has on record."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
from rich.console import Console

from cs336_systems.bench.ceiling import CEILING, ceiling_note
from cs336_systems.bench.measure import BACKWARD_METHOD, MEMORY_METHOD, PREDICTION_METHOD, Budget
from cs336_systems.bench.record import Row, read_rows
from cs336_systems.bench.report import Table, say, write_tables
from cs336_systems.bench.workload import FLOPS_METHOD
from cs336_systems.implementation import Implementation


def method(
    implementations: Sequence[Implementation],
    rows: Sequence[Row],
    headers: Collection[str],
    budget: Budget,
    device: torch.device,
) -> tuple[str, ...]:
    """The notes under tables with these rows and headers: what each implementation is, and how it was measured."""

    def shown(what: str) -> bool:
        return any(header.endswith(what) for header in headers)

    notes = {
        BACKWARD_METHOD: any(row.pass_ == "backward" for row in rows),
        FLOPS_METHOD: shown("TFLOP/s"),
        MEMORY_METHOD[device.type]: shown("MiB before backward"),
        PREDICTION_METHOD: shown("predicted MiB"),
    }
    return (
        *(f"{implementation.name}: {implementation.description}." for implementation in implementations),
        budget.time_method[device.type],
        *(note for note, applies in notes.items() if applies),
    )


def publish(
    rows: Sequence[Row],
    tables: Callable[[Sequence[Row], Sequence[str]], Sequence[Table]],
    implementations: Sequence[Implementation],
    budget: Budget,
    device: torch.device,
    jsonl: Path,
    markdown: Path,
    console: Console,
) -> None:
    """Write tables of all that this machine has on record to `markdown`, and then print the run's rows as tables.

    Args:
        rows: what the run measured, at least one row.
        tables: makes tables of rows and the notes under them.
        implementations: all that may be on record.
    """
    on_record = [row for row in read_rows(jsonl) if row.gpu == rows[0].gpu]
    ceilings = [row for row in on_record if row.implementation == CEILING]
    on_record = [row for row in on_record if row.implementation != CEILING]

    def made_of(rows: Sequence[Row]) -> Sequence[Table]:
        measured, dtypes = {row.implementation for row in rows}, {row.dtype for row in rows}
        described = [implementation for implementation in implementations if implementation.name in measured]
        headers = [header for table in tables(rows, ()) for header in table.headers]
        at_best = [ceiling_note(row) for row in ceilings if row.dtype in dtypes]
        return tables(rows, (*method(described, rows, headers, budget, device), *at_best))

    write_tables(markdown, made_of(on_record))  # first: a console may fail
    for table in made_of(rows):
        table.print(console)
    say(console, f"Rows are in {jsonl}, tables in {markdown}.")
