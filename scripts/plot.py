"""Figures of benchmark rows: time, speed-up, TFLOP/s and memory against the length.

    uv run scripts/plot.py runs/pytorch_attention/metrics.jsonl
    uv run scripts/plot.py runs/flash_bench.jsonl --out-dir runs/figures --baseline compiled --title "FlashAttention-2"

It writes PNG files and prints their paths: a figure for each dtype, mask, pass and batch among the rows, a panel for
each head dim, a line for each implementation, a cross where it ran out of memory. A line breaks at a length without a
number, and the footer says why there is none.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from cs336_systems.bench.cli import CommandLine, run_script, shown_default


@dataclass(frozen=True, kw_only=True)
class Config(CommandLine):
    """The command line."""

    jsonl: tyro.conf.Positional[Path]
    """Rows that a benchmark wrote."""
    out_dir: Annotated[Path | None, shown_default("a folder beside the rows; for metrics.jsonl the rows' own")] = None
    """Where the figures are written."""
    baseline: Annotated[str | None, shown_default("naive, if it has rows")] = None
    """The implementation over which speed-ups are given."""
    title: str = "Attention"
    """What each figure's title begins with."""


def main(config: Config) -> None:
    from cs336_systems.bench.plots import draw
    from cs336_systems.bench.record import read_rows

    rows, path = read_rows(config.jsonl), config.jsonl
    # The figures of two files have the same names.
    beside = path.parent if path.name == "metrics.jsonl" else path.with_suffix("")
    for path in draw(rows, config.out_dir or beside, config.title, config.baseline):
        print(path)


if __name__ == "__main__":
    run_script(main, Config, __doc__)
