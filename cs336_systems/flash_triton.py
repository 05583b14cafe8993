"""FlashAttention-2 on Triton kernels: argument checks, the kernels as custom ops, and the autograd Function.

The way of a call: `FlashAttention2Triton.apply` -> `launch` or `launch_hopper` -> the kernel. Under torch.compile, and
wherever else somebody looks on (see `_as_kernels_take`), the launch is wrapped in a custom op, one opaque node of the
graph.
"""

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from cs336_systems import launch, launch_hopper
from cs336_systems.differentiable_once import differentiable_once
from cs336_systems.inputs import (
    attention_inputs,
    described,
    refuse_jit_tracing,
    refuse_repeated_when_compiled,
    require_as_saved,
)
from cs336_systems.layouts import empty_output_like, empty_outputs, readable

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PLAIN_TYPES = frozenset((Tensor, Parameter))


def _launch_forward(launches, q, k, v, is_causal, hopper):
    """o and L, by Hopper's own kernel where one is wanted and applies."""
    kernels = launch_hopper if hopper and launch_hopper.applies(q, k) else launch
    return kernels.launch_forward(q, k, v, is_causal, launches=launches)


def _launch_backward(launches, q, k, v, o, dO, L, is_causal, hopper, wants_dq, wants_dk_dv):
    """dq, dk and dv; in place of dq, or of dk and dv, where nobody wants them, empty tensors.

    Hopper's own kernel makes all at once, and not the same bits each time: the portable ones run where only some are
    wanted, or where PyTorch was asked for deterministic algorithms.
    """
    if launches is None:  # maybe by a compiled graph: traced with a contiguous L, it copies no other L either
        L = L.contiguous()
    all_at_once = hopper and wants_dq and wants_dk_dv and not torch.are_deterministic_algorithms_enabled()
    if all_at_once and launch_hopper.applies(q, k):
        return launch_hopper.launch_backward(q, k, v, o, dO, L, is_causal, launches=launches)
    return launch.launch_backward(q, k, v, o, dO, L, is_causal, wants_dq, wants_dk_dv, launches=launches)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, hopper: bool) -> tuple[Tensor, Tensor]:
    return empty_outputs(q)


def _fake_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, dO: Tensor, L: Tensor, is_causal: bool, hopper: bool, wants_dq: bool,
    wants_dk_dv: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq = empty_output_like(q) if wants_dq else q.new_empty(0)
    return (dq, empty_output_like(k), empty_output_like(v)) if wants_dk_dv else (dq, k.new_empty(0), v.new_empty(0))


def _forward_flops(q_shape, k_shape, *_, out_shape=None, **options):
    """Two matmuls of (n_queries, n_keys, d) for each head; a causal mask is not counted off, as for PyTorch's SDPA."""
    *leading, n_queries, d = q_shape
    return 4 * math.prod(leading) * n_queries * k_shape[-2] * d


def _backward_flops(q_shape, k_shape, *_, **options):
    """Five such matmuls, whatever the kernels compute twice."""
    return _forward_flops(q_shape, k_shape) * 5 // 2


def _by_name(function: FunctionType, *first: object) -> Callable[..., Any]:
    """What calls the function of that name: an op outlives a reload of this module, the function does not."""
    return lambda *arguments: globals()[function.__name__](*first, *arguments)


