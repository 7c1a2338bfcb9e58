"""The largest loss in a region around the parameters, found by ascent from several starts.

The regions are a ball in a diagonal metric and boxes, where the best point for a linear function is known in closed
form. Each step goes there (conditional gradient) and falls back on shorter steps when the loss does not grow, so the
value never decreases; what is returned is the best point seen, for anyone to evaluate again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spiritlevel.curvature.vectors import length, unit
from spiritlevel.curvature.ways import Flat
from spiritlevel.problem.contract import Parameters
from spiritlevel.problem.problem import Problem

# So many random directions, each with its opposite, are looked at; ascents start from the best few of them.
RANDOM_DIRECTIONS, RANDOM_STARTS = 16, 4


class Region(Protocol):
    """A convex set of coordinates u around 0 and the perturbation of θ that they stand for."""

    def perturbation(self, coordinates: Tensor) -> Tensor: ...

    def slope(self, gradient: Tensor) -> Tensor:
        """The gradient in u of a function with this gradient in θ."""
        ...

    def furthest(self, slope: Tensor) -> Tensor:
        """The u of the region that maximizes slope·u."""
        ...

    def starts(self) -> list[Tensor]:
        """Slopes towards where the second-order model peaks."""
        ...

    def random_slope(self, generator: torch.Generator) -> Tensor: ...


@dataclass(frozen=True)
class Ball:
    """{D u : ‖u‖ ≤ radius}, with D a diagonal given as a vector (ones for the Euclidean ball).

    `axes` are unit vectors in u at which the second-order model peaks.
    """

    scale: Tensor
    radius: float
    axes: tuple[Tensor, ...] = ()

    def perturbation(self, coordinates: Tensor) -> Tensor:
        return self.scale * coordinates

    def slope(self, gradient: Tensor) -> Tensor:
        return self.scale * gradient

    def furthest(self, slope: Tensor) -> Tensor:
        return unit(slope) * self.radius if length(slope) > 0 else torch.zeros_like(slope)

    def starts(self) -> list[Tensor]:
        return list(self.axes)

    def random_slope(self, generator: torch.Generator) -> Tensor:
        return torch.randn(self.scale.shape, generator=generator).to(self.scale) * (self.scale > 0)


@dataclass(frozen=True)
class Box:
    """{|u_i| ≤ bound_i}, in θ itself or in the span of the rows of `directions`."""

    bound: Tensor
    directions: Tensor | None = None
    axes: tuple[Tensor, ...] = ()

    def perturbation(self, coordinates: Tensor) -> Tensor:
        return coordinates if self.directions is None else coordinates @ self.directions

    def slope(self, gradient: Tensor) -> Tensor:
        return gradient if self.directions is None else self.directions @ gradient

    def furthest(self, slope: Tensor) -> Tensor:
        return self.bound * slope.sign()

    def starts(self) -> list[Tensor]:
        return [self.slope(axis) for axis in self.axes]

    def random_slope(self, generator: torch.Generator) -> Tensor:
        return torch.randn(self.bound.shape, generator=generator).to(self.bound)


class Slopes(Protocol):
    """What is climbed: a loss with its gradient, at any point."""

    @property
    def parameters(self) -> Parameters: ...

    def loss(self, parameters: Mapping[str, Tensor] | None = None) -> float: ...

    def gradient(self, parameters: Mapping[str, Tensor] | None = None) -> tuple[float, Parameters]: ...


@dataclass(frozen=True)
class Maximum:
    """The best point found: L(θ + perturbation) = `loss`. `settled` when it was no longer gaining."""

    loss: float
    perturbation: Tensor
    settled: bool


def maximize(
    problem: Slopes, region: Region, *, tolerance: float, generator: torch.Generator, most_steps: int = 60
) -> Maximum:
    """Ascend from the gradient's own best point and the region's starts; the weaker half drops out again and again."""
    flat = Flat(problem.parameters)
    base = flat.join(list(problem.parameters.values()))

    def evaluate(coordinates: Tensor) -> tuple[float, Tensor]:
        loss, gradient = problem.gradient(flat.to_dict(base + region.perturbation(coordinates)))
        return loss, region.slope(flat.join(list(gradient.values())))

    origin = torch.zeros_like(region.slope(base))
    loss, slope = evaluate(origin)

    def ends(slopes: Sequence[Tensor]) -> list[Tensor]:
        return [region.furthest(sign * each) for each in slopes for sign in (1, -1)]

    drawn = ends([region.random_slope(generator) for _ in range(RANDOM_DIRECTIONS)])
    drawn.sort(key=lambda place: problem.loss(flat.to_dict(base + region.perturbation(place))), reverse=True)
    starts = [region.furthest(slope), *ends(region.starts()), *drawn[:RANDOM_STARTS]]
    climbers = [_Climber(evaluate, region, start, loss, tolerance) for start in starts]
    steps = 4
    while True:
        for climber in climbers:
            if math.isfinite(climber.value):
                climber.climb(steps if len(climbers) > 2 else most_steps)
            if not math.isfinite(climber.value):  # NaN would pass for less than the loss itself
                return Maximum(climber.value, region.perturbation(climber.place), False)
        climbers.sort(key=lambda climber: climber.value, reverse=True)
        if len(climbers) <= 2:
            break
        climbers = climbers[: (len(climbers) + 1) // 2]
        steps *= 2
    best = climbers[0]
    if best.value <= loss:
        return Maximum(loss, region.perturbation(origin), True)
    return Maximum(best.value, region.perturbation(best.place), best.settled)


class _Climber:
    """Conditional gradient with halving steps from one start, resumable. The value never decreases."""

    def __init__(
        self,
        evaluate: Callable[[Tensor], tuple[float, Tensor]],
        region: Region,
        start: Tensor,
        floor: float,
        tolerance: float,
    ) -> None:
        self._evaluate, self._region, self._floor, self._tolerance = evaluate, region, floor, tolerance
        self.place = start
        self.value, self._slope = evaluate(start)
        self._fraction, self._small_gains = 1.0, 0
        self.settled = False

    def climb(self, steps: int) -> None:
        for _ in range(steps):
            if self.settled:
                return
            self._step()

    def _step(self) -> None:
        target = self._region.furthest(self._slope)
        if torch.equal(target, self.place):
            self.settled = True
            return
        trial = _between(self._region, self.place, target, self._fraction)
        value, slope = self._evaluate(trial)
        if value <= self.value:
            self._fraction /= 4
            self.settled = self._fraction < 1e-4
            return
        small = value - self.value <= 0.1 * self._tolerance * (value - self._floor)
        self._small_gains = self._small_gains + 1 if small else 0
        self.value, self._slope, self.place = value, slope, trial
        self._fraction = min(1.0, 2 * self._fraction)
        self.settled = self._small_gains >= 3


def _between(region: Region, place: Tensor, target: Tensor, fraction: float) -> Tensor:
    """A point on the way; on a ball it is pushed out to the sphere, where a convex maximum lies."""
    point = place + fraction * (target - place)
    return region.furthest(point) if isinstance(region, Ball) else point


def as_parameters(problem: Problem, vector: Tensor) -> dict[str, Tensor]:
    """A flat vector as a dictionary with the parameters' names and shapes."""
    return {name: part.clone() for name, part in Flat(problem.parameters).to_dict(vector).items()}
