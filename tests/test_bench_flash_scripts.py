"""bench_flash_vs_pytorch, bench_flash_leaderboard and bench_flash_peers as users run them, and what they rest on."""

import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cs336_systems import (
    autotune,
    bench_flash_leaderboard,
    bench_flash_peers,
    bench_flash_vs_pytorch,
    benchmark,
    ladder,
    launch,
    peers,
)
from cs336_systems.attention import ATTENTION, PEERS
from cs336_systems.bench import accuracy
from cs336_systems.bench.ceiling import measure_ceiling
from cs336_systems.bench.cli import device_named, parse, require_outputs, run_script
from cs336_systems.bench.measure import COURSE, Duration, Passes, float32_precision, limit_memory, time_pass, times_of
from cs336_systems.bench.publish import method
from cs336_systems.bench.record import RowFile, read_rows
from cs336_systems.bench.report import comparisons, is_steady, ladders, spread
from cs336_systems.bench.sweep import Sweep
from cs336_systems.bench.workload import PASSES, AttentionShape, powers_of_two

from .bench_examples import CPU, example, plain_attention, row, shape, sweep
from .machine import DEVICE, compile_missing_reason, needs_gpu, needs_triton, run_without_gpu, skip_if
from .reference import Case, assert_within_budget, run_attention

QUICK = ("--warmup", "0", "--rep", "1")


