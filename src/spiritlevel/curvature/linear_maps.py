"""Dense layers whose weight's gradient is left out where only its derivatives are asked for.

torch differentiates them with the kernels that are needed. The gradient itself is one more, which of a network with a wide first
layer is a quarter of a product with samples whose graph is not kept.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from spiritlevel.curvature.twofold import Asked, Gradients, Operation, Wanted, applied
from spiritlevel.network.layers import bound_arguments

_ARGUMENTS = ("input", "weight", "bias")
# Of fewer multiplications than this nothing is saved, because of the calls in Python.
FEWEST = 1 << 21


def mapped(args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked) -> Tensor | None:
    """`F.linear` of these arguments; None where it is left to torch."""
    x, weight, bias = bound_arguments(_ARGUMENTS, args, kwargs)
    few = x.shape[:-1].numel() * weight.numel() < FEWEST
    if (
        few
        or weight.dim() != 2
        or not weight.is_leaf
        or not weight.requires_grad
        or any(each.dtype != x.dtype for each in (weight, bias) if each is not None)
    ):
        return None
    return applied(_DENSE, x, weight, bias, asked)


class _Dense(Operation):
    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
        assert weight is not None
        return F.linear(x, weight, bias)

    def backward(self, delta: Tensor, x: Tensor, weight: Tensor | None, wanted: Wanted) -> Gradients:
        assert weight is not None
        rows = delta.shape[:-1].numel()  # told: of nothing, -1 could be any number
        flat = delta.reshape(rows, delta.shape[-1])
        at_x = delta @ weight if wanted[0] else None
        at_weight = flat.mT @ x.reshape(rows, x.shape[-1]) if wanted[1] else None
        return at_x, at_weight, flat.sum(0) if wanted[2] else None


_DENSE = _Dense()
