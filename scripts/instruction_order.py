"""In which order a kernel's inner loops multiply, wait and exponentiate: read from what is compiled, without a GPU.

    uv run scripts/instruction_order.py                        Hopper's own kernels, head dim 64
    uv run scripts/instruction_order.py --d 128 --dtype float16 --no-causal

For each kernel: registers, bytes of stack (what does not fit into registers), shared memory. Below, for each innermost
loop with matrix instructions: how many instructions of each kind, then their order ("exp2 x 7" are seven in a row, and
kinds without a name here are left out). Each warpgroup has loops of its own. A loop that runs once a tile should show
no "stack", and matrix instructions issued well before the wait for them.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import triton
from rich.console import Console
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from cs336_systems.bench.entry import run_script
from cs336_systems.kernels.hopper.backward import flash_backward_hopper_kernel
from cs336_systems.kernels.hopper.backward_wide import flash_backward_hopper_wide_kernel
from cs336_systems.kernels.hopper.forward import flash_forward_hopper_kernel
from cs336_systems.kernels.tiles import (
    HOPPER_OWN,
    STEP_COLUMNS,
    WARPGROUP_ROWS,
    HopperBackward,
    HopperForward,
    padded_head_dim,
)

HOPPER = GPUTarget("cuda", 90, 32)
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ELEMENTS = {"bfloat16": "bf16", "float16": "fp16"}

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


@dataclass(frozen=True)
class Config:
    """The command line."""

    d: int = 64
    """Head dim, 33 to 128."""
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """Of q, k, v and o."""
    causal: bool = True
    """Mask the keys that come after a query."""

    def __post_init__(self) -> None:
        if padded_head_dim(self.d) not in HOPPER_OWN:
            raise ValueError(f"--d is {self.d}; allowed is 33 to 128, where Hopper has kernels of its own")


@dataclass(frozen=True)
class Compiled:
    """Registers and bytes of stack of each thread, bytes of shared memory of each program, and the instructions."""

    registers: int
    stack: int
    shared_memory: int
    instructions: list[tuple[int, str]]  # address, text


def described(element: str, rows: int, columns: int) -> str:
    """The type of a descriptor (batch, heads, n, d) in tiles of so many rows and columns."""
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32 if element == "fp32" else 16, rank=4)
    return f"tensordesc<{element}[1, 1, {rows}, {columns}],{layout!r}>"


def forward_source(config: Config, tile: HopperForward) -> GluonASTSource:
    """The forward kernel with types for its arguments."""
    element, width = ELEMENTS[config.dtype], padded_head_dim(config.d)
    in_rows, in_key_tiles = (described(element, rows, width) for rows in (WARPGROUP_ROWS, tile.k_tile_size))
    types = {"q": in_rows, "o": in_rows, "k": in_key_tiles, "v": in_key_tiles, "L_ptr": "*fp32"}
    return source(flash_forward_hopper_kernel, types, config, tile)


def backward_source(config: Config, tile: HopperBackward) -> GluonASTSource:
    """The backward kernel of that head dim with types for its arguments."""
    element, width = ELEMENTS[config.dtype], padded_head_dim(config.d)
    in_rows, in_query_tiles = (described(element, rows, width) for rows in (WARPGROUP_ROWS, tile.q_tile_size))
    types = dict.fromkeys(("k", "v", "dk", "dv"), in_rows) | dict.fromkeys(("q", "dO"), in_query_tiles)
    parts = NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    types["parts"] = f"tensordesc<{element}[{tile.q_tile_size}, {STEP_COLUMNS}],{parts!r}>"
    types["dq_sum"] = described("fp32", tile.q_tile_size, width // 2 if width == 128 else width)
    kernel = flash_backward_hopper_wide_kernel if width == 128 else flash_backward_hopper_kernel
    return source(kernel, types, config, tile)


def source(kernel: Any, types: dict[str, str], config: Config, tile: HopperForward | HopperBackward) -> GluonASTSource:
    """`kernel` for tensors of these types; what is neither a type nor a constant is a length, or the scale."""
    constants = tile.constants() | {"D_TILE_SIZE": padded_head_dim(config.d), "IS_CAUSAL": config.causal}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "fp32" if name == "scale" else "i32")
        for name in kernel.arg_names
    }
    values = {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants}
    return GluonASTSource(kernel, signature, values, {})


def compiled(source: GluonASTSource) -> Compiled:
    """What Triton and NVIDIA's assembler make of it for Hopper."""
    kernel = triton.compile(source, target=HOPPER, options={"num_warps": 4})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, assembly = (
            subprocess.run([BINARIES / "cuobjdump", flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", assembly, re.MULTILINE)
    instructions = [(int(address, 16), text) for address, text in lines]
    return Compiled(int(registers), int(stack), kernel.metadata.shared, instructions)


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
    console = Console(soft_wrap=True, highlight=False)
    tiles = HOPPER_OWN[padded_head_dim(config.d)]
    sources = {"forward": forward_source(config, tiles.forward), "backward": backward_source(config, tiles.backward)}
    for name, of in sources.items():
        result = compiled(of)
        console.print(
            f"{name}: {result.registers} registers at the start, {result.stack} bytes of stack, "
            f"{result.shared_memory} bytes of shared memory"
        )
        for kinds in inner_loops(result.instructions):
            counts = ", ".join(f"{count} {kind}" for kind, count in Counter(filter(None, kinds)).most_common())
            console.print(f"  a loop of {len(kinds)} instructions: {counts}")
            console.print(f"    {in_order(kinds)}")


if __name__ == "__main__":
    run_script(main, Config, __doc__)
