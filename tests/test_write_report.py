"""The report: figures come out of rows, and nothing that is missing passes in silence."""

import json
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError

from cs336_systems.attention import ATTENTION, PEERS
from cs336_systems.bench import written
from cs336_systems.bench.ceiling import CEILING
from cs336_systems.bench.cli import parse
from cs336_systems.bench.measure import memory_before_backward
from cs336_systems.bench.model import MODEL_PASSES, SIZES, ModelRow, ModelWorkload
from cs336_systems.bench.record import Environment, Record, Row, RowFile, read_rows
from cs336_systems.bench.tuning import TrialRow
from cs336_systems.bench.workload import DTYPES, MIB, PASSES, AttentionShape
from cs336_systems.bench.written import Pair, Rows
from cs336_systems.bench_flash_leaderboard import COURSE_HARNESS
from cs336_systems.ladder import LADDER

from .bench_examples import CPU, row

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "write_report.py"
RUNS = SCRIPT.parents[1] / "runs" / "h200"
NO_TIME = {"median_ms": None, "p20_ms": None, "p80_ms": None}
OOM = NO_TIME | {"status": "oom", "tflops": None, "memory_mib": None}

NAMES = {"LADDER": LADDER}


def write(path: Path, rows: Iterable[Record]) -> None:
    rows = list(rows)
    file = RowFile(path, fresh=True, kind=type(rows[0]))
    for each in rows:
        file.rows[each.key] = each
    file.rewrite()


def render(folder: Path, template: str) -> str:
    write(
        folder / "rows.jsonl",
        (
            row(d=64, median_ms=2.0),
            row(d=64, implementation="fast", median_ms=0.5),
            row(d=128, **OOM),
            row(d=64, pass_="forward_backward", variant="course harness", median_ms=7.0),
        ),
    )
    (folder / written.TEMPLATE).write_text(template, encoding="utf-8")
    return written.render(folder, NAMES).removesuffix("\n")


def model_row(**changes: Any) -> ModelRow:
    common = {name: value for name, value in asdict(row()).items() if name in Record.__dataclass_fields__}
    values: dict[str, Any] = {
        "pass_": "training_step", "model_size": "small", "parameters": SIZES["small"].parameters,
        "context_length": 128, "batch": 4, "dtype": "float32", "compiled": False, "mean_ms": 2.1, "std_ms": 0.1,
        "tokens_per_second": 1e3, "peak_memory_mib": 2048.0, "tflops": 20.0, "utilisation": 0.5,
    }  # fmt: skip
    return ModelRow(**(common | values | changes))


def trial_row(**changes: Any) -> TrialRow:
    values: dict[str, Any] = {"implementation": "flash_triton.forward", "variant": "64x64 4w 2s g4 ptr"}
    values |= {"registers": 128, "spills": 0, "shared_memory": 64 * 1024}
    return TrialRow(**(asdict(row()) | values | changes))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ one('rows.jsonl', implementation='naive', d=64, pass_='forward') | ms }}", "2.000 ms"),
        ("{{ one('rows.jsonl', n=256, d=128).status }}", "oom"),
        ("{{ one('rows.jsonl', d=64, implementation='fast').memory_mib | mib }}", "10.0 MiB"),
        ("{{ 2048 | gib }}", "2.0 GiB"),
        (
            "{{ ratio(one('rows.jsonl', d=64, pass_='forward', implementation='naive'), "
            "one('rows.jsonl', implementation='fast')) | times }}",
            "4.00",
        ),
        ("{{ rows('rows.jsonl', d=64) | length }}", "3"),
        ("{{ one('rows.jsonl', d=128) | cell }}", "OOM"),
        ("{{ one('rows.jsonl', implementation='fast') | cell('memory_mib', '{:.1f}', 2) }}", "5.0"),
        (
            "{{ pairs('rows.jsonl', {'implementation': 'fast'}, implementation='naive', d=64, variant=none) "
            "| first | gain }}",
            "4.00x",
        ),
        ("{{ [3, 1, 2] | span }}, {{ [0.999, 1.001] | span }}", "1.00 to 3.00, 1.00"),
        ("{{ 0.123 | percent }}, {{ 1234.5 | whole }}, {{ 1.23456 | loss }}", "12.3 %, 1,234, 1.2346"),
        ("{{ file('rows.jsonl') }}", "rows.jsonl"),
    ],
)
def test_figures_are_those_of_the_rows(template, text, tmp_path):
    assert render(tmp_path, template) == text


