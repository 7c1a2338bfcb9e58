"""What rounding may have changed: the samples that matter most, once more in another precision.

A network's curvature is a long chain of rounded operations, and how much of an error comes out at its end is seen best by
computing it twice. The heaviest samples are computed in single and in double precision; the difference is what rounding
does in single precision, and in double precision it is smaller by the ratio of the two. Where single precision has hardly
a digit left, or leaves its range, its difference says nothing of double precision: there parameters are moved in their last
places as well, and what that changes is no less than what rounding does. Samples with an activation so near to its kink that
rounding decides between its sides are compared for themselves: there the difference is as large as the sample's share.
Where single precision loses digits, its rounding is drawn several times: one draw may come out small by chance. So it is where
parameters moved in their last places change much of what the loss makes of the outputs, and where weights or inputs in double precision are measured in single.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from spiritlevel.curvature.lanczos import Eigenpair
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.problem import Problem
from spiritlevel.problem.sharded import division_of
from spiritlevel.problem.survey import column_sizes
from spiritlevel.problem.tensors import is_about_precision

# The heaviest samples are compared in so many groups, whose differences cannot cancel; and the difference is taken four times,
# because it is one draw of something random.
GROUPS, MARGIN = 2, 4
# Larger models are compared in one group: every group keeps arrays as large as the model.
MANY = 2_000_000
# Of a large network no more of them are compared than hold this share of the mass, and so many at least: those that are left change
# the difference by less than its margin.
ENOUGH, FEWEST = 0.75, 16
# Where single precision differs by this share of a number, it does not say what double precision does. What single precision itself does
# is then more than a unit of the last place, and one draw of something random: a certain network's rounding may be a thousandth of a
# number and come out as a hundredth of that. So the mean of so many draws is taken, with parameters moved in their last places, and this
# many times: the mean of a few draws may be small too. (Of 240 numbers of certain networks two were outside their errors with three
# draws taken 1.5 times, and one with five taken 1.2 times, whose errors are a tenth smaller where they are largest.)
FEW_DIGITS = {torch.float64: 1e-3, torch.float32: 2e-5}
DRAWS, SPREAD = 5, 1.2
# Whether outputs have their digits is looked at in so many of the heaviest samples, so many times: of more samples one draw tells enough.
HEAVIEST, LOOKS = 8, 3
# What is assumed where a network cannot run in another precision, in units of rounding.
UNKNOWN = 256

# Of every problem that was asked about: whether its outputs lack digits.
_LACKING: weakref.WeakKeyDictionary[Problem, bool] = weakref.WeakKeyDictionary()

Arrays = dict[str, dict[str, Tensor]]


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

    def arrays(batch: Batch) -> Arrays:
        return {"": {str(index): torch.tensor(each, dtype=torch.float64) for index, each in enumerate(compute(batch))}}

    with problem.undisturbed():
        shifts = _all_shifts(problem, arrays, order, GROUPS, torch.float64)
        if shifts is None:
            return [UNKNOWN * torch.finfo(problem.dtype).eps * abs(each) for each in _over_heavy(problem, compute)]
    columns = zip(*(shift[""].values() for shift in shifts), strict=True)
    return [sum(abs(float(each)) for each in column) for column in columns]


def array_shifts(problem: Problem, compute: Callable[[Batch], Arrays], order: float = 1.0) -> list[Arrays] | None:
    """What rounding may add to arrays that are means over samples, as several shifts whose effects may add up.

    `compute` gives the arrays for one batch, in the problem's present precision. `order` is as in `share_of_rounding`.
    None where there is no comparing.
    """
    size = sum(value.numel() for value in problem.parameters.values())
    with problem.undisturbed():
        return _all_shifts(problem, compute, order, GROUPS if size <= MANY else 1, torch.float32)


def _all_shifts(
    problem: Problem, compute: Callable[[Batch], Arrays], order: float, groups: int, kept_in: torch.dtype
) -> list[Arrays] | None:
    """The shifts of the heaviest samples in groups and of those near a kink, scaled to all of their kind."""
    shifts: list[Arrays] = []
    if problem not in _LACKING:
        _LACKING[problem] = _outputs_lack_digits(problem)
    for samples, count in ((problem.survey.heavy, groups), (problem.survey.near, 1)):
        compared = samples if problem.small else samples.holding(ENOUGH, FEWEST)
        for batch in compared.groups(count, problem.chunk_size):
            weight = MARGIN * compared.scale * problem.weight_of(batch)
            found = _shifts(problem, batch, compute, weight, order, kept_in, _LACKING[problem])
            if found is None:
                return None
            shifts += found
    return shifts


def _shifts(
    problem: Problem,
    batch: Batch,
    compute: Callable[[Batch], Arrays],
    weight: float,
    order: float,
    kept_in: torch.dtype,
    unsure: bool,
) -> list[Arrays] | None:
    """What rounding may add to the arrays of one batch, of which several draws are taken where one would be unsure; None where the
    network runs in its own precision only."""
    mine, other = compute(batch), torch.float64 if problem.dtype == torch.float32 else torch.float32
    try:
        with problem.in_precision(other) as fitted:
            found = compute(fitted(batch))
    except RuntimeError as error:
        if not is_about_precision(error):
            raise
        return None
    share = weight * share_of_rounding(problem, order)
    # Arrays may be in parts over the processes, which must all take as many shifts.
    few_digits = unsure or _few_digits_in_common(mine, found, FEW_DIGITS[problem.dtype])
    if not division_of(problem).any(few_digits) and not _was_rounded(problem):
        return [_difference(mine, found, share, kept_in)]
    if problem.dtype == torch.float64:
        return [
            _difference(mine, found, share, kept_in),
            _difference(mine, _nudged(problem, batch, compute, 1), weight, kept_in),
        ]
    draws = [mine, *(_nudged(problem, batch, compute, draw) for draw in range(1, DRAWS))]
    return [_difference(draw, found, share * SPREAD / DRAWS, kept_in) for draw in draws]


def _outputs_lack_digits(problem: Problem) -> bool:
    """Whether moving parameters in their last places changes much of what the loss makes of the heaviest samples' outputs.

    Few samples may hold nearly all of the curvature, and one draw of their rounding may say anything; several draws of their outputs,
    which cost next to nothing, do not all come out small by chance.
    """
    batch = problem.survey.heavy.batch
    if problem.dtype != torch.float32 or problem.whole or batch is None:
        return False
    batch = batch[:HEAVIEST] if batch.divisible else batch
    made = _made_of_outputs(problem, batch)
    if made is None:
        return False
    changes = []
    for draw in range(1, LOOKS + 1):  # all of them: processes that share a model run it equally often
        with problem.in_precision(problem.dtype, nudged=draw):
            moved = _made_of_outputs(problem, batch)
        changes.append(math.inf if moved is None else float((moved - made).norm()))
    return not max(changes) <= FEW_DIGITS[problem.dtype] * float(made.norm())


def _made_of_outputs(problem: Problem, batch: Batch) -> Tensor | None:
    """What the loss makes of a batch's outputs: how large the columns of ∇²ℓ are where that is known, else its slopes."""
    with torch.no_grad():
        outputs = problem.outputs(problem.parameters, batch)
    if not isinstance(outputs, Tensor) or not outputs.dim() or len(outputs) != len(batch):
        return None
    sizes = column_sizes(problem, outputs, batch)
    return problem.slopes(outputs, batch)[1] if sizes is None else sizes