def test_flash_vs_pytorch_without_a_gpu(tmp_path, monkeypatch, capfd):
    """The reduced grid; what cannot run there says why; every dtype has its ceiling; another run measures nothing."""
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    jsonl, markdown = tmp_path / "bench.jsonl", tmp_path / "tables" / "bench.md"
    flags = ("--seq-max", "256", "--d-max", "16", "--batch-sizes", "1", "2", "--peers")
    flags += ("--out-jsonl", str(jsonl), "--out-md", str(markdown))
    flags += ("--device", "cpu", *QUICK)
    bench_flash_vs_pytorch.main(parse(bench_flash_vs_pytorch.Config, flags))
    capfd.readouterr()
    rows = read_rows(jsonl)
    measured = {(r.implementation, r.dtype, r.status) for r in rows}
    assert {
        ("naive", "float32", "ok"),
        ("flash_pytorch", "bfloat16", "ok"),
        ("flex", "float32", "unsupported"),
    } <= measured
    assert ("flash_triton", "float32", "unsupported") in measured
    assert {(r.n_queries, r.d, r.batch) for r in rows if r.implementation == "naive"} == {
        (n, 16, batch) for n in (128, 256) for batch in (1, 2)
    }
    assert {(r.dtype, r.tflops is not None) for r in rows if r.implementation == "matmul"} == {
        ("bfloat16", True),
        ("float32", True),
    }
    text = markdown.read_text(encoding="utf-8")
    assert text.startswith("# FlashAttention-2 and PyTorch on a CPU, reduced grid (no GPU): bfloat16, causal, batch 1")
    assert text.count("\n# ") == 3  # two dtypes, two batches
    assert "flash_pytorch speed-up" in text and "TRITON_INTERPRET=1" in text and "For scale: torch.matmul" in text
    assert "MiB" not in text.split("\n- ")[0]

    bench_flash_vs_pytorch.main(parse(bench_flash_vs_pytorch.Config, flags))
    measured_again = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[")]
    assert measured_again and "naive" not in "".join(measured_again)
    kept = [r for r in rows if r.status == "ok" and r.implementation != "matmul"]
    assert set(kept) <= set(read_rows(jsonl))


@needs_triton
def test_leaderboard_without_a_gpu(tmp_path, monkeypatch):
    """Every rung is timed by itself and by the course's harness, and the peers say why they cannot run."""
    skip_if(compile_missing_reason())
    monkeypatch.setattr(accuracy, "CHECK_LENGTH", 32)  # the interpreter takes seconds for the usual length
    jsonl, markdown = tmp_path / "lb.jsonl", tmp_path / "lb.md"
    flags = ("--seq-len", "16", "--heads", "1", "--d", "16", "--out-jsonl", str(jsonl), "--out-md", str(markdown))
    run_without_gpu(bench_flash_leaderboard, *QUICK, *flags)
    rows = [r for r in read_rows(jsonl) if r.implementation != "matmul"]
    rungs = ["naive", "compiled", "small_tiles", "tuned_tiles", "triton_backward", "skipped_tiles", "flash_triton"]
    failed = {(r.implementation, r.message) for r in rows if r.status == "error"}
    assert not failed
    assert [(r.implementation, r.pass_, r.variant) for r in rows if r.status == "ok"] == [
        (name, pass_, None) for name in rungs for pass_ in ("forward", "backward", "forward_backward")
    ] + [(name, "forward_backward", "course harness") for name in rungs]
    table = [line for line in markdown.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table[2:]] == rungs + [peer.name for peer in PEERS]
    assert "forward_backward course harness ms" in table[0]


@needs_triton
def test_peers_without_a_gpu(tmp_path, monkeypatch):
    """Each implementation once a round, and round after round."""
    monkeypatch.setattr(accuracy, "CHECK_LENGTH", 32)  # the interpreter takes seconds for the usual length
    jsonl, markdown = tmp_path / "peers.jsonl", tmp_path / "peers.md"
    flags = ("--rounds", "2", "--out-jsonl", str(jsonl), "--out-md", str(markdown))
    run_without_gpu(bench_flash_peers, *QUICK, *flags)
    timed = [(r.variant, r.implementation) for r in read_rows(jsonl) if r.status == "ok"]
    names = ("flash_pytorch", "flash_triton", "portable", "sdpa")
    a_round = [name for name in names for _ in range(2)]
    assert timed == [(f"round {n}", name) for n in (1, 2) for name in a_round * 2]
    table = markdown.read_text(encoding="utf-8")
    assert "the median of at most 2 rounds" in table and "flash_triton / sdpa" in table


def test_notes_fit_their_tables():
    """What a table does not show is not explained under it."""
    naive, shown = ATTENTION["naive"], ("naive ms", "naive TFLOP/s", "naive MiB before backward", "naive predicted MiB")
    whole = method([naive], [row(pass_="backward")], shown, Passes(), CPU)
    bare = method([naive], [row(pass_="forward")], shown[:1], Passes(), CPU)
    assert whole[:2] == bare and len(whole) == 6


def test_only_float32_has_a_precision(tmp_path):
    """Rows of bfloat16 are the same whatever is asked for float32, and are measured once."""
    flags = ("--implementations", "naive", "--seq-max", "128", "--d-max", "16", "--float32-precision", "high")
    paths = ("--out-jsonl", str(tmp_path / "a.jsonl"), "--out-md", str(tmp_path / "a.md"), "--device", "cpu")
    bench_flash_vs_pytorch.main(parse(bench_flash_vs_pytorch.Config, [*QUICK, *flags, *paths]))
    assert {(r.dtype, r.float32_precision) for r in read_rows(tmp_path / "a.jsonl")} == {
        ("bfloat16", "highest"), ("float32", "high"),
    }  # fmt: skip


def test_out_of_memory_is_one_line(monkeypatch):
    def full(config):
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    monkeypatch.setattr(sys, "argv", ["script"])
    with pytest.raises(SystemExit, match=r"^error: CUDA out of memory\.$"):
        run_script(full, bench_flash_peers.Config, None)


VERSUS, LEADERBOARD = bench_flash_vs_pytorch, bench_flash_leaderboard


@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        (VERSUS, ("--d-min", "64"), "--d-min is 64; allowed is at most --d-max, 32"),
        (VERSUS, ("--device", "cuda:99"), "this machine has"),
        (VERSUS, ("--device", "cpu", "--memory-limit-gib", "12"), "--memory-limit-gib needs a GPU, got cpu"),
    ],
    ids=str,
)
def test_bad_flags_are_named_before_anything_is_measured(script, flags, said, tmp_path, monkeypatch):
    """Those that depend on the machine; `test_cli` has the others."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = parse(script.Config, [*flags, "--out-jsonl", str(tmp_path / "a.jsonl")])
    with pytest.raises(ValueError, match=said):
        script.main(config)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--implementations", "flash3"], "'flash3'"),
        (["--dtypes"], "number of --dtypes is 0"),
        (["--dtypes", "int8"], "int8"),
        (["--device", "tpu"], "--device is 'tpu'; allowed are cpu, cuda"),
        (["--seq-min", "512", "--seq-max", "128"], "--seq-min is 512; allowed is at most --seq-max, 128"),
    ],
)
def test_bad_names_come_with_what_is_allowed(flags, said, capsys):
    with pytest.raises(SystemExit):
        parse(bench_flash_vs_pytorch.Config, flags)
    assert said in " ".join(capsys.readouterr().err.split())


def test_defaults_are_the_course_grid():
    config = parse(bench_flash_vs_pytorch.Config, [])
    assert (config.batch_sizes, config.dtypes, config.causal) == ((1,), ("bfloat16", "float32"), True)
    grid = config.on(torch.device("cuda"))
    assert (config.seq_min, grid.seq_max, config.d_min, grid.d_max) == (128, 65536, 16, 128)
    assert grid.implementations == ("naive", "compiled", "flash_triton")
    board = parse(bench_flash_leaderboard.Config, []).on(torch.device("cuda"))
    assert (board.heads, board.seq_len, board.d, board.dtype) == (16, 16384, 64, "bfloat16")


def test_rows_and_tables_go_to_two_files(tmp_path):
    """One file for both, or a folder, is refused before anything is measured: rows would be lost at the end."""
    rows = tmp_path / "rows.jsonl"
    require_outputs(rows, tmp_path / "rows.md")
    with pytest.raises(ValueError, match="the tables would overwrite the rows"):
        require_outputs(rows, tmp_path / "." / "rows.jsonl")
    with pytest.raises(ValueError, match=rf"--out-md is {re.escape(str(tmp_path))}, a folder; allowed is a file"):
        require_outputs(rows, tmp_path)
    other = tmp_path / "deep" / "other.jsonl"
    require_outputs(other, tmp_path / "rows.md")
    other.write_text(row().to_json(), encoding="utf-8")
    with pytest.raises(ValueError, match=r"--out-md is .*other\.jsonl, which holds rows of a benchmark"):
        require_outputs(rows, other)
    with pytest.raises(ValueError, match=r"--out-md is .*table\.md: (Not a directory|File exists)"):
        require_outputs(rows, other / "in a file" / "table.md")


@pytest.mark.parametrize("script", [VERSUS, LEADERBOARD, autotune, benchmark], ids=lambda script: script.__name__)
def test_no_script_lets_its_tables_overwrite_its_rows(script, tmp_path):
    both = str(tmp_path / "one")
    with pytest.raises(ValueError, match="the tables would overwrite the rows"):
        script.main(parse(script.Config, ["--out-jsonl", both, "--out-md", both]))


def test_times_are_taken_on_the_gpu_that_was_named(monkeypatch):
    """Events and the buffer that flushes the cache belong to the current GPU, which has to be the measured one."""
    current = []

    @contextmanager
    def made_current(device):
        current.append(str(device))
        yield
        current.append("left")

    def times(self, run, device):
        assert current == ["cuda:1"]
        return [1.0]

    monkeypatch.setattr(torch.cuda, "device", made_current)
    monkeypatch.setattr(Passes, "times", times)
    assert times_of(lambda: None, torch.device("cuda:1"), Passes()) == [1.0]
    assert current == ["cuda:1", "left"]


def test_a_single_pass_has_no_spread():
    """Its percentiles are one number, which would look like a perfect measurement."""
    single = row(iterations=1, p20_ms=2.0, p80_ms=2.0)
    several = row(d=16, iterations=9, p20_ms=1.8, p80_ms=2.2)
    assert spread([single]) == ""
    assert "20.0 % for the middle row" in spread([single, several])


def test_flex_lets_its_masks_go(monkeypatch):
    """They grow with the square of the length, and would be blamed on the rows that come after."""
    monkeypatch.setattr(peers, "create_block_mask", lambda *_, **__: object())
    with ATTENTION["flex"].context():
        peers._causal_blocks(128, 128, CPU)
        assert peers._causal_blocks.cache_info().currsize == 1
    assert peers._causal_blocks.cache_info().currsize == 0


def test_powers_of_two():
    assert powers_of_two("seq", 128, 1024) == (128, 256, 512, 1024)
    assert powers_of_two("seq", 96, 200) == (96, 192)
    assert powers_of_two("d", 16, 16) == (16,)


def test_device_named():
    assert device_named("cpu") == CPU
    for name in ("cpu:0", "cuda:x", "gpu", ":1"):
        with pytest.raises(ValueError, match=f"--device is '{name}'; allowed are cpu, cuda"):
            bench_flash_peers.Config(device=name)


@needs_triton
@pytest.mark.parametrize("rung", ladder.LADDER, ids=lambda rung: rung.name)
def test_every_rung_is_right(rung):
    """A step that is slow is not to be wrong as well."""
    skip_if(compile_missing_reason() if rung.name in ("compiled", "small_tiles", "tuned_tiles") else None)
    inputs = Case((1, 2), 70, 70, 16).draw(torch.float32, DEVICE)
    with rung.context():
        assert_within_budget(run_attention(rung.function, inputs, True), inputs, True)


@needs_triton
def test_rungs_differ_in_their_tiles():
    """The small ones are small, none before the last skips masked tiles, and afterwards all is as it was."""
    x = torch.empty(1, 16, 16, device=DEVICE)
    shipped = launch.tiles_for(x)
    by_name = {rung.name: rung for rung in ladder.LADDER}
    with by_name["small_tiles"].context():
        assert launch.tiles_for(x).forward == ladder.SMALL_TILE
    for name in ("tuned_tiles", "triton_backward"):
        with by_name[name].context():
            assert launch.tiles_for(x).dq == replace(shipped.dq, skip_masked=False)
    with by_name["flash_triton"].context():
        assert launch.tiles_for(x) == shipped


@needs_gpu
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
@pytest.mark.parametrize("is_causal", [False, True])
def test_peers_compute_the_same_attention(peer, is_causal):
    """Same scale, same mask."""
    skip_if(peer.unsupported_reason(DEVICE, torch.bfloat16, 64))
    inputs = Case((2, 3), 256, 256, 64).draw(torch.bfloat16, DEVICE)
    assert_within_budget(run_attention(peer.function, inputs, is_causal), inputs, is_causal)


def test_peers_that_cannot_run_say_why():
    """The backend's own words, not a time of another backend."""
    assert "bfloat16, float16, not float32" in str(ATTENTION["sdpa_cudnn"].unsupported_reason(CPU, torch.float32, 64))
    assert "backend" in str(ATTENTION["sdpa_efficient"].unsupported_reason(CPU, torch.float32, 64))
    assert "needs a GPU" in str(ATTENTION["flex"].unsupported_reason(CPU, torch.float32, 64))


