"""Whether ∇²ℓ at the outputs, as autograd has it, is the derivative of ∇ℓ.

A fused loss that makes its gradient in `forward` has the right value and slope, and no second derivative, or a wrong one; so has
a loss of which a part is detached. Outputs are few, so that it costs nothing to look.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from spiritlevel.errors import SpiritLevelError
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.contract import Checked

# Steps of a difference of gradients, in units of the size of the outputs, where the loss runs in double precision, and where not.
STEPS = {torch.float64: (1e-4, 1e-5, 1e-3, 1e-6), torch.float32: (1e-2, 1e-1, 1e-3)}
# How far both may be apart, relative to their size; a difference tells where rounding is this part of it at most, and is
# steady where half a step changes it by this part of what it is apart.
AGREEMENT, TELLING, STEADY = {torch.float64: 1e-3, torch.float32: 0.05}, 0.1, 0.1
ROUNDED = 16
SMALL = 0.1  # the size of outputs drawn at random


def check_second_derivative(problem: Checked, batch: Batch, outputs: Any) -> None:
    """Refuse a loss given as a function whose second derivative by the outputs is not that of its gradient.

    Also on the outputs of other samples and on small ones drawn at random: where all samples are fitted well, or outputs are so small
    that a step of their size changes nothing, there is nothing to see. Not on zeros, where autograd has conventions: the slope of
    |o| is 0 there, and |o|² then has no second derivative.
    """
    if problem.loss_function.check is not None or not isinstance(outputs, Tensor) or not outputs.is_floating_point():
        return
    if not outputs.dim() or len(outputs) != len(batch):
        return
    outputs = outputs.detach()
    drawn = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for place in (outputs, outputs.roll(1, 0), SMALL * drawn.to(outputs.device)):
        for dtype in dict.fromkeys((torch.float64, outputs.dtype)):
            if dtype in STEPS and _looked_at(problem, place.to(dtype), batch.targets):
                break


def _looked_at(problem: Checked, outputs: Tensor, targets: Any) -> bool:
    """Compare at these outputs; False where the loss cannot be computed in their precision."""
    look = _Look(problem, outputs, targets)
    try:
        wrong = look.disagreement()
    except Exception:  # whatever a loss raises at outputs that no sample has
        return False
    if wrong is None:
        return True
    raise SpiritLevelError(
        f"the second derivative of the loss {problem.loss_function.name!r} by the outputs is not that of its gradient: along "
        f"one direction autograd gives a change of {wrong[0]:.4g}, the gradient itself changes by {wrong[1]:.4g}, and the two are "
        f"{wrong[2]:.4g} apart. Likely cause: a fused loss that makes its gradient in forward, detach() on a part of the loss, or the "
        "logarithm of a probability that is 1 to rounding. Write it with plain operations, of logits where it has any, or "
        "pass a loss of the form (model, batch) -> (mean, count), of which only gradients are needed"
    )


class _Look:
    """The gradient of the loss by the outputs, at outputs moved along one direction."""

    def __init__(self, problem: Checked, outputs: Tensor, targets: Any) -> None:
        self.problem, self.outputs, self.targets = problem, outputs, targets
        size = float(outputs.double().square().mean().sqrt()) if outputs.numel() else 0.0
        drawn = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.direction = drawn.to(outputs) * (size or 1.0)

    def disagreement(self) -> tuple[float, float, float] | None:
        """The sizes of autograd's product and of the difference where they are steadily apart, and how far; None where a step has
        them agree, or none tells: at a kink differences change with their step, and some losses end where outputs are moved."""
        found, apart = self._product(), None
        for step, difference, noise in self._telling(found):
            distance = float((difference - found).norm())
            sizes = float(found.norm()), float(difference.norm())
            if distance <= AGREEMENT[self.outputs.dtype] * max(sizes) + noise:
                return None
            if self._is_steady(step, difference, distance):
                apart = *sizes, distance
        return apart

    def _is_steady(self, step: float, difference: Tensor, distance: float) -> bool:
        """Whether half the step and a step to one side show the same: not where the gradient bends within the step, or at the outputs."""
        size = float(difference.norm())
        here = self._gradient(self.outputs)
        one_sided = (self._gradient(self.outputs + step * self.direction) - here) / step
        halved = float((self._difference(step / 2) - difference).norm())
        steady = halved <= STEADY * (min(distance, size) if size > 0 else distance)
        return steady and float((one_sided - difference).norm()) <= STEADY * distance

    def _telling(self, found: Tensor) -> Iterator[tuple[float, Tensor, float]]:
        usual = self._usual()
        for step in STEPS[self.outputs.dtype]:
            difference = self._difference(step)
            noise = ROUNDED * torch.finfo(self.outputs.dtype).eps * usual / step
            size = max(float(difference.norm()), float(found.norm()))
            if bool(torch.isfinite(difference).all()) and (noise < TELLING * size or size == 0):
                yield step, difference, noise

    def _usual(self) -> float:
        """The size of the gradient here, or of a network that knows nothing: one that is nearly zero is a difference of larger numbers."""
        here = float(self._gradient(self.outputs).norm())
        try:
            return max(here, float(self._gradient(0 * self.outputs).nan_to_num(0, 0, 0).norm()))
        except Exception:
            return here

    def _difference(self, step: float) -> Tensor:
        ahead, behind = (self._gradient(self.outputs + side * step * self.direction) for side in (1, -1))
        return (ahead - behind) / (2 * step)

    def _gradient(self, outputs: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            value = self.problem.loss_function.mean(leaf, self.targets)
            (gradient,) = torch.autograd.grad(value, leaf)
        return gradient

    def _product(self) -> Tensor:
        with torch.enable_grad():
            leaf = self.outputs.detach().requires_grad_()
            value = self.problem.loss_function.mean(leaf, self.targets)
            (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
            if not gradient.requires_grad:
                return torch.zeros_like(leaf)
            (product,) = torch.autograd.grad(gradient, leaf, self.direction, allow_unused=True)
        return torch.zeros_like(leaf) if product is None else product
