"""One workload of a whole Transformer: its sizes, parameters and FLOPs, the passes that are timed, and its row."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, get_args

import pydantic.dataclasses
import torch
from jaxtyping import Int
from torch import Tensor, nn

from cs336_systems.bench.record import Number, Record
from cs336_systems.bench.workload import AttentionShape, require_at_least
from cs336_systems.implementation import AttentionFunction

VOCABULARY = 10_000

ModelPass = Literal["forward", "forward_backward", "training_step"]
MODEL_PASSES: tuple[ModelPass, ...] = get_args(ModelPass)
FLOPS_OVER_FORWARD: dict[ModelPass, int] = {"forward": 1, "forward_backward": 3, "training_step": 3}
MODEL_FLOPS_METHOD = (
    "Model FLOPs: forward 2 a token for each parameter but those of the embedding, and 4·layers·d_model·n² a sequence "
    "for attention, halved by the causal mask; forward and backward, and the training step, three times that. "
    "Utilisation: the share of the matmul ceiling measured in the same run."
)
PASSES_METHOD = (
    "forward: with a graph, as in training. forward_backward: and the backward of the loss. training_step: and the "
    "optimizer's step. Each pass ends with gradients set to None."
)


@dataclass(frozen=True)
class Recipe:
    """What a model's passes are made of.

    Attributes:
        make_model: (workload, attention, device) -> a model, token ids (batch, n) -> logits (batch, n, vocabulary).
        loss: (logits, targets) -> a number.
        make_step: parameters -> what the training step does with their gradients.
    """

    make_model: Callable[["ModelWorkload", AttentionFunction, torch.device], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    make_step: Callable[[list[nn.Parameter]], Callable[[], object]]


@dataclass(frozen=True)
class ModelSize:
    """The size of a Transformer; see `cs336_basics.model.BasicsTransformerLM`."""

    name: str
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int

    @property
    def d_head(self) -> int:
        return self.d_model // self.num_heads

    @property
    def parameters(self) -> int:
        """Embedding and output matrix; in each layer attention's four, SwiGLU's three and two norms; a last norm."""
        layer = 4 * self.d_model**2 + 3 * self.d_model * self.d_ff + 2 * self.d_model
        return 2 * VOCABULARY * self.d_model + self.num_layers * layer + self.d_model


SIZES = {
    size.name: size
    for size in (
        ModelSize("small", 768, 3072, 12, 12),
        ModelSize("medium", 1024, 4096, 24, 16),
        ModelSize("large", 1280, 5120, 36, 20),
        ModelSize("xl", 1600, 6400, 48, 25),
        ModelSize("2.7b", 2560, 10240, 32, 32),
    )
}


@dataclass(frozen=True)
class ModelWorkload:
    """A batch of sequences through a model of one size.

    `amp` says that it runs under autocast to bfloat16; parameters and optimizer stay in float32.

    Raises:
        ValueError: a batch or a context length below 1.
    """

    size: ModelSize
    context_length: int
    batch: int
    amp: bool

    def __post_init__(self) -> None:
        require_at_least(1, "batch", self.batch)
        require_at_least(1, "context length", self.context_length)

    @property
    def dtype(self) -> torch.dtype:
        """In which matrices are multiplied."""
        return torch.bfloat16 if self.amp else torch.float32

    @property
    def dtype_name(self) -> str:
        return "bfloat16 autocast" if self.amp else "float32"

    @property
    def tokens(self) -> int:
        return self.batch * self.context_length

    def flops(self, pass_: ModelPass) -> float:
        """Floating-point operations of one pass, as MODEL_FLOPS_METHOD states."""
        size, n = self.size, self.context_length
        dense = 2 * self.tokens * (size.parameters - VOCABULARY * size.d_model)
        attention = 4 * self.batch * size.num_layers * size.d_model * n**2 / 2
        return FLOPS_OVER_FORWARD[pass_] * (dense + attention)

    def least_bytes(self, pass_: ModelPass, saved_bytes_per_score: int) -> int:
        """Bytes that a pass needs at least: parameters, their gradients and AdamW's two moments where it has them, the
        logits, and what attention keeps for the backward in each layer. What the other layers keep is not counted.

        Args:
            saved_bytes_per_score: of the attention, see `Implementation`.
        """
        tensors = {"forward": 1, "forward_backward": 2, "training_step": 4}[pass_]
        state = (tensors * self.size.parameters + self.tokens * VOCABULARY) * torch.float32.itemsize
        size, n = self.size, self.context_length
        shape = AttentionShape(self.batch, size.num_heads, n, n, size.d_head, self.dtype, True)
        return state + size.num_layers * shape.bytes_before_backward(saved_bytes_per_score)

    def token_ids(self, device: torch.device, seed: int = 0) -> tuple[Int[Tensor, "batch n"], Int[Tensor, "batch n"]]:
        """Random tokens and the targets that follow each; the same for the same seed and kind of device."""
        generator = torch.Generator(device).manual_seed(seed)
        drawn = torch.randint(
            VOCABULARY, (self.batch, self.context_length + 1), generator=generator, device=device, dtype=torch.int64
        )
        return drawn[:, :-1], drawn[:, 1:]


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True)
class ModelRow(Record):
    """One model, attention and pass, measured once; `implementation` is the attention."""

    KEY = (
        *("implementation", "pass_", "model_size", "context_length", "batch", "dtype", "compiled"),
        *("gpu", "float32_precision"),
    )
    MEASURED = Record.MEASURED | {"mean_ms", "std_ms", "tokens_per_second", "tflops", "utilisation"}

    pass_: ModelPass
    model_size: str
    parameters: int
    context_length: int
    batch: int
    dtype: str
    compiled: bool
    mean_ms: Number = None
    std_ms: Number = None
    tokens_per_second: Number = None
    peak_memory_mib: Number = None
    tflops: Number = None
    utilisation: Number = None


def model_pass(
    model: Callable[[Tensor], Tensor],
    parameters: list[nn.Parameter],
    recipe: Recipe,
    workload: ModelWorkload,
    pass_: ModelPass,
    device: torch.device,
    ranged: Callable[[str], AbstractContextManager[object]],
) -> Callable[[], object]:
    """What is timed: one pass of `model` over seeded tokens.

    Args:
        model: token ids (batch, n) -> logits (batch, n, vocabulary), compiled or not.
        parameters: those of the model.
        ranged: makes the context that names a part of the pass for a profiler.
    """
    token_ids, targets = workload.token_ids(device)
    step = recipe.make_step(parameters) if pass_ == "training_step" else None

    def run() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=workload.amp):
            with ranged("forward"):
                logits = model(token_ids)
            if pass_ == "forward":
                return
            with ranged("loss"):
                loss = recipe.loss(logits, targets)
        with ranged("backward"):
            loss.backward()
        if step is not None:
            with ranged("optimizer"):
                step()
        for parameter in parameters:
            parameter.grad = None

    return run
