"""FlashAttention-2 in Triton against plain PyTorch, from short sequences to long: forward, backward, end to end.

    uv run cs336_systems/bench_flash_vs_pytorch.py                   naive, compiled and flash_triton
    uv run cs336_systems/bench_flash_vs_pytorch.py --peers           and SDPA's backends and FlexAttention
    uv run cs336_systems/bench_flash_vs_pytorch.py --implementations naive flash_triton --seq-max 4096
    uv run cs336_systems/bench_flash_vs_pytorch.py --dtypes float32 --float32-precision highest high

Batch 1, one head, causal, lengths and head dims in powers of two. Started again it goes on where it stopped (--fresh
starts over). Without a GPU it measures a reduced grid on the CPU, where the kernels run only in Triton's interpreter.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from cs336_systems.attention import ATTENTION, PEERS
from cs336_systems.bench.ceiling import measure_ceiling
from cs336_systems.bench.entry import device_named, limited, overridden, publish, require_outputs, run_script
from cs336_systems.bench.measure import Duration, float32_precision
from cs336_systems.bench.report import comparisons
from cs336_systems.bench.sweep import Sweep
from cs336_systems.bench.workload import DTYPES, PASSES, AttentionShape, powers_of_two, require_at_least


@dataclass(frozen=True)
class Grid:
    """What is measured where the command line does not say."""

    seq_max: int
    d_max: int
    implementations: tuple[str, ...]
    duration: Duration
    title: str


GRIDS = {
    "cuda": Grid(65536, 128, ("naive", "compiled", "flash_triton"), Duration(25, 100), "FlashAttention-2 and PyTorch"),
    "cpu": Grid(
        512,
        32,
        ("naive", "flash_pytorch", "flash_triton"),
        Duration(5, 20),
        "FlashAttention-2 and PyTorch on a CPU, reduced grid (no GPU)",
    ),
}


@dataclass(frozen=True)
class Config:
    """The command line. What is None depends on the machine (see GRIDS)."""

    seq_min: int = 128
    """Shortest sequence."""
    seq_max: int | None = None
    """Longest sequence; by default 65536, on a CPU 512."""
    d_min: int = 16
    """Smallest head dim."""
    d_max: int | None = None
    """Largest head dim; by default 128, on a CPU 32."""
    batch_sizes: tuple[int, ...] = (1,)
    """Batch sizes; there is one head."""
    dtypes: tuple[Literal["bfloat16", "float16", "float32"], ...] = ("bfloat16", "float32")
    """Of q, k, v and o."""
    float32_precision: tuple[Literal["highest", "high"], ...] = ("highest",)
    """How float32 is multiplied: "highest" has no TF32, "high" has."""
    causal: bool = True
    """Mask the keys that come after a query."""
    implementations: tuple[str, ...] | None = None
    """What is measured; by default naive, compiled and flash_triton, on a CPU naive, flash_pytorch and flash_triton."""
    peers: bool = False
    """Also measure SDPA's flash, cuDNN and memory-efficient backends and FlexAttention."""
    warmup: int | None = None
    """Milliseconds of passes before those that are timed; by default 25, on a CPU 5."""
    rep: int | None = None
    """Milliseconds of timed passes; by default 100, on a CPU 20. Rows on record stay; --fresh measures them again."""
    device: str | None = None
    """By default the GPU if there is one."""
    memory_limit_gib: float | None = None
    """Let PyTorch have no more than this of the GPU's memory, as on a smaller card."""
    out_jsonl: Path = Path("runs/flash_bench.jsonl")
    """Where rows are written."""
    out_md: Path = Path("runs/flash_bench.md")
    """Where tables are written."""
    fresh: bool = False
    """Start over instead of going on with the rows in --out-jsonl."""

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "dtypes", "float32_precision"):
            require_at_least(1, f"the number of --{name.replace('_', '-')}", len(getattr(self, name)))
        for name in self.implementations or ():
            if name not in ATTENTION:
                raise ValueError(f"--implementations has {name!r}; allowed are {', '.join(ATTENTION)}")


def main(config: Config) -> None:
    require_outputs(config.out_jsonl, config.out_md)
    device = device_named(config.device)
    grid = overridden(
        GRIDS[device.type], seq_max=config.seq_max, d_max=config.d_max, implementations=config.implementations or None
    )
    names = grid.implementations + (tuple(p.name for p in PEERS) if config.peers else ())
    budget = overridden(grid.duration, warmup=config.warmup, rep=config.rep)
    lengths = powers_of_two("seq", config.seq_min, grid.seq_max)
    head_dims = powers_of_two("d", config.d_min, grid.d_max)
    variant = limited(device, config.memory_limit_gib)

    console, rows, fresh = Console(), [], config.fresh
    for name in dict.fromkeys(config.dtypes):
        for precision in config.float32_precision if name == "float32" else ("highest",):
            with float32_precision(precision):
                sweep = Sweep(
                    implementations=[ATTENTION[each] for each in dict.fromkeys(names)],
                    shapes=[
                        AttentionShape(batch, 1, n, n, d, DTYPES[name], config.causal)
                        for batch in dict.fromkeys(config.batch_sizes)
                        for d in head_dims
                        for n in lengths
                    ],
                    passes=PASSES,
                    reference=ATTENTION["naive"].function,
                    device=device,
                    budget=budget,
                    variant=variant,
                )
                rows += sweep.run(config.out_jsonl, fresh, console)
                measure_ceiling(config.out_jsonl, DTYPES[name], device, budget)
                fresh = False
    publish(
        rows,
        lambda rows, notes: comparisons(rows, grid.title, tuple(ATTENTION), "naive", notes, memory=False),
        tuple(ATTENTION.values()),
        budget,
        device,
        config.out_jsonl,
        config.out_md,
        console,
    )


if __name__ == "__main__":
    run_script(main, Config, __doc__)
