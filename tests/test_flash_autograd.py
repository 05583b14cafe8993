"""The FlashAttention-2 Functions as parts of autograd, autocast and torch.compile."""

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from cs336_basics.model import BasicsTransformerLM
from cs336_basics.nn_utils import cross_entropy
from cs336_systems import dense_backward, launch, launch_hopper
from cs336_systems.attention import ATTENTION
from cs336_systems.flash_pytorch import FlashAttention2Pytorch, flash_backward, flash_forward
from cs336_systems.flash_triton import _as_kernels_take

from .layouts import batch_last, negative_view
from .machine import (
    DEVICE,
    INTERPRETED,
    INTERPRETER_BFLOAT16,
    NATIVE,
    both_causal,
    both_flash,
    flash_function,
    needs_gpu,
    needs_triton,
    skip_if,
    triton_missing_reason,
    without_inductor_on_cpu,
)
from .reference import Case, Inputs, Result, assert_within_budget, dense_attention, run_attention, saved_log_sum_exps

CASE = Case((2, 2), 40, 50, 16)


def leaves(inputs: Inputs, wanted: str = "qkv") -> list[torch.Tensor]:
    """q, k and v, of which those in `wanted` require a gradient."""
    return [x.detach().requires_grad_(name in wanted) for name, x in zip("qkv", inputs, strict=False)]


# Which gradients.


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv"])
@both_flash
def test_only_wanted_gradients(flash, wanted):
    """Inputs that require no gradient get none, and the others get the right one."""
    inputs = CASE.draw(torch.float32, DEVICE)
    q, k, v = leaves(inputs, wanted)
    o = flash_function(flash)(q, k, v, True)
    o.backward(inputs.dO)
    for name, x in zip("qkv", (q, k, v), strict=True):
        assert (x.grad is not None) == (name in wanted), name
    interpreted = flash == "triton" and INTERPRETED
    assert_within_budget(Result(o.detach(), None, q.grad, k.grad, v.grad, interpreted), inputs, True)


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_tiled_backward_returns_only_what_is_needed(wanted):
    """`needs` reaches the loops, and what is not needed is not returned."""
    inputs = CASE.draw(torch.float32, DEVICE)
    q, k, v, dO = inputs
    o, L = flash_forward(q, k, v, True)
    needs = tuple(name in wanted for name in "qkv")
    gradients = flash_backward(q, k, v, o, dO, L, True, needs)
    assert tuple(gradient is not None for gradient in gradients) == needs
    assert_within_budget(Result(o, L, *gradients), inputs, True)


def matmuls_and_launches(flash: str, wanted: str) -> int:
    """How many matrix products, or launches of kernels that form such, a backward for `wanted` runs."""
    inputs = CASE.draw(torch.float32, DEVICE)
    o = flash_function(flash)(*leaves(inputs, wanted), True)
    with (
        mock.patch.object(launch, "launch_kernel", wraps=launch.launch_kernel) as launched,
        profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler,
    ):
        o.backward(inputs.dO)
    names = [event.name for event in profiler.events()]
    with_products = [call for call in launched.call_args_list if call.args[0].flags.get("WANTS_DQ", True)]
    return len(with_products) + sum(name in ("aten::mm", "aten::bmm") for name in names)


@pytest.mark.parametrize(
    ("flash", "wanted", "share"),
    [
        *[("pytorch", wanted, n / 5) for wanted, n in (("v", 2), ("q", 3), ("k", 3), ("kv", 4), ("qk", 4))],
        *[pytest.param("triton", wanted, 1 / 2, marks=needs_triton) for wanted in ("q", "k", "v", "kv")],
    ],
)
def test_unwanted_gradients_cost_nothing(flash, wanted, share):
    """A gradient that nobody needs is not computed and thrown away: of five products, or two kernels, these remain."""
    assert matmuls_and_launches(flash, wanted) == share * matmuls_and_launches(flash, "qkv") > 0


def test_masked_tiles_are_not_visited():
    """Of 4 x 4 tiles a causal mask leaves 10, with two products each in the forward and five in the backward."""
    inputs = Case((1,), 512, 512, 4).draw(torch.float32, DEVICE)
    products = []
    for is_causal in (False, True):
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            run_attention(FlashAttention2Pytorch.apply, inputs, is_causal)
        products.append(sum(event.name in ("aten::mm", "aten::bmm") for event in profiler.events()))
    assert products == [16 * 7, 10 * 7]


