"""Correlations and effects with confidence intervals by resampling, on plain arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]
# Weights of networks (draws × networks) → the statistic of every draw, nan where a draw has none.
Statistic = Callable[[Array], Array]
FEWEST = 6  # networks; with fewer an interval would be invention
COMPETES = 0.9  # the share of networks, or of pairs of them, on which a measure must be defined to be ranked
RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A statistic with its bootstrap interval; nan where there is none."""

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def known(self) -> bool:
        return not math.isnan(self.value)

    @property
    def bounded(self) -> bool:
        return not (math.isnan(self.low) or math.isnan(self.high))


class Resamples:
    """How often each network counts in every draw: the same draws for every statistic that is asked."""

    @classmethod
    @cache
    def of(cls, networks: int, draws: int, seed: int) -> Resamples:
        """Drawn once for every number of networks."""
        return cls(networks, draws, seed)

    def __init__(self, networks: int, draws: int = RESAMPLES, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.networks = networks
        self.ones = np.ones((1, networks))
        self.bootstrap = generator.multinomial(networks, np.full(networks, 1 / networks), size=draws).astype(float)
        self.jackknife = 1.0 - np.eye(networks)


def pearson(x: Array, y: Array) -> Statistic:
    """Pearson's correlation of x with y: how near they are to a straight line."""
    deviation_x, deviation_y = _deviations(x), _deviations(y)

    def statistic(weights: Array) -> Array:
        a, b = deviation_x(weights), deviation_y(weights)
        return _quotient((weights * a * b).sum(1), (weights * a * a).sum(1), (weights * b * b).sum(1))

    return statistic


def spearman(x: Array, y: Array) -> Statistic:
    """Spearman's correlation: Pearson's of the ranks within the draw, equal values sharing the mean of their ranks."""
    rank_x, rank_y = _ranks(x), _ranks(y)

    def statistic(weights: Array) -> Array:
        total = weights.sum(1)
        middle = (total[:, None] + 1) / 2  # the mean of all ranks of a draw, whatever is tied
        a, b = rank_x(weights) - middle, rank_y(weights) - middle
        return _quotient((weights * a * b).sum(1), (weights * a * a).sum(1), (weights * b * b).sum(1))

    return statistic


def kendall(x: Array, y: Array) -> Statistic:
    """Kendall's τ_b: pairs of networks in the same order less those in the opposite one, ties taken from the pairs."""
    sign_x, sign_y = _signs(x), _signs(y)
    agreement, differ_x, differ_y = sign_x * sign_y, np.abs(sign_x), np.abs(sign_y)

    def statistic(weights: Array) -> Array:
        return _quotient(_pairs(agreement, weights), _pairs(differ_x, weights), _pairs(differ_y, weights))

    return statistic


def partial(correlation: Callable[[Array, Array], Statistic], x: Array, y: Array, given: Array) -> Statistic:
    """The correlation of x with y that `given` does not explain: (r_xy − r_xz r_yz) / √((1 − r_xz²)(1 − r_yz²))."""
    xy, xz, yz = correlation(x, y), correlation(x, given), correlation(y, given)

    def statistic(weights: Array) -> Array:
        a, b, c = xy(weights), xz(weights), yz(weights)
        return _quotient(a - b * c, 1 - b**2, 1 - c**2)

    return statistic


def granulated(x: Array, y: Array, groups: Sequence[Any]) -> Statistic:
    """Jiang et al. 2020, ψ: the mean over groups of Kendall's τ_a within a group.

    groups: For every network the values of all factors but one, so that networks of a group differ in that one alone. A
    pair counts by 1/(pairs of its group): with equal weights that is the mean of the groups' coefficients. A tie counts
    as neither order, as in their definition.
    """
    together = np.asarray(_numbered(groups))
    same = (together[:, None] == together[None, :]).astype(float)
    np.fill_diagonal(same, 0.0)
    sizes = same.sum(1) + 1
    share = same / np.maximum(sizes * (sizes - 1), 1)[:, None]
    agreement = _signs(x) * _signs(y) * share

    def statistic(weights: Array) -> Array:
        with np.errstate(invalid="ignore", divide="ignore"):
            return _pairs(agreement, weights) / _pairs(share, weights)

    return statistic


def mean_of(statistics: Sequence[Statistic]) -> Statistic:
    """Ψ, the mean of the ψ of all factors; of those that a draw knows."""

    def statistic(weights: Array) -> Array:
        found = np.stack([each(weights) for each in statistics])
        known = ~np.isnan(found)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean: Array = np.where(known, found, 0.0).sum(0) / known.sum(0)
        return mean

    return statistic


def effect(y: Array, step: Array, held: Sequence[Array] = ()) -> Statistic:
    """The least-squares coefficient of `step` in y = a + b·step + Σ c·held: what a step does with the others held equal."""
    columns = [np.ones_like(y), step, *(_centred(column) for column in held)]
    design = np.stack(columns, axis=1)
    squares = (design[:, :, None] * design[:, None, :]).reshape(len(y), -1)

    def statistic(weights: Array) -> Array:
        gram = (weights @ squares).reshape(len(weights), len(columns), len(columns))
        solvable = np.linalg.cond(gram) < 1e10
        gram[~solvable] = np.eye(len(columns))
        found = np.linalg.solve(gram, (weights @ (design * y[:, None]))[:, :, None])[:, 1, 0]
        return np.where(solvable, found, np.nan)

    return statistic


def estimate(statistic: Statistic, resamples: Resamples, confidence: float = CONFIDENCE) -> Estimate:
    """A statistic with its bootstrap interval, bias-corrected and accelerated (Efron 1987).

    No interval from fewer than six networks, where more than half of the draws have no value, or where every draw has the
    same: networks in perfect order stay so in every resample, which says nothing about others.
    """
    value = float(statistic(resamples.ones)[0])
    if math.isnan(value) or resamples.networks < FEWEST:
        return Estimate(value)
    draws, left_out = statistic(resamples.bootstrap), statistic(resamples.jackknife)
    known = draws[~np.isnan(draws)]
    if len(known) < len(draws) / 2 or np.isnan(left_out).any() or np.ptp(known) < 1e-12:
        return Estimate(value)
    return Estimate(value, *_accelerated(value, known, left_out, confidence))


def _accelerated(value: float, draws: Array, left_out: Array, confidence: float) -> tuple[float, float]:
    below = (np.sum(draws < value - 1e-12) + np.sum(draws <= value + 1e-12)) / 2
    # At least half a draw from either end, so that the bias stays finite where no draw lies on one side.
    bias = special.ndtri(np.clip(below / len(draws), 0.5 / len(draws), 1 - 0.5 / len(draws)))
    away = left_out.mean() - left_out
    spread = float((away**2).sum())
    skew = float((away**3).sum()) / (6 * spread**1.5) if spread > 0 else 0.0
    ends = []
    for share in ((1 - confidence) / 2, (1 + confidence) / 2):
        z = bias + special.ndtri(share)
        # Beyond its pole the correction would change sign; there the interval ends with the last draw.
        scaled = 1 - skew * z
        ends.append(float(np.quantile(draws, special.ndtr(bias + z / scaled) if scaled > 0 else round(share))))
    return ends[0], ends[1]


def _numbered(groups: Sequence[Any]) -> list[int]:
    known: dict[Any, int] = {}
    return [known.setdefault(group, len(known)) for group in groups]


def _centred(column: Array) -> Array:
    """Around zero and of size one, so that the normal equations stay solvable."""
    away = column - column.mean()
    centred: Array = away / (np.abs(away).max() or 1.0)
    return centred


def _deviations(x: Array) -> Statistic:
    """The distances of all networks from the mean of every draw (draws × networks), the largest drawn one being 1.

    Measures span many magnitudes: a draw without the largest networks must not drown in their rounding.
    """
    scaled = x / (np.abs(x).max() or 1.0)

    def deviations(weights: Array) -> Array:
        drawn = weights > 0
        away = scaled - (weights @ scaled / weights.sum(1))[:, None]
        size = np.where(drawn, np.abs(away), 0.0).max(1)
        moves = size > 1e-13 * np.where(drawn, np.abs(scaled), 0.0).max(1)
        found: Array = np.where(moves[:, None], away / np.where(moves, size, 1.0)[:, None], 0.0)
        return found

    return deviations


def _ranks(x: Array) -> Statistic:
    """The ranks of all networks within every draw (draws × networks), equal values sharing their mean rank."""
    order = np.argsort(x, kind="stable")
    ordered = x[order]
    left, right = np.searchsorted(ordered, x, "left"), np.searchsorted(ordered, x, "right")

    def ranks(weights: Array) -> Array:
        upto = np.zeros((len(weights), len(x) + 1))
        np.cumsum(weights[:, order], axis=1, out=upto[:, 1:])
        return (upto[:, left] + upto[:, right] + 1) / 2

    return ranks


def _signs(x: Array) -> Array:
    signs: Array = np.sign(x[:, None] - x[None, :])
    return signs


def _pairs(matrix: Array, weights: Array) -> Array:
    """Σ w_i w_j matrix_ij for every draw. The diagonal is zero: a network drawn twice makes no pair with itself."""
    total: Array = np.einsum("di,di->d", weights @ matrix, weights)
    return total


def _quotient(product: Array, square_x: Array, square_y: Array) -> Array:
    """product/√(square_x square_y) within [−1, 1]; nan where one of them does not move."""
    moves = (square_x > 1e-12) & (square_y > 1e-12)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = product / np.sqrt(np.where(moves, square_x, 1.0) * np.where(moves, square_y, 1.0))
    return np.where(moves, np.clip(found, -1.0, 1.0), np.nan)


# What was not estimated.
NO_ESTIMATE = Estimate()
