"""FlashAttention-2 on Triton kernels: argument checks, launches as custom ops, and the autograd Functions.

The way of a call: `FlashAttention2Triton.apply` -> a custom op -> `_launch` with a tile from `kernels.tiles` -> the
kernel. The custom ops are opaque to torch.compile, so a compiled model keeps them in one graph.
"""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from cs336_systems.differentiable_once import differentiable_once
from cs336_systems.inputs import Keys, PerQuery, Queries, attention_inputs
from cs336_systems.kernels.tiles import DELTA, INTERPRETER, Gpu, Tile, Tiles, padded_head_dim, pick_tiles

try:
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor

    from cs336_systems.kernels import backward as backward_kernels
    from cs336_systems.kernels import forward as forward_kernels
    from cs336_systems.kernels.primitives import Strided
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "triton":
        raise
    triton = None

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

MAX_PROGRAMS = 2**31 - 1

_interpreter = Lock()


def is_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter: TRITON_INTERPRET=1 was set before Triton was imported."""
    return triton is not None and not isinstance(forward_kernels.flash_forward_kernel, triton.JITFunction)


@lru_cache
def gpu_of(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.name, (properties.major, properties.minor), properties.shared_memory_per_block_optin)


def _as_picked(tiles: Tiles) -> Tiles:
    return tiles


_change = _as_picked


@contextmanager
def tiles_changed_by(change: Callable[[Tiles], Tiles]) -> Generator[None]:
    """Launch what goes over tiles of S, in the whole process, with change(tiles) where the tables say `tiles`.

    For tests, tuning and benchmarks. The block has to last until the backward is done.
    """
    global _change
    before, _change = _change, change
    try:
        yield
    finally:
        _change = before


_launched: list[Any] | None = None


@contextmanager
def launched_kernels() -> Generator[list[Any]]:
    """What Triton compiled for each launch in the block, in order, with its n_regs, n_spills and metadata.shared.

    In the interpreter, which compiles nothing, the list stays empty.
    """
    global _launched
    before, _launched = _launched, []
    try:
        yield _launched
    finally:
        _launched = before


def tiles_for(x: Tensor) -> Tiles:
    """The tiles for tensors like x, once it is sure that the kernels can run on its device.

    Raises:
        RuntimeError: Triton is not installed.
        ValueError: a CPU tensor without the interpreter; a device that is no GPU, or one that is too old or too small.
        TypeError: a dtype that the device, or the interpreter, cannot compute in.
    """
    if triton is None:
        raise RuntimeError(
            "FlashAttention2Triton needs Triton, which is not installed here (it exists for Linux only); "
            "FlashAttention2Pytorch computes the same without it"
        )
    if is_interpreted():
        if x.dtype == torch.bfloat16:
            raise TypeError(
                f"got {x.dtype} in Triton's interpreter, whose matmul is wrong in that dtype; allowed there: "
                "torch.float16, torch.float32"
            )
        return _change(INTERPRETER)
    if not x.is_cuda:
        raise ValueError(
            f"FlashAttention2Triton needs tensors on a GPU, got {x.device}; CPU tensors run only in Triton's "
            "interpreter, with TRITON_INTERPRET=1 set before Triton is imported"
        )
    return _change(pick_tiles(gpu_of(x.device), x.shape[-1], x.dtype))


def _as_4d(x: Float[Tensor, "... n d"]) -> Float[Tensor, "batch heads n d"]:
    """x with its leading dimensions as batch and heads: a view wherever the strides allow one."""
    if x.ndim == 4:
        return x
    if x.ndim == 2:
        return x[None, None]
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _empty_like(x: Float[Tensor, "... n d"]) -> Float[Tensor, "... n d"]:
    """An uninitialised tensor of x's shape, of which `_as_4d` is a view; up to four dimensions in x's memory order."""
    return torch.empty_like(x) if x.ndim <= 4 else x.new_empty(x.shape)


def _strided(x: Float[Tensor, "... n d"]) -> "Strided":
    x = _as_4d(x)
    return Strided(x, *x.stride())


def _operand(x: Float[Tensor, "... n d"], tile_size: int, by_descriptor: bool) -> "TensorDescriptor | Strided":
    """x as the attention kernels read it: a descriptor, where asked for and where the copy engine can read x, or else
    a pointer with strides.

    The copy engine wants an address and steps that are multiples of 16 bytes, steps above 0, and a last step of 1.
    """
    x = _as_4d(x)
    elements_in_16_bytes = 16 // x.element_size()
    steps = [
        step if size > 1 else elements_in_16_bytes  # a dimension of size 1 may have any stride
        for step, size in zip(x.stride()[:-1], x.shape[:-1], strict=True)
    ]
    aligned = x.data_ptr() % 16 == 0 and all(step > 0 and step % elements_in_16_bytes == 0 for step in steps)
    if not (by_descriptor and aligned and x.stride(-1) == 1 and x.numel() > 0):
        return _strided(x)
    return TensorDescriptor(x, list(x.shape), [*steps, 1], [1, 1, tile_size, padded_head_dim(x.shape[-1])])


def _query_operand(x: Queries, tile: Tile) -> "TensorDescriptor | Strided":
    return _operand(x, tile.q_tile_size, tile.by_descriptor)


def _key_operand(x: Keys, tile: Tile) -> "TensorDescriptor | Strided":
    return _operand(x, tile.k_tile_size, tile.by_descriptor)


def _with_dense_rows(x: Float[Tensor, "... n d"]) -> Float[Tensor, "... n d"]:
    """x, copied where the elements of a row do not lie side by side: the kernels read each row many times."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _input_precision(x: Tensor) -> str:
    """How `tl.dot` multiplies float32: by one TF32 product only where the user asked PyTorch for TF32.

    Otherwise, at "highest" precision, operands are split into three bfloat16 parts, 24 bits in all, and the six
    products of parts that reach float32's last place are summed: three to five times as fast on an H200 as float32
    arithmetic, which is left to GPUs whose tensor cores Triton does not use. (Three TF32 products cost as much and lose
    two bits.)
    """
    if x.dtype != torch.float32 or is_interpreted() or not gpu_of(x.device).uses_tensor_cores:
        return "ieee"
    return "bf16x6" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _launch(kernel, tile: Tile, rows: Float[Tensor, "... n d"], tile_size: int, *tensors, **arguments) -> None:
    """Run one program of the kernel for every `tile_size` rows of every head of `rows`, on their device."""
    n_batch_heads = math.prod(rows.shape[:-2])
    n_programs = n_batch_heads * math.ceil(rows.shape[-2] / tile_size)
    if n_programs > MAX_PROGRAMS:
        raise ValueError(f"shape {tuple(rows.shape)} takes {n_programs} programs; a launch has at most {MAX_PROGRAMS}")
    if n_programs == 0:
        return
    is_half = rows.dtype.itemsize == 2
    # The interpreter keeps the number of the program that it runs in one global variable.
    with _interpreter if is_interpreted() else torch.cuda.device_of(rows):
        compiled = kernel[(n_programs,)](
            *tensors,
            n_heads=rows.shape[-3] if rows.ndim > 2 else 1,
            n_batch_heads=n_batch_heads,
            D=rows.shape[-1],
            D_TILE_SIZE=padded_head_dim(rows.shape[-1]),
            Q_TILE_SIZE=tile.q_tile_size,
            BASE_2=is_half,
            # Fused, scale · S would stay unrounded, while L is made of rounded products; where scores are large, exp
            # turns the difference into an error of P. The budget of 16-bit inputs has room for it, float32's has not.
            enable_fp_fusion=is_half,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            maxnreg=tile.max_registers,
            **arguments,
        )
    if _launched is not None and compiled is not None:
        _launched.append(compiled)


