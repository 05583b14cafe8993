"""A decorator for the backward of both flash versions: no graph is kept, and a second derivative raises."""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor


class _NoSecondDerivative(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx, *gradients):
        return gradients

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("FlashAttention-2 has no second derivative: its gradients cannot be differentiated again")


def differentiable_once(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """Run `backward(ctx, dO)` without a graph, and let a derivative of what it returns raise RuntimeError.

    PyTorch's own `once_differentiable` raises only where dO requires a gradient. The gradients depend on q, k and v
    too: after `o.sum()`, whose dO is a constant, it would treat them as constants, and a gradient penalty would
    silently be zero.
    """

    @wraps(backward)
    def wrapped(ctx, dO):
        with torch.no_grad():
            gradients = backward(ctx, dO)
        # Under torch.compile the compiled backward raises by itself.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return gradients
        wanted = [gradient.requires_grad_() for gradient in gradients if isinstance(gradient, Tensor)]
        guarded = iter(_NoSecondDerivative.apply(*wanted))
        return tuple(next(guarded) if isinstance(gradient, Tensor) else None for gradient in gradients)

    return wrapped
