"""The report: figures come out of rows, and nothing that is missing passes in silence."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from cs336_systems.bench.record import RowFile

from .bench_examples import row

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "write_report.py"
RUNS = SCRIPT.parents[1] / "runs" / "h200"

script = runpy.run_path(str(SCRIPT))


def render(folder: Path, template: str) -> str:
    file = RowFile(folder / "rows.jsonl", fresh=True)
    for measured in (
        row(d=64, median_ms=2.0),
        row(d=64, implementation="fast", median_ms=0.5),
        row(d=128, median_ms=None, status="oom", memory_mib=None, tflops=None),
        row(d=64, pass_="forward_backward", variant="course harness", median_ms=7.0),
    ):
        file.put(measured)
    (folder / script["TEMPLATE"]).write_text(template, encoding="utf-8")
    return script["render"](folder)


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
    ],
)
def test_figures_are_those_of_the_rows(template, text, tmp_path):
    assert render(tmp_path, template) == text


def test_tables_are_the_benchmarks_own(tmp_path):
    table = render(tmp_path, "{{ table('rows.jsonl', ['naive', 'fast'], 'naive', memory=False, variant=None) }}")
    assert table.splitlines()[2:] == [
        "| 64 | 256 | forward | 2.000 | 0.500 | 1.5 | 1.5 | 4.00x |",
        "| 128 | 256 | forward | OOM | - | - | - | - |",
    ]
    ladder = render(tmp_path, "{{ ladder('rows.jsonl', ['naive'], 'naive', d=64) }}")
    assert ladder.splitlines()[2].startswith("| naive | 2.000 | 7.000 |")


@pytest.mark.parametrize(
    ("template", "error", "said"),
    [
        ("{{ one('rows.jsonl', d=3) }}", ValueError, "no row with"),
        ("{{ one('rows.jsonl', d=64) }}", ValueError, "3 rows with"),
        ("{{ one('rows.jsonl', d=128) | ms }}", ValueError, "is oom"),
        ("{{ one('rows.jsonl', width=3) }}", AttributeError, "width"),
        ("{{ best }}", UndefinedError, "best"),
        ("{{ one('other.jsonl') }}", OSError, r"other\.jsonl"),
    ],
)
def test_what_is_missing_is_an_error(template, error, said, tmp_path):
    with pytest.raises(error, match=said):
        render(tmp_path, template)


def test_one_line_on_failure(tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr


@pytest.mark.skipif(not (RUNS / script["TEMPLATE"]).exists(), reason="there is no report yet")
def test_the_committed_report_is_what_its_rows_say():
    assert (RUNS / "REPORT.md").read_text(encoding="utf-8") == script["render"](RUNS)
