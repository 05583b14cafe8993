"""Building blocks of the Transformer, written in einx: the names in an expression are the axes of the equation."""

import math
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import einx
import torch
from jaxtyping import Bool, Float
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def with_errors_of_torch(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let what PyTorch raises inside of einx's operations leave `function` as it was raised.

    einx wraps every exception in its own. Out of memory would then be no torch.OutOfMemoryError, and activation
    checkpointing, which ends a recomputation by raising, would fail.
    """

    @wraps(function)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except einx.errors.CallOperationError as error:
            raise error.__cause__ or error from None

    return wrapped


@with_errors_of_torch
def softmax(x: Float[Tensor, "*shape"], dim: int = -1) -> Float[Tensor, "*shape"]:
    """Softmax over one axis: softmax(x)_i = exp(x_i - max x) / sum_j exp(x_j - max x).

    Subtracting the maximum changes no value and keeps exp from overflowing. Exponentials and their sum are computed in
    float32 at least, whatever the dtype of x. An axis that is -inf throughout has no largest entry to compare with:
    its softmax is 0 everywhere, not NaN.

    Args:
        x: any floating point tensor.
        dim: the axis that sums to 1.

    Returns:
        A tensor of the shape and dtype of x.
    """
    if x.numel() == 0:
        return x.clone()  # einx takes no empty axis
    logits = x.movedim(dim, -1).to(torch.promote_types(x.dtype, torch.float32))
    # Softmax does not depend on what is subtracted, so no gradient goes through the maximum.
    largest = einx.max("... [n]", logits.detach())
    largest = torch.where(largest == -math.inf, 0, largest)
    exponentials = torch.exp(einx.subtract("... n, ... -> ... n", logits, largest))
    total = einx.sum("... [n]", exponentials)
    total = torch.where(total == 0, 1, total)
    return einx.divide("... n, ... -> ... n", exponentials, total).to(x.dtype).movedim(-1, dim)


@with_errors_of_torch
def scaled_dot_product_attention(
    Q: Float[Tensor, "... queries d"],
    K: Float[Tensor, "... keys d"],
    V: Float[Tensor, "... keys d_v"],
    mask: Bool[Tensor, "... queries keys"] | None = None,
) -> Float[Tensor, "... queries d_v"]:
    """Attention(Q, K, V) = softmax(Q K^T / sqrt(d)) V  (Vaswani et al. 2017, equation 1).

    Args:
        Q, K, V: any leading dimensions (batch, heads, ...), the same for all three; none is fine too.
        mask: True where a query may see a key; any shape that broadcasts to (..., queries, keys). A query that sees no
            key at all gets a row of zeros.

    Returns:
        The weighted values, in the dtype of the inputs.
    """
    if 0 in (*Q.shape, *K.shape):
        return Q @ K.mT @ V  # einx takes no empty axis; a sum over no keys is 0
    # Scaling Q rather than the scores costs n·d multiplications instead of n², and in half precision keeps Q K^T from
    # overflowing before it is scaled.
    scores = einx.dot("... queries [d], ... keys [d] -> ... queries keys", Q * Q.shape[-1] ** -0.5, K)
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf)
    return einx.dot("... queries [keys], ... [keys] d_v -> ... queries d_v", softmax(scores), V)
