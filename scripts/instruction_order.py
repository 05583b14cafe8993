"""In which order a kernel's inner loops multiply, wait and exponentiate: read from what is compiled, without a GPU.

    uv run scripts/instruction_order.py                        Hopper's own kernels, head dim 64
    uv run scripts/instruction_order.py --d 128 --dtype float16 --no-causal

First, what compiles. For each kernel: registers, bytes of stack (what does not fit into registers), shared memory.
Below, for each innermost loop with matrix instructions: how many instructions of each kind, then their order ("exp2 x
7" are seven in a row, and kinds without a name here are left out). Each warpgroup has loops of its own. A loop that
runs once a tile should show no "stack", and matrix instructions issued well before the wait for them.
"""

import re
from collections import Counter
from dataclasses import dataclass, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from cs336_systems.bench.cli import CommandLine, run_script

if TYPE_CHECKING:
    from torch import Tensor
    from triton.experimental.gluon._runtime import GluonASTSource

    from cs336_systems.kernels.tiles import AnyTile, HopperForward
    from cs336_systems.launch import KernelCall

ELEMENTS = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
SHAPE = (1, 1, 256)  # batch, heads, n: any multiples of the tiles

# What an instruction begins with -> what it is called here; the first that fits counts.
KINDS = {
    "HGMMA": "wgmma",
    "WARPGROUP.DEPBAR": "wait for wgmma",
    "WARPGROUP.ARRIVE": "fence",
    "MUFU.EX2": "exp2",
    "SYNCS": "mbarrier",
    "BAR.": "barrier",
    "UTMALDG": "TMA load",
    "UTMAREDG": "TMA add",
    "UTMASTG": "TMA store",
    "STS": "store to shared",
    "LDS": "load from shared",
    "SHFL": "shuffle",
    "F2FP": "round",
    "FMNMX": "max",
    "FFMA": "fma",
    "FMUL": "mul",
    "FADD": "add",
    "STL": "stack",
    "LDL": "stack",
}


@dataclass(frozen=True, kw_only=True)
class Config(CommandLine):
    """The command line."""

    d: int = 64
    """Head dim, 40 to 128 in steps of 8."""
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """The type of q, k, v and o."""
    causal: bool = True
    """Mask the keys that come after a query."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 40 <= self.d <= 128 or self.d % 8:
            raise ValueError(f"--d is {self.d}; Hopper has kernels of its own for multiples of 8 from 40 to 128")


def forward_source(config: Config, tile: "HopperForward") -> "GluonASTSource":
    """The forward kernel, for what its launch hands over."""
    import torch

    from cs336_systems import launch_hopper

    q = torch.empty((*SHAPE, config.d), dtype=getattr(torch, config.dtype), device="meta")
    L = q.new_empty(SHAPE, dtype=torch.float32)
    return source(launch_hopper.FORWARD, tile, (q, q, q, q, L), config)


def backward_source(config: Config) -> "GluonASTSource":
    """The backward kernel of that head dim, for what its launch hands over."""
    import torch

    from cs336_systems import launch_hopper
    from cs336_systems.kernels.tiles import HOPPER_OWN, STEP_COLUMNS, padded_head_dim

    q = torch.empty((*SHAPE, config.d), dtype=getattr(torch, config.dtype), device="meta")
    width = padded_head_dim(config.d)
    parts, dq_sum = q.new_empty(2 * SHAPE[-1], STEP_COLUMNS), q.new_empty((*SHAPE, width), dtype=torch.float32)
    tensors = (q, q, q, q, parts, dq_sum, q, q)
    return source(launch_hopper.BACKWARD[width], HOPPER_OWN[width].backward, tensors, config)


def source(call: "KernelCall", tile: "AnyTile", tensors: "tuple[Tensor, ...]", config: Config) -> "GluonASTSource":
    """The call's kernel for tensors like these; what is left is a length, or the scale."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from cs336_systems.kernels.tiles import padded_head_dim

    kernel = call.function()
    types = [type_of(take(x, tile)) for take, x in zip(call.takes, tensors, strict=True)]
    compiled_for = tile.constants(config.causal) | {"D": config.d, "D_TILE_SIZE": padded_head_dim(config.d)}
    tiling = call.tiling()
    constants = {"T": tiling(**{field.name: compiled_for[field.name] for field in fields(tiling)})}
    signature = {name: "fp32" if name == "scale" else "i32" for name in kernel.arg_names}
    signature |= dict(zip(kernel.arg_names, types, strict=False))
    signature |= {name: "constexpr" for name in constants.keys() & signature.keys()}
    values = {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants}
    return GluonASTSource(kernel, signature, values, {})


