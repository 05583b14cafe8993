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
from pathlib import Path
from typing import Annotated, Literal

from cs336_systems.bench.cli import (
    AtLeast,
    CommandLine,
    DtypeName,
    Fresh,
    RowsPath,
    Size,
    by_device,
    require_outputs,
    run_script,
    shown_default,
)

IN_INTERPRETER = "Triton's interpreter on a CPU, reduced run, no GPU"
MOST_JOBS = 16
SHOWN = 20  # of a kernel's tiles, on the console


@dataclass(frozen=True, kw_only=True)
class Config(CommandLine):
    """The command line."""

    seq_len: Annotated[int | None, AtLeast(1), *by_device(16384, 128)] = None
    """Length of queries and keys."""
    heads: Annotated[int | None, AtLeast(1), *by_device(16, 2)] = None
    """Heads."""
    batch: Size = 1
    """Batch size."""
    d: Annotated[int | None, AtLeast(1), *by_device(64, 32)] = None
    """Head dim."""
    dtype: Annotated[DtypeName | None, *by_device("bfloat16", "float32")] = None
    """The type of q, k, v and o."""
    causal: bool = True
    """Mask the keys that come after a query."""
    kernels: tuple[Literal["forward", "dk_dv", "dq"], ...] = ("forward", "dk_dv", "dq")
    """Whose tiles are measured."""
    quick: bool = False
    """Try fewer candidates."""
    write: bool = False
    """Put the winners into the user's table."""
    out_jsonl: RowsPath = Path("runs/autotune.jsonl")
    out_md: Path = Path("runs/autotune.md")
    """Where the whole ranking of this shape and these kernels is written."""
    jobs: Annotated[int | None, AtLeast(0), shown_default(f"as many as there are cores, {MOST_JOBS} at most")] = None
    """Processes that compile ahead. 0: compile one by one."""
    fresh: Fresh = False


def main(config: Config) -> None:
    require_outputs(config.out_jsonl, config.out_md)
    from functools import partial

    import torch
    from rich.console import Console

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported
    from cs336_systems import launch
    from cs336_systems.attention import ATTENTION
    from cs336_systems.bench.measure import Duration
    from cs336_systems.bench.record import read_rows
    from cs336_systems.bench.report import say, write_tables
    from cs336_systems.bench.tuning import Search, TrialRow, print_rankings
    from cs336_systems.bench.workload import DTYPES, AttentionShape
    from cs336_systems.tile_search import Tables, TileBench, compiled_ahead, rankings, row_name
    from cs336_systems.user_tiles import user_table_path

    interpreted = launch.is_interpreted() or not torch.cuda.is_available()
    device = torch.device("cpu" if interpreted else "cuda")
    chosen = config.on(device)
    n = chosen.seq_len
    shape = AttentionShape(config.batch, chosen.heads, n, n, chosen.d, DTYPES[chosen.dtype], config.causal)
    if refusal := ATTENTION["flash_triton"].unsupported_reason(device, shape.dtype, shape.d):
        raise ValueError(f"--d {shape.d} --dtype {chosen.dtype} cannot run here: {refusal}")
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
        budget=Duration(25, 100) if device.type == "cuda" else Duration(0, 1),
        marked={(row_name(kernel), variant) for kernel in kernels for variant in tables.marks(kernel)},
        prepare=None if interpreted or jobs == 0 else partial(compiled_ahead, bench, trials, jobs),
    )
    console = Console()
    rows = search.run(config.out_jsonl, config.fresh, console)

    note = IN_INTERPRETER if interpreted else ""
    time_method = search.budget.time_method[device.type]
    write_tables(config.out_md, rankings(rows, kernels, tables, shape, note, time_method))
    said = [f"Rows are in {config.out_jsonl}, tables in {config.out_md}."]
    if config.write and (path := user_table_path()):
        said += tables.write(path, shape, kernels, rows)
    print_rankings(rankings(rows, kernels, tables, shape, note, time_method, SHOWN), console)
    for line in said:
        say(console, line)


if __name__ == "__main__":
    run_script(main, Config, __doc__)
