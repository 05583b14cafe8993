"""The report of registers, spills and shared memory, which needs Triton but no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .machine import TRITON_INSTALLED

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "compiled_kernels.py"


@pytest.mark.skipif(not TRITON_INSTALLED, reason="Triton is not installed")
def test_a_table_without_a_gpu(tmp_path):
    """Every kernel of an entry is compiled for its target, and its shared memory is what the GPU has at most."""
    markdown = tmp_path / "compiled.md"
    flags = ["--gpus", "ampere", "--head-dims", "16", "--dtypes", "bfloat16", "--markdown", str(markdown)]
    environment = {**os.environ, "TRITON_INTERPRET": "", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *flags, "--jobs", "1"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.strip("| ").split(" | ") for line in markdown.read_text(encoding="utf-8").splitlines()[4:7]]
    assert [line[4] for line in lines] == ["forward", "dk_dv", "dq"]
    for line in lines:
        assert line[1] == "sm_86" and 16 < int(line[6]) <= 255 and 0 < float(line[8]) < 99
