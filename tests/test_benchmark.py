"""benchmark.py as a user runs it, its FLOPs and parameters, and what becomes of failures."""

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from rich.console import Console
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cs336_basics.model import BasicsTransformerLM
from cs336_basics.nn_utils import cross_entropy
from cs336_systems import benchmark
from cs336_systems.attention import ATTENTION
from cs336_systems.bench import ceiling
from cs336_systems.bench.ceiling import CEILING_METHOD
from cs336_systems.bench.cli import parse
from cs336_systems.bench.measure import Passes
from cs336_systems.bench.model import (
    FLOPS_OVER_FORWARD,
    MODEL_PASSES,
    SIZES,
    VOCABULARY,
    ModelRow,
    ModelSize,
    ModelWorkload,
    Recipe,
    model_pass,
)
from cs336_systems.bench.model_report import model_tables
from cs336_systems.bench.model_sweep import ModelSweep
from cs336_systems.bench.record import BusyError, read_rows
from cs336_systems.bench.report import time_cell
from cs336_systems.implementation import Implementation

from .bench_examples import CPU, example, plain_attention
from .machine import DEVICE, compile_missing_reason, needs_gpu, needs_triton, skip_if

TINY = ModelSize("small", d_model=16, d_ff=32, num_layers=2, num_heads=2)
WORKLOAD = ModelWorkload(TINY, context_length=8, batch=2, amp=False)


def recipe(**changes) -> Recipe:
    return replace(Recipe(benchmark.make_model, cross_entropy, benchmark.make_step), **changes)


def sweep(*implementations: Implementation, passes=MODEL_PASSES, workloads=(WORKLOAD,), **changes) -> ModelSweep:
    small = ModelSweep(
        implementations,
        workloads,
        passes,
        recipe(),
        plain_attention,
        CPU,
        Passes(0, 2),
        compiled=False,
        ceiling=2.0,
    )
    return replace(small, **changes)


@pytest.fixture
def console():
    return Console(file=open(os.devnull, "w"))


def test_small_without_a_gpu(tmp_path, capsys):
    """A single step of each pass, rows, a table, and nothing measured again."""
    flags = ["--model-size", "small", "--context-length", "16", "--batch", "1", "--attention", "naive"]
    flags += ["--out-jsonl", str(tmp_path / "b.jsonl"), "--out-md", str(tmp_path / "b.md"), "--write-md"]
    flags += ["--device", "cpu"]
    benchmark.main(parse(benchmark.Config, flags))
    assert "[3/3, 0 s left] small, context 16, float32, naive training_step" in capsys.readouterr().out
    benchmark.main(parse(benchmark.Config, flags))
    assert "holds 3 of 3 rows" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["pass"], row["status"], row["iterations"]) for row in rows] == [(p, "ok", 1) for p in MODEL_PASSES]
    assert {row["parameters"] for row in rows} == {128_625_408}
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(16_000 / row["median_ms"])
        assert row["peak_memory_mib"] is None and row["std_ms"] == 0
    text = (tmp_path / "b.md").read_text(encoding="utf-8")
    assert text.startswith("# Transformer on a CPU, single steps (no GPU): float32, batch 1")
    for note in ("Model FLOPs", "Parameters: small 128,625,408.", "commit", "AdamW"):
        assert note in text


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
def test_parameters(size):
    """The closed form is what the model has."""
    workload = ModelWorkload(size, 8, 1, amp=False)
    model = benchmark.make_model(workload, plain_attention, torch.device("meta"))
    assert isinstance(model, BasicsTransformerLM)
    assert size.parameters == model.num_parameters()