@both_flash
def test_batches_of_gradients_raise(flash):
    """As in torch.autograd.functional.jacobian(…, vectorize=True): an error of this project's, not one from inside."""
    q, k, v = leaves(CASE.draw(torch.float32, DEVICE))
    o = flash_function(flash)(q, k, v, True)
    with pytest.raises(RuntimeError, match="takes one dO at a time, not a batch of them"):
        torch.autograd.grad(o, q, torch.randn(3, *o.shape, device=DEVICE), is_grads_batched=True)


@both_flash
def test_gradient_of_zeros_without_memory(flash):
    """PyTorch hands such zeros on where it knows that a gradient vanishes."""
    q, k, v = leaves(CASE.draw(torch.float32, DEVICE))
    zeros = torch._efficientzerotensor(q.shape, device=DEVICE)
    assert not any(x.any() for x in torch.autograd.grad(flash_function(flash)(q, k, v, True), (q, k, v), zeros))


@both_flash
def test_flops_are_counted(flash):
    """By PyTorch's own counter, as for its attentions: seven matmuls, and a causal mask is not counted off."""
    inputs = Case((2, 3), 30, 20, 16).draw(torch.float32, DEVICE)
    with FlopCounterMode(display=False) as counter:
        run_attention(flash_function(flash), inputs, False)
    assert counter.get_total_flops() == 7 * 2 * (2 * 3 * 30 * 20 * 16)


@needs_triton
def test_ops_outlive_a_reload():
    """As of a notebook's autoreload: the ops are there once, and call what the module has now."""
    code = """
import importlib, torch
from cs336_systems import flash_triton
importlib.reload(flash_triton)
flash_triton._launch_forward = lambda launches, q, k, v, is_causal, hopper: (q + 1, q[..., 0] + 2)
o, L = torch.ops.cs336_systems.flash_forward(*torch.zeros(3, 2, 4, 8), False, True)
print(o.sum().item(), L.sum().item(), torch.ops.cs336_systems.flash_forward(*torch.zeros(3, 2, 4, 8, device="meta"),
      False, True)[1].shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "64.0 16.0 torch.Size([2, 4])\n", done.stderr


@needs_triton
def test_whoever_looks_on_sees_opaque_ops():
    """Fake tensors and dispatch modes meet the custom ops, not the launches inside, which would want real memory."""
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    inputs = CASE.draw(torch.float32, DEVICE)
    with Watching():
        run_attention(flash_function("triton"), inputs, True)
    ops = ("flash_forward", "flash_backward")
    assert [name for name in seen if "flash" in name] == [f"cs336_systems.{op}.default" for op in ops]
    with FakeTensorMode() as mode:
        fake = Inputs(*(mode.from_tensor(x) for x in inputs))
        result = run_attention(flash_function("triton"), fake, True)
    assert result.dk is not None and result.dk.shape == inputs.k.shape and isinstance(result.o, FakeTensor)


@needs_triton
def test_a_gradient_of_q_that_nobody_wants_takes_no_room():
    q, k, v, dO = CASE.draw(torch.float32, DEVICE)
    o, L = launch.launch_forward(q, k, v, True)
    dq, L_base, delta = launch.launch_dq(q, k, v, o, dO, L, True, wants_dq=False)
    assert dq.numel() == 0 and L_base.shape == delta.shape == L.shape


def test_any_tensor_that_is_not_plain_is_looked_on_by_somebody(monkeypatch):
    """Not only q: a launch would ask a subclass, a fake or a meta tensor for an address that it has not."""

    class Wrapped(torch.Tensor):
        pass

    monkeypatch.setattr(launch, "_launches", {})

    def is_launched(*inputs):
        taken, launches = _as_kernels_take(lambda *inputs: inputs, True, *inputs)
        assert all(x is given for x, given in zip(taken, inputs, strict=True))
        return launches is not None

    plain, parameter = torch.zeros(2), torch.nn.Parameter(torch.zeros(2))
    assert is_launched(plain, parameter)
    assert not is_launched(plain, plain.as_subclass(Wrapped))
    assert not is_launched(torch.zeros(2, device="meta"))


@both_flash
def test_no_graph_without_a_gradient(flash):
    """Inputs that require no gradient give an output that requires none."""
    q, k, v, _ = CASE.draw(torch.float32, DEVICE)
    o = flash_function(flash)(q, k, v, True)
    assert o.grad_fn is None and not o.requires_grad


@both_flash
def test_gradients_accumulate(flash):
    """Two backward passes on one graph give twice the gradient: nothing that was saved is overwritten."""
    inputs = CASE.draw(torch.float32, DEVICE)
    q, k, v = leaves(inputs)
    o = flash_function(flash)(q, k, v, True)
    o.backward(inputs.dO, retain_graph=True)
    once = [x.grad.clone() for x in (q, k, v) if x.grad is not None]
    o.backward(inputs.dO)
    for x, gradient in zip((q, k, v), once, strict=True):
        torch.testing.assert_close(x.grad, 2 * gradient)


# What is saved.


@pytest.mark.parametrize("case", [Case((4,), 128, 128, 64), Case((2, 3), 33, 50, 16), Case((), 17, 5, 3)], ids=str)
@both_causal
@both_flash
def test_one_saved_log_sum_exp(flash, is_causal, case):
    """Of the saved tensors one has an entry a query, and it is the natural log-sum-exp, not base 2."""
    inputs = case.draw(torch.float32, DEVICE)
    saved = saved_log_sum_exps(flash_function(flash)(*leaves(inputs), is_causal))
    assert len(saved) == 1
    expected = dense_attention(inputs, is_causal).L
    assert expected is not None
    torch.testing.assert_close(saved[0], expected.float(), rtol=1e-5, atol=1e-5)


@contextmanager
def garbage_collector_off():
    """Only reference counts free memory inside the block, as between two steps of a training loop."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@both_flash
