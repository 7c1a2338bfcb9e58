"""The sharpness up to which an optimizer is stable on a quadratic: the line that its own sharpness settles at.

Gradient descent: 2/η. Heavy ball: (2 + 2β)/η. Nesterov: (2 + 2β)/(η(1 + 2β)). Adam: (2 + 2β₁)/(η(1 − β₁)), which is 38/η
at β₁ = 0.9, for the Hessian divided by its preconditioner (Cohen et al. 2021, arXiv 2103.00065, and 2022, arXiv 2207.14484).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import optim

from spiritlevel.tracking.optimizers import learning_rate

# Quantities that have a line, by what they measure.
PLAIN = ("hessian_largest_eigenvalue", "hessian_spectral_norm")
PRECONDITIONED = ("preconditioned_largest_eigenvalue",)
UPDATE, GRADIENT = "critical_sharpness", "critical_sharpness_gradient"


def thresholds(optimizer: optim.Optimizer | None) -> tuple[dict[str, float], tuple[str, ...]]:
    """Quantity → the value from which on the optimizer is unstable, and notes where there is no line to draw.

    With several groups of parameters the line is that of the largest learning rate.

    >>> import torch
    >>> weight = [torch.nn.Parameter(torch.ones(1))]
    >>> thresholds(torch.optim.SGD(weight, lr=0.125, momentum=0.5))[0]["hessian_largest_eigenvalue"]
    24.0
    """
    if optimizer is None:
        return {}, ()
    rate = learning_rate(optimizer)
    if not rate > 0:
        return {}, (f"no line of stability: the learning rate is {rate}",)
    found = {UPDATE: 2 / rate}
    group = max(optimizer.param_groups, key=lambda each: float(each["lr"]))
    if type(optimizer) is optim.SGD:
        line = _descent(group, rate)
        found |= dict.fromkeys(PLAIN, line)
        if not group["momentum"]:
            found[GRADIENT] = line
    elif type(optimizer) in (optim.Adam, optim.AdamW):
        found |= dict.fromkeys(PRECONDITIONED, _adam(group, rate))
    elif type(optimizer) is optim.RMSprop:
        found |= dict.fromkeys(PRECONDITIONED, (2 + 2 * group["momentum"]) / rate)
    else:
        name = type(optimizer).__name__
        return found, (f"no line of stability is known for {name}; those of SGD, Adam, AdamW and RMSprop are",)
    return found, ()


def _descent(group: Mapping[str, Any], rate: float) -> float:
    """Of gradient descent with momentum; weight decay adds itself to every eigenvalue of what is descended."""
    beta, decay = float(group["momentum"]), float(group["weight_decay"])
    rate *= 1 - float(group["dampening"]) if beta else 1
    line = (2 + 2 * beta) / (rate * (1 + 2 * beta)) if group["nesterov"] else (2 + 2 * beta) / rate
    return line - decay


def _adam(group: Mapping[str, Any], rate: float) -> float:
    """With decoupled weight decay w the weights shrink by 1 − ηw at every step, which takes a little off the 2."""
    beta = float(group["betas"][0])
    decoupled = bool(group.get("decoupled_weight_decay", False))
    shrink = rate * float(group["weight_decay"]) if decoupled else 0.0
    return (1 + beta) * (2 - shrink) / (rate * (1 - beta))