def test_flops_are_those_of_the_matmuls():
    """Counted by PyTorch while a model runs, whose dense attention multiplies all n² scores, not half of them.

    The weights of the norms are parameters too, but are multiplied entry by entry.
    """
    model = benchmark.make_model(WORKLOAD, plain_attention, CPU)
    token_ids, targets = WORKLOAD.token_ids(CPU)
    masked = 2 * WORKLOAD.batch * TINY.num_layers * TINY.d_model * WORKLOAD.context_length**2
    norms = 2 * WORKLOAD.tokens * (2 * TINY.num_layers + 1) * TINY.d_model
    with FlopCounterMode(display=False) as counted:
        logits = model(token_ids)
    assert counted.get_total_flops() == WORKLOAD.flops("forward") + masked - norms
    with FlopCounterMode(display=False) as counted:
        cross_entropy(logits, targets).backward()
    assert WORKLOAD.flops("forward_backward") == 3 * WORKLOAD.flops("forward") == WORKLOAD.flops("training_step")
    assert counted.get_total_flops() == 2 * (WORKLOAD.flops("forward") + masked - norms)
    assert set(FLOPS_OVER_FORWARD) == set(MODEL_PASSES)


@pytest.mark.parametrize("pass_", MODEL_PASSES)
def test_a_pass_does_what_it_says(pass_):
    """Parts are named in their order, only the training step changes the model, and no gradient is left."""
    model = benchmark.make_model(WORKLOAD, plain_attention, CPU)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    named = []

    def ranged(name):
        named.append(name)
        return nullcontext()

    run = model_pass(model, list(model.parameters()), recipe(), WORKLOAD, pass_, CPU, ranged)
    run()
    parts = {"forward": 1, "forward_backward": 3, "training_step": 4}[pass_]
    assert named == ["forward", "loss", "backward", "optimizer"][:parts]
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert any(changed) == (pass_ == "training_step")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_autocast_multiplies_in_bfloat16(tmp_path, console):
    """--amp: the attention sees bfloat16, the parameters stay float32, and the row says so."""
    seen = set()

    def attention(q, k, v, is_causal):
        seen.add(q.dtype)
        return plain_attention(q, k, v, is_causal)

    workload = replace(WORKLOAD, amp=True)
    made = []

    def make(*arguments):
        made.append(benchmark.make_model(*arguments))
        return made[-1]

    one = sweep(example(function=attention), workloads=[workload], recipe=recipe(make_model=make))
    rows = one.run(tmp_path / "a.jsonl", False, console)
    assert {row.dtype for row in rows} == {"bfloat16 autocast"} and {row.status for row in rows} == {"ok"}
    assert torch.bfloat16 in seen
    assert {parameter.dtype for parameter in made[0].parameters()} == {torch.float32}


