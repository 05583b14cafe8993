"""Plain PyTorch attention over the course's grid: time, memory before the backward, and where memory runs out.

    uv run cs336_systems/bench_pytorch_attention.py                        eager attention
    uv run cs336_systems/bench_pytorch_attention.py --compile              and torch.compile of it, side by side
    uv run cs336_systems/bench_pytorch_attention.py --lengths 256 512 --head-dims 64 --dtype bfloat16 --no-causal

Started again it goes on where it stopped (--fresh starts over). It leaves in --out-dir metrics.jsonl, one row per
implementation, shape and pass, and table.md of all that this machine has measured there. Without a GPU it measures a
reduced grid on the CPU.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from cs336_systems.attention import ATTENTION
from cs336_systems.bench.ceiling import measure_ceiling
from cs336_systems.bench.entry import limited, overridden, publish, require_outputs, run_script
from cs336_systems.bench.measure import Passes
from cs336_systems.bench.report import comparisons
from cs336_systems.bench.sweep import Sweep
from cs336_systems.bench.workload import DTYPES, AttentionShape, require_at_least


@dataclass(frozen=True)
class Grid:
    """What is measured where the command line does not say."""

    lengths: tuple[int, ...]
    budget: Passes
    title: str


GRIDS = {
    "cuda": Grid((256, 1024, 4096, 8192, 16384), Passes(warmup=10, iterations=100), "PyTorch attention"),
    "cpu": Grid((256, 512, 1024), Passes(warmup=2, iterations=10), "PyTorch attention on a CPU, reduced grid (no GPU)"),
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
    memory_limit_gib: float | None = None
    """Let PyTorch have no more than this of the GPU's memory, as on a smaller card."""
    out_dir: Path = Path("runs/pytorch_attention")
    """Where metrics.jsonl and table.md are written."""
    fresh: bool = False
    """Start over instead of going on with the rows in --out-dir."""

    def __post_init__(self) -> None:
        require_at_least(1, "the number of --head-dims", len(self.head_dims))
        if self.lengths is not None:
            require_at_least(1, "the number of --lengths", len(self.lengths))


def main(config: Config) -> None:
    jsonl, markdown = config.out_dir / "metrics.jsonl", config.out_dir / "table.md"
    require_outputs(jsonl, markdown)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    grid = GRIDS[device.type]
    implementations = [ATTENTION[name] for name in (["naive", "compiled"] if config.compile else ["naive"])]
    grid = overridden(grid, lengths=config.lengths)
    budget = overridden(grid.budget, warmup=config.warmup, iterations=config.iters)
    variant = limited(device, config.memory_limit_gib)
    sweep = Sweep(
        implementations=implementations,
        shapes=[
            AttentionShape(config.batch, 1, n, n, d, DTYPES[config.dtype], config.causal)
            for d in dict.fromkeys(config.head_dims)
            for n in dict.fromkeys(grid.lengths)
        ],
        passes=("forward", "backward"),
        reference=ATTENTION["naive"].function,
        device=device,
        budget=budget,
        variant=variant,
    )
    console = Console()
    rows = sweep.run(jsonl, config.fresh, console)
    measure_ceiling(jsonl, DTYPES[config.dtype], device, budget)
    publish(
        rows,
        lambda rows, notes: comparisons(rows, grid.title, tuple(ATTENTION), "naive", notes),
        tuple(ATTENTION.values()),
        budget,
        device,
        jsonl,
        markdown,
        console,
    )


if __name__ == "__main__":
    run_script(main, Config, __doc__)