def _define_op(name: str, direct: FunctionType, fake: FunctionType, flops: FunctionType) -> None:
    """cs336_systems::name is `direct` without launches. (`torch.library.custom_op` does more on each call, and takes
    twice as long.)

    Args:
        fake: makes empty tensors in place of the launch's results. Its signature is the op's.
        flops: counts its operations for PyTorch's FlopCounterMode.
    """
    _library.define(name + torch.library.infer_schema(fake, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, _by_name(direct, None), "CompositeExplicitAutograd")
    torch.library.register_fake(f"cs336_systems::{name}", _by_name(fake), lib=_library)
    register_flop_formula(getattr(torch.ops.cs336_systems, name))(flops)


if "_library" not in globals():
    _library = torch.library.Library("cs336_systems", "DEF")
    _define_op("flash_forward", _launch_forward, _fake_forward, _forward_flops)
    _define_op("flash_backward", _launch_backward, _fake_backward, _backward_flops)
_forward_op = torch.ops.cs336_systems.flash_forward.default
_backward_op = torch.ops.cs336_systems.flash_backward.default


def _as_kernels_take(
    checked: Callable[..., tuple[Tensor, ...]], is_causal: bool, *inputs: Tensor
) -> tuple[tuple[Tensor, ...], launch.Launches | None]:
    """`inputs` as the kernels take them, and their launches.

    There are no launches wherever somebody looks on and has to see an op: under torch.compile, in dispatch modes, for
    tensors that are fake, meta or of a subclass. The dispatch of an op takes time, a good part of a short call.

    Args:
        checked: checks inputs, casts them, and copies what the kernels could not read, or not well. It is not called
            for what is like earlier inputs that it gave back as they were. (What it changes is compared twice, and
            costs more.)
    """
    looked_on = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
    if looked_on or type(is_causal) is not bool or not PLAIN_TYPES.issuperset(map(type, inputs)) or inputs[0].is_meta:
        return checked(*inputs), None
    launches = launch.admitted_launches(is_causal, *inputs)
    if launches is None:
        inputs = checked(*inputs)
        launches = launch.admit(is_causal, *inputs)
    return inputs, launches


def _run(
    op: Callable[..., Any], direct: Callable[..., Any], launches: launch.Launches | None, *arguments: Any
) -> tuple[Tensor, ...]:
    """`direct`, or `op` where there are no launches, or where Dynamo traces what comes after a break of its graph."""
    if launches is None or torch.compiler.is_compiling():
        return op(*arguments)
    return direct(launches, *arguments)


class FlashAttention2Triton(torch.autograd.Function):
    """`FlashAttention2Triton.apply(q, k, v, is_causal=False, hopper=True) -> o`, differentiable once.

    q is (..., n_queries, d), k and v are (..., n_keys, d), on a GPU, in float16, bfloat16 or float32, with any strides.
    For the backward it keeps q, k, v, o and the log-sum-exp L (natural logarithm, float32) of shape (..., n_queries).
    A second derivative raises. torch.export takes it too, for inference: an exported graph has no gradients.

    With hopper=True, on a GPU of compute capability 9.0, the kernels of `launch_hopper` are used where they apply. They
    sum dq in no fixed order, so its last bits differ from run to run, unless PyTorch was asked for deterministic
    algorithms. Everything else, and all that the portable kernels compute, is bit-equal from run to run.

    Q K^T has to be finite in float32 before it is scaled. Gradients lose accuracy as L grows, by the rounding of a
    float32: scores of 1e4 cost 1e-3 of P. For 16-bit inputs scores end at 1e9, beyond which o may be NaN.

    Raises:
        TypeError, ValueError: as `cs336_systems.inputs.attention_inputs` and `launch.tiles_for` say; hopper is no bool.
        RuntimeError: Triton is not installed; as `refuse_repeated_when_compiled` and `refuse_jit_tracing` of
            `cs336_systems.inputs` say, and in the backward `require_as_saved`.
    """

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False, hopper=True):
        if not isinstance(hopper, bool):
            raise TypeError(f"hopper must be True or False, got {described(hopper)}")

        def checked(q, k, v):
            refuse_jit_tracing()
            refuse_repeated_when_compiled(q, k, v)
            return tuple(map(readable, attention_inputs(q, k, v, is_causal, DTYPES)))

        (q, k, v), launches = _as_kernels_take(checked, is_causal, q, k, v)
        o, L = _run(_forward_op, _launch_forward, launches, q, k, v, is_causal, hopper)
        ctx.save_for_backward(q, k, v, o, L)
        ctx.is_causal, ctx.hopper = is_causal, hopper
        return o

    @staticmethod
    @differentiable_once
    def backward(ctx, dO):

        def checked(q, k, v, o, dO, L):
            require_as_saved(q, k, v, o, dO, L)
            return (*map(readable, (q, k, v, o, dO)), L.resolve_neg().contiguous())

        q, k, v, o, L = ctx.saved_tensors
        needs_dq, needs_dk, needs_dv = ctx.needs_input_grad[:3]
        tensors, launches = _as_kernels_take(checked, ctx.is_causal, q, k, v, o, dO, L)
        rest = ctx.is_causal, ctx.hopper, needs_dq, needs_dk or needs_dv
        dq, dk, dv = _run(_backward_op, _launch_backward, launches, *tensors, *rest)
        return dq if needs_dq else None, dk if needs_dk else None, dv if needs_dv else None, None, None