def test_nothing_is_kept_without_grad(flash):
    """Under no_grad the output holds on to none of the inputs."""
    with garbage_collector_off():
        inputs = [x.requires_grad_() for x in CASE.draw(torch.float32, DEVICE)[:3]]
        alive = [weakref.ref(x) for x in inputs]
        with torch.no_grad():
            o = flash_function(flash)(*inputs, True)
        assert o.grad_fn is None
        del inputs
        assert [x() for x in alive] == [None, None, None]


@pytest.mark.parametrize("backward", [False, True], ids=["forward-only", "with-backward"])
@both_flash
def test_nothing_leaks(flash, backward):
    """With the output goes all that was saved for a backward, whether it ran or not; no reference cycle."""
    with garbage_collector_off():
        inputs = [x.requires_grad_() for x in CASE.draw(torch.float32, DEVICE)[:3]]
        o = flash_function(flash)(*inputs, True)
        alive = [weakref.ref(x) for x in (*inputs, o)]
        if backward:
            o.sum().backward()
        del inputs
        if not backward:
            assert alive[0]() is not None, "the graph should hold q for the backward"
        del o
        assert [x() for x in alive] == [None, None, None, None]


# Memory.


def largest_allocation(flash: str, n: int, d: int) -> int:
    """Bytes of the largest piece of memory that torch hands out during a forward and a backward on the CPU."""
    inputs = Case((), n, n, d).draw(torch.float32, DEVICE)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run_attention(flash_function(flash), inputs, True)
    return max(event.self_cpu_memory_usage for event in profiler.events())


@pytest.mark.skipif(NATIVE, reason="on a GPU the peak is read instead")
@both_flash
def test_no_matrix_of_scores_on_cpu(flash):
    """No tensor made in forward or backward, inside custom ops too, is within 8x of n_queries x n_keys."""
    n = 768
    largest = largest_allocation(flash, n, d=16)
    assert n * 16 * 4 <= largest, "the profile has missed the output itself"
    assert largest <= n * n * 4 // 8


