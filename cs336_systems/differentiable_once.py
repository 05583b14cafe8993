"""A decorator for the backward of every Function here: second derivatives and batches of gradients raise."""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]


def _is_batch(x: Tensor) -> bool:
    """Whether x stands for several tensors, under vmap: in `torch.func`, and in autograd's is_grads_batched."""
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(x) or functorch.is_legacy_batchedtensor(x)


def differentiable_once(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Let `backward(ctx, dO)` raise RuntimeError where a graph of it is asked for, that is under create_graph=True.

    It raises at once, not when that graph is used. PyTorch's own `once_differentiable` waits, and sees only a second
    derivative that passes through dO; but the gradients depend on q, k and v as well, and a gradient penalty would
    silently lose that part.

    It also raises for a batch of dO (under vmap), whose memory a kernel cannot read, and gives memory to the zeros that
    PyTorch keeps without.

    One thing gets past it: torch.compile(backend="eager"), a debugging aid, drops second derivatives of every
    autograd.Function by itself. Its other backends raise.
    """

    @wraps(backward)
    def wrapped(ctx, dO):
        # A compiled backward is traced with gradients on, and raises for a second derivative by itself.
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "FlashAttention-2 has no second derivative: its gradients cannot be computed with create_graph=True"
                )
            if _is_batch(dO):
                raise RuntimeError(
                    "FlashAttention-2 takes one dO at a time, not a batch of them (is_grads_batched, vectorize or vmap)"
                )
            if dO._is_zerotensor():  # PyTorch keeps those zeros without memory
                dO = dO.clone()
        return backward(ctx, dO)

    return wrapped
