"""AdamBC: Adam whose second moments are corrected for the noise in its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .._validate import non_negative, optional, positive


class AdamBC(torch.optim.Optimizer):
    r"""AdamW that subtracts the noise's variance from its second moments (DP-AdamBC).

    Noise of standard deviation s adds s^2 to the mean of each squared gradient. If gradients are
    far below s, Adam therefore divides each gradient by about s, and acts like SGD with momentum.
    AdamBC subtracts s^2 first (Tang, Shpilevskiy and Lécuyer, AAAI 2024, arXiv:2312.14334,
    algorithm 1):

    .. math::
        \theta \leftarrow \theta - \mathrm{lr} \, \hat m / (\sqrt{\max(\hat v - \hat s^2,
        \mathrm{floor} \, \hat s^2)} + \mathrm{eps})

    Here \hat m and \hat v are Adam's moments, and \hat s^2 is the average of s^2 with the weights
    of \hat v, so s may change between steps, as it does with banded noise. The private optimizer
    passes s to `step`. Without noise, the step is the same as that of `torch.optim.AdamW`.

    Args:
        params, lr, betas, eps, weight_decay: see `torch.optim.AdamW`.
        floor: lower bound of the second moment, as a fraction of the noise's variance, > 0. So a
            step is at most 1 / sqrt(floor) times as long as a step with the denominator s. None
            means 3 sqrt(2 (1 - beta2) / (1 + beta2)), 0.09 for the default betas: for gradients
            of noise alone, three standard deviations of v divided by the mean of v. The paper's
            floor, gamma', is an absolute value, which must be chosen for each noise.

    Guarantees:
        A step is computed only from releases and public numbers, so it costs no epsilon.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        floor: float | None = None,
        amsgrad: bool = False,
    ):
        if amsgrad:
            raise ValueError(
                "amsgrad=True: the noise in a maximum of second moments is unknown; leave it out, "
                "or use torch.optim.AdamW, which subtracts no noise"
            )
        non_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        optional(positive, floor=floor)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas!r}: expected two numbers >= 0 and below 1")
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**given, "floor": floor})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, noise_std: float = 0.0) -> Any:
        """Update the parameters.

        Args:
            closure: function that computes the loss again and returns it.
            noise_std: standard deviation of the noise in each element of the gradients.

        Returns:
            The value that closure returned; None without closure.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, noise_std)
        return result

    def _update(self, parameter: Any, group: dict[str, Any], noise_std: float) -> None:
        state, grad = self.state[parameter], parameter.grad
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["noise_sq"] = 0.0
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        state["noise_sq"] = beta2 * state["noise_sq"] + (1 - beta2) * noise_std**2
        first, second = (1 - beta ** float(state["step"]) for beta in (beta1, beta2))
        noise = state["noise_sq"] / second
        floor = group["floor"] or 3 * math.sqrt(2 * (1 - beta2) / (1 + beta2))
        moment = (state["exp_avg_sq"] / second).sub_(noise).clamp_(min=floor * noise)
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.addcdiv_(state["exp_avg"], moment.sqrt_().add_(group["eps"]), value=-lr / first)
