"""bench.record: strict JSON, one row per key, and a file that outlives a process killed at any moment."""

import json
import math
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cs336_systems.bench import record
from cs336_systems.bench.record import Environment, RecordError, Row, RowFile, read_rows

from .bench_examples import CPU, row

KEYS = [
    "implementation", "pass", "batch", "heads", "n_queries", "n_keys", "d", "dtype", "causal",
    "tflops", "memory_mib", "predicted_memory_mib", "median_ms", "p20_ms", "p80_ms", "status", "message",
    "gpu", "driver", "torch", "triton", "commit", "dirty", "float32_precision", "time", "warmup", "iterations",
]  # fmt: skip


def _refuse(constant):
    raise AssertionError(f"{constant} in JSON")


def test_schema():
    assert list(json.loads(row().to_json())) == KEYS
    assert json.loads(row(variant="tuned").to_json()).keys() == {*KEYS, "variant"}
    for one in (row(), row(variant="tuned"), row(status="oom", median_ms=None, message="CUDA out of memory")):
        assert Row.from_json(one.to_json()) == one


def test_older_rows_do_not_say_how_many_passes():
    values = json.loads(row(warmup=2, iterations=50).to_json())
    del values["warmup"], values["iterations"]
    assert Row.from_json(json.dumps(values)) == row()


def test_rows_on_record_stay_readable():
    assert read_rows(Path(__file__).parents[1] / "runs/h200/pytorch_attention/metrics.jsonl")


def test_nan_and_infinity_become_null():
    """An out-of-memory row with a NaN for its time still parses strictly."""
    line = row(status="oom", median_ms=math.nan, tflops=math.inf, p20_ms=-math.inf).to_json()
    values = json.loads(line, parse_constant=_refuse)
    assert (values["median_ms"], values["tflops"], values["p20_ms"], values["status"]) == (None, None, None, "oom")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("[1, 2]", "a row is a JSON object"),
        ("{}", "keys missing: .*'implementation'"),
        (row().to_json().replace('"d":', '"depth":'), r"keys missing: \['d'\], keys unknown: \['depth'\]"),
        (row().to_json().replace('"ok"', '"fine"'), "status is 'fine'; allowed: ok, oom"),
        (row().to_json().replace('"forward"', '"sideways"'), "pass is 'sideways'"),
        (row().to_json().replace("2.0", "NaN"), "NaN is not strict JSON"),
        (row().to_json().replace('"naive"', '["naive"]'), r"implementation is \['naive'\]; allowed: str"),
        (row().to_json().replace("2.0", '"fast"'), "median_ms is 'fast'; allowed: float, null"),
        (row().to_json().replace('"batch": 8', '"batch": "1"'), "batch is '1'; allowed: int"),
        (row().to_json().replace('"batch": 8', '"batch": true'), "batch is True; allowed: int"),
        (row().to_json().replace('"forward"', '["forward"]'), r"pass is \['forward'\]; allowed: forward, backward"),
        (row(time="noon").to_json(), "isoformat string: 'noon'"),
        (row().to_json().replace("2.0", "null"), "status is 'ok', but median_ms is null"),
    ],
)
def test_bad_row(line, text):
    with pytest.raises(ValueError, match=text):
        Row.from_json(line)


def test_key_is_the_workload_the_gpu_and_the_precision():
    assert row().key == row(commit="def", time="later", median_ms=9.0, status="error", torch="2.12").key
    for change in ({"gpu": "A100"}, {"float32_precision": "high"}, {"pass_": "backward"}, {"d": 32}, {"variant": "x"}):
        assert row().key != row(**change).key