def test_duration_measures_for_as_long_as_asked(monkeypatch):
    """On a CPU: passes until the times add up to the duration, and the row says how many."""
    times = iter([3.0, 5.0, 5.0, 4.0, 6.0])
    monkeypatch.setattr("cs336_systems.bench.measure._times_on_cpu", lambda run, device, iterations: [next(times)])
    assert Duration(warmup=3, rep=10).times(lambda: None, CPU) == [5.0, 5.0]
    assert list(times) == [4.0, 6.0]
    for wrong in ((-1, 5), (0, 0)):
        with pytest.raises(ValueError, match="allowed is at least"):
            Duration(*wrong)


def test_rows_of_a_duration(tmp_path):
    """They say how many passes were timed, and stay when the sweep runs again; the table gives the range."""
    timed = replace(sweep(example()), budget=Duration(0, 1))
    (first,) = timed.run(tmp_path / "rows.jsonl")
    assert first.iterations is not None and first.iterations >= 1 and first.warmup is None
    assert timed.run(tmp_path / "rows.jsonl") == [first]
    several = [row(warmup=None, iterations=7), row(d=16, warmup=None, iterations=90)]
    (table,) = comparisons(several, "t", ["naive"], "naive")
    assert "Times are the median of 7 to 90 timed passes, as many as filled a set time." in table.notes


