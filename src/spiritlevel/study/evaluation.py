"""Networks on whole data sets while they are trained, with as few passes over the data as decisions need.

A pass that learns nothing costs a quarter to two thirds of an epoch. Where data are many, a row of the training curve is made when
that is affordable; whether training may end is decided exactly every time, mostly by the samples that were hardest before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Samples in one forward pass where nothing is learned: large enough for speed, small enough for any network.
CHUNK = 1000
# What a forward pass costs of training steps on the same samples (measured: 0.11 where steps are of four samples, 0.25 to 0.34
# for layers of 512, 0.4 to 0.7 where most of the work is in the first layer), and the share of a training that evaluations take.
FORWARD, SHARE = 0.6, 0.04
# With fewer training samples every evaluation is made: it takes no time worth saving.
FEW = 10_000
# Hardest samples that are looked at in one go, to bound the loss from below, and samples, spread over all, that say how large it is about.
HARDEST, PROBED = 1000, 1000
# The share of all samples, the hardest first, that may be looked at before all of them are.
MOST_OF_ALL = 0.25
# Sums of the same losses in another order differ by less.
ROUNDING = 1e-4


# What a network says of images, without derivatives.
Outputs = Callable[[nn.Module, Tensor], Tensor]
# Whether a rule for the end of training may hold, given a loss that the network has at least and an accuracy that it has at most.
MayHold = Callable[[float, float], bool]


class Evaluation:
    """One network on the samples it is trained on, over its whole training: passes are counted.

    Args:
        x: Their images.
        y: Their labels.
        outputs: How to run the network, where there is something faster than calling it.

    Attributes:
        samples: How many samples were looked at without learning from them.
    """

    def __init__(self, x: Tensor, y: Tensor, outputs: Outputs = nn.Module.__call__) -> None:
        self.x, self.y, self.outputs = x, y, outputs
        self.samples = 0
        self._hardest: Tensor | None = None
        self._spread, self._correction = spread_over(torch.arange(len(x), device=x.device)), 1.0

    def state_dict(self) -> dict[str, Any]:
        """What it knows of the samples and of its passes."""
        return {name: entry for name, entry in vars(self).items() if name not in ("x", "y", "outputs")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know what another one knew of the same samples."""
        vars(self).update(state)

    @property
    def many(self) -> bool:
        """Whether there are so many samples that a pass over them is worth saving."""
        return len(self.x) >= FEW

    def whole(self, model: nn.Module) -> tuple[float, float]:
        """Mean cross entropy and accuracy over all samples; which of them are hardest is remembered."""
        losses, right = self._each_loss(model, self.x, self.y)
        if self.many:
            self._remember(losses)
        return mean_of(losses), right / len(self.x)

    def other(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Loss and accuracy on other samples, which cost as much."""
        losses, right = self._each_loss(model, x, y)
        return mean_of(losses), right / len(x)

    def _each_loss(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        self.samples += len(x)
        return each_loss(functools.partial(self.outputs, model), x, y)

    def affords(self, trained: int, further: int) -> bool:
        """Whether `further` samples can be looked at without exceeding the share, after `trained` were learned from."""
        return FORWARD * (self.samples + len(self.x) + further) <= SHARE * trained

    def may_end(self, model: nn.Module, may_hold: MayHold) -> bool:
        """Whether a rule for the end of training may hold: not if the samples that were hardest before say so by themselves.

        They are looked at one portion after the other, until they do.
        """
        loss, wrong, count = 0.0, 0, len(self.x)
        for portion in () if self._hardest is None else torch.split(self._hardest, HARDEST):
            losses, right = self._each_loss(model, *self._at(portion))
            loss += float(losses.sum(dtype=torch.float64))
            wrong += len(portion) - right
            if not math.isfinite(loss):
                return True
            if not may_hold((1 - ROUNDING) * loss / count, (count - wrong) / count):
                return False
        return True

    def about(self, model: nn.Module) -> float:
        """The loss of all samples, about: those that were hardest, and samples spread over the others.

        The spread samples had another loss than all others when all were last looked at; by as much this is corrected.
        """
        hardest = self._spread[:0] if self._hardest is None else self._hardest[:HARDEST]
        losses, _ = self._each_loss(model, *self._at(torch.cat([hardest, self._spread])))
        hard, others = losses[: len(hardest)].sum(dtype=torch.float64), mean_of(losses[len(hardest) :])
        return (float(hard) + self._correction * others * (len(self.x) - len(hardest))) / len(self.x)

    def _at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[positions], self.y[positions]

    def _remember(self, losses: Tensor) -> None:
        """Which samples are hardest, samples spread over the others, and how their loss differs from that of all others."""
        self._hardest = torch.topk(losses, max(HARDEST, int(MOST_OF_ALL * len(losses)))).indices
        is_other = torch.ones(len(losses), dtype=torch.bool, device=losses.device)
        is_other[self._hardest[:HARDEST]] = False
        others = is_other.nonzero().flatten()
        self._spread = spread_over(others)
        seen = mean_of(losses[self._spread])
        self._correction = mean_of(losses[others]) / seen if seen > 0 else 1.0


def spread_over(positions: Tensor) -> Tensor:
    """About as many of these positions as are probed, at equal distances."""
    return positions[:: max(1, len(positions) // PROBED)][:PROBED]


@torch.no_grad()
def each_loss(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    """The cross entropy of every sample, and how many are right."""
    losses, right = [], 0
    for x_chunk, y_chunk in zip(torch.split(x, CHUNK), torch.split(y, CHUNK), strict=True):
        outputs = model(x_chunk)
        losses.append(F.cross_entropy(outputs, y_chunk, reduction="none"))
        right += int((outputs.argmax(1) == y_chunk).sum())
    return torch.cat(losses), right


def mean_of(losses: Tensor) -> float:
    return float(losses.sum(dtype=torch.float64)) / len(losses)


def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean cross entropy and accuracy over all samples."""
    losses, right = each_loss(model, x, y)
    return mean_of(losses), right / len(x)


def gradient_norm(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The Euclidean norm of the gradient of the mean cross entropy over all samples."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
    for x_chunk, y_chunk in zip(torch.split(x, CHUNK), torch.split(y, CHUNK), strict=True):
        loss = F.cross_entropy(model(x_chunk), y_chunk, reduction="sum") / len(x)
        for entry, gradient in zip(total, torch.autograd.grad(loss, parameters), strict=True):
            entry += gradient
    return math.sqrt(sum(float(entry.square().sum()) for entry in total))
