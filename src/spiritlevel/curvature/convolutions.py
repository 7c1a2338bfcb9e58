"""Convolutions whose gradient is differentiated with the kernels that made it.

torch computes the part of a second derivative that belongs to the weight as a convolution with kernels as large as the
pictures, on a slow path. The same numbers are the weight's gradient of an ordinary convolution.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from spiritlevel.network.layers import bound_arguments, repeated

_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def convolved(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The convolution of these arguments; None where it is left to torch."""
    x, weight, bias, stride, padding, dilation, groups = bound_arguments(_ARGUMENTS, args, kwargs)
    batched = x.dim() == weight.dim()  # a single picture may come without its batch dimension
    if not batched or isinstance(padding, str):
        return None
    dims = weight.dim() - 2
    settings = _Settings(
        repeated(1 if stride is None else stride, dims),
        repeated(0 if padding is None else padding, dims),
        repeated(1 if dilation is None else dilation, dims),
        1 if groups is None else int(groups),
    )
    found: Tensor = _Convolution.apply(x, weight, bias, settings)  # type: ignore[no-untyped-call]
    return found


class _Settings(NamedTuple):
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found: Tensor = torch.ops.aten.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups
        )
        return found

    def backward(
        self, delta: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients with respect to x, weight and bias, those that are wanted."""
        found: tuple[Tensor | None, Tensor | None, Tensor | None] = torch.ops.aten.convolution_backward(
            delta,
            x,
            weight,
            [weight.shape[0]] if wanted[2] else None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            [0] * len(self.stride),
            self.groups,
            list(wanted),
        )
        return found


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = settings
        return settings.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        found = _Gradients.apply(delta, *ctx.saved_tensors, ctx.needs_input_grad[:3], ctx.settings)  # type: ignore[no-untyped-call]
        return (*found, None)


class _Gradients(torch.autograd.Function):
    """(δ, x, W) → gradients of x, W and bias, all of them linear in each of the three."""

    @staticmethod
    def forward(
        ctx: Any, delta: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool], settings: _Settings
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        ctx.save_for_backward(delta, x, weight)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        return settings.backward(delta, x, weight, wanted)

    @staticmethod
    def backward(
        ctx: Any, to_x: Tensor | None, to_weight: Tensor | None, to_bias: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        delta, x, weight = ctx.saved_tensors
        settings: _Settings = ctx.settings
        at_delta = at_x = at_weight = None
        if ctx.needs_input_grad[0]:
            at_delta = _along(settings, x, weight, to_x, to_weight, to_bias)
        if ctx.needs_input_grad[1] and to_weight is not None:
            at_x = settings.backward(delta, x, to_weight, (True, False, False))[0]
        if ctx.needs_input_grad[2] and to_x is not None:
            at_weight = settings.backward(delta, to_x, weight, (False, True, False))[1]
        return at_delta, at_x, at_weight, None, None


def _along(
    settings: _Settings,
    x: Tensor,
    weight: Tensor,
    to_x: Tensor | None,
    to_weight: Tensor | None,
    to_bias: Tensor | None,
) -> Tensor | None:
    """The convolution's own derivative along (to_x, to_weight, to_bias)."""
    found = None if to_weight is None else settings.forward(x, to_weight, to_bias)
    if to_x is not None:
        moved = settings.forward(to_x, weight, to_bias if found is None else None)
        return moved if found is None else found.add_(moved)
    if found is None and to_bias is not None:
        return settings.forward(x, torch.zeros_like(weight), to_bias)
    return found
