"""From tensors to a running kernel: which tiles, how tensors are handed over, where results go.

The way of a call: `launch_forward` and its like -> `launch_kernel` -> the kernel. The first launch for tensors of one
layout goes through Triton's own front end, which looks at every argument, compiles the kernel or finds it compiled, and
takes some 100 microseconds, as long as the forward of 16 heads x 4096 x 64 takes an H200. It leaves a `Prepared`
behind, and later launches for that layout only fill in addresses.
"""

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_systems import user_tiles
from cs336_systems.inputs import Keys, PerQuery, Queries, autocast_dtype, float32_matmul_precision
from cs336_systems.kernels.tiles import INTERPRETER, AnyTile, Gpu, Tile, Tiles, padded_head_dim
from cs336_systems.layouts import as_4d, copyable_strides, empty_output_like, empty_outputs

try:
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor

    from cs336_systems.kernels import backward as backward_kernels
    from cs336_systems.kernels import forward as forward_kernels
    from cs336_systems.kernels.primitives import Strided, Tiling
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "triton":
        raise
    triton = None

MAX_PROGRAMS = 2**31 - 1

# What `prepared` and the Hopper kernels use of Triton is in part undocumented or private: not used in other versions.
TRITON_VERSION = "" if triton is None else triton.__version__
TRITON_IS_TESTED = TRITON_VERSION.startswith("3.6.")

if TRITON_IS_TESTED:
    from cs336_systems.prepared import Prepared, prepared

_interpreter_lock = Lock()


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


def tiles_are_changed() -> bool:
    """Whether a `tiles_changed_by` is in force."""
    return _change is not _as_picked


_launched: list[Any] | None = None


@contextmanager
def launched_kernels() -> Generator[list[Any]]:
    """What Triton compiled for each launch in the block, in order, with its n_regs, n_spills and metadata.shared.

    In the interpreter, which compiles nothing, the list stays empty.
    """
    global _launched
    before, _launched = _launched, []
    try:
        yield (launched := _launched)
    finally:
        _launched = before
        if before is not None:  # this block lies in another one's
            before += launched


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
    return _change(user_tiles.pick_tiles(gpu_of(x.device), x.shape[-1], x.dtype))


def strided(x: Float[Tensor, "... n d"], tile: object) -> "Strided":
    """x as a pointer with strides."""
    x = as_4d(x)
    return Strided(x, *x.stride())


def _in_query_tiles(x: Queries, tile: Tile) -> "TensorDescriptor | Strided":
    return _in_tiles(x, tile.q_tile_size, tile)


def _in_key_tiles(x: Keys, tile: Tile) -> "TensorDescriptor | Strided":
    return _in_tiles(x, tile.k_tile_size, tile)


def _in_tiles(x: Float[Tensor, "... n d"], tile_size: int, tile: Tile) -> "TensorDescriptor | Strided":
    """x as a descriptor where there is one, or else as a pointer.

    A single row goes by pointer. Triton compiles a length of 1 into the kernel, and ptxas 12.8 crashes where one key
    and its value come by descriptor but queries by pointer (forward, causal, 16 bits, head dims from 33 on).
    """
    if x.shape[-2] == 1:
        return strided(x, tile)
    return _described(x, tile_size, padded_head_dim(x.shape[-1]), tile) or strided(x, tile)


def _described(x: Float[Tensor, "... n d"], rows: int, columns: int, tile: Tile) -> "TensorDescriptor | None":
    """x in pieces of so many rows and columns, where the tile asks for that and the copy engine can read x."""
    strides = copyable_strides(x) if tile.by_descriptor else None
    if strides is None:
        return None
    x = as_4d(x)
    return TensorDescriptor(x, list(x.shape), list(strides), [1, 1, rows, columns])


def address(x: Tensor, tile: object) -> Tensor:
    """x as where it begins: L, delta and their like are contiguous."""
    return x


def _per_query_in_tiles(x: PerQuery, tile: Tile) -> "TensorDescriptor | Tensor":
    """L or delta as a descriptor of (batch, heads, 1, n_queries) where there is one, or else as where it begins."""
    return _described(x.unsqueeze(-2), 1, tile.q_tile_size, tile) or address(x, tile)


