"""What Triton makes of every entry of the tile tables: registers, spills and shared memory, without a GPU.

    uv run scripts/compiled_kernels.py                                   all classes of GPU, head dims, dtypes
    uv run scripts/compiled_kernels.py --gpus hopper --head-dims 64 --dtypes bfloat16 --markdown runs/compiled.md

Kernels are compiled, causal and not, for contiguous tensors whose lengths are multiples of 16. The table of all is in
`runs/h200/compiled_kernels.md`.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from cs336_systems.bench.cli import CommandLine, DtypeName, Size, require_tables, run_script, shown_default

if TYPE_CHECKING:
    from triton.compiler import ASTSource

    from cs336_systems.cubin import Usage
    from cs336_systems.kernels.tiles import Gpu, Tile

GpuClass = Literal["turing", "ampere", "a100", "ada", "hopper", "blackwell", "blackwell-consumer"]
"""The names in `cs336_systems.kernels.tiles.GPUS`."""
LARGEST_HEAD_DIM = 256
ELEMENTS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True, kw_only=True)
class Config(CommandLine):
    """The command line."""

    gpus: tuple[GpuClass, ...] = get_args(GpuClass)
    """Classes of GPU."""
    head_dims: tuple[int, ...] = (16, 32, 64, 128, 256)
    """Head dims."""
    dtypes: tuple[DtypeName, ...] = ("bfloat16", "float32")
    """Types of q, k, v and o. A GPU without bfloat16 gets float16 instead."""
    masks: tuple[Literal["causal", "full"], ...] = ("causal", "full")
    """Whether a query sees the keys up to its own index, or all."""
    markdown: Annotated[Path | None, shown_default("no file")] = None
    """Also write the table here."""
    jobs: Size = os.cpu_count() or 1
    """Processes that compile."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for d in self.head_dims:
            if not 1 <= d <= LARGEST_HEAD_DIM:
                raise ValueError(f"--head-dims has {d}; allowed are 1 to {LARGEST_HEAD_DIM}")


@dataclass(frozen=True)
class Entry:
    """One tile of one table."""

    gpu: "Gpu"
    kernel: str
    d: int
    dtype: str
    tile: "Tile"
    is_causal: bool


def source(entry: Entry) -> "ASTSource":
    """The kernel with types for its arguments, as a launch over contiguous tensors would specialise it."""
    import torch
    from triton.compiler import ASTSource

    from cs336_systems.kernels import backward, forward
    from cs336_systems.kernels.primitives import Strided, Tiling
    from cs336_systems.kernels.tiles import padded_head_dim

    element, dtype = ELEMENTS[entry.dtype], getattr(torch, entry.dtype)
    tile, width = entry.tile, padded_head_dim(entry.d)
    compiled_for: dict[str, Any] = {
        "D": entry.d,
        "D_TILE_SIZE": width,
        "INPUT_PRECISION": "bf16x6" if dtype == torch.float32 and entry.gpu.uses_tensor_cores else "ieee",
        "BASE_2": dtype.itemsize == 2,
        **tile.constants(entry.is_causal),
    }
    constants = {"T": Tiling(**compiled_for), "WANTS_DQ": True}
    rows = {"q": tile.q_tile_size, "dO": tile.q_tile_size, "k": tile.k_tile_size, "v": tile.k_tile_size}
    function = {
        "forward": forward.flash_forward_kernel,
        "dk_dv": backward.flash_backward_dk_dv_kernel,
        "dq": backward.flash_backward_dq_kernel,
    }[entry.kernel]
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            signature[name], values[index,] = "constexpr", constants[name]
        elif name in rows and tile.by_descriptor:
            signature[name] = f"tensordesc<{element}[1, 1, {rows[name]}, {width}]>"
        elif name in ("L_base", "delta") and tile.by_descriptor:
            signature[name] = f"tensordesc<fp32[1, 1, 1, {tile.q_tile_size}]>"
        elif name in ("q", "k", "v", "o", "dO", "dq", "dk", "dv"):
            signature[name] = Strided(f"*{element}", "i32", "i32", "i32", "constexpr")
            values[index, 4] = 1
            attributes |= {(index, part): ALIGNED for part in range(4)}
        elif name == "scale":
            signature[name] = "fp32"
        else:
            signature[name] = "*fp32" if name.endswith("_ptr") or name in ("L_base", "delta") else "i32"
            attributes[index,] = ALIGNED
    return ASTSource(function, signature, values, attributes)


