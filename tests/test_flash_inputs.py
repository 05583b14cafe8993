"""Bad inputs and missing machinery: what is refused says what came."""

import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tests
from cs336_systems import launch
from cs336_systems.attention import ATTENTION
from cs336_systems.dense_backward import FlashAttention2TritonDenseBackward
from cs336_systems.kernels.tiles import KIB, Gpu

from .machine import (
    DEVICE,
    INTERPRETED,
    TRITON_INSTALLED,
    both_flash,
    flash_function,
    mock_gpu,
    needs_gpu,
    needs_triton,
    triton_missing_reason,
)
from .reference import Case, assert_within_budget, run_attention

ROOT = Path(__file__).resolve().parents[1]

TURING = Gpu("Tesla T4", (7, 5), 64 * KIB)
HALF, INTEGER, COMPLEX = torch.float16, torch.int64, torch.complex64


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device = DEVICE) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


META = torch.device("meta")
K, V = zeros(2, 11, 8), zeros(2, 11, 8)

# name -> q, k, v, and what the message has to contain.
BAD_INPUTS = {
    "one-dimension": (zeros(48), zeros(48), zeros(48), ["48"]),
    "no-dimension": (zeros(), zeros(), zeros(), ["()"]),
    "other-batch": (zeros(3, 9, 8), K, V, ["3, 9, 8", "2, 11, 8"]),
    "broadcast-batch": (zeros(1, 9, 8), K, V, ["1, 9, 8", "2, 11, 8"]),
    "fewer-leading": (zeros(9, 8), K, V, ["9, 8", "2, 11, 8"]),
    "more-leading": (zeros(5, 2, 9, 8), K, V, ["5, 2, 9, 8", "2, 11, 8"]),
    "other-head-dim": (zeros(2, 9, 12), K, V, ["2, 9, 12", "2, 11, 8"]),
    "other-value-dim": (zeros(2, 9, 8), K, zeros(2, 11, 7), ["2, 11, 8", "2, 11, 7"]),
    "more-values-than-keys": (zeros(2, 9, 8), K, zeros(2, 13, 8), ["2, 11, 8", "2, 13, 8"]),
    "wider-than-values": (zeros(2, 9, 24), zeros(2, 11, 24), zeros(2, 11, 16), ["2, 11, 24", "2, 11, 16"]),
    "fewer-heads": (zeros(2, 4, 9, 8), zeros(2, 2, 11, 8), zeros(2, 2, 11, 8), ["2, 4, 9, 8", "2, 2, 11, 8"]),
    "head-dim-0": (zeros(2, 9, 0), zeros(2, 11, 0), zeros(2, 11, 0), ["2, 9, 0"]),
    "mixed-dtypes": (zeros(2, 9, 8), K.to(HALF), V, ["float32", "float16"]),
    "mixed-devices": (zeros(2, 9, 8), K.to(META), V, ["meta", DEVICE.type]),
    "integers": (zeros(2, 9, 8).to(INTEGER), K.to(INTEGER), V.to(INTEGER), ["int64"]),
    "booleans": (zeros(2, 9, 8).bool(), K.bool(), V.bool(), ["bool"]),
    "complex": (zeros(2, 9, 8).to(COMPLEX), K.to(COMPLEX), V.to(COMPLEX), ["complex64"]),
    "a-list": ([[0.0, 1.0]], K, V, ["list"]),
    "sparse": (zeros(2, 9, 8).to_sparse(), K, V, ["q", "sparse"]),
}


