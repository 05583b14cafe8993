"""The layers of cs336_basics against torch.nn.functional; where there is a GPU, on it."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cs336_basics.modules import (
    CausalMultiHeadSelfAttention,
    Embedding,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    silu,
    softmax,
    truncated_normal,
)

from .machine import DEVICE

HALF = [torch.float16, torch.bfloat16]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same normal numbers on every machine."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_same_gradients(got: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Equal values, and equal gradients of a weighted sum."""
    torch.testing.assert_close(got, expected)
    weights = random(*got.shape, seed=1).to(got.dtype)
    gradients = (torch.autograd.grad((x * weights).sum(), inputs) for x in (got, expected))
    for gradient, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)], ids=str)
def test_linear(leading):
    """W x with W of shape (d_out, d_in), over any leading dimensions."""
    layer = Linear(5, 7, device=DEVICE)
    x = random(*leading, 5).requires_grad_()
    assert layer.weight.shape == (7, 5)
    assert_same_gradients(layer(x), F.linear(x, layer.weight), [x, layer.weight])


def test_embedding():
    """Rows of the table; a token that comes twice gets both gradients."""
    layer = Embedding(6, 4, device=DEVICE)
    ids = torch.tensor([[0, 5, 5], [2, 1, 5]], device=DEVICE)
    expected = F.one_hot(ids, 6).float() @ layer.weight
    assert_same_gradients(layer(ids), expected, [layer.weight])


@pytest.mark.parametrize("ids", [torch.tensor([-1]), torch.tensor([6]), torch.tensor([1], dtype=torch.uint8)], ids=str)
def test_embedding_refuses_what_is_no_token(ids):
    """Negative ids do not count from the end, and 8-bit ones are no mask."""
    with pytest.raises((IndexError, RuntimeError)):
        Embedding(6, 4)(ids)


def test_rms_norm():
    """The gain is applied, and eps counts where x is small."""
    layer = RMSNorm(9, device=DEVICE)
    with torch.no_grad():
        layer.weight.copy_(random(9, seed=2))
    for scale in (1, 1e-3):
        x = (scale * random(2, 3, 9)).requires_grad_()
        assert_same_gradients(layer(x), F.rms_norm(x, (9,), layer.weight, 1e-5), [x, layer.weight])


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rms_norm_in_half_precision(dtype):
    """Squares that half precision cannot hold: 300^2 overflows float16, and long sums of bfloat16 lose their end."""
    x = (300 * random(2, 4096)).to(dtype)
    layer = RMSNorm(4096, device=DEVICE, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    expected = F.rms_norm(x.double(), (4096,), layer.weight.double(), 1e-5)
    torch.testing.assert_close(y, expected.to(dtype))


def test_swiglu():
    """W2 (silu(W1 x) ∘ W3 x): which of the two is gated is seen in the result."""
    layer = SwiGLU(6, 10, device=DEVICE)
    x = (3 * random(2, 5, 6)).requires_grad_()
    w1, w2, w3 = layer.w1.weight, layer.w2.weight, layer.w3.weight
    expected = F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)
    assert_same_gradients(layer(x), expected, [x, w1, w2, w3])


def test_silu_of_large_numbers():
    """No overflow at either end."""
    x = torch.tensor([-1e4, -100.0, -1.0, 0.0, 1.0, 100.0, 1e4], device=DEVICE)
    torch.testing.assert_close(silu(x), F.silu(x))


# Rotary embedding.


@pytest.mark.parametrize("d", [2, 6, 16, 80])
def test_rotary_embedding_is_a_complex_rotation(d):
    """(x_2i, x_2i+1) is a complex number times exp(i m theta^(-2i/d)), to float32 accuracy up to position 32767."""
    n, theta = 32768, 10_000.0
    x = random(n, d).requires_grad_()
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    frequencies = theta ** (-torch.arange(0, d, 2, dtype=torch.float64, device=DEVICE) / d)
    angles = torch.outer(torch.arange(n, dtype=torch.float64, device=DEVICE), frequencies)
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2).float()
    assert_same_gradients(RotaryEmbedding(n, d, theta, DEVICE)(x), expected, [x])


