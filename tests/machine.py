"""What this machine can run, and the marks and parameters that follow from it.

Not a conftest.py: the course's own conftest may replace ours, and these names have to outlive it.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from cs336_systems import dense_backward, launch, launch_hopper
from cs336_systems.bench import accuracy
from cs336_systems.bench.cli import parse
from cs336_systems.kernels.tiles import Gpu

from .adapters import get_flashattention_autograd_function_pytorch, get_flashattention_autograd_function_triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NATIVE = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if NATIVE else "cpu")
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None

INTERPRETER_BFLOAT16 = "the interpreter's bfloat16 tl.dot is garbage"


def triton_missing_reason() -> str | None:
    """Why no Triton kernel can run here, or None where one can."""
    if not TRITON_INSTALLED:
        return "Triton is not installed"
    if not (NATIVE or INTERPRETED):
        return "Triton needs a GPU, or TRITON_INTERPRET=1"
    return None


def compiling_environment() -> dict[str, str]:
    """For a process that compiles as Triton does by itself: torch.compile may have set this one another assembler."""
    return {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "TRITON_PTXAS_PATH")}


def broken_assembler(folder: Path) -> str:
    """The path of a ptxas that has a version of its own, and assembles nothing."""
    ptxas = folder / "ptxas"
    ptxas.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "release 12.7, V12.7.1" || exit 1\n')
    ptxas.chmod(0o755)
    return str(ptxas)


def compile_missing_reason() -> str | None:
    """Why torch.compile cannot generate code here, or None where it can."""
    if not NATIVE and not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        return "torch.compile needs a C++ compiler on a CPU"
    return None


def run_without_gpu(script: ModuleType, *flags: str) -> None:
    """main() of the script, in a process that sees no GPU: in this one if there is none.

    The other process checks implementations at the length that `accuracy.CHECK_LENGTH` has here.
    """
    if not torch.cuda.is_available():
        script.main(parse(script.Config, flags))
        return
    code = (
        "import importlib, sys; from cs336_systems.bench import accuracy; from cs336_systems.bench.cli import parse; "
        f"accuracy.CHECK_LENGTH = {accuracy.CHECK_LENGTH}; script = importlib.import_module({script.__name__!r}); "
        "script.main(parse(script.Config, sys.argv[1:]))"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, *flags], env=environment, check=True, timeout=600)


def without_inductor_on_cpu(monkeypatch) -> None:
    """Lets the dense backward be traced alone on a CPU, where inductor takes up to a minute; a GPU takes the whole way.

    `test_agreement` has inductor compile it on a CPU too.
    """
    torch.compiler.reset()
    if not NATIVE:
        traced = torch.compile(dense_backward.dense_backward, fullgraph=True, backend="aot_eager")
        monkeypatch.setattr(dense_backward, "compiled_dense_backward", traced)


def skip_if(reason: str | None) -> None:
    """Skips the running test where there is a reason to."""
    if reason is not None:
        pytest.skip(reason)


needs_gpu = pytest.mark.skipif(not NATIVE, reason="needs a GPU")
needs_triton = pytest.mark.skipif(triton_missing_reason() is not None, reason=triton_missing_reason() or "")

# For tests of both Functions: `flash` is the name that `flash_function` takes.
both_flash = pytest.mark.parametrize("flash", ["pytorch", pytest.param("triton", marks=needs_triton)])
both_causal = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


def flash_function(flash: str):
    """The `.apply` of the Function with that name, `pytorch` or `triton`."""
    get = {
        "pytorch": get_flashattention_autograd_function_pytorch,
        "triton": get_flashattention_autograd_function_triton,
    }[flash]
    return get().apply


def mock_gpu(monkeypatch, gpu: Gpu) -> None:
    """Every device is this GPU. What was decided for another does not count, and afterwards counts again."""
    monkeypatch.setattr(launch, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(launch, "_launches", {})
    monkeypatch.setattr(launch_hopper, "suits", lru_cache(launch_hopper.suits.__wrapped__))