def _asked_precision(x: Tensor) -> str | None:
    """How the user wants PyTorch to multiply float32 on a GPU; None for other dtypes."""
    return float32_matmul_precision("cuda") if x.dtype == torch.float32 else None


def _input_precision(x: Tensor) -> str:
    """How `tl.dot` multiplies float32: by one TF32 product only where the user asked PyTorch for TF32.

    Otherwise, at "highest" precision, operands are split into three bfloat16 parts, 24 bits in all, and the six
    products of parts that reach float32's last place are summed: three to five times as fast on an H200 as float32
    arithmetic, which is left to GPUs whose tensor cores Triton does not use. (Three TF32 products cost as much and lose
    two bits.)
    """
    asked = _asked_precision(x)
    if asked is None or is_interpreted() or not gpu_of(x.device).uses_tensor_cores:
        return "ieee"
    return "bf16x6" if asked == "highest" else "tf32"


def _copyable(x: Float[Tensor, "... n d"]) -> Float[Tensor, "... n d"]:
    """x, copied where the copy engine cannot read it."""
    return x if copyable_strides(x) else x.clone(memory_format=torch.contiguous_format)


RowsOf = Callable[[tuple[Tensor, ...], AnyTile], tuple[int, int]]
"""(the kernel's tensors, its tile) -> (rows of a head that are shared out among programs, rows of one program)"""


def over_queries(tensors: tuple[Tensor, ...], tile: AnyTile) -> tuple[int, int]:
    """A program owns a tile of queries, the rows of the first tensor."""
    return tensors[0].shape[-2], tile.q_tile_size


def over_keys(tensors: tuple[Tensor, ...], tile: AnyTile) -> tuple[int, int]:
    """A program owns a tile of keys, the rows of the second tensor."""
    return tensors[1].shape[-2], tile.k_tile_size


@dataclass(frozen=True, eq=False)
class KernelCall:
    """A kernel, and how tensors and a tile become its arguments."""

    # Both are looked up at a launch only: without Triton there are none.
    function: Callable[[], Any]  # gives the kernel
    takes: tuple[Callable[[Any, Any], Any], ...]  # for each tensor: (tensor, tile) -> the kernel's argument
    tile: Callable[[Tensor, bool], AnyTile]  # (the first tensor, is_causal) -> the tile, where the caller names none
    tiling: Callable[[], Any] = lambda: Tiling  # gives the class of the kernel's constexpr T
    rows: RowsOf = over_queries
    flags: Mapping[str, bool] = field(default_factory=dict)
    copies: bool = False  # whether it has to have inputs that the copy engine can read


@dataclass(eq=False)
class Launches:
    """What the launches of one pass have in common, and what the first of each kernel left behind.

    It is the same object for all calls that are alike, so that they are compared once for a pass.
    """

    is_causal: bool
    tile: AnyTile | None  # None for each kernel's own
    prepared: dict[KernelCall, "Prepared"] = field(default_factory=dict)
    inputs_are_right: bool = False  # whether inputs like these have been found right, as they are


_launches: dict[tuple[object, ...], Launches] = {}
MOST_LAUNCHES = 4096  # after which all are forgotten: lengths may never repeat


def _likeness(is_causal: bool, tile: AnyTile | None, inputs: tuple[Tensor, ...]) -> tuple[object, ...]:
    """Equal for inputs that are alike.

    They are alike in what Triton compiles for, in what a kernel's arguments depend on except addresses, and in what is
    asked of inputs before a launch.
    """
    chosen_by = (tile, _change, user_tiles.times_written)
    cast_to = (_asked_precision(inputs[0]), autocast_dtype(inputs[0]))
    layouts = [(x.dtype, x.device, x.shape, x.stride(), x.data_ptr() % 16, x.is_neg()) for x in inputs]
    return is_causal, chosen_by, cast_to, *layouts


def launches_for(is_causal: bool, tile: AnyTile | None, *inputs: Tensor) -> Launches:
    """The launches for inputs like these, all on one device."""
    key = _likeness(is_causal, tile, inputs)
    launches = _launches.get(key)
    if launches is None:
        if len(_launches) >= MOST_LAUNCHES:
            _launches.clear()
        launches = _launches[key] = Launches(is_causal, tile)
    return launches


