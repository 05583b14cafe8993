"""bench.sweep: each way in which a row can end, what a sweep that is started again measures, and real compilation."""

import io
import json
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from filelock import FileLock
from rich.console import Console
from torch._dynamo.utils import counters

from cs336_systems.attention import ATTENTION
from cs336_systems.bench import ceiling
from cs336_systems.bench import sweep as sweep_module
from cs336_systems.bench.measure import Duration, Passes, Timing, float32_precision
from cs336_systems.bench.record import BusyError, Row, RowFile, read_rows
from cs336_systems.bench.report import comparison
from cs336_systems.bench.sweep import DeviceLostError, Measured, Sweep, SweepInterrupted, classify, run_all
from cs336_systems.bench.workload import MIB
from cs336_systems.implementation import Implementation, first_line
from cs336_systems.kernels.tiles import KIB, Gpu

from .bench_examples import CPU, example, plain_attention, row, shape, sweep
from .machine import DEVICE, compile_missing_reason, mock_gpu, needs_gpu, needs_triton, skip_if

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 8.00 GiB."


class OutOfResources(Exception):
    """What Triton raises for a kernel too large for the GPU, where Triton is not installed."""


def said(row: Row) -> str:
    return row.message or ""


def _raising(error: BaseException):
    def attention(q, k, v, is_causal):
        if q.shape[-2] == 32:
            raise error
        return plain_attention(q, k, v, is_causal)

    return attention


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors this small gain nothing from threads, and on a busy machine threads wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError(OUT_OF_MEMORY), "oom"),
        (RuntimeError(OUT_OF_MEMORY), "oom"),
        (RuntimeError("CUDA error: out of memory"), "oom"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "oom"),
        (ValueError(OUT_OF_MEMORY), "error"),
        (RuntimeError("out of memory"), "error"),
        (MemoryError("CUDA out of memory"), "error"),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), "error"),
        (OutOfResources("out of resource: shared memory, Required: 270336, Hardware limit: 101376."), "unsupported"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{type(value).__name__}-{str(value)[:24]}",
)
def test_classification(tmp_path, error, status):
    """One class and three texts are out of memory, and nothing else; shared memory is another matter."""
    assert classify(error)[0] == status
    _, row, after = sweep(example(function=_raising(error)), shapes=(shape(16), shape(32), shape(64))).run(
        tmp_path / "metrics.jsonl"
    )
    assert (row.status, row.median_ms, row.tflops) == (status, None, None)
    assert row.message == f"{type(error).__name__}: {error}"
    assert ("shared memory" in said(row)) == (status == "unsupported")
    assert after.status == "ok"


def test_triton_says_out_of_resources_as_expected():
    errors = pytest.importorskip("triton.runtime.errors", reason="Triton is not installed")
    status, message = classify(errors.OutOfResources(270336, 101376, "shared memory"))
    assert (status, "shared memory" in message) == ("unsupported", True)
    assert classify(errors.OutOfResources(2048, 1024, "threads"))[0] == "error"


def test_a_compile_error_of_triton_says_what_is_wrong():
    """Whether the kernel's own line is wrong or one in a helper that it calls, as Triton nests errors."""
    errors = pytest.importorskip("triton.compiler.errors", reason="Triton is not installed")
    source, node, text = "def kernel():\n    arange(0, 48)", SimpleNamespace(lineno=2, col_offset=4), "no power of 2"
    own = errors.CompilationError(source, node, text)
    nested, helper = (errors.CompilationError(source, node, None) for _ in range(2))
    nested.__cause__, helper.__cause__ = helper, ValueError(text)
    for error in (own, nested):
        assert classify(error) == ("error", f"CompilationError: {text}")


def test_ok_row(tmp_path):
    big = shape(n=64, causal=False)
    row, backward = sweep(example(), shapes=(big,), passes=("forward", "backward")).run(tmp_path / "metrics.jsonl")
    assert row.status == backward.status == "ok"
    for one in (row, backward):
        assert one.p20_ms is not None and one.median_ms is not None and one.p80_ms is not None
        assert 0 < one.p20_ms <= one.median_ms <= one.p80_ms
        assert one.tflops == pytest.approx(big.flops(one.pass_) / (one.median_ms * 1e-3) / 1e12)
    assert row.predicted_memory_mib == big.bytes_before_backward(4) / MIB
    assert row.memory_mib == pytest.approx(row.predicted_memory_mib, rel=0.05)


