"""Operations on inputs, a weight and a bias whose gradient is differentiated by the kernels that made it.

A product with the Hessian differentiates the gradient of every layer. Of an operation that is linear in its inputs and in its
weight that takes the same few kernels as the gradient itself, which torch does not always choose. It never takes the weight's
gradient as a number, which is left out where nobody else asks for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Wanted = tuple[bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Operation(ABC):
    """f(x, W, b), affine in x and in (W, b); as it stands, linear in each of x and W but for b."""

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """The value."""

    @abstractmethod
    def backward(self, delta: Tensor, x: Tensor, weight: Tensor | None, wanted: Wanted) -> Gradients:
        """The gradients with respect to x, weight and bias, those that are wanted."""

    def along(self, x: Tensor, weight: Tensor | None, directions: Gradients) -> Tensor | None:
        """The derivative of f along directions of x, weight and bias."""
        to_x, to_weight, to_bias = directions
        if to_weight is None and to_x is None:
            assert weight is not None
            return None if to_bias is None else self.forward(x, torch.zeros_like(weight), to_bias)
        if to_x is None:
            return self.forward(x, to_weight, to_bias)
        if to_weight is None:
            return self.forward(to_x, weight, to_bias)
        return self.forward(x, to_weight, to_bias).add_(self.forward(to_x, weight))

    def to_inputs(self, delta: Tensor, x: Tensor, to_weight: Tensor) -> Tensor | None:
        """The derivative of ⟨to_weight, gradient of the weight⟩ with respect to x."""
        return self.backward(delta, x, to_weight, (True, False, False))[0]

    def to_weights(self, delta: Tensor, to_x: Tensor, weight: Tensor | None) -> Tensor | None:
        """The derivative of ⟨to_x, gradient of x⟩ with respect to the weight."""
        return self.backward(delta, to_x, weight, (False, True, False))[1]


@dataclass
class Asked:
    """Whether the values of weights' gradients are asked for, and not their derivatives only."""

    values: bool = True


def applied(
    operation: Operation, x: Tensor, weight: Tensor | None, bias: Tensor | None, asked: Asked | None = None
) -> Tensor:
    """f(x, W, b). While values are not `asked` for, the gradient of a weight that is a leaf is zeros, to be differentiated as if they
    were it.

    (A weight that is computed passes its gradient on to what it is computed of, where its value counts.)
    """
    leaf = weight is not None and weight.is_leaf
    found: Tensor = _Applied.apply(x, weight, bias, operation, asked if leaf else None)  # type: ignore[no-untyped-call]
    return found


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, operation: Operation, asked: Asked | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.operation, ctx.asked = operation, asked
        return operation.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        # What arrives here a second time, when vectors are pulled back through the graph of the gradient, always needs its value.
        values = ctx.asked is None or ctx.asked.values or not torch.is_grad_enabled()
        found = _Gradient.apply(delta, *ctx.saved_tensors, ctx.needs_input_grad[:3], ctx.operation, values)  # type: ignore[no-untyped-call]
        return (*found, None, None)


class _Gradient(torch.autograd.Function):
    """(δ, x, W) → gradients of x, W and b, each of them linear in δ."""

    @staticmethod
    def forward(
        ctx: Any, delta: Tensor, x: Tensor, weight: Tensor | None, wanted: Wanted, operation: Operation, values: bool
    ) -> Gradients:
        ctx.save_for_backward(delta, x, weight)
        ctx.operation = operation
        ctx.set_materialize_grads(False)
        if values or weight is None or not wanted[1]:
            return operation.backward(delta, x, weight, wanted)
        at_x, _, at_bias = operation.backward(delta, x, weight, (wanted[0], False, wanted[2]))
        return at_x, weight.new_zeros(()).expand_as(weight), at_bias

    @staticmethod
    def backward(
        ctx: Any, to_x: Tensor | None, to_weight: Tensor | None, to_bias: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        delta, x, weight = ctx.saved_tensors
        operation: Operation = ctx.operation
        at_delta = at_x = at_weight = None
        if ctx.needs_input_grad[0]:
            at_delta = operation.along(x, weight, (to_x, to_weight, to_bias))
        if ctx.needs_input_grad[1] and to_weight is not None:
            at_x = operation.to_inputs(delta, x, to_weight)
        if ctx.needs_input_grad[2] and to_x is not None:
            at_weight = operation.to_weights(delta, to_x, weight)
        return at_delta, at_x, at_weight, None, None, None