def test_cells_mark_times_that_may_not_repeat():
    assert written.cell(row(p20_ms=1.99, p80_ms=2.01)) == "2.000"
    assert written.cell(row(p20_ms=1.5, p80_ms=2.5)) == "~2.000"
    assert written.cell(row(p20_ms=1.5, p80_ms=2.5), "memory_mib") == "10.000"


def test_tables_are_the_benchmarks_own(tmp_path):
    table = render(tmp_path, "{{ table('rows.jsonl', ['naive', 'fast'], 'naive', memory=False, variant=None) }}")
    assert [line.replace("~", "") for line in table.splitlines()[2:]] == [
        "| 64 | 256 | forward | 2.000 | 0.500 | 1.5 | 1.5 | 4.00x |",
        "| 128 | 256 | forward | OOM | - | - | - | - |",
    ]
    ladder = render(tmp_path, "{{ ladder('rows.jsonl', ['naive'], 'naive', d=64) }}")
    assert ladder.replace("~", "").splitlines()[2].startswith("| naive | 2.000 | 7.000 |")


def test_lines_of_a_table_are_in_order_of_size(tmp_path):
    sizes = ((128, 512, "forward"), (64, 1024, "backward"), (64, 1024, "forward"), (64, 256, "forward"))
    write(tmp_path / "r.jsonl", (row(d=d, n_queries=n, n_keys=n, pass_=pass_) for d, n, pass_ in sizes))
    lines = Rows(tmp_path).table("r.jsonl", ["naive"], "naive").splitlines()[2:]
    assert [" ".join(line.split(" | ")[:3])[2:] for line in lines] == [
        "64 256 forward", "64 1024 forward", "64 1024 backward", "128 512 forward",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "error", "said"),
    [
        ("{{ one('rows.jsonl', d=3) }}", ValueError, "no row with"),
        ("{{ one('rows.jsonl', d=64) }}", ValueError, "3 rows with"),
        ("{{ one('rows.jsonl', d=128) | ms }}", ValueError, "is oom"),
        ("{{ one('rows.jsonl', width=3) }}", AttributeError, "width"),
        ("{{ best }}", UndefinedError, "best"),
        ("{{ one('other.jsonl') }}", OSError, r"other\.jsonl"),
        ("{{ one('rows.jsonl', d=128).median_ms }}", ValueError, "not measured"),
        ("{{ one('rows.jsonl', d=128).memory_mib | mib }}", ValueError, "not measured"),
        ("{{ ratio(one('rows.jsonl', d=128), one('rows.jsonl', d=128), 'memory_mib') }}", ValueError, "no memory_mib"),
        ("{{ table('rows.jsonl', ['flash'], 'naive') }}", ValueError, "no row of flash"),
        ("{{ table('rows.jsonl', ['naive', 'fast'], 'naive', d=128) }}", ValueError, "no row of fast"),
        ("{{ table('rows.jsonl', [], 'naive') }}", ValueError, "names no implementation"),
        ("{{ ladder('rows.jsonl', ['naive', 'quick'], 'naive', d=64) }}", ValueError, "no row of quick"),
        ("{{ ladder('rows.jsonl', ['naive'], 'naive') }}", ValueError, "2 workloads"),
        ("{{ beside('rows.jsonl', one('rows.jsonl', d=128), d=3) }}", ValueError, "no row with"),
        ("{{ beside('rows.jsonl', one('rows.jsonl', d=128), width=3) }}", ValueError, "width"),
        ("{{ ratios(pairs('rows.jsonl', {'d': 128}, d=128)) }}", ValueError, "of no pair"),
        ("{{ file('other.png') }}", ValueError, r"other\.png is linked"),
    ],
)
def test_what_is_missing_is_an_error(template, error, said, tmp_path):
    with pytest.raises(error, match=said):
        render(tmp_path, template)


