"""Convolutions whose gradient is differentiated with the kernels that made it.

torch computes the part of a second derivative that belongs to the weight as a convolution with kernels as large as the
pictures, on a slow path. The same numbers are the weight's gradient of an ordinary convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spiritlevel.curvature.twofold import Asked, Gradients, Operation, Wanted, applied
from spiritlevel.network.layers import bound_arguments, repeated

_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def convolved(args: tuple[Any, ...], kwargs: dict[str, Any], asked: Asked | None) -> Tensor | None:
    """The convolution of these arguments; None where it is left to torch."""
    x, weight, bias, stride, padding, dilation, groups = bound_arguments(_ARGUMENTS, args, kwargs)
    batched = x.dim() == weight.dim()  # a single picture may come without its batch dimension
    if not batched or isinstance(padding, str):
        return None
    dims = weight.dim() - 2
    convolution = _Convolution(
        repeated(1 if stride is None else stride, dims),
        repeated(0 if padding is None else padding, dims),
        repeated(1 if dilation is None else dilation, dims),
        1 if groups is None else int(groups),
    )
    return applied(convolution, x, weight, bias, asked)


@dataclass(frozen=True)
class _Convolution(Operation):
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
        found: Tensor = torch.ops.aten.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups
        )
        return found

    def backward(self, delta: Tensor, x: Tensor, weight: Tensor | None, wanted: Wanted) -> Gradients:
        assert weight is not None
        with_weight = wanted[1] and wanted[2]  # without it the bias alone would take the weight's kernel too
        at_x, at_weight, at_bias = torch.ops.aten.convolution_backward(
            delta,
            x,
            weight,
            [weight.shape[0]] if with_weight else None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            [0] * len(self.stride),
            self.groups,
            [wanted[0], wanted[1], with_weight],
        )
        if wanted[2] and not with_weight:
            at_bias = delta.sum([0, *range(2, delta.dim())])
        return at_x, at_weight, at_bias