def test_a_row_replaces_the_one_with_its_key(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    file = RowFile(path)
    for one in (row(status="error", message="first"), row(d=16), row(message="second")):
        file.put(one)
    assert read_rows(path) == [row(d=16), row(message="second")]
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2
    assert list(RowFile(path).rows.values()) == read_rows(path)
    assert not RowFile(path, fresh=True).rows
    assert path.read_bytes() == b""


def test_the_last_of_two_lines_with_one_key_wins(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(one.to_json() + "\n" for one in (row(message="old"), row(d=16), row(message="new"))), encoding="utf-8"
    )
    assert {one.d: one.message for one in read_rows(path)} == {64: "new", 16: None}
    RowFile(path)
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2


def test_zeros_at_the_end_are_a_write_that_never_came(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for half in (b"", b'{"implementation": "na'):
        path.write_bytes(row().to_json().encode() + b"\n" + half + b"\0" * 100)
        assert list(RowFile(path).rows.values()) == [row()] == read_rows(path)
    path.write_bytes(b"\0\0\n" + row().to_json().encode() + b"\n")
    with pytest.raises(RecordError, match=r"line 1 is not a benchmark row: .*; mend or delete that line"):
        RowFile(path)


def test_killed_at_any_byte(tmp_path):
    """Whatever part of the last line reached the disk, the rows before it stay and the file goes on."""
    path = tmp_path / "metrics.jsonl"
    first, last = row(message="größer"), row(d=16, message="größer")
    before, line = first.to_json().encode() + b"\n", last.to_json().encode()
    for cut in (*range(0, len(line), 3), len(line) - 1, len(line)):
        path.write_bytes(before + line[:cut])
        whole = cut == len(line)
        assert read_rows(path) == ([first, last] if whole else [first])
        RowFile(path).put(row(d=32))
        assert [one.d for one in read_rows(path)] == ([64, 16, 32] if whole else [64, 32])
        assert path.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("bad", ['{"implementation": "nai', "{}", "\xff", row().to_json().replace("2.0", "Infinity")])
def test_another_malformed_line_is_an_error_and_nothing_is_lost(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    content = f"{row().to_json()}\n{bad}\n{row(d=16).to_json()}\n".encode("latin-1")
    path.write_bytes(content)
    for read in (read_rows, RowFile):
        with pytest.raises(RecordError, match=r"metrics.jsonl, line 2 is not a benchmark row"):
            read(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("notes", [b"my notes", b'{"a": ', b"\xff"])
def test_a_last_line_that_is_no_beginning_of_a_row_is_not_erased(tmp_path, notes):
    path = tmp_path / "metrics.jsonl"
    content = row().to_json().encode() + b"\n" + notes
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"metrics.jsonl, line 2 is not a benchmark row"):
        RowFile(path)
    assert path.read_bytes() == content


def test_rewriting_that_dies_leaves_the_old_rows(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    file = RowFile(path)
    file.put(row(status="error"))
    monkeypatch.setattr(record.Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        file.put(row())
    assert read_rows(path) == [row(status="error")]
    assert [each for each in tmp_path.iterdir() if each.suffix != ".lock"] == [path]


def test_starting_afresh_spares_what_holds_no_rows(tmp_path):
    """`fresh` empties a file of rows; a file of anything else was named by mistake."""
    rows, notes = tmp_path / "rows.jsonl", tmp_path / "notes.md"
    RowFile(rows).put(row())
    assert RowFile(rows, fresh=True).rows == {} and rows.read_bytes() == b""
    notes.write_text("# My notes\n", encoding="utf-8")
    with pytest.raises(RecordError, match=r"notes\.md, line 1 is not a benchmark row"):
        RowFile(notes, fresh=True)
    assert notes.read_text(encoding="utf-8") == "# My notes\n"


def test_writers_at_the_same_time_lose_no_row(tmp_path, monkeypatch):
    """Two that rewrite and append to one file, at once and not in turns: what either has put is there."""
    path = tmp_path / "metrics.jsonl"
    rewrite = RowFile._rewrite
    monkeypatch.setattr(RowFile, "_rewrite", lambda file: (time.sleep(0.003), rewrite(file)))

    def write(name: str) -> None:
        file = RowFile(path)
        for n in range(1, 31):
            file.put(row(implementation=name, n_queries=n, status="error"))
            file.put(row(implementation=name, n_queries=n))  # rewrites, for it replaces

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, ("mine", "other")))
    assert len(read_rows(path)) == 60


def test_two_processes_on_one_file_lose_no_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    mine = RowFile(path)
    mine.put(row(status="error"))
    other = RowFile(path)
    other.put(row(d=16))
    mine.put(row(d=32))
    mine.put(row())  # rewrites, for it replaces
    other.put(row(d=16, message="again"))
    assert read_rows(path) == [row(d=32), row(), row(d=16, message="again")]


def test_environment_on_cpu():
    environment = Environment.capture(CPU)
    assert environment.gpu
    assert environment.driver is None
    assert environment.torch == torch.__version__
    assert environment.float32_precision == torch.get_float32_matmul_precision()


def test_the_driver_is_that_of_any_gpu(monkeypatch):
    """Whichever GPU is measured, nvidia-smi is not asked for the first; on a machine of two it gives two lines."""
    asked = []
    monkeypatch.setattr(record, "_output", lambda *command: asked.extend(command) or "580.1\n580.1")
    assert record._driver() == "580.1"
    assert "-i" not in asked
    monkeypatch.setattr(record, "_output", lambda *command: None)
    assert record._driver() is None


def test_commit_and_dirty(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=n", "-c", "user.email=e@example.com")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    module = tmp_path / "cs336_systems" / "bench" / "record.py"
    module.parent.mkdir(parents=True)
    module.touch()
    monkeypatch.setattr(record, "__file__", str(module))
    monkeypatch.setenv("GIT_COMMIT", "from-the-environment")
    assert record._commit() == ("from-the-environment", None), "no git checkout"

    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    commit, dirty = record._commit()
    assert commit is not None and len(commit) == 40
    assert dirty is False
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "metrics.jsonl").touch()
    assert record._commit() == (commit, False), "results are no change of the code"
    module.write_text("changed", encoding="utf-8")
    assert record._commit() == (commit, True)

    inner = tmp_path / "venv" / "cs336_systems" / "bench" / "record.py"
    inner.parent.mkdir(parents=True)
    monkeypatch.setattr(record, "__file__", str(inner))
    assert record._commit() == ("from-the-environment", None), "another project's checkout"