def test_rows_of_every_benchmark_are_read(tmp_path):
    for name, each in (("attention", row()), ("model", model_row()), ("tiles", trial_row())):
        write(tmp_path / f"{name}.jsonl", [each])
        assert Rows(tmp_path).rows(f"{name}.jsonl") == [each]


def test_rows_meet_what_they_are_compared_with(tmp_path):
    wanted = {(name, built): model_row(implementation=name, compiled=built) for name in "ab" for built in (False, True)}
    write(tmp_path / "m.jsonl", wanted.values())
    rows = Rows(tmp_path)
    assert rows.beside("m.jsonl", wanted["a", False], compiled=True) == wanted["a", True]
    pairs = rows.pairs("m.jsonl", {"implementation": "b"}, implementation="a")
    assert pairs == [(wanted["a", built], wanted["b", built]) for built in (False, True)]
    write(tmp_path / "l.jsonl", [row(implementation=name) for name in "cab"])
    assert [(a.implementation, b.implementation) for a, b in rows.steps("l.jsonl", "abc")] == [("a", "b"), ("b", "c")]


def at(n: int, first: float | None, second: float | None, **changes: Any) -> Any:
    """A pair of rows of length n with these times; None: out of memory."""
    both = [row(n_queries=n, n_keys=n, **({"median_ms": ms} if ms else OOM) | changes) for ms in (first, second)]
    return Pair(*both)


def test_pairs_that_were_not_timed_have_no_ratio():
    pairs = [at(512, 4.0, 1.0), at(256, 2.0, 1.0), at(1024, None, 1.0), at(2048, 1.0, None)]
    assert written.ratios(pairs) == [4.0, 2.0] and written.ratios(pairs, "memory_mib") == [1.0, 1.0]
    assert written.longest(pairs) is pairs[0]
    assert written.largest(reversed(pairs)) is pairs[0]
    assert written.FILTERS["gain"](pairs[2]) == "-"


@pytest.mark.parametrize(
    ("times", "n"),
    [
        (((128, 2, 1), (256, 2, 1)), 128),
        (((128, 1, 1), (256, 2, 1), (512, 2, 1)), 256),
        (((512, 2, 1), (256, 1, 2), (128, 2, 1)), 512),  # in whatever order; not from a length with a setback after it
        (((128, 2, 1), (256, 1, 2)), None),
        (((128, 1, 2), (256, None, 1), (512, None, None)), 256),  # it fits where the other does not
        (((128, 2, 1), (256, 2, None)), None),
        (((128, None, None),), None),
        (((256, 2, 1), (256, 1, 2), (512, 2, 1)), 512),  # all pairs of a length have to gain
    ],
)
def test_from_which_length_on_something_gains(times, n):
    assert written.gains_from([at(*each) for each in times]) == n


def test_a_row_that_failed_neither_gains_nor_loses():
    failed = row(status="error", **NO_TIME)
    with pytest.raises(ValueError, match="it is error"):
        written.gains_from([Pair(row(), failed)])


def test_gains_of_models_are_counted_in_contexts_and_memory():
    pairs = [
        Pair(model_row(context_length=n), model_row(context_length=n, peak_memory_mib=2048.0 + 512 - n))
        for n in (128, 1024)
    ]
    assert written.gains_from(pairs, "peak_memory_mib") == 1024


def test_the_exponent_of_a_power_law():
    rows = [row(n_queries=n, median_ms=3e-6 * n**1.5) for n in (128, 512, 4096)]
    assert math.isclose(written.exponent(rows, "median_ms"), 1.5)
    with pytest.raises(ValueError, match="through 1 points"):
        written.exponent(rows[:1], "median_ms")
    with pytest.raises(ValueError, match="is oom"):
        written.exponent([*rows, row(**OOM)], "median_ms")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_naive_attention_keeps_is_what_autograd_saves(dtype, causal):
    each = row(batch=2, heads=3, n_queries=40, n_keys=40, d=24, dtype=dtype, causal=causal)
    counted = sum(part.bytes for part in written.kept(each))
    assert counted == memory_before_backward(ATTENTION["naive"].function, written.shape_of(each), CPU)