def type_of(argument: Any) -> str:
    """What Triton calls the type of a descriptor, or of a tensor."""
    if not hasattr(argument, "block_shape"):
        return f"*{ELEMENTS[str(argument.dtype)]}"
    return f"tensordesc<{ELEMENTS[str(argument.base.dtype)]}{argument.block_shape},{argument.layout!r}>"


def inner_loops(instructions: list[tuple[int, str]]) -> list[list[str]]:
    """The kinds of the instructions of each loop that has matrix instructions, and shares none with a smaller one."""
    at = {address: index for index, (address, _) in enumerate(instructions)}
    kinds = [kind(text) for _, text in instructions]
    loops = []
    for index, (address, text) in enumerate(instructions):
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if target is None or int(target[1], 16) > address:
            continue
        begin, end = at[int(target[1], 16)], index + 1
        # Waits are retried behind the end of the program, and jump back from there: no loop.
        ends = any(re.search(r"\bEXIT\b", text) for _, text in instructions[begin:end])
        if "wgmma" in kinds[begin:end] and not ends:
            loops.append((begin, end))
    disjoint: list[tuple[int, int]] = []
    for begin, end in sorted(loops, key=lambda loop: loop[1] - loop[0]):
        if all(end <= a or b <= begin for a, b in disjoint):
            disjoint.append((begin, end))
    return [kinds[begin:end] for begin, end in sorted(disjoint)]


def kind(instruction: str) -> str:
    """What an instruction is called here; nothing if it has no name."""
    operation = re.sub(r"^@!?U?P\w+\s+", "", instruction)
    return next((name for prefix, name in KINDS.items() if operation.startswith(prefix)), "")


def in_order(kinds: list[str]) -> str:
    """ "exp2 x 7, wgmma" """
    runs = [(name, len(list(run))) for name, run in groupby(filter(None, kinds))]
    return ", ".join(name if count == 1 else f"{name} x {count}" for name, count in runs)


def main(config: Config) -> None:
    import triton
    from rich.console import Console
    from triton.backends.compiler import GPUTarget

    from cs336_systems.cubin import assembler, assembly_of, require_compiler, usage_of
    from cs336_systems.kernels.tiles import HOPPER_OWN, padded_head_dim
    from cs336_systems.launch import TRITON_IS_TESTED, TRITON_VERSION

    require_compiler()
    if not TRITON_IS_TESTED:
        raise ValueError(f"Hopper's own kernels are for Triton 3.6, and here is {TRITON_VERSION or 'none'}")
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"Triton {TRITON_VERSION}, {assembler()}")
    tiles = HOPPER_OWN[padded_head_dim(config.d)]
    sources = {"forward": forward_source(config, tiles.forward)}
    if tiles.forward_of_few != tiles.forward:
        sources["forward of few tiles"] = forward_source(config, tiles.forward_of_few)
    sources["backward"] = backward_source(config)
    for name, of in sources.items():
        kernel = triton.compile(of, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
        usage = usage_of(kernel)
        console.print(
            f"{name}: {usage.registers} registers at the start, {usage.stack} bytes of stack, "
            f"{usage.shared_memory} bytes of shared memory"
        )
        for kinds in inner_loops(assembly_of(kernel)):
            counts = ", ".join(f"{count} {kind}" for kind, count in Counter(filter(None, kinds)).most_common())
            console.print(f"  a loop of {len(kinds)} instructions: {counts}")
            console.print(f"    {in_order(kinds)}")


if __name__ == "__main__":
    run_script(main, Config, __doc__)
