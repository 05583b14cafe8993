"""The course's leaderboard shape, one row for each step from the first kernel to the present one, then the peers.

    uv run cs336_systems/bench_flash_leaderboard.py                      1 x 16 heads x 16384 x 64, bfloat16, causal
    uv run cs336_systems/bench_flash_leaderboard.py --seq-len 4096 --d 128 --heads 32

Each is timed as forward, backward and both, and once more as the course's own harness does it (torch.compile of the
attention, then o.sum().backward()). A step that does not fit in memory says so. Without a GPU it measures a short
sequence in float32 on the CPU.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cs336_systems.bench.cli import (
    REP_MS,
    WARMUP_MS,
    AtLeast,
    DtypeName,
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

if TYPE_CHECKING:
    from cs336_systems.implementation import Implementation

COURSE_HARNESS = "course harness"
HARNESS_METHOD = (
    "course harness: torch.compile of the attention (naive is there what compiled is), then o.sum().backward() into "
    "one leaf of which q, k and v are slices; the sum, the slices' gradients and adding them up are in the time."
)
TITLES = {
    "cuda": "The ladder to the leaderboard",
    "cpu": "The ladder on a CPU, a short sequence (no GPU)",
}


@dataclass(frozen=True, kw_only=True)
class Config(MemoryLimited):
    """The command line."""

    seq_len: Annotated[int | None, AtLeast(1), *by_device(16384, 128)] = None
    """Sequence length."""
    heads: Size = 16
    """Heads; the batch is 1."""
    d: Size = 64
    """Head dim."""
    dtype: Annotated[DtypeName | None, *by_device("bfloat16", "float32")] = None
    """The type of q, k, v and o."""
    peers: bool = True
    """Also measure SDPA's backends and FlexAttention."""
    warmup: Annotated[int | None, AtLeast(0), *by_device(200, 0, WARMUP_MS)] = None
    rep: Annotated[int | None, AtLeast(1), *by_device(1000, 20, REP_MS)] = None
    out_jsonl: RowsPath = Path("runs/leaderboard.jsonl")
    out_md: TablesPath = Path("runs/leaderboard.md")


def compiled_whole(implementation: "Implementation") -> "Implementation":
    """The implementation as the course's harness calls it, under torch.compile."""
    from cs336_systems.implementation import compiled_at_first_call

    if implementation.compiled:
        return implementation
    return replace(implementation, function=compiled_at_first_call(implementation.function), compiled=True)


def main(config: Config) -> None:
    require_outputs(config.out_jsonl, config.out_md)
    from rich.console import Console

    from cs336_systems.attention import ATTENTION, PEERS
    from cs336_systems.bench.ceiling import measure_ceiling
    from cs336_systems.bench.measure import COURSE, Duration
    from cs336_systems.bench.publish import publish
    from cs336_systems.bench.record import measuring_into
    from cs336_systems.bench.report import ladders
    from cs336_systems.bench.sweep import Sweep, run_all
    from cs336_systems.bench.workload import DTYPES, PASSES, AttentionShape
    from cs336_systems.ladder import LADDER

    device = device_named(config.device)
    chosen = config.on(device)
    budget = Duration(chosen.warmup, chosen.rep)
    limit = limited(device, config.memory_limit_gib)
    n, dtype = chosen.seq_len, DTYPES[chosen.dtype]
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
    with measuring_into(config.out_jsonl):
        rows = run_all([plain, course], config.out_jsonl, config.fresh, console)
        measure_ceiling(config.out_jsonl, dtype, device)
    publish(
        rows,
        lambda rows, notes: ladders(
            rows, TITLES[device.type], [each.name for each in on_record], rungs[0].name, (*notes, HARNESS_METHOD)
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
