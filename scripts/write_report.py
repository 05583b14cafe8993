"""Write a report from its template and the measured rows beside it, so that no figure is typed by hand.

    uv run scripts/write_report.py runs/h200        runs/h200/REPORT.template.md -> runs/h200/REPORT.md

The template is Jinja's. In it `rows(path, **where)` gives the rows of a JSONL file below that folder, `one` the only
such row, `table` and `ladder` tables as the benchmarks print them, and `ratio(a, b)` the quotient of two rows' medians.
A name that is not there, a row that is missing and one that was not measured end the script with an error.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tyro
from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from cs336_systems.bench.ceiling import CEILING
from cs336_systems.bench.record import Row, read_rows
from cs336_systems.bench.report import comparison, ladders

TEMPLATE = "REPORT.template.md"


@dataclass(frozen=True)
class Config:
    """The command line."""

    folder: tyro.conf.Positional[Path] = Path("runs/h200")
    """Where the template and the rows lie, and where REPORT.md is written."""


class Rows:
    """What a template asks of the rows below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read = cache(read_rows)

    def rows(self, path: str, **where: object) -> list[Row]:
        """The rows of a file whose fields have these values; `n` stands for both lengths.

        Raises:
            ValueError: there is none, or no such field.
        """
        wanted = {"n_queries" if name == "n" else name: value for name, value in where.items()}
        found = [row for row in self._read(self.folder / path) if all(getattr(row, k) == v for k, v in wanted.items())]
        if not found:
            raise ValueError(f"{path} has no row with {where}")
        return found

    def one(self, path: str, **where: object) -> Row:
        """The only row with these values.

        Raises:
            ValueError: there is none, or more than one.
        """
        found = self.rows(path, **where)
        if len(found) > 1:
            raise ValueError(f"{path} has {len(found)} rows with {where}")
        return found[0]

    def table(self, path: str, names: Sequence[str], baseline: str, memory: bool = True, **where: object) -> str:
        """The lines of a comparison without title and notes."""
        found = [row for row in self.rows(path, **where) if row.implementation in names]
        return _lines(comparison(found, "", names, baseline, memory=memory).to_markdown())

    def ladder(self, path: str, names: Sequence[str], baseline: str, **where: object) -> str:
        """The lines of the ladder of the one workload that these rows are of."""
        found = [row for row in self.rows(path, **where) if row.implementation != CEILING]
        (table,) = ladders(found, "", names, baseline)
        return _lines(table.to_markdown())


def _lines(markdown: str) -> str:
    return "\n".join(line for line in markdown.splitlines() if line.startswith("|"))


def median(row: Row) -> float:
    """A row's median in milliseconds.

    Raises:
        ValueError: it has none.
    """
    if row.median_ms is None:
        raise ValueError(f"{row.implementation} {row.pass_} at length {row.n_queries}, d {row.d} is {row.status}")
    return row.median_ms


def ratio(a: Row, b: Row) -> float:
    """How many times as long a took as b."""
    return median(a) / median(b)


FILTERS: dict[str, Any] = {
    "ms": lambda row: f"{median(row):.3f} ms",
    "gib": lambda mib: f"{mib / 1024:.1f} GiB",
    "mib": lambda mib: f"{mib:,.1f} MiB",
    "times": lambda ratio: f"{ratio:.2f}",
}


def render(folder: Path) -> str:
    """The report that the template in `folder` and the rows below it make."""
    rows = Rows(folder)
    environment = Environment(
        loader=FileSystemLoader(folder), undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True
    )
    environment.filters |= FILTERS
    names = {"rows": rows.rows, "one": rows.one, "table": rows.table, "ladder": rows.ladder, "ratio": ratio}
    return environment.get_template(TEMPLATE).render(names)


def main(config: Config) -> None:
    path = config.folder / "REPORT.md"
    path.write_text(render(config.folder), encoding="utf-8")
    print(f"{path} is written.")


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except (TemplateError, ValueError, AttributeError, OSError) as error:
        sys.exit(f"error: {error}")
