"""Weights along a training: kept where the train loss first falls to a level, and after chosen epochs.

The losses of batches, which cost nothing, say when a level may be reached; where data are many, a few of them say how far the
training set differs from its batches and whether the level is likely reached; then one goes back to the first of the last steps
(`trail.py`) where it is, and a pass over the whole training set decides.
Nothing here draws a random number or changes a weight: a network is trained to the same bits with and without levels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from spiritlevel.saved import sha256_of
from spiritlevel.study.settings import MeasureSection
from spiritlevel.study.trail import Place
from spiritlevel.subjects.checkpoint import save_state_dict

# Samples that the running mean of batch losses looks back on: a share of all that were trained on, because a loss falls ever
# more slowly and noise must not pass for it; at first so many, or so large a part of an epoch; at most an epoch.
WINDOW, FIRST_WINDOW, FIRST_PART = 1 / 50, 2000, 1 / 20
# Passes over the training set that may find a level not reached yet: so many, one more for every level that was passed, and so
# many more for every epoch.
SPARE_PASSES, SPARE_PASSES_AN_EPOCH = 3, 0.05
# The part of an epoch that must be trained after such a pass before the next.
PAUSE = 1 / 20
# What must be trained between two looks at a few samples, as a share of what was trained before: at least and at most. Between
# them it is half of what is left to the next level, if the loss falls on as fast as it fell since one of the last two.
SHORTEST_PAUSE, LONGEST_PAUSE = 1 / 40, 1 / 8
# So near to a level, by the losses of batches, a look is worth it after the shortest pause.
NEAR = 1.2
# How far the loss of the training set may be thought to differ from the running mean: batch losses are noisy.
FARTHEST = 2.0
# The same where a few samples were looked at. A network that learns by heart has forgotten least of what it saw last, so that
# its loss on all of it lies far below that of batches before their step.
FARTHEST_SEEN = 100.0


@dataclass(frozen=True)
class Mark:
    """A place on a training: the first crossing of a train loss, or the end of an epoch.

    >>> print(Mark("loss", 0.1)), print(Mark("epoch", 50))
    train loss 0.1
    epoch 50
    (None, None)
    """

    kind: Literal["loss", "epoch"]
    level: float

    @property
    def name(self) -> str:
        """The same for files and columns: `loss-0.1`."""
        return f"{self.kind}-{self.level:g}"

    def __str__(self) -> str:
        return f"{'train loss' if self.kind == 'loss' else 'epoch'} {self.level:g}"


@dataclass(frozen=True)
class Scores:
    """A network on all training and test samples."""

    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float


@dataclass(frozen=True, eq=False)
class Kept:
    """The weights at a mark, with how far training was."""

    mark: Mark
    step: int
    epoch: float
    scores: Scores
    weights: Mapping[str, Tensor]


class Watch:
    """Looks at one training and says when to evaluate it; knows which marks are passed."""

    def __init__(self, section: MeasureSection, samples: int, batch_size: int) -> None:
        self.levels = sorted(section.at_loss, reverse=True)
        self.epochs = sorted(section.at_epochs)
        self.samples, self.batch_size = samples, batch_size
        self.steps_per_epoch = -(-samples // batch_size)
        self.mean = math.nan
        self.ratio = 1.0
        self.steps = self.not_before = self.in_vain = self.crossed = 0
        self.looks: list[tuple[int, float]] = []
        self.pause = 0.0

    def state_dict(self) -> dict[str, Any]:
        """All that it knows, in plain numbers."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know what another one knew."""
        vars(self).update(state)

    def suspects(self, batch_loss: float) -> bool:
        """After a step with this loss: whether the next level may be crossed, so that an evaluation is worth its cost."""
        self.steps += 1
        if not math.isfinite(self.mean):
            self.mean = batch_loss
        self.mean += min(1.0, self.batch_size / self._window) * (batch_loss - self.mean)
        return self._may_pass and self.may_be_crossed

    def wants_a_look(self) -> bool:
        """Whether a few samples are worth looking at: to know in time that the next level is near, or crossed."""
        near = bool(self.levels) and self.mean * self.ratio <= NEAR * self.levels[0]
        shortest = max(PAUSE * self.steps_per_epoch, SHORTEST_PAUSE * self.steps)
        last = self.looks[-1][0] if self.looks else 0
        return self._may_pass and self.steps >= last + (shortest if near else max(shortest, self.pause))

    @property
    def _may_pass(self) -> bool:
        """Whether a pass over the training set is allowed."""
        allowed = SPARE_PASSES + self.crossed + SPARE_PASSES_AN_EPOCH * self.steps / self.steps_per_epoch
        return bool(self.levels) and self.steps >= self.not_before and self.in_vain < allowed

    @property
    def may_be_crossed(self) -> bool:
        """Whether the network seems to have come to the next level."""
        return bool(self.levels) and self.mean * self.ratio <= self.levels[0]

    @property
    def _window(self) -> float:
        first = min(FIRST_WINDOW, FIRST_PART * self.samples)
        return min(max(first, WINDOW * self.steps * self.batch_size), self.samples)

    def missed(self) -> None:
        """A pass over the training set that was asked for found no level crossed."""
        self.in_vain += 1
        self.not_before = self.steps + max(1, round(PAUSE * self.steps_per_epoch))

    def looked(self, loss: float) -> bool:
        """A few samples say that the training set has about this loss; whether the next level is likely crossed."""
        self.learn(loss, FARTHEST_SEEN)
        self.pause = min(LONGEST_PAUSE * self.steps, self._left(loss) / 2)
        self.looks = [*self.looks[-1:], (self.steps, loss)]
        return bool(self.levels) and loss <= self.levels[0]

    def _left(self, loss: float) -> float:
        """Steps to the next level, if the loss falls on as fast as it fell since one of the last looks."""
        if not self.levels or not self.levels[0] < loss < math.inf:
            return math.inf
        speed = max(
            (math.log(before / loss) / (self.steps - step) for step, before in self.looks if before > 0), default=0.0
        )
        return math.log(loss / self.levels[0]) / speed if speed > 0 else math.inf

    def learn(self, loss: float, farthest: float = FARTHEST) -> None:
        """Remember how the loss of the training set differs from the running mean."""
        if self.mean > 0 and math.isfinite(loss):
            self.ratio = min(farthest, max(1 / farthest, loss / self.mean))

    def passed(self, loss: float, epoch: int | None = None) -> list[Mark]:
        """The marks that a network with this loss on the whole training set has come to, each reported once."""
        self.learn(loss)
        crossed = [level for level in self.levels if loss <= level]
        self.levels = self.levels[len(crossed) :]
        self.crossed += len(crossed)
        ended = [mark for mark in self.epochs if mark == epoch]
        return [*(Mark("loss", level) for level in crossed), *(Mark("epoch", mark) for mark in ended)]


