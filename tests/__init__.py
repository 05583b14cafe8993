"""Runs the Triton kernels everywhere: where torch sees no GPU, the suite asks for Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, and pytest imports this package before any module in it. A value
that the user has set stays as it is. A table of tiles that the user has tuned is left out: tests are about ours.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ["CS336_TILES"] = ""

# Inductor asks which vector instructions work by compiling and starting ten programs, half a minute for each process.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
