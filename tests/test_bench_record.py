"""bench.record and bench.source: strict JSON, one row per key, a file that outlives a process killed at any moment,
one run at a time in a folder, and a hash of the code that git gives too.
"""

import errno
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from cs336_systems.bench import record, source
from cs336_systems.bench.model import ModelRow
from cs336_systems.bench.record import (
    BusyError,
    Environment,
    Record,
    RecordError,
    Row,
    RowFile,
    measuring_into,
    read_rows,
)
from cs336_systems.bench.tuning import TrialRow

from .bench_examples import CPU, row

RUNS = Path(__file__).parents[1] / "runs" / "h200"
KINDS: dict[str, type[Record]] = {"model": ModelRow, "autotune": TrialRow}
ON_RECORD = sorted(path.relative_to(RUNS).as_posix() for path in RUNS.glob("*/*.jsonl"))
ROWS_ON_RECORD = [path for path in ON_RECORD if not path.startswith("accuracy/")]  # whose lines are errors, not times

KEYS = [
    "implementation", "pass", "median_ms", "p20_ms", "p80_ms", "status", "message", "time", "warmup", "iterations",
    "batch", "heads", "n_queries", "n_keys", "d", "dtype", "causal", "tflops", "memory_mib", "predicted_memory_mib",
    "gpu", "driver", "torch", "triton", "commit", "dirty", "float32_precision",
]  # fmt: skip


def _refuse(constant):
    raise AssertionError(f"{constant} in JSON")


def test_schema():
    assert list(json.loads(row().to_json())) == KEYS
    more = row(variant="tuned", source="a" * 40, free_mib=5.0)
    assert json.loads(more.to_json()).keys() == {*KEYS, "variant", "source", "free_mib"}
    for one in (row(), more, row(status="oom", median_ms=None, message="CUDA out of memory")):
        assert Row.from_json(one.to_json()) == one


def test_older_rows_do_not_say_how_many_passes():
    values = json.loads(row(warmup=2, iterations=50).to_json())
    del values["warmup"], values["iterations"]
    assert Row.from_json(json.dumps(values)) == row()


@pytest.mark.parametrize("path", ROWS_ON_RECORD)
def test_rows_on_record_stay_readable(path):
    """Every committed row, with the class it belongs to; none is lost, and writing it again keeps what it says."""
    kind = KINDS.get(path.split("/")[0], Row)
    lines = (RUNS / path).read_text(encoding="utf-8").splitlines()
    rows = read_rows(RUNS / path, kind)
    assert len(rows) == len(lines) > 0
    for one, line in zip(rows, lines, strict=True):
        assert json.loads(line).items() <= (dict.fromkeys(["rounds"]) | json.loads(one.to_json())).items()


def test_nan_and_infinity_become_null():
    """An out-of-memory row with a NaN for its time still parses strictly."""
    line = row(status="oom", median_ms=math.nan, tflops=math.inf, p20_ms=-math.inf).to_json()
    values = json.loads(line, parse_constant=_refuse)
    assert (values["median_ms"], values["tflops"], values["p20_ms"], values["status"]) == (None, None, None, "oom")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("[1, 2]", "a row is a JSON object"),
        ("{}", "key 'implementation' is missing"),
        (row().to_json().replace('"d":', '"depth":'), "key 'd' is missing; key 'depth' is unknown"),
        (row().to_json().replace('"ok"', '"fine"'), "status is 'fine'; Input should be 'ok', 'oom'"),
        (row().to_json().replace('"forward"', '"sideways"'), "pass is 'sideways'; Input should be 'forward', 'back"),
        (row().to_json().replace("2.0", "NaN"), "NaN is not strict JSON"),
        (row().to_json().replace('"naive"', '["naive"]'), r"implementation is \['naive'\]; Input should be a .*string"),
        (row().to_json().replace("2.0", '"fast"'), "median_ms is 'fast'; Input should be a valid number"),
        (row().to_json().replace('"batch": 8', '"batch": "1"'), "batch is '1'; Input should be a valid integer"),
        (row().to_json().replace('"batch": 8', '"batch": true'), "batch is True; Input should be a valid integer"),
        (row().to_json().replace('"forward"', '["forward"]'), r"pass is \['forward'\]; Input should be 'forward'"),
        (row().to_json().replace("2026-01-01T00:00:00+00:00", "noon"), "time is 'noon'; Invalid isoformat string"),
        (row().to_json().replace("2.0", "null"), "status is 'ok', but median_ms is null"),
    ],
)
def test_bad_row(line, text):
    with pytest.raises(ValueError, match=text) as caught:
        Row.from_json(line)
    assert "\n" not in str(caught.value)