@needs_gpu
@both_flash
def test_no_matrix_of_scores_on_gpu(flash):
    """Forward and backward need a few tensors of n x d, where one matrix of scores would be 1 GiB."""
    inputs = Case((1,), 16384, 16384, 64).draw(torch.float32, DEVICE)
    run_attention(flash_function(flash), inputs, True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_attention(flash_function(flash), inputs, True)
    assert torch.cuda.max_memory_allocated() - before <= 20 * inputs.q.numel() * 4


def allocated_between_steps() -> int:
    """Bytes allocated on the GPU once autograd has let go of the last backward, but for some scalars.

    A backward runs on the GPU's own autograd thread. When its caller has dq, dk and dv, that thread may still hold them
    too, until it is scheduled again; a machine with more processes than cores shows that as a leak of three gradients.
    The thread drops them before it takes the next backward, so here is one, of a scalar.
    """
    torch.ones((), device=DEVICE, requires_grad=True).clone().backward()
    return torch.cuda.memory_allocated()


@needs_gpu
@both_flash
def test_gpu_memory_returns_to_where_it_was(flash):
    """Forwards that are never followed by a backward, and whole steps, leave nothing allocated."""
    inputs = Case((2,), 1024, 1024, 64).draw(torch.float32, DEVICE)
    run_attention(flash_function(flash), inputs, True)
    with garbage_collector_off():
        before = allocated_between_steps()
        for _ in range(3):
            flash_function(flash)(*leaves(inputs), True)
            run_attention(flash_function(flash), inputs, True)
        one_L = inputs.q[..., 0].numel() * 4  # the least that a kept graph holds
        assert allocated_between_steps() - before < one_L


# Derivatives.


@both_causal
@pytest.mark.parametrize("case", [Case((), 5, 5, 3), Case((2,), 5, 7, 3), Case((2, 1), 7, 4, 2)], ids=str)
def test_gradcheck(case, is_causal):
    """The tiled gradients are the derivatives of the tiled forward, by finite differences in float64."""
    q, k, v = leaves(case.draw(torch.float64, DEVICE))
    assert torch.autograd.gradcheck(FlashAttention2Pytorch.apply, (q, k, v, is_causal))


@both_causal
def test_gradcheck_over_many_tiles(is_causal):
    """The same along random directions, over more than one default tile each way."""
    q, k, v = leaves(Case((), 150, 140, 3).draw(torch.float64, DEVICE))
    assert torch.autograd.gradcheck(FlashAttention2Pytorch.apply, (q, k, v, is_causal), fast_mode=True)


@both_flash
@pytest.mark.parametrize("loss", [torch.sum, lambda o: o.square().sum()], ids=["sum", "square"])
def test_second_derivative_raises(flash, loss):
    """A gradient penalty never drops out of a loss that has other terms.

    The gradient of o.sum() is a constant, so nothing that the backward is handed requires a gradient; its result
    depends on q all the same. Treated as a constant it would leave the loss differentiable, and silently wrong; and it
    need not matter which input the second derivative is asked for.
    """
    q, k, v = leaves(Case((2,), 5, 5, 16).draw(torch.float32, DEVICE))
    o = flash_function(flash)(q, k, v, True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (dq,) = torch.autograd.grad(loss(o), q, create_graph=True)
        torch.autograd.grad(o.sum() + dq.square().sum(), q)


@both_flash
def test_forward_mode_raises(flash):
    """A forward-mode derivative is not implemented either, and is not silently zero."""
    q, k, v, dO = Case((2,), 5, 5, 16).draw(torch.float32, DEVICE)
    with torch.autograd.forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError)):
        flash_function(flash)(torch.autograd.forward_ad.make_dual(q, dO), k, v, True)


# Autocast.


