"""Launches prepared once for tensors of one layout, past Triton's front end.

Triton compiles a function in C for each kernel, which takes the grid, the stream and every argument by itself: an
address, strides, a descriptor encoded for the copy engine. The Python code around it looks at each argument anew, and
encodes each descriptor, on every launch. Here that is done once, and addresses alone are filled in.

What is used of Triton has no documentation, and is that of version 3.6: `launch.TRITON_IS_TESTED` says where to use it.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.runtime import driver

from cs336_systems.kernels.primitives import Strided

Filler = Callable[[Tensor], tuple[Any, ...]]
"""Another tensor of a layout -> the arguments that stand for it."""

# PyTorch's allocator hands out the same addresses again and again, so what belongs to them is kept. They may never
# repeat all the same: after so many all are forgotten.
MOST_ENCODED = 1024  # descriptors of an argument
MOST_FILLED = 256  # lists of arguments, of a kernel for one layout


@dataclass(frozen=True)
class Prepared:
    """A kernel compiled for tensors of one layout, and all that a launch takes but their addresses."""

    compiled: Any
    launch_in_c: Callable[..., None]
    n_programs: int
    device: int
    fillers: tuple[Filler, ...]  # for each tensor
    constants: tuple[Any, ...]
    arguments_at: dict[tuple[int, ...], tuple[Any, ...]] = field(default_factory=dict)  # by the tensors' addresses

    def launch(self, *tensors: Tensor) -> None:
        """Run the kernel on the tensors' device."""
        gpu: Any = driver.active
        if gpu.get_current_device() == self.device:
            self._launch_there(tensors, gpu.get_current_stream(self.device))
        else:
            with torch.cuda.device(self.device):
                self._launch_there(tensors, gpu.get_current_stream(self.device))

    def _launch_there(self, tensors: tuple[Tensor, ...], stream: Any) -> None:
        """As `launch`, for tensors on the current device."""
        addresses = tuple(map(Tensor.data_ptr, tensors))
        arguments = self.arguments_at.get(addresses) or self._fill(addresses, tensors)
        compiled, runtime = self.compiled, knobs.runtime
        metadata_and_hooks = None, None, None
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:  # a profiler looks on
            metadata = compiled.launch_metadata((self.n_programs, 1, 1), stream)
            metadata_and_hooks = metadata, runtime.launch_enter_hook, runtime.launch_exit_hook
        self.launch_in_c(
            self.n_programs, 1, 1, stream, compiled.function, False, False, None, None, compiled.packed_metadata,
            *metadata_and_hooks, *arguments,
        )  # fmt: skip

    def _fill(self, addresses: tuple[int, ...], tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """What the kernel takes, kept for the next tensors that lie at these addresses."""
        of_tensors = (argument for fill, x in zip(self.fillers, tensors, strict=True) for argument in fill(x))
        if len(self.arguments_at) >= MOST_FILLED:
            self.arguments_at.clear()
        arguments = self.arguments_at[addresses] = (*of_tensors, *self.constants)
        return arguments


def prepared(
    compiled: Any, n_programs: int, device: torch.device, arguments: list[Any], constants: list[Any]
) -> Prepared | None:
    """What later launches take, from the arguments of the first; None where they have to go through the front end.

    Args:
        compiled: what the first launch gave.
        arguments: a tensor, a `Strided` or a descriptor for each tensor.
        constants: the arguments after those, which stay.
    """
    launcher, encodings = compiled.run, getattr(compiled.metadata, "tensordesc_meta", None) or ()
    launch_in_c = launcher.launch
    if inspect.isfunction(launch_in_c):  # wrapped, for there are descriptors
        launch_in_c = inspect.getclosurevars(launch_in_c).nonlocals["launcher"]
    if len(encodings) != sum(map(_is_descriptor, arguments)):
        return None  # they come apart into pointers and strides, for a GPU without a copy engine
    if launcher.global_scratch_size or launcher.profile_scratch_size or launcher.launch_pdl:
        return None
    remaining = iter(encodings)
    fillers = tuple(_filler(argument, next(remaining) if _is_descriptor(argument) else None) for argument in arguments)
    return Prepared(compiled, launch_in_c, n_programs, device.index, fillers, tuple(constants))


class _Described(NamedTuple):
    """What is encoded for the copy engine: a descriptor whose shape and strides were checked before."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    padding: str


def _is_descriptor(argument: Any) -> bool:
    """Whether it is one of Triton's or of Gluon's."""
    return hasattr(argument, "block_shape")


def _filler(argument: Any, encoding: Any) -> Filler:
    """What makes arguments as `argument` was, for another tensor of the same layout.

    Args:
        encoding: how Triton has a descriptor encoded; None for anything else.
    """
    if isinstance(argument, Strided):
        steps = argument[1:]
        return lambda x: ((x.data_ptr(), *steps),)
    if encoding is None:
        return lambda x: (x.data_ptr(),)

    shape, strides, padding = argument.shape, argument.strides, argument.padding
    encoded: dict[int, tuple[Any, ...]] = {}

    def described(x: Tensor) -> tuple[Any, ...]:
        known = encoded.get(x.data_ptr())
        if known is None:  # another thread may clear what this one has just put there
            if len(encoded) >= MOST_ENCODED:
                encoded.clear()
            known = tuple(make_tensordesc_arg(_Described(x, shape, strides, padding), encoding))
            encoded[x.data_ptr()] = known
        return known

    return described