def assert_refused(function: Callable[..., object], arguments: tuple[object, ...], words: list[str]) -> None:
    """The call raises a TypeError or ValueError of one line, which holds all of `words` and no value of a tensor."""
    with pytest.raises((TypeError, ValueError)) as error:
        function(*arguments)
    message = str(error.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{message!r} does not say {missing}"
    assert "\n" not in message and "tensor(" not in message and len(message) < 200


CHECKED = {
    "naive": ATTENTION["naive"].function,
    "pytorch": flash_function("pytorch"),
    "triton": flash_function("triton"),
    "dense_backward": FlashAttention2TritonDenseBackward.apply,
}


@pytest.mark.parametrize("bad", BAD_INPUTS)
@pytest.mark.parametrize("name", CHECKED)
def test_bad_input_is_named(name, bad):
    """A TypeError or ValueError that names what came, not an index error from some tile."""
    *inputs, words = BAD_INPUTS[bad]
    assert_refused(CHECKED[name], (*inputs, True), words)


@needs_triton
@pytest.mark.parametrize(
    ("x", "words"),
    [
        (zeros(2, 9, 257), ["257", "256"]),
        (zeros(2, 9, 8, dtype=torch.float64), ["float64"]),
    ],
    ids=["head-dim-257", "float64"],
)
def test_what_only_the_kernels_refuse(x, words):
    """Float64 and a head dim past 256 are refused before anything is compiled."""
    assert_refused(flash_function("triton"), (x, x, x, True), words)


# What the table of attentions says before any call.


def test_table_knows_what_the_kernels_refuse():
    """Where a call would raise there is a reason, and where there is none a call runs."""
    triton, tiled, naive = (ATTENTION[name] for name in ("flash_triton", "flash_pytorch", "naive"))
    assert (triton.unsupported_reason(DEVICE, torch.float32, 64) is None) == (triton_missing_reason() is None)
    assert "float64" in str(triton.unsupported_reason(DEVICE, torch.float64, 64))
    assert "257" in str(triton.unsupported_reason(DEVICE, torch.float32, 257))
    assert "257" in str(tiled.unsupported_reason(DEVICE, torch.float32, 257))
    assert naive.unsupported_reason(DEVICE, torch.float64, 257) is None
    if INTERPRETED and TRITON_INSTALLED:
        assert "bfloat16" in str(triton.unsupported_reason(DEVICE, torch.bfloat16, 64))


@pytest.mark.skipif(not TRITON_INSTALLED, reason="Triton is not installed")
def test_table_knows_what_a_gpu_lacks(monkeypatch):
    """On a mocked Tesla T4 there is no bfloat16, and too little shared memory for float32 rows of 256."""
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    mock_gpu(monkeypatch, TURING)
    with FakeTensorMode():  # for a tensor on a GPU that is not there
        reason = partial(ATTENTION["flash_triton"].unsupported_reason, torch.device("cuda"))
        assert "Tesla T4" in str(reason(torch.bfloat16, 64))
        assert "shared memory" in str(reason(torch.float32, 256))
        assert reason(torch.float16, 256) is None and reason(torch.float32, 64) is None


@needs_gpu
@needs_triton
def test_bfloat16_is_refused_before_any_launch(monkeypatch):
    """With the device's own answer replaced by Turing's, bfloat16 is refused by name, and the others run."""
    mock_gpu(monkeypatch, TURING)
    x = zeros(2, 16, 64, dtype=torch.bfloat16)
    assert_refused(flash_function("triton"), (x, x, x, True), ["bfloat16", "Tesla T4"])
    for dtype in (torch.float16, torch.float32):
        inputs = Case((2,), 100, 100, 64).draw(dtype, DEVICE)
        assert_within_budget(run_attention(flash_function("triton"), inputs, True), inputs, True)


# Other interpreters of Python: what is missing has to be missing from the start.


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh Python in the repository's root, with no GPU visible."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.skipif(not TRITON_INSTALLED, reason="Triton is not installed")
def test_cpu_tensors_without_the_interpreter():
    """Without TRITON_INTERPRET=1 the kernels take no CPU tensor and say how they would."""
    code = """
        import torch
        from cs336_systems.flash_triton import FlashAttention2Triton
        x = torch.zeros(2, 16, 16)
        try:
            FlashAttention2Triton.apply(x, x, x, True)
        except (TypeError, ValueError) as error:
            print(error)
    """
    finished = run_python(code, TRITON_INTERPRET="0")
    assert finished.returncode == 0, finished.stderr
    assert "cpu" in finished.stdout.lower() and "TRITON_INTERPRET" in finished.stdout


def test_without_triton():
    """With Triton hidden everything imports, the tiled and naive versions work, the kernels say why."""
    code = """
        import sys
        sys.modules["triton"] = None
        import torch
        from cs336_systems.attention import ATTENTION
        from cs336_systems.flash_pytorch import FlashAttention2Pytorch
        from cs336_systems.flash_triton import FlashAttention2Triton
        q, k, v = (torch.randn(2, 9, 8, requires_grad=True) for _ in range(3))
        o = FlashAttention2Pytorch.apply(q, k, v, True)
        torch.testing.assert_close(o, ATTENTION["naive"].function(q, k, v, True))
        o.sum().backward()
        assert q.grad is not None
        try:
            FlashAttention2Triton.apply(q, k, v, True)
        except Exception as error:
            print(type(error).__name__, error)
        else:
            sys.exit("the kernels ran without Triton")
        assert "not installed" in ATTENTION["flash_triton"].unsupported_reason(q.device, q.dtype, 8)
    """
    finished = run_python(code)
    assert finished.returncode == 0, finished.stderr
    assert "Triton" in finished.stdout and "not installed" in finished.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about a machine without a GPU")
def test_suite_asks_for_the_interpreter_by_itself(monkeypatch):
    """Importing the tests' package is enough to have the kernels interpreted; a user's own word counts more.

    That it comes before Triton is imported shows in every test of the kernels.
    """
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    importlib.reload(tests)
    assert os.environ["TRITON_INTERPRET"] == "1"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    importlib.reload(tests)
    assert os.environ["TRITON_INTERPRET"] == "0"


NO_BOOLS = {
    "text": ("no", "'no'"),
    "number": (1, "1"),
    "none": (None, "None"),
    "scalar": (torch.tensor(True), "a tensor of shape () and dtype torch.bool"),
    "mask": (torch.ones(9, 11, dtype=torch.bool), "a tensor of shape (9, 11) and dtype torch.bool"),
    "bias": (torch.full((2, 9, 11), 0.5, device=DEVICE), "a tensor of shape (2, 9, 11) and dtype torch.float32"),
    "NumPy's": (np.bool_(True), "a numpy.bool"),
    "list": ([[True] * 11] * 9, "a list"),
}


@pytest.mark.parametrize("flag", NO_BOOLS)
@pytest.mark.parametrize("name", CHECKED)
def test_is_causal_is_a_bool(name, flag):
    """A mask passed in the place of is_causal is a likely mistake, and neither true nor false."""
    given, described = NO_BOOLS[flag]
    words = [f"is_causal must be True or False, got {described}"]
    assert_refused(CHECKED[name], (zeros(2, 9, 8), K, V, given), words)


@pytest.mark.parametrize("flag", NO_BOOLS)
@pytest.mark.parametrize("name", ["triton", "dense_backward"])
def test_hopper_is_a_bool(name, flag):
    given, described = NO_BOOLS[flag]
    words = [f"hopper must be True or False, got {described}"]
    assert_refused(CHECKED[name], (zeros(2, 9, 8), K, V, True, given), words)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@both_flash
def test_nested_tensors_are_refused(flash):
    nested = torch.nested.nested_tensor([torch.zeros(9, 8), torch.zeros(7, 8)], device=DEVICE)
    with pytest.raises(TypeError, match="q must be a dense tensor, got a nested one"):
        flash_function(flash)(nested, K, V, True)


@both_flash
def test_meta_tensors(flash):
    """Shapes can be worked out without data, gradients included; the meta device has no autocast to switch off."""
    q, k, v = (torch.empty(2, n, 8, device=META, requires_grad=True) for n in (9, 11, 11))
    o = flash_function(flash)(q, k, v, True)
    o.sum().backward()
    assert o.shape == q.shape
    assert q.grad is not None and q.grad.shape == q.shape
