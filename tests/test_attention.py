"""The course's interface: `.apply(q, k, v, is_causal)`, o, the saved log-sum-exp and the gradients, to 1e-2.

Unlike the course's own copy, which skips them, this one runs the Triton cases on the interpreter where there is no GPU.
"""

import torch

from .adapters import get_flashattention_autograd_function_pytorch, get_flashattention_autograd_function_triton
from .machine import DEVICE, both_causal, both_flash, flash_function, needs_triton
from .reference import TENSORS, Case, dense_attention, run_attention, saved_log_sum_exps

CASE = Case((4,), 128, 128, 64)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2, check_dtype=False)


def check_forward(apply, is_causal: bool) -> None:
    """o and the one saved (batch, n_queries) tensor are those of dense attention."""
    inputs = CASE.draw(torch.float32, DEVICE)
    o = apply(*(x.requires_grad_() for x in inputs[:3]), is_causal)
    saved = saved_log_sum_exps(o)
    assert len(saved) == 1, f"{len(saved)} saved tensors have the shape (batch, n_queries) of L"
    expected = dense_attention(inputs, is_causal)
    assert_close(o, expected.o)
    assert expected.L is not None
    assert_close(saved[0], expected.L)


def check_backward(apply, is_causal: bool) -> None:
    """The gradients of q, k and v are those of dense attention."""
    inputs = CASE.draw(torch.float32, DEVICE)
    result, expected = run_attention(apply, inputs, is_causal), dense_attention(inputs, is_causal)
    for name in ("dq", "dk", "dv"):
        assert_close(getattr(result, name), getattr(expected, name))


@both_causal
def test_flash_forward_pass_pytorch(is_causal):
    """o, and L natural and alone of its shape among the saved tensors: the tiled version."""
    check_forward(get_flashattention_autograd_function_pytorch().apply, is_causal)


@needs_triton
@both_causal
def test_flash_forward_pass_triton(is_causal):
    """o, and L natural and alone of its shape among the saved tensors: the kernels."""
    check_forward(get_flashattention_autograd_function_triton().apply, is_causal)


@both_causal
def test_flash_backward_pytorch(is_causal):
    """Algorithm 2, tiled; forward and backward agree on is_causal."""
    check_backward(get_flashattention_autograd_function_pytorch().apply, is_causal)


@needs_triton
@both_causal
def test_flash_backward_triton(is_causal):
    """Algorithm 2 in kernels."""
    check_backward(get_flashattention_autograd_function_triton().apply, is_causal)


@both_flash
def test_is_causal_defaults_to_false(flash):
    """`.apply(q, k, v)` attends to every key, and has gradients."""
    inputs = CASE.draw(torch.float32, DEVICE)
    apply = flash_function(flash)
    short = run_attention(lambda q, k, v, is_causal: apply(q, k, v), inputs, False)
    full = run_attention(apply, inputs, False)
    for name in TENSORS:
        assert torch.equal(getattr(short, name), getattr(full, name)), name
