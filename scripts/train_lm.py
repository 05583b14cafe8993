"""Train a small byte-level Transformer on the documentation strings of Python's standard library.

    uv run scripts/train_lm.py --attention flash_triton --amp bf16
    uv run scripts/train_lm.py --attention naive --amp bf16          from the same seed: the same curve
    uv run scripts/train_lm.py --plot                                the curves that --out-dir holds, as loss.png

Each attention leaves its losses in --out-dir, and a checkpoint from which the same command goes on exactly where it
stopped (--fresh starts over). Without a GPU a tiny model takes a few steps on the CPU.
"""

import json
import math
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cs336_systems.bench.cli import (
    Above,
    AtLeast,
    ImplementationName,
    OnDevice,
    Size,
    by_device,
    device_named,
    require_file,
    run_script,
    shown_default,
)

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from cs336_basics.model import BasicsTransformerLM
    from cs336_basics.optimizer import AdamW

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


MODELS = {
    "cuda": {"d_model": 512, "d_ff": 1536, "num_layers": 6, "num_heads": 8},
    "cpu": {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2},
}


@dataclass(frozen=True, kw_only=True)
class Config(OnDevice):
    """The command line."""

    attention: Annotated[ImplementationName | None, *by_device("flash_triton", "flash_pytorch")] = None
    """The attention implementation."""
    steps: Annotated[int | None, AtLeast(1), *by_device(600, 10)] = None
    """Training steps."""
    context_length: Annotated[int | None, AtLeast(1), *by_device(1024, 64)] = None
    """Bytes in a sequence."""
    batch: Annotated[int | None, AtLeast(1), *by_device(16, 4)] = None
    """Sequences in a batch."""
    learning_rate: Annotated[float, Above(0)] = 3e-4
    """The highest; it rises over the first tenth of the steps and falls to a tenth of it along a cosine."""
    max_gradient_norm: Annotated[float, Above(0)] = 1.0
    """The norm to which gradients are clipped."""
    seed: int = 0
    """The seed of the parameters and the batches."""
    amp: Annotated[Literal["bf16"] | None, shown_default("float32 throughout")] = None
    """Run under autocast to bfloat16."""
    compile: bool = False
    """torch.compile the model, in one graph."""
    validate_every: Size = 50
    """Steps between two looks at the validation loss."""
    checkpoint_every: Size = 100
    """Steps between two checkpoints."""
    stop_after: Annotated[int | None, AtLeast(1), shown_default("at the last step")] = None
    """Stop after so many steps in this run, with a checkpoint; the same command goes on."""
    out_dir: Path = Path("runs/train_lm")
    """Where losses, checkpoints and the plot are written."""
    plot: bool = False
    """Train nothing; draw the curves in --out-dir."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed is {self.seed}; allowed is 0 to {2**32 - 1}")


@dataclass
class Run:
    """A model in training.

    Attributes:
        settings: what has to be the same for a checkpoint to be this run's.
        step: how many steps are done.
        losses: one entry a step: step, loss and, now and then, validation loss.
        is_whole: whether no step is under way, which may have changed some parameters and not others.
    """

    settings: dict[str, Any]
    model: "BasicsTransformerLM"
    optimizer: "AdamW"
    step: int
    losses: list[dict[str, float | None]]
    is_whole: bool = True

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
            ValueError: it was written by a run with other settings, or by another program.
        """
        foreign = "the checkpoint is none of this program's; --fresh starts over"
        theirs = state.get("settings")
        if not isinstance(theirs, dict) or not self.state().keys() <= state.keys():
            raise ValueError(foreign)
        if theirs != self.settings:
            differ = [
                f"{name} {theirs.get(name)}, not {mine}"
                for name, mine in self.settings.items()
                if theirs.get(name) != mine
            ]
            raise ValueError(f"the checkpoint is of a run with {'; '.join(differ)}; --fresh starts over")
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.losses = state["step"], state["losses"]
            counted = [entry["step"] for entry in self.losses]
            if self.step > self.settings["steps"] or counted != [*range(1, self.step + 1)] or self.step < 0:
                raise ValueError(f"step {self.step}, {len(counted)} losses")
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise ValueError(foreign) from error


def make_model(config: Config, shape: Shape, attention: str) -> "BasicsTransformerLM":
    """The seeded model, on the CPU, whose random numbers are the same everywhere."""
    import torch

    from cs336_basics.model import BasicsTransformerLM
    from cs336_basics.training import VOCABULARY
    from cs336_systems.attention import ATTENTION

    torch.manual_seed(config.seed)
    return BasicsTransformerLM(
        vocab_size=VOCABULARY,
        context_length=shape.context_length,
        d_model=shape.d_model,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        d_ff=shape.d_ff,
        attention=ATTENTION[attention].function,
    )