def test_key_is_the_workload_the_gpu_and_the_precision():
    assert row().key == row(commit="def", time="2026-02-01", median_ms=9.0, status="error", torch="2.12").key
    for change in ({"gpu": "A100"}, {"float32_precision": "high"}, {"pass_": "backward"}, {"d": 32}, {"variant": "x"}):
        assert row().key != row(**change).key


def test_a_row_replaces_the_one_with_its_key(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    file = RowFile(path)
    for one in (row(status="error", message="first"), row(d=16), row(message="second")):
        file.put(one)
    assert read_rows(path) == [row(d=16), row(message="second")]
    assert len(path.read_text(encoding="utf-8").splitlines()) == 3, "appended"
    assert list(RowFile(path).rows.values()) == read_rows(path)
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2, "opening leaves one row per key"
    with RowFile.opened(path) as file:
        file.put(row(d=16, message="third"))
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2, "and so does the end of a run"
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


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")], ids=str)
def test_rewriting_that_dies_leaves_the_old_rows(tmp_path, monkeypatch, error):
    path = tmp_path / "metrics.jsonl"
    file = RowFile(path)
    for one in (row(status="error"), row()):
        file.put(one)
    before = path.read_bytes()
    monkeypatch.setattr(record.Path, "replace", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(type(error)) as caught:
        RowFile(path)
    assert isinstance(error, KeyboardInterrupt) or f"the file stays as it is: '{path}'" in str(caught.value)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_names_the_file_and_the_rows_that_are_safe(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    file = RowFile(path)
    for d in (16, 32):
        file.put(row(d=d))
    before = path.read_bytes()
    said = r"metrics\.jsonl cannot be written: No space left on device; the 2 rows before are safe in it"
    with monkeypatch.context() as patch:
        patch.setattr(
            record.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))
        )
        with pytest.raises(OSError, match=said):
            file.put(row(d=64))
    assert path.read_bytes() == before, "no half of a row is left in the middle of the file"
    file.put(row(d=64))
    assert [one.d for one in read_rows(path)] == [16, 32, 64]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_really_is_full(tmp_path):
    file = RowFile(tmp_path / "metrics.jsonl")
    file.put(row())
    file.path = Path("/dev/full")
    with pytest.raises(OSError, match="/dev/full cannot be written: No space left on device; the 1 rows before are"):
        file.put(row(d=16))
    assert list(file.rows.values()) == [row()]


def test_starting_afresh_spares_what_holds_no_rows(tmp_path):
    """`fresh` empties a file of rows; a file of anything else was named by mistake."""
    rows, notes = tmp_path / "rows.jsonl", tmp_path / "notes.md"
    RowFile(rows).put(row())
    assert RowFile(rows, fresh=True).rows == {} and rows.read_bytes() == b""
    notes.write_text("# My notes\n", encoding="utf-8")
    with pytest.raises(RecordError, match=r"notes\.md, line 1 is not a benchmark row"):
        RowFile(notes, fresh=True)
    assert notes.read_text(encoding="utf-8") == "# My notes\n"


def test_one_run_at_a_time_measures_into_a_folder(tmp_path):
    """The lock holds for all files of the folder; in one process blocks may lie inside of one another."""
    path = tmp_path / "deep" / "a.jsonl"
    with measuring_into(path), measuring_into(path.with_name("b.jsonl")):
        other = FileLock(path.parent / ".measuring.lock", blocking=False)  # as another process would have it
        with pytest.raises(TimeoutError):
            other.acquire()
    other.acquire()
    said = rf"another run is measuring into {path.parent}; wait until it ends, or write"
    with pytest.raises(BusyError, match=said), measuring_into(path):
        raise AssertionError("measured beside another run")
    other.release()
    with measuring_into(path):
        pass


def test_a_killed_run_leaves_no_lock(tmp_path):
    path = tmp_path / "rows.jsonl"
    code = """if True:
        import sys, filelock
        with filelock.FileLock(sys.argv[1]):
            print('held', flush=True)
            sys.stdin.read()
    """
    command = [sys.executable, "-c", code, str(tmp_path / ".measuring.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(BusyError), measuring_into(path):
            pass
        other.kill()
    assert (tmp_path / ".measuring.lock").exists()
    with measuring_into(path):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_file_system_without_locks_gets_one_warning(tmp_path, monkeypatch, number):
    """And leaves nothing that would stop the next run, as a lock made of a file's existence would after a kill."""
    fcntl = pytest.importorskip("fcntl", reason="locks of Unix")
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(number, "no locks")))
    measured = []
    for _ in range(2):
        refused = pytest.warns(UserWarning, match=r"\.measuring\.lock cannot be locked \(.*\); let no other run")
        with refused as said, measuring_into(tmp_path / "rows.jsonl"):
            measured.append(not FileLock(tmp_path / ".measuring.lock").is_locked)
        assert len(said) == 1
    assert measured == [True, True]


def test_a_read_only_lock_file_gets_a_warning(tmp_path):
    (tmp_path / ".measuring.lock").mkdir()  # also root cannot write to it
    with pytest.warns(UserWarning, match="cannot be locked"), measuring_into(tmp_path / "rows.jsonl"):
        RowFile(tmp_path / "rows.jsonl").put(row())
    assert read_rows(tmp_path / "rows.jsonl") == [row()]


def test_environment_on_cpu():
    environment = Environment.capture(CPU)
    assert environment.gpu
    assert environment.driver is None
    assert environment.torch == torch.__version__
    assert environment.float32_precision == torch.get_float32_matmul_precision()
    assert environment.source == source.source_of(Path(__file__).parents[1])


def test_the_driver_is_that_of_any_gpu(monkeypatch):
    """Whichever GPU is measured, nvidia-smi is not asked for the first; on a machine of two it gives two lines."""
    asked = []
    monkeypatch.setattr(record, "output_of", lambda *command: asked.extend(command) or "580.1\n580.1")
    assert record._driver() == "580.1"
    assert "-i" not in asked
    monkeypatch.setattr(record, "output_of", lambda *command: None)
    assert record._driver() is None


def _git(folder: Path, *arguments: str, said: str | None = None) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "core.fileMode=true")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, input=said, check=True, capture_output=True, text=True).stdout.strip()


