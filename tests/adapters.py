"""Hands the implementations to the tests; each is imported only when a test asks for it."""

import torch


def get_flashattention_autograd_function_pytorch() -> type[torch.autograd.Function]:
    """The `torch.autograd.Function` of FlashAttention-2 in plain PyTorch."""
    from cs336_systems.flash_pytorch import FlashAttention2Pytorch

    return FlashAttention2Pytorch


def get_flashattention_autograd_function_triton() -> type[torch.autograd.Function]:
    """The `torch.autograd.Function` of FlashAttention-2 in Triton."""
    from cs336_systems.flash_triton import FlashAttention2Triton

    return FlashAttention2Triton