def test_what_naive_attention_keeps_is_what_a_gpu_measured():
    measured = [each for each in read_rows(RUNS / "pytorch_attention" / "metrics.jsonl") if each.memory_mib is not None]
    naive = [each for each in measured if each.implementation == "naive"]
    assert naive and all(sum(part.mib for part in written.kept(each)) == each.memory_mib for each in naive)
    with pytest.raises(ValueError, match="compiled keeps something else"):
        written.kept(next(each for each in measured if each.implementation == "compiled"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_worst_moment_is_that_of_the_workload(dtype):
    each = row(n_queries=64, n_keys=64, dtype=dtype)
    shape = written.shape_of(each)
    beside = sum(part.bytes for part in written.working(each))
    assert beside == shape.peak_bytes(8) - shape.bytes_before_backward(8)


def curve(path: Path, losses: list[float], **settings: object) -> None:
    entries = [{"step": i, "loss": loss, "validation_loss": loss} for i, loss in enumerate(losses, start=1)]
    shape = {"num_layers": 6, "d_model": 512, "num_heads": 8, "context_length": 1024, "batch": 16}
    common = {"steps": len(losses), "seed": 0, "amp": "bf16", "attention": path.stem, "learning_rate": 3e-4}
    environment = {name: getattr(row(), name) for name in Environment.__dataclass_fields__}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"settings": shape | common | settings, **environment, "losses": entries}))


def test_training_runs_are_compared_step_by_step(tmp_path):
    rows = Rows(tmp_path)
    for name, losses in (("naive", [3.0, 2.0]), ("flash", [3.5, 1.75])):
        curve(tmp_path / f"{name}.json", losses)
    assert written.gaps(rows.curve("naive.json"), rows.curve("flash.json")) == [0.5, 0.25]
    curve(tmp_path / "other.json", [3.0, 2.0], seed=1)
    with pytest.raises(ValueError, match="another seed"):
        written.gaps(rows.curve("naive.json"), rows.curve("other.json"))
    curve(tmp_path / "short.json", [3.0, 2.0], steps=3)
    with pytest.raises(ValueError, match="2 of 3 steps"):
        rows.curve("short.json")


def test_paragraphs_are_wrapped_and_nothing_else():
    word, wide = "word " * 30, "x" * 150
    kept = f"| {wide} |\n\n## {wide}\n\n    {wide} x\n\n![{wide}](a b.png)\n"
    assert written.wrapped(kept) == kept
    text = written.wrapped(f"a\nb  c\n\n- {word}\n- d\n").splitlines()
    assert text[:2] == ["a b c", ""] and text[2].startswith("- word") and text[3].startswith("  word")
    assert text[4] == "- d"


@pytest.mark.parametrize("sign", ["-", "+", "*", "="])
def test_no_line_begins_with_a_sign(sign):
    for length in range(100, 125):
        lines = written.wrapped(f"{'x' * length} a {sign} b").splitlines()
        assert not any(line.startswith(sign) for line in lines) and " ".join(lines).endswith(f"a {sign} b")


@pytest.fixture
def failure(monkeypatch):
    """The one line that the script ends with for a folder."""

    def run(folder: Path) -> str:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(folder)])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        line = str(caught.value.code)  # a text is printed, and the exit code is 1
        assert line.startswith("error: ") and "\n" not in line
        assert not (folder / "REPORT.md").exists()
        return line

    return run


def test_one_line_on_failure(failure, tmp_path):
    assert written.TEMPLATE in failure(tmp_path)


def test_one_line_where_a_comparison_meets_none(failure, tmp_path):
    (tmp_path / written.TEMPLATE).write_text("a\n\n{{ [2, none] | sort }}\n", encoding="utf-8")
    assert "line 3 of" in failure(tmp_path)


