"""The course's leaderboard shape, one row for each step from the first kernel to the present one, then the peers.

    uv run cs336_systems/bench_flash_leaderboard.py                      1 x 16 heads x 16384 x 64, bfloat16, causal
    uv run cs336_systems/bench_flash_leaderboard.py --seq-len 4096 --d 128 --heads 32

Each is timed as forward, backward and both, and once more as the course's own harness does it (torch.compile of the
attention, then o.sum().backward()). A step that does not fit in memory says so. Without a GPU it measures a short
sequence in float32 on the CPU.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from cs336_systems.attention import ATTENTION, PEERS
from cs336_systems.bench.ceiling import measure_ceiling
from cs336_systems.bench.entry import device_named, limited, overridden, publish, require_outputs, run_script
from cs336_systems.bench.measure import COURSE, Duration
from cs336_systems.bench.report import ladders
from cs336_systems.bench.sweep import Sweep, run_all
from cs336_systems.bench.workload import DTYPES, PASSES, AttentionShape
from cs336_systems.implementation import Implementation
from cs336_systems.ladder import LADDER

COURSE_HARNESS = "course harness"
HARNESS_METHOD = (
    "course harness: torch.compile of the attention (naive is there what compiled is), then o.sum().backward() into "
    "one leaf of which q, k and v are slices; the sum, the slices' gradients and adding them up are in the time."
)


@dataclass(frozen=True)
class Defaults:
    """What is measured where the command line does not say."""

    seq_len: int
    dtype: Literal["bfloat16", "float32"]
    duration: Duration
    title: str


DEFAULTS = {
    "cuda": Defaults(16384, "bfloat16", Duration(200, 1000), "The ladder to the leaderboard"),
    "cpu": Defaults(128, "float32", Duration(0, 20), "The ladder on a CPU, a short sequence (no GPU)"),
}


@dataclass(frozen=True)
class Config:
    """The command line. What is None depends on the machine (see DEFAULTS)."""

    seq_len: int | None = None
    """Sequence length; by default 16384, on a CPU 128."""
    heads: int = 16
    """Heads; the batch is 1."""
    d: int = 64
    """Head dim."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Of q, k, v and o; by default bfloat16, on a CPU float32."""
    peers: bool = True
    """Also measure SDPA's backends and FlexAttention."""
    warmup: int | None = None
    """Milliseconds of passes before those that are timed; by default 200, on a CPU 0."""
    rep: int | None = None
    """Milliseconds of timed passes; by default 1000, on a CPU 20. Rows on record stay; --fresh measures them again."""
    device: str | None = None
    """By default the GPU if there is one."""
    memory_limit_gib: float | None = None
    """Let PyTorch have no more than this of the GPU's memory, as on a smaller card."""
    out_jsonl: Path = Path("runs/leaderboard.jsonl")
    """Where rows are written."""
    out_md: Path = Path("runs/leaderboard.md")
    """Where tables are written."""
    fresh: bool = False
    """Start over instead of going on with the rows in --out-jsonl."""


def compiled_whole(implementation: Implementation) -> Implementation:
    """The implementation as the course's harness calls it, under torch.compile."""
    if implementation.compiled:
        return implementation
    return replace(implementation, function=torch.compile(implementation.function, fullgraph=True), compiled=True)


def main(config: Config) -> None:
    require_outputs(config.out_jsonl, config.out_md)
    device = device_named(config.device)
    defaults = overridden(DEFAULTS[device.type], seq_len=config.seq_len, dtype=config.dtype)
    budget = overridden(defaults.duration, warmup=config.warmup, rep=config.rep)
    limit = limited(device, config.memory_limit_gib)
    n, dtype = defaults.seq_len, DTYPES[defaults.dtype]
    rungs, on_record = (*LADDER, *(PEERS if config.peers else ())), (*LADDER, *PEERS)
    plain = Sweep(
        implementations=rungs,
        shapes=[AttentionShape(1, config.heads, n, n, config.d, dtype, True)],
        passes=PASSES,
        reference=ATTENTION["naive"].function,
        device=device,
        budget=budget,
        variant=limit,
    )
    course = replace(
        plain,
        implementations=[compiled_whole(rung) for rung in rungs],
        passes=("forward_backward",),
        variant=", ".join(filter(None, (COURSE_HARNESS, limit))),
        harness=COURSE,
    )
    console = Console()
    rows = run_all([plain, course], config.out_jsonl, config.fresh, console)
    measure_ceiling(config.out_jsonl, dtype, device, budget)
    publish(
        rows,
        lambda rows, notes: ladders(
            rows, defaults.title, [each.name for each in on_record], rungs[0].name, (*notes, HARNESS_METHOD)
        ),
        on_record,
        budget,
        device,
        config.out_jsonl,
        config.out_md,
        console,
    )


if __name__ == "__main__":
    run_script(main, Config, __doc__)
