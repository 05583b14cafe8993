"""Shapes, layouts, scales and masks drawn at random: every result within the error budget, whatever came together.

On a GPU each case also leaves a line in runs/error_ratios.jsonl, from which scripts/error_ratios.py makes a table.
"""

import json
import math
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from cs336_systems.bench.record import Environment

from .layouts import LAYOUTS, contiguous
from .machine import DEVICE, INTERPRETED, INTERPRETER_BFLOAT16, NATIVE, both_flash, flash_function, skip_if
from .reference import (
    TENSORS,
    Case,
    Inputs,
    assert_within_budget,
    dense_attention,
    dense_errors,
    error_budgets,
    largest_error,
    run_attention,
)

# On a GPU 12 sets of parameters x 6 seeds x 8 cases of the kernels: 72 times the smallest there is, with which
# Hypothesis begins, and 504 others. Most are compiled anew, which takes seconds: seeds are tests of their own so that
# processes can share them, and only a few head dims stand for their kind.
EXAMPLES, SEEDS = (8, range(6)) if NATIVE else (8, range(1))
LONGEST = 700 if NATIVE else 90
HEAD_DIMS = {"d1-24": [1, 3, 16, 24], "d32-64": [32, 40, 64], "d80-128": [80, 96, 128], "d160-256": [160, 255, 256]}
RATIOS = Path("runs/error_ratios.jsonl")

sizes = st.integers(1, 3)
lengths = st.one_of(st.integers(1, LONGEST), st.sampled_from([1, 2, 16, 32, 64, 65]))
layouts = st.sampled_from([contiguous, *LAYOUTS])


@st.composite
def problems(draw, head_dims: list[int], dtype: torch.dtype, device: torch.device) -> tuple[Case, Inputs, bool]:
    """A case, its inputs with each tensor in a layout of its own, and whether the mask is causal."""
    leading = tuple(draw(st.lists(sizes, min_size=1, max_size=3)))
    case = Case(leading, draw(lengths), draw(lengths), draw(st.sampled_from(head_dims)))
    q, k, v, dO = case.draw(dtype, device, seed=draw(st.integers(0, 2**16)))
    sharpness, shift = draw(st.sampled_from([0.1, 1.0, 3.0])), draw(st.sampled_from([0.0, 1.0]))
    values = (q * sharpness, k * sharpness + shift, v + shift, dO)
    return case, Inputs(*(draw(layouts)(x) for x in values)), draw(st.booleans())


@cache
def environment() -> dict[str, object]:
    """Where this process runs: asked once, for it takes git and the driver's tool."""
    return asdict(Environment.capture(DEVICE))


def record(case: Case, is_causal: bool, inputs: Inputs, result) -> None:
    """Leave the error of each tensor, as a share of its budget and as a multiple of dense attention's error."""
    dtype = inputs.q.dtype
    exact, budgets = dense_attention(inputs, is_causal), error_budgets(inputs, is_causal, dtype)
    dense = dense_errors(inputs, is_causal, dtype)
    errors = {name: largest_error(getattr(result, name), getattr(exact, name)) for name in TENSORS}
    row = {
        "implementation": "flash_triton",
        "dtype": str(dtype).removeprefix("torch."),
        "case": str(case),
        "causal": is_causal,
        "share_of_budget": {name: _ratio(errors[name], budgets[name]) for name in TENSORS},
        "times_dense": {name: _ratio(errors[name], dense[name]) for name in TENSORS},
        **environment(),
    }
    RATIOS.parent.mkdir(exist_ok=True)
    with RATIOS.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row, allow_nan=False) + "\n")


def _ratio(error: float, to: float) -> float | None:
    """None where there is no such number: the test itself says that a NaN or an error above nothing is wrong."""
    return error / to if to and math.isfinite(error / to) else None


@pytest.mark.parametrize("head_dims", HEAD_DIMS.values(), ids=HEAD_DIMS.keys())
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["float32", "float16", "bfloat16"]
)
@pytest.mark.parametrize("draws", SEEDS)
@both_flash
def test_any_problem(flash, draws, dtype, head_dims):
    """Nothing that the other tests hold fixed, each by itself, matters in combination.

    The version in plain PyTorch is held to dense attention on the CPU: on a GPU the two would call different matmuls
    of cuBLAS, with errors of their own.
    """
    device = DEVICE if flash == "triton" else torch.device("cpu")
    if flash == "triton":
        skip_if(INTERPRETER_BFLOAT16 if INTERPRETED and dtype == torch.bfloat16 else None)

    @seed(f"{draws}, {dtype}, {head_dims}")  # its own, or every dtype and head dim would meet the same shapes
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        # Shrinking a failure compiles kernels for each attempt: on a GPU it takes many minutes.
        phases=[Phase.generate] if NATIVE else [Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(problems(head_dims, dtype, device))
    def check(problem):
        case, inputs, is_causal = problem
        result = run_attention(flash_function(flash), inputs, is_causal)
        if device.type == "cuda":
            record(case, is_causal, inputs, result)
        assert_within_budget(result, inputs, is_causal)

    check()
