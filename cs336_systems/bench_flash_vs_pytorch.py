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
from typing import Annotated, Literal

from cs336_systems.bench.cli import (
    REP_MS,
    WARMUP_MS,
    AtLeast,
    DtypeName,
    ImplementationName,
    MemoryLimited,
    RowsPath,
    Size,
    TablesPath,
    by_device,
    device_named,
    limited,
    require_outputs,
    run_script,
)

TITLES = {
    "cuda": "FlashAttention-2 and PyTorch",
    "cpu": "FlashAttention-2 and PyTorch on a CPU, reduced grid (no GPU)",
}
MEASURED = (("naive", "compiled", "flash_triton"), ("naive", "flash_pytorch", "flash_triton"))  # on a GPU, on a CPU


@dataclass(frozen=True, kw_only=True)
class Config(MemoryLimited):
    """The command line."""

    seq_min: Size = 128
    """Shortest sequence."""
    seq_max: Annotated[int | None, AtLeast(1), *by_device(65536, 512)] = None
    """Longest sequence."""
    d_min: Size = 16
    """Smallest head dim."""
    d_max: Annotated[int | None, AtLeast(1), *by_device(128, 32)] = None
    """Largest head dim."""
    batch_sizes: tuple[Size, ...] = (1,)
    """Batch sizes; there is one head."""
    dtypes: tuple[DtypeName, ...] = ("bfloat16", "float32")
    """Types of q, k, v and o."""
    float32_precision: tuple[Literal["highest", "high"], ...] = ("highest",)
    """How float32 is multiplied: "highest" has no TF32, "high" has."""
    causal: bool = True
    """Mask the keys that come after a query."""
    implementations: Annotated[tuple[ImplementationName, ...] | None, *by_device(*MEASURED)] = None
    """What is measured."""
    peers: bool = False
    """Also measure SDPA's flash, cuDNN and memory-efficient backends and FlexAttention."""
    warmup: Annotated[int | None, AtLeast(0), *by_device(25, 5, WARMUP_MS)] = None
    rep: Annotated[int | None, AtLeast(1), *by_device(100, 20, REP_MS)] = None
    out_jsonl: RowsPath = Path("runs/flash_bench.jsonl")
    out_md: TablesPath = Path("runs/flash_bench.md")

    def __post_init__(self) -> None:
        super().__post_init__()
        for least, most in (("seq_min", "seq_max"), ("d_min", "d_max")):
            self.require_range(least, most)


def main(config: Config) -> None:
    require_outputs(config.out_jsonl, config.out_md)
    from rich.console import Console

    from cs336_systems.attention import ATTENTION, PEERS
    from cs336_systems.bench.ceiling import measure_ceiling
    from cs336_systems.bench.measure import Duration, float32_precision
    from cs336_systems.bench.publish import publish
    from cs336_systems.bench.record import measuring_into
    from cs336_systems.bench.report import comparisons
    from cs336_systems.bench.sweep import Sweep
    from cs336_systems.bench.workload import DTYPES, PASSES, AttentionShape, powers_of_two

    device = device_named(config.device)
    chosen = config.on(device)
    names = chosen.implementations + (tuple(p.name for p in PEERS) if config.peers else ())
    budget = Duration(chosen.warmup, chosen.rep)
    lengths = powers_of_two("seq", config.seq_min, chosen.seq_max)
    head_dims = powers_of_two("d", config.d_min, chosen.d_max)
    variant = limited(device, config.memory_limit_gib)

    console, rows, fresh = Console(), [], config.fresh
    with measuring_into(config.out_jsonl):
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
                    measure_ceiling(config.out_jsonl, DTYPES[name], device)
                    fresh = False
    publish(
        rows,
        lambda rows, notes: comparisons(rows, TITLES[device.type], tuple(ATTENTION), "naive", notes, memory=False),
        tuple(ATTENTION.values()),
        budget,
        device,
        config.out_jsonl,
        config.out_md,
        console,
    )


if __name__ == "__main__":
    run_script(main, Config, __doc__)
