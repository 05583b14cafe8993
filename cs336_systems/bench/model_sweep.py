"""Models x attentions x passes, measured into a JSONL file that a later run continues."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from cs336_systems.bench.accuracy import require_correct
from cs336_systems.bench.compilation import CompileWatch, watched
from cs336_systems.bench.measure import Passes, Timing, available_bytes, peak_memory, times_of
from cs336_systems.bench.model import ModelPass, ModelRow, ModelWorkload, Recipe, model_pass
from cs336_systems.bench.record import Environment, RowFile, Status, now
from cs336_systems.bench.sweep import FINAL_STATUSES, classify, fill, gib, remarks
from cs336_systems.bench.workload import MIB, AttentionShape
from cs336_systems.implementation import AttentionFunction, Implementation


@dataclass(frozen=True)
class ModelCase:
    """One row to be measured."""

    implementation: Implementation
    workload: ModelWorkload
    pass_: ModelPass

    def __str__(self) -> str:
        w = self.workload
        return f"{w.size.name}, context {w.context_length}, {w.dtype_name}, {self.implementation.name} {self.pass_}"


@dataclass(frozen=True)
class ModelSweep:
    """What to measure.

    Attributes:
        reference: the plain attention that each implementation has to agree with first.
        compiled: whether the model goes through torch.compile, in one graph.
        ceiling: TFLOP/s of a large matmul in the workloads' dtype, to which utilisation relates, if there is one.
        ranged: makes the context that names a part of a pass for a profiler.
    """

    implementations: Sequence[Implementation]
    workloads: Sequence[ModelWorkload]
    passes: Sequence[ModelPass]
    recipe: Recipe
    reference: AttentionFunction
    device: torch.device
    budget: Passes
    compiled: bool
    ceiling: float | None
    ranged: Callable[[str], AbstractContextManager[object]] = lambda name: nullcontext()

    @property
    def cases(self) -> list[ModelCase]:
        """Implementations next to one another, so that clocks drift little between them."""
        return [ModelCase(i, w, p) for w in self.workloads for i in self.implementations for p in self.passes]

    def run(self, path: Path, fresh: bool, console: Console) -> list[ModelRow]:
        """Measure what `path` does not hold yet; arguments, result and errors are those of `bench.sweep.Sweep.run`."""
        environment = Environment.capture(self.device)
        keys = {case: self._row(case, environment, "skipped").key for case in self.cases}
        with RowFile.opened(path, fresh, ModelRow) as file:
            fill(
                file,
                keys,
                lambda row: row.status in FINAL_STATUSES and self.budget.is_met_by(row.iterations),
                lambda case: (case.implementation, case.workload),
                lambda cases: self._measure(cases, environment),
                self.device,
                environment,
                console,
            )
        return [file.rows[key] for key in keys.values()]

    def _row(
        self, case: ModelCase, environment: Environment, status: Status, message: str | None = None, **measured
    ) -> ModelRow:
        workload = case.workload
        return ModelRow(
            implementation=case.implementation.name,
            pass_=case.pass_,
            model_size=workload.size.name,
            parameters=workload.size.parameters,
            context_length=workload.context_length,
            batch=workload.batch,
            dtype=workload.dtype_name,
            compiled=self.compiled,
            **asdict(environment),
            status=status,
            message=message,
            time=now(),
            **measured,
        )

    def _measure(self, cases: Sequence[ModelCase], environment: Environment) -> list[ModelRow]:
        """The rows of one model's passes: a failure while one is timed is that pass's, any other all passes'."""
        implementation, workload = cases[0].implementation, cases[0].workload
        if reason := implementation.unsupported_reason(self.device, workload.dtype, workload.size.d_head):
            return [self._row(case, environment, "unsupported", reason) for case in cases]
        if self.device.type == "cpu" and (too_large := self._too_large(cases, environment)):
            left = [case for case in cases if case not in too_large]
            return [*too_large.values(), *(self._measure(left, environment) if left else ())]
        try:
            with implementation.context():
                shape = AttentionShape(1, workload.size.num_heads, 1, 1, workload.size.d_head, workload.dtype, True)
                with watched(implementation.compiled):
                    require_correct(implementation.function, self.reference, shape, self.device)
                model = self.recipe.make_model(workload, implementation.function, self.device)
                called = torch.compile(model, fullgraph=True) if self.compiled else model
                with watched(self.compiled or implementation.compiled) as watch:
                    return [self._time(case, called, list(model.parameters()), watch, environment) for case in cases]
        except Exception as error:
            # Only texts leave this block: the exception holds the frames, and they hold the model.
            status, message = classify(error)
            return [self._row(case, environment, status, message) for case in cases]

    def _too_large(self, cases: Sequence[ModelCase], environment: Environment) -> dict[ModelCase, ModelRow]:
        """The rows of the passes that need more memory than a CPU has left, where nothing raises in time."""
        available, rows = available_bytes(), {}
        for case in cases:
            saved = case.implementation.saved_bytes_per_score(case.workload.dtype)
            needed = case.workload.least_bytes(case.pass_, saved)
            if available is not None and needed > available:
                message = f"needs {gib(needed)} at least, available are {gib(available)}"
                rows[case] = self._row(case, environment, "skipped", message)
        return rows

    def _time(
        self,
        case: ModelCase,
        model: Callable[[Tensor], Tensor],
        parameters: list[nn.Parameter],
        watch: CompileWatch,
        environment: Environment,
    ) -> ModelRow:
        workload = case.workload
        try:
            run = model_pass(model, parameters, self.recipe, workload, case.pass_, self.device, self.ranged)
            run()
            watch.warm()
            with peak_memory(self.device) as peak:
                run()
            times = torch.tensor(times_of(run, self.device, self.budget), dtype=torch.float64)
            watch.check_no_recompile()
        except Exception as error:
            return self._row(case, environment, *classify(error))
        finally:
            for parameter in parameters:
                parameter.grad = None
        timing = Timing.of(times.tolist())
        tflops = workload.flops(case.pass_) / timing.median_ms / 1e9
        return self._row(
            case,
            environment,
            "ok",
            remarks(watch, case.implementation),
            mean_ms=times.mean().item(),
            std_ms=times.std(correction=0).item(),
            **asdict(timing),
            tokens_per_second=1e3 * workload.tokens / timing.median_ms,
            peak_memory_mib=None if peak.bytes is None else peak.bytes / MIB,
            tflops=tflops,
            utilisation=tflops / self.ceiling if self.ceiling else None,
            warmup=self.budget.warmup,
        )
