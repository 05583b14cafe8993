"""The report of registers, spills and shared memory, which needs Triton but no GPU."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cs336_systems import cubin
from cs336_systems.bench.record import ROW_BEGINS
from cs336_systems.bench.report import Table
from cs336_systems.kernels.tiles import GPUS, KERNELS, KIB, padded_head_dim, shared_memory_bound
from cs336_systems.tile_search import tile_from_text

from .machine import TRITON_INSTALLED, broken_assembler, compiling_environment

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "compiled_kernels.py"
COMPILED = ROOT / "runs" / "h200" / "compiled_kernels.md"


def test_every_compiled_entry_fits():
    """What Triton allots to each entry, by the committed table, is within its GPU and within the bound for it."""
    lines = [line.strip("| ").split(" | ") for line in COMPILED.read_text(encoding="utf-8").splitlines()]
    entries = [line for line in lines if len(line) == 10 and line[1].startswith("sm_")]
    gpus, kernels = {gpu.name: gpu for gpu in GPUS.values()}, {kernel.name: kernel for kernel in KERNELS}
    assert {gpu for gpu, *_ in entries} == gpus.keys() and len(entries) >= 400
    for gpu, _, dtype, d, kernel, _, tile, *_, shared in entries:
        if shared != "-":  # there is no such entry
            needed, width = float(shared) * KIB, padded_head_dim(int(d))
            bound = shared_memory_bound(kernels[kernel], tile_from_text(tile), width, getattr(torch, dtype), gpus[gpu])
            assert needed <= gpus[gpu].shared_memory, (gpu, dtype, d, kernel, tile)
            assert needed <= bound + (17 * KIB if width <= 32 else 0), (gpu, dtype, d, kernel, tile)


@pytest.mark.skipif(not TRITON_INSTALLED, reason="Triton is not installed")
def test_entries_that_spill_nothing(tmp_path):
    """An entry of each table that spills nowhere, compiled for its target, spills nothing and fits the GPU.

    A sample: all entries take minutes. `runs/h200/compiled_kernels.md` has them.
    """
    markdown = tmp_path / "compiled.md"
    flags = ["--gpus", "turing", "ampere", "a100", "blackwell", "--head-dims", "64", "--dtypes", "bfloat16"]
    environment = {**compiling_environment(), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *flags, "--masks", "causal", "--markdown", str(markdown), "--jobs", "2"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.strip("| ").split(" | ") for line in markdown.read_text(encoding="utf-8").splitlines()[4:16]]
    assert [line[4] for line in lines] == 4 * ["forward", "dk_dv", "dq"]
    targets = {"sm_75": 64, "sm_86": 99, "sm_80": 163, "sm_100": 227}
    assert [line[1] for line in lines[::3]] == list(targets)
    for line in lines:
        registers, stack, shared = map(float, line[7:])
        assert 16 < registers <= 255 and stack == 0 and 0 < shared <= targets[line[1]], line


@pytest.mark.skipif(not TRITON_INSTALLED, reason="Triton is not installed")
def test_entries_are_listed_once_and_what_is_missing_is_said():
    script = runpy.run_path(str(SCRIPT))
    config = script["Config"](gpus=("turing",), head_dims=(256,), dtypes=("bfloat16", "float16", "float32"))
    found, refusals = script["entries"](config)
    assert [(entry.kernel, entry.dtype) for entry in found] == [
        (kernel, "float16") for kernel in ("forward", "dk_dv", "dq") for _ in config.masks
    ]
    assert len(refusals) == 1 and refusals[0].startswith("Turing, float32, d = 256: Turing has 65536 bytes")
    for d in (0, 257):
        with pytest.raises(ValueError, match=f"--head-dims has {d}; allowed are 1 to 256"):
            script["Config"](head_dims=(d,))


def failure(script: str, *flags: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one line that the script ends with."""
    monkeypatch.setattr(sys, "argv", [script, *flags])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(SCRIPT.with_name(script)), run_name="__main__")
    line = str(caught.value.code)  # a text is printed, and the exit code is 1
    assert line.startswith("error: ") and "\n" not in line
    return line


@pytest.mark.skipif(not TRITON_INSTALLED, reason="Triton is not installed")
@pytest.mark.parametrize("script", ["compiled_kernels.py", "instruction_order.py"])
def test_nothing_is_compiled_in_vain(script, monkeypatch):
    monkeypatch.setattr(cubin, "is_interpreted", lambda: True)
    line = failure(script, monkeypatch=monkeypatch)
    assert line == "error: TRITON_INTERPRET is set, and Triton compiles nothing then; unset it"


def test_no_table_goes_over_rows(tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(ROW_BEGINS + b'"naive"}\n')
    line = failure("compiled_kernels.py", "--markdown", str(rows), monkeypatch=monkeypatch)
    assert line.endswith("which holds rows of a benchmark; tables would overwrite them")
    assert rows.read_bytes().startswith(ROW_BEGINS)


@pytest.mark.skipif(not TRITON_INSTALLED, reason="Triton is not installed")
def test_the_table_is_written_before_it_is_printed(tmp_path, monkeypatch):
    def closed(table, console):
        raise BrokenPipeError

    monkeypatch.setattr(cubin, "is_interpreted", lambda: False)
    monkeypatch.setattr(Table, "print", closed)
    script = runpy.run_path(str(SCRIPT))
    monkeypatch.setitem(script["main"].__globals__, "entries", lambda config: ([], []))
    with pytest.raises(BrokenPipeError):
        script["main"](script["Config"](markdown=tmp_path / "table.md", jobs=1))
    assert "0 of 0 spill" in (tmp_path / "table.md").read_text(encoding="utf-8")


@pytest.mark.skipif(not TRITON_INSTALLED or os.name != "posix", reason="Triton is not installed, or no shell")
def test_what_could_not_be_compiled_is_an_error(tmp_path):
    """The table says why, and does not count it among those that spill nothing."""
    flags = ["--gpus", "a100", "--head-dims", "16", "--dtypes", "bfloat16", "--masks", "full", "--jobs", "2"]
    environment = {**compiling_environment(), "TRITON_PTXAS_PATH": broken_assembler(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode != 0 and "error: 3 of 3 could not be compiled; the table says why" in done.stderr
    assert done.stdout.count("PTXASError") == 3 and "0 of 0 spill" in done.stdout


def test_scripts_say_in_one_line_what_they_lack(tmp_path, monkeypatch):
    line = failure("error_ratios.py", str(tmp_path / "missing.jsonl"), monkeypatch=monkeypatch)
    assert line == f"error: there is no {tmp_path / 'missing.jsonl'}; the property tests write it on a GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = failure("ragged_launches.py", monkeypatch=monkeypatch)
    assert line == "error: this needs a GPU, and there is none here"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("tools", "said"),
    [([], "compute-sanitizer is not installed here"), (["memchek"], "no tool is called memchek; there are: memcheck")],
)
def test_the_sanitizer_says_in_one_line_what_it_lacks(tools, said):
    if shutil.which("compute-sanitizer") and not tools:
        pytest.skip("it is here")
    command = ["bash", str(SCRIPT.with_name("sanitize.sh")), *tools]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1
