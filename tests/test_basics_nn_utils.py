"""cross_entropy and clip_gradient against their counterparts in PyTorch; where there is a GPU, on it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cs336_basics.nn_utils import clip_gradient, cross_entropy

from .machine import DEVICE


def draw(*leading: int, vocab: int = 11, scale: float = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and targets."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(*leading, vocab, generator=generator)
    return logits.to(DEVICE), torch.randint(vocab, leading, generator=generator).to(DEVICE)


@pytest.mark.parametrize("leading", [(), (1,), (6,), (2, 3, 4)], ids=str)
def test_cross_entropy(leading):
    """The mean over all targets, whatever the leading dimensions; value and gradient."""
    logits, targets = draw(*leading)
    logits.requires_grad_()
    loss, expected = cross_entropy(logits, targets), F.cross_entropy(logits.reshape(-1, 11), targets.reshape(-1))
    torch.testing.assert_close(loss, expected)
    gradient, wanted = (torch.autograd.grad(x, logits)[0] for x in (loss, expected))
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("shift", [0, 1e4, -1e4], ids=str)
@pytest.mark.parametrize("scale", [1, 1e3], ids=str)
def test_cross_entropy_is_stable(scale, shift):
    """exp of the logits alone would overflow or vanish."""
    logits, targets = draw(50, scale=scale)
    logits = (logits + shift).requires_grad_()
    loss, expected = cross_entropy(logits, targets), F.cross_entropy(logits, targets)
    torch.testing.assert_close(loss, expected)
    gradient, wanted = (torch.autograd.grad(x, logits)[0] for x in (loss, expected))
    torch.testing.assert_close(gradient, wanted)


def test_cross_entropy_with_excluded_tokens():
    """-inf says that a token cannot come: it takes no part in the sum, and gets a gradient of 0, not NaN."""
    logits, targets = draw(5)
    logits[:, 3] = -float("inf")
    targets[targets == 3] = 4
    logits.requires_grad_()
    loss = cross_entropy(logits, targets)
    torch.testing.assert_close(loss, F.cross_entropy(logits, targets))
    loss.backward()
    assert logits.grad is not None and logits.grad.isfinite().all() and not logits.grad[:, 3].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_cross_entropy_in_half_precision(dtype):
    """The sum over a large vocabulary and the mean over many targets are float32, and so is the loss."""
    logits, targets = draw(300, vocab=5000)
    loss = cross_entropy(logits.to(dtype), targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits.to(dtype).float(), targets))


def test_cross_entropy_of_other_shapes():
    """Targets that would broadcast are refused, not averaged over."""
    with pytest.raises(ValueError, match=r"\(2, 3\), got \(2, 1\)"):
        cross_entropy(torch.zeros(2, 3, 5), torch.zeros(2, 1, dtype=torch.int64))


def parameters_with_gradients(dtype: torch.dtype = torch.float32, scale: float = 1) -> list[nn.Parameter]:
    """Three parameters, the second without a gradient."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype, device=DEVICE)) for shape in [(3, 4), (2,), (5,)]]
    for parameter in (parameters[0], parameters[2]):
        parameter.grad = (scale * torch.randn(parameter.shape, generator=generator)).to(DEVICE, dtype)
    return parameters


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1, 1e4], ids=str)
def test_clip_gradient(scale):
    """Gradients beyond the norm are scaled to it, those within it stay as they are; the norm before comes back."""
    ours, theirs = parameters_with_gradients(scale=scale), parameters_with_gradients(scale=scale)
    before = [parameter.grad for parameter in ours]
    norm, expected = clip_gradient(iter(ours), 0.01), nn.utils.clip_grad_norm_(theirs, 0.01)
    torch.testing.assert_close(norm, expected)
    for mine, other, gradient in zip(ours, theirs, before, strict=True):
        assert mine.grad is gradient
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_clip_gradient_in_half_precision(dtype):
    """A norm of 90,000 does not overflow float16, and comes back in float32."""
    parameters = parameters_with_gradients(dtype, scale=2e4)
    wide = torch.cat([parameter.grad.float().flatten() for parameter in parameters if parameter.grad is not None])
    norm = clip_gradient(parameters, 1.0)
    assert norm.item() > 65504
    torch.testing.assert_close(norm, wide.norm())
    clipped = torch.cat([parameter.grad.float().flatten() for parameter in parameters if parameter.grad is not None])
    torch.testing.assert_close(clipped, wide / wide.norm(), rtol=2e-2, atol=1e-3)


def test_clip_gradient_without_gradients():
    """Nothing to clip has a norm of 0."""
    assert clip_gradient([nn.Parameter(torch.zeros(3))], 1.0) == 0


def test_clip_gradient_of_a_single_parameter():
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([3.0, 0.0, 4.0])
    assert clip_gradient(parameter, 1.0) == 5
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.0, 0.8]))


@pytest.mark.parametrize("max_norm", [0, -1, float("nan")])
def test_clip_gradient_to_no_norm(max_norm):
    """A norm of 0 or less would stop or reverse the training."""
    with pytest.raises(ValueError, match="max_norm must be above 0"):
        clip_gradient(parameters_with_gradients(), max_norm)