def _source_by_git(folder: Path) -> str:
    return _git(folder, "mktree", said=_git(folder, "ls-tree", "HEAD", *source.PACKAGES) + "\n")


def test_source_is_what_git_says(tmp_path):
    """Names that sort differently as folders, an executable, a link, an empty file; and what is no source."""
    for name in ("a.py", "a/x.py", "a-b.py", "a0.py", "größer.py", "deep/er/y.py", "empty.py"):
        for package in source.PACKAGES:
            path = tmp_path / package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"" if name == "empty.py" else f"{package} {name}\r\n".encode())
    systems = tmp_path / "cs336_systems"
    (systems / "a.py").chmod(0o755)
    (systems / "link.py").symlink_to("a.py")
    _git(tmp_path, "init")
    _git(tmp_path, "-c", "core.autocrlf=false", "add", ".")
    _git(tmp_path, "commit", "-m", "one")
    expected = _source_by_git(tmp_path)
    for name in ("__pycache__/a.cpython-311.pyc", "stray.pyc", ".hidden", ".folder/a.py", "deep/__pycache__/b.pyc"):
        (systems / name).parent.mkdir(exist_ok=True)
        (systems / name).write_text("no source", encoding="utf-8")
    (systems / "empty").mkdir()
    (tmp_path / "README.md").touch()
    assert source.source_of(tmp_path) == expected
    (systems / "deep/er/y.py").write_text("changed", encoding="utf-8")
    assert source.source_of(tmp_path) != expected


def test_source_of_this_checkout_is_what_git_says():
    packages = ("--", *source.PACKAGES)
    if source.output_of("git", "-C", str(source.ROOT), "status", "--porcelain", *packages) != "":
        pytest.skip("no clean git checkout")
    assert source.present_source() == _source_by_git(source.ROOT)


def test_commit_and_dirty(tmp_path, monkeypatch):
    module = tmp_path / "cs336_systems" / "bench" / "source.py"
    module.parent.mkdir(parents=True)
    module.touch()
    monkeypatch.setattr(source, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_COMMIT", "from-the-environment")
    assert source.present_commit() == ("from-the-environment", None), "no git checkout"

    _git(tmp_path, "init")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "one")
    commit, dirty = source.present_commit()
    assert commit is not None and len(commit) == 40
    assert dirty is False
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "metrics.jsonl").touch()
    assert source.present_commit() == (commit, False), "results are no change of the code"
    module.write_text("changed", encoding="utf-8")
    assert source.present_commit() == (commit, True)

    (tmp_path / "venv").mkdir()
    monkeypatch.setattr(source, "ROOT", tmp_path / "venv")
    assert source.present_commit() == ("from-the-environment", None), "another project's checkout"