def autocast_dtypes(flash: str) -> list[torch.dtype]:
    return [torch.float16] if flash == "triton" and INTERPRETED else [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@both_causal
@both_flash
def test_autocast(flash, is_causal, dtype):
    """Under autocast a float32 call runs in the autocast dtype, and its gradients are float32."""
    if dtype not in autocast_dtypes(flash):
        pytest.skip(INTERPRETER_BFLOAT16)

    def attention(q, k, v, is_causal):
        with torch.autocast(DEVICE.type, dtype=dtype):
            o = flash_function(flash)(q, k, v, is_causal)
        assert o.dtype == dtype
        return o

    inputs = CASE.draw(torch.float32, DEVICE)
    result = run_attention(attention, inputs._replace(dO=inputs.dO.to(dtype)), is_causal)
    for gradient in (result.dq, result.dk, result.dv):
        assert gradient is not None and gradient.dtype == torch.float32
    assert result.L is not None and result.L.dtype == torch.float32
    assert_within_budget(result, inputs, is_causal, dtype)


def test_autocast_leaves_float64():
    """As PyTorch's own autocast does."""
    q, k, v, _ = CASE.draw(torch.float64, DEVICE)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert FlashAttention2Pytorch.apply(q, k, v, True).dtype == torch.float64


@both_flash
def test_loss_scaling_in_float16(flash):
    """From a scale of 2^40 on: gradients overflow, and those steps are skipped; then the loss falls."""
    torch.manual_seed(0)
    model = BasicsTransformerLM(
        vocab_size=16, context_length=16, d_model=16, num_layers=1, num_heads=1, d_ff=32,
        attention=flash_function(flash), device=DEVICE,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**40)
    tokens = torch.randint(16, (1, 17), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    losses, scales = [], []
    for _ in range(60):
        with torch.autocast(DEVICE.type, torch.float16):
            loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    skipped = sum(after < before for before, after in pairwise([2.0**40, *scales]))
    assert scales[:2] == [2.0**39, 2.0**38] and losses[2] == losses[0], "the first steps are not skipped"
    assert 10 < skipped < 50
    assert losses[-1] < 0.5 * losses[0]
    assert all(x.isfinite().all() for x in model.parameters())


@both_flash
def test_autocast_joins_mixed_dtypes(flash):
    """Under autocast a float32 q and half-precision k and v meet in the autocast dtype."""
    q, k, v, _ = CASE.draw(torch.float32, DEVICE)
    with torch.autocast(DEVICE.type, dtype=torch.float16):
        mixed = flash_function(flash)(q, k.half(), v.half(), True)
        joined = flash_function(flash)(q, k, v, True)
    assert mixed.dtype == torch.float16 and torch.equal(mixed, joined)


@both_flash
def test_autocast_off_inside_does_not_cast(flash):
    """A region where autocast is disabled is a region without it."""
    q, k, v, _ = CASE.draw(torch.float32, DEVICE)
    with torch.autocast(DEVICE.type, dtype=torch.float16), torch.autocast(DEVICE.type, enabled=False):
        assert flash_function(flash)(q, k, v, True).dtype == torch.float32


# torch.compile.

# On a CPU the graph is what matters, and inductor takes long; on a GPU the whole way is taken.
BACKEND = "inductor" if NATIVE else "aot_eager"


@both_causal
@pytest.mark.parametrize("leading", [(1, 2), (2, 1, 2)], ids=str)
@needs_triton
def test_compiled_in_one_graph(leading, is_causal):
    """The Triton Function compiles without a graph break, backward too, and gives what eager gives."""
    torch.compiler.reset()
    contiguous = Case(leading, 100, 100, 64).draw(torch.float32, DEVICE)
    inputs = Inputs(*map(batch_last, contiguous))  # more than two leading dimensions do not merge
    compiled = torch.compile(flash_function("triton"), fullgraph=True, backend=BACKEND)
    # A compiled output has the compiled graph as its node, so there is no saved L to compare.
    result = run_attention(compiled, inputs, is_causal)
    eager = run_attention(flash_function("triton"), inputs, is_causal)
    for name in ("o", "dq", "dk", "dv"):
        assert torch.equal(getattr(result, name), getattr(eager, name)), name


@needs_triton
def test_compiled_among_other_operations():
    """One graph holds the projections before and after; strides there are not those of eager inputs."""
    torch.compiler.reset()
    inputs = Case((2, 50), 3, 3, 16).draw(torch.float32, DEVICE)
    weight = torch.eye(16, device=DEVICE) + 0.1

    def layer(q, k, v, is_causal):
        heads_first = ((x @ weight).transpose(1, 2) for x in (q, k, v))
        o = flash_function("triton")(*heads_first, is_causal)
        return o.transpose(1, 2) @ weight.mT

    compiled = torch.compile(layer, fullgraph=True, backend=BACKEND)
    result, eager = run_attention(compiled, inputs, True), run_attention(layer, inputs, True)
    for name in ("o", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(result, name), getattr(eager, name), rtol=1e-4, atol=1e-4)


@both_flash
def test_compiled_with_one_tensor_twice(flash):
    """Dynamo gives a tensor that is k and v only one of its gradients: an error instead, or the eager way."""
    apply = flash_function(flash)
    q, k, _ = leaves(CASE.draw(torch.float32, DEVICE), "qk")
    expected = torch.autograd.grad(apply(q, k, k, True).sum(), (q, k))

    def compiled(function, fullgraph):
        torch.compiler.reset()
        return torch.compile(function, fullgraph=fullgraph, backend="aot_eager", dynamic=False)

    with pytest.raises(Exception, match=r"torch\.compile would lose a gradient of the one that is given twice"):
        compiled(lambda q, k: apply(q, k, k, True), True)(q, k)
    for function, fullgraph in (
        (lambda q, k: apply(q, k, k, True), False),
        (lambda q, k: apply(q, k, k.view_as(k), True), True),
    ):
        got = torch.autograd.grad(compiled(function, fullgraph)(q, k).sum(), (q, k))
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x, y)
    q, k = q.detach(), k.detach()  # nothing is lost
    torch.testing.assert_close(compiled(lambda q, k: apply(q, k, k, True), True)(q, k), apply(q, k, k, True))


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.*is deprecated:DeprecationWarning"
)
@both_flash
def test_traced_or_refused(flash):
    """torch.jit.trace records the PyTorch version, right for the lengths it was traced with, and refuses kernels."""
    inputs = CASE.draw(torch.float32, DEVICE if flash == "triton" else torch.device("cpu"))

    def attention(q, k, v):
        return flash_function(flash)(q, k, v, True)

    if flash == "triton":
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"^torch\.jit\.trace cannot record .*; torch\.export\.export can$"):
                torch.jit.trace(attention, inputs[:3])
            attention(*inputs[:3])  # from now on inputs of this layout are not checked
        return
    traced = torch.jit.trace(attention, leaves(CASE.draw(torch.float32, inputs.q.device, seed=1)))
    result = run_attention(lambda q, k, v, is_causal: traced(q, k, v), inputs, True)
    assert_within_budget(replace(result, L=None), inputs, True)


