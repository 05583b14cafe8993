"""The loss, and what is done with its gradients before a step."""

from collections.abc import Iterable
from functools import reduce

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


def cross_entropy(inputs: Float[Tensor, "... vocab"], targets: Int[Tensor, "..."]) -> Float[Tensor, ""]:
    """The mean over all targets of -log softmax(inputs)[target], in nats.

    -log softmax(x)_t = log sum_j exp(x_j - max x) - (x_t - max x), where exp cannot overflow and the log is of no
    number below 1. Computed and returned in float32 at least.

    Args:
        inputs: logits.
        targets: int64, 0 <= targets < vocab.

    Raises:
        ValueError: shapes that do not belong together.
    """
    if inputs.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets must have the shape of inputs without the last axis, {tuple(inputs.shape[:-1])}, "
            f"got {tuple(targets.shape)}"
        )
    logits = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    # The loss does not depend on what is subtracted, so no gradient goes through the maximum.
    logits = logits - logits.detach().amax(-1, keepdim=True)
    log_sum_exp = logits.exp().sum(-1).log()
    return (log_sum_exp - logits.gather(-1, targets[..., None]).squeeze(-1)).mean()


@torch.no_grad()
def clip_gradient(parameters: Iterable[nn.Parameter] | nn.Parameter, max_norm: float) -> Float[Tensor, ""]:
    """Scale all gradients, in place, by min(1, max_norm / (norm + 1e-6)) (Pascanu et al. 2013, algorithm 1).

    The norm is the Euclidean norm of all gradients as one vector, computed in float32 at least. Nothing waits for the
    device.

    Args:
        parameters: one, or several on one device; those without a gradient are left out.
        max_norm: the largest norm that is left as it is, above 0.

    Returns:
        The norm before clipping.

    Raises:
        ValueError: max_norm is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, got {max_norm}")
    several = [parameters] if isinstance(parameters, Tensor) else parameters
    gradients = [parameter.grad for parameter in several if parameter.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    dtype = reduce(torch.promote_types, (gradient.dtype for gradient in gradients), torch.float32)
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype)))
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm
