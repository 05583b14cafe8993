"""FlashAttention-2 in Triton beside PyTorch's SDPA, in turns, at the shapes that the kernels are judged by.

    uv run cs336_systems/bench_flash_peers.py
    uv run cs336_systems/bench_flash_peers.py --rounds 15 --rep 200 --fresh

GPUs differ from day to day and clocks within minutes: what counts is the ratio of times that were measured one right
after the other. So every implementation is timed once a round, and the table has the ratios within the rounds: many
short ones, since what disturbs a shared machine lasts longer than one of them.
"portable" are the kernels that run on every GPU; on Hopper flash_triton has kernels of its own. Where launches may
take as long as kernels, forward + backward is also timed in a CUDA graph, which tells the GPU's time from the host's.
Started again it goes on where it stopped (--fresh starts over). Without a GPU it times two short sequences on the CPU,
the kernels only where Triton interprets them.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

from cs336_systems.bench.cli import (
    REP_MS,
    WARMUP_MS,
    AtLeast,
    DtypeName,
    OnDevice,
    RowsPath,
    Size,
    TablesPath,
    by_device,
    device_named,
    require_outputs,
    run_script,
)


class Problem(NamedTuple):
    """One attention problem, queries as many as keys."""

    batch: int
    heads: int
    n: int
    d: int
    dtype: DtypeName = "bfloat16"
    causal: bool = True


SHORT = (Problem(1, 16, 4096, 64), Problem(1, 16, 1024, 64), Problem(1, 1, 512, 64))


@dataclass(frozen=True)
class Comparison:
    """What is measured on one kind of device; "portable" is `cs336_systems.ladder.PORTABLE`."""

    implementations: tuple[str, ...]
    ratios: tuple[tuple[str, str], ...]  # (name, peer): columns of ratios
    problems: tuple[Problem, ...]
    in_graphs: tuple[Problem, ...]  # of these, those whose launches may take as long as their kernels
    title: str


COMPARISONS = {
    "cuda": Comparison(
        ("flash_triton", "portable", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient"),
        (
            ("flash_triton", "sdpa_cudnn"),
            ("flash_triton", "sdpa_flash"),
            ("portable", "sdpa_cudnn"),
            ("portable", "sdpa_flash"),
            ("portable", "sdpa_efficient"),
        ),
        (
            Problem(1, 16, 16384, 64),
            Problem(1, 16, 16384, 128),
            Problem(8, 16, 2048, 64),
            *SHORT,
            Problem(4, 16, 4096, 128, causal=False),
            Problem(1, 16, 4096, 64, "float32"),
        ),
        SHORT,
        "FlashAttention-2 in Triton beside PyTorch's SDPA",
    ),
    "cpu": Comparison(
        ("flash_pytorch", "flash_triton", "portable", "sdpa"),
        (("flash_pytorch", "sdpa"), ("flash_triton", "sdpa"), ("portable", "sdpa")),
        (Problem(1, 2, 64, 16, "float32"), Problem(1, 1, 32, 16, "float32", causal=False)),
        (),
        "FlashAttention-2 in Triton beside PyTorch's SDPA on a CPU, short sequences (no GPU)",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Config(OnDevice):
    """The command line."""

    rounds: Size = 7
    """How often each implementation is timed, in turns."""
    warmup: Annotated[int | None, AtLeast(0), *by_device(20, 0, WARMUP_MS)] = None
    rep: Annotated[int | None, AtLeast(1), *by_device(80, 5, REP_MS)] = None
    out_jsonl: RowsPath = Path("runs/flash_peers.jsonl")
    out_md: TablesPath = Path("runs/flash_peers.md")


def main(config: Config) -> None:
    require_outputs(config.out_jsonl, config.out_md)
    from rich.console import Console

    from cs336_systems.attention import ATTENTION
    from cs336_systems.bench.measure import GRAPH_METHOD, IN_GRAPH, Duration
    from cs336_systems.bench.publish import publish
    from cs336_systems.bench.report import rounds
    from cs336_systems.bench.sweep import Sweep, run_all
    from cs336_systems.bench.workload import DTYPES, AttentionShape
    from cs336_systems.ladder import PORTABLE

    def shapes(problems: tuple[Problem, ...]) -> list[AttentionShape]:
        return [AttentionShape(p.batch, p.heads, p.n, p.n, p.d, DTYPES[p.dtype], p.causal) for p in problems]

    device = device_named(config.device)
    comparison, chosen = COMPARISONS[device.type], config.on(device)
    implementations = [(ATTENTION | {"portable": PORTABLE})[name] for name in comparison.implementations]
    budget = Duration(chosen.warmup, chosen.rep)
    sweeps = []
    for number in range(1, config.rounds + 1):
        sweep = Sweep(
            implementations=implementations,
            shapes=shapes(comparison.problems),
            passes=("forward", "forward_backward"),
            reference=ATTENTION["naive"].function,
            device=device,
            budget=budget,
            variant=f"round {number}",
        )
        in_graphs = replace(
            sweep,
            shapes=shapes(comparison.in_graphs),
            passes=("forward_backward",),
            variant=f"{sweep.variant}, CUDA graph",
            harness=IN_GRAPH,
        )
        sweeps += [sweep, in_graphs]
    console = Console()
    rows = run_all(sweeps, config.out_jsonl, config.fresh, console)
    names = comparison.implementations
    of_graphs = (GRAPH_METHOD,) if comparison.in_graphs else ()
    publish(
        rows,
        lambda rows, notes: [rounds(rows, comparison.title, names, comparison.ratios, (*notes, *of_graphs))],
        implementations,
        budget,
        device,
        config.out_jsonl,
        config.out_md,
        console,
    )


if __name__ == "__main__":
    run_script(main, Config, __doc__)