def test_course_harness_sums_and_adds_up_gradients():
    """dO is the stride-0 gradient of a sum, and .grad grows from pass to pass, as in the course's own harness."""
    seen: list[tuple[Tensor, tuple[int, ...]]] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return plain_attention(q, k, v, True)

        @staticmethod
        def backward(ctx, *grad_outputs):
            seen.append((grad_outputs[0], grad_outputs[0].stride()))
            return grad_outputs[0], grad_outputs[0], grad_outputs[0]

    leaves = []

    def attention(q, k, v, is_causal):
        leaves.append(q._base if q._base is not None else q)
        return Watched.apply(q, k, v)

    time_pass(attention, shape(), "forward_backward", CPU, Passes(0, 2), harness=COURSE)
    assert len(seen) == 3 and all(set(strides) == {0} and (dO == 1).all() for dO, strides in seen)
    assert torch.equal(leaves[0].grad, torch.full_like(leaves[0], 3.0))


def test_variants_have_rows_and_tables_of_their_own(tmp_path):
    """A limited run neither replaces the unlimited one nor shares its table."""
    plain = sweep(example())
    limited = replace(plain, variant="12 GiB")
    path = tmp_path / "rows.jsonl"
    rows = plain.run(path) + limited.run(path)
    assert [r.variant for r in read_rows(path)] == [None, "12 GiB"]
    assert [table.title for table in comparisons(rows, "t", ["plain"], "plain")] == [
        "t: float32, causal, batch 2",
        "t: float32, causal, batch 2, 12 GiB",
    ]


