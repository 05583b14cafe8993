"""bench.workload: what the equations say, against numbers worked out by hand."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from cs336_systems.attention import ATTENTION
from cs336_systems.bench.workload import MIB, AttentionShape

from .bench_examples import CPU, shape

COURSE = AttentionShape(batch=8, heads=1, n_queries=1024, n_keys=1024, d=64, dtype=torch.float32, causal=False)


@pytest.mark.parametrize(("pass_", "times"), [("forward", 1), ("backward", 2.5), ("forward_backward", 3.5)])
def test_flops(pass_, times):
    assert COURSE.flops(pass_) == times * 4 * 8 * 1024 * 1024 * 64
    assert replace(COURSE, causal=True).flops(pass_) == COURSE.flops(pass_) / 2


def test_bytes():
    assert COURSE.io_bytes == 4 * 2 * MIB  # q, k, v and o of 8 x 1024 x 64 float32
    assert COURSE.scores == 8 * MIB
    assert COURSE.bytes_before_backward(0) == 8 * MIB + 8 * 1024 * 4  # and L
    assert COURSE.bytes_before_backward(8) == (8 + 64) * MIB  # what keeps scores keeps no L
    assert replace(COURSE, n_keys=512).scores == 4 * MIB
    # Only what keeps a score matrix needs more of them in its backward.
    assert COURSE.peak_bytes(0) < 32 * MIB < COURSE.peak_bytes(4)


def _peak_bytes_allocated(run) -> int:
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_peak_is_what_the_allocator_counts(dtype, causal):
    """Its softmax works in float32 whatever the dtype, so half precision needs hardly less."""
    naive = ATTENTION["naive"]
    small = AttentionShape(batch=4, heads=1, n_queries=256, n_keys=256, d=8, dtype=dtype, causal=causal)

    def backward_twice():
        q, k, v = small.inputs(CPU)
        dO = small.output_gradient(CPU)
        o = naive.function(q, k, v, causal)
        for _ in range(2):
            torch.autograd.grad(o, (q, k, v), dO, retain_graph=True)

    counted = _peak_bytes_allocated(backward_twice)
    assert small.peak_bytes(naive.saved_bytes_per_score(dtype)) == pytest.approx(counted, rel=0.03)


def test_inputs_are_seeded_leaves():
    ragged = replace(shape(), n_queries=5, n_keys=7, dtype=torch.bfloat16)
    q, k, v = ragged.inputs(CPU)
    assert (q.shape, k.shape, v.shape) == ((2, 1, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8))
    assert ragged.output_gradient(CPU).shape == q.shape
    assert all(x.is_leaf and x.requires_grad and x.dtype == torch.bfloat16 for x in (q, k, v))
    assert not torch.equal(k, v)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), ragged.inputs(CPU), strict=True))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch": 0}, "batch is 0; allowed is at least 1"),
        ({"n_keys": -3}, "n_keys is -3"),
        ({"d": 0}, "d is 0; allowed is at least 1"),
        ({"dtype": torch.int8}, "dtype is torch.int8; allowed are float32, float16, bfloat16"),
    ],
)
def test_bad_shape_names_what_came(change, text):
    with pytest.raises(ValueError, match=text):
        replace(shape(), **change)