def admit(is_causal: bool, *inputs: Tensor) -> Launches:
    """The launches for inputs like these, which were found right; from now on such inputs are not checked."""
    launches = launches_for(is_causal, None, *inputs)
    launches.inputs_are_right = True
    return launches


def admitted_launches(is_causal: bool, *inputs: Tensor) -> Launches | None:
    """The launches for inputs like these, where such were admitted before."""
    try:
        launches = _launches.get(_likeness(is_causal, None, inputs))
    except RuntimeError:  # sparse and nested tensors have no strides, and some have no memory
        return None
    return launches if launches is not None and launches.inputs_are_right else None


def launch_kernel(
    kernel: KernelCall, launches: Launches, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
) -> None:
    """Run a program of the kernel for every tile of every head, on the device of the tensors.

    Args:
        launches: as `launches_for` gives for the inputs of the pass.
        inputs: tensors whose layout follows from those. The first has the queries' shape, from which lengths and scale
            are read, the second the keys', where the kernel takes n_keys.
        outputs: new tensors, whose layout follows as well.
    """
    known = launches.prepared.get(kernel)
    if known is None and kernel.copies and not all(map(copyable_strides, inputs)):
        copies = tuple(map(_copyable, inputs))
        # The outputs' layout follows from that of what was copied, not from that of the copies.
        of_copies = launches_for(launches.is_causal, launches.tile, *copies, *outputs)
        return launch_kernel(kernel, of_copies, copies, outputs)
    if known is not None:
        known.launch(*inputs, *outputs)
        compiled = known.compiled
    else:
        tile = launches.tile or kernel.tile(inputs[0], launches.is_causal)
        # The interpreter keeps the number of the program that it runs in one global variable.
        with _interpreter_lock if is_interpreted() else torch.cuda.device_of(inputs[0]):
            compiled, new = _launch_first(kernel, tile, launches.is_causal, (*inputs, *outputs))
        if new is not None:
            launches.prepared[kernel] = new
    if _launched is not None and compiled is not None:
        _launched.append(compiled)


def _launch_first(
    kernel: KernelCall, tile: AnyTile, is_causal: bool, tensors: tuple[Tensor, ...]
) -> "tuple[Any, Prepared | None]":
    """As `launch_kernel`, through Triton's front end.

    Returns:
        What Triton compiled, None where there was nothing to do or in the interpreter; and what further launches for
        tensors of the same layout take, None where they have to go the same way.
    """
    first, second = tensors[:2]
    n_rows, tile_size = kernel.rows(tensors, tile)
    n_batch_heads = math.prod(first.shape[:-2])
    n_programs = n_batch_heads * math.ceil(n_rows / tile_size)
    if n_programs > MAX_PROGRAMS:
        raise ValueError(
            f"{n_batch_heads} heads of {n_rows} rows take {n_programs} programs; a launch has at most {MAX_PROGRAMS}"
        )
    if n_programs == 0:
        return None, None
    is_half = first.dtype.itemsize == 2
    values = {
        "n_heads": first.shape[-3] if first.ndim > 2 else 1,
        "n_batch_heads": n_batch_heads,
        "n_queries": first.shape[-2],
        "n_keys": second.shape[-2],
        "scale": first.shape[-1] ** -0.5,
        **kernel.flags,
    }
    compiled_for = {
        "D": first.shape[-1],
        "D_TILE_SIZE": padded_head_dim(first.shape[-1]),
        "INPUT_PRECISION": _input_precision(first),
        "BASE_2": is_half,
        **tile.constants(is_causal),
    }
    tiling = kernel.tiling()
    values["T"] = tiling(**{field.name: compiled_for[field.name] for field in fields(tiling)})
    function = kernel.function()
    arguments = [take(x, tile) for take, x in zip(kernel.takes, tensors, strict=True)]
    constants = [values[name] for name in function.arg_names[len(tensors) :]]
    compiled = function[(n_programs,)](
        *arguments,
        *constants,
        # Fused, scale · S would stay unrounded, while L is made of rounded products; where scores are large, exp
        # turns the difference into an error of P. The budget of 16-bit inputs has room for it, float32's has not.
        enable_fp_fusion=is_half,
        **tile.options(),
    )
    if compiled is None or not TRITON_IS_TESTED:
        return compiled, None
    return compiled, prepared(compiled, n_programs, first.device, arguments, constants)


