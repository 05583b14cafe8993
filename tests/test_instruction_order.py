"""scripts/instruction_order.py: loops found in assembly, and what Hopper's own kernels compile to."""

import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cs336_systems import launch
from cs336_systems.kernels.tiles import KIB

from .machine import broken_assembler, compiling_environment

HEAD_DIMS = (64, 128)
SCRIPT = Path(__file__).parent.parent / "scripts" / "instruction_order.py"
pytestmark = pytest.mark.skipif(not launch.TRITON_IS_TESTED, reason="the kernels are for Triton 3.6")


def test_innermost_loops_with_matrix_instructions():
    texts = [
        "MOV R1, R2",
        "MUFU.EX2 R3, R3",  # 0x10: an outer loop begins, and is left out
        "HGMMA.64x128x16.F32 R4, gdesc[UR4]",  # 0x20: the inner one
        "@P0 MUFU.EX2 R3, R3",
        "@!UP1 MUFU.EX2 R3, R3",
        "WARPGROUP.DEPBAR.LE gsb0, 0x1",
        "@P0 BRA 0x20",
        "BRA 0x10",
        "FADD R1, R1, R1",  # 0x80: a loop without matrix instructions
        "@P1 BRA 0x80",
        "EXIT",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2",  # a wait that is tried again behind the end
        "@!P0 BRA 0xb0",
        "BRA 0x20",
    ]
    script = runpy.run_path(str(SCRIPT))
    loops = script["inner_loops"]([(16 * index, text) for index, text in enumerate(texts)])
    assert [script["in_order"](loop) for loop in loops] == ["wgmma, exp2 x 2, wait for wgmma"]
    assert script["kind"]("STL [R1], R2") == "stack" and script["kind"]("IADD3 R1, R2, R3, RZ") == ""


def exponentials(order: str) -> int:
    """How many there are in what the script prints."""
    return sum(int(count or 1) for count in re.findall(r"exp2(?: x (\d+))?", order))


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> dict[int, str]:
    """What the script prints for each head dim, in one process in which Triton compiles."""
    code = f"""
        import runpy
        script = runpy.run_path({str(SCRIPT)!r})
        for d in {HEAD_DIMS}:
            print("d =", d)
            script["main"](script["Config"](d=d))
    """
    with pytest.MonkeyPatch.context() as patch:
        # As torch.compile sets another one.
        patch.setenv("TRITON_PTXAS_PATH", broken_assembler(tmp_path_factory.mktemp("bin")))
        environment = compiling_environment()
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(HEAD_DIMS, re.split(r"^d = \d+$", done.stdout, flags=re.MULTILINE)[1:], strict=True))


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_hopper_kernels_compile_without_a_stack_in_their_loops(d, printed):
    """On any machine: what a program takes fits a Hopper GPU, and no inner loop goes through the stack."""
    usage = re.findall(r"([\w ]+): \d+ registers at the start, (\d+) bytes of stack, (\d+) bytes of shared", printed[d])
    assert [name for name, *_ in usage] == ["forward", *(["forward of few tiles"] if d == 64 else []), "backward"]
    for name, stack, shared in usage:
        once_a_program = 24 if (name, d) == ("backward", 64) else 0
        assert int(stack) == once_a_program and int(shared) <= 227 * KIB
    attending = [line for line in printed[d].splitlines() if line.startswith("    ") and "exp2" in line]
    assert len(attending) >= 4
    for order in attending:
        assert "stack" not in order
        before, after = (exponentials(part) for part in order.split("wgmma", 1))
        assert 4 * before < after, "products are issued before most exponentials are taken"
