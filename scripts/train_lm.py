"""Train a small byte-level Transformer on the documentation strings of Python's standard library.

    uv run scripts/train_lm.py --attention flash_triton --amp bf16
    uv run scripts/train_lm.py --attention naive --amp bf16          from the same seed: the same curve
    uv run scripts/train_lm.py --plot                                the curves that --out-dir holds, as loss.png

Each attention leaves its losses in --out-dir, and a checkpoint from which the same command goes on exactly where it
stopped (--fresh starts over). Without a GPU a tiny model takes a few steps on the CPU.
"""

import json
import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

from cs336_basics.model import BasicsTransformerLM
from cs336_basics.nn_utils import clip_gradient, cross_entropy
from cs336_basics.optimizer import AdamW, get_cosine_lr
from cs336_basics.training import VOCABULARY, Corpus, batch_at, load_checkpoint, save_checkpoint, standard_library_text
from cs336_systems.attention import ATTENTION
from cs336_systems.bench.entry import device_named, overridden, run_script
from cs336_systems.bench.record import Environment
from cs336_systems.bench.workload import require_at_least

VALIDATION_BATCHES = 4
PROMPT = "Return the "


@dataclass(frozen=True)
class Shape:
    """A model and how long it is trained."""

    context_length: int
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    batch: int
    steps: int


SHAPES = {"cuda": Shape(1024, 512, 1536, 6, 8, 16, 600), "cpu": Shape(64, 32, 64, 2, 2, 4, 10)}


@dataclass(frozen=True)
class Config:
    """The command line. What is None depends on the machine (see SHAPES)."""

    attention: str | None = None
    """The name of an attention in cs336_systems.attention; by default flash_triton, on a CPU flash_pytorch."""
    steps: int | None = None
    """Training steps; by default 600, on a CPU 10."""
    context_length: int | None = None
    """Bytes in a sequence; by default 1024, on a CPU 64."""
    batch: int | None = None
    """Sequences in a batch; by default 16, on a CPU 4."""
    learning_rate: float = 1e-3
    """The highest; it rises over the first tenth of the steps and falls to a tenth of it along a cosine."""
    max_gradient_norm: float = 1.0
    """To which gradients are clipped."""
    seed: int = 0
    """Of the parameters and the batches."""
    amp: Literal["bf16"] | None = None
    """Run under autocast to bfloat16."""
    compile: bool = False
    """torch.compile the model, in one graph."""
    validate_every: int = 50
    """Steps between two looks at the validation loss."""
    checkpoint_every: int = 100
    """Steps between two checkpoints."""
    stop_after: int | None = None
    """Stop after so many steps in this run, with a checkpoint; the same command goes on."""
    device: str | None = None
    """By default the GPU if there is one."""
    out_dir: Path = Path("runs/train_lm")
    """Where losses, checkpoints and the plot are written."""
    plot: bool = False
    """Train nothing; draw the curves in --out-dir."""
    fresh: bool = False
    """Start over instead of going on from the checkpoint."""

    def __post_init__(self) -> None:
        if self.attention is not None and self.attention not in ATTENTION:
            raise ValueError(f"--attention is {self.attention!r}; allowed are {', '.join(ATTENTION)}")
        for name in ("validate_every", "checkpoint_every", "steps", "stop_after", "context_length", "batch"):
            if (value := getattr(self, name)) is not None:
                require_at_least(1, f"--{name.replace('_', '-')}", value)