def test_out_of_memory_in_the_backward_keeps_the_memory_before_it(tmp_path):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, o, n):
            ctx.n = n
            return o.clone()

        @staticmethod
        def backward(ctx, *grad_outputs):
            if ctx.n == 32:
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)
            return grad_outputs[0], None

    def attention(q, k, v, is_causal):
        return Fails.apply(plain_attention(q, k, v, is_causal), q.shape[-2])

    forward, backward = sweep(example(function=attention), shapes=(shape(32),), passes=("forward", "backward")).run(
        tmp_path / "metrics.jsonl"
    )
    assert (forward.status, backward.status, backward.median_ms) == ("ok", "oom", None)
    assert backward.memory_mib is not None and backward.memory_mib == forward.memory_mib


def test_wrong_implementation_gets_an_error_and_no_time(tmp_path):
    right, wrong = example(), example("wrong", lambda q, k, v, c: plain_attention(q, k, v, c) * 1.001)
    fine, row = sweep(right, wrong).run(tmp_path / "metrics.jsonl")
    assert (fine.status, row.status, row.median_ms, row.memory_mib) == ("ok", "error", None, None)
    assert "o is off by" in said(row)


def test_correctness_is_checked_once_per_kind_of_workload(tmp_path):
    lengths = []

    def attention(q, k, v, is_causal):
        lengths.append(q.shape[-2])
        return plain_attention(q, k, v, is_causal)

    shapes = (shape(16), shape(32), shape(16, d=4), shape(16, causal=False))
    sweep(example(function=attention), shapes=shapes, passes=("forward", "backward")).run(tmp_path / "metrics.jsonl")
    assert lengths.count(208) == 3


def test_unsupported_and_skipped_rows_say_why(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "available_bytes", lambda: 100 * MIB)
    large, small = replace(shape(n=4096), batch=8), shape()
    rows = sweep(example(), example("gpu_only", reason="needs a GPU"), shapes=(large, small)).run(tmp_path / "m.jsonl")
    assert [row.status for row in rows] == ["skipped", "unsupported", "ok", "unsupported"]
    assert rows[0].message == f"needs {large.peak_bytes(4) / 2**30:.1f} GiB, available are 0.1 GiB"
    assert rows[0].predicted_memory_mib == large.bytes_before_backward(4) / MIB
    assert rows[1].message == "needs a GPU"

    monkeypatch.setattr(sweep_module, "available_bytes", lambda: 2**50)
    monkeypatch.setattr(Sweep, "_measure", lambda *_: {"forward": Measured("ok", timing=Timing(1, 1, 1, 1))})
    (again,) = sweep(example(), shapes=(large,)).run(tmp_path / "m.jsonl")
    assert again.status == "ok", "a skipped row is tried again: memory may be free by now, and it costs nothing"


def test_out_of_memory_says_who_held_it_and_a_table_says_it_once():
    """How much was free just then differs from row to row, and a table would have a note for each."""
    held = "GPU 0 has a total capacity of 139.81 GiB of which {} MiB is free. Process 17 has 100.00 GiB memory in use. "
    held += "Including non-PyTorch memory, this process has 39.00 GiB memory in use."
    rows = []
    for free in (5, 7):
        holder = held.format(free)
        error = torch.OutOfMemoryError(
            f"{OUT_OF_MEMORY} {holder} Of the allocated memory 38 GiB is allocated by PyTorch"
        )
        assert classify(error) == ("oom", f"OutOfMemoryError: {OUT_OF_MEMORY} {holder}")
        rows.append(row(d=free, status="oom", median_ms=None, message=classify(error)[1]))
    notes = comparison(rows, "t", ["naive"], "naive").notes
    assert [note for note in notes if "oom" in note] == [
        f"naive, oom: OutOfMemoryError: {OUT_OF_MEMORY} (d 5, length 256, pass forward, and 1 more)"
    ]


