"""bench.report: the lines, cells and notes of a table, and that making it needs nothing but what is installed."""

import ast
import errno
import io
import re
import sys
import tomllib
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from cs336_systems.bench import record
from cs336_systems.bench.report import Table, comparison, comparisons, rounds, write_tables
from cs336_systems.bench.source import present_source

from .bench_examples import row

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("naive", "compiled")


def _cells(markdown: str) -> list[list[str]]:
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_full_grid_has_forty_lines():
    grid = product((16, 32, 64, 128), (256, 1024, 4096, 8192, 16384), ("forward", "backward"), NAMES)
    rows = [row(d=d, n_queries=n, n_keys=n, pass_=p, implementation=name) for d, n, p, name in grid]
    header, ruler, *lines = _cells(comparison(rows, "title", NAMES, baseline="naive").to_markdown())
    assert len(lines) == 40
    assert {len(line) for line in (header, ruler, *lines)} == {12}
    assert header[:5] == ["d", "length", "pass", "naive ms", "compiled ms"]
    assert [line[:3] for line in lines[:2]] == [["16", "256", "forward"], ["16", "256", "backward"]]


def test_cells_and_speed_up():
    rows = [
        row(),
        row(implementation="compiled", median_ms=0.5, tflops=123.4, memory_mib=5.04),
        row(d=128, status="oom", median_ms=None, tflops=None, memory_mib=None, message="CUDA out of memory | 8 GiB"),
        row(d=128, implementation="compiled", status="skipped", median_ms=None, tflops=None, message="needs 9 GiB"),
    ]
    table = comparison(rows, "t", NAMES, baseline="naive")
    header, _, fine, out = _cells(table.to_markdown())
    assert dict(zip(header, fine, strict=True)) == {
        "d": "64", "length": "256", "pass": "forward", "naive ms": "2.000", "compiled ms": "0.500",
        "naive TFLOP/s": "1.5", "compiled TFLOP/s": "123", "compiled speed-up": "4.00x",
        "naive MiB before backward": "10.0", "naive predicted MiB": "9.5",
        "compiled MiB before backward": "5.0", "compiled predicted MiB": "9.5",
    }  # fmt: skip
    assert out[3:8] == ["OOM", "skipped", "-", "-", "-"]
    notes = "\n".join(table.notes)
    assert "naive, oom: CUDA out of memory | 8 GiB (d 128, length 256, pass forward)" in notes
    assert "compiled, skipped: needs 9 GiB" in notes


def test_a_table_for_each_setting():
    """Rows that are measured again move to the end of their file; in a table they stand where they did."""
    rows = [row(d=128), row(implementation="compiled"), row(n_queries=16, n_keys=16), row(), row(dtype="bfloat16")]
    rows += [row(dtype="bfloat16", implementation="renamed")]
    one, other = comparisons(rows, "t", NAMES, baseline="naive")
    assert (one.title, other.title) == ("t: float32, causal, batch 8", "t: bfloat16, causal, batch 8")
    assert [line[:2] for line in one.lines] == [["64", "16"], ["64", "256"], ["128", "256"]]
    assert [name for name in other.headers if name.endswith(" ms")] == ["naive ms", "renamed ms"]


def test_rounds():
    """Ratios are taken within a round: between rounds clocks differ."""
    times = {"flash_triton": (1.0, 3.0, 2.2), "sdpa_cudnn": (2.0, 4.0, 4.0)}
    rows = [
        row(implementation=name, variant=f"round {n}", median_ms=ms, p20_ms=ms, p80_ms=ms)
        for name, of_rounds in times.items()
        for n, ms in enumerate(of_rounds)
    ]
    rows += [row(implementation="flex", variant="round 0", status="unsupported", median_ms=None, message="no")]
    unsteady = row(implementation="flash_triton", variant="round 0", pass_="backward", p20_ms=1.0)
    another = row(implementation="flash_triton", variant=None, pass_="forward_backward")
    pairs = [("flash_triton", "sdpa_cudnn"), ("flash_triton", "flex")]
    table = rounds([*rows, unsteady, another], "title", ("flash_triton", "sdpa_cudnn", "flex"), pairs)
    assert table.headers[4:] == [
        "flash_triton ms", "sdpa_cudnn ms", "flex ms", "flash_triton / sdpa_cudnn", "flash_triton / flex",
    ]  # fmt: skip
    assert table.lines == [
        [
            "8 x 1 x 256 x 64",
            "float32",
            "yes",
            "forward",
            "2.200",
            "4.000",
            "unsupported",
            "0.550 (0.500 to 0.750)",
            "-",
        ],
        ["8 x 1 x 256 x 64", "float32", "yes", "backward", "~2.000", "-", "-", "-", "-"],
    ]
    assert "the median of at most 3 rounds" in table.notes[0]


