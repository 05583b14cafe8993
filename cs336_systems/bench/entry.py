"""What the benchmark scripts have in common: from the command line to an exit status, and from rows to a table."""

import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import tyro
from rich.console import Console

from cs336_systems.bench.ceiling import CEILING, ceiling_note
from cs336_systems.bench.measure import BACKWARD_METHOD, MEMORY_METHOD, PREDICTION_METHOD, Budget, limit_memory
from cs336_systems.bench.record import ROW_BEGINS, Row, read_rows
from cs336_systems.bench.report import Table, say, write_tables
from cs336_systems.bench.sweep import DeviceLostError
from cs336_systems.bench.workload import FLOPS_METHOD
from cs336_systems.implementation import Implementation, first_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config")
Defaults = TypeVar("Defaults", bound="DataclassInstance")


def run_script(main: Callable[[Config], None], config: type[Config], description: str | None) -> None:
    """Make the command line of `config`, run `main` with it, and say in one line what went wrong, if something did."""
    try:
        main(tyro.cli(config, description=description))
    except (ValueError, OSError, DeviceLostError) as error:
        sys.exit(f"error: {error}")
    except torch.OutOfMemoryError as error:
        sys.exit(f"error: {first_line(error)}")
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "interrupted", file=sys.stderr)
        sys.exit(130)  # what a shell gives for a process that Ctrl-C ended


def device_named(name: str | None) -> torch.device:
    """The device with that name, or the GPU if there is one.

    Raises:
        ValueError: neither cpu nor cuda, or a GPU that is not there.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind == "cpu" and not index:
        return torch.device("cpu")
    if kind != "cuda" or (index and not index.isdecimal()):
        raise ValueError(f"the device is {name!r}; allowed are cpu, cuda, cuda:0, …")
    if int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"the device is {name!r}; this machine has {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", int(index or torch.cuda.current_device()))


def overridden(defaults: Defaults, **given: object) -> Defaults:
    """`defaults`, a frozen dataclass, with those of the given fields that are not None."""
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})


def limited(device: torch.device, gib: float | None) -> str | None:
    """Limit the memory of this process, if that is asked for, and name the variant that its rows are then of.

    Raises: as `limit_memory`.
    """
    if gib is None:
        return None
    limit_memory(device, gib)
    return f"{gib:g} GiB"


def require_output(path: Path) -> None:
    """Check where a file is to go, and make its folder, before anything is measured.

    Raises:
        ValueError: a folder, or a device.
        OSError: a folder cannot be made or written to.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is {'a folder' if path.is_dir() else 'a device'}; allowed is a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"{path} cannot be written")


def require_tables(markdown: Path) -> None:
    """`require_output` for tables.

    Raises:
        ValueError: there are rows.
        ValueError, OSError: as `require_output`.
    """
    require_output(markdown)
    if markdown.exists() and markdown.read_bytes().startswith(ROW_BEGINS):
        raise ValueError(f"{markdown} holds rows of a benchmark; tables would overwrite them")


def require_outputs(jsonl: Path, markdown: Path) -> None:
    """`require_output` for rows, `require_tables` for tables.

    Raises:
        ValueError: both to one file.
        ValueError, OSError: as those.
    """
    if jsonl.resolve() == markdown.resolve():
        raise ValueError(f"--out-jsonl and --out-md are both {jsonl}; the tables would overwrite the rows")
    require_output(jsonl)
    require_tables(markdown)


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
    """Print the run's rows as tables, and write tables of all that this machine has on record to `markdown`.

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

    for table in made_of(rows):
        table.print(console)
    write_tables(markdown, made_of(on_record))
    say(console, f"Rows are in {jsonl}, tables in {markdown}.")
