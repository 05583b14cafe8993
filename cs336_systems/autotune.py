"""Tiles for the Triton kernels: measures candidates at one shape, ranks them, and can write the best to a table.

    uv run cs336_systems/autotune.py                                       1 x 16 heads x 16384 x 64, bfloat16, causal
    uv run cs336_systems/autotune.py --d 128 --kernels forward --quick     one kernel, fewer candidates
    uv run cs336_systems/autotune.py --dtype float16 --write               and use the winners from now on

Beside the times stand the registers, spills and shared memory of each, and at what the shipped table has, how far it is
from the best. --write puts the winners into the user's table, $CS336_TILES or ~/.config/cs336_systems/tiles.json, which
goes before the shipped one for this GPU, at every length, for all dtypes of the same size and the same padded head dim;
to undo it, delete the file or the entry. Started again the command goes on where it stopped (--fresh starts over).
Without a GPU it tries two or three tiles in Triton's interpreter.
"""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported

from cs336_systems import launch
from cs336_systems.attention import ATTENTION
from cs336_systems.bench.entry import overridden, require_outputs, run_script
from cs336_systems.bench.measure import Duration
from cs336_systems.bench.record import read_rows
from cs336_systems.bench.report import say, write_tables
from cs336_systems.bench.tuning import Search, TrialRow, print_rankings
from cs336_systems.bench.workload import DTYPES, AttentionShape, require_at_least
from cs336_systems.tile_search import Tables, TileBench, compiled_ahead, rankings, row_name
from cs336_systems.user_tiles import user_table_path


@dataclass(frozen=True)
class Defaults:
    """What is measured where the command line does not say."""

    seq_len: int
    heads: int
    d: int
    dtype: Literal["bfloat16", "float32"]
    duration: Duration


DEFAULTS = {
    "cuda": Defaults(16384, 16, 64, "bfloat16", Duration(25, 100)),
    "cpu": Defaults(128, 2, 32, "float32", Duration(0, 1)),
}
IN_INTERPRETER = "Triton's interpreter on a CPU, reduced run, no GPU"
MOST_JOBS = 16
SHOWN = 20  # of a kernel's tiles, on the console


@dataclass(frozen=True)
class Config:
    """The command line. What is None depends on the machine (see DEFAULTS)."""

    seq_len: int | None = None
    """Length of queries and keys; by default 16384, without a GPU 128."""
    heads: int | None = None
    """Heads; by default 16, without a GPU 2."""
    batch: int = 1
    """Batch size."""
    d: int | None = None
    """Head dim; by default 64, without a GPU 32."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Of q, k, v and o; by default bfloat16, without a GPU float32."""
    causal: bool = True
    """Mask the keys that come after a query."""
    kernels: tuple[Literal["forward", "dk_dv", "dq"], ...] = ("forward", "dk_dv", "dq")
    """Whose tiles are measured."""
    quick: bool = False
    """Try fewer candidates."""
    write: bool = False
    """Put the winners into the user's table."""
    out_jsonl: Path = Path("runs/autotune.jsonl")
    """Where rows are written."""
    out_md: Path = Path("runs/autotune.md")
    """Where the whole ranking of this shape and these kernels is written."""
    jobs: int | None = None
    """Processes that compile ahead; by default as many as there are cores, 16 at most. 0: compile one by one."""
    fresh: bool = False
    """Start over instead of going on with the rows in --out-jsonl."""

    def __post_init__(self) -> None:
        require_at_least(1, "the number of --kernels", len(self.kernels))
        require_at_least(0, "--jobs", 0 if self.jobs is None else self.jobs)


def shape_of(config: Config, defaults: Defaults) -> AttentionShape:
    """Self-attention in the sizes of the command line."""
    sizes = overridden(defaults, seq_len=config.seq_len, heads=config.heads, d=config.d, dtype=config.dtype)
    n = sizes.seq_len
    return AttentionShape(config.batch, sizes.heads, n, n, sizes.d, DTYPES[sizes.dtype], config.causal)


def main(config: Config) -> None:
    require_outputs(config.out_jsonl, config.out_md)
    interpreted = launch.is_interpreted() or not torch.cuda.is_available()
    device = torch.device("cpu" if interpreted else "cuda")
    defaults = DEFAULTS[device.type]
    shape = shape_of(config, defaults)
    if refusal := ATTENTION["flash_triton"].unsupported_reason(device, shape.dtype, shape.d):
        raise ValueError(refusal)
    if config.write and interpreted:
        raise ValueError("--write needs a GPU: times in Triton's interpreter say nothing about one")
    if config.write and user_table_path() is None:
        raise ValueError("--write has no table to write to: $CS336_TILES is set to nothing")

    kernels = tuple(dict.fromkeys(config.kernels))
    tables, bench = Tables.at(shape, device), TileBench(shape, device, ATTENTION["naive"].function)
    recorded = read_rows(config.out_jsonl, TrialRow) if config.out_jsonl.exists() and not config.fresh else []
    trials = bench.trials(tables, kernels, recorded, config.quick)
    jobs = min(os.cpu_count() or 1, MOST_JOBS) if config.jobs is None else config.jobs
    search = Search(
        trials=tuple(trials),
        shape=shape,
        device=device,
        budget=defaults.duration,
        marked={(row_name(kernel), variant) for kernel in kernels for variant in tables.marks(kernel)},
        prepare=None if interpreted or jobs == 0 else partial(compiled_ahead, bench, trials, jobs),
    )
    console = Console()
    rows = search.run(config.out_jsonl, config.fresh, console)

    note = IN_INTERPRETER if interpreted else ""
    time_method = search.budget.time_method[device.type]
    print_rankings(rankings(rows, kernels, tables, shape, note, time_method, SHOWN), console)
    whole = rankings(rows, kernels, tables, shape, note, time_method)
    write_tables(config.out_md, whole)
    said = [f"Rows are in {config.out_jsonl}, tables in {config.out_md}."]
    if config.write and (path := user_table_path()):
        said += tables.write(path, shape, kernels, rows)
    for line in said:
        say(console, line)


if __name__ == "__main__":
    run_script(main, Config, __doc__)