@pytest.mark.parametrize(("free_now", "measured"), [(40_000.0, []), (40_100.0, []), (140_000.0, [16, 32]), (None, [])])
def test_out_of_memory_is_measured_again_where_more_is_free(tmp_path, monkeypatch, free_now, measured):
    """Another process may have held the memory; what this process itself takes for its kernels does not count."""
    path, out = tmp_path / "metrics.jsonl", io.StringIO()
    free = [40_000.0]
    monkeypatch.setattr(sweep_module, "free_memory_mib", lambda device: free[0])
    full = torch.OutOfMemoryError(OUT_OF_MEMORY)
    assert _resume(path, {16: full, 32: full}) == ([8, 16, 32, 64], ["ok", "oom", "oom", "ok"])
    assert [each.free_mib for each in read_rows(path)] == [None, 40_000.0, 40_000.0, None]
    free[0] = free_now
    assert _resume(path, console=Console(file=out, width=400))[0] == measured
    kept = (
        "Kept as out of memory, since no more memory is known to be free now: plain forward, batch 2, d 8, length 16, "
    )
    assert (kept in out.getvalue()) == (not measured)
    assert ("length 32, float32." in out.getvalue()) == (not measured)


def test_memory_that_was_taken_meanwhile_was_not_free(tmp_path, monkeypatch):
    """The least counts: another process may take the memory after the row's measurement has begun."""
    free = iter([9000.0, 9000.0, 100.0, 100.0, 9000.0])  # at the start, then before and after each row
    monkeypatch.setattr(sweep_module, "free_memory_mib", lambda device: next(free))
    failing = _raising(torch.OutOfMemoryError(OUT_OF_MEMORY))
    rows = sweep(example(function=failing), shapes=(shape(32), shape(32, d=4))).run(tmp_path / "metrics.jsonl")
    assert [each.free_mib for each in rows] == [100.0, 100.0]


def test_a_run_says_how_old_the_rows_are_that_it_keeps(tmp_path):
    path, out = tmp_path / "metrics.jsonl", io.StringIO()
    _resume(path)
    changes = ({"source": None}, {"source": "f" * 40, "torch": "2.0"}, {"triton": "2.0"}, {})
    file = RowFile(path)
    for one, change in zip(read_rows(path), changes, strict=True):
        file.put(replace(one, **change))
    _resume(path, console=Console(file=out, width=400))
    assert out.getvalue() == (
        f"{path} holds 4 of 4 rows, 2 of other code, 2 of another torch or triton; --fresh measures them again.\n"
    )


def test_a_second_run_in_a_folder_stops_before_it_measures(tmp_path):
    counting = _Counting({})
    lock = FileLock(tmp_path / ".measuring.lock")  # as another process holds it
    with lock, pytest.raises(BusyError, match="another run is measuring into"):
        sweep(example(function=counting)).run(tmp_path / "metrics.jsonl", fresh=True)
    assert not counting.measured and not (tmp_path / "metrics.jsonl").exists()


def _chained(explicit: bool) -> RuntimeError:
    """What compilers raise: an announcement, and the cause at the end of its chain."""
    try:
        try:
            raise PermissionError(13, "Permission denied", "/proc/nowhere")
        except PermissionError as cause:
            raise RuntimeError("the kernel cannot be compiled:\n\n  see above") from (cause if explicit else None)
    except RuntimeError as error:
        return error


def test_the_cause_of_an_error_is_said():
    nested = RuntimeError("outer")
    nested.__context__ = _chained(True)
    cause = "PermissionError: [Errno 13] Permission denied: '/proc/nowhere'"
    assert first_line(_chained(True)) == f"the kernel cannot be compiled: see above: {cause}"
    assert first_line(_chained(False)) == "the kernel cannot be compiled: see above", "`from None` hides what it hides"
    assert first_line(nested) == f"outer: {cause}"
    assert first_line(ValueError("\n\n what \n more")) == "what"
    assert first_line(ValueError()) == ""
    circle = ValueError("a")
    circle.__cause__, nested.__context__ = nested, circle
    assert first_line(circle) == "a: RuntimeError: outer"
    long = RuntimeError("x" * 1000)
    long.__cause__ = OSError("why")
    assert classify(long)[1].endswith("OSError: why")