def _nudged(problem: Problem, batch: Batch, compute: Callable[[Batch], Arrays], draw: int) -> Arrays:
    with problem.in_precision(problem.dtype, nudged=draw):
        return compute(batch)


def _was_rounded(problem: Problem) -> bool:
    """Whether weights or inputs came in a higher precision: taking them has moved them in their last places, which no comparison from
    there on shows."""
    given = [*problem.callers_parameters().values(), *tree_leaves(problem.data.first.inputs)]
    numbers = [each for each in given if isinstance(each, Tensor) and each.is_floating_point()]
    return any(torch.finfo(each.dtype).eps < torch.finfo(problem.dtype).eps for each in numbers)


def _few_digits_in_common(mine: Arrays, other: Arrays, few: float) -> bool:
    pairs = ((array, other[kind][name]) for kind, name, array in _entries(mine, other))
    return any(not float((a - b).norm()) <= few * float(a.norm()) for a, b in pairs)


def _difference(mine: Arrays, other: Arrays, weight: float, kept_in: torch.dtype) -> Arrays:
    """So many times what would have to be added to the one to have the other; nothing where the other is not finite."""
    found: Arrays = {kind: {} for kind in mine}
    for kind, name, array in _entries(mine, other):
        shift = (weight * (other[kind][name] - array)).nan_to_num_(0, 0, 0)
        found[kind][name] = shift.to(kept_in) if _holds(kept_in, shift) else shift
    return found


def _holds(precision: torch.dtype, array: Tensor) -> bool:
    """Whether the array is well within the range of a precision: squares of gradients may be 1e-41."""
    largest = float(array.abs().max()) if array.numel() else 0.0
    return largest == 0 or 1e8 * torch.finfo(precision).tiny < largest < 1e-8 * torch.finfo(precision).max


def _entries(mine: Arrays, other: Arrays) -> Iterator[tuple[str, str, Tensor]]:
    for kind, arrays in mine.items():
        yield from ((kind, name, array) for name, array in arrays.items() if name in other[kind])


def widened(pair: Eigenpair, error: float, tolerance: float) -> Eigenpair:
    """An eigenpair whose error also holds what rounding did to its products, and numbers too small to be told from zero."""
    error += pair.error
    converged = pair.converged and error <= tolerance * abs(pair.value)
    return replace(pair, error=error + torch.finfo(pair.vector.dtype).tiny, converged=converged)


def _over_heavy(problem: Problem, compute: Callable[[Batch], list[float]]) -> list[float]:
    samples = problem.survey.heavy
    assert samples.batch is not None
    weight = samples.scale * problem.weight_of(samples.batch)
    return [weight * each for each in compute(samples.batch)]
