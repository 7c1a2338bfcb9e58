"""What a study says at equal train loss: coefficients at every level and over all of them, ratios, paths of networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spiritlevel.study.along import Mark
from spiritlevel.study.correlate import Contrast, contrasts
from spiritlevel.study.results import Axis, Cell, Study, is_of_network
from spiritlevel.study.statistics import (
    NO_ESTIMATE,
    RESAMPLES,
    Array,
    Estimate,
    Resamples,
    Statistic,
    estimate,
    granulated,
)


def over_levels(study: Study, *, draws: int = RESAMPLES, seed: int = 0) -> dict[str, Estimate]:
    """Measure → the mean over loss levels of Kendall's τ_a with the gap among the networks at that level.

    Every pair of networks is compared at one and the same train loss. Whole networks are drawn for the interval, with all
    their levels: a network that is seen at six levels is not six networks.
    """
    points = _points(study)
    names = dict.fromkeys(name for _, _, cell in points for name in cell.measures if is_of_network(name))
    return {name: _over_levels(points, name, study, draws, seed) for name in names}


def _points(study: Study) -> list[tuple[Mark, int, Cell]]:
    """Every network at every loss level that it came to, with its position among the cells."""
    levels = [mark for mark in study.marks if mark.kind == "loss"]
    return [
        (mark, owner, cell)
        for mark in levels
        for owner, cell in enumerate(study.at(mark).cells)
        if cell.status == "measured"
    ]


def _over_levels(points: Sequence[tuple[Mark, int, Cell]], name: str, study: Study, draws: int, seed: int) -> Estimate:
    own = [(mark, owner, cell.measures[name].value, cell.gap(study.gap)) for mark, owner, cell in points if name in cell.measures]  # fmt: skip
    own = [point for point in own if np.isfinite(point[2]) and np.isfinite(point[3])]
    owners, positions = np.unique([owner for _, owner, _, _ in own], return_inverse=True)
    if len(owners) < 3:
        return NO_ESTIMATE
    x, y = (np.array([point[column] for point in own], dtype=float) for column in (2, 3))
    statistic = _of_owners(granulated(x, y, [mark for mark, _, _, _ in own]), positions)
    return estimate(statistic, Resamples.of(len(owners), draws, seed))


def _of_owners(statistic: Statistic, positions: NDArray[np.intp]) -> Statistic:
    """A statistic of points as a statistic of the networks that they belong to."""

    def of_networks(weights: Array) -> Array:
        return statistic(weights[:, positions])

    return of_networks


def ratios_along(study: Study, axis: Axis, *, draws: int = RESAMPLES) -> dict[str, dict[Mark | None, Contrast]]:
    """How many times larger each measure is at the last level of a factor than at its first, at every mark; None is the end."""
    places: dict[Mark | None, Study] = {**{mark: study.at(mark) for mark in study.marks}, None: study}
    found: dict[str, dict[Mark | None, Contrast]] = {}
    for place, there in places.items():
        own = next((each for each in there.axes if each.name == axis.name), None)
        for contrast in () if own is None else contrasts(there, own, fewest=1, draws=draws):
            found.setdefault(contrast.measure, {})[place] = contrast
    return found


@dataclass(frozen=True)
class Path:
    """One network on its way: train losses and what a measure was there, ordered by step; `marks` name the points."""

    cell: Cell
    losses: tuple[float, ...]
    values: tuple[float, ...]
    marks: tuple[str, ...]


def paths(study: Study, measure: str, where: Callable[[Mark], bool] = lambda _mark: True) -> tuple[Path, ...]:
    """Every network in the plane of train loss and measure, from mark to mark and to its end."""
    found = []
    for cell in study.cells:
        points: dict[int, tuple[float, float, str]] = {
            passed.step: (passed.outcomes["train_loss"], passed.measures[measure].value, str(passed.mark))
            for passed in cell.along
            if measure in passed.measures and where(passed.mark)
        }
        if measure in cell.measures:
            points[int(cell.trained("steps"))] = (cell.trained("train_loss"), cell.measures[measure].value, "the end")
        ordered = [points[step] for step in sorted(points)]
        if ordered:
            losses, values, marks = zip(*ordered, strict=True)
            found.append(Path(cell, losses, values, marks))
    return tuple(found)


def losses_at(study: Study) -> Mapping[Mark, tuple[float, float]]:
    """The smallest and the largest train loss at which networks were measured for a mark: how equal they are there."""
    spans = {}
    for mark in study.marks:
        losses = [cell.trained("train_loss") for cell in study.at(mark).measured]
        if losses:
            spans[mark] = (min(losses), max(losses))
    return spans
