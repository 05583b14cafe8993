"""AdamW, and the learning rate over a training run."""

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2). At step t, with the gradient g:

        m = beta_1 m + (1 - beta_1) g        v = beta_2 v + (1 - beta_2) g^2
        theta = theta - lr · weight_decay · theta
        theta = theta - lr_t m / (sqrt(v) + eps_t)

    with lr_t = lr sqrt(1 - beta_2^t) / (1 - beta_1^t) and eps_t = eps sqrt(1 - beta_2^t): both corrections of the bias
    of m and v towards 0, put into two numbers (Kingma and Ba 2015, end of section 2). So the result is that of
    torch.optim.AdamW.

    m and v have the dtype of their parameter. In half precision changes below the last place are lost, and float16
    rounds an eps of 1e-8 to 0: train float32 parameters, under autocast.

    Args:
        params: parameters, or groups of them with options of their own.
        lr: the learning rate, a number or a tensor of one; schedules change `param_groups[i]["lr"]`.
        betas: the decay of m and of v a step.
        eps: what keeps the division finite.
        weight_decay: the decay of a parameter a step, in units of lr.

    Raises:
        ValueError: an option outside its range.
        TypeError: a parameter that is not of real numbers.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, at construction too; options that it lacks are the defaults."""
        options = self.defaults | param_group
        for name in ("lr", "eps", "weight_decay"):
            if not 0 <= options[name] < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, got {options[name]}")
        betas = options["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                self.param_groups.pop()
                raise TypeError(f"parameters must be of floating point numbers, got {parameter.dtype}")

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step for every parameter that has a gradient.

        Args:
            closure: computes the loss and the gradients anew, where the caller has not done so.

        Returns:
            The loss that the closure gave, if there is one.

        Raises:
            TypeError: a sparse gradient. Nothing has changed then.
            ValueError: the state that was loaded is another optimizer's; likewise.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise TypeError(f"gradients must be dense, got {parameter.grad.layout}")
            if (state := self.state.get(parameter)) and not state.keys() >= {"t", "m", "v"}:
                raise ValueError(f"the state has {', '.join(state)}; this optimizer's has t, m, v")
        for group in self.param_groups:
            self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        """The equations above, each as one operation on all parameters of the group."""
        lr, (beta_1, beta_2), eps, weight_decay = (group[name] for name in ("lr", "betas", "eps", "weight_decay"))
        lr = float(lr)  # some schedulers keep a tensor
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return  # operations on lists take no empty ones
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state.update(t=0, m=torch.zeros_like(parameter), v=torch.zeros_like(parameter))
            state["t"] += 1
        g = [parameter.grad for parameter in parameters if parameter.grad is not None]
        m, v = ([state[name] for state in states] for name in ("m", "v"))
        corrections = [math.sqrt(1 - beta_2 ** state["t"]) for state in states]
        lr_t = [
            lr * correction / (1 - beta_1 ** state["t"]) for state, correction in zip(states, corrections, strict=True)
        ]

        torch._foreach_lerp_(m, g, 1 - beta_1)
        torch._foreach_mul_(v, beta_2)
        torch._foreach_addcmul_(v, g, g, 1 - beta_2)
        denominators = torch._foreach_sqrt(v)
        torch._foreach_add_(denominators, [eps * correction for correction in corrections])
        torch._foreach_mul_(parameters, 1 - lr * weight_decay)
        torch._foreach_addcdiv_(parameters, m, denominators, [-each for each in lr_t])


def get_cosine_lr(
    it: int, max_learning_rate: float, min_learning_rate: float, warmup_iters: int, cosine_cycle_iters: int
) -> float:
    """The learning rate at iteration `it`: a linear warm-up, half a cosine, then the minimum.

    With w = warmup_iters and c = cosine_cycle_iters (after Loshchilov and Hutter 2017, SGDR, equation 5):

        it < w         it / w · max
        w <= it < c    min + (max - min) (1 + cos(pi (it - w) / (c - w))) / 2
        c <= it        min

    Raises:
        ValueError: not 0 <= warmup_iters <= cosine_cycle_iters, or a negative iteration.
    """
    if not 0 <= warmup_iters <= cosine_cycle_iters:
        raise ValueError(f"need 0 <= warmup_iters <= cosine_cycle_iters, got {warmup_iters} and {cosine_cycle_iters}")
    if it < 0:
        raise ValueError(f"it must be at least 0, got {it}")
    if it < warmup_iters:
        return it / warmup_iters * max_learning_rate
    if it >= cosine_cycle_iters:
        return min_learning_rate
    done = (it - warmup_iters) / (cosine_cycle_iters - warmup_iters)
    return min_learning_rate + (max_learning_rate - min_learning_rate) * (1 + math.cos(math.pi * done)) / 2