def test_failures_become_rows_and_the_sweep_goes_on(tmp_path, console):
    """Out of memory while the model is made, in one pass only, a wrong attention, one that cannot run here."""

    class Hungry(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = benchmark.make_model(WORKLOAD, plain_attention, CPU)
            self.calls = 0

        def forward(self, token_ids):
            self.calls += 1
            if self.calls > 4:  # the first pass calls it four times: a first, one for the peak, two that are timed
                raise torch.OutOfMemoryError("CUDA out of memory")
            return self.inner(token_ids)

    def make(workload, attention, device):
        if workload.context_length > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Hungry()

    long = replace(WORKLOAD, context_length=16)
    one = sweep(
        example("plain"),
        example("wrong", lambda q, k, v, is_causal: 1.1 * plain_attention(q, k, v, is_causal)),
        example("absent", reason="not here"),
        workloads=[long, WORKLOAD],
        passes=("forward", "forward_backward"),
        recipe=recipe(make_model=make),
    )
    rows = one.run(tmp_path / "a.jsonl", False, console)
    assert [(row.context_length, row.implementation, row.status) for row in rows] == [
        (16, "plain", "oom"), (16, "plain", "oom"), (16, "wrong", "error"), (16, "wrong", "error"),
        (16, "absent", "unsupported"), (16, "absent", "unsupported"),
        (8, "plain", "ok"), (8, "plain", "oom"), (8, "wrong", "error"), (8, "wrong", "error"),
        (8, "absent", "unsupported"), (8, "absent", "unsupported"),
    ]  # fmt: skip
    assert "wrong at d 8" in str(rows[2].message) and rows[4].message == "not here"
    assert read_rows(tmp_path / "a.jsonl", ModelRow) == rows
    (table,) = model_tables(rows, "t", ["method"])
    assert [line[:4] for line in table.lines] == [
        ["small", "8", "forward", time_cell(rows[6])],
        ["small", "8", "forward_backward", "OOM"],
        ["small", "16", "forward", "OOM"],
        ["small", "16", "forward_backward", "OOM"],
    ]


def test_passes_that_do_not_fit_are_skipped(tmp_path, console, monkeypatch):
    """Without a GPU nothing would stop them but the system, which ends the whole sweep."""
    dense, flash = replace(example(), saved_scores=2), replace(example(), saved_scores=0)
    needed = {pass_: WORKLOAD.least_bytes(pass_, dense.saved_bytes_per_score(torch.float32)) for pass_ in MODEL_PASSES}
    assert needed["forward_backward"] - needed["forward"] == 4 * TINY.parameters
    assert needed["training_step"] - needed["forward_backward"] == 8 * TINY.parameters
    kept = TINY.num_layers * WORKLOAD.batch * TINY.num_heads * (2 * 4 * 8**2 - 4 * 8)  # P and S, or else L
    assert needed["forward"] - WORKLOAD.least_bytes("forward", flash.saved_bytes_per_score(torch.float32)) == kept

    def statuses(available: int | None) -> list[str]:
        monkeypatch.setattr("cs336_systems.bench.model_sweep.available_bytes", lambda: available)
        rows = sweep(dense).run(tmp_path / "a.jsonl", False, console)
        assert all("available are" in str(row.message) for row in rows if row.status == "skipped")
        return [row.status for row in rows]

    assert statuses(needed["forward"] - 1) == 3 * ["skipped"]
    assert statuses(needed["training_step"] - 1) == ["ok", "ok", "skipped"]
    assert statuses(needed["training_step"]) == statuses(None) == 3 * ["ok"]


def test_row_statistics(tmp_path, console, monkeypatch):
    """Mean, standard deviation and percentiles are of the same passes, and utilisation is a share of the ceiling."""
    monkeypatch.setattr(Passes, "times", lambda self, run, device: [1.0, 2.0, 3.0, 6.0])
    (row,) = sweep(example(), passes=("forward",)).run(tmp_path / "a.jsonl", False, console)
    assert (row.mean_ms, row.median_ms, row.iterations) == (3.0, 2.5, 4)
    assert row.std_ms == pytest.approx(3.5**0.5)
    assert row.tokens_per_second == pytest.approx(16 / 2.5e-3)
    assert row.tflops is not None and row.utilisation == pytest.approx(row.tflops / 2)
    assert row.tflops == pytest.approx(WORKLOAD.flops("forward") / 2.5e-3 / 1e12)


@pytest.mark.parametrize("attention", ["flash_pytorch", pytest.param("flash_triton", marks=needs_triton)])
def test_compiled_model_is_one_graph(attention, tmp_path, console):
    """The compiled row is known to be compiled: one graph for all passes, no break, nothing recompiled."""
    skip_if(compile_missing_reason())
    implementation = ATTENTION[attention]
    one = replace(sweep(implementation, device=DEVICE, passes=("forward", "training_step")), compiled=True)
    rows = one.run(tmp_path / "a.jsonl", False, console)
    assert [(row.status, row.message) for row in rows] == [("ok", implementation.remark)] * 2
    assert all(row.compiled for row in rows)


@needs_gpu
def test_peak_memory_and_snapshot(tmp_path):
    """On a GPU rows hold the peak, and the snapshot is a file that is not empty."""
    snapshot = tmp_path / "snapshot.pickle"
    flags = ["--context-length", "64", "--batch", "1", "--steps", "1", "--attention", "flash_triton", "--nvtx"]
    config = parse(benchmark.Config, [*flags, "--memory-snapshot", str(snapshot)])
    benchmark.main(replace(config, out_jsonl=tmp_path / "b.jsonl"))
    rows = read_rows(tmp_path / "b.jsonl", ModelRow)
    assert all(row.peak_memory_mib and row.peak_memory_mib > 500 for row in rows)
    assert snapshot.stat().st_size > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nvtx"], "--nvtx needs a GPU"),
        (["--memory-snapshot", "a.pickle"], "--memory-snapshot needs a GPU"),
        (["--sweep-contexts", "8", "0"], "--sweep-contexts has 0; allowed is at least 1"),
        (["--attention", "fast"], "sdpa_efficient"),
    ],
)
def test_bad_flags_are_named(flags, said, tmp_path, capsys):
    with pytest.raises((ValueError, SystemExit)) as caught:
        flags = [*flags, "--device", "cpu", "--out-jsonl", str(tmp_path / "b.jsonl")]
        benchmark.main(parse(benchmark.Config, flags))
    assert said in str(caught.value) + capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_tables_are_written_before_they_are_printed(tmp_path, monkeypatch):
    """So that a pipe that is closed early, as by head, costs none."""

    def closed(table, console):
        raise BrokenPipeError

    monkeypatch.setattr("cs336_systems.bench.report.Table.print", closed)
    monkeypatch.setitem(SIZES, "small", TINY)
    flags = ["--context-length", "8", "--batch", "1", "--device", "cpu", "--passes", "forward", "--write-md"]
    paths = ["--out-jsonl", str(tmp_path / "b.jsonl"), "--out-md", str(tmp_path / "b.md")]
    with pytest.raises(BrokenPipeError):
        benchmark.main(parse(benchmark.Config, [*flags, *paths]))
    assert "small" in (tmp_path / "b.md").read_text(encoding="utf-8")


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="needs a device to write to")
def test_a_device_is_no_file_for_rows(tmp_path):
    config = parse(benchmark.Config, ["--out-jsonl", "/dev/null", "--out-md", str(tmp_path / "b.md")])
    with pytest.raises(ValueError, match="--out-jsonl is /dev/null, a device; allowed is a file"):
        benchmark.main(config)
    config = parse(benchmark.Config, ["--memory-snapshot", str(tmp_path), "--out-jsonl", str(tmp_path / "b.jsonl")])
    with pytest.raises(ValueError, match=r"--memory-snapshot is .*, a folder; allowed is a file"):
        benchmark.main(config)


