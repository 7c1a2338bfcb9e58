"""The density of eigenvalues by stochastic Lanczos quadrature, for any symmetric operator that comes as products.

A random probe v sees the spectral measure Σ_i (u_iᵀv)² δ(λ − λ_i)/‖v‖², whose mean over probes is the density. After k
products Lanczos holds its Gauss quadrature: k nodes and weights that give the first 2k moments exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spiritlevel.curvature.estimate import few_groups_factor
from spiritlevel.curvature.krylov import BASIS_BUDGET
from spiritlevel.curvature.lanczos import Care, Lanczos
from spiritlevel.curvature.vectors import refuse_nonfinite
from spiritlevel.curvature.whole import is_worth
from spiritlevel.problem.shards import WHOLE

Products = Callable[[list[Tensor]], list[Tensor]]

# A search for the ends of a spectrum goes on from a further random vector for so many products at least.
BESIDE = 10


@dataclass(frozen=True)
class Quadrature:
    """One probe's view of a spectrum.

    Attributes:
        nodes: Ritz values, ascending.
        weights: The share of the probe on each; they add up to one.
        residuals: ‖Au − θu‖ of each: an eigenvalue lies at least that near.
    """

    nodes: Tensor
    weights: Tensor
    residuals: Tensor


@dataclass(frozen=True)
class Extreme:
    """The k-th eigenvalue from one end: λ is at least (from the lower end at most) `value`.

    `residual` says how far the nearest eigenvalue can be, rounding included; `converged`, that it is within the tolerance
    asked for.
    """

    value: float
    residual: float
    converged: bool


def quadratures(
    products: Products, like: Tensor, size: int, *, probes: int, steps: int, generator: torch.Generator
) -> list[Quadrature]:
    """The quadratures of `probes` random sign vectors after `steps` products each, as many at once as memory allows.

    products: Images of several vectors under the operator, in one pass. like: Dtype and device. size: Dimension n.
    """
    steps = max(2, min(steps, size, fitting(like, size) - 2))
    together = max(1, fitting(like, size) // (steps + 2))
    found: list[Quadrature] = []
    while len(found) < probes:
        processes = [process(_signs(like, size, generator), steps) for _ in range(min(together, probes - len(found)))]
        while active := [each for each in processes if not each.done]:
            for each, image in zip(active, products([each.request for each in active]), strict=True):
                each.advance(image)
        found += [Quadrature(*each.quadrature()) for each in processes]
    return found


def extremes(
    products: Products,
    like: Tensor,
    size: int,
    *,
    count: int,
    tolerance: float,
    most_products: int,
    generator: torch.Generator,
) -> tuple[list[Extreme], list[Extreme]]:
    """The `count` largest eigenvalues, falling, and the `count` smallest, rising.

    Every Ritz value counted from an end lies within that of the eigenvalue with the same number (Cauchy), so that what
    is found errs to one side only. One start sees an eigenvalue once, however often it occurs: so the search goes on from
    further random vectors, until one of them has found nothing more at either end. Small matrices are written down
    instead. Relative to the largest magnitude, so that eigenvalues at zero can converge.
    """
    count = min(count, size)
    if is_worth(size, searches=1) and size <= most_products:
        return ends_of(whole(products, like, size), like, count, tolerance)
    most = max(2, min(most_products, fitting(like, size) - 2))
    search = process(_normal(like, size, generator), most)
    _advance(search, products, count, tolerance)
    while search.products < min(most, size):
        before = search.ritz_values()
        room = min(most, size) - search.products
        search.also([_normal(like, size, generator)], fewest=min(room, BESIDE), most=room)
        _advance(search, products, count, tolerance, at_least=search.products + BESIDE)
        if _same_ends(before, search.ritz_values(), count, tolerance):
            break
    return ends_of(Quadrature(*search.quadrature()), like, count, tolerance)


def ends_of(seen: Quadrature, like: Tensor, count: int, tolerance: float) -> tuple[list[Extreme], list[Extreme]]:
    """The largest nodes, falling, and the smallest, rising, of products in the precision of `like`."""
    values, residuals = seen.nodes, seen.residuals
    target, rounding = (part * float(values.abs().max()) for part in (tolerance, 4 * torch.finfo(like.dtype).eps))
    pairs = [
        Extreme(value, residual, residual <= target)
        for value, residual in zip(values.tolist(), residuals.clamp(min=rounding).tolist(), strict=True)
    ]
    return pairs[::-1][:count], pairs[:count]


def whole(products: Products, like: Tensor, size: int) -> Quadrature:
    """All eigenvalues, every copy of them included, of the matrix that products with all unit vectors make."""
    images = products(list(torch.eye(size).to(like)))
    for image in images:
        refuse_nonfinite(image, WHOLE)
    matrix = torch.stack(images, dim=1).cpu().double()
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    residuals = ((matrix - matrix.mT) @ vectors / 2).norm(dim=0)
    return Quadrature(values, torch.full_like(values, 1 / size), residuals)


def _advance(search: Lanczos, products: Products, count: int, tolerance: float, at_least: int = 0) -> None:
    """Until both ends have settled, or the search has ended."""
    while not search.done:
        search.advance(products([search.request])[0])
        looked_at = search.products >= max(3 * count, at_least) and search.products % 5 == 0
        if looked_at and _settled(search, count, tolerance):
            return


def _same_ends(before: Tensor, now: Tensor, count: int, tolerance: float) -> bool:
    """Whether the ends of ascending values are where they were: a copy that is found moves all behind it."""
    if len(before) < count:
        return False
    moved = torch.cat([now[:count] - before[:count], now[-count:] - before[-count:]]).abs()
    return bool(moved.max() <= tolerance * now.abs().max())


def _normal(like: Tensor, size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(size, generator=generator, dtype=torch.float64).to(like)


def _settled(search: Lanczos, count: int, tolerance: float) -> bool:
    nodes, _, residuals = search.quadrature()
    ends = torch.cat([residuals[:count], residuals[-count:]])
    return bool(ends.max() <= tolerance * nodes.abs().max())


def process(start: Tensor, steps: int) -> Lanczos:
    """A process that takes exactly `steps` products unless it has seen the whole space before, and never restarts."""
    return Lanczos(start, tolerance=0.0, most_products=steps, most_vectors=steps + 2, care=Care(fewest=steps))


def fitting(like: Tensor, size: int) -> int:
    """How many basis vectors the memory budget allows."""
    return max(8, int(BASIS_BUDGET // max(1, size * like.element_size())))


def _signs(like: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """±1 with equal chance: vvᵀ has mean I and every entry of its diagonal is 1, so that a diagonal costs no noise."""
    return (2 * torch.randint(0, 2, (size,), generator=generator) - 1).to(like)


def smoothed(quadrature: Quadrature, points: Tensor, width: float) -> Tensor:
    """The quadrature as a density at `points`: a Gaussian of standard deviation `width` on every node."""
    offsets = (points[:, None].double() - quadrature.nodes[None]) / width
    kernel = torch.exp(-0.5 * offsets.square()) / (width * math.sqrt(2 * math.pi))
    return kernel @ quadrature.weights


def moment(quadrature: Quadrature, order: int) -> float:
    """Σ weight·node^order: vᵀA^order v/‖v‖², exact for orders below twice the number of products."""
    return float((quadrature.weights * quadrature.nodes**order).sum())


def mean_and_error(values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The mean over probes and its standard error, widened for few probes; infinite for one, of which nothing is known."""
    stacked = torch.stack(list(values))
    if len(values) < 2:
        return stacked[0], torch.full_like(stacked[0], math.inf)
    return stacked.mean(0), few_groups_factor(len(values)) * stacked.std(0) / math.sqrt(len(values))