@pytest.mark.parametrize("strict", [False, True])
@both_flash
def test_exported(flash, strict):
    """torch.export takes both Functions, for inference."""
    inputs = CASE.draw(torch.float32, DEVICE)

    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_function(flash)(q, k, v, True)

    exported = torch.export.export(Layer(), CASE.draw(torch.float32, DEVICE, seed=1)[:3], strict=strict)
    assert torch.equal(exported.module()(*inputs[:3]), flash_function(flash)(*inputs[:3], True))
    ops = [str(node.target) for node in exported.graph.nodes]
    assert flash == "pytorch" or "cs336_systems.flash_forward.default" in ops


@needs_triton
def test_compiled_with_changing_lengths():
    """A second length makes lengths symbolic in the graph, and is right too."""
    torch.compiler.reset()
    compiled = torch.compile(flash_function("triton"), fullgraph=True, backend=BACKEND)
    for n in (40, 50, 70):
        inputs = Case((2,), n, n, 16).draw(torch.float32, DEVICE)
        result = replace(run_attention(compiled, inputs, True), interpreted=INTERPRETED)
        assert_within_budget(result, inputs, True)


def assert_same(got: Result, expected: Result, hopper: bool) -> None:
    """The same bits; of dq, which Hopper's own kernels sum in no fixed order, numbers that are close."""
    for name in ("o", "dq", "dk", "dv"):
        x, y = getattr(got, name), getattr(expected, name)
        close = hopper and name == "dq" and (x - y).abs().max() <= 2e-2 * y.abs().max()
        assert close or torch.equal(x, y), name


@needs_gpu
@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("d", [64, 128])
def test_compiled_into_cuda_graphs(d, hopper):
    """By mode="reduce-overhead": each step, forward and backward, reads its own inputs, wherever they lie."""
    torch.compiler.reset()
    counters.clear()
    apply = flash_function("triton")

    def attention(q, k, v, is_causal):
        return apply(q, k, v, is_causal, hopper)

    compiled = torch.compile(attention, mode="reduce-overhead", fullgraph=True)
    kept = []  # so that no inputs take the place of earlier ones
    try:
        for step in range(5):
            inputs = Case((2, 3), 200, 260, d).draw(torch.float16, DEVICE, seed=step)
            kept.append(inputs)
            torch.compiler.cudagraph_mark_step_begin()
            assert_same(run_attention(compiled, inputs, True), run_attention(attention, inputs, True), hopper)
        assert counters["inductor"]["cudagraph_skips"] == 0, "it ran without CUDA graphs"
        # The forward's graph has three such inputs: more means that the backward has a graph too.
        assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] > 3, "it ran without CUDA graphs"
    finally:
        torch.compiler.reset()  # which gives the graphs' memory back


@needs_gpu
@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize(("d", "dtype"), [(64, torch.float16), (128, torch.float16), (64, torch.float32)], ids=str)
def test_on_the_current_stream(monkeypatch, d, dtype, hopper):
    """Inputs are written late on a stream aside: a launch on another stream, the first or a later one, would read
    zeros.
    """
    inputs = Case((2, 3), 200, 260, d).draw(dtype, DEVICE)

    def attention(q, k, v, is_causal):
        return flash_function("triton")(q, k, v, is_causal, hopper)

    expected = run_attention(attention, inputs, True)  # all is compiled: launches do not wait for that
    monkeypatch.setattr(launch, "_launches", {})
    late, aside = Inputs(*(torch.empty_like(x) for x in inputs)), torch.cuda.Stream()
    for launch_number in range(3):
        for x in late:
            x.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(aside):
            torch.cuda._sleep(300_000_000)  # some 150 ms
            for to, x in zip(late, inputs, strict=True):
                to.copy_(x)
            result = run_attention(attention, late, True)
        # The first launches may take longer than the inputs.
        assert launch_number == 0 or not aside.query(), "the inputs were written before the launches"
        aside.synchronize()
        assert_same(result, expected, hopper)