def test_ladder_table():
    """One line per implementation, in the order of the rungs; plain passes first, the last of which counts."""
    rows = [
        row(implementation=name, pass_=pass_, variant=variant, median_ms=ms, status=status)
        for name, pass_, variant, ms, status in [
            ("fast", "forward", None, 1.0, "ok"),
            ("slow", "forward", None, 4.0, "ok"),
            ("slow", "forward_backward", "course harness", 12.0, "ok"),
            ("fast", "forward_backward", "course harness", 3.0, "ok"),
            ("huge", "forward", None, None, "oom"),
        ]
    ]
    (table,) = ladders(rows, "t", ["slow", "huge", "fast"], "slow")
    assert table.headers[1:4] == ["forward ms", "forward_backward course harness ms", "TFLOP/s"]
    assert [line[:3] for line in table.lines] == [
        ["slow", "4.000", "12.000"],
        ["huge", "OOM", "-"],
        ["fast", "1.000", "3.000"],
    ]
    assert [line[4] for line in table.lines] == ["1.00x", "-", "4.00x"]
    assert "are those of forward." in table.notes[0]


def test_ceiling(tmp_path, monkeypatch):
    """2·n³ operations over the time, one row per dtype and precision; a time on record stays, a failure is a row."""
    monkeypatch.setitem(measure_ceiling.__globals__["SIZES"], "cpu", 64)
    path = tmp_path / "rows.jsonl"
    with monkeypatch.context() as patch:
        patch.setitem(measure_ceiling.__globals__, "time_call", lambda *_: torch.empty(2**60))
        failed = measure_ceiling(path, torch.float32, CPU)
    assert failed.status == "error" and failed.tflops is None and str(failed.message).startswith("RuntimeError: ")
    found = []
    for precision in ("highest", "high", "high"):
        with float32_precision(precision):
            found.append(measure_ceiling(path, torch.float32, CPU))
    last = found[-1]
    assert last == found[1] and found[0].status == "ok"
    assert last.median_ms is not None and last.tflops == pytest.approx(2 * 64**3 / last.median_ms / 1e9)
    assert [r.float32_precision for r in RowFile(path).rows.values()] == ["highest", "high"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_context_lasts_over_forward_and_backward(tmp_path):
    """What an implementation needs around it is there in the check, in both passes, and gone afterwards."""
    inside: list[str] = []

    class Context:
        def __enter__(self):
            inside.append("in")

        def __exit__(self, *error):
            inside.append("out")

    def attention(q, k, v, is_causal):
        assert inside[-1] == "in"
        o = plain_attention(q, k, v, is_causal)
        o.register_hook(lambda gradient: inside.append(inside[-1]))
        return o

    around = replace(example(function=attention), context=Context)
    rows = Sweep([around], [shape()], ("forward", "backward"), plain_attention, CPU, Passes(0, 1)).run(
        tmp_path / "a.jsonl"
    )
    assert [r.status for r in rows] == ["ok", "ok"]
    assert set(inside[:-1]) == {"in"} and inside[-1] == "out"


@needs_gpu
@pytest.mark.alone
def test_measured_twice(tmp_path):
    """The same row, first and again after others, differs by less than 3 % where it takes more than 0.1 ms and the
    tables do not mark it as unsteady, as they do where the host is slower than the GPU; at length 8192 in any case.
    """
    shapes = [AttentionShape(1, 16, n, n, 64, torch.bfloat16, True) for n in (8192, 1024, 4096)]
    one = Sweep([ATTENTION["flash_triton"]], shapes, PASSES, ATTENTION["naive"].function, DEVICE, Duration(200, 500))
    first = one.run(tmp_path / "first.jsonl")
    for before, after in zip(first, one.run(tmp_path / "second.jsonl"), strict=True):
        assert before.median_ms is not None and after.median_ms is not None
        steady = is_steady(before) and is_steady(after)
        if before.n_queries == 8192 or (before.median_ms > 0.1 and steady):
            assert abs(after.median_ms / before.median_ms - 1) < 0.03, (before, after)


@needs_gpu
def test_memory_limit_is_kept():
    """Past the limit PyTorch's allocator gives up, as on a smaller card."""
    code = (
        "import torch; from cs336_systems.bench.measure import limit_memory\n"
        "limit_memory(torch.device('cuda'), 1)\n"
        "kept = torch.empty(2**29, dtype=torch.uint8, device='cuda')\n"
        "try: torch.empty(2**30, dtype=torch.uint8, device='cuda')\n"
        "except torch.OutOfMemoryError: print('limited')"
    )
    assert "limited" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout
    with pytest.raises(ValueError, match="allowed is more than 0"):
        limit_memory(DEVICE, 1e6)