# All but `launch_backward` take a tile, for tests and tuning; without one `tiles_for` chooses, and what it raises is
# raised. Those of one pass may share their `launches`, which are found where none are given. Past MAX_PROGRAMS programs
# each raises ValueError.

_QKV = (_in_query_tiles, _in_key_tiles, _in_key_tiles)

_FORWARD = KernelCall(
    lambda: forward_kernels.flash_forward_kernel, (*_QKV, strided, address), lambda q, is_causal: tiles_for(q).forward
)
_DQ, _DELTA = (
    KernelCall(
        lambda: backward_kernels.flash_backward_dq_kernel,
        (*_QKV, strided, _in_query_tiles, address, strided, address, address),
        lambda q, is_causal: tiles_for(q).dq,
        flags={"WANTS_DQ": wants_dq},
    )
    for wants_dq in (True, False)
)
_DK_DV = KernelCall(
    lambda: backward_kernels.flash_backward_dk_dv_kernel,
    (*_QKV, _in_query_tiles, _per_query_in_tiles, _per_query_in_tiles, strided, strided),
    lambda q, is_causal: tiles_for(q).dk_dv,
    rows=over_keys,
)


def launch_forward(
    q: Queries, k: Keys, v: Keys, is_causal: bool, tile: Tile | None = None, *, launches: Launches | None = None
) -> tuple[Queries, PerQuery]:
    """Algorithm 1: o in the dtype of q, and L in float32 (natural logarithm)."""
    o, L = empty_outputs(q)
    launch_kernel(_FORWARD, launches or launches_for(is_causal, tile, q, k, v), (q, k, v), (o, L))
    return o, L


def launch_dq(
    q: Queries, k: Keys, v: Keys, o: Queries, dO: Queries, L: PerQuery, is_causal: bool,
    wants_dq: bool = True, tile: Tile | None = None, launches: Launches | None = None,
) -> tuple[Queries, PerQuery, PerQuery]:  # fmt: skip
    """Algorithm 2 with its loops exchanged: dq, line 16, empty if nobody wants it; L in the base of the kernels'
    exponentials; and line 2, delta in float32.
    """
    dq = empty_output_like(q) if wants_dq else q.new_empty(0)
    L_base, delta = torch.empty_like(L), torch.empty_like(L)
    # The kernel that leaves dq out takes a tensor in its place all the same.
    outputs = (dq if wants_dq else q, L_base, delta)
    inputs = (q, k, v, o, dO, L)
    launch_kernel(_DQ if wants_dq else _DELTA, launches or launches_for(is_causal, tile, *inputs), inputs, outputs)
    return dq, L_base, delta


def launch_dk_dv(
    q: Queries, k: Keys, v: Keys, dO: Queries, L_base: PerQuery, delta: PerQuery, is_causal: bool,
    tile: Tile | None = None, launches: Launches | None = None,
) -> tuple[Keys, Keys]:  # fmt: skip
    """Algorithm 2 without line 16: dk and dv, from what `launch_dq` gave."""
    dk, dv = empty_output_like(k), empty_output_like(v)
    inputs = (q, k, v, dO, L_base, delta)
    launch_kernel(_DK_DV, launches or launches_for(is_causal, tile, *inputs), inputs, (dk, dv))
    return dk, dv


def launch_backward(
    q: Queries, k: Keys, v: Keys, o: Queries, dO: Queries, L: PerQuery, is_causal: bool, wants_dq: bool,
    wants_dk_dv: bool, *, launches: Launches | None = None,
) -> tuple[Queries, Keys, Keys]:  # fmt: skip
    """Algorithm 2: dq, dk and dv; an empty tensor in place of each that nobody wants."""
    launches = launches or launches_for(is_causal, None, q, k, v, o, dO, L)
    dq, L_base, delta = launch_dq(q, k, v, o, dO, L, is_causal, wants_dq, launches=launches)
    if not wants_dk_dv:
        return dq, k.new_empty(0), v.new_empty(0)
    return dq, *launch_dk_dv(q, k, v, dO, L_base, delta, is_causal, launches=launches)
