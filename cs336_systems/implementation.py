"""What an attention implementation is to whoever chooses or measures one; `attention.py` has the table of them."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

LONGEST_FIRST_PART = 200  # characters of an error, before what its cause says

AttentionFunction = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""`attention(q, k, v, is_causal) -> o`: q and o are (..., n_queries, d), k and v are (..., n_keys, d)."""


AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def compiled_at_first_call(function: AnyFunction, **options: Any) -> AnyFunction:
    """`torch.compile(function, fullgraph=True, **options)`, made when it is first called.

    torch.compile imports its compiler and looks up the user's name, which takes seconds, and fails for a user without
    an account. A call in a function that is being compiled is compiled with that function.
    """

    @cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, **options)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return compiled()(*args, **kwargs)

    return call  # ty: ignore[invalid-explicit-return]


def first_line(error: BaseException) -> str:
    """What an error says, in one line, and after it what the last error of its chain says, where that is more.

    The chain is that of `raise … from` and of errors raised while another was handled. A CompilationError of Triton's
    begins with source text, once more for every helper that the kernel calls: it counts for what it says is wrong.
    """
    chain = [error]
    while (cause := _cause(chain[-1])) is not None and cause not in chain:
        chain.append(cause)
    said, why = _own_line(error), _own_line(chain[-1])
    if why in said:
        return said
    return f"{said[:LONGEST_FIRST_PART].removesuffix(':')}: {type(chain[-1]).__name__}: {why}" if said else why


def _cause(error: BaseException) -> BaseException | None:
    inner = getattr(error, "inner_exception", None)  # torch.compile's, raised `from None`
    if isinstance(inner, BaseException):
        return inner
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _own_line(error: BaseException) -> str:
    """The first line of an error's text, with the next one where it only announces it ("… raised:")."""
    text = getattr(error, "error_message", error)
    lines = [line.strip() for line in str(text or "").splitlines() if line.strip()]
    return " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])


def refuses_nothing(device: torch.device, dtype: torch.dtype, d: int) -> str | None:
    """A `refusal` that never comes."""
    return None


@dataclass(frozen=True)
class Implementation:
    """An attention function and what a caller has to know before choosing it.

    `refusal` says why a device cannot run it in a dtype and head dim that it takes elsewhere, or None.
    `compiled` says that `function` claims to be compiled by torch.compile; benchmarks verify it.
    `saved_scores` and `saved_float32_scores` are how many (n_queries, n_keys) matrices per head it keeps for its
    backward in the inputs' dtype and in float32, counted from its equations; the benchmarks predict memory from them
    and print the measured figure beside. `context` makes the context in which it is what it says, forward and backward.
    `remark` is what every time of it has to say, if anything.
    """

    name: str
    function: AttentionFunction
    description: str
    dtypes: Collection[torch.dtype]
    largest_d: int | None = None
    refusal: Callable[[torch.device, torch.dtype, int], str | None] = refuses_nothing
    compiled: bool = False
    saved_scores: int = 0
    saved_float32_scores: int = 0
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    remark: str | None = None

    def saved_bytes_per_score(self, dtype: torch.dtype) -> int:
        """Bytes kept for the backward of each score, for inputs of `dtype`."""
        float32_or_more = torch.promote_types(dtype, torch.float32)
        return self.saved_scores * dtype.itemsize + self.saved_float32_scores * float32_or_more.itemsize

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype, d: int) -> str | None:
        """Why this implementation cannot run there, or None where it can."""
        if dtype not in self.dtypes:
            allowed = ", ".join(sorted(str(each).removeprefix("torch.") for each in self.dtypes))
            return f"{self.name} takes {allowed}, not {str(dtype).removeprefix('torch.')}"
        if self.largest_d is not None and d > self.largest_d:
            return f"{self.name} takes head dims up to {self.largest_d}, not {d}"
        return self.refusal(device, dtype, d)
