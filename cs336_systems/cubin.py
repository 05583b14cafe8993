"""What a compiled kernel takes and what it does, by NVIDIA's cuobjdump, which comes with Triton: no GPU is needed."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs

from cs336_systems.launch import is_interpreted

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def require_compiler() -> None:
    """Raises ValueError where Triton interprets kernels instead of compiling them."""
    if is_interpreted():
        raise ValueError("TRITON_INTERPRET is set, and Triton compiles nothing then; unset it")


def assembler() -> str:
    """What turns PTX into machine code in this process.

    By default that is the ptxas that comes with Triton. Once torch.compile has compiled something it is PyTorch's,
    maybe of another version, by the environment variable TRITON_PTXAS_PATH. What fits into registers may differ.
    """
    return f"ptxas {knobs.nvidia.ptxas.version} (for Blackwell {knobs.nvidia.ptxas_blackwell.version})"


@dataclass(frozen=True)
class Usage:
    """Registers and bytes of stack (what does not fit into registers) of each thread, bytes of shared memory of each
    program.
    """

    registers: int
    stack: int
    shared_memory: int


def usage_of(kernel: Any) -> Usage:
    """What a program of a kernel that `triton.compile` gave takes."""
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", _dumped(kernel, "-res-usage"))
    return Usage(int(registers), int(stack), kernel.metadata.shared)


def assembly_of(kernel: Any) -> list[tuple[int, str]]:
    """Its instructions: (address, text)."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", _dumped(kernel, "-sass"), re.MULTILINE)
    return [(int(address, 16), text) for address, text in lines]


def _dumped(kernel: Any, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([CUOBJDUMP, what, file.name], capture_output=True, text=True, check=True).stdout