@pytest.mark.parametrize(
    "wrong", ["{{ one('rows.jsonl', d=3) }}", "{{ none }}", "{{ best }}", "{{ 1 + }}", "{{ one('no.jsonl') }}"]
)
def test_an_error_says_where_in_the_template_it_is(wrong, tmp_path):
    with pytest.raises(Exception) as caught:
        render(tmp_path, f"a\n{{% macro b() %}}\n{wrong}\n{{% endmacro %}}\n{{{{ b() }}}}")
    assert written.place_in_template(caught.value) == f", line 3 of {written.TEMPLATE}"


def test_without_rows_the_report_says_which_file_is_missing(failure, tmp_path):
    shutil.copy(RUNS / written.TEMPLATE, tmp_path)
    assert "metrics.jsonl" in failure(tmp_path)


GRID = {"n_queries": (128, 1024, 4096, 16384), "d": (32, 64)}
SETTINGS = (("bfloat16", "highest"), ("float32", "highest"), ("float32", "high"))
RATES = {"naive": 5.0, "compiled": 10.0}  # TFLOP/s; the others' are `flash`


def made_up(name: str, pass_: str, limit_mib: float, flash: float, **fields: Any) -> Row:
    """A row whose time is that of its FLOPs, and which runs out of memory where it needs more than the limit."""
    shape = AttentionShape(
        fields["batch"],
        fields["heads"],
        fields["n_queries"],
        fields["n_keys"],
        fields["d"],
        DTYPES[fields["dtype"]],
        True,
    )
    saved = shape.bytes_before_backward(8 if name in RATES else 0) / MIB
    ms = shape.flops(pass_) / RATES.get(name, flash) / 1e9  # ty: ignore[invalid-argument-type]
    times = {"median_ms": ms, "p20_ms": ms, "p80_ms": ms, "tflops": 1.0, "memory_mib": saved}
    if shape.peak_bytes(8 if name in RATES else 0) / MIB > limit_mib:
        times = OOM | ({"memory_mib": saved} if saved < limit_mib else {})
    return row(implementation=name, pass_=pass_, **fields | times)


def fill(folder: Path, limit_mib: float, flash: float, apart: float) -> None:
    """The files that the committed template wants, of rows that were never measured."""
    same = [{"n_queries": n, "n_keys": n, "d": d} for d, n in product(GRID["d"], GRID["n_queries"])]
    for path, variant, limit in (
        ("pytorch_attention", None, math.inf),
        ("pytorch_attention_12gib", "12 GiB", limit_mib),
    ):
        write(
            folder / path / "metrics.jsonl",
            (
                made_up(name, pass_, limit, flash, batch=8, heads=1, dtype="float32", variant=variant, **sizes)
                for sizes, name, pass_ in product(same, RATES, ("forward", "backward"))
            ),
        )
    names = [*RATES, "flash_triton", *(peer.name for peer in PEERS)]
    ceiling = [
        row(implementation=CEILING, dtype=dtype, float32_precision=precision, d=8192, tflops=500.0, memory_mib=None)
        for dtype, precision in SETTINGS
    ]
    write(
        folder / "flash" / "metrics.jsonl",
        ceiling
        + [
            made_up(name, pass_, limit_mib, flash, batch=1, heads=1, dtype=dtype, float32_precision=precision, **sizes)
            for (dtype, precision), sizes, name, pass_ in product(SETTINGS, same, names, PASSES)
            if precision == "highest" or name in ("naive", "flash_triton")
        ],
    )
    for path in ("metrics.jsonl", "portable.jsonl"):
        of_64 = [sizes for sizes in same if sizes["d"] == 64]
        rows = [
            made_up("flash_triton", pass_, math.inf, flash, batch=16, heads=1, dtype="bfloat16", **sizes)
            for sizes, pass_ in product(of_64, PASSES)
        ]
        write(folder / "growth" / path, [*rows, ceiling[0]])
    rungs = dict.fromkeys([*(rung.name for rung in LADDER), *names])
    timings = [(None, pass_) for pass_ in PASSES] + [(COURSE_HARNESS, "forward_backward")]
    shape = {"batch": 1, "heads": 16, "n_queries": 4096, "n_keys": 4096, "dtype": "bfloat16"}
    write(
        folder / "leaderboard" / "metrics.jsonl",
        (
            made_up(name, pass_, limit_mib, flash, variant=variant, d=d, **shape)
            for d, name, (variant, pass_) in product((64, 128), rungs, timings)
        ),
    )
    for d in (64, 128):
        tiles = [
            (f"flash_triton.{kernel}", tile) for kernel in ("forward", "dk_dv", "dq") for tile in ("64x64", "32x32")
        ]
        rows = [trial_row(implementation=kernel, variant=f"{tile} 4w 2s g4 ptr", d=d) for kernel, tile in tiles]
        write(folder / "autotune" / f"d{d}.jsonl", rows)
    write(folder / "model" / "metrics.jsonl", models(limit_mib, flash))
    for name, loss in (("naive", 1.0), ("flash_triton", 1.0 + apart)):
        curve(folder / "training" / f"{name}.json", [4.0, loss])
    template = (RUNS / written.TEMPLATE).read_text(encoding="utf-8")
    for path in [*re.findall(r"file\('(.+?)'\)", template), "autotune/d64.md", "autotune/d128.md"]:
        (folder / path).touch()
    (folder / written.TEMPLATE).write_text(template, encoding="utf-8")