def test_rotary_embedding_depends_on_relative_positions():
    """q turned to m times k turned to n depends on m - n, and does depend on it."""
    encoder = RotaryEmbedding(64, 8, device=DEVICE)
    q, k = random(8), random(8, seed=1)

    def score(m: int, n: int) -> float:
        turned_q, turned_k = (encoder(x[None], torch.tensor([at], device=DEVICE)) for x, at in ((q, m), (k, n)))
        return (turned_q * turned_k).sum().item()

    for m, n in ((5, 2), (7, 7), (1, 9)):
        for shift in (1, 20, 54):
            assert score(m + shift, n + shift) == pytest.approx(score(m, n), abs=1e-5)
    assert score(5, 2) != pytest.approx(score(2, 5), abs=1e-2)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-2)


def test_rotary_embedding_at_given_positions():
    """Positions per sequence, broadcast over heads; without any they are 0, 1, 2, …"""
    encoder = RotaryEmbedding(12, 4, device=DEVICE)
    x = random(2, 3, 5, 4)
    torch.testing.assert_close(encoder(x, torch.arange(5, device=DEVICE)), encoder(x))
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 3, 3, 11]], device=DEVICE)[:, None]
    whole = encoder(x[:, :, :, None].expand(2, 3, 5, 12, 4))
    expected = torch.stack([whole[batch, :, range(5), positions[batch, 0]] for batch in range(2)])
    torch.testing.assert_close(encoder(x, positions), expected)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rotary_embedding_in_half_precision(dtype):
    """The result has the dtype of x and one rounding; moving the module to that dtype does not round the tables."""
    encoder = RotaryEmbedding(512, 16, device=DEVICE)
    x = random(512, 16).to(dtype)
    expected = encoder(x.float()).to(dtype)
    assert torch.equal(encoder(x), expected)
    moved = encoder.to(dtype)
    assert moved.cos.dtype == moved.sin.dtype == torch.float32
    assert torch.equal(moved(x), expected)


def test_rotary_embedding_from_the_meta_device():
    """Made without memory and then given some, its tables hold what they should; they are not in the state dict."""
    with torch.device("meta"):
        encoder = RotaryEmbedding(32, 6)
    assert encoder.cos.is_meta and encoder.cos.shape == (32, 3)
    encoder.to_empty(device=DEVICE)
    assert torch.equal(encoder.cos, RotaryEmbedding(32, 6, device=DEVICE).cos)
    assert torch.equal(encoder.sin, RotaryEmbedding(32, 6, device=DEVICE).sin)
    assert not encoder.state_dict()


def test_rotary_embedding_errors():
    """Odd sizes, other sizes than it was made for (2 would broadcast), and too many positions (1 would)."""
    with pytest.raises(ValueError, match="even, got 5"):
        RotaryEmbedding(8, 5)
    with pytest.raises(ValueError, match="even, got 0"):
        RotaryEmbedding(8, 0)
    with pytest.raises(ValueError, match="context length must be at least 1, got -1"):
        RotaryEmbedding(-1, 4)
    for theta in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"theta must be a number above 0, got {theta}"):
            RotaryEmbedding(8, 4, theta)
    with pytest.raises(ValueError, match="of size 2, got 6"):
        RotaryEmbedding(8, 2)(torch.zeros(3, 6))
    with pytest.raises(ValueError, match="length 3; at most the context length, 1"):
        RotaryEmbedding(1, 4)(torch.zeros(3, 4))
    for positions in ([0, 1, -1], [0, 1, 8]):
        with pytest.raises(IndexError):
            RotaryEmbedding(8, 4)(torch.zeros(3, 4), torch.tensor(positions))
    with pytest.raises(RuntimeError, match="Byte"):  # which indexing would take for a mask
        RotaryEmbedding(8, 4)(torch.zeros(3, 4), torch.tensor([0, 1, 1, 1, 0, 0, 0, 0], dtype=torch.uint8))