@needs_gpu
@pytest.mark.parametrize("hopper", [True, False])
def test_replayed_from_a_cuda_graph(hopper):
    """What was captured reads its inputs anew, where they lie, each time it is replayed."""
    first, second = (Case((2, 3), 200, 260, 64).draw(torch.bfloat16, DEVICE, seed=seed) for seed in (1, 2))
    q, k, v = leaves(first)
    dO = first.dO.clone()

    def step() -> tuple[torch.Tensor, ...]:
        o = flash_function("triton")(q, k, v, True, hopper)
        return o.detach(), *torch.autograd.grad(o, (q, k, v), dO)

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for inputs in (first, second):
        with torch.no_grad():
            for to, x in zip((q, k, v, dO), inputs, strict=True):
                to.copy_(x)
        graph.replay()
        for got, expected in zip(captured, step(), strict=True):
            torch.testing.assert_close(got, expected)


# More than one GPU.


@pytest.mark.skipif(not NATIVE or torch.cuda.device_count() < 2, reason="needs two GPUs")
@both_flash
def test_tensors_on_another_gpu(flash):
    """The current device is 0 and the tensors are on 1, and so are the results."""
    other = torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    inputs = CASE.draw(torch.float32, other)
    result = run_attention(flash_function(flash), inputs, True)
    assert result.o.device == other
    assert_within_budget(result, inputs, True)
    assert torch.cuda.current_device() == 0


# The same of all three Functions, the step before the Triton backward among them.

FUNCTIONS = {
    "pytorch": lambda: flash_function("pytorch"),
    "triton": lambda: flash_function("triton"),
    "dense_backward": lambda: dense_backward.FlashAttention2TritonDenseBackward.apply,
}


@pytest.fixture(params=FUNCTIONS)
def attention(request, monkeypatch):
    """The `.apply` of each Function that can run here."""
    if request.param != "pytorch":
        skip_if(triton_missing_reason())
    if request.param == "dense_backward":
        without_inductor_on_cpu(monkeypatch)
    return FUNCTIONS[request.param]()


def test_checkpointing(attention):
    """Saved tensors are recomputed, and may be unpacked once only."""
    inputs = Case((2,), 17, 17, 16).draw(torch.float32, DEVICE)
    expected = run_attention(attention, inputs, True)
    result = run_attention(lambda *args: checkpoint(attention, *args, use_reentrant=False), inputs, True)
    for name in ("o", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name), rtol=0, atol=0)