def test_a_compiler_that_fails_says_why(tmp_path):
    """In the row and on the console: no C++ compiler, or a cache folder that cannot be written."""

    def backend(module, example_inputs):
        try:
            raise FileNotFoundError(2, "No such file or directory", "g++")
        except FileNotFoundError as error:
            raise RuntimeError("no working C++ compiler") from error

    out = io.StringIO()
    (found,) = sweep(_compiled(plain_attention, backend)).run(
        tmp_path / "m.jsonl", console=Console(file=out, width=400)
    )
    cause = "No such file or directory: 'g++'"
    assert found.status == "error" and "raised: RuntimeError: no working C++ compiler" in said(found)
    assert said(found).endswith(cause) and f"{cause})\n" in out.getvalue()


def test_remarks_and_settings_are_said(tmp_path):
    """What is timed in the interpreter says so in its row, and a line says what tells its sweep from others."""
    out = io.StringIO()
    odd = replace(example(), remark="in a simulator")
    one = replace(sweep(odd), variant="12 GiB")
    with float32_precision("high"):
        (found,) = one.run(tmp_path / "metrics.jsonl", console=Console(file=out))
    assert found.message == "in a simulator"
    assert "plain forward, batch 2, d 8, length 16, float32, precision high, 12 GiB: " in out.getvalue()


def test_nothing_is_skipped_where_available_memory_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "available_bytes", lambda: None)
    (row,) = sweep(example()).run(tmp_path / "metrics.jsonl")
    assert row.status == "ok"


@needs_triton
def test_a_dtype_that_the_device_lacks_is_unsupported(tmp_path, monkeypatch):
    """On Turing, as in the interpreter, the kernels refuse bfloat16: no error, which would be tried again for ever."""
    mock_gpu(monkeypatch, Gpu("Tesla T4", (7, 5), 64 * KIB))
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    three = sweep(ATTENTION["flash_triton"], shapes=tuple(shape(d=16, dtype=dtype) for dtype in dtypes))
    rows = replace(three, device=DEVICE).run(tmp_path / "metrics.jsonl")
    assert [row.status for row in rows] == ["unsupported", "ok", "ok"], [row.message for row in rows]
    assert "bfloat16" in said(rows[0])


class _Counting:
    """Counts the timed and untimed forwards of each length, and fails where `errors` says so."""

    def __init__(self, errors: dict[int, BaseException]) -> None:
        self.errors, self.measured = errors, []

    def __call__(self, q, k, v, is_causal):
        n = q.shape[-2]
        if n != 208 and n not in self.measured:
            self.measured.append(n)
        if n in self.errors:
            raise self.errors[n]
        return plain_attention(q, k, v, is_causal)


def _resume(path, errors=(), fresh=False, console=None):
    counting = _Counting(dict(errors))
    rows = sweep(example(function=counting), shapes=tuple(shape(n) for n in (8, 16, 32, 64))).run(path, fresh, console)
    return counting.measured, [row.status for row in rows]


def test_resume(tmp_path):
    """Finished rows are kept, error rows are tried again, --fresh starts over; one line per row throughout."""
    path = tmp_path / "metrics.jsonl"
    failures = {16: torch.OutOfMemoryError(OUT_OF_MEMORY), 32: RuntimeError("broken")}
    assert _resume(path, failures) == ([8, 16, 32, 64], ["ok", "oom", "error", "ok"])
    assert _resume(path) == ([32], ["ok", "oom", "ok", "ok"])
    before = path.read_bytes()
    assert _resume(path) == ([], ["ok", "oom", "ok", "ok"])
    assert path.read_bytes() == before
    assert _resume(path, fresh=True) == ([8, 16, 32, 64], ["ok"] * 4)
    assert len(path.read_text(encoding="utf-8").splitlines()) == len(read_rows(path)) == 4


def test_rows_of_fewer_passes_are_measured_again(tmp_path):
    """More than asked for is kept; what each row was measured with stands in it."""
    for asked, kept in ((3, 3), (2, 3), (5, 5)):
        one = replace(sweep(example()), budget=Passes(warmup=asked, iterations=asked))
        (row,) = one.run(tmp_path / "metrics.jsonl")
        assert (row.warmup, row.iterations) == (kept, kept)


