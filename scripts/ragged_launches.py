"""Forward and backward over ragged shapes, masks, head dims and layouts, with Hopper's own kernels where they apply and
without: what scripts/sanitize.sh watches.

    uv run scripts/ragged_launches.py
"""

from dataclasses import dataclass
from itertools import product

from cs336_systems.bench.cli import CommandLine, DtypeName, run_script

# (leading dimensions, n_queries, n_keys, d), dtype, causal: last tiles of one row and of all but one, either side
# longer, head dims that fill a tile's width and that do not, no keys at all.
PROBLEMS: list[tuple[tuple[tuple[int, ...], int, int, int], DtypeName, bool]] = [
    (((2, 3), 65, 65, 64), "bfloat16", True),
    (((1, 2), 129, 31, 16), "float16", False),
    (((2,), 33, 200, 80), "bfloat16", False),
    (((1, 3), 191, 191, 128), "float16", True),
    (((), 17, 70, 3), "float32", True),
    (((2,), 100, 65, 64), "float32", False),
    (((2,), 40, 40, 256), "bfloat16", True),
    (((2,), 5, 0, 32), "float32", False),
]


@dataclass(frozen=True, kw_only=True)
class Config(CommandLine):
    """The command line: there are no flags."""


def main(config: Config) -> None:
    import torch

    from cs336_systems.flash_triton import FlashAttention2Triton

    if not torch.cuda.is_available():
        raise ValueError("this needs a GPU, and there is none here")
    for (leading, n_queries, n_keys, d), dtype, is_causal in PROBLEMS:
        shapes = [(*leading, n, d) for n in (n_queries, n_keys, n_keys, n_queries)]
        contiguous = [torch.randn(shape, device="cuda").to(getattr(torch, dtype)) for shape in shapes]
        # Tiles of contiguous tensors come by descriptor, where the tables say so; columns of a wider tensor by pointer.
        columns = [torch.nn.functional.pad(x, (0, 1))[..., :d] for x in contiguous]
        for (q, k, v, dO), hopper in product((contiguous, columns), (True, False)):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            o = FlashAttention2Triton.apply(*leaves, is_causal, hopper)
            gradients = torch.autograd.grad(o, leaves, dO)
            assert all(x.isfinite().all() for x in (o, *gradients))
    torch.cuda.synchronize()
    print(f"{4 * len(PROBLEMS)} calls, forward and backward, on {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    run_script(main, Config, __doc__)
