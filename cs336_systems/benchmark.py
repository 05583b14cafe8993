"""The whole Transformer: forward, backward and training step, by size, context length and attention.

    uv run cs336_systems/benchmark.py --model-size small --context-length 512
    uv run cs336_systems/benchmark.py --sweep --sweep-contexts 128 512 1024 --attention naive flash_triton --amp bf16
    uv run cs336_systems/benchmark.py --sweep --compile --write-md

Rows go to --out-jsonl, and with --write-md a table to --out-md; started again it goes on where it stopped (--fresh
starts over). --nvtx names forward, loss, backward and optimizer for Nsight Systems (scripts/profile_nsys.sh);
--memory-snapshot writes a file for pytorch.org/memory_viz. Without a GPU it takes a single step on the CPU.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cs336_systems.bench.cli import (
    AtLeast,
    ImplementationName,
    OnDevice,
    RowsPath,
    Size,
    by_device,
    device_named,
    require_file,
    require_outputs,
    run_script,
    shown_default,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from cs336_systems.bench.model import ModelWorkload
    from cs336_systems.implementation import AttentionFunction

TITLES = {"cuda": "Transformer", "cpu": "Transformer on a CPU, single steps (no GPU)"}
MAX_GRADIENT_NORM = 1.0
STEP_METHOD = f"The optimizer's step: gradients clipped to norm {MAX_GRADIENT_NORM:g}, AdamW in float32."
PEAK_METHOD = (
    "Peak memory: the most that PyTorch's allocator had given out in one pass after the first, parameters and "
    "optimizer state included; on a CPU it keeps no count. Tokens per second are those of the median."
)


@dataclass(frozen=True, kw_only=True)
class Config(OnDevice):
    """The command line."""

    model_size: tuple[Literal["small", "medium", "large", "xl", "2.7b"], ...] = ("small",)
    """Sizes of the model."""
    sweep: bool = False
    """All five sizes, in place of --model-size."""
    context_length: Size = 128
    """Tokens in a sequence."""
    sweep_contexts: Annotated[tuple[Size, ...], shown_default("none")] = ()
    """Several context lengths, in place of --context-length."""
    batch: Size = 4
    """Sequences in a batch."""
    attention: tuple[ImplementationName, ...] = ("naive",)
    """Attention implementations."""
    passes: tuple[Literal["forward", "forward_backward", "training_step"], ...] = (
        "forward",
        "forward_backward",
        "training_step",
    )
    """What is timed."""
    compile: bool = False
    """torch.compile the model, in one graph."""
    amp: Annotated[Literal["bf16"] | None, shown_default("float32 throughout")] = None
    """Run under autocast to bfloat16."""
    float32_precision: Literal["highest", "high"] = "highest"
    """How float32 is multiplied: "highest" has no TF32, "high" has."""
    warmup: Annotated[int | None, AtLeast(0), *by_device(5, 0)] = None
    """Passes before those that are timed."""
    steps: Annotated[int | None, AtLeast(1), *by_device(10, 1)] = None
    """Timed passes."""
    nvtx: bool = False
    """Name the parts of a pass for Nsight Systems."""
    memory_snapshot: Annotated[Path | None, shown_default("no snapshot")] = None
    """Record every allocation, and write them here at the end."""
    out_jsonl: RowsPath = Path("runs/bench.jsonl")
    out_md: Path = Path("runs/bench.md")
    """Where --write-md writes tables."""
    write_md: bool = False
    """Write tables of all that this machine has on record in --out-jsonl."""


def make_model(workload: "ModelWorkload", attention: "AttentionFunction", device: "torch.device") -> "nn.Module":
    """A model of the workload's size with seeded parameters in float32."""
    import torch

    from cs336_basics.model import BasicsTransformerLM
    from cs336_systems.bench.model import VOCABULARY

    torch.manual_seed(0)
    size = workload.size
    return BasicsTransformerLM(
        vocab_size=VOCABULARY,
        context_length=workload.context_length,
        d_model=size.d_model,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        d_ff=size.d_ff,
        attention=attention,
        device=device,
    )


