"""Runs the Triton kernels everywhere: where torch sees no GPU, the suite asks for Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, and pytest imports this package before any module in it. A value
that the user has set stays as it is.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