@pytest.mark.parametrize("flags", [["--nvtx"], ["--memory-snapshot", "a.pickle"]])
def test_what_is_looked_at_is_measured_anew(flags, tmp_path, monkeypatch):
    """Rows on record would be kept, so that there would be nothing to look at, and slower ones would be kept later."""
    rows = tmp_path / "b.jsonl"
    rows.touch()
    config = parse(benchmark.Config, [*flags, "--out-jsonl", str(rows)])
    monkeypatch.setattr(benchmark, "device_named", lambda name: torch.device("cuda"))
    with pytest.raises(ValueError, match=f"{flags[0]} measures anew what is on record; give --fresh, or a new"):
        benchmark.main(config)


def test_sweep_means_all_sizes():
    assert list(SIZES) == ["small", "medium", "large", "xl", "2.7b"] and VOCABULARY == 10_000
    assert [size.d_head for size in SIZES.values()] == [64, 64, 64, 64, 80]


def test_a_second_run_stops_before_the_ceiling(tmp_path, monkeypatch):
    """The large matmul, too, would spoil the times of the run that is under way."""
    monkeypatch.setattr(ceiling, "measure_ceiling", lambda *_: pytest.fail("measured beside another run"))
    with FileLock(tmp_path / ".measuring.lock"), pytest.raises(BusyError):  # as another process holds it
        benchmark.main(benchmark.Config(device="cpu", out_jsonl=tmp_path / "a.jsonl", out_md=tmp_path / "a.md"))


def test_a_share_of_the_ceiling_says_how_that_was_timed(tmp_path, console):
    rows = sweep(example(), passes=("forward",)).run(tmp_path / "a.jsonl", False, console)
    (table,) = model_tables(rows, "t", ["method"])
    assert CEILING_METHOD["cpu"] in table.notes
    (table,) = model_tables([replace(row, utilisation=None) for row in rows], "t", ["method"])
    assert CEILING_METHOD["cpu"] not in table.notes
