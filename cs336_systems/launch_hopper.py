"""As `launch`, for the kernels that run on Hopper alone: where they apply, and how they are launched.

They apply to 16-bit tensors of head dims 40 to 128, multiples of 8, on a GPU of compute capability 9.0, in the versions
of Triton that they were tested with. The environment variable CS336_HOPPER=0 turns them off, as hopper=False of
`FlashAttention2Triton.apply` does for a single call.
"""

import math
import os
import warnings
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_systems import launch
from cs336_systems.inputs import Keys, PerQuery, Queries
from cs336_systems.kernels.tiles import (
    HOPPER_OWN,
    STEP_COLUMNS,
    WARPGROUP_ROWS,
    HopperBackward,
    HopperForward,
    padded_head_dim,
)
from cs336_systems.launch import KernelCall, Launches, address, launch_kernel, launches_for, over_keys, strided
from cs336_systems.layouts import as_4d, copyable_strides, empty_output_like, empty_outputs

SWITCH = os.environ.get("CS336_HOPPER") or "1"  # empty is as good as unset
if SWITCH not in ("0", "1"):
    raise ValueError(f"the environment variable CS336_HOPPER is {SWITCH!r}; allowed: 0, 1")
TURNED_ON = SWITCH == "1"

if launch.TRITON_IS_TESTED:  # Gluon is experimental, and some of what the kernels use of it is private
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from cs336_systems.kernels.hopper import backward_d64, backward_d128, backward_parts
    from cs336_systems.kernels.hopper import forward as forward_kernels
    from cs336_systems.kernels.hopper.primitives import BackwardTiling, ForwardTiling

HopperTile = HopperForward | HopperBackward


def applies(q: Queries, k: Keys) -> bool:
    """Whether Hopper's own kernels compute this attention.

    Args:
        q, k: as the launches take them.
    """
    return (
        TURNED_ON
        and q.numel() > 0
        and k.numel() > 0
        and suits(q.device, q.dtype, q.shape[-1])
        and not launch.tiles_are_changed()  # which are the portable kernels'
    )


@lru_cache
def suits(device: torch.device, dtype: torch.dtype, d: int) -> bool:
    """Whether Hopper's own kernels can run there, and compute in that dtype and head dim.

    Warns, once for each of these, where they could but for the version of Triton.
    """
    could = (
        not launch.is_interpreted()
        and device.type == "cuda"
        and launch.gpu_of(device).capability == (9, 0)
        and dtype.itemsize == 2
        and padded_head_dim(d) in HOPPER_OWN
        and d % 8 == 0  # or rows do not begin at multiples of 16 bytes
    )
    if could and not launch.TRITON_IS_TESTED:
        warnings.warn(
            f"the faster kernels for Hopper were tested with Triton 3.6, and here is {launch.TRITON_VERSION}: "
            "the portable ones are used",
            stacklevel=2,
        )
    return could and launch.TRITON_IS_TESTED


def _described(x: Float[Tensor, "... n d"], rows: int, columns: int) -> "TensorDescriptor":
    """x for the copy engine, in tiles of so many rows and columns, as matrix instructions read them."""
    strides, x = copyable_strides(x), as_4d(x)
    assert strides is not None
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * x.element_size(), rank=4)
    return TensorDescriptor(x, list(x.shape), list(strides), [1, 1, rows, columns], layout)


def _in_rows(x: Float[Tensor, "... n d"], tile: HopperTile) -> "TensorDescriptor":
    return _described(x, WARPGROUP_ROWS, padded_head_dim(x.shape[-1]))


def _in_query_tiles(x: Queries, tile: HopperTile) -> "TensorDescriptor":
    return _described(x, tile.q_tile_size, padded_head_dim(x.shape[-1]))


def _in_key_tiles(x: Keys, tile: HopperTile) -> "TensorDescriptor":
    return _described(x, tile.k_tile_size, padded_head_dim(x.shape[-1]))