def test_killed_and_started_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(KeyboardInterrupt):
        _resume(path, {32: KeyboardInterrupt()})
    assert [row.n_queries for row in read_rows(path)] == [8, 16]
    with path.open("ab") as file:
        file.write(b'{"implementation": "pl')
    assert _resume(path) == ([32, 64], ["ok"] * 4)
    assert [json.loads(line)["n_queries"] for line in path.read_text(encoding="utf-8").splitlines()] == [8, 16, 32, 64]


def test_another_gpu_or_precision_is_measured_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _resume(path)
    backends: Any = torch.backends  # whose settings no type checker sees
    with float32_precision("highest"):
        backends.mkldnn.matmul.fp32_precision = "tf32"  # torch.get_float32_matmul_precision() raises from here on
        assert _resume(path)[0] == [8, 16, 32, 64]
    assert [row.float32_precision for row in read_rows(path)] == ["highest"] * 4 + ["high"] * 4


def test_a_gpu_that_failed_for_good_ends_the_sweep(tmp_path, monkeypatch):
    """After an illegal access every later call raises too, so the next rows would be lies."""
    path, failed = tmp_path / "metrics.jsonl", []
    illegal = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might ...")

    def attention(q, k, v, is_causal):
        if q.shape[-2] == 32:
            failed.append(True)
            raise illegal
        return plain_attention(q, k, v, is_causal)

    def release(device):
        if failed:
            raise illegal
        return 0

    monkeypatch.setattr(sweep_module, "release_memory", release)
    three = sweep(example(function=attention), shapes=(shape(16), shape(32), shape(64)))
    with pytest.raises(DeviceLostError, match=r"ends at plain forward, batch 2, d 8, length 32.*illegal memory access"):
        three.run(path)
    ok, lost = read_rows(path)
    assert (ok.status, lost.status, lost.median_ms, lost.n_queries) == ("ok", "error", None, 32)
    assert "failed for good" in said(lost)

    failed.clear()
    monkeypatch.setattr(sweep_module, "release_memory", lambda device: 0)
    rows = replace(three, implementations=[example()]).run(path)
    assert [row.status for row in rows] == ["ok"] * 3


def test_memory_that_does_not_come_back_is_said(tmp_path, monkeypatch):
    held = iter([7 * MIB, 7 * MIB, 10 * MIB])
    monkeypatch.setattr(sweep_module, "release_memory", lambda device: next(held))
    clean, leaky = sweep(example(), shapes=(shape(16), shape(32))).run(tmp_path / "metrics.jsonl")
    assert clean.message is None
    assert (leaky.status, leaky.message) == ("ok", "3.0 MiB stayed allocated after it")


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_row_is_alive_after_it(tmp_path, monkeypatch, fails):
    """An exception holds its frames, and they hold the row's tensors."""
    tensors, alive = [], []

    def attention(q, k, v, is_causal):
        tensors.extend(map(weakref.ref, (q, k, v)))
        if fails and q.shape[-2] == 32:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return plain_attention(q, k, v, is_causal)

    def release(device):
        alive.append(sum(tensor() is not None for tensor in tensors))
        return 0

    monkeypatch.setattr(sweep_module, "release_memory", release)
    (row,) = sweep(example(function=attention), shapes=(shape(32),)).run(tmp_path / "metrics.jsonl")
    assert row.status == ("oom" if fails else "ok")
    assert tensors and alive == [0, 0]


def test_plain_lines_where_the_output_is_no_terminal(tmp_path):
    out = io.StringIO()
    console = Console(file=out, force_terminal=False)
    sweep(example(), example("gpu_only", reason="needs a [GPU]")).run(tmp_path / "metrics.jsonl", console=console)
    first, second = out.getvalue().splitlines()
    assert first.startswith("[1/2, ") and "s left] plain forward, batch 2, d 8, length 16, float32: " in first
    assert second.endswith("gpu_only forward, batch 2, d 8, length 16, float32: unsupported (needs a [GPU])")
    sweep(example()).run(tmp_path / "metrics.jsonl", console=console)
    assert "holds 1 of 1 rows" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_live_progress_on_a_terminal(tmp_path):
    out = io.StringIO()
    sweep(example()).run(tmp_path / "m.jsonl", console=Console(file=out, force_terminal=True, width=120))
    assert "1/1" in out.getvalue() and "0:00:0" in out.getvalue()


