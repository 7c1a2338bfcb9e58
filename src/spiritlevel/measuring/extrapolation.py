"""What a reading would be without noise: the same reading from fewer probes, extrapolated to infinitely many.

A reading that is not linear in the Hessian is biased where statistics are estimated: the largest of noisy values is too
large, so is a noisy diagonal that is clipped at 0, and the root of a noisy trace is too small. The noise of a mean over m
of the groups of probes is √(GROUPS/m) times that of all, so readings from halves and quarters of the groups show how the
bias grows: √2-fold where entries are all noise, 2-fold where the reading is smooth or the entries are spread, more where
only the quarters reach a kink. That growth is read off (Aitken's Δ²) and gives the bias of the reading from all groups.

Roots are extrapolated as squares, which grow with the noise as their entries do. Where a square comes out smaller than
its error, the root is uncertain by more than any derivative says, and the bar is what the error of the square leaves open.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from scipy import special
from torch import Tensor

from spiritlevel.curvature.estimate import few_groups_factor
from spiritlevel.curvature.statistics import GROUPS

# How a value depends on the statistics: linearly; in any way; or as the sum over layers of roots of curvature.
Shape = Literal["linear", "any", "sum of roots"]
Numbers = tuple[float, Mapping[str, float]]  # a value and its layers

ALL = tuple(range(GROUPS))
ONE_LEFT_OUT = tuple(tuple(other for other in ALL if other != group) for group in ALL)
# Halves in which any two groups meet equally often: the planes of (Z/2)³.
HALVES = tuple(
    tuple(group for group in ALL if (group & mask).bit_count() % 2 == side) for mask in ALL[1:] for side in (0, 1)
)
# Every group with the next and with the next but one.
QUARTERS = tuple((group, (group + step) % GROUPS) for step in (1, 2) for group in ALL)
SUBSETS = (ALL, *ONE_LEFT_OUT, *HALVES, *QUARTERS)

# The least and the most that the bias can grow from all groups to halves: the least where entries are all noise; faster
# growth is read as the most.
LEAST_GROWTH, MOST_GROWTH = math.sqrt(2), 4.0
# The growth for a smooth reading, whose bias is in proportion to the square of the noise.
SMOOTH_GROWTH = 2.0
# The share of the extrapolated bias that is taken off, and the share that is added to the error. Noise below that of
# all groups may add less bias than the growth above it suggests: between all of it and about two thirds.
TAKEN, REMAINING = 0.9, 0.35
# From this many standard errors on, the error of a square's root follows from the derivative of the root.
CERTAIN = 3.0


@dataclass(frozen=True)
class Estimated:
    """A value and its layers with standard errors; `bias` is what noise had added to the value and was taken off."""

    value: float
    error: float
    layers: Mapping[str, float] = field(default_factory=dict)
    layer_errors: Mapping[str, float] = field(default_factory=dict)
    bias: float = 0.0


def subsets_for(shape: Shape, smooth: bool = False) -> Sequence[Sequence[int]]:
    """The groups that readings are taken from: all of them first. The bias of a smooth reading shows in halves alone."""
    if shape == "linear":
        return (ALL, *ONE_LEFT_OUT)
    return SUBSETS[: -len(QUARTERS)] if smooth else SUBSETS


def _is_maximum(readings: Sequence[Numbers]) -> bool:
    """Whether the value is the largest of its layers."""
    return all(layers and value == max(layers.values()) for value, layers in readings)


def _overtaking(layer: Extrapolated, largest: float) -> float:
    """How far beyond the largest of all layers this one may be. A layer that is exact may be the largest in every reading, and
    say nothing of the noise of one that is larger in truth.

    Up to two errors below the largest it is what two errors reach; further down, where a bar of 0 would say that nothing can
    be wrong, it is at least the root mean square of what reaches beyond the largest.
    """
    within_two = max(0.0, min(layer.error, layer.value + 2 * layer.error - largest))
    scale = layer.error / few_groups_factor(GROUPS)
    if not scale:
        return within_two
    return max(within_two, min(layer.error, scale * _excess((largest - layer.value) / scale)))


def _excess(distance: float) -> float:
    """√E[max(0, T − d)²], where T has Student's distribution with one degree of freedom less than there are groups.

    >>> round(_excess(0.0) ** 2, 9)  # half of the variance of T, 7/5
    0.7
    """
    free = GROUPS - 1
    beyond = float(special.stdtr(free, -distance))
    height = math.exp(math.lgamma((free + 1) / 2) - math.lgamma(free / 2)) / math.sqrt(free * math.pi)
    density = height * (1 + distance**2 / free) ** (-(free + 1) / 2)
    first = (free + distance**2) / (free - 1) * density  # the integral of t from the distance on
    square = beyond * (distance**2 + free / (free - 2)) - distance * first * (free - 3) / (free - 2)
    return math.sqrt(max(0.0, square))


def estimated(shape: Shape, readings: Sequence[Numbers], noisy: Collection[str], smooth: bool = False) -> Estimated:
    """The value and layers that readings from `subsets_for(shape, smooth)` say; the layers in `noisy` are estimated."""
    series = {name: [layers[name] for _, layers in readings] for name in readings[0][1]}
    growth = SMOOTH_GROWTH if smooth else None
    if shape == "sum of roots":
        return _sum_of_roots(series, noisy, growth)
    of_one = _straight if shape == "linear" else functools.partial(extrapolated, growth=growth)
    whole = of_one([value for value, _ in readings])
    layers = {name: of_one(values) for name, values in series.items()}
    rivals = [each for name, each in layers.items() if name in noisy] if _is_maximum(readings) else []
    return Estimated(
        whole.value,
        max([whole.error, *(_overtaking(each, whole.value) for each in rivals)]),
        {name: each.value for name, each in layers.items()},
        {name: each.error for name, each in layers.items() if name in noisy},
        whole.bias,
    )


@dataclass(frozen=True)
class Extrapolated:
    """A number without the bias of noise.

    value: The number. bias: What was taken off. pulls: For each group, how far the number follows its distance from the
    mean of all groups. least: The standard error that the number had with its bias: less is luck.
    """

    value: float
    bias: float
    pulls: Tensor
    least: float = 0.0

    @property
    def error(self) -> float:
        """One standard error, with what may remain of the bias."""
        return math.hypot(max(self.least, standard_error(self.pulls)), REMAINING * self.bias)


def standard_error(pulls: Tensor) -> float:
    """Of a mean of groups, from the distance of each from the mean, widened for the number of groups."""
    count = len(pulls)
    return few_groups_factor(count) * math.sqrt(float(pulls.square().sum()) / (count * (count - 1)))


def _straight(readings: Sequence[float]) -> Extrapolated:
    """A linear reading has no bias; its pulls are those of the jackknife."""
    if min(readings) == max(readings):
        return Extrapolated(readings[0], 0.0, torch.zeros(GROUPS, dtype=torch.float64))
    return Extrapolated(readings[0], 0.0, _pulls(torch.tensor(readings[1:], dtype=torch.float64), ONE_LEFT_OUT))


def extrapolated(readings: Sequence[float], growth: float | None = None) -> Extrapolated:
    """From the readings of all SUBSETS, in their order; the growth of the bias is read off where it is not given, and the
    quarters are not needed where it is.

    >>> found = extrapolated([sum(subset) / len(subset) for subset in SUBSETS])  # linear: group g has the number g
    >>> round(found.value, 9), abs(round(found.bias, 9))
    (3.5, 0.0)
    >>> noisy = extrapolated([2 + 1 / len(subset) for subset in SUBSETS])  # a bias of 1/8 on 2
    >>> noisy.bias == TAKEN / 8
    True
    """
    if min(readings) == max(readings):  # such as a maximum that an exact layer attains
        return Extrapolated(readings[0], 0.0, torch.zeros(GROUPS, dtype=torch.float64))
    whole, left_out, halves, _ = _levels(readings)
    first = float(halves.mean() - whole)
    share = TAKEN / ((_growth(*_steps(readings)) if growth is None else growth) - 1)
    bias = share * first
    before = _pulls(left_out, ONE_LEFT_OUT)
    pulls = (1 + share) * before - share * _pulls(halves, HALVES)
    return Extrapolated(float(whole) - bias, bias, pulls, standard_error(before))


def _levels(readings: Sequence[float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parts = [1, len(ONE_LEFT_OUT), len(HALVES)]
    parts.append(len(readings) - sum(parts))  # the quarters, or none
    whole, left_out, halves, quarters = torch.split(torch.tensor(readings, dtype=torch.float64), parts)
    return whole[0], left_out, halves, quarters


def _steps(readings: Sequence[float]) -> tuple[float, float]:
    """How far readings move from all groups to halves, and from halves to quarters."""
    whole, _, halves, quarters = _levels(readings)
    return float(halves.mean() - whole), float(quarters.mean() - halves.mean())


def _growth(first: float, second: float) -> float:
    """How much further the bias moves a reading in the second step than in the first, within what is possible."""
    if first == 0 or second / first <= LEAST_GROWTH:
        return LEAST_GROWTH
    return min(second / first, MOST_GROWTH)


def _pulls(values: Tensor, subsets: Sequence[Sequence[int]]) -> Tensor:
    """The numbers of single groups, less their mean, whose means over the subsets are nearest the values."""
    members = torch.zeros(len(subsets), GROUPS, dtype=torch.float64)
    for row, subset in zip(members, subsets, strict=True):
        row[list(subset)] = 1 / len(subset)
    found: Tensor = torch.linalg.lstsq(members, values.unsqueeze(1)).solution.squeeze(1)
    return found - found.mean()


# --- roots -----------------------------------------------------------------------------------------------------------


def _sum_of_roots(
    series: Mapping[str, Sequence[float]], noisy: Collection[str], growth: float | None = None
) -> Estimated:
    """Σ_l √q_l from readings of the roots, with one growth of the bias for the squares of all layers.

    The root of a square that came out negative is read as a negative number.
    """
    squares = {name: [value * abs(value) for value in values] for name, values in series.items()}
    if growth is None:
        steps = [_steps(values) for name, values in squares.items() if name in noisy]
        growth = _growth(sum(first for first, _ in steps), sum(second for _, second in steps))
    found = {name: extrapolated(squares[name], growth) for name in squares if name in noisy}
    layers = {name: _root(found[name]) if name in found else values[0] for name, values in series.items()}
    open_to = {name: _left_open(each) for name, each in found.items()}
    certain = [name for name, each in found.items() if each.value > CERTAIN * each.error]
    pulls, remaining = torch.zeros(GROUPS, dtype=torch.float64), 0.0
    for name in certain:
        slope = 1 / (2 * math.sqrt(found[name].value))
        pulls += slope * found[name].pulls
        remaining += slope * REMAINING * found[name].bias
    loose = _together([open_to[name] for name in found if name not in certain])
    value = sum(layers.values())
    error = math.hypot(standard_error(pulls), remaining, loose)
    return Estimated(value, error, layers, open_to, sum(values[0] for values in series.values()) - value)


def _root(square: Extrapolated) -> float:
    """The root of a noisy square, unbiased where the square is certain; below two standard errors it leans towards 0."""
    if square.value <= 0:
        return 0.0
    doubt = square.error / square.value
    return math.sqrt(square.value) * (1 + doubt**2 / 8 if doubt <= 0.5 else (1 + 1 / 32) / (2 * doubt))


def _together(errors: Sequence[float]) -> float:
    """Errors of roots near 0, whose noise is independent but which are all rather too large than too small."""
    independent = math.hypot(*errors)
    return independent + (sum(errors) - independent) / 4


def _left_open(square: Extrapolated) -> float:
    """Half of how far the root may lie off where the square is off by two standard errors."""
    root = _root(square)
    low, high = (math.sqrt(max(0.0, square.value + sign * 2 * square.error)) for sign in (-1, 1))
    return max(high - root, root - low) / 2
