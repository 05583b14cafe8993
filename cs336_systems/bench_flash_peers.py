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

import torch
from rich.console import Console

from cs336_systems.attention import ATTENTION
from cs336_systems.bench.entry import device_named, overridden, publish, require_outputs, run_script
from cs336_systems.bench.measure import GRAPH_METHOD, IN_GRAPH, Duration
from cs336_systems.bench.report import rounds
from cs336_systems.bench.sweep import Sweep, run_all
from cs336_systems.bench.workload import AttentionShape, require_at_least
from cs336_systems.implementation import Implementation
from cs336_systems.ladder import PORTABLE

OURS = (ATTENTION["flash_triton"], PORTABLE)


def _shape(
    batch: int, heads: int, n: int, d: int, dtype: torch.dtype = torch.bfloat16, causal: bool = True
) -> AttentionShape:
    return AttentionShape(batch, heads, n, n, d, dtype, causal)


SHORT = (_shape(1, 16, 4096, 64), _shape(1, 16, 1024, 64), _shape(1, 1, 512, 64))


@dataclass(frozen=True)
class Defaults:
    """What is measured."""

    implementations: tuple[Implementation, ...]
    compared: tuple[tuple[str, str], ...]  # (name, peer): columns of ratios
    shapes: tuple[AttentionShape, ...]
    in_graphs: tuple[AttentionShape, ...]  # of these, those whose launches may take as long as their kernels
    duration: Duration
    title: str


DEFAULTS = {
    "cuda": Defaults(
        (*OURS, *(ATTENTION[name] for name in ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient"))),
        (
            ("flash_triton", "sdpa_cudnn"),
            ("flash_triton", "sdpa_flash"),
            ("portable", "sdpa_cudnn"),
            ("portable", "sdpa_flash"),
            ("portable", "sdpa_efficient"),
        ),
        (
            _shape(1, 16, 16384, 64),
            _shape(1, 16, 16384, 128),
            _shape(8, 16, 2048, 64),
            *SHORT,
            _shape(4, 16, 4096, 128, causal=False),
            _shape(1, 16, 4096, 64, torch.float32),
        ),
        SHORT,
        Duration(20, 80),
        "FlashAttention-2 in Triton beside PyTorch's SDPA",
    ),
    "cpu": Defaults(
        (ATTENTION["flash_pytorch"], *OURS, ATTENTION["sdpa"]),
        (("flash_pytorch", "sdpa"), ("flash_triton", "sdpa"), ("portable", "sdpa")),
        (_shape(1, 2, 64, 16, torch.float32), _shape(1, 1, 32, 16, torch.float32, causal=False)),
        (),
        Duration(0, 5),
        "FlashAttention-2 in Triton beside PyTorch's SDPA on a CPU, short sequences (no GPU)",
    ),
}


@dataclass(frozen=True)
class Config:
    """The command line. What is None depends on the machine (see DEFAULTS)."""

    rounds: int = 7
    """How often each implementation is timed, in turns."""
    warmup: int | None = None
    """Milliseconds of passes before those that are timed; by default 20, on a CPU 0."""
    rep: int | None = None
    """Milliseconds of timed passes; by default 80, on a CPU 5. Rows on record stay; --fresh measures them again."""
    device: str | None = None
    """By default the GPU if there is one."""
    out_jsonl: Path = Path("runs/flash_peers.jsonl")
    """Where rows are written."""
    out_md: Path = Path("runs/flash_peers.md")
    """Where the table is written."""
    fresh: bool = False
    """Start over instead of going on with the rows in --out-jsonl."""

    def __post_init__(self) -> None:
        require_at_least(1, "--rounds", self.rounds)


def main(config: Config) -> None:
    require_outputs(config.out_jsonl, config.out_md)
    device = device_named(config.device)
    defaults = DEFAULTS[device.type]
    budget = overridden(defaults.duration, warmup=config.warmup, rep=config.rep)
    sweeps = []
    for number in range(1, config.rounds + 1):
        sweep = Sweep(
            implementations=defaults.implementations,
            shapes=defaults.shapes,
            passes=("forward", "forward_backward"),
            reference=ATTENTION["naive"].function,
            device=device,
            budget=budget,
            variant=f"round {number}",
        )
        in_graphs = replace(
            sweep,
            shapes=defaults.in_graphs,
            passes=("forward_backward",),
            variant=f"{sweep.variant}, CUDA graph",
            harness=IN_GRAPH,
        )
        sweeps += [sweep, in_graphs]
    console = Console()
    rows = run_all(sweeps, config.out_jsonl, config.fresh, console)
    names = [each.name for each in defaults.implementations]
    of_graphs = (GRAPH_METHOD,) if defaults.in_graphs else ()
    publish(
        rows,
        lambda rows, notes: [rounds(rows, defaults.title, names, defaults.compared, (*notes, *of_graphs))],
        defaults.implementations,
        budget,
        device,
        config.out_jsonl,
        config.out_md,
        console,
    )


if __name__ == "__main__":
    run_script(main, Config, __doc__)
