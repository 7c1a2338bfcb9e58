"""Batch normalization with running statistics, whose gradient is differentiated by the kernels that made it.

In eval mode it multiplies every channel by a number and adds another. torch differentiates its gradient as if the statistics
were the batch's own: a dozen passes over the activations, a quarter of a product with the Hessian of a ResNet. Four are enough.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

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
    statistics = _Statistics(mean, variance, _EPSILON if epsilon is None else float(epsilon))
    found: Tensor = _Normalization.apply(x, weight, bias, statistics)  # type: ignore[no-untyped-call]
    return found


class _Statistics(NamedTuple):
    mean: Tensor
    variance: Tensor
    epsilon: float

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, weight, bias, eps=self.epsilon)

    def backward(
        self, delta: Tensor, x: Tensor, weight: Tensor | None, wanted: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients with respect to x, weight and bias, those that are wanted."""
        found = torch.ops.aten.native_batch_norm_backward(
            delta, x, weight, self.mean, self.variance, None, None, False, self.epsilon, list(wanted)
        )
        at_x, at_weight, at_bias = (each if asked else None for each, asked in zip(found, wanted, strict=True))
        return at_x, at_weight, at_bias

    def centred(self) -> _Statistics:
        """The same for inputs whose mean is taken off already."""
        return self._replace(mean=torch.zeros_like(self.mean))

    def scale(self, weight: Tensor | None, dims: int) -> Tensor:
        """What channels are multiplied by, shaped for inputs of so many dimensions."""
        scale = torch.rsqrt(self.variance + self.epsilon)
        return (scale if weight is None else scale * weight).view(-1, *[1] * (dims - 2))


class _Normalization(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: _Statistics) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.statistics = statistics
        return statistics.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        found = _Gradients.apply(delta, *ctx.saved_tensors, ctx.needs_input_grad[:3], ctx.statistics)  # type: ignore[no-untyped-call]
        return (*found, None)


class _Gradients(torch.autograd.Function):
    """(δ, x, γ) → gradients of x, γ and β: δγ/σ, Σ δ(x − μ)/σ and Σ δ."""

    @staticmethod
    def forward(
        ctx: Any,
        delta: Tensor,
        x: Tensor,
        weight: Tensor | None,
        wanted: tuple[bool, bool, bool],
        statistics: _Statistics,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        ctx.save_for_backward(delta, x, weight)
        ctx.statistics = statistics
        ctx.set_materialize_grads(False)
        return statistics.backward(delta, x, weight, wanted)

    @staticmethod
    def backward(
        ctx: Any, to_x: Tensor | None, to_weight: Tensor | None, to_bias: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        delta, x, weight = ctx.saved_tensors
        statistics: _Statistics = ctx.statistics
        at_delta = at_x = at_weight = None
        if ctx.needs_input_grad[0]:
            at_delta = _along(statistics, x, weight, to_x, to_weight, to_bias)
        if ctx.needs_input_grad[1] and to_weight is not None:
            at_x = delta * statistics.scale(to_weight, x.dim())
        if ctx.needs_input_grad[2] and to_x is not None:
            at_weight = statistics.centred().backward(delta, to_x, weight, (False, True, False))[1]
        return at_delta, at_x, at_weight, None, None


def _along(
    statistics: _Statistics,
    x: Tensor,
    weight: Tensor | None,
    to_x: Tensor | None,
    to_weight: Tensor | None,
    to_bias: Tensor | None,
) -> Tensor | None:
    """The normalization's own derivative along (to_x, to_weight, to_bias)."""
    moved = None if to_x is None else to_x * statistics.scale(weight, x.dim())
    if to_weight is None and to_bias is None:
        return moved
    like = statistics.mean
    weights, biases = (torch.zeros_like(like) if each is None else each for each in (to_weight, to_bias))
    found = statistics.forward(x, weights, biases)
    return found if moved is None else found.add_(moved)
