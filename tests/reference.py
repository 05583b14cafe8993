"""Dense attention and its gradients by their closed formulas, and the error budget that every implementation keeps.

The reference goes neither through autograd nor through the code under test; `run_attention` puts that code through
both. Equation numbers are the course handout's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .machine import INTERPRETED

TENSORS = ("o", "L", "dq", "dk", "dv")
NEIGHBOURS = {2**10: 15, 2**16: 3}  # at most so many scores a head: how many neighbours


class Inputs(NamedTuple):
    """What a forward and a backward take."""

    q: Float[Tensor, "... queries d"]
    k: Float[Tensor, "... keys d"]
    v: Float[Tensor, "... keys d"]
    dO: Float[Tensor, "... queries d"]

    def to(self, dtype: torch.dtype) -> "Inputs":
        """The same without a graph, in `dtype`; strides are kept where the dtype is the same."""
        return Inputs(*(x.detach().to(dtype) for x in self))


@dataclass(frozen=True)
class Result:
    """What one forward and backward gave; None where an implementation does not have it.

    `interpreted`: Triton's interpreter computed it, whose matrix products are NumPy's.
    """

    o: Tensor
    L: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    interpreted: bool = False


@dataclass(frozen=True)
class Case:
    """Sizes of one call: q and dO (*leading, n_queries, d), k and v (*leading, n_keys, d)."""

    leading: tuple[int, ...]
    n_queries: int
    n_keys: int
    d: int

    def __str__(self) -> str:
        leading = "".join(f"{size}x" for size in self.leading)
        return f"{leading}q{self.n_queries}-k{self.n_keys}-d{self.d}"

    def draw(self, dtype: torch.dtype, device: torch.device, seed: int = 0, uniform: bool = False) -> Inputs:
        """q, k, v and dO, normal or uniform in [0, 1), drawn on the CPU so that every machine gets the same."""
        generator = torch.Generator().manual_seed(seed)
        draw = torch.rand if uniform else torch.randn
        lengths = (self.n_queries, self.n_keys, self.n_keys, self.n_queries)
        return Inputs(*(draw(*self.leading, n, self.d, generator=generator).to(device, dtype) for n in lengths))


def visible_keys(n_queries: int, n_keys: int, is_causal: bool, device: torch.device) -> Bool[Tensor, "queries keys"]:
    """True where a query sees a key: everywhere, or where i >= j, counted from the top left."""
    everywhere = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device)
    return everywhere.tril() if is_causal else everywhere


Product = Callable[[Tensor, Tensor], Tensor]


def one_by_one(a: Float[Tensor, "... n m"], b: Float[Tensor, "... m d"]) -> Float[Tensor, "... n d"]:
    """a @ b with the m terms of each sum added up one after another.

    Each addition errs by at most u = eps / 2 of the partial sum that it makes, so a whole sum by at most u times its
    partial sums' sizes, all added; that is up to gamma_m |a|·|b|, gamma_m = m u / (1 - m u) (Higham 2002, section 3.1).
    Added up one by one, a term is in up to m partial sums, more than in any other order: a library that adds in blocks,
    whichever its CPU asks for, errs less.
    """
    total = a.new_zeros((*a.shape[:-1], b.shape[-1]))
    for m in range(a.shape[-1]):
        total = total + a[..., :, m, None] * b[..., None, m, :]
    return total


def probabilities(
    inputs: Inputs, is_causal: bool, dtype: torch.dtype = torch.float64, product: Product = torch.matmul
) -> tuple[Tensor, Tensor]:
    """P in `dtype`, and L. In a half dtype softmax and L are taken in float32, as torch.softmax does."""
    q, k, _, _ = inputs.to(dtype)
    visible = visible_keys(q.shape[-2], k.shape[-2], is_causal, q.device)
    S = (product(q, k.mT) * q.shape[-1] ** -0.5).masked_fill(~visible, float("-inf"))  # (4)
    S = S.to(torch.promote_types(dtype, torch.float32))
    L = torch.logsumexp(S, dim=-1)  # (12); -inf where there is no key
    return torch.exp(S - L[..., None]).to(dtype), L  # (5)


def dense_attention(
    inputs: Inputs,
    is_causal: bool,
    dtype: torch.dtype = torch.float64,
    delta_from_output: bool = False,
    product: Product = torch.matmul,
) -> Result:
    """Attention and its gradients with every matrix held in `dtype`, multiplied by `product`; in float64 the reference.

    delta, the row sum that the backward subtracts, is that of P ∘ dP, or with `delta_from_output` that of dO ∘ O: the
    same number by two sums. In a half dtype it is taken in float32.
    """
    q, k, v, dO = inputs.to(dtype)
    statistics = torch.promote_types(dtype, torch.float32)
    P, L = probabilities(inputs, is_causal, dtype, product)
    o = product(P, v)  # (6)
    dP = product(dO, v.mT).to(statistics)  # (16)
    terms = dO.to(statistics) * o if delta_from_output else P * dP
    delta = terms.sum(dim=-1, keepdim=True)
    dS = (P * (dP - delta)).to(dtype) * q.shape[-1] ** -0.5  # (17)
    return Result(o, L, dq=product(dS, k), dk=product(dS.mT, q), dv=product(P.mT, dO))  # (18), (19), (15)


def saved_log_sum_exps(o: Tensor) -> list[Tensor]:
    """The tensors kept for backward that have one entry a query: there should be one, L."""
    assert o.grad_fn is not None, "the output has no graph"
    saved: tuple[Tensor, ...] = getattr(o.grad_fn, "saved_tensors", ())
    return [x for x in saved if x is not None and x.shape == o.shape[:-1]]


def run_attention(attention: Callable[..., Tensor], inputs: Inputs, is_causal: bool) -> Result:
    """One forward and backward of `attention`, on leaves with the very strides of q, k and v.

    L is read where the output's node is one of our Functions; other nodes save what they like in the same shape.
    """
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    o = attention(q, k, v, is_causal)
    assert o.shape == q.shape
    assert o.grad_fn is not None
    node = o.grad_fn.name()
    saved = saved_log_sum_exps(o) if node.startswith("FlashAttention2") else []
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), inputs.dO)
    interpreted = INTERPRETED and node.startswith("FlashAttention2Triton")
    return Result(o.detach(), saved[0] if len(saved) == 1 else None, dq, dk, dv, interpreted)


def largest_error(got: Tensor, exact: Tensor) -> float:
    """Largest absolute error over the finite entries of `exact`; inf where an infinity is missing or extra.

    NaN in `got` gives NaN or inf, which is within no budget.
    """
    assert got.shape == exact.shape, f"shape {tuple(got.shape)}, not {tuple(exact.shape)}"
    got, infinite = got.to(exact.dtype), exact.isinf()
    if not torch.equal(torch.where(infinite, got, 0), torch.where(infinite, exact, 0)):
        return float("inf")
    error = torch.where(infinite, 0, got - exact).abs()
    return error.max().item() if error.numel() else 0.0


def largest_magnitude(x: Tensor) -> float:
    """Largest absolute finite entry; 0 where there is none."""
    finite = torch.where(x.isinf(), 0, x).abs()
    return finite.max().item() if finite.numel() else 0.0


def uncancelled_magnitudes(inputs: Inputs, is_causal: bool) -> dict[str, float]:
    """How large each result would be if the terms of its sums were all positive, and dP and delta added up.

    The roundings of a sum are as large as its terms, and stay when what is left of the sum is small: with a single key,
    where dS = scale (dP - delta) = 0, they are all that there is of dq and dk.
    """
    q, k, v, dO = (x.abs() for x in inputs.to(torch.float64))
    P, _ = probabilities(inputs, is_causal)
    dP = dO @ v.mT
    dS = P * (dP + (P * dP).sum(dim=-1, keepdim=True)) * q.shape[-1] ** -0.5
    sums = {"o": P @ v, "dq": dS @ k, "dk": dS.mT @ q, "dv": P.mT @ dO}
    return {name: largest_magnitude(x) for name, x in sums.items()}


def neighbours(inputs: Inputs) -> list[Inputs]:
    """The inputs and, the fewer their scores the more, others within 3 percent of them, entry by entry.

    The largest of a handful of rounding errors is a matter of luck; that of several such handfuls is less of one.
    """
    scores = inputs.q.shape[-2] * inputs.k.shape[-2]
    count = next((count for most_scores, count in NEIGHBOURS.items() if scores <= most_scores), 0)
    generator = torch.Generator().manual_seed(0)
    jitters = [
        [1 + 0.03 * (2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1) for x in inputs]
        for _ in range(count)
    ]
    return [inputs] + [
        Inputs(*((x.detach() * factor.to(x.device)).to(x.dtype) for x, factor in zip(inputs, jitter, strict=True)))
        for jitter in jitters
    ]


def dense_errors(
    inputs: Inputs, is_causal: bool, dtype: torch.dtype, product: Product = torch.matmul
) -> dict[str, float]:
    """The largest error against float64 of dense attention in `dtype`, for each tensor.

    It has two forms, for the two sums that make delta, and the worse of them counts: over a handful of keys dP - delta
    is mostly cancellation, where the form that FlashAttention does not use is exact by luck (for one key always).
    """
    exact = dense_attention(inputs, is_causal)
    forms = [dense_attention(inputs, is_causal, dtype, delta, product) for delta in (False, True)]
    return {name: max(largest_error(getattr(form, name), getattr(exact, name)) for form in forms) for name in TENSORS}


def error_budgets(inputs: Inputs, is_causal: bool, dtype: torch.dtype, interpreted: bool = False) -> dict[str, float]:
    """The largest error against float64 that is allowed each tensor: 2x the worst that dense attention makes on these
    inputs and their neighbours, and one rounding.

    The rounding is the result's, eps(dtype) of the largest exact entry, for L float32's; or, where that is more, the
    accumulators', float32's or float64's eps of the largest entry before its terms cancel.

    The matrix products of Triton's interpreter are those of NumPy's library, which adds up in an order of its own on
    each kind of CPU, and may err more than PyTorch's. For what it computes in float32, dense attention with products
    `one_by_one` counts too. (Their bound by gamma is 30 to 120 times today's errors at d = 64: TF32 would pass.)
    """
    exact, uncancelled = dense_attention(inputs, is_causal), uncancelled_magnitudes(inputs, is_causal)
    products = [torch.matmul, one_by_one] if interpreted and dtype == torch.float32 else [torch.matmul]
    near = neighbours(inputs)
    errors = [dense_errors(each, is_causal, dtype, product) for each in near for product in products]
    eps, accumulator_eps = torch.finfo(dtype).eps, torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    budgets = {}
    for name in TENSORS:
        rounding = (accumulator_eps if name == "L" else eps) * largest_magnitude(getattr(exact, name))
        rounding = max(rounding, accumulator_eps * uncancelled.get(name, 0))
        budgets[name] = 2 * max(error[name] for error in errors) + rounding
    return budgets


def assert_within_budget(got: Result, inputs: Inputs, is_causal: bool, dtype: torch.dtype | None = None) -> None:
    """Every tensor that `got` has is within its error budget.

    `dtype` is the one that the attention computes in, where that is not the inputs' (autocast).
    """
    exact, over = dense_attention(inputs, is_causal), []
    for interpreted in (False, True) if got.interpreted else (False,):  # the second budget takes ten times as long
        over = []
        for name, budget in error_budgets(inputs, is_causal, dtype or inputs.q.dtype, interpreted).items():
            if getattr(got, name) is None:
                continue
            error = largest_error(getattr(got, name), getattr(exact, name))
            # A budget that is not finite allows nothing: such inputs need an expectation of their own.
            if not (error <= budget < float("inf")):
                over.append(f"{name}: error {error:.3g}, budget {budget:.3g}")
        if not over:
            return
    assert not over, "; ".join(over)
