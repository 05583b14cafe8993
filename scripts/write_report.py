"""Write a report from its template and the measured rows beside it, so that no figure is typed by hand.

    uv run scripts/write_report.py runs/h200        runs/h200/REPORT.template.md -> runs/h200/REPORT.md

The template is Jinja's. In it `rows(path, **where)` gives the rows of a JSONL file below that folder, `one` the only
such row, `beside`, `pairs` and `steps` rows with what they are compared with, `curve` a training run, `table` and
`ladder` tables as the benchmarks print them; `there` says whether a file exists. What else a template can say is in
NAMES and FILTERS of cs336_systems/bench/written.py.
A name that is not there, a file or a row that is missing, a table without lines and a figure that was not measured end
the script with an error.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from jinja2 import TemplateError

from cs336_systems.bench.written import place_in_template, render
from cs336_systems.ladder import LADDER


@dataclass(frozen=True)
class Config:
    """The command line."""

    folder: tyro.conf.Positional[Path] = Path("runs/h200")
    """Where the template and the rows lie, and where REPORT.md is written."""


def main(config: Config) -> None:
    path = config.folder / "REPORT.md"
    path.write_text(render(config.folder, {"LADDER": LADDER}), encoding="utf-8")
    print(f"{path} is written.")


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except (TemplateError, ValueError, AttributeError, TypeError, OSError) as error:
        sys.exit(f"error: {error}{place_in_template(error)}")
