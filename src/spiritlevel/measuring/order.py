"""Whether one value is larger than another, given their errors: the one rule, for all who ask."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from scipy import special
from torch import Tensor

from spiritlevel.curvature.estimate import few_groups_factor
from spiritlevel.curvature.statistics import GROUPS
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.value import Value

# An order counts as decided from this probability on.
LEVEL = 0.95
LARGER_IS_FLATTER = frozenset({"volume_flatness"})

# What rounding may do to a value beyond its own error, relative to its size: networks that compute the same function
# have weights that are rounded differently.
_ROUNDING = {"float32": 1e-4, "float64": 1e-7}
# Up to this many standard errors the distribution is normal; beyond, the tails of errors from few groups are longer.
_NORMAL = 2.0
# At this many standard errors the probability is zero in double precision.
_CERTAIN = 1000


@dataclass(frozen=True)
class Sampling:
    """How far a difference of two values may move with other data of the same kind.

    error: Its standard error, with what the size of the sample does to the difference.
    freedom: Degrees of freedom behind it, for Student's t.
    """

    error: float
    freedom: int


def order(
    first: Value, second: Value, *, level: float = LEVEL, rounding: float = 0.0, sampling: Sampling | None = None
) -> int:
    """1 where `first` is larger, −1 where `second` is, 0 where their errors leave it open.

    Bounds must not overlap; standard errors must leave it a probability of `level`; both are added up where both occur.
    `rounding`, relative to the larger value, counts as a bound. A lower bound may be far too small, so it can only be the
    larger of the two.

    >>> one, more = (Value("m", number, 0.05, False, True, "random probes") for number in (1.0, 1.125))
    >>> order(more, one), order(one, more), order(more, one, level=0.99)  # 1.77 standard errors: 96 %
    (1, -1, 0)
    """
    gap = first.value - second.value
    smaller = second if gap > 0 else first
    if smaller.lower_bound or not abs(gap) > margin(first, second, level=level, rounding=rounding, sampling=sampling):
        return 0
    return 1 if gap > 0 else -1


def margin(
    first: Value, second: Value, *, level: float = LEVEL, rounding: float = 0.0, sampling: Sampling | None = None
) -> float:
    """How far apart two values must lie for their order to be decided."""
    spread, freedom = _spread(first, second, sampling)
    return sum(_widths(first, second, rounding)) + (_quantile(level, freedom) * spread if spread else 0.0)


def probability_below(first: Value, second: Value, rounding: float = 0.0, sampling: Sampling | None = None) -> float:
    """The probability that the true value of `first` is below that of `second`, from their errors.

    A standard error is that of a normal distribution, with the tails that few groups of probes have; a bound, and
    `rounding` relative to the larger value, is the half width of a uniform one. With a `sampling` error the spread is that
    of Student's t.

    >>> a = Value("m", 1.0, 0.0, True, True, "exact sweep")
    >>> b = Value("m", 2.0, 1.0, False, True, "random probes of the Hessian")
    >>> probability_below(a, a), round(probability_below(a, b), 4)  # a tie; Φ(1)
    (0.5, 0.8413)
    """
    gap, widths = second.value - first.value, list(_widths(first, second, rounding))
    spread, freedom = _spread(first, second, sampling)
    if not math.isfinite(spread + sum(widths)):
        return 0.5
    if math.isinf(freedom) and abs(gap) > sum(widths) + _CERTAIN * spread:
        return 1.0 if gap > 0 else 0.0
    return _mean_over_bounds(gap, [width for width in widths if width > 0], spread, freedom)


def rounding_of(*reports: Report) -> float:
    """What rounding may do to the values of these reports, by the precision they were measured in."""
    return max(_ROUNDING.get(str(report.problem.get("dtype")), min(_ROUNDING.values())) for report in reports)


def _widths(first: Value, second: Value, rounding: float) -> Iterator[float]:
    """What is certain not to be exceeded: rounding, and every error that is a bound."""
    yield rounding * max((abs(v.value) for v in (first, second) if math.isfinite(v.value)), default=0.0)
    yield from (value.error for value in (first, second) if not _is_spread(value))


def _spread(first: Value, second: Value, sampling: Sampling | None) -> tuple[float, float]:
    """The standard error of the difference, and its degrees of freedom where a sampling error is part of it."""
    errors = [value.error for value in (first, second) if _is_spread(value)]
    if sampling is None or sampling.error == 0:
        return math.hypot(*errors), math.inf
    return math.hypot(*errors, sampling.error), sampling.freedom


def _is_spread(value: Value) -> bool:
    return value.error_kind in ("standard error", "sampling")


def _mean_over_bounds(gap: float, widths: Sequence[float], spread: float, freedom: float, points: int = 40) -> float:
    """P(gap + Σ width·U + spread·T > 0), the uniforms U on [−1, 1] by midpoints."""
    nodes = (2 * torch.arange(points, dtype=torch.float64) + 1) / points - 1
    total = torch.full((1,), gap, dtype=torch.float64)
    for width in widths:
        total = (total.unsqueeze(1) + width * nodes).reshape(-1)
    if spread == 0:
        return float(((total > 0).double() + 0.5 * (total == 0).double()).mean())
    return float(_distribution(total / spread, freedom).mean())


def _distribution(z: Tensor, freedom: float) -> Tensor:
    """P(T ≤ z): Student's t where the degrees of freedom are given, else `_quantile`'s inverse."""
    if math.isfinite(freedom):
        return torch.from_numpy(special.stdtr(freedom, z.numpy()))
    tails = torch.from_numpy(special.stdtr(GROUPS - 1, few_groups_factor(GROUPS) * z.numpy()))
    return torch.where(z.abs() <= _NORMAL, torch.special.ndtr(z), tails)


def _quantile(level: float, freedom: float) -> float:
    """How many standard errors make an order this probable.

    Standard errors are widened so that two of them cover what two of a normal would; further out the tails of
    Student's t for the groups of probes are longer.
    """
    if math.isfinite(freedom):
        return float(special.stdtrit(freedom, level))
    if level <= special.ndtr(_NORMAL):
        return float(special.ndtri(level))
    return float(special.stdtrit(GROUPS - 1, level)) / few_groups_factor(GROUPS)
