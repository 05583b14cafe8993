"""bench_pytorch_attention.py as a user runs it: by path, again, and with flags that are wrong."""

import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cs336_systems.bench.cli import parse
from cs336_systems.bench.measure import Timing
from cs336_systems.bench.record import RowFile
from cs336_systems.bench.sweep import Measured, Sweep
from cs336_systems.bench_pytorch_attention import Config, main

SCRIPT = Path(__file__).resolve().parents[1] / "cs336_systems" / "bench_pytorch_attention.py"
TINY = ("--lengths", "16", "32", "--head-dims", "8", "--batch", "2", "--warmup", "0", "--iters", "2")


NO_ACCOUNT = """
import pwd

def getpwuid(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")

pwd.getpwuid = getpwuid
"""


def test_run_by_path_then_again(tmp_path, monkeypatch, capsys):
    """Run by path, cs336_systems/ comes first among the modules: no file there may hide an installed one.

    The user has no account, as in a container, and the output goes to a file whose encoding lacks half of what is said.
    """
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NO_ACCOUNT, encoding="utf-8")
    names = ("LOGNAME", "USER", "LNAME", "USERNAME", "TORCHINDUCTOR_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(tmp_path / "site"), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, str(SCRIPT), *TINY, "--out-dir", str(tmp_path)]
    first = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert first.returncode == 0, first.stderr
    assert "[4/4, 0 s left] naive backward, batch 2, d 8, length 32, float32" in first.stdout
    assert "forward 4?B?H?n_queries?n_keys?d" in first.stdout

    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["n_keys"], row["pass"], row["status"]) for row in rows] == [
        (16, "forward", "ok"),
        (16, "backward", "ok"),
        (32, "forward", "ok"),
        (32, "backward", "ok"),
        (1024, "forward", "ok"),  # the large matmul
    ]
    rows = rows[:-1]
    assert {(row["batch"], row["heads"], row["causal"]) for row in rows} == {(2, 1, True)}
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert table.startswith("# PyTorch attention on a CPU, reduced grid")
    for text in (
        "naive: softmax(Q K^T / sqrt(d)) V, one PyTorch operation after another, the mask made in each call.",
        "2 timed passes after 0 of warm-up",
        "forward 4·B·H·n_queries·n_keys·d",
        "saved_tensors_hooks",
        "commit",
    ):
        assert text in table

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main(parse(Config, [*TINY, "--out-dir", str(tmp_path)]))
    assert "holds 4 of 4 rows" in capsys.readouterr().out
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == table


def test_nothing_measured_vanishes_from_the_table(tmp_path, monkeypatch):
    """Neither other sizes, dtypes or implementations of this machine; rows of another GPU are no part of it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tmp_path /= "m[/x]"  # as markup of rich, it would end a style that never began
    first = replace(parse(Config, [*TINY]), out_dir=tmp_path, lengths=(16,))
    main(first)
    file = RowFile(tmp_path / "metrics.jsonl")
    forward, *_ = file.rows.values()
    file.put(replace(forward, implementation="compiled"))
    file.put(replace(forward, gpu="another", n_queries=9999, n_keys=9999))
    main(replace(first, lengths=(24,), dtype="float16"))
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert [line.split(": ")[1] for line in table.splitlines() if line.startswith("# ")] == [
        "float32, causal, batch 2",
        "float16, causal, batch 2",
    ]
    assert "| 8 | 16 | forward |" in table and "| 8 | 24 | backward |" in table
    assert "compiled ms" in table and "| 9999 |" not in table


def test_control_c_leaves_one_line(tmp_path, monkeypatch, capsys):
    measured = []

    def interrupted_by_the_second(*arguments):
        measured.append(arguments)
        if len(measured) > 1:
            raise KeyboardInterrupt
        return {pass_: Measured("ok", timing=Timing(1, 1, 1, 1)) for pass_ in ("forward", "backward")}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Sweep, "_measure", interrupted_by_the_second)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *TINY, "--fresh", "--out-dir", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert caught.value.code == 130
    path = tmp_path / "metrics.jsonl"
    said = f"interrupted; 2 of 4 rows are in {path}; start again without --fresh to go on\n"
    assert capsys.readouterr().err == said


def test_defaults_are_the_course_grid():
    config = parse(Config, [])
    assert (config.batch, config.head_dims, config.dtype, config.causal) == (8, (16, 32, 64, 128), "float32", True)
    on_gpu = config.on(torch.device("cuda"))
    assert on_gpu.lengths == (256, 1024, 4096, 8192, 16384)
    assert (on_gpu.warmup, on_gpu.iters) == (10, 100)
    config = parse(Config, ["--compile", "--no-causal", "--fresh", "--head-dims", "64", "--lengths", "1", "2"])
    assert (config.compile, config.causal, config.fresh, config.head_dims, config.lengths) == (
        True,
        False,
        True,
        (64,),
        (1, 2),
    )


@pytest.mark.parametrize(
    ("flags", "came", "allowed"),
    [
        (["--lengths"], "number of --lengths is 0", "at least 1"),
        (["--head-dims"], "number of --head-dims is 0", "at least 1"),
        (["--dtype", "int8"], "'int8'", "float32"),
        (["--iters", "many"], "many", "INT"),
    ],
)
def test_bad_flags_name_what_came_and_what_is_allowed(flags, came, allowed, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(Config, flags)
    assert caught.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert came in said and allowed in said
    assert "Traceback" not in said


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("not a row\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1"):
        main(parse(Config, [*TINY, "--out-dir", str(tmp_path)]))
