"""autotune.py: which tiles are tried, how each can end, what a second run does, the ranking, what --write writes."""

import io
import os
import pickle
import runpy
import sys
import time
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from cs336_systems import autotune, launch, tile_search
from cs336_systems.attention import ATTENTION
from cs336_systems.autotune import Config, main
from cs336_systems.bench import tuning
from cs336_systems.bench.accuracy import WrongResultError
from cs336_systems.bench.cli import parse
from cs336_systems.bench.measure import Passes, Timing
from cs336_systems.bench.record import Environment, read_rows
from cs336_systems.bench.report import Table
from cs336_systems.bench.sweep import DeviceLostError, Measured, SweepInterrupted
from cs336_systems.bench.tuning import (
    FINALISTS,
    ROUNDS,
    Resources,
    Search,
    Trial,
    TrialRow,
    print_rankings,
    ranked,
    ranking,
)
from cs336_systems.bench.workers import done_apart
from cs336_systems.bench.workload import AttentionShape
from cs336_systems.kernels import tiles
from cs336_systems.kernels.tiles import HOPPER, INTERPRETER, KERNELS, KIB, Gpu, Tile, shipped_tiles
from cs336_systems.tile_search import (
    CHECK_LENGTHS,
    TUNED,
    Tables,
    TileBench,
    candidates,
    compiled_ahead,
    rankings,
    row_name,
    tile_from_text,
    tile_text,
)
from cs336_systems.user_tiles import read_user_table

from .bench_examples import CPU, row
from .machine import DEVICE, INTERPRETED, needs_triton, run_without_gpu

SCRIPT = Path(__file__).resolve().parents[1] / "cs336_systems" / "autotune.py"
H200 = Gpu("NVIDIA H200", (9, 0), 227 * KIB)
GPUS = (H200, Gpu("RTX 4090", (8, 9), 99 * KIB), Gpu("Turing", (7, 5), 64 * KIB))
LEADERBOARD = AttentionShape(1, 16, 16384, 16384, 64, torch.bfloat16, True)
SMALL = AttentionShape(1, 1, 40, 40, 16, torch.float32, True)
QUIET = Console(file=io.StringIO())
ONCE = Passes(warmup=0, iterations=1)


class OutOfResources(Exception):
    """What Triton raises for a tile too large for the GPU, where Triton is not installed."""


TOO_LARGE = OutOfResources("out of resource: shared memory, Required: 270336, Hardware limit: 232448.")


# Candidates


