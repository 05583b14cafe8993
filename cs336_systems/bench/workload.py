"""One attention workload: its inputs, and what its equations say about FLOPs, bytes and memory."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

Pass = Literal["forward", "backward", "forward_backward"]
PASSES: tuple[Pass, ...] = get_args(Pass)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MIB = 2**20

# The backward has five matrix products (S, dP, dV, dQ, dK) where the forward has two (S, O).
FLOPS_OVER_FORWARD: dict[Pass, float] = {"forward": 1.0, "backward": 2.5, "forward_backward": 3.5}
FLOPS_METHOD = (
    "FLOPs: forward 4·B·H·n_queries·n_keys·d, halved when causal; backward 2.5 times, forward_backward 3.5 times that."
)

# What dense attention holds beside the saved matrices at the worst moment of its backward, that of the division in
# cs336_basics.modules.softmax: five matrices the size of S, in float32 also where the inputs are of half precision.
WORKING_SCORE_MATRICES = 5


def require_at_least(least: int, name: str, value: int) -> None:
    """Check a size or a count that a user gave.

    Raises:
        ValueError: `value` is below `least`; the message names what came and what is allowed.
    """
    if value < least:
        raise ValueError(f"{name} is {value}; allowed is at least {least}")


def powers_of_two(name: str, least: int, most: int) -> tuple[int, ...]:
    """least, 2·least, 4·least, … up to `most`.

    Raises:
        ValueError: `least` is below 1 or above `most`; the message names both, as --{name}-min and --{name}-max.
    """
    require_at_least(1, f"--{name}-min", least)
    if least > most:
        raise ValueError(f"--{name}-min is {least}; allowed is at most --{name}-max, {most}")
    return tuple(least << doublings for doublings in range((most // least).bit_length()))


def dtype_name(dtype: torch.dtype) -> str:
    """As in DTYPES: "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class AttentionShape:
    """Attention of q (batch, heads, n_queries, d) over k and v (batch, heads, n_keys, d).

    Raises:
        ValueError: a size below 1, or a dtype that is not in DTYPES.
    """

    batch: int
    heads: int
    n_queries: int
    n_keys: int
    d: int
    dtype: torch.dtype
    causal: bool

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "n_queries", "n_keys", "d"):
            require_at_least(1, name, getattr(self, name))
        if self.dtype not in DTYPES.values():
            raise ValueError(f"dtype is {self.dtype}; allowed are {', '.join(DTYPES)}")

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.dtype)

    def inputs(
        self, device: torch.device, seed: int = 0
    ) -> tuple[Float[Tensor, "b h n_queries d"], Float[Tensor, "b h n_keys d"], Float[Tensor, "b h n_keys d"]]:
        """q, k and v, standard normal, requiring gradients; the same values for the same seed and kind of device."""
        generator = torch.Generator(device).manual_seed(seed)
        q, k, v = (self._normal(n, device, generator) for n in (self.n_queries, self.n_keys, self.n_keys))
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

    def output_gradient(self, device: torch.device, seed: int = 1) -> Float[Tensor, "b h n_queries d"]:
        """dO, standard normal."""
        return self._normal(self.n_queries, device, torch.Generator(device).manual_seed(seed))

    def _normal(self, n: int, device: torch.device, generator: torch.Generator) -> Float[Tensor, "b h n d"]:
        return torch.randn(self.batch, self.heads, n, self.d, device=device, dtype=self.dtype, generator=generator)

    def flops(self, pass_: Pass) -> float:
        """Floating-point operations of one pass, as FLOPS_METHOD states."""
        dense = 4 * self.batch * self.heads * self.n_queries * self.n_keys * self.d
        return FLOPS_OVER_FORWARD[pass_] * dense / (2 if self.causal else 1)

    @property
    def io_bytes(self) -> int:
        """Bytes of q, k, v and o."""
        return self.batch * self.heads * 2 * (self.n_queries + self.n_keys) * self.d * self.dtype.itemsize

    @property
    def scores(self) -> int:
        """Entries of S, of all batch elements and heads."""
        return self.batch * self.heads * self.n_queries * self.n_keys

    def bytes_before_backward(self, saved_bytes_per_score: int) -> int:
        """Bytes alive between forward and backward, s being `saved_bytes_per_score` and e the bytes of an element:

        B·H·(2·(n_queries + n_keys)·d·e + s·n_queries·n_keys)   (q, k, v, o; score matrices)
        B·H·(2·(n_queries + n_keys)·d·e + 4·n_queries)          (q, k, v, o; L) where no score matrix is kept, s = 0
        """
        log_sum_exp = 4 * self.batch * self.heads * self.n_queries
        return self.io_bytes + (saved_bytes_per_score * self.scores if saved_bytes_per_score else log_sum_exp)

    def peak_bytes(self, saved_bytes_per_score: int) -> int:
        """Bytes at the worst moment of the backward: the above, dq, dk, dv and dO, and a dense one's temporaries."""
        itemsize = torch.promote_types(self.dtype, torch.float32).itemsize
        working = WORKING_SCORE_MATRICES * itemsize * self.scores if saved_bytes_per_score else 0
        return self.bytes_before_backward(saved_bytes_per_score) + self.io_bytes + working