def compiled(entry: Entry) -> "Usage | str":
    """What the entry takes, or why it cannot be compiled."""
    import triton
    from triton.backends.compiler import GPUTarget

    from cs336_systems.cubin import usage_of

    major, minor = entry.gpu.capability
    options = entry.tile.options() | {"enable_fp_fusion": entry.dtype != "float32"}
    try:
        kernel = triton.compile(source(entry), target=GPUTarget("cuda", 10 * major + minor, 32), options=options)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    return usage_of(kernel)


def entries(config: Config) -> tuple[list[Entry], list[str]]:
    """What the shipped tables choose; and why there is nothing for some head dims."""
    import torch

    from cs336_systems.kernels.tiles import GPUS, KERNELS, shipped_tiles

    found, refusals = [], []
    wanted = [
        (GPUS[name], "float16" if dtype == "bfloat16" and GPUS[name].capability < (8, 0) else dtype, d)
        for name, dtype, d in product(config.gpus, config.dtypes, config.head_dims)
    ]
    for gpu, dtype, d in dict.fromkeys(wanted):
        try:
            tiles = shipped_tiles(gpu, d, getattr(torch, dtype))
        except ValueError as error:
            refusals.append(f"{gpu.name}, {dtype}, d = {d}: {error}.")
            continue
        found += [
            Entry(gpu, kernel.name, d, dtype, getattr(tiles, kernel.name), mask == "causal")
            for kernel, mask in product(KERNELS, config.masks)
        ]
    return found, refusals


def main(config: Config) -> None:
    if config.markdown is not None:
        require_tables("--markdown", config.markdown)
    import triton
    from rich.console import Console

    from cs336_systems.bench.report import Table
    from cs336_systems.cubin import Usage, assembler, require_compiler
    from cs336_systems.kernels.tiles import KIB
    from cs336_systems.tile_search import TILE_METHOD, tile_text

    require_compiler()
    console, (chosen, refusals) = Console(), entries(config)
    with ProcessPoolExecutor(config.jobs) as pool:
        results = list(pool.map(compiled, chosen))
    lines = []
    for entry, result in zip(chosen, results, strict=True):
        major, minor = entry.gpu.capability
        kernel = [entry.kernel, "causal" if entry.is_causal else "full", tile_text(entry.tile)]
        line = [entry.gpu.name, f"sm_{major}{minor}", entry.dtype, str(entry.d), *kernel]
        if isinstance(result, str):
            lines.append([*line, result, "-", "-"])
        else:
            lines.append([*line, str(result.registers), str(result.stack), f"{result.shared_memory / KIB:.1f}"])
    usages = [result for result in results if isinstance(result, Usage)]
    spilling = sum(usage.stack > 0 for usage in usages)
    notes = [
        f"{spilling} of {len(usages)} spill: bytes of stack a thread are what does not fit into its registers.",
        TILE_METHOD,
        f"Compiled by Triton {triton.__version__} and {assembler()}, for contiguous tensors whose lengths are "
        "multiples of 16; nothing was run. Another version's figures differ, and so do those of other layouts.",
        *refusals,
    ]
    headers = ["GPU", "target", "dtype", "d", "kernel", "mask", "tile", "registers", "stack bytes", "shared KiB"]
    table = Table("What Triton makes of every shipped tile", headers, lines, notes)
    if config.markdown is not None:
        config.markdown.write_text(table.to_markdown(), encoding="utf-8")
    table.print(console)
    if len(usages) < len(results):
        raise ValueError(f"{len(results) - len(usages)} of {len(results)} could not be compiled; the table says why")


if __name__ == "__main__":
    run_script(main, Config, __doc__)