# --- compiled implementations: torch.compile with a backend that generates no code, so that a graph costs milliseconds


def _compiled(function, backend="eager") -> Implementation:
    return example("compiled", torch.compile(function, backend=backend), compiled=True)


def test_every_compiled_row_is_compiled(tmp_path):
    """More shapes than the recompile limit, in one process, each a graph of its own."""
    graphs = []

    def backend(module, example_inputs):
        graphs.append(tuple(example_inputs[0].shape))
        return module

    shapes = tuple(shape(n, d) for d in (4, 8) for n in range(8, 14))
    assert len(shapes) > torch._dynamo.config.recompile_limit
    rows = sweep(_compiled(plain_attention, backend), shapes=shapes).run(tmp_path / "metrics.jsonl")
    assert {row.status for row in rows} == {"ok"}
    assert {(2, 1, s.n_queries, s.d) for s in shapes} <= set(graphs), "a row reused a graph for dynamic shapes"


def _broken(q, k, v, is_causal):
    torch._dynamo.graph_break()
    return plain_attention(q, k, v, is_causal)


@pytest.mark.parametrize(
    ("implementation", "message"),
    [
        (example(compiled=True), "not compiled: 0 graphs"),
        (_compiled(_broken), "graph broken"),
        (example(function=torch.compiler.disable(plain_attention), compiled=True), "not compiled"),
    ],
    ids=["never", "break", "disabled"],
)
def test_what_is_not_compiled_gets_no_time(tmp_path, implementation, message):
    (row,) = sweep(implementation).run(tmp_path / "metrics.jsonl")
    assert (row.status, row.median_ms) == ("error", None)
    assert message in said(row)


@pytest.mark.parametrize(("changes", "message"), [(6, "2 more graphs after the first"), (10**6, "RecompileLimit")])
def test_recompilation_in_the_timed_part_gets_no_time(tmp_path, changes, message):
    state = {"calls": 0}

    @torch.compile(backend="eager")
    def inner(q, k, v, is_causal, label):
        return plain_attention(q, k, v, is_causal) + len(label) * 0

    def attention(q, k, v, is_causal):
        state["calls"] += 1
        return inner(q, k, v, is_causal, f"label {min(state['calls'], changes)}")

    long = replace(sweep(example("changing", attention, compiled=True)), budget=Passes(20, 5))
    (row,) = long.run(tmp_path / "metrics.jsonl")
    assert (row.status, row.median_ms) == ("error", None)
    assert message in said(row)


def test_what_the_first_backward_compiles_is_no_recompilation(tmp_path):
    double = torch.compile(lambda x: 2 * x, backend="eager")

    class Lazy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *grad_outputs):
            return double(grad_outputs[0]) / 2

    inner = torch.compile(plain_attention, backend="eager")
    lazy = example("lazy", lambda *arguments: Lazy.apply(inner(*arguments)), compiled=True)
    rows = sweep(lazy, passes=("forward", "backward")).run(tmp_path / "metrics.jsonl")
    assert [row.status for row in rows] == ["ok", "ok"], rows[1].message


def test_attention_that_inductor_replaced_is_said(tmp_path):
    def backend(module, example_inputs):
        counters["inductor"]["fuse_attention"] += 1  # what inductor's pattern for attention does when it matches
        return module

    (row,) = sweep(_compiled(plain_attention, backend)).run(tmp_path / "metrics.jsonl")
    assert row.status == "ok"
    assert "SDPA" in said(row)


def test_inductor_itself(tmp_path):
    """The real compiler, a backward repeated on one graph, and PyTorch's own pattern met by this attention."""
    skip_if(compile_missing_reason())
    inductor = _compiled(plain_attention, backend="inductor")
    workload = shape(causal=False)
    for path in (tmp_path / "cold.jsonl", tmp_path / "warm.jsonl"):  # the second time from the compiler's cache
        rows = sweep(inductor, shapes=(workload,), passes=("backward",)).run(path)
        assert [row.status for row in rows] == ["ok"], rows[0].message
        assert "SDPA" in said(rows[0])


