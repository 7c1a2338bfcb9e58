"""Batch normalization with running statistics, whose gradient is differentiated by the kernels that made it.

In eval mode it multiplies every channel by a number and adds another. torch differentiates its gradient as if the statistics
were the batch's own: a dozen passes over the activations, a quarter of a product with the Hessian of a ResNet. Four are enough.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spiritlevel.curvature.twofold import Gradients, Operation, Wanted, applied
from spiritlevel.network.layers import bound_arguments

_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_EPSILON = 1e-5  # of F.batch_norm, where it is not given
# Of fewer entries than this torch's own passes cost less than the calls in Python.
FEWEST = 1 << 14


def normalized(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """`F.batch_norm` of these arguments; None where it is left to torch."""
    x, mean, variance, weight, bias, training, _, epsilon = bound_arguments(_ARGUMENTS, args, kwargs)
    if (
        x.numel() < FEWEST
        or training
        or mean is None
        or variance is None
        or mean.requires_grad
        or variance.requires_grad
    ):
        return None
    if any(each is not None and each.dtype != x.dtype for each in (mean, variance, weight, bias)):
        return None
    normalization = _Normalization(mean, variance, _EPSILON if epsilon is None else float(epsilon))
    return applied(normalization, x, weight, bias)


@dataclass(frozen=True)
class _Normalization(Operation):
    """Of x, γ and β: γ(x − μ)/σ + β, with gradients δγ/σ, Σ δ(x − μ)/σ and Σ δ."""

    mean: Tensor
    variance: Tensor
    epsilon: float

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, weight, bias, eps=self.epsilon)

    def backward(self, delta: Tensor, x: Tensor, weight: Tensor | None, wanted: Wanted) -> Gradients:
        found = torch.ops.aten.native_batch_norm_backward(
            delta, x, weight, self.mean, self.variance, None, None, False, self.epsilon, list(wanted)
        )
        at_x, at_weight, at_bias = (each if asked else None for each, asked in zip(found, wanted, strict=True))
        return at_x, at_weight, at_bias

    def _scale(self, weight: Tensor | None, dims: int) -> Tensor:
        """What channels are multiplied by, shaped for inputs of so many dimensions."""
        scale = torch.rsqrt(self.variance + self.epsilon)
        return (scale if weight is None else scale * weight).view(-1, *[1] * (dims - 2))

    def along(self, x: Tensor, weight: Tensor | None, directions: Gradients) -> Tensor | None:
        to_x, to_weight, to_bias = directions
        moved = None if to_x is None else to_x * self._scale(weight, x.dim())
        if to_weight is None and to_bias is None:
            return moved
        weights, biases = (torch.zeros_like(self.mean) if each is None else each for each in (to_weight, to_bias))
        found = self.forward(x, weights, biases)
        return found if moved is None else found.add_(moved)

    def to_inputs(self, delta: Tensor, x: Tensor, to_weight: Tensor) -> Tensor:
        return delta * self._scale(to_weight, x.dim())

    def to_weights(self, delta: Tensor, to_x: Tensor, weight: Tensor | None) -> Tensor | None:
        centred = replace(self, mean=torch.zeros_like(self.mean))  # nothing is taken off a direction
        return centred.backward(delta, to_x, weight, (False, True, False))[1]