def _attention_arguments(tile: Tile, q: Queries, k: Keys, is_causal: bool) -> dict[str, Any]:
    """What the three kernels that go over tiles of S have in common."""
    return {
        "n_queries": q.shape[-2],
        "n_keys": k.shape[-2],
        "scale": q.shape[-1] ** -0.5,
        "K_TILE_SIZE": tile.k_tile_size,
        "IS_CAUSAL": is_causal,
        "INPUT_PRECISION": _input_precision(q),
        "HEAD_GROUP": tile.head_group,
        "SKIP_MASKED": tile.skip_masked,
    }


# A `launch_…` function takes a tile, for tests and for tuning; the custom op around it, whose signature cannot hold
# one, leaves the choice to `tiles_for`. Each raises what `tiles_for` raises, and ValueError past MAX_PROGRAMS programs.


def launch_forward(q: Queries, k: Keys, v: Keys, is_causal: bool, tile: Tile | None = None) -> tuple[Queries, PerQuery]:
    """Algorithm 1: o in the dtype of q, and L in float32 (natural logarithm)."""
    tile = tile or tiles_for(q).forward
    o, L = _empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    tensors = _query_operand(q, tile), _key_operand(k, tile), _key_operand(v, tile), _strided(o), L
    arguments = _attention_arguments(tile, q, k, is_causal)
    _launch(forward_kernels.flash_forward_kernel, tile, q, tile.q_tile_size, *tensors, **arguments)
    return o, L