def test_layers_refuse_what_would_pass_for_something_else():
    """Integers, whose softmax would be rounded to 0, and vectors of size 1, which would broadcast."""
    with pytest.raises(TypeError, match=r"floating point numbers, got torch\.int64"):
        softmax(torch.arange(3))
    with pytest.raises(ValueError, match="made for vectors of size 5, got 1"):
        RMSNorm(5)(torch.zeros(2, 1))


# Attention.


def test_multi_head_attention():
    """Heads are neighbouring columns of the projections; queries and keys are turned, values are not."""
    d_model, num_heads, n = 24, 3, 10
    encoder = RotaryEmbedding(16, d_model // num_heads, device=DEVICE)
    layer = CausalMultiHeadSelfAttention(d_model, num_heads, encoder, device=DEVICE)
    x = random(2, n, d_model).requires_grad_()
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    q, k, v = (F.linear(x, each.weight).view(2, n, num_heads, -1).transpose(1, 2) for each in projections)
    o = F.scaled_dot_product_attention(encoder(q), encoder(k), v, is_causal=True)
    expected = F.linear(o.transpose(1, 2).reshape(2, n, d_model), layer.output_proj.weight)
    assert_same_gradients(layer(x), expected, [x, *layer.parameters()])


def test_multi_head_attention_asks_for_causal_heads():
    """The injected function is called with (batch, heads, n, d) and is_causal, and what it returns is what counts."""
    calls = []

    def attention(q, k, v, is_causal):
        calls.append((q.shape, k.shape, v.shape, is_causal))
        return torch.zeros_like(q)

    layer = CausalMultiHeadSelfAttention(12, 3, RotaryEmbedding(8, 4), attention)
    assert not layer(torch.randn(2, 5, 12)).any()
    assert calls == [((2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 4), True)]


def test_heads_that_do_not_fit():
    """num_heads has to divide d_model."""
    with pytest.raises(ValueError, match="got 5 heads and d_model 12"):
        CausalMultiHeadSelfAttention(12, 5, RotaryEmbedding(8, 2))


# Initial values.


def moments_of_truncated_normal() -> tuple[float, float]:
    """The standard deviation of N(0, 1) between -3 and 3, and its mean absolute value, in closed form."""
    density = math.exp(-4.5) / math.sqrt(2 * math.pi)
    mass = math.erf(3 / math.sqrt(2))
    return math.sqrt(1 - 6 * density / mass), 2 * (1 / math.sqrt(2 * math.pi) - density) / mass


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("std", [1, 0.05])
def test_initial_values(dtype, std):
    """A normal distribution cut off at 3 std, in every dtype."""
    torch.manual_seed(0)
    weight = truncated_normal(1000, 300, std=std, device=DEVICE, dtype=dtype)
    assert weight.dtype == dtype and weight.requires_grad
    values = weight.detach().double() / std
    deviation, mean_magnitude = moments_of_truncated_normal()
    assert values.mean().item() == pytest.approx(0, abs=6e-3)
    assert values.std().item() == pytest.approx(deviation, rel=5e-3)
    assert values.abs().mean().item() == pytest.approx(mean_magnitude, rel=5e-3)
    assert 2.9 < values.abs().max() <= 3 + 3 * torch.finfo(dtype).eps


def test_initial_values_of_layers():
    """Linear: variance 2 / (d_in + d_out); Embedding: 1; RMSNorm: gain 1."""
    torch.manual_seed(0)
    deviation, _ = moments_of_truncated_normal()
    layers: list[tuple[nn.Module, float]] = [
        (Linear(300, 500), math.sqrt(2 / 800)),
        (Linear(500, 100), math.sqrt(2 / 600)),
        (Embedding(1000, 50), 1),
    ]
    for layer, std in layers:
        (weight,) = layer.parameters()
        assert weight.std().item() == pytest.approx(std * deviation, rel=2e-2)
    assert torch.equal(RMSNorm(7).weight, torch.ones(7))