@pytest.mark.parametrize("quick", [False, True], ids=["all", "quick"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_candidates_fit_and_begin_with_the_shipped_tile(gpu, dtype, quick):
    for d, kernel in product((16, 64, 128), KERNELS):
        shape = replace(LEADERBOARD, d=d, dtype=dtype)
        shipped = getattr(shipped_tiles(gpu, d, dtype), kernel.name)
        tried = candidates(kernel.name, shape, gpu, [shipped], quick)
        assert tried[0] == shipped
        assert len(set(map(tile_text, tried))) == len(tried), "two tiles have one name, and so one row"
        width = tiles.padded_head_dim(d)
        assert all(tiles.shared_memory_bound(kernel, t, width, dtype, gpu) <= gpu.shared_memory for t in tried)


def test_there_is_a_choice():
    for kernel in TUNED:
        shipped = getattr(HOPPER[2, 64], kernel)
        everything = candidates(kernel, LEADERBOARD, H200, [shipped])
        some = candidates(kernel, LEADERBOARD, H200, [shipped], quick=True)
        assert set(some) < set(everything)
        assert 8 <= len(some) <= 20 and 150 <= len(everything) <= 300
        for name, least in {
            "q_tile_size": 3, "k_tile_size": 3, "num_warps": 2, "num_stages": 3, "head_group": 2, "by_descriptor": 2,
            "max_registers": 3,
        }.items():  # fmt: skip
            assert len({getattr(tile, name) for tile in everything}) >= least, name


@pytest.mark.parametrize(
    ("gpu", "d", "fetched"), [(H200, 64, True), (H200, 20, False), (GPUS[1], 64, False)], ids=["yes", "odd rows", "old"]
)
def test_descriptors_are_tried_where_they_work(gpu, d, fetched):
    """Rows of 40 bytes are none that the copy engine reads: there a descriptor would be pointers under another name."""
    tried = candidates("forward", replace(LEADERBOARD, d=d), gpu)
    assert any(tile.by_descriptor for tile in tried) == fetched
    assert all(min(tile.q_tile_size, tile.k_tile_size) >= 64 for tile in tried if tile.by_descriptor)


def test_a_group_of_heads_is_no_larger_than_the_heads():
    one_head = candidates("forward", replace(LEADERBOARD, heads=1), H200)
    assert {tile.head_group for tile in one_head} == {4}
    unmasked = candidates("forward", replace(LEADERBOARD, causal=False), H200)
    assert {tile.head_group for tile in unmasked} == {4}, "the launch takes one head after another, whatever it says"


def test_tiles_in_words():
    for tile in candidates("dq", LEADERBOARD, H200, [HOPPER[2, 64].dq]):
        assert tile_from_text(tile_text(tile)) == tile
    tile = Tile(64, 128, 4, 3, head_group=8, by_descriptor=True, max_registers=168)
    assert tile_text(tile) == "64x128 4w 3s g8 desc r168"
    for text in (
        "",
        "64x64 4w 3s g8",
        "64x64 4w 3s g8 desc r",
        "64x64 4w 3s g8 desc r168 x",
        "64x64 4w 3s g0 ptr",
        "64x064 4w 3s g8 ptr",
    ):
        with pytest.raises(ValueError, match=r"is no tile; one looks like '64x128 4w"):
            tile_from_text(text)


# How a search goes, with trials that are no kernels


def trial(variant: str, nap: float = 0, error: Exception | None = None, wrong: bool = False, calls: list | None = None):
    def run() -> None:
        if calls is not None:
            calls.append(variant)
        time.sleep(nap)
        if error:
            raise error

    def check() -> None:
        if wrong:
            raise WrongResultError("o is off by 1.0e+00 where 1.0e-06 is allowed")

    return Trial("kernel", "forward", variant, 1e9, check, run, lambda: Resources(168, 2, 49152))


def search(*trials: Trial, **changes) -> Search:
    return Search(trials, SMALL, CPU, ONCE, **changes)


def test_a_row_for_each_trial_however_it_ends(tmp_path):
    rows = search(
        trial("too large", error=TOO_LARGE),
        trial("a", 0.002),
        trial("broken", error=RuntimeError("PassManager::run failed\nmore")),
        trial("wrong", wrong=True),
        trial("full", error=torch.OutOfMemoryError("CUDA out of memory.")),
        trial("b", 0.001),
    ).run(tmp_path / "rows.jsonl", False, QUIET)
    assert [(r.variant, r.status, r.message) for r in rows] == [
        ("too large", "unsupported", f"OutOfResources: {TOO_LARGE}"),
        ("a", "ok", None),
        ("broken", "error", "RuntimeError: PassManager::run failed"),
        ("wrong", "error", "WrongResultError: o is off by 1.0e+00 where 1.0e-06 is allowed"),
        ("full", "oom", "OutOfMemoryError: CUDA out of memory."),
        ("b", "ok", None),
    ]
    assert read_rows(tmp_path / "rows.jsonl", TrialRow) and {r.implementation for r in rows} == {"kernel"}
    assert [r.variant for r in ranked(rows)] == ["b", "a"]
    (b, _) = ranked(rows)
    assert b.median_ms and b.tflops == pytest.approx(1e9 / b.median_ms / 1e9)
    assert (b.registers, b.spills, b.shared_memory) == (168, 2, 49152)
    assert Resources.of(rows[0]) == Resources(None, None, None)


def test_a_wrong_one_is_not_timed(tmp_path):
    calls = []
    search(trial("wrong", wrong=True, calls=calls)).run(tmp_path / "rows.jsonl", False, QUIET)
    assert not calls


def test_started_again_it_goes_on(tmp_path):
    """Times and what cannot fit are kept; what failed is tried again, after what is new; --fresh forgets all."""
    calls = []
    first = (trial("a", calls=calls), trial("bad", error=RuntimeError("no"), calls=calls))
    first += (trial("large", error=TOO_LARGE, calls=calls),)
    search(*first).run(tmp_path / "rows.jsonl", False, QUIET)
    calls.clear()
    said = io.StringIO()
    again = (trial("bad", calls=calls), *first[::2], trial("new", calls=calls))
    rows = search(*again).run(tmp_path / "rows.jsonl", False, Console(file=said, width=200))
    assert list(dict.fromkeys(calls)) == ["new", "bad", "a"], "a is measured again only as a finalist"
    assert [r.status for r in rows] == ["ok", "ok", "unsupported", "ok"]
    assert "holds 2 of 4 rows; --fresh" in said.getvalue()

    calls.clear()
    search(*again).run(tmp_path / "rows.jsonl", False, QUIET)
    assert not calls, "all is on record, finalists too"
    search(*again[:1]).run(tmp_path / "rows.jsonl", True, QUIET)
    assert [r.variant for r in read_rows(tmp_path / "rows.jsonl", TrialRow)] == ["bad"]


def test_finalists_are_timed_in_turns(tmp_path, monkeypatch):
    """The fastest and the marked, not the rest; what counts is the median of the rounds."""
    monkeypatch.setattr(tuning, "FINALISTS", 2)
    times = {"a": iter([3.0, 10.0, 30.0, 20.0]), "b": iter([2.0, 5.0, 6.0, 7.0]), "c": iter([4.0])}
    times["shipped"] = iter([9.0, 1.0, 1.0, 4.0])
    timed = []

    def time_call(run, device, budget):
        name = run()
        timed.append(name)
        ms = next(times[name])
        return Timing(ms, ms - 0.5, ms + 0.5, 7)

    monkeypatch.setattr(tuning, "time_call", time_call)
    trials = [replace(trial(name), run=lambda name=name: name) for name in times]
    rows = search(*trials, marked={("kernel", "shipped"), ("another", "c")}).run(tmp_path / "r.jsonl", False, QUIET)
    assert timed == ["a", "b", "c", "shipped", *["a", "b", "shipped"] * ROUNDS]
    assert [(r.median_ms, r.iterations) for r in rows] == [(20, 21), (6, 21), (4, 7), (1, 21)]
    assert (rows[0].p20_ms, rows[0].p80_ms, rows[0].tflops) == (19.5, 20.5, 1e9 / 20 / 1e9)
    assert Resources.of(rows[0]) == Resources(168, 2, 49152)


@pytest.mark.parametrize("killed_after", [3, 4, 5])
def test_killed_before_the_rounds_were_over_it_makes_up_for_them(killed_after, tmp_path, monkeypatch):
    """Three trials are measured, and then their rows replaced one by one."""

    class Killed(BaseException):
        pass

    put, rows = tuning.RowFile.put, []

    def put_some(self, row):
        if len(rows) == killed_after:
            raise Killed
        rows.append(row)
        put(self, row)

    trials = [trial(name) for name in "abc"]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(tuning.RowFile, "put", put_some)
        search(*trials).run(tmp_path / "r.jsonl", False, QUIET)
    found = search(*trials).run(tmp_path / "r.jsonl", False, QUIET)
    assert [(r.rounds, r.iterations) for r in found] == [(ROUNDS, ROUNDS)] * 3
    timed = found[0]
    assert timed.median_ms and timed.p20_ms and timed.p80_ms and timed.p20_ms < timed.median_ms < timed.p80_ms


def test_a_finalist_that_fails_is_no_winner(tmp_path):
    runs = []

    def run() -> None:
        runs.append(1)
        if len(runs) == 3:
            raise RuntimeError("now it fails")

    failing, good = replace(trial("failing"), run=run), trial("good")
    rows = search(failing, good).run(tmp_path / "r.jsonl", False, QUIET)
    assert (rows[0].status, rows[0].message) == ("error", "RuntimeError: now it fails")
    assert [r.variant for r in ranked(rows)] == ["good"]


def test_a_lost_gpu_ends_the_search_with_the_row_recorded(tmp_path, monkeypatch):
    calls = []

    def release_memory(device):
        if "bad" in calls:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(tuning, "release_memory", release_memory)
    trials = (trial("good", calls=calls), trial("bad", calls=calls), trial("never", calls=calls))
    with pytest.raises(DeviceLostError, match=r"ends at kernel bad: the GPU failed for good: .* illegal memory access"):
        search(*trials).run(tmp_path / "rows.jsonl", False, QUIET)
    assert "never" not in calls
    assert [(r.variant, r.status, r.median_ms is None) for r in read_rows(tmp_path / "rows.jsonl", TrialRow)] == [
        ("good", "ok", False),
        ("bad", "error", True),
    ]


def test_ctrl_c_says_how_far_it_got(tmp_path):
    def interrupted() -> None:
        raise KeyboardInterrupt

    stop = replace(trial("stop"), run=interrupted)
    with pytest.raises(SweepInterrupted, match=r"interrupted; 1 of 2 rows are in .*start again to go on"):
        search(trial("a"), stop).run(tmp_path / "rows.jsonl", False, QUIET)


def test_what_fails_beforehand_is_a_row_and_is_not_run(tmp_path):
    calls, said = [], io.StringIO()
    trials = tuple(trial(name, calls=calls) for name in ("crashed", "fine", "unreached"))

    def prepare(todo):
        assert list(todo) == list(trials)
        yield trials[0], Measured("error", "the process died of it, exit code -11")
        yield trials[1], None

    rows = search(*trials, prepare=prepare).run(tmp_path / "r.jsonl", False, Console(file=said, width=200))
    assert [r.status for r in rows] == ["error", "ok", "ok"]
    assert rows[0].message == "the process died of it, exit code -11"
    assert set(calls) == {"fine", "unreached"}
    assert "1 could not be compiled beforehand" in said.getvalue()


# Processes


def fragile():
    """What does jobs in a process of its own: some jobs kill it, some take it forever."""

    def do(job: str) -> str | None:
        if job == "exit":
            os._exit(3)
        if job == "hang":
            time.sleep(60)
        return "it raised" if job == "raise" else None

    return do


def stillborn():
    raise RuntimeError("no GPU left for this one")


def test_jobs_outlive_the_processes_that_die_of_them():
    jobs = ["one", "exit", "two", "hang", "raise", "three", "four"]
    ended = dict(done_apart(jobs, fragile, "lost: {}".format, 2, 0.3, method="fork"))
    assert ended == {
        "one": None, "two": None, "three": None, "four": None, "raise": "it raised",
        "exit": "lost: the process died of it, exit code 3", "hang": "lost: not done after 0.3 s",
    }  # fmt: skip


def test_where_no_process_starts_nothing_is_blamed():
    assert list(done_apart(["one", "two"], stillborn, str, 2, 5, method="fork")) == []


# Tiles as trials


def bench_of(shape: AttentionShape = SMALL) -> TileBench:
    return TileBench(shape, DEVICE, ATTENTION["naive"].function)


@needs_triton
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kernel", TUNED)
def test_a_right_tile_passes_and_a_slightly_wrong_one_does_not(kernel, causal, monkeypatch):
    """Each output counts, and a NaN is wrong."""
    bench, tile = bench_of(replace(SMALL, causal=causal)), Tile(64, 64, 4, 1)
    bench.check(kernel, tile)
    right = TUNED[kernel].launch(bench.checked[0], tile)
    for index, name in enumerate(TUNED[kernel].outputs):
        for change in (lambda x: x * 1.0001, lambda x: x.index_fill(-1, torch.tensor([3], device=x.device), torch.nan)):
            changed = tuple(change(x) if i == index else x for i, x in enumerate(right))
            monkeypatch.setitem(TUNED, kernel, replace(TUNED[kernel], launch=lambda *_, changed=changed: changed))
            with pytest.raises(WrongResultError, match=f"^{name} is off by"):
                bench.check(kernel, tile)


@needs_triton
def test_a_kernel_that_raises_for_one_tile_is_one_row(tmp_path, monkeypatch):
    original, bad, shape = launch.launch_dq, Tile(32, 64, 4, 1), replace(SMALL, heads=2)

    def launch_dq(*arguments, **options):
        if options.get("tile") == bad:
            raise TOO_LARGE
        return original(*arguments, **options)

    monkeypatch.setattr(launch, "launch_dq", launch_dq)
    bench = bench_of(shape)
    trials = [bench.trial("dq", tile) for tile in (bad, Tile(64, 64, 4, 1))]
    rows = Search(trials, shape, DEVICE, ONCE).run(tmp_path / "rows.jsonl", False, QUIET)
    assert [(r.implementation, r.pass_, r.variant, r.status) for r in rows] == [
        ("flash_triton.dq", "backward", "32x64 4w 1s g4 ptr", "unsupported"),
        ("flash_triton.dq", "backward", "64x64 4w 1s g4 ptr", "ok"),
    ]
    assert INTERPRETED or rows[1].registers


@needs_triton
@pytest.mark.parametrize("n", [32, 40, 333])
def test_what_is_checked_is_compiled_as_what_is_timed(n):
    """Triton compiles anew where a length is a multiple of 16 and another is not."""
    operands, _, _ = bench_of(replace(SMALL, n_queries=n, n_keys=n)).checked
    assert [(x.shape[-2] - n) % 16 for x in (operands.q, operands.k)] == [0, 0]
    assert all(length % 32 for length in CHECK_LENGTHS), "no edge is ragged where a length is a multiple of the tile"


@needs_triton
def test_timed_operands_are_of_the_usual_size():
    """exp(S - L) has to come out as probabilities do, or the time is that of infinities or of zeros."""
    x = bench_of(replace(SMALL, n_queries=64, n_keys=64)).timed_operands
    S = (x.q @ x.k.mT * SMALL.d**-0.5).masked_fill(~torch.ones(64, 64, device=DEVICE).tril().bool(), -torch.inf)
    sums = torch.exp(S - x.L_base[..., None]).sum(-1)  # 1 for the true L; in float32 its base is e
    assert 0.7 < sums.median() < 1.4
    assert not x.delta.any()


@needs_triton
def test_registers_spills_and_shared_memory_are_read(monkeypatch):
    compiled = SimpleNamespace(n_regs=200, n_spills=4, metadata=SimpleNamespace(shared=65536))

    class Kernel:
        arg_names = launch.forward_kernels.flash_forward_kernel.arg_names

        def __getitem__(self, grid):
            return lambda *arguments, **options: compiled

    bench = bench_of()
    assert bench.timed_operands
    monkeypatch.setattr(launch.forward_kernels, "flash_forward_kernel", Kernel())
    monkeypatch.setattr(launch, "TRITON_IS_TESTED", False)  # nothing is prepared for later launches
    assert bench.resources("forward", INTERPRETER.forward) == Resources(200, 4, 65536)


@needs_triton
def test_tiles_on_record_are_candidates(tmp_path):
    """A quick run after a long one ranks, and could write, what the long one found."""
    shape, tables = replace(SMALL, dtype=torch.float32), Tables(H200, HOPPER[4, 16], HOPPER[4, 16])
    here = {name: getattr(Environment.capture(DEVICE), name) for name in ("gpu", "float32_precision")}
    here |= {"batch": 1, "heads": 1, "n_queries": 40, "n_keys": 40, "d": 16, "causal": True, "pass_": "backward"}
    found = tuned_row("16x16 2w 1s g1 ptr", 2.0, **here)
    others = [replace(found, variant="16x32 1w 1s g1 ptr", **change) for change in (
        {"d": 32}, {"gpu": "another"}, {"median_ms": None, "status": "error"}, {"implementation": row_name("forward")},
    )]  # fmt: skip
    trials = bench_of(shape).trials(tables, ("dq",), [found, *others], True)
    assert ("dq", Tile(16, 16, 2, 1, head_group=1)) in trials.values()
    assert ("dq", Tile(16, 32, 1, 1, head_group=1)) not in trials.values()
    assert next(iter(trials.values())) == ("dq", HOPPER[4, 16].dq)


@needs_triton
def test_tiles_are_tried_in_other_processes_first(monkeypatch):
    """They get what pickles, and no tensors; what is no power of two is refused there as by Triton's compiler."""

    def done_here(jobs, start, lost, n_processes, timeout_s):
        sent = pickle.dumps(start)
        assert len(sent) < 1000 and (n_processes, lost("killed")) == (3, Measured("error", "killed"))
        do = pickle.loads(sent)()
        yield from ((job, do(job)) for job in jobs)

    monkeypatch.setattr(tile_search, "done_apart", done_here)
    bench = bench_of(replace(SMALL, n_queries=16, n_keys=16))
    bench.launch("dq", Tile(16, 16, 1, 1))
    tried = [Tile(48, 16, 1, 1), Tile(16, 16, 1, 1), Tile(32, 16, 1, 1)]
    trials = {bench.trial("dq", tile): ("dq", tile) for tile in tried}
    wrong, right = compiled_ahead(bench, trials, 3, list(trials)[:2])
    assert (wrong[0].variant, right[0].variant) == ("48x16 1w 1s g4 ptr", "16x16 1w 1s g4 ptr")
    assert wrong[1] and wrong[1].status == "error" and "power of 2" in (wrong[1].message or "")
    assert right[1] is None

    original = launch.launch_dq

    def full(*arguments, **options):
        if "tile" in options:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(*arguments, **options)

    monkeypatch.setattr(launch, "launch_dq", full)
    (full_there,) = compiled_ahead(bench, trials, 3, list(trials)[:1])
    assert full_there[1] is None, "memory that many processes share says nothing about one of them alone"


# The ranking


def tuned_row(variant: str, ms: float | None, **changes) -> TrialRow:
    values: dict[str, Any] = asdict(row(implementation=row_name("dq"), variant=variant, iterations=10))
    values |= {"median_ms": ms, "p20_ms": ms, "p80_ms": ms, "tflops": 2.0 if ms else None}
    values |= {"registers": 100, "spills": 0, "shared_memory": 48 * KIB} if ms else {"status": "error"}
    return TrialRow(**values | changes)


def test_ranking_and_the_mark():
    rows = [tuned_row("slow", 3.0), tuned_row("broken", None, message="CompilationError: no"), tuned_row("fast", 2.0)]
    rows += [tuned_row("middle", 2.5)]
    table = ranking(rows, "title", {"middle": "shipped", "broken": "user's table"}, ["how"])
    assert table.lines == [
        ["1", "fast", "2.000", "+0.0 %", "2", "100", "0", "48.0", ""],
        ["2", "middle", "2.500", "+25.0 %", "2", "100", "0", "48.0", "shipped, +25.0 % over the best"],
        ["3", "slow", "3.000", "+50.0 %", "2", "100", "0", "48.0", ""],
        ["-", "broken", "error", "-", "-", "-", "-", "-", "user's table"],
    ]
    assert {"how", "broken, error: CompilationError: no"} <= set(table.notes)
    assert any("NVIDIA H200, driver 570.1" in note for note in table.notes)
    assert ranking(rows, "title", {"fast": "shipped"}, []).lines[0][-1] == "shipped, the best"
    unsteady = ranking([replace(rows[0], p80_ms=4.0)], "title", {}, [])
    assert unsteady.lines[0][2] == "~3.000" and any("~ marks" in note for note in unsteady.notes)

    short = ranking(rows, "title", {"slow": "shipped"}, [], shown=1)
    assert [line[1] for line in short.lines] == ["fast", "slow", "broken"], "the marked and the broken are always there"
    assert "1 more that are slower are left out here." in short.notes


def test_nothing_timed_is_a_table_too():
    table = ranking([tuned_row("broken", None, message="no")], "title", {"broken": "shipped"}, [])
    assert [line[-1] for line in table.lines] == ["shipped"]


def test_one_table_a_kernel_and_each_note_once():
    tables, rows = Tables(H200, HOPPER[2, 64], HOPPER[2, 64]), []
    for kernel in ("forward", "dq"):
        shipped = tile_text(getattr(HOPPER[2, 64], kernel))
        rows += [tuned_row(shipped, 2.0, implementation=row_name(kernel)), tuned_row(shipped, 1.0)]
    rows = rows[::2]
    made = rankings(rows, ("forward", "dq"), tables, LEADERBOARD, "", "how times are taken")
    assert [table.title.split(":")[0] for table in made] == ["Tiles of forward", "Tiles of dq"]
    assert all(
        "how times are taken" in table.to_markdown() and "shipped, the best" in table.to_markdown() for table in made
    )
    out = io.StringIO()
    print_rankings(made, Console(file=out, width=200))
    assert out.getvalue().count("how times are taken") == 1


# What --write writes


def test_winners_are_written_where_they_are_news(tmp_path):
    """The best of each kernel, but for what is in force already; a kernel without a time keeps its tile."""
    path, shipped, own = tmp_path / "tiles.json", HOPPER[2, 64], Tile(32, 64, 2, 4)
    tables = Tables(H200, shipped, replace(shipped, dk_dv=own))
    assert tables.marks("dk_dv") == {tile_text(shipped.dk_dv): "shipped", tile_text(own): "user's table"}
    assert tables.marks("dq") == {tile_text(shipped.dq): "shipped"}
    rows = [
        tuned_row(tile_text(shipped.forward), 1.0, implementation=row_name("forward")),
        tuned_row(tile_text(own), 2.0, implementation=row_name("forward")),
        tuned_row(tile_text(own), 2.0, implementation=row_name("dk_dv")),
        tuned_row(tile_text(shipped.dk_dv), 1.0, implementation=row_name("dk_dv")),
        tuned_row(tile_text(own), None, message="no"),
    ]
    said = tables.write(path, LEADERBOARD, ("forward", "dk_dv", "dq"), rows)
    assert said == [
        f"{path}, NVIDIA H200, 2/64:",
        f"  forward: {tile_text(shipped.forward)} stays",
        f"  dk_dv: {tile_text(own)} -> {tile_text(shipped.dk_dv)}",
        f"  dq: {tile_text(shipped.dq)} stays",
    ]
    assert read_user_table(path) == {"NVIDIA H200": {"2/64": {"dk_dv": shipped.dk_dv}}}


# The command


needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="this is about a machine without a GPU")
TINY = ("--seq-len", "16", "--heads", "1", "--d", "16", "--quick", "--kernels", "dq")


@needs_triton
def test_run_then_again(tmp_path, monkeypatch, capfd):
    """As a user without a GPU runs it. The tables are written before anything of them is printed."""
    jsonl, markdown = tmp_path / "rows.jsonl", tmp_path / "tables" / "rows.md"
    flags = [*TINY, "--out-jsonl", str(jsonl), "--out-md", str(markdown)]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    run_without_gpu(autotune, *flags)
    assert not INTERPRETED or os.environ["TRITON_INTERPRET"] == "1"
    assert "[2/2, 0 s left] flash_triton.dq 32x32" in capfd.readouterr().out
    assert [(r.implementation, r.variant, r.status, r.message) for r in read_rows(jsonl, TrialRow)] == [
        ("flash_triton.dq", "64x32 1w 1s g4 ptr", "ok", None),
        ("flash_triton.dq", "32x32 1w 1s g4 ptr", "ok", None),
    ]
    text = markdown.read_text(encoding="utf-8")
    assert "# Tiles of dq: 1 x 1 heads x 16 x 16, float32, causal (Triton's interpreter on a CPU, reduced run" in text
    for expected in ("shipped, ", "registers", "Each was first found right at some 336 queries", "commit"):
        assert expected in text
    if INTERPRETED:
        monkeypatch.setattr(TileBench, "launch", lambda *_: pytest.fail("measured again"))
        monkeypatch.setattr(Table, "print", lambda *_: pytest.fail("the console breaks"))
        markdown.unlink()
        with pytest.raises(pytest.fail.Exception, match="the console breaks"):
            main(parse(Config, flags))
        assert f"{jsonl} holds 2 of 2 rows" in capfd.readouterr().out.replace("\n", "")
        assert markdown.read_text(encoding="utf-8") == text


def exit_of(*flags: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """What the script leaves with: a text goes to stderr, with exit code 1."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return caught.value.code


@needs_interpreter
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--dtype", "bfloat16"],
            "error: --d 32 --dtype bfloat16 cannot run here: got torch.bfloat16 in Triton's interpreter",
        ),
        (
            ["--d", "300"],
            "error: --d 300 --dtype float32 cannot run here: flash_triton takes head dims up to 256, not 300",
        ),
        (["--write"], "error: --write needs a GPU"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_run_is_one_line(flags, said, tmp_path, monkeypatch):
    code = exit_of(*flags, "--out-jsonl", str(tmp_path / "rows.jsonl"), monkeypatch=monkeypatch)
    assert str(code).startswith(said) and "\n" not in str(code)
    assert not list(tmp_path.iterdir())


def test_without_triton(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "triton", None)
    code = exit_of("--out-jsonl", str(tmp_path / "rows.jsonl"), monkeypatch=monkeypatch)
    assert str(code).endswith("cannot run here: Triton is not installed")
    assert not list(tmp_path.iterdir())


@needs_interpreter
def test_rows_that_are_none_are_named(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("no row\n", encoding="utf-8")
    code = exit_of(*TINY, "--out-jsonl", str(tmp_path / "rows.jsonl"), monkeypatch=monkeypatch)
    assert "rows.jsonl, line 1 is not a benchmark row" in str(code)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--kernels"], "the number of --kernels is 0; allowed is at least 1"),
        (["--kernels", "delta"], "delta"),
        (["--jobs", "-1"], "--jobs is -1; allowed is at least 0"),
    ],
    ids=" ".join,
)
def test_bad_flags_name_what_came_and_what_is_allowed(flags, said, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(Config, flags)
    assert caught.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_defaults():
    config = parse(Config, [])
    assert (config.batch, config.causal, config.kernels, config.quick, config.write, config.fresh, config.jobs) == (
        (1, True, ("forward", "dk_dv", "dq"), False, False, False, None)
    )
    assert (str(config.out_jsonl), str(config.out_md)) == ("runs/autotune.jsonl", "runs/autotune.md")
    assert parse(Config, ["--no-causal", "--seq-len", "7", "--jobs", "0"]) == replace(
        config, causal=False, seq_len=7, jobs=0
    )
    assert FINALISTS >= 3
