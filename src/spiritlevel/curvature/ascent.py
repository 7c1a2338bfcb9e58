"""The largest loss in a region around the parameters, found by ascent from several starts.

The regions are a ball in a diagonal metric and boxes, where the best point for a linear function is known in closed
form. Each step goes there (conditional gradient) and falls back on shorter steps when the loss does not grow, so the
value never decreases; what is returned is the best point seen, for anyone to evaluate again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spiritlevel.curvature.hessian import Flat
from spiritlevel.problem import Problem


class Region(Protocol):
    """A convex set of coordinates u around 0 and the perturbation of θ that they stand for."""

    def perturbation(self, coordinates: Tensor) -> Tensor: ...

    def slope(self, gradient: Tensor) -> Tensor:
        """The gradient in u of a function with this gradient in θ."""
        ...

    def furthest(self, slope: Tensor) -> Tensor:
        """The u of the region that maximizes slope·u."""
        ...

    def starts(self, generator: torch.Generator) -> list[Tensor]: ...


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
        norm = slope.norm()
        return slope * (self.radius / norm) if bool(norm > 0) else torch.zeros_like(slope)

    def starts(self, generator: torch.Generator) -> list[Tensor]:
        random = torch.randn(self.scale.shape, generator=generator).to(self.scale) * (self.scale > 0)
        return [sign * self.radius * axis for axis in self.axes for sign in (1, -1)] + [self.furthest(random)]


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

    def starts(self, generator: torch.Generator) -> list[Tensor]:
        random = torch.randn(self.bound.shape, generator=generator).to(self.bound)
        slopes = [sign * self.slope(axis) for axis in self.axes for sign in (1, -1)]
        return [self.furthest(slope) for slope in [*slopes, random]]


@dataclass(frozen=True)
class Maximum:
    """The best point found: L(θ + perturbation) = `loss`. `settled` when no start was still gaining at the end."""

    loss: float
    perturbation: Tensor
    settled: bool
    evaluations: int


def maximize(
    problem: Problem, region: Region, *, tolerance: float, generator: torch.Generator, most_steps: int = 60
) -> Maximum:
    """Ascend from the gradient's own best point and the region's starts."""
    flat = Flat(problem.parameters)
    base = flat.join(list(problem.parameters.values()))

    def evaluate(coordinates: Tensor) -> tuple[float, Tensor]:
        loss, gradient = problem.gradient(flat.to_dict(base + region.perturbation(coordinates)))
        return loss, region.slope(flat.join(list(gradient.values())))

    origin = torch.zeros_like(region.slope(base))
    loss, slope = evaluate(origin)
    best, place, settled, spent = loss, origin, True, 1
    for start in [region.furthest(slope), *region.starts(generator)]:
        value, coordinates, done, steps = _climb(evaluate, region, start, loss, tolerance, most_steps)
        spent += steps
        if value > best:
            best, place, settled = value, coordinates, done
    return Maximum(best, region.perturbation(place), settled, spent)


def _climb(
    evaluate: Callable[[Tensor], tuple[float, Tensor]],
    region: Region,
    start: Tensor,
    floor: float,
    tolerance: float,
    most_steps: int,
) -> tuple[float, Tensor, bool, int]:
    """Conditional gradient with halving steps; returns value, place, whether it settled, and evaluations spent."""
    place = start
    value, slope = evaluate(place)
    fraction, spent, small_gains = 1.0, 1, 0
    while spent < most_steps:
        target = region.furthest(slope)
        if torch.equal(target, place):
            return value, place, True, spent
        trial = _between(region, place, target, fraction)
        tried, tried_slope = evaluate(trial)
        spent += 1
        if tried > value:
            small_gains = small_gains + 1 if tried - value <= 0.1 * tolerance * (tried - floor) else 0
            value, slope, place, fraction = tried, tried_slope, trial, min(1.0, 2 * fraction)
            if small_gains >= 3:
                return value, place, True, spent
        else:
            fraction /= 4
            if fraction < 1e-4:
                return value, place, True, spent
    return value, place, False, spent


def _between(region: Region, place: Tensor, target: Tensor, fraction: float) -> Tensor:
    """A point on the way; on a ball it is pushed out to the sphere, where a convex maximum lies."""
    point = place + fraction * (target - place)
    return region.furthest(point) if isinstance(region, Ball) else point


def as_parameters(problem: Problem, vector: Tensor) -> dict[str, Tensor]:
    """A flat vector as a dictionary with the parameters' names and shapes."""
    return {name: part.clone() for name, part in Flat(problem.parameters).to_dict(vector).items()}


def loss_after(problem: Problem, vectors: Sequence[Tensor]) -> list[float]:
    """L(θ + v) for every v."""
    flat = Flat(problem.parameters)
    base = flat.join(list(problem.parameters.values()))
    return [problem.loss(flat.to_dict(base + vector)) for vector in vectors]