def models(limit_mib: float, flash: float) -> Iterable[ModelRow]:
    workloads = [(size, 128) for size in SIZES.values()] + [(SIZES["small"], n) for n in (1024, 4096, 8192)]
    names = ("naive", "flash_triton", "sdpa")
    for (size, n), amp, built, name, pass_ in product(workloads, (False, True), (False, True), names, MODEL_PASSES):
        workload = ModelWorkload(size, n, 4, amp)
        ms = workload.flops(pass_) / 1e11 / (flash / 5 if name != "naive" else 1) / (2 if built else 1)
        mib = 100 + (48 * 4 * n**2 * 8 / MIB if name == "naive" else 0)
        measured: dict[str, Any] = {"median_ms": ms, "peak_memory_mib": mib}
        if name == "sdpa" and not (amp and n >= 4096 and pass_ == "training_step"):
            continue  # not asked for
        if mib > limit_mib:
            measured = NO_TIME | {"status": "oom", "peak_memory_mib": None}
        yield model_row(
            implementation=name, pass_=pass_, model_size=size.name, parameters=size.parameters, context_length=n,
            dtype=workload.dtype_name, compiled=built, **measured,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("limit_mib", "flash", "apart", "said"),
    [
        (
            12 * 1024,
            100.0,
            0.001,
            ["runs out of memory is n = 16384 with d = 32, in the forward", "grows 64-fold", "every step, is met"],
        ),
        (math.inf, 1.0, 0.5, ["With 12 GiB, every configuration fits into memory", "every step, is not met",
                              "Nothing of this grid ran out of memory", "none (d = 32), none (d = 64)"]),
    ],
)  # fmt: skip
def test_the_report_reads_well_whatever_the_rows_say(limit_mib, flash, apart, said, tmp_path):
    fill(tmp_path, limit_mib, flash, apart)
    report = written.render(tmp_path, NAMES)
    assert [each for each in said if each not in " ".join(report.split())] == []
    assert not re.search(r"\b(nan|inf|None|True|False)\b|\{\{|\{%|(?m: $)", report)
    lines = report.splitlines()
    assert max(len(line) for line in lines if not line.startswith(("|", "!"))) <= written.WIDTH
    for above, below in pairwise(lines):
        if below.startswith("|"):  # a line of a table has the cells of the one above it, or begins one
            assert not above or above.count("|") == below.count("|"), below


