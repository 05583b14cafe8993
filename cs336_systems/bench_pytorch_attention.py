"""Plain PyTorch attention over the course's grid: time, memory before the backward, and where memory runs out.

    uv run cs336_systems/bench_pytorch_attention.py                        eager attention
    uv run cs336_systems/bench_pytorch_attention.py --compile              and torch.compile of it, side by side
    uv run cs336_systems/bench_pytorch_attention.py --lengths 256 512 --head-dims 64 --dtype bfloat16 --no-causal

Started again it goes on where it stopped (--fresh starts over). It leaves in --out-dir metrics.jsonl, one row per
implementation, shape and pass, and table.md of all that this machine has measured there. Without a GPU it measures a
reduced grid on the CPU.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console

from cs336_systems.attention import ATTENTION
from cs336_systems.bench.measure import MEMORY_METHOD, PREDICTION_METHOD, TIME_METHOD, Budget
from cs336_systems.bench.record import read_rows
from cs336_systems.bench.report import comparison, comparisons
from cs336_systems.bench.sweep import DeviceLostError, Sweep
from cs336_systems.bench.workload import DTYPES, FLOPS_METHOD, AttentionShape, require_at_least


@dataclass(frozen=True)
class Grid:
    """What is measured where the command line does not say."""

    lengths: tuple[int, ...]
    budget: Budget
    title: str


GRIDS = {
    "cuda": Grid((256, 1024, 4096, 8192, 16384), Budget(warmup=10, iterations=100), "PyTorch attention"),
    "cpu": Grid((256, 512, 1024), Budget(warmup=2, iterations=10), "PyTorch attention on a CPU, reduced grid (no GPU)"),
}


@dataclass(frozen=True)
class Config:
    """The command line. What is None depends on the machine (see GRIDS)."""

    compile: bool = False
    """Also measure torch.compile of the same attention."""
    batch: int = 8
    """Batch size; there is one head."""
    head_dims: tuple[int, ...] = (16, 32, 64, 128)
    """Head dims, each measured at each length."""
    lengths: tuple[int, ...] | None = None
    """Sequence lengths; by default 256 to 16384, on a CPU 256 to 1024."""
    warmup: int | None = None
    """Passes before those that are timed; by default 10, on a CPU 2."""
    iters: int | None = None
    """Timed passes; by default 100, on a CPU 10."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Of q, k, v and o."""
    causal: bool = True
    """Mask the keys that come after a query."""
    out_dir: Path = Path("runs/pytorch_attention")
    """Where metrics.jsonl and table.md are written."""
    fresh: bool = False
    """Start over instead of going on with the rows in --out-dir."""

    def __post_init__(self) -> None:
        require_at_least(1, "the number of --head-dims", len(self.head_dims))
        if self.lengths is not None:
            require_at_least(1, "the number of --lengths", len(self.lengths))


def main(config: Config) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    grid = GRIDS[device.type]
    implementations = [ATTENTION[name] for name in (["naive", "compiled"] if config.compile else ["naive"])]
    budget = Budget(
        warmup=grid.budget.warmup if config.warmup is None else config.warmup,
        iterations=grid.budget.iterations if config.iters is None else config.iters,
    )
    lengths = grid.lengths if config.lengths is None else config.lengths
    sweep = Sweep(
        implementations=implementations,
        shapes=[
            AttentionShape(config.batch, 1, n, n, d, DTYPES[config.dtype], config.causal)
            for d in dict.fromkeys(config.head_dims)
            for n in dict.fromkeys(lengths)
        ],
        passes=("forward", "backward"),
        reference=ATTENTION["naive"].function,
        device=device,
        budget=budget,
    )
    console = Console()
    path = config.out_dir / "metrics.jsonl"
    rows = sweep.run(path, config.fresh, console)
    on_record = [row for row in read_rows(path) if row.gpu == rows[0].gpu]
    measured = {row.implementation for row in on_record}
    method = (
        *(f"{name}: {ATTENTION[name].description}." for name in ATTENTION if name in measured),
        TIME_METHOD[device.type],
        FLOPS_METHOD,
        MEMORY_METHOD[device.type],
        PREDICTION_METHOD,
    )
    names = [implementation.name for implementation in implementations]
    comparison(rows, grid.title, names, "naive", method).print(console)
    tables = comparisons(on_record, grid.title, tuple(ATTENTION), "naive", method)
    text = "\n".join(table.to_markdown() for table in tables)
    (config.out_dir / "table.md").write_text(text, encoding="utf-8")
    console.print(f"Rows and table are in {config.out_dir}.", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except (ValueError, OSError, DeviceLostError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt as interrupt:
        print(interrupt, file=sys.stderr)
        sys.exit(130)  # what a shell gives for a process that Ctrl-C ended