def launch_delta(o: Queries, dO: Queries, L: PerQuery) -> tuple[PerQuery, PerQuery]:
    """L in the base of the kernels' exponentials; and Algorithm 2, line 2: delta in float32."""
    delta, L_base = torch.empty_like(L), torch.empty_like(L)
    kernel = backward_kernels.flash_backward_delta_kernel
    tensors = _strided(o), _strided(dO), L, delta, L_base
    _launch(kernel, DELTA, o, DELTA.q_tile_size, *tensors, n_queries=o.shape[-2])
    return L_base, delta


def launch_dk_dv(
    q: Queries, k: Keys, v: Keys, dO: Queries, L_base: PerQuery, delta: PerQuery, is_causal: bool,
    tile: Tile | None = None,
) -> tuple[Keys, Keys]:  # fmt: skip
    """Algorithm 2 without line 16: dk and dv, from what `launch_delta` gave."""
    tile = tile or tiles_for(q).dk_dv
    dk, dv = _empty_like(k), _empty_like(v)
    inputs = _query_operand(q, tile), _key_operand(k, tile), _key_operand(v, tile), _query_operand(dO, tile)
    tensors = *inputs, _strided(dk), _strided(dv), L_base, delta
    arguments = _attention_arguments(tile, q, k, is_causal)
    _launch(backward_kernels.flash_backward_dk_dv_kernel, tile, k, tile.k_tile_size, *tensors, **arguments)
    return dk, dv


def launch_dq(
    q: Queries, k: Keys, v: Keys, dO: Queries, L_base: PerQuery, delta: PerQuery, is_causal: bool,
    tile: Tile | None = None,
) -> Queries:  # fmt: skip
    """Algorithm 2 with its loops exchanged: dq, line 16, from what `launch_delta` gave."""
    tile = tile or tiles_for(q).dq
    dq = _empty_like(q)
    inputs = _query_operand(q, tile), _key_operand(k, tile), _key_operand(v, tile), _query_operand(dO, tile)
    tensors = *inputs, _strided(dq), L_base, delta
    arguments = _attention_arguments(tile, q, k, is_causal)
    _launch(backward_kernels.flash_backward_dq_kernel, tile, q, tile.q_tile_size, *tensors, **arguments)
    return dq


