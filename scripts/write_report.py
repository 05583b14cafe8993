"""Write a report from its template and the measured rows beside it, so that no figure is typed by hand.

    uv run scripts/write_report.py runs/h200        runs/h200/REPORT.template.md -> runs/h200/REPORT.md

The template is Jinja's. In it `rows(path, **where)` gives the rows of a JSONL file below that folder, `one` the only
such row, `beside`, `pairs` and `steps` rows with what they are compared with, `curve` a training run, `table` and
`ladder` tables as the benchmarks print them; `there` says whether a file exists. What else a template can say is in
NAMES and FILTERS of cs336_systems/bench/written.py.
A name that is not there, a file or a row that is missing, a table without lines and a figure that was not measured end
the script with an error.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from cs336_systems.bench.cli import CommandLine, run_script


@dataclass(frozen=True, kw_only=True)
class Config(CommandLine):
    """The command line."""

    folder: tyro.conf.Positional[Path] = Path("runs/h200")
    """Where the template and the rows lie, and where REPORT.md is written."""


def main(config: Config) -> None:
    from jinja2 import TemplateError

    from cs336_systems.bench.written import place_in_template, render
    from cs336_systems.ladder import LADDER

    path = config.folder / "REPORT.md"
    try:
        text = render(config.folder, {"LADDER": LADDER})
    except (TemplateError, ValueError, AttributeError, TypeError, OSError) as error:
        raise ValueError(f"{error}{place_in_template(error)}") from error
    path.write_text(text, encoding="utf-8")
    print(f"{path} is written.")


if __name__ == "__main__":
    run_script(main, Config, __doc__)