def test_rounds_of_two_ways_to_time_a_pass():
    rows = [
        row(variant=f"round {n}{how}", median_ms=ms + n, p20_ms=ms + n, p80_ms=ms + n)
        for n in (1, 2)
        for how, ms in (("", 3.0), (", CUDA graph", 1.0))
    ]
    table = rounds(rows, "title", ["naive"], [])
    assert [line[3:] for line in table.lines] == [["forward", "4.500"], ["forward, CUDA graph", "2.500"]]
    assert "the median of at most 2 rounds" in table.notes[0]


def test_one_message_is_said_once():
    rows = [row(d=d, message="same") for d in (16, 32, 64)]
    assert [note for note in comparison(rows, "t", NAMES, "naive").notes if "same" in note] == [
        "naive, ok: same (d 16, length 256, pass forward, and 2 more)"
    ]


def test_notes_state_method_constants_spread_and_environment():
    rows = [row(), row(d=128, commit="def456", dirty=True, float32_precision="high", p20_ms=1.0, p80_ms=2.0)]
    table = comparison(rows, "t", NAMES, "naive", method=("FLOPs: forward 4·B·H·n²·d",))
    notes = table.to_markdown().split("\n\n")[-1]
    for text in (
        "- FLOPs: forward 4·B·H·n²·d",
        "dtype float32, causal yes, batch 8, heads 1",
        "50.0 % for the worst, above 5 % for 1 of 2 rows",
        "that is mostly the host",
        "NVIDIA H200, driver 570.1, torch 2.11.0, triton 3.6.0, commit abc123,",
        "float32 matmul precision highest (no TF32)",
        "commit def456 with local changes, float32 matmul precision high (TF32 allowed)",
    ):
        assert text in notes
    assert table.headers[3] == "float32 matmul precision", "what varies is a column"
    assert [line[4] for line in table.lines] == ["2.000", "~2.000"], "the one that may come out otherwise is marked"


def test_notes_say_which_code_was_measured_and_whether_it_has_changed():
    """Commit and source in ten digits; a row without a source is older than the present code."""
    now, then = present_source(), "0123456789" * 4
    old, changed, same = row(commit="a" * 40), row(source=then, d=16), row(source=now, d=32)

    def notes(*rows):
        return "\n".join(comparison(rows, "t", NAMES, "naive").notes)

    method = "Source: what `git ls-tree COMMIT cs336_basics cs336_systems | git mktree` prints."
    assert "commit aaaaaaaaaa, float32" in notes(old) and method not in notes(old)
    assert "source 0123456789, float32" in notes(changed) and method in notes(changed)
    for rows, said in (
        ((old,), "The code has changed since these rows were measured."),
        ((changed,), "The code has changed since these rows were measured."),
        ((old, same), "The code has changed since 1 of 2 rows were measured."),
    ):
        assert said in notes(*rows)
    assert "has changed" not in notes(same)


def test_a_full_disk_leaves_the_tables(tmp_path, monkeypatch):
    path, table = tmp_path / "table.md", Table("t", ["a"], [["1"]], [])
    write_tables(path, [table])
    before = path.read_bytes()
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(record.Path, "write_bytes", lambda *_: (_ for _ in ()).throw(full))
    with pytest.raises(OSError, match=rf"No space left on device, the file stays as it is: '{path}'"):
        write_tables(path, [table, table])
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_note_counts_the_passes_found_in_the_rows():
    many, few, old = row(warmup=10, iterations=100), row(d=16, warmup=2, iterations=50), row(d=32)
    for rows, text in (
        ([many], "median of 100 timed passes after 10 of warm-up."),
        (
            [few, many, old],
            "50 timed passes after 2 of warm-up (1 rows), 100 timed passes after 10 of warm-up (1 rows)",
        ),
        ([few, old], "an unrecorded number of passes (1 rows)"),
    ):
        assert text in "\n".join(comparison(rows, "t", NAMES, "naive").notes)


def test_note_says_which_lines_compare_different_runs():
    """In one run nothing but the other pass is measured between two implementations of a line."""

    def note(*measured):
        rows = [
            row(implementation=name, n_queries=n, n_keys=n, pass_=pass_, time=f"2026-01-01T{clock}+00:00")
            for name, n, clock in measured
            for pass_ in ("forward", "backward")
        ]
        return "\n".join(text for text in comparison(rows, "t", NAMES, "naive").notes if "several runs" in text)

    naive, later = ("naive", 16, "10:00:00"), ("naive", 32, "10:00:20")
    assert note(naive, ("compiled", 16, "10:00:10"), later, ("compiled", 32, "10:00:30")) == ""
    assert note(naive, later, ("compiled", 32, "10:00:30"), ("compiled", 16, "10:00:40")).startswith("2 of 4 lines")
    assert note(naive, ("compiled", 16, "12:00:00")).startswith("2 of 2 lines")
    assert note(naive, later) == ""


