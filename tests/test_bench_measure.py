"""bench.measure: what lies inside the timed part, and that memory read is the memory that the equations name."""

import gc
import os
import time
from dataclasses import replace

import pytest
import torch

from cs336_systems.bench import measure
from cs336_systems.bench.measure import IN_GRAPH, Passes, available_bytes, memory_before_backward, time_call, time_pass
from cs336_systems.bench.workload import MIB, PASSES

from .bench_examples import CPU, SHORT, plain_attention, shape
from .machine import needs_gpu


def test_warm_up_is_not_timed():
    naps = [0.05, 0.05, 0.001, 0.001, 0.001, 0.02]
    calls = iter(naps)
    timing = time_call(lambda: time.sleep(next(calls)), CPU, Passes(warmup=2, iterations=4))
    assert not list(calls)
    assert 1 <= timing.p20_ms <= timing.median_ms <= timing.p80_ms
    assert timing.median_ms < 20, "the median took warm-up passes in"


class _CountedBackward(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grad_outputs):
        _CountedBackward.calls += 1
        return grad_outputs[0]


@pytest.mark.parametrize("pass_", ["backward", "forward_backward"])
def test_the_first_backward_is_not_timed_even_without_warm_up(pass_, monkeypatch):
    """A compiled backward is compiled when it first runs."""
    monkeypatch.setattr(_CountedBackward, "calls", 0)

    def attention(*arguments):
        return _CountedBackward.apply(plain_attention(*arguments))

    timing = time_pass(attention, shape(), pass_, CPU, Passes(warmup=0, iterations=1))
    assert (timing.iterations, _CountedBackward.calls) == (1, 2)


@pytest.mark.parametrize(
    ("budget", "text"), [((-1, 1), "warmup is -1"), ((0, 0), "iterations is 0; allowed is at least 1")]
)
def test_bad_budget(budget, text):
    with pytest.raises(ValueError, match=text):
        Passes(*budget)


@pytest.mark.parametrize("pass_", PASSES)
def test_no_gradient_accumulates(pass_, monkeypatch):
    """A backward that adds to q.grad reads and writes three more tensors than the backward does."""
    leaves, forwards = [], []
    make = measure.AttentionShape.inputs

    def recorded_inputs(self, device, seed=0):
        leaves.extend(made := make(self, device, seed))
        return made

    def counted(q, k, v, is_causal):
        forwards.append(torch.is_grad_enabled())
        return plain_attention(q, k, v, is_causal)

    monkeypatch.setattr(measure.AttentionShape, "inputs", recorded_inputs)
    time_pass(counted, shape(), pass_, CPU, Passes(warmup=1, iterations=3))
    assert len(leaves) == 3
    assert all(leaf.grad is None for leaf in leaves)
    # The backward repeats on one graph; the others build theirs each time, warm-up included.
    assert forwards == [True] * (1 if pass_ == "backward" else 5)


@pytest.mark.parametrize("n", [16, 100])
def test_memory_on_cpu_is_what_the_graph_holds(n):
    """Exactly q, k, v, o and the probabilities, each storage once."""
    full = shape(n=n, causal=False)
    expected = full.bytes_before_backward(saved_bytes_per_score=4)
    assert memory_before_backward(plain_attention, full, CPU) == expected
    # Causal: also the mask, one byte an entry, shared by the batch.
    assert memory_before_backward(plain_attention, replace(full, causal=True), CPU) == expected + n * n


def test_memory_counts_views_once():
    def views(q, k, v, is_causal):
        return (q[..., :4] * q[..., 4:]).sum() + 0 * (k + v)  # saves two views of q

    tiny = shape()
    assert memory_before_backward(views, tiny, CPU) == tiny.io_bytes


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="the system does not say how much memory it has")
def test_available_memory_is_plausible():
    available = available_bytes()
    assert available is not None and 64 * MIB < available < 2**50


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="the system does not say how much memory it has")
def test_available_memory_without_proc(monkeypatch):
    def missing(path, **_):
        raise FileNotFoundError(path)

    monkeypatch.setattr("builtins.open", missing)
    available = available_bytes()
    assert available is not None and 64 * MIB < available < 2**50
    monkeypatch.delattr(measure.os, "sysconf")  # as on Windows
    assert available_bytes() is None


@needs_gpu
def test_memory_on_gpu_is_near_the_equations():
    """Read after warm-up with a backward, and still without what the backward allocated at its peak."""
    device = torch.device("cuda")
    big = replace(shape(n=1024, d=16, causal=False), batch=8)
    time_pass(plain_attention, big, "forward_backward", device, SHORT)
    predicted = big.bytes_before_backward(saved_bytes_per_score=4)
    assert memory_before_backward(plain_attention, big, device) == pytest.approx(predicted, rel=0.02)


@needs_gpu
def test_memory_on_gpu_leaves_out_what_is_collected_meanwhile():
    """What only a reference cycle holds is freed when Python next looks for cycles, which may be during the reading."""
    device, big = torch.device("cuda"), replace(shape(n=1024, d=16, causal=False), batch=8)
    expected = memory_before_backward(plain_attention, big, device)
    cycle = [torch.zeros(MIB, device=device)]
    cycle.append(cycle)
    holders = [cycle]
    del cycle

    def attention(*arguments):
        gc.collect()
        holders.clear()
        return plain_attention(*arguments)

    assert memory_before_backward(attention, big, device) == expected


@needs_gpu
def test_a_captured_pass_is_replayed():
    """It is not called again, and what it reads stays where it was."""
    device, results = torch.device("cuda"), []

    def attention(*arguments):
        o = plain_attention(*arguments)
        results.append(o.detach())  # without its graph, which would keep q, k and v
        return o

    replay = IN_GRAPH["forward_backward"](attention, shape(), device)
    first, captured = results
    expected = first.clone()
    for _ in range(3):
        captured.zero_()
        others = [torch.full((256, 1024), 7.0, device=device) for _ in range(50)]  # in whatever has been freed
        replay()
        torch.testing.assert_close(captured, expected)
    assert len(results) == 2 and others


@needs_gpu
@pytest.mark.alone
def test_gpu_passes_start_from_a_cold_cache():
    """A copy that fits into L2 has to come from memory: slower than the same copy with nothing in between."""
    device = torch.device("cuda")
    source = torch.zeros(8 * MIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    cold = time_call(lambda: target.copy_(source), device, Passes(10, 50)).median_ms
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10**8)  # until all copies are queued: the host's pace must not count
    start.record()
    for _ in range(200):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    assert cold > start.elapsed_time(end) / 200
