"""Proof that what is timed as compiled is compiled: counted graphs, no fallback, no recompilation in the timed part."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass


class NotCompiledError(Exception):
    """A function that claims to be compiled ran, at least in part, as it was written."""


@dataclass
class CompileWatch:
    """What torch.compile did since `watched` began; for a function that is not compiled, it asks nothing."""

    compiled: bool
    graphs: int = 0
    note: str | None = None

    def warm(self) -> None:
        """Call after the first forward or backward that is to be timed; recompilations count from here.

        Raises:
            NotCompiledError: some of it was not compiled.
        """
        if not self.compiled:
            return
        from torch._dynamo.utils import counters

        self.graphs = counters["stats"]["unique_graphs"]
        frames = counters["frames"]
        if not self.graphs or frames["ok"] < frames["total"]:
            raise NotCompiledError(f"not compiled: {self.graphs} graphs, {frames['ok']} of {frames['total']} frames")
        if breaks := counters["graph_break"]:
            raise NotCompiledError(f"graph broken: {'; '.join(map(str, breaks))}")
        if counters["inductor"]["fuse_attention"]:
            self.note = "torch.compile recognised this attention and put PyTorch's SDPA in its place"

    def check_no_recompile(self) -> None:
        """Call after the timed part.

        Raises:
            NotCompiledError: something was compiled since `warm`.
        """
        if not self.compiled:
            return
        from torch._dynamo.utils import counters

        if more := counters["stats"]["unique_graphs"] - self.graphs:
            raise NotCompiledError(f"compiled {more} more graphs after the first pass")


@contextmanager
def watched(compiled: bool) -> Generator[CompileWatch]:
    """Start from an empty compiler, so that each row gets code for its own shape, and leave an empty one behind.

    Reaching the recompile limit raises instead of falling back to eager. Buffers are not donated: a donated buffer is
    overwritten by the first backward, and the benchmark repeats the backward on one graph. AOTAutograd's cache is off,
    for on a hit the passes that recognise attention do not run and leave no count (inductor's own cache stays on).
    """
    if not compiled:
        yield CompileWatch(compiled)
        return
    # Not at the top: torch._dynamo takes seconds, and cannot be imported by a user without an account.
    import torch._dynamo
    import torch._functorch.config
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    try:
        with (
            torch._dynamo.config.patch(fail_on_recompile_limit_hit=True),
            torch._functorch.config.patch(donated_buffer=False, enable_autograd_cache=False),
        ):
            yield CompileWatch(compiled)
    finally:
        torch.compiler.reset()