def test_what_varies_becomes_a_column():
    rows = [row(), row(dtype="bfloat16"), row(batch=2), row(n_keys=512)]
    header, _, *lines = _cells(comparison(rows, "t", ("naive",), "naive").to_markdown())
    assert header[:5] == ["dtype", "batch", "d", "length", "pass"]
    assert len(lines) == 4
    assert lines[-1][3] == "256 x 512"


def test_markdown_escapes_and_no_rows():
    table = Table("a\nb", ["x|y"], [["1\n2|3"]], ["one\ntwo"])
    assert table.to_markdown() == "# a b\n\n| x\\|y |\n| ---: |\n| 1 2\\|3 |\n\n- one two\n"
    assert comparison([], "t", NAMES, "naive").lines == []


def test_console_cuts_no_number_short():
    out = io.StringIO()
    rows = [row(median_ms=12345.678, message="[bold]not markup[/bold]"), row(implementation="compiled", median_ms=1.0)]
    comparison(rows, "title", NAMES, "naive").print(Console(file=out, width=40))
    for text in ("12345.678", "12345.68x", "backward", "[bold]not markup[/bold]"):
        assert text in out.getvalue()
    assert "…" not in out.getvalue()


def test_console_table_fits_into_eighty_columns():
    out = io.StringIO()
    sizes = {"d": 128, "n_queries": 16384, "n_keys": 16384, "pass_": "backward"}
    rows = [row(implementation=name, median_ms=123.456, memory_mib=16680.6, **sizes) for name in NAMES]
    table = comparison(rows, "title", NAMES, "naive")
    Table(table.title, table.headers, table.lines, notes=[]).print(Console(file=out, width=200))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "16680.6" in out.getvalue() and "123.456" in out.getvalue()
    assert "TFLOP/s" not in out.getvalue() and "predicted" not in out.getvalue()
    assert "naive TFLOP/s" in table.to_markdown() and "naive predicted MiB" in table.to_markdown()


def test_text_files_are_utf_8_on_every_system():
    """In the encoding that Windows may choose, a file written here could not be read elsewhere."""
    for path in [*(ROOT / "cs336_systems/bench").glob("*.py"), ROOT / "cs336_systems/bench_pytorch_attention.py"]:
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(getattr(call, "func", None), "attr", getattr(getattr(call, "func", None), "id", ""))
            if isinstance(call, ast.Call) and name in ("open", "read_text", "write_text"):
                binary = any(isinstance(a, ast.Constant) and "b" in str(a.value) for a in call.args)
                assert binary or "encoding" in {k.arg for k in call.keywords}, f"{path.name}, line {call.lineno}"


def _imports(path: Path) -> set[str]:
    nodes = ast.parse(path.read_text(encoding="utf-8")).body  # what a function imports, it may need on a GPU only
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_a_clean_install_has_all_that_benchmarks_import():
    """Only the standard library, this project, and its runtime dependencies; no pandas, no tabulate."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {
        re.split(r"[=<>; ]", dependency)[0]
        for dependency in project["dependencies"]
        if "sys_platform" not in dependency
    }
    allowed = declared | sys.stdlib_module_names | {"cs336_systems", "cs336_basics"}
    files = [*(ROOT / "cs336_systems/bench").glob("*.py"), ROOT / "cs336_systems/bench_pytorch_attention.py"]
    assert len(files) > 6
    for path in files:
        assert {name.split(".")[0] for name in _imports(path)} <= allowed, path.name


def test_bench_knows_no_implementation():
    """Implementations arrive as arguments. What one is, and how float32 is multiplied, bench may ask."""
    for path in (ROOT / "cs336_systems/bench").glob("*.py"):
        inner = {name for name in _imports(path) if name.startswith("cs336_")}
        inner -= {"cs336_systems.implementation", "cs336_systems.inputs"}
        assert all(name.startswith("cs336_systems.bench.") for name in inner), path.name
    assert not any(name.startswith("cs336_") for name in _imports(ROOT / "cs336_systems/implementation.py"))


def test_small_speed_ups_and_single_passes():
    """A speed-up is no 0.00x; what was timed once has no spread, and that is said."""
    slow = row(implementation="compiled", median_ms=500.0, p20_ms=500.0, p80_ms=500.0, iterations=1)
    table = comparison([row(), slow], "t", NAMES, "naive", memory=False)
    assert table.lines[0][-1] == "0.004x"
    assert " 1 rows of a single pass have none." in "".join(table.notes)