def start(config: Config, shape: Shape, text: str, device: "torch.device") -> Run:
    """A run at its first step."""

    from cs336_basics.optimizer import AdamW
    from cs336_systems.inputs import float32_matmul_precision

    model = make_model(config, shape, str(config.attention)).to(device)
    named = ("attention", "learning_rate", "max_gradient_norm", "seed", "amp", "compile")
    settings = asdict(shape) | {name: getattr(config, name) for name in named}
    settings |= {"text": sha256(text.encode()).hexdigest()[:16], "precision": float32_matmul_precision(device.type)}
    return Run(settings, model, AdamW(model.parameters(), lr=config.learning_rate), 0, [])


@contextmanager
def saved_on_interrupt(checkpoint: Path, run: Run) -> Generator[Callable[[], None]]:
    """Ctrl-C in the block lets the step that is under way end; a second one does not.

    Yields:
        What to call between two steps: raises KeyboardInterrupt, which saves the run, if there was a Ctrl-C.
    """
    from cs336_basics.training import save_checkpoint

    pressed = []

    def note(number: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    def stop_if_pressed() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield stop_if_pressed
    except KeyboardInterrupt as interrupt:
        if run.is_whole:
            save_checkpoint(checkpoint, run.state())
            message = f"interrupted after step {run.step}; start again without --fresh to go on from {checkpoint}"
        else:
            kept = f"{checkpoint} has an earlier one" if checkpoint.exists() else "there is no checkpoint yet"
            message = f"interrupted in step {run.step + 1}, which is lost; {kept}"
        raise KeyboardInterrupt(message) from interrupt
    finally:
        signal.signal(signal.SIGINT, before)


def train(config: Config, shape: Shape, device: "torch.device", console: "Console") -> Run:
    """Train to the last step, or for `stop_after` steps, with checkpoints on the way.

    Raises:
        ValueError: the context is longer than the text; losses or gradients are no longer finite, and the checkpoint
            before stays.
    """
    import torch
    from rich.progress import Progress

    from cs336_basics.nn_utils import clip_gradient, cross_entropy
    from cs336_basics.optimizer import get_cosine_lr
    from cs336_basics.training import Corpus, batch_at, load_checkpoint, save_checkpoint, standard_library_text
    from cs336_systems.bench.report import say

    say(console, "The text: documentation strings of Python's standard library.")  # reading them takes seconds
    text = standard_library_text()
    corpus = Corpus.of(text)
    try:
        corpus.require_sequences(shape.context_length)
    except ValueError as error:
        raise ValueError(f"--context-length is {shape.context_length}: {error}") from error
    run = start(config, shape, text, device)
    checkpoint = config.out_dir / f"{config.attention}.pt"
    if config.fresh:
        checkpoint.unlink(missing_ok=True)  # or a run that is killed before its first would go on from it
    if checkpoint.exists():
        run.restore(load_checkpoint(checkpoint, device))
        say(console, f"{checkpoint} holds {run.step} of {shape.steps} steps; --fresh starts over.")
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

    def require_finite(name: str, step: int, value: float) -> None:
        if not math.isfinite(value):
            raise ValueError(
                f"the {name} of step {step} is {value}: training diverged at --learning-rate "
                f"{config.learning_rate:g}; try a lower one, with --fresh"
            )

    begun, last = run.step, shape.steps
    if config.stop_after is not None:
        last = min(shape.steps, run.step + config.stop_after)
    with (
        saved_on_interrupt(checkpoint, run) as stop_if_pressed,
        Progress(console=console, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task(run.settings["attention"], total=shape.steps, completed=run.step)
        while True:
            stop_if_pressed()
            looks = run.step > 0 and (run.step % config.validate_every == 0 or run.step == shape.steps)
            if looks and run.losses[-1]["validation_loss"] is None:
                require_finite("validation loss", run.step, validation := validation_loss())
                run.losses[-1]["validation_loss"] = validation
                line = f"step {run.step}: loss {run.losses[-1]['loss']:.4f}, validation {validation:.4f}"
                progress.console.print(line, highlight=False)
            if run.step > begun and (run.step % config.checkpoint_every == 0 or run.step == last):
                save_checkpoint(checkpoint, run.state())
            if run.step >= last:
                return run
            rate = get_cosine_lr(
                run.step + 1, config.learning_rate, config.learning_rate / 10, max(1, shape.steps // 10), shape.steps
            )
            for group in run.optimizer.param_groups:
                group["lr"] = rate
            loss = loss_of(corpus.train, run.step, config.seed)
            require_finite("loss", run.step + 1, value := loss.item())
            run.is_whole = False
            loss.backward()
            norm = clip_gradient(run.model.parameters(), config.max_gradient_norm)
            require_finite("gradients' norm", run.step + 1, norm.item())
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=True)
            run.step += 1
            run.losses.append({"step": run.step, "loss": value, "validation_loss": None})
            run.is_whole = True
            progress.advance(task)


def write_losses(config: Config, run: Run, device: "torch.device") -> Path:
    """The run's losses with its settings and environment, one JSON object."""
    from cs336_systems.bench.record import Environment, replace_content

    path = config.out_dir / f"{config.attention}.json"
    environment = asdict(Environment.capture(device))
    written = {"settings": run.settings, **environment, "losses": run.losses}
    replace_content(path, json.dumps(written, allow_nan=False).encode())
    return path


def read_losses(path: Path) -> dict[str, Any] | None:
    """What `write_losses` wrote; None where the file holds something else."""
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        return run if run["losses"] and run["settings"]["attention"] and run["gpu"] else None
    except (ValueError, TypeError, KeyError):
        return None


def draw_losses(folder: Path) -> tuple[Path, list[str]]:
    """The loss of every attention against the step, and below it the differences from the first.

    Returns:
        The picture, and what was left out: runs that differ from the latest in more than the attention.

    Raises:
        ValueError: `folder` has no losses. Other JSON files are passed over.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    by_path = {path: run for path in found if (run := read_losses(path))}
    paths = list(by_path)
    if not paths:
        raise ValueError(f"{folder} holds no losses; train first")

    def setting(path: Path) -> dict[str, object]:
        return by_path[path]["settings"] | {"attention": None}

    runs = [by_path[path] for path in sorted(paths) if setting(path) == setting(paths[-1])]
    left_out = [path.stem for path in paths if setting(path) != setting(paths[-1])]
    runs.sort(key=lambda run: run["settings"]["attention"] != "naive")
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    first, others = runs[0], runs[1:]
    heights = (3, 1) if others else (1,)
    upper, *rest = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for index, (run, style) in enumerate(zip(runs, ("-", "--", ":", "-.") * len(runs), strict=False)):
        name, losses, color = run["settings"]["attention"], run["losses"], f"C{index}"
        steps = [entry["step"] for entry in losses]
        upper.plot(steps, [entry["loss"] for entry in losses], style, color=color, linewidth=1, label=name)
        if seen := [entry for entry in losses if entry["validation_loss"] is not None]:
            at, values = [entry["step"] for entry in seen], [entry["validation_loss"] for entry in seen]
            upper.plot(at, values, "ox^v"[index % 4], color=color, markersize=4, label=f"{name}, validation")
        for lower in rest if run is not first else ():
            pairs = zip(losses, first["losses"], strict=False)
            differences = [a["loss"] - b["loss"] for a, b in pairs]
            lower.plot(steps[: len(differences)], differences, style, color=color, linewidth=1)
    upper.set_ylabel("loss, nats a byte")
    upper.legend()
    for lower in rest:
        lower.set_ylabel(f"difference from\n{first['settings']['attention']}")
        lower.grid(alpha=0.3)
    (rest or [upper])[-1].set_xlabel("step")
    upper.set_title(f"{first['settings']['amp'] or 'float32'}, seed {first['settings']['seed']}, {first['gpu']}")
    path = folder / "loss.png"
    figure.savefig(path, dpi=150)
    return path, left_out


def sample(config: Config, shape: Shape, run: Run, device: "torch.device") -> str:
    """What the trained model goes on to write: with naive attention, which takes any length without being compiled."""
    import torch

    model = make_model(config, shape, "naive").to(device)
    model.load_state_dict(run.model.state_dict())
    prompt = torch.tensor([list(PROMPT.encode())], device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.amp == "bf16"):
        written = model.generate(prompt, 100, temperature=0.8, top_k=40)
    return bytes(written[0].tolist()).decode(errors="replace")


def main(config: Config) -> None:
    require_file("--out-dir", config.out_dir / "loss.png")
    import torch
    from rich.console import Console

    from cs336_basics.modules import head_dim
    from cs336_systems.attention import ATTENTION
    from cs336_systems.bench.report import say

    console = Console()
    if not config.plot:
        device = device_named(config.device)
        config = config.on(device)
        shape = Shape(
            context_length=config.context_length, batch=config.batch, steps=config.steps, **MODELS[device.type]
        )
        implementation = ATTENTION[str(config.attention)]
        dtype = torch.bfloat16 if config.amp else torch.float32
        if reason := implementation.unsupported_reason(device, dtype, head_dim(shape.d_model, shape.num_heads)):
            raise ValueError(f"--attention {config.attention} cannot run here: {reason}")
        run = train(config, shape, device, console)
        say(console, f"Losses are in {write_losses(config, run, device)}.")
        if run.step == shape.steps:
            say(console, f"{PROMPT!r} goes on: {sample(config, shape, run, device)!r}")
    path, left_out = draw_losses(config.out_dir)
    without = f", without {', '.join(left_out)}, trained with other settings" if left_out else ""
    say(console, f"The curves are in {path}{without}.")


if __name__ == "__main__":
    run_script(main, Config, __doc__)
