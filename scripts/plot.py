"""Figures of benchmark rows: time, speed-up, TFLOP/s and memory against the length.

    uv run scripts/plot.py runs/pytorch_attention/metrics.jsonl
    uv run scripts/plot.py runs/flash_bench.jsonl --out-dir runs/figures --baseline compiled --title "FlashAttention-2"

It writes PNG files and prints their paths: a figure for each dtype, mask, pass and batch among the rows, a panel for
each head dim, a line for each implementation, a cross where it ran out of memory. A line breaks at a length without a
number, and the footer says why there is none.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from cs336_systems.bench.entry import run_script
from cs336_systems.bench.plots import draw
from cs336_systems.bench.record import read_rows


@dataclass(frozen=True)
class Config:
    """The command line."""

    jsonl: tyro.conf.Positional[Path]
    """Rows that a benchmark wrote."""
    out_dir: Path | None = None
    """Where the figures are written; by default a folder beside the rows with their file's name, and for metrics.jsonl,
    which has a folder to itself, that folder."""
    baseline: str | None = None
    """The implementation over which speed-ups are given; by default naive, where there are rows of it."""
    title: str = "Attention"
    """What each figure's title begins with."""


def main(config: Config) -> None:
    rows, path = read_rows(config.jsonl), config.jsonl
    # The figures of two files have the same names.
    beside = path.parent if path.name == "metrics.jsonl" else path.with_suffix("")
    for path in draw(rows, config.out_dir or beside, config.title, config.baseline):
        print(path)


if __name__ == "__main__":
    run_script(main, Config, __doc__)
