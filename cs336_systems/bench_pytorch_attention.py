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
from typing import Annotated

from cs336_systems.bench.cli import (
    AtLeast,
    DtypeName,
    MemoryLimited,
    Size,
    by_device,
    device_named,
    limited,
    require_outputs,
    run_script,
)

TITLES = {"cuda": "PyTorch attention", "cpu": "PyTorch attention on a CPU, reduced grid (no GPU)"}


@dataclass(frozen=True, kw_only=True)
class Config(MemoryLimited):
    """The command line."""

    compile: bool = False
    """Also measure torch.compile of the same attention."""
    batch: Size = 8
    """Batch size; there is one head."""
    head_dims: tuple[Size, ...] = (16, 32, 64, 128)
    """Head dims, each measured at each length."""
    lengths: Annotated[tuple[Size, ...] | None, *by_device((256, 1024, 4096, 8192, 16384), (256, 512, 1024))] = None
    """Sequence lengths."""
    warmup: Annotated[int | None, AtLeast(0), *by_device(10, 2)] = None
    """Passes before those that are timed."""
    iters: Annotated[int | None, AtLeast(1), *by_device(100, 10)] = None
    """Timed passes."""
    dtype: DtypeName = "float32"
    """The type of q, k, v and o."""
    causal: bool = True
    """Mask the keys that come after a query."""
    out_dir: Path = Path("runs/pytorch_attention")
    """Where metrics.jsonl and table.md are written."""


def main(config: Config) -> None:
    jsonl, markdown = config.out_dir / "metrics.jsonl", config.out_dir / "table.md"
    require_outputs(jsonl, markdown, "--out-dir", "--out-dir")
    from rich.console import Console

    from cs336_systems.attention import ATTENTION
    from cs336_systems.bench.ceiling import measure_ceiling
    from cs336_systems.bench.measure import Passes
    from cs336_systems.bench.publish import publish
    from cs336_systems.bench.record import measuring_into
    from cs336_systems.bench.report import comparisons
    from cs336_systems.bench.sweep import Sweep
    from cs336_systems.bench.workload import DTYPES, AttentionShape

    device = device_named(config.device)
    chosen = config.on(device)
    budget = Passes(chosen.warmup, chosen.iters)
    sweep = Sweep(
        implementations=[ATTENTION[name] for name in (["naive", "compiled"] if config.compile else ["naive"])],
        shapes=[
            AttentionShape(config.batch, 1, n, n, d, DTYPES[config.dtype], config.causal)
            for d in dict.fromkeys(config.head_dims)
            for n in dict.fromkeys(chosen.lengths)
        ],
        passes=("forward", "backward"),
        reference=ATTENTION["naive"].function,
        device=device,
        budget=budget,
        variant=limited(device, config.memory_limit_gib),
    )
    console = Console()
    with measuring_into(jsonl):
        rows = sweep.run(jsonl, config.fresh, console)
        measure_ceiling(jsonl, DTYPES[config.dtype], device)
    publish(
        rows,
        lambda rows, notes: comparisons(rows, TITLES[device.type], tuple(ATTENTION), "naive", notes),
        tuple(ATTENTION.values()),
        budget,
        device,
        jsonl,
        markdown,
        console,
    )


if __name__ == "__main__":
    run_script(main, Config, __doc__)
