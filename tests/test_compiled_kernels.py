"""The report of registers, spills and shared memory, which needs Triton but no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .machine import TRITON_INSTALLED

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "compiled_kernels.py"


@pytest.mark.skipif(not TRITON_INSTALLED, reason="Triton is not installed")
def test_entries_that_spill_nothing(tmp_path):
    """An entry of each table that spills nowhere, compiled for its target, spills nothing and fits the GPU.

    A sample: all entries take minutes. `runs/h200/compiled_kernels.md` has them.
    """
    markdown = tmp_path / "compiled.md"
    flags = ["--gpus", "turing", "ampere", "a100", "blackwell", "--head-dims", "64", "--dtypes", "bfloat16"]
    environment = {**os.environ, "TRITON_INTERPRET": "", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
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