@pytest.mark.skipif(not (RUNS / "REPORT.md").exists(), reason="there is no report yet")
def test_the_report_says_where_float32_is_slower_than_a_peer():
    """At a head dim of 128, with the figures of the rows; and not where the kernels are faster at some length."""
    found = {
        (each.implementation, each.pass_, each.n_queries): each.tflops
        for each in read_rows(RUNS / "flash" / "metrics.jsonl")
        if (each.dtype, each.float32_precision, each.d) == ("float32", "highest", 128)
    }
    names = ("flash_triton", "sdpa_efficient")
    ours, theirs = ([f"{found[name, pass_, 65536]:.0f}" for pass_ in ("forward", "backward")] for name in names)
    said = (
        f"every length from 256 on: at n = 65536 it reaches {ours[0]} TFLOP/s in the forward and {ours[1]} in the "
        f"backward, `sdpa_efficient` {theirs[0]} and {theirs[1]}."
    )
    assert said in " ".join((RUNS / "REPORT.md").read_text(encoding="utf-8").split())


def test_parts_that_were_not_measured_say_so(tmp_path):
    """Without models, training, the second ranking and growth the report has all else, and no hint of them."""
    fill(tmp_path, math.inf, 100.0, 0.001)
    (tmp_path / "growth/portable.jsonl").unlink()
    assert "the GPU is full at all" not in written.render(tmp_path, NAMES), "a step cut short is none"
    for path in ("model/metrics.jsonl", "training/flash_triton.json", "autotune/d128.jsonl", "growth/metrics.jsonl"):
        (tmp_path / path).unlink()
    (tmp_path / "training/naive.json").unlink()
    report = written.render(tmp_path, NAMES)
    assert report.count("\nNot measured yet.\n") == 2
    assert "[`autotune/d64.md`](autotune/d64.md).\n" in report
    assert not re.search(r"d128\.|model/|training\w*/|growth/", report)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "scripts/reproduce_runs.sh runs/mine"),
        (["--all"], 2, "usage: "),
        (["out", "ladder", "nosuch"], 2, "no step is called nosuch"),
        (["out", "small_card"], 0, "skipped: there is no GPU with more than 12 GiB"),
        (["out", "compiled"], 0, "scripts/compiled_kernels.py --markdown {}/out/compiled_kernels.md"),
    ],
)
def test_steps_are_checked_before_the_first_runs(arguments, code, said, tmp_path):
    """And a folder is where the caller is; where there is no large GPU the small one is left out."""
    small = tmp_path / "bin" / "nvidia-smi"
    small.parent.mkdir()
    small.write_text("#!/bin/sh\necho 11264\n", encoding="utf-8")
    small.chmod(0o755)
    environment = os.environ | {"RUN": "echo", "PATH": f"{small.parent}:{os.environ['PATH']}"}
    command = ["bash", str(SCRIPT.with_name("reproduce_runs.sh")), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code and said.format(tmp_path) in done.stdout + done.stderr
    assert "bench_" not in done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_every_step_that_measures_again_is_a_valid_command(tmp_path):
    command = ["bash", str(SCRIPT.with_name("reproduce_runs.sh")), str(tmp_path)]
    gpu = tmp_path / "bin" / "nvidia-smi"  # of 141 GiB
    gpu.parent.mkdir()
    gpu.write_text("#!/bin/sh\necho 144384\n", encoding="utf-8")
    gpu.chmod(0o755)
    environment = os.environ | {"RUN": "echo", "PATH": f"{gpu.parent}:{os.environ['PATH']}"}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    commands = [shlex.split(line) for line in shown.stdout.splitlines() if not line.startswith("==")]
    outputs = set()
    for path, *arguments in commands:
        config = runpy.run_path(str(SCRIPT.parents[1] / path))["Config"]
        parsed = parse(config, arguments)
        outputs |= {str(value) for value in vars(parsed).values() if isinstance(value, Path)}
    template = (RUNS / written.TEMPLATE).read_text(encoding="utf-8")
    for path in re.findall(r"'([\w/]+)\.(?:jsonl|json|md)'", template):
        folder = tmp_path / path
        assert any(each.startswith(str(folder)) or each == str(folder.parent) for each in outputs), path


@pytest.mark.skipif(not (RUNS / "REPORT.md").exists(), reason="there is no report yet")
def test_the_committed_report_is_what_its_rows_say():
    assert (RUNS / "REPORT.md").read_text(encoding="utf-8") == written.render(RUNS, NAMES)
