"""What rounding may have changed: the samples that matter most, once more in another precision.

A network's curvature is a long chain of rounded operations, and how much of an error comes out at its end is seen best by
computing it twice. The heaviest samples are computed in single and in double precision; the difference is what rounding
does in single precision, and in double precision it is smaller by the ratio of the two. Samples with an activation so near
to its kink that rounding decides between its sides are compared for themselves: there the difference is as large as the
sample's share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from spiritlevel.curvature.lanczos import Eigenpair
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.problem import Problem
from spiritlevel.problem.survey import Heavy
from spiritlevel.problem.tensors import is_about_precision

# The heaviest samples are compared in so many groups, whose differences cannot cancel; and the difference is taken four times,
# because it is one draw of something random.
GROUPS, MARGIN = 2, 4
# Larger models are compared in one group: every group keeps arrays as large as the model.
MANY = 2_000_000
# What is assumed where a network cannot run in another precision, in units of rounding.
UNKNOWN = 256

Found = TypeVar("Found")


def in_both(problem: Problem, batch: Batch, compute: Callable[[Batch], Found]) -> tuple[Found, Found] | None:
    """A computation on one batch in the problem's own precision and in the other; None where only its own will do."""
    mine = compute(batch)
    other = torch.float64 if problem.dtype == torch.float32 else torch.float32
    try:
        with problem.in_precision(other) as fitted:
            return mine, compute(fitted(batch))
    except RuntimeError as error:
        if not is_about_precision(error):
            raise
        return None  # the network insists on its own precision


def share_of_rounding(problem: Problem, order: float = 1.0) -> float:
    """How much of a difference between single and double precision is there in the problem's own.

    `order` is the power of the precision that the error goes with.
    """
    ratio: float = torch.finfo(problem.dtype).eps / torch.finfo(torch.float32).eps
    return float(ratio**order)


def rounding_errors(problem: Problem, compute: Callable[[Batch], list[float]], order: float = 1.0) -> list[float]:
    """How far numbers that are means over samples may be off by rounding over the whole data.

    `compute` gives them for one batch, in the problem's present precision. `order` is as in `share_of_rounding`.
    """
    heavy = _differences(problem, problem.survey.heavy, compute, GROUPS)
    near = _differences(problem, problem.survey.near, compute, 1)
    if heavy is None or near is None:
        return [UNKNOWN * torch.finfo(problem.dtype).eps * abs(each) for each in _over_heavy(problem, compute)]
    share = MARGIN * share_of_rounding(problem, order)
    return [share * (a + b) for a, b in zip(heavy, near or [0.0] * len(heavy), strict=True)]


Arrays = dict[str, dict[str, Tensor]]


def array_shifts(problem: Problem, compute: Callable[[Batch], Arrays], order: float = 1.0) -> list[Arrays] | None:
    """What rounding may add to arrays that are means over samples, as several shifts whose effects may add up.

    `compute` gives the arrays for one batch, in the problem's present precision. `order` is as in `share_of_rounding`.
    None where there is no comparing.
    """
    size = sum(value.numel() for value in problem.parameters.values())
    shifts: list[Arrays] = []
    share = MARGIN * share_of_rounding(problem, order)
    with problem.undisturbed():
        for samples, groups in ((problem.survey.heavy, GROUPS if size <= MANY else 1), (problem.survey.near, 1)):
            for batch in samples.groups(groups, problem.chunk_size):
                pair = in_both(problem, batch, compute)
                if pair is None:
                    return None
                shifts.append(_shift(*pair, share * samples.scale * problem.weight_of(batch)))
    return shifts


def _shift(mine: Arrays, other: Arrays, weight: float) -> Arrays:
    return {
        kind: {
            name: (weight * (other[kind][name] - array)).nan_to_num_(0, 0, 0).float()
            for name, array in arrays.items()
            if name in other[kind]
        }
        for kind, arrays in mine.items()
    }


def widened(pair: Eigenpair, error: float, tolerance: float) -> Eigenpair:
    """An eigenpair whose error also holds what rounding did to its products, and numbers too small to be told from zero."""
    error += pair.error
    converged = pair.converged and error <= tolerance * abs(pair.value)
    return replace(pair, error=error + torch.finfo(pair.vector.dtype).tiny, converged=converged)


def _differences(
    problem: Problem, samples: Heavy, compute: Callable[[Batch], list[float]], groups: int
) -> list[float] | None:
    """Σ over groups of |difference|, scaled from these samples to all of their kind; None where there is no comparing."""
    totals: list[float] = []
    with problem.undisturbed():
        for batch in samples.groups(groups, problem.chunk_size):
            pair = in_both(problem, batch, compute)
            if pair is None or not all(map(math.isfinite, (*pair[0], *pair[1]))):
                return None
            weight = samples.scale * problem.weight_of(batch)
            found = [weight * abs(a - b) for a, b in zip(*pair, strict=True)]
            totals = [total + each for total, each in zip(totals or [0.0] * len(found), found, strict=True)]
    return totals


def _over_heavy(problem: Problem, compute: Callable[[Batch], list[float]]) -> list[float]:
    samples = problem.survey.heavy
    assert samples.batch is not None
    weight = samples.scale * problem.weight_of(samples.batch)
    with problem.undisturbed():
        return [weight * each for each in compute(samples.batch)]
