"""Networks on whole data sets while they are trained, with as few passes over the data as decisions need.

A pass that learns nothing costs a quarter to two thirds of an epoch. Where data are many, a row of the training curve is made when
that is affordable; whether training may end is decided exactly every time, mostly by the few samples that are hardest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
# Samples that bound the loss from below, and samples, spread over all, that say how large it is about.
HARDEST, PROBED = 1000, 1000
# Sums of the same losses in another order differ by less.
ROUNDING = 1e-4


class Evaluation:
    """One network on the samples it is trained on, over its whole training: passes are counted.

    Attributes:
        samples: How many samples were looked at without learning from them.
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self.samples = 0
        self._hardest: Tensor | None = None
        self._spread, self._correction = spread_over(torch.arange(len(x), device=x.device)), 1.0

    def state_dict(self) -> dict[str, Any]:
        """What it knows of the samples and of its passes."""
        return {name: entry for name, entry in vars(self).items() if name not in ("x", "y")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know what another one knew of the same samples."""
        vars(self).update(state)

    @property
    def many(self) -> bool:
        """Whether there are so many samples that a pass over them is worth saving."""
        return len(self.x) >= FEW

    def whole(self, model: nn.Module) -> tuple[float, float]:
        """Mean cross entropy and accuracy over all samples; which of them are hardest is remembered."""
        losses, right = each_loss(model, self.x, self.y)
        self.samples += len(self.x)
        if self.many:
            self._remember(losses)
        return mean_of(losses), right / len(self.x)

    def other(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Loss and accuracy on other samples, which cost as much."""
        self.samples += len(x)
        return evaluate(model, x, y)

    def affords(self, trained: int, further: int) -> bool:
        """Whether `further` samples can be looked at without exceeding the share, after `trained` were learned from."""
        return FORWARD * (self.samples + len(self.x) + further) <= SHARE * trained

    def bounds(self, model: nn.Module) -> tuple[float, float]:
        """A loss that the network has at least and an accuracy that it has at most, by the samples that were hardest."""
        if self._hardest is None:
            return 0.0, 1.0
        losses, right = each_loss(model, *self._at(self._hardest))
        self.samples += HARDEST
        count = len(self.x)
        return (1 - ROUNDING) * float(losses.sum(dtype=torch.float64)) / count, (count - HARDEST + right) / count

    def about(self, model: nn.Module) -> float:
        """The loss of all samples, about: those that were hardest, and samples spread over the others.

        The spread samples had another loss than all others when all were last looked at; by as much this is corrected.
        """
        hardest = self._spread[:0] if self._hardest is None else self._hardest
        losses, _ = each_loss(model, *self._at(torch.cat([hardest, self._spread])))
        self.samples += len(losses)
        hard, others = losses[: len(hardest)].sum(dtype=torch.float64), mean_of(losses[len(hardest) :])
        return (float(hard) + self._correction * others * (len(self.x) - len(hardest))) / len(self.x)

    def _at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[positions], self.y[positions]

    def _remember(self, losses: Tensor) -> None:
        """Which samples are hardest, samples spread over the others, and how their loss differs from that of all others."""
        self._hardest = torch.topk(losses, HARDEST).indices
        is_other = torch.ones(len(losses), dtype=torch.bool, device=losses.device)
        is_other[self._hardest] = False
        others = is_other.nonzero().flatten()
        self._spread = spread_over(others)
        seen = mean_of(losses[self._spread])
        self._correction = mean_of(losses[others]) / seen if seen > 0 else 1.0


def spread_over(positions: Tensor) -> Tensor:
    """About as many of these positions as are probed, at equal distances."""
    return positions[:: max(1, len(positions) // PROBED)][:PROBED]


@torch.no_grad()
def each_loss(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
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