@torch.library.custom_op("cs336_systems::flash_forward", mutates_args=())
def _forward_op(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    return launch_forward(q, k, v, is_causal)


@_forward_op.register_fake
def _(q, k, v, is_causal):
    return _empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("cs336_systems::flash_delta", mutates_args=())
def _delta_op(o: Tensor, dO: Tensor, L: Tensor) -> tuple[Tensor, Tensor]:
    return launch_delta(o, dO, L)


@_delta_op.register_fake
def _(o, dO, L):
    return torch.empty_like(L), torch.empty_like(L)


@torch.library.custom_op("cs336_systems::flash_dk_dv", mutates_args=())
def _dk_dv_op(
    q: Tensor, k: Tensor, v: Tensor, dO: Tensor, L_base: Tensor, delta: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor]:
    return launch_dk_dv(q, k, v, dO, L_base, delta, is_causal)


@_dk_dv_op.register_fake
def _(q, k, v, dO, L_base, delta, is_causal):
    return _empty_like(k), _empty_like(v)


@torch.library.custom_op("cs336_systems::flash_dq", mutates_args=())
def _dq_op(q: Tensor, k: Tensor, v: Tensor, dO: Tensor, L_base: Tensor, delta: Tensor, is_causal: bool) -> Tensor:
    return launch_dq(q, k, v, dO, L_base, delta, is_causal)


@_dq_op.register_fake
def _(q, k, v, dO, L_base, delta, is_causal):
    return _empty_like(q)


def _op_or_launch(op: Callable[..., Any], launch: Callable[..., Any]) -> Callable[..., Any]:
    """`launch`, as the opaque `op` wherever somebody looks on: under torch.compile, in dispatch modes, for tensors that
    are fake, meta, traced or of a subclass. The dispatch of an op costs some 40 microseconds, a good part of a short
    call.
    """

    def call(x: Tensor, *rest: Any) -> Any:
        plain = (type(x) is Tensor or type(x) is torch.nn.Parameter) and not x.is_meta
        if torch.compiler.is_compiling() or not plain or is_in_torch_dispatch_mode():
            return op(x, *rest)
        return launch(x, *rest)

    return call


_forward = _op_or_launch(_forward_op, launch_forward)
_delta = _op_or_launch(_delta_op, launch_delta)
_dk_dv = _op_or_launch(_dk_dv_op, launch_dk_dv)
_dq = _op_or_launch(_dq_op, launch_dq)


class FlashAttention2Triton(torch.autograd.Function):
    """`FlashAttention2Triton.apply(q, k, v, is_causal=False) -> o`, differentiable once.

    q is (..., n_queries, d), k and v are (..., n_keys, d), on a GPU, in float16, bfloat16 or float32, with any strides.
    For the backward it keeps q, k, v, o and the log-sum-exp L (natural logarithm, float32) of shape (..., n_queries).
    No kernel uses atomics: results are bit-equal from run to run. A second derivative raises.

    Gradients lose accuracy as L grows, by the rounding of a float32: scores of 1e4 cost 1e-3 of P. For 16-bit inputs
    scores end at 1e9, beyond which o may be NaN.

    Raises:
        TypeError, ValueError: as `cs336_systems.inputs.attention_inputs` and `tiles_for` say.
        RuntimeError: Triton is not installed.
    """

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        q, k, v = map(_with_dense_rows, attention_inputs(q, k, v, is_causal, DTYPES))
        o, L = _forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, L)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    @differentiable_once
    def backward(ctx, dO):
        q, k, v, o, L = ctx.saved_tensors
        needs_dq, needs_dk, needs_dv = ctx.needs_input_grad[:3]
        dO = _with_dense_rows(dO)
        L_base, delta = _delta(o, dO, L.contiguous())  # a hook on saved tensors may have changed its strides
        dq = dk = dv = None
        if needs_dk or needs_dv:
            dk, dv = _dk_dv(q, k, v, dO, L_base, delta, ctx.is_causal)
        if needs_dq:
            dq = _dq(q, k, v, dO, L_base, delta, ctx.is_causal)
        return dq, dk if needs_dk else None, dv if needs_dv else None, None