def make_step(parameters: list["nn.Parameter"]) -> Callable[[], object]:
    """AdamW on clipped gradients."""
    from cs336_basics.nn_utils import clip_gradient
    from cs336_basics.optimizer import AdamW

    optimizer = AdamW(parameters)

    def step() -> None:
        clip_gradient(parameters, MAX_GRADIENT_NORM)
        optimizer.step()

    return step


@contextmanager
def recorded_memory(path: Path | None) -> Generator[None]:
    """Record allocations in the block and write them to `path`, unless it is None."""
    import torch

    if path is not None:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    try:
        yield
    finally:
        if path is not None:
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)


def main(config: Config) -> None:
    require_outputs(config.out_jsonl, config.out_md)
    if config.memory_snapshot is not None:
        require_file("--memory-snapshot", config.memory_snapshot)
    import torch
    from rich.console import Console

    from cs336_basics.nn_utils import cross_entropy
    from cs336_systems.attention import ATTENTION
    from cs336_systems.bench.ceiling import measure_ceiling
    from cs336_systems.bench.measure import Passes, float32_precision
    from cs336_systems.bench.model import (
        MODEL_FLOPS_METHOD,
        PASSES_METHOD,
        SIZES,
        ModelPass,
        ModelRow,
        ModelWorkload,
        Recipe,
    )
    from cs336_systems.bench.model_report import model_tables
    from cs336_systems.bench.model_sweep import ModelSweep
    from cs336_systems.bench.record import measuring_into, read_rows
    from cs336_systems.bench.report import say, write_tables

    device = device_named(config.device)
    for flag, wanted in (("--nvtx", config.nvtx), ("--memory-snapshot", config.memory_snapshot)):
        if wanted and device.type != "cuda":
            raise ValueError(f"{flag} needs a GPU, got {device}")
        if wanted and config.out_jsonl.exists() and not config.fresh:
            raise ValueError(f"{flag} measures anew what is on record; give --fresh, or a new --out-jsonl")
    chosen = config.on(device)
    budget = Passes(chosen.warmup, chosen.steps)
    contexts = dict.fromkeys(config.sweep_contexts or (config.context_length,))
    sizes = SIZES.values() if config.sweep else [SIZES[name] for name in dict.fromkeys(config.model_size)]
    workloads = [ModelWorkload(size, n, config.batch, config.amp == "bf16") for size in sizes for n in contexts]
    passes: list[ModelPass] = list(dict.fromkeys(config.passes))
    console = Console()
    with (
        measuring_into(config.out_jsonl),
        float32_precision(config.float32_precision),
        recorded_memory(config.memory_snapshot),
    ):
        # Under a profiler a large matmul would be most of what it sees.
        ceiling = None if config.nvtx else measure_ceiling(None, workloads[0].dtype, device).tflops
        sweep = ModelSweep(
            implementations=[ATTENTION[name] for name in dict.fromkeys(config.attention)],
            workloads=workloads,
            passes=passes,
            recipe=Recipe(make_model, cross_entropy, make_step),
            reference=ATTENTION["naive"].function,
            device=device,
            budget=budget,
            compiled=config.compile,
            ceiling=ceiling,
        )
        if config.nvtx:
            sweep = replace(sweep, ranged=torch.cuda.nvtx.range)
        rows = sweep.run(config.out_jsonl, config.fresh, console)
    method = (budget.time_method[device.type], PASSES_METHOD, STEP_METHOD, MODEL_FLOPS_METHOD, PEAK_METHOD)
    if config.write_md:  # before anything is printed, to a pipe that may be closed
        on_record = [row for row in read_rows(config.out_jsonl, ModelRow) if row.gpu == rows[0].gpu]
        write_tables(config.out_md, model_tables(on_record, TITLES[device.type], method))
    for table in model_tables(rows, TITLES[device.type], method):
        table.print(console)
    say(console, f"Rows are in {config.out_jsonl}{f', tables in {config.out_md}' if config.write_md else ''}.")


if __name__ == "__main__":
    run_script(main, Config, __doc__)
