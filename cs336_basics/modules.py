"""Building blocks of the Transformer. Where axes are named in an einx expression, they are those of the equation.

Parameters bear the names of CS336's assignment 1, so that state dicts are exchangeable. Sums over the last axis and
products with a matrix are plain PyTorch: they are as clear, and an einx call costs some 20 microseconds of host time.
"""

import importlib.util
import inspect
import math
from collections.abc import Callable
from functools import partial, wraps
from typing import ParamSpec, Self, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def with_errors_of_torch(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let what PyTorch raises inside of einx's operations leave `function` as it was raised.

    einx wraps every exception in its own. Out of memory would then be no torch.OutOfMemoryError, and activation
    checkpointing, which ends a recomputation by raising, would fail.
    """

    @wraps(function)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        import einx  # takes seconds, so not before it is used

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

    Raises:
        TypeError: x is of integers.
    """
    if not x.is_floating_point():
        raise TypeError(f"softmax is of floating point numbers, got {x.dtype}")
    if x.numel() == 0:
        return x.clone()  # einx takes no empty axis
    import einx

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

    Raises:
        ValueError: shapes that do not belong together.
    """
    if Q.shape[:-2] != K.shape[:-2] or K.shape[:-1] != V.shape[:-1] or Q.shape[-1] != K.shape[-1]:
        got = f"Q {tuple(Q.shape)}, K {tuple(K.shape)}, V {tuple(V.shape)}"
        raise ValueError(f"Q, K and V must be (..., queries, d), (..., keys, d) and (..., keys, d_v), got {got}")
    if 0 in (*Q.shape, *K.shape, *V.shape):
        return Q @ K.mT @ V  # einx takes no empty axis; a sum over no keys is 0
    import einx

    # Scaling Q rather than the scores costs n·d multiplications instead of n², and in half precision keeps Q K^T from
    # overflowing before it is scaled.
    scores = einx.dot("... queries [d], ... keys [d] -> ... queries keys", Q * Q.shape[-1] ** -0.5, K)
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf)
    return einx.dot("... queries [keys], ... [keys] d_v -> ... queries d_v", softmax(scores), V)


AttentionFunction = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""`attention(q, k, v, is_causal) -> o` over tensors (..., heads, n, d); causal: query i sees key j where i >= j."""


def naive_attention(
    q: Float[Tensor, "... queries d"],
    k: Float[Tensor, "... keys d"],
    v: Float[Tensor, "... keys d"],
    is_causal: bool,
) -> Float[Tensor, "... queries d"]:
    """`scaled_dot_product_attention` as an `AttentionFunction`; the causal mask lives as long as the call."""
    mask = None
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return scaled_dot_product_attention(q, k, v, mask)


def attention_function(attention: str | AttentionFunction) -> AttentionFunction:
    """The function that `attention` names; a function is what it is.

    "naive" is `naive_attention`; all other names are those of `cs336_systems.attention.ATTENTION`. That module is
    imported when one of its names is asked for, and not before: this package works without it, and a name works
    without an import for the sake of a registration.

    Raises:
        ValueError: a name that is not known.
        TypeError: neither a name nor a function.
    """
    if not isinstance(attention, str):
        if not callable(attention) or inspect.isclass(attention):
            its_apply = "; an autograd.Function is given by its apply" if hasattr(attention, "apply") else ""
            raise TypeError(
                f"attention must be a name or a function (q, k, v, is_causal) -> o, got {attention!r}{its_apply}"
            )
        return attention
    functions = {"naive": naive_attention}
    if attention not in functions:
        functions = _functions_of_systems() | functions
    if attention not in functions:
        raise ValueError(f"attention must be a function or one of {', '.join(sorted(functions))}; got {attention!r}")
    return functions[attention]


def _functions_of_systems() -> dict[str, AttentionFunction]:
    """The attention functions of `cs336_systems` by name; none where it is not installed."""
    if importlib.util.find_spec("cs336_systems") is None:
        return {}
    table = importlib.import_module("cs336_systems.attention").ATTENTION
    return {name: implementation.function for name, implementation in table.items()}


def truncated_normal(
    *shape: int, std: float, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> nn.Parameter:
    """A parameter drawn from N(0, std^2) without what lies beyond 3 std."""
    dtype = dtype or torch.get_default_dtype()
    # In float32 at least: of the numbers near 1 that the tails are drawn from, half precision has but a few.
    weight = torch.empty(shape, device=device, dtype=torch.promote_types(dtype, torch.float32))
    nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)
    return nn.Parameter(weight.to(dtype))


class Linear(nn.Module):
    """y = W x, without a bias; W is (d_out, d_in), drawn with a variance of 2 / (d_in + d_out) (Glorot and Bengio 2010,
    equation 12)."""

    def __init__(
        self, d_in: int, d_out: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = truncated_normal(d_out, d_in, std=math.sqrt(2 / (d_in + d_out)), device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "... d_in"]) -> Float[Tensor, "... d_out"]:
        """W x for every vector x of the last axis."""
        return x @ self.weight.mT


class Embedding(nn.Module):
    """A table of one vector of d_model numbers for each of vocab_size tokens, drawn with variance 1."""

    def __init__(
        self, vocab_size: int, d_model: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = truncated_normal(vocab_size, d_model, std=1, device=device, dtype=dtype)

    def forward(self, token_ids: Int[Tensor, "..."]) -> Float[Tensor, "... d_model"]:
        """The vectors of the tokens 0 <= token_ids < vocab_size, which are int32 or int64."""
        # weight[token_ids] would count negative ids from the end, and take 8-bit ones for a mask.
        return F.embedding(token_ids, self.weight)


class RMSNorm(nn.Module):
    """y_i = g_i x_i / sqrt(mean(x^2) + eps), the mean over the last axis (Zhang and Sennrich 2019, equation 4).

    Computed in float32 at least; y has the dtype of x. The gain g is `weight`, 1 at first.
    """

    def __init__(
        self,
        d_model: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model, device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        """x with a root mean square of 1, times the gain.

        Raises:
            ValueError: vectors of another size than the gain's.
        """
        if x.shape[-1] != len(self.weight):
            raise ValueError(f"the norm was made for vectors of size {len(self.weight)}, got {x.shape[-1]}")
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = wide.square().mean(-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square + self.eps) * self.weight).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding: at position m, pair i of a vector is turned by the angle m · theta^(-2i/d).

    Pair i is (x_2i, x_2i+1), as in equation 15 of Su et al. 2021 (RoFormer), i from 0. The scalar product of two turned
    vectors depends on their positions only through the difference.

    The cosines and sines of all positions are buffers of shape (context_length, d/2) in float32, whatever dtype the
    model is given or moved to, and no part of the state dict.

    Args:
        context_length: the number of positions, from 0.
        d: the size of the vectors, even.
        theta: the base of the angles.

    Raises:
        ValueError: d is odd, or one of them is not above 0.
    """

    cos: Float[Tensor, "context_length pairs"]
    sin: Float[Tensor, "context_length pairs"]

    def __init__(
        self, context_length: int, d: int, theta: float = 10_000.0, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        if context_length < 1:
            raise ValueError(f"the context length must be at least 1, got {context_length}")
        if d < 2 or d % 2 != 0:
            raise ValueError(f"rotary embedding turns pairs: the size of its vectors must be above 0 and even, got {d}")
        if not 0 < theta < math.inf:
            raise ValueError(f"theta must be a number above 0, got {theta}")
        self.context_length, self.d, self.theta = context_length, d, theta
        cos, sin = self._tables(device or torch.get_default_device())
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _tables(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        # In float64, since float32 knows an angle of 30,000 to 0.002 only; on the CPU, since not every device has it.
        pairs = torch.arange(0, self.d, 2, dtype=torch.float64, device="cpu")
        positions = torch.arange(self.context_length, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, self.theta ** (-pairs / self.d))
        return angles.cos().to(device, torch.float32), angles.sin().to(device, torch.float32)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to`, `half` and `to_empty` call: the buffers move, but their values are neither rounded nor lost."""
        cos, sin = self.cos, self.sin
        super()._apply(fn, recurse)
        device = self.cos.device
        self.cos, self.sin = self._tables(device) if cos.is_meta else (cos.to(device), sin.to(device))
        return self

    def forward(
        self, x: Float[Tensor, "... n d"], positions: Int[Tensor, "... n"] | None = None
    ) -> Float[Tensor, "... n d"]:
        """x turned by its positions, in the dtype of x.

        Args:
            x: vectors of size d.
            positions: 0 <= positions < context_length, of a shape that broadcasts to (..., n); 0 to n - 1 if None.

        Raises:
            ValueError: vectors of another size; more of them than there are positions.
            IndexError: a position outside of the context (on a GPU the device's own assertion).
        """
        n, d = x.shape[-2:]
        if d != self.d:
            raise ValueError(f"rotary embedding was made for vectors of size {self.d}, got {d}")
        if positions is None:
            if n > self.context_length:
                raise ValueError(f"got a sequence of length {n}; at most the context length, {self.context_length}")
            cos, sin = self.cos[:n], self.sin[:n]
        else:
            # Indexing would take -1 for the last position, and bytes for a mask.
            cos, sin = (nn.functional.embedding(positions, table) for table in (self.cos, self.sin))
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        even, odd = wide[..., 0::2], wide[..., 1::2]
        turned = torch.stack((cos * even - sin * odd, sin * even + cos * odd), dim=-1)
        return turned.flatten(-2).to(x.dtype)


def silu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """x · sigmoid(x), elementwise (Elfwing et al. 2017; Swish with beta = 1)."""
    return x * torch.sigmoid(x)


class SwiGLU(nn.Module):
    """W2 (silu(W1 x) ∘ W3 x), without biases (Shazeer 2020, equation 6)."""

    def __init__(
        self, d_model: int, d_ff: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.w1 = Linear(d_model, d_ff, device, dtype)
        self.w2 = Linear(d_ff, d_model, device, dtype)
        self.w3 = Linear(d_model, d_ff, device, dtype)

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        """The gated layer on every vector of the last axis."""
        return self.w2(silu(self.w1(x)) * self.w3(x))


def head_dim(d_model: int, num_heads: int) -> int:
    """The size of each head's vectors.

    Raises:
        ValueError: num_heads does not divide d_model, or is below 1.
    """
    if num_heads < 1 or d_model % num_heads != 0:
        raise ValueError(f"num_heads must divide d_model, got {num_heads} heads and d_model {d_model}")
    return d_model // num_heads


class CausalMultiHeadSelfAttention(nn.Module):
    """W_O concat(head_1, …, head_h) with head_i = Attention(Q_i, K_i, V_i)  (Vaswani et al. 2017, section 3.2.2).

    Q = W_Q x, K = W_K x and V = W_V x are cut into heads of d = d_model / num_heads; queries and keys are turned by
    their positions; position i sees the positions up to i.

    Args:
        d_model: the size of a token's vector.
        num_heads: the number of heads, a divisor of d_model.
        positional_encoder: the rotary embedding for vectors of size d; layers may share one.
        attention: a function or its name, as in `attention_function`. It makes what mask it needs itself.

    Raises:
        ValueError: num_heads does not divide d_model; an unknown attention.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        positional_encoder: RotaryEmbedding,
        attention: str | AttentionFunction = "naive",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        head_dim(d_model, num_heads)
        self.num_heads = num_heads
        function = attention_function(attention)
        # torch.compile knows the `apply` of an autograd.Function everywhere but in an attribute of a module.
        self.attention = partial(function) if inspect.ismethod(function) else function
        self.positional_encoder = positional_encoder
        self.q_proj = Linear(d_model, d_model, device, dtype)
        self.k_proj = Linear(d_model, d_model, device, dtype)
        self.v_proj = Linear(d_model, d_model, device, dtype)
        self.output_proj = Linear(d_model, d_model, device, dtype)

    @with_errors_of_torch
    def forward(self, x: Float[Tensor, "... n d_model"]) -> Float[Tensor, "... n d_model"]:
        """Every token's vector, mixed with those of the tokens before it."""
        import einx

        q, k, v = (
            einx.id("... n (heads d) -> ... heads n d", project(x), heads=self.num_heads)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        o = self.attention(self.positional_encoder(q), self.positional_encoder(k), v, True)
        return self.output_proj(einx.id("... heads n d -> ... n (heads d)", o))
