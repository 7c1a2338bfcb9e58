"""How much of a ratio between small and large batches is their train loss: Table 4 of Rangamani et al. 2019.

At one and the same epoch a small batch has taken more steps and has a smaller train loss, and a curvature under cross entropy
fades with the train loss. The networks of the small batch, measured along their training, say what a measure is at any train loss;
read at the train loss of the large batch, they give the ratio that the train loss alone would make. What is left is the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from telling import NAMES, Told

from spiritlevel.show.numbers import significant
from spiritlevel.study.along import Mark
from spiritlevel.study.levels import Path, paths
from spiritlevel.study.results import Cell, Study
from spiritlevel.study.show.along import batch_axis


@dataclass(frozen=True)
class Parted:
    """A ratio of a measure, large batch over small, at a mark (None: the end), in two factors; geometric means of networks.

    Attributes:
        losses: The train losses of the small and of the large batch there.
        ratio: How many times larger the measure is at the large batch.
        by_loss: How many times larger it would be by the train loss alone; nan where small batches never had that loss.
    """

    mark: Mark | None
    losses: tuple[float, float]
    ratio: float
    by_loss: float

    @property
    def left(self) -> float:
        """What the train loss does not account for."""
        return self.ratio / self.by_loss


def parted(study: Study, measure: str) -> list[Parted]:
    """The ratio at every epoch at which both batches were measured, and at the end."""
    axis = batch_axis(study)
    if axis is None:
        return []
    last = len(axis.levels) - 1
    small_paths = [path for path in paths(study, measure) if axis.level(path.cell) == 0]
    found = []
    for mark in (*(mark for mark in study.marks if mark.kind == "epoch"), None):
        there = study if mark is None else study.at(mark)
        groups = [
            [cell for cell in there.measured if axis.level(cell) == level and measure in cell.measures]
            for level in (0, last)
        ]
        if all(groups):
            found.append(_part(mark, groups[0], groups[1], small_paths, measure))
    return found


def _part(
    mark: Mark | None, small: Sequence[Cell], large: Sequence[Cell], small_paths: Sequence[Path], measure: str
) -> Parted:
    losses = _mean_loss(small), _mean_loss(large)
    values = [_mean([cell.measures[measure].value for cell in cells]) for cells in (small, large)]
    return Parted(mark, losses, values[1] / values[0], _value_at(small_paths, losses[1]) / values[0])


def _mean_loss(cells: Sequence[Cell]) -> float:
    return _mean([cell.trained("train_loss") for cell in cells])


def _mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return float(np.exp(np.mean(np.log(values))))


def _value_at(found: Sequence[Path], loss: float) -> float:
    """What networks have at a train loss, between their marks in logarithms; nan where none has come across it."""
    values = []
    for path in found:
        order = np.argsort(path.losses)
        losses, logs = np.log(np.array(path.losses)[order]), np.log(np.array(path.values)[order])
        if losses[0] <= math.log(loss) <= losses[-1]:
            values.append(math.exp(float(np.interp(math.log(loss), losses, logs))))
    return _mean(values) if values else math.nan


def parted_table(told: Told, measure: str = "riemannian_spectral_norm") -> list[str]:
    """The ratios at equal epochs and at the end, with what the train loss makes of them."""
    found = parted(told.study, measure)
    if not found:
        return []
    small, large = _batches(told.study)
    head = (
        "| at equal epochs | "
        f"train loss, batch {small} | batch {large} | {NAMES[measure]}, times larger | by the train loss alone | left |"
    )
    rows = [
        f"| {'the end' if each.mark is None else each.mark} | {' | '.join(significant(loss, 2) for loss in each.losses)} | "
        f"{significant(each.ratio, 2)} | {_known(each.by_loss)} | {_known(each.left)} |"
        for each in found
    ]
    return [head, "|---|---|---|---|---|---|", *rows]


def parted_sentence(told: Told, measure: str = "riemannian_spectral_norm") -> str:
    """Whether the whole factor is the train loss, with numbers."""
    found = [each for each in parted(told.study, measure) if each.mark is not None and not math.isnan(each.by_loss)]
    if not found:
        return ""
    widest = max(found, key=lambda each: abs(math.log(each.ratio)))
    left = [each.left for each in found]
    return (
        f"At {widest.mark} the large batch has {significant(widest.ratio, 2)} times the norm and "
        f"{significant(widest.losses[1] / widest.losses[0], 2)} times the train loss; small batches at that train loss have "
        f"{significant(widest.by_loss, 2)} times. Over {len(found)} epochs compared, {significant(min(left), 2)} to "
        f"{significant(max(left), 2)} times are left for the batch itself."
    )


def _batches(study: Study) -> tuple[int, int]:
    found = sorted({int(cell.factors["training.batch_size"]) for cell in study.cells})
    return found[0], found[-1]


def _known(value: float) -> str:
    return "–" if math.isnan(value) else significant(value, 2)