@dataclass
class Run:
    """A model in training.

    Attributes:
        settings: what has to be the same for a checkpoint to be this run's.
        step: how many steps are done.
        losses: one entry a step: step, loss and, now and then, validation loss.
    """

    settings: dict[str, Any]
    model: BasicsTransformerLM
    optimizer: AdamW
    step: int
    losses: list[dict[str, float | None]]

    def state(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "losses": self.losses,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint.

        Raises:
            ValueError: it was written by a run with other settings.
        """
        if state["settings"] != self.settings:
            differ = [name for name in self.settings if state["settings"].get(name) != self.settings[name]]
            raise ValueError(f"the checkpoint is of a run with another {', '.join(differ)}; --fresh starts over")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.losses = state["step"], state["losses"]


def start(config: Config, shape: Shape, device: torch.device) -> Run:
    """A run at its first step."""
    torch.manual_seed(config.seed)
    model = BasicsTransformerLM(
        vocab_size=VOCABULARY,
        context_length=shape.context_length,
        d_model=shape.d_model,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        d_ff=shape.d_ff,
        attention=ATTENTION[str(config.attention)].function,
    ).to(device)  # made on the CPU, whose random numbers are the same everywhere
    settings = asdict(shape) | {
        name: getattr(config, name) for name in ("attention", "learning_rate", "max_gradient_norm", "seed", "amp")
    }
    return Run(settings, model, AdamW(model.parameters(), lr=config.learning_rate), 0, [])


@contextmanager
def saved_on_interrupt(checkpoint: Path, run: Run) -> Generator[None]:
    """Ctrl-C in the block leaves a checkpoint of the steps done."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        # A step that was cut short may have changed some parameters and not others; only whole steps are kept.
        if len(run.losses) == run.step and all(p.grad is None for p in run.model.parameters()):
            save_checkpoint(checkpoint, run.state())
        message = f"interrupted after step {run.step}; start again without --fresh to go on from {checkpoint}"
        raise KeyboardInterrupt(message) from interrupt


def train(config: Config, shape: Shape, device: torch.device, console: Console) -> Run:
    """Train to the last step, or for `stop_after` steps, with checkpoints on the way.

    Raises:
        ValueError: the loss is no longer finite; the checkpoint before stays.
    """
    text = standard_library_text()
    corpus = Corpus.of(text)
    run = start(config, shape, device)
    checkpoint = config.out_dir / f"{config.attention}.pt"
    if checkpoint.exists() and not config.fresh:
        run.restore(load_checkpoint(checkpoint, device))
        console.print(f"{checkpoint} holds {run.step} of {shape.steps} steps; --fresh starts over.", highlight=False)
    model = torch.compile(run.model, fullgraph=True) if config.compile else run.model

    def loss_of(content: torch.Tensor, step: int, seed: int) -> torch.Tensor:
        token_ids, targets = batch_at(content, step, shape.batch, shape.context_length, seed, device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.amp == "bf16"):
            return cross_entropy(model(token_ids), targets)

    def validation_loss() -> float:
        with torch.no_grad():
            seed = config.seed + 1
            losses = [loss_of(corpus.validation, step, seed) for step in range(VALIDATION_BATCHES)]
        return torch.stack(losses).mean().item()

    begun, last = run.step, shape.steps
    if config.stop_after is not None:
        last = min(shape.steps, run.step + config.stop_after)
    with (
        saved_on_interrupt(checkpoint, run),
        Progress(console=console, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task(run.settings["attention"], total=shape.steps, completed=run.step)
        while True:
            looks = run.step > 0 and (run.step % config.validate_every == 0 or run.step == shape.steps)
            if looks and run.losses[-1]["validation_loss"] is None:
                run.losses[-1]["validation_loss"] = validation = validation_loss()
                line = f"step {run.step}: loss {run.losses[-1]['loss']:.4f}, validation {validation:.4f}"
                progress.console.print(line, highlight=False)
            if run.step > begun and (run.step % config.checkpoint_every == 0 or run.step == last):
                save_checkpoint(checkpoint, run.state())
            if run.step >= last:
                return run
            rate = get_cosine_lr(
                run.step, config.learning_rate, config.learning_rate / 10, max(1, shape.steps // 10), shape.steps
            )
            for group in run.optimizer.param_groups:
                group["lr"] = rate
            loss = loss_of(corpus.train, run.step, config.seed)
            if not math.isfinite(loss.item()):
                raise ValueError(
                    f"the loss of step {run.step + 1} is {loss.item()}: training diverged at --learning-rate "
                    f"{config.learning_rate:g}; try a lower one, with --fresh"
                )
            loss.backward()
            clip_gradient(run.model.parameters(), config.max_gradient_norm)
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=True)
            run.step += 1
            run.losses.append({"step": run.step, "loss": loss.item(), "validation_loss": None})
            progress.advance(task)


def write_losses(config: Config, run: Run, device: torch.device) -> Path:
    """The run's losses with its settings and environment, one JSON object."""
    path = config.out_dir / f"{config.attention}.json"
    environment = asdict(Environment.capture(device))
    path.write_text(json.dumps({"settings": run.settings, **environment, "losses": run.losses}), encoding="utf-8")
    return path


def draw_losses(folder: Path) -> tuple[Path, list[str]]:
    """The loss of every attention against the step, and below it the differences from the first.

    Returns:
        The picture, and what was left out: runs that differ from the latest in more than the attention.

    Raises:
        ValueError: `folder` has no losses.
    """
    paths = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    if not paths:
        raise ValueError(f"{folder} holds no losses; train first")
    by_path = {path: json.loads(path.read_text(encoding="utf-8")) for path in paths}

    def setting(path: Path) -> dict[str, object]:
        return by_path[path]["settings"] | {"attention": None}

    runs = [by_path[path] for path in sorted(paths) if setting(path) == setting(paths[-1])]
    left_out = [path.stem for path in paths if setting(path) != setting(paths[-1])]
    runs.sort(key=lambda run: run["settings"]["attention"] != "naive")
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    first = runs[0]
    for index, (run, style) in enumerate(zip(runs, ("-", "--", ":", "-.") * len(runs), strict=False)):
        name, losses, color = run["settings"]["attention"], run["losses"], f"C{index}"
        steps = [entry["step"] for entry in losses]
        upper.plot(steps, [entry["loss"] for entry in losses], style, color=color, linewidth=1, label=name)
        seen = [(entry["step"], entry["validation_loss"]) for entry in losses if entry["validation_loss"] is not None]
        upper.plot(*zip(*seen, strict=True), "ox^v"[index % 4], color=color, markersize=4, label=f"{name}, validation")
        if run is not first:
            pairs = zip(losses, first["losses"], strict=False)
            differences = [a["loss"] - b["loss"] for a, b in pairs]
            lower.plot(steps[: len(differences)], differences, style, color=color, linewidth=1)
    upper.set_ylabel("loss, nats a byte")
    upper.legend()
    lower.set_ylabel(f"difference from\n{first['settings']['attention']}")
    lower.set_xlabel("step")
    lower.grid(alpha=0.3)
    upper.set_title(f"{first['settings']['amp'] or 'float32'}, seed {first['settings']['seed']}, {first['gpu']}")
    path = folder / "loss.png"
    figure.savefig(path, dpi=150)
    return path, left_out


def main(config: Config) -> None:
    console = Console()
    if not config.plot:
        device = device_named(config.device)
        shape = SHAPES[device.type]
        shape = overridden(shape, steps=config.steps, context_length=config.context_length, batch=config.batch)
        if config.attention is None:
            config = replace(config, attention="flash_triton" if device.type == "cuda" else "flash_pytorch")
        config.out_dir.mkdir(parents=True, exist_ok=True)
        implementation = ATTENTION[str(config.attention)]
        dtype = torch.bfloat16 if config.amp else torch.float32
        if reason := implementation.unsupported_reason(device, dtype, shape.d_model // shape.num_heads):
            raise ValueError(f"{config.attention} cannot run here: {reason}")
        run = train(config, shape, device, console)
        console.print(f"Losses are in {write_losses(config, run, device)}.", highlight=False, soft_wrap=True)
        if run.step == shape.steps:
            prompt = torch.tensor([list(PROMPT.encode())], device=device)
            written = run.model.generate(prompt, 100, temperature=0.8, top_k=40)
            console.print(bytes(written[0].tolist()).decode(errors="replace"), markup=False, highlight=False)
    path, left_out = draw_losses(config.out_dir)
    without = f", without {', '.join(left_out)}, trained with other settings" if left_out else ""
    console.print(f"The curves are in {path}{without}.", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    run_script(main, Config, __doc__)