def _in_halves_of_query_tiles(x: Queries, tile: HopperTile) -> "TensorDescriptor":
    return _described(x, tile.q_tile_size, padded_head_dim(x.shape[-1]) // 2)


def _parts(x: Float[Tensor, "rows parts"], tile: HopperTile) -> "TensorDescriptor":
    layout = NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [tile.q_tile_size, x.shape[1]], layout)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _forward_tile(q: Queries, is_causal: bool) -> HopperForward:
    width, n_batch_heads = padded_head_dim(q.shape[-1]), math.prod(q.shape[:-2])
    return HOPPER_OWN[width].forward_for(q.shape[-2], width, n_batch_heads, is_causal, _multiprocessors(q.device))


def _backward_tile(q: Queries, is_causal: bool) -> HopperBackward:
    width = padded_head_dim(q.shape[-1])
    return HOPPER_OWN[width].backward_for(q.shape[-2], width)


FORWARD = KernelCall(
    lambda: forward_kernels.flash_forward_hopper_kernel,
    (_in_rows, _in_key_tiles, _in_key_tiles, _in_rows, address),
    _forward_tile,
    tiling=lambda: ForwardTiling,
    copies=True,
)
_PREPROCESS = KernelCall(
    lambda: backward_parts.flash_backward_hopper_preprocess_kernel,
    (strided, strided, address, address, strided),
    _backward_tile,
    tiling=lambda: BackwardTiling,
    rows=lambda tensors, tile: (tensors[0].shape[-2], tile.k_tile_size),  # as many queries as a tile has keys
)
BACKWARD = {  # by padded head dim
    width: KernelCall(
        function,
        (_in_query_tiles, _in_rows, _in_rows, _in_query_tiles, _parts, sums, _in_rows, _in_rows),
        _backward_tile,
        tiling=lambda: BackwardTiling,
        rows=over_keys,
        copies=True,
    )
    for width, function, sums in (
        (64, lambda: backward_d64.flash_backward_hopper_d64_kernel, _in_query_tiles),
        (128, lambda: backward_d128.flash_backward_hopper_d128_kernel, _in_halves_of_query_tiles),
    )
}
_POSTPROCESS = KernelCall(
    lambda: backward_parts.flash_backward_hopper_postprocess_kernel,
    (strided, strided),
    _backward_tile,
    tiling=lambda: BackwardTiling,
)


def launch_forward(
    q: Queries, k: Keys, v: Keys, is_causal: bool, tile: HopperForward | None = None,
    *, launches: Launches | None = None,
) -> tuple[Queries, PerQuery]:  # fmt: skip
    """Algorithm 1: o in the dtype of q, and L in float32 (natural logarithm)."""
    o, L = empty_outputs(q)
    launch_kernel(FORWARD, launches or launches_for(is_causal, tile, q, k, v), (q, k, v), (o, L))
    return o, L


def preprocess(o: Queries, dO: Queries, L: PerQuery, launches: Launches) -> tuple[Float[Tensor, "rows parts"], Queries]:
    """Line 2 of Algorithm 2: delta and L in parts; and zeros, to which the backward kernel adds dq."""
    n_rows = math.ceil(o.shape[-2] / HopperBackward.k_tile_size) * HopperBackward.k_tile_size
    parts = o.new_empty(math.prod(o.shape[:-2]) * n_rows * 2, STEP_COLUMNS)
    dq_sum = o.new_empty((*o.shape[:-1], padded_head_dim(o.shape[-1])), dtype=torch.float32)
    launch_kernel(_PREPROCESS, launches, (o, dO, L), (parts, dq_sum))
    return parts, dq_sum


def launch_backward(
    q: Queries, k: Keys, v: Keys, o: Queries, dO: Queries, L: PerQuery, is_causal: bool,
    tile: HopperBackward | None = None, *, launches: Launches | None = None,
) -> tuple[Queries, Keys, Keys]:  # fmt: skip
    """Algorithm 2: dq, dk and dv. dq is summed in no fixed order."""
    launches = launches or launches_for(is_causal, tile, q, k, v, o, dO, L)
    dq, dk, dv = map(empty_output_like, (q, k, v))
    parts, dq_sum = preprocess(o, dO, L, launches)
    launch_kernel(BACKWARD[padded_head_dim(q.shape[-1])], launches, (q, k, v, dO, parts, dq_sum), (dk, dv))
    launch_kernel(_POSTPROCESS, launches, (dq, dq_sum), ())  # dq comes first: dq_sum is padded, and D is read from dq
    return dq, dk, dv