@needs_gpu
def test_out_of_memory_on_the_gpu_and_the_row_after_it(tmp_path):
    """16 x 65536^2 float32 scores fit into no GPU; memory is back at the baseline before the next row."""
    small, huge = shape(256), replace(shape(65536), batch=16)
    gpu = replace(sweep(example(), shapes=(huge, small)), device=torch.device("cuda"))
    oom, ok = gpu.run(tmp_path / "metrics.jsonl")
    assert (oom.status, oom.median_ms, ok.status) == ("oom", None, "ok")
    assert "stayed allocated" not in said(oom)
    assert oom.free_mib is not None and "is free" in said(oom) and ok.free_mib is None


# --- the matmul for scale


def test_the_ceiling_has_a_method_of_its_own(tmp_path, monkeypatch):
    """Timed by the benchmark's own budget, by 33, 69 and 680 passes, one GPU had three ceilings."""
    budgets = []
    monkeypatch.setattr(ceiling, "time_call", lambda run, device, budget: budgets.append(budget) or Timing(9, 9, 9, 2))
    monkeypatch.setitem(ceiling.SIZES, "cpu", 8)
    one = ceiling.measure_ceiling(tmp_path / "rows.jsonl", torch.float32, CPU)
    assert budgets == [ceiling.BUDGETS["cpu"]] == [Passes(0, 2)]
    assert ceiling.measure_ceiling(tmp_path / "rows.jsonl", torch.float32, CPU) == one and len(budgets) == 1
    assert ceiling.ceiling_note(one).endswith("The matmul is timed twice after one pass of warm-up.")


def test_the_ceiling_of_a_gpu_is_timed_for_a_second(tmp_path, monkeypatch):
    """Before, the power cap is not reached. A row of an earlier version that was timed for less is measured again."""
    method = ceiling.BUDGETS["cuda"]
    assert isinstance(method, Duration) and min(method.warmup, method.rep) >= ceiling.LEAST_MS
    long, short = (row(implementation="matmul", median_ms=1.5, iterations=n, tflops=700.0) for n in (680, 33))
    assert [ceiling._is_long_enough(each, torch.device("cuda")) for each in (long, short)] == [True, False]
    assert not ceiling._is_long_enough(row(status="oom", median_ms=None), torch.device("cuda"))
    assert "timed for 1.5 s after 1.5 s of warm-up" in ceiling.ceiling_note(long)
    assert "It uses no tensor cores." in ceiling.ceiling_note(long)
    assert "tensor cores" not in ceiling.ceiling_note(replace(long, dtype="bfloat16"))


@needs_gpu
@pytest.mark.alone
def test_the_ceiling_stays(tmp_path):
    first, second = (ceiling.measure_ceiling(None, torch.bfloat16, DEVICE).tflops for _ in range(2))
    assert first and second and abs(first / second - 1) < 0.03


def _sweeps(second: Implementation) -> list[Sweep]:
    return [sweep(example()), replace(sweep(second), variant="again")]


def test_sweeps_under_one_count(tmp_path):
    said = io.StringIO()
    rows = run_all(_sweeps(example()), tmp_path / "rows.jsonl", console=Console(file=said, width=200))
    assert [(row.variant, row.status) for row in rows] == [(None, "ok"), ("again", "ok")]
    assert "[1/2, " in said.getvalue() and "[2/2, 0 s left]" in said.getvalue()


def test_sweeps_that_are_interrupted_count_all_rows(tmp_path):
    with pytest.raises(
        SweepInterrupted, match=r"interrupted; 1 of 2 rows are in .*start again without --fresh to go on"
    ):
        run_all(_sweeps(example("stop", _stopped)), tmp_path / "rows.jsonl")


def _stopped(*arguments):
    raise KeyboardInterrupt


def test_each_sweep_has_its_implementations_checked(tmp_path):
    """One of the same name, as for the course's harness, is another one all the same."""

    def wrong(q, k, v, is_causal):
        return plain_attention(q, k, v, is_causal) + 1

    rows = run_all(_sweeps(example(function=wrong)), tmp_path / "rows.jsonl")
    assert [row.status for row in rows] == ["ok", "error"]
