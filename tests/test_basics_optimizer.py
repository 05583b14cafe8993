"""AdamW against torch.optim.AdamW, and the points of the cosine schedule; where there is a GPU, on it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cs336_basics.optimizer import AdamW, get_cosine_lr

from .machine import DEVICE

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all-options": {"lr": 0.02, "betas": (0.7, 0.95), "eps": 1e-3, "weight_decay": 0.3},
    "no-decay": {"lr": 0.01, "weight_decay": 0.0},
    "no-momentum": {"lr": 0.01, "betas": (0.0, 0.0)},
}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Three parameters of different shapes."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (7,), ()]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in shapes]


def set_gradients(of: list[nn.Parameter], seed: int, scale: float = 1) -> None:
    """The same gradients for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in of:
        parameter.grad = (scale * torch.randn(parameter.shape, generator=generator)).to(DEVICE, parameter.dtype)


def run(
    make: Callable[..., torch.optim.Optimizer], options: dict[str, Any], steps: int = 30, scale: float = 1
) -> list[nn.Parameter]:
    """The parameters after some steps."""
    result = parameters()
    optimizer = make(result, **options)
    for step in range(steps):
        set_gradients(result, step, scale)
        optimizer.step()
    return result


@pytest.mark.parametrize("scale", [1, 1e-8], ids=["gradients-of-1", "gradients-of-eps"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_adamw(options, scale):
    """PyTorch's result after 30 steps, also where gradients are so small that eps and its correction count."""
    for got, expected in zip(
        run(AdamW, options, scale=scale), run(torch.optim.AdamW, options, scale=scale), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_adamw_in_other_dtypes(dtype):
    """Parameters keep their dtype, as does what is remembered of their gradients."""
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizers = AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for step in range(3):
        for these, optimizer in zip((ours, theirs), optimizers, strict=True):
            set_gradients(these, step)
            optimizer.step()
    for got, expected in zip(ours, theirs, strict=True):
        assert optimizers[0].state[got]["v"].dtype == got.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def test_adamw_with_groups_and_missing_gradients():
    """Groups have options of their own; a parameter counts its own steps from its first gradient, and waits without."""
    ours, theirs = parameters(), parameters()
    optimizers = [
        make([{"params": these[:1], "lr": 0.1}, {"params": these[1:], "weight_decay": 0.5}], lr=0.01)
        for make, these in ((AdamW, ours), (torch.optim.AdamW, theirs))
    ]
    for step in range(8):
        for these, optimizer in zip((ours, theirs), optimizers, strict=True):
            set_gradients(these, step)
            if step < 3:
                these[1].grad = None
            if step == 5:
                these[0].grad = None
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.step()
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


def test_adamw_continues_from_its_state():
    """A state dict holds all that the next step depends on."""
    straight = run(AdamW, {"lr": 0.1}, steps=6)
    first = parameters()
    optimizer = AdamW(first, lr=0.1)
    for step in range(3):
        set_gradients(first, step)
        optimizer.step()
    second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
    resumed = AdamW(second)
    resumed.load_state_dict(optimizer.state_dict())
    for step in range(3, 6):
        set_gradients(second, step)
        resumed.step()
    for got, expected in zip(second, straight, strict=True):
        assert torch.equal(got, expected)


def test_adamw_with_a_closure():
    """The closure runs with gradients on, and its loss comes back."""
    x = nn.Parameter(torch.tensor(3.0, device=DEVICE))
    optimizer = AdamW([x], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = x.square()
        loss.backward()
        return loss.item()

    losses = [optimizer.step(closure) for _ in range(50)]
    assert losses[0] == 9 and losses[-1] < 0.5


@pytest.mark.parametrize(
    "option",
    [{"lr": -1}, {"eps": -1e-8}, {"weight_decay": -0.1}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}],
    ids=str,
)
def test_adamw_refuses(option):
    """Options outside their range, for all parameters or for a group, by name and value."""
    ((name, value),) = option.items()
    message = rf"{name} must .*{str(value).replace('(', '.').replace(')', '.')}"
    with pytest.raises(ValueError, match=message):
        AdamW(parameters(), **option)
    with pytest.raises(ValueError, match=message):
        AdamW([{"params": parameters(), **option}])


SCHEDULE = {
    0: 0.0,
    3: 0.3,
    9: 0.9,
    10: 1.0,
    20: 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2,
    30: 0.55,
    50: 0.1,
    51: 0.1,
    1000: 0.1,
}


@pytest.mark.parametrize("it", SCHEDULE)
def test_cosine_schedule(it):
    """10 iterations of warm-up from 0 to 1, then down to 0.1 at iteration 50, and no further."""
    assert get_cosine_lr(it, 1.0, 0.1, 10, 50) == pytest.approx(SCHEDULE[it])


def test_cosine_schedule_without_a_part():
    """No warm-up starts at the maximum; no cosine goes from the warm-up to the minimum."""
    assert get_cosine_lr(0, 1.0, 0.1, 0, 50) == 1
    assert [get_cosine_lr(it, 1.0, 0.1, 2, 2) for it in (1, 2, 3)] == [0.5, 0.1, 0.1]


@pytest.mark.parametrize(("it", "warmup", "cycle"), [(0, 5, 4), (0, -1, 4), (-1, 1, 4)])
def test_cosine_schedule_refuses(it, warmup, cycle):
    """Phases in the wrong order, and iterations before the first."""
    with pytest.raises(ValueError, match=r"got -?\d"):
        get_cosine_lr(it, 1.0, 0.1, warmup, cycle)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"betas": (0.9,)}, ValueError, "betas must be two numbers"),
        ({"betas": 0.9}, ValueError, "betas must be two numbers"),
        ({"lr": math.inf}, ValueError, "lr must be a number of at least 0, got inf"),
        ({"eps": math.nan}, ValueError, "eps must be a number of at least 0, got nan"),
    ],
)
def test_options_that_no_step_could_take(options, error, said):
    with pytest.raises(error, match=said):
        AdamW([nn.Parameter(torch.ones(2))], **options)
    with pytest.raises(TypeError, match=r"floating point numbers, got torch\.complex64"):
        AdamW([nn.Parameter(torch.ones(2, dtype=torch.complex64))])


def test_a_group_that_is_refused_is_not_added():
    optimizer = AdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(TypeError, match=r"floating point numbers, got torch\.complex64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1


def test_a_learning_rate_may_be_a_tensor():
    left, right = (nn.Parameter(torch.ones(3)) for _ in range(2))
    for parameter, lr in ((left, 0.1), (right, torch.tensor(0.1, dtype=torch.float64))):
        parameter.grad = torch.tensor([1.0, -2.0, 3.0])
        AdamW([parameter], lr=lr).step()
    assert torch.equal(left, right)


def test_what_cannot_be_a_step_changes_nothing():
    """Sparse gradients, and the state of another optimizer, are refused before any parameter moves."""
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    optimizer = AdamW(parameters)
    parameters[0].grad, parameters[1].grad = torch.ones(3), torch.ones(3).to_sparse()
    with pytest.raises(TypeError, match=r"gradients must be dense, got torch\.sparse_coo"):
        optimizer.step()
    theirs = torch.optim.AdamW(parameters)
    parameters[1].grad = torch.ones(3)
    theirs.step()
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.load_state_dict(theirs.state_dict())
    with pytest.raises(ValueError, match="the state has step, exp_avg, exp_avg_sq; this optimizer's has t, m, v"):
        optimizer.step()
    assert all(map(torch.equal, parameters, before))
