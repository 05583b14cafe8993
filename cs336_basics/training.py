"""Text, batches and checkpoints for training a small byte-level language model."""

import ast
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

VOCABULARY = 256  # bytes


def standard_library_text() -> str:
    """The documentation strings of the modules of Python's standard library, in the order of their paths.

    Real English about programming, some megabytes of it, that every machine has; another version of Python has another.
    """
    root = Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib"} & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue  # files that are made to be wrong
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
                text := ast.get_docstring(node)
            ):
                texts.append(text)
    return "\n\n".join(texts)


@dataclass(frozen=True)
class Corpus:
    """A text as bytes, the last part of which is kept for validation.

    Attributes:
        train, validation: (n,) bytes.
    """

    train: UInt8[Tensor, " n"]
    validation: UInt8[Tensor, " m"]

    @classmethod
    def of(cls, text: str, validation_share: float = 0.05) -> "Corpus":
        """Split a text.

        Raises:
            ValueError: a share that is not between 0 and 1.
        """
        if not 0 < validation_share < 1:
            raise ValueError(f"the validation share is {validation_share}; allowed is between 0 and 1")
        content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        split = round(len(content) * (1 - validation_share))
        return cls(content[:split], content[split:])

    def require_sequences(self, context_length: int) -> None:
        """Check that both parts hold a sequence, and the byte that follows it.

        Raises:
            ValueError: one of them does not.
        """
        if min(len(self.train), len(self.validation)) <= context_length:
            raise ValueError(
                f"a sequence takes {context_length + 1} bytes; there are {len(self.train)} to train on, and "
                f"{len(self.validation)} for validation"
            )


def batch_at(
    content: UInt8[Tensor, " n"], step: int, batch: int, context_length: int, seed: int, device: torch.device
) -> tuple[Int[Tensor, "batch context"], Int[Tensor, "batch context"]]:
    """The tokens of one step and the ones that follow each: pieces of `content` that begin at random.

    They depend on nothing but the arguments, so that a run that is resumed sees what it would have seen.

    Raises:
        ValueError: `content` is no longer than a sequence.
    """
    starts = len(content) - context_length
    if starts < 1:
        raise ValueError(f"the text has {len(content)} bytes; a sequence takes {context_length + 1}")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    first = torch.randint(starts, (batch,), generator=generator)
    pieces = content[first[:, None] + torch.arange(context_length + 1)].to(device, torch.int64)
    return pieces[:, :-1], pieces[:, 1:]


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` to `path` such that at any moment there is a whole checkpoint: the one before, or this one.

    What a process that was killed had written by then lies beside it as `{path.name}.new`, until the next one is saved.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    try:
        with beside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def load_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    """What `save_checkpoint` wrote: tensors and plain values, nothing that could run code.

    Raises:
        ValueError: the file is no checkpoint, or a broken one.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # of many kinds, by where the file is broken
        raise ValueError(f"{path} is no whole checkpoint ({type(error).__name__}); --fresh starts over") from error
    if not isinstance(state, dict) or "settings" not in state:
        raise ValueError(f"{path} is no checkpoint of this training; --fresh starts over")
    return state