def kept_to_dict(kept: Kept) -> dict[str, Any]:
    """What is kept as a dictionary of plain numbers and tensors."""
    mark, scores = asdict(kept.mark), asdict(kept.scores)
    return {"mark": mark, "step": kept.step, "epoch": kept.epoch, "scores": scores, "weights": dict(kept.weights)}


def kept_from_dict(plain: Mapping[str, Any]) -> Kept:
    """What `kept_to_dict` wrote."""
    mark, scores = Mark(**plain["mark"]), Scores(**plain["scores"])
    return Kept(mark, plain["step"], plain["epoch"], scores, plain["weights"])


def kept_at(marks: Iterable[Mark], place: Place, watch: Watch, scores: Scores) -> list[Kept]:
    """The weights of a place for every one of the marks, which share them."""
    epoch = place.step / watch.steps_per_epoch
    return [Kept(mark, place.step, epoch, scores, place.weights) for mark in marks]


def write_kept(kept: Iterable[Kept], folder: Path, metadata: Mapping[str, str]) -> list[dict[str, Any]]:
    """The weights at each mark as files; what `training.json` says of them. Marks that were passed together share one."""
    entries: list[dict[str, Any]] = []
    names: dict[int, str] = {}
    for each in kept:
        if each.step not in names:
            names[each.step] = f"{each.mark.name}.safetensors"
            save_state_dict(each.weights, folder / names[each.step], metadata)
        place = {"kind": each.mark.kind, "level": each.mark.level, "step": each.step, "epoch": each.epoch}
        written = {"file": names[each.step], "weights": sha256_of(folder / names[each.step])}
        entries.append({**place, **asdict(each.scores), **written})
    return entries


def read_mark(plain: Mapping[str, Any]) -> Mark:
    """The mark that an entry of `training.json` or `result.json` speaks of."""
    return Mark("epoch" if plain["kind"] == "epoch" else "loss", float(plain["level"]))