def first_last(x):
    """The first dimension last in memory."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


@pytest.mark.parametrize("unpacked", [first_last, negative_view])
@pytest.mark.parametrize("leading", [(2, 3), (2, 2, 3)], ids=str)
def test_saved_tensors_that_come_back_in_another_layout(attention, leading, unpacked):
    """A hook on saved tensors may pack them as it likes: what it unpacks has the same values, in any layout."""
    inputs = Case(leading, 20, 20, 16).draw(torch.float32, DEVICE)
    expected = run_attention(attention, inputs, True)
    leaves_ = [x.detach().requires_grad_() for x in inputs[:3]]
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, unpacked):
        o = attention(*leaves_, True)
        gradients = torch.autograd.grad(o, leaves_, inputs.dO)
    for gradient, name in zip(gradients, ("dq", "dk", "dv"), strict=True):
        torch.testing.assert_close(gradient, getattr(expected, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "unpacked",
    [
        lambda x: x[..., :1].clone(),
        lambda x: x[:, :1].clone() if x.ndim == 3 else x,  # of q, k, v and o two dimensions are left
        lambda x: x[:, :1].clone() if x.ndim == 2 else x,  # of L alone
        lambda x: x[..., :1].clone() if x.shape[1] == 24 else x,  # of k and v alone
        lambda x: x.half(),
        lambda x: x.half() if x.ndim == 2 else x,
        lambda x: x.to("meta"),
    ],
    ids=["columns", "rows", "L", "keys", "dtype", "dtype of L", "device"],
)
@pytest.mark.parametrize("warm", [False, True], ids=["first", "after one that was right"])
def test_saved_tensors_that_come_back_as_others(attention, unpacked, warm):
    """A kernel would read past their ends."""
    inputs = Case((2,), 20, 24, 16).draw(torch.float32, DEVICE)
    if warm:
        run_attention(attention, inputs, True)
    leaves_ = [x.detach().requires_grad_() for x in inputs[:3]]
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, unpacked):
        o = attention(*leaves_, True)
        with pytest.raises(RuntimeError, match=r"what was saved for the backward has to come back .* got q \("):
            torch.autograd.grad(o, leaves_, inputs.dO)


@needs_triton
def test_a_compiled_graph_takes_L_in_another_layout():
    """When it was traced L was contiguous, and a copy that makes it so was left out."""
    torch.compiler.reset()
    apply = flash_function("triton")
    compiled = torch.compile(lambda q, k, v: apply(q, k, v, True), backend="aot_eager", fullgraph=True)
    inputs = Case((1, 2), 40, 40, 16).draw(torch.float32, DEVICE)
    q, k, v = leaves(inputs)
    expected = torch.autograd.grad(apply(q, k, v, True), (q, k, v), inputs.dO)

    def spread(x):
        return torch.stack([x, x], -1)[..., 0] if x.ndim == 3 else x

    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, spread):
        o = compiled(q, k, v)
        gradients = torch.autograd.grad(o, (q, k, v), inputs.dO)
    for gradient, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-5, atol=1e-5)


def forget_launches(compiled_too: bool) -> None:
    """Nothing is prepared any more, and in this process nothing compiled, as at the start of a program."""
    launch._launches.clear()
    own = (
        launch_hopper.FORWARD,
        launch_hopper._PREPROCESS,
        *launch_hopper.BACKWARD.values(),
        launch_hopper._POSTPROCESS,
    )
    for call in (launch._FORWARD, launch._DQ, launch._DELTA, launch._DK_DV, *(own if launch.TRITON_IS_TESTED else ())):
        if compiled_too and not INTERPRETED:
            call.function().device_caches.clear()


@needs_triton
@pytest.mark.parametrize("hopper", [pytest.param(True, marks=needs_gpu), False])
def test_threads_that_launch_for_the_first_time_at_once(hopper):
    """Eight threads, on a GPU each on a stream of its own, forward and backward, in four shapes: as one after another.

    The interpreter keeps the number of the running program in one global variable: there launches take turns.
    """
    inputs = [Case((1, 2), n, n, 64 if NATIVE else 16).draw(torch.float16, DEVICE) for n in (17, 40, 48, 70)]

    def attention(q, k, v, is_causal):
        return flash_function("triton")(q, k, v, is_causal, hopper)

    expected = [run_attention(attention, each, True) for each in inputs]
    n_threads, rounds = 8, 20 if NATIVE else 1
    start = threading.Barrier(n_threads)

    def run(thread: int) -> Result:
        start.wait(60)
        with torch.cuda.stream(torch.cuda.Stream()) if NATIVE else nullcontext():
            result = run_attention(attention, inputs[thread % 4], True)
            if NATIVE:
                torch.cuda.current_stream().synchronize()
        return result

    if NATIVE:
        torch.cuda.synchronize()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(n_threads) as pool:
            for number in range(rounds):
                forget_launches(compiled_too=number == 0)
                for thread, result in enumerate(pool.map(run, range(n_threads))):
                    assert_same(result, expected[thread % 4], hopper)
    finally:
        sys.setswitchinterval(interval)


def test_backward_under_autocast(attention):
    """Autocast around the backward alone does not take its matmuls out of the inputs' dtype."""
    q, k, v, dO = Case((2,), 17, 17, 16).draw(torch.float32, DEVICE)
    leaves_ = [x.requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(attention(*leaves_, True), leaves_, dO)
    o = attention(*leaves_, True)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        gradients = torch.autograd.grad(o, leaves_, dO)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)


def gradients_of_changed(attention, inputs: Inputs, name: str, in_place: bool) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv where after the forward 2 was added to q, k or v, or o was doubled."""
    q, k, v = leaves(inputs)
    copies = {"q": q * 1, "k": k * 1, "v": v * 1}
    o = attention(*copies.values(), True)
    if name == "o":
        o = o.mul_(2) if in_place else o * 2
    elif in_place:
        copies[name].add_(2)
    return torch.autograd.grad(o, (q, k, v), inputs.dO)


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
@pytest.mark.parametrize("leading", [(2,), (2, 3)], ids=str)
def test_a_change_in_place_is_noticed(attention, leading, name):
    """q, k, v and o are kept for the backward: changing one is allowed, and the backward says that it is changed."""
    inputs = Case(leading, 5, 5, 16).draw(torch.float32, DEVICE)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients_of_changed(attention, inputs, name, in_place=True)


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
@pytest.mark.parametrize("implementation", ["naive", pytest.param("compiled", marks=needs_gpu)])
def test_a_change_in_place_is_noticed_or_does_no_harm(implementation, name):
    """What PyTorch's own operations keep is for PyTorch to say; no gradient is silently wrong."""
    inputs = Case((2,), 5, 5, 16).draw(torch.float32, DEVICE)
    function = ATTENTION[implementation].function
    expected = gradients_of_changed(function, inputs, name, in_place=False)
    try:
        got = gradients_of_changed(function, inputs, name, in_place=True)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        torch.testing.assert_close(got, expected)
