"""The 0–1 loss of a network on its data, and upper confidence bounds on means of numbers in [0, 1]."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from spiritlevel.curvature.statistics import targets_of
from spiritlevel.errors import SpiritLevelError
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.losses import IGNORED, Loss, check_scored_labels
from spiritlevel.problem.problem import Problem
from spiritlevel.problem.weighted import weighting_of

# The built-in losses of which the largest output is the prediction.
CROSS_ENTROPIES = ("cross_entropy", "normalized_cross_entropy")

ZeroOne = Callable[[Any, Tensor], Tensor]


def wrong_class(outputs: Tensor, targets: Tensor, ignored: int = IGNORED) -> Tensor:
    """1 where the largest output is not the label's, else 0; positions of a sample are averaged, without those that do not count.

    >>> wrong_class(torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 0])).tolist()
    [0.0, 1.0]
    """
    counts = (targets != ignored).double().reshape(len(targets), -1)
    wrong = (outputs.argmax(1) != targets).double().reshape(len(targets), -1)
    return (wrong * counts).sum(1) / counts.sum(1).clamp(min=1)


def choose_zero_one(problem: Problem, given: ZeroOne | None) -> ZeroOne:
    """The user's own 0–1 loss, or `wrong_class` where the loss is a cross entropy over classes; refused elsewhere."""
    loss, first = problem.loss_function, problem.first_chunk()
    if loss.whole_batch or first.targets is None:
        raise SpiritLevelError(
            f"the bound needs the outputs of every sample, and the loss {loss.name!r} calls the model itself: pass data as "
            "(inputs, labels) and loss='cross_entropy'"
        )
    if given is not None:
        _check_own(problem, given, first)
        return given
    ignored = None if first.targets.is_floating_point() else _ignored(loss)
    if ignored is None:
        raise SpiritLevelError(
            f"the bound is on the 0–1 loss, and with the loss {loss.name!r} and targets of {first.targets.dtype} nothing "
            "says when an output is wrong: pass integer class labels with loss='cross_entropy', or "
            "zero_one=lambda outputs, targets: … with a number in [0, 1] for every sample, for example "
            "((outputs - targets).abs() > 0.5).flatten(1).any(1)"
        )
    with problem.undisturbed(), torch.no_grad():
        check_scored_labels(problem.outputs(problem.parameters, first), first.targets, 0, ignored)
    return functools.partial(wrong_class, ignored=ignored)


def _ignored(loss: Loss) -> int | None:
    """The label that does not count in a loss that is known to be a cross entropy, whose largest output is the prediction; None for
    other losses, of which that is not known."""
    if loss.given is None:
        return IGNORED if loss.name in CROSS_ENTROPIES else None
    weighting = weighting_of(loss.given)
    return None if weighting is None else weighting.ignore_index


def _check_own(problem: Problem, given: ZeroOne, batch: Batch) -> None:
    with problem.undisturbed(), torch.no_grad():
        found = given(problem.outputs(problem.parameters, batch), targets_of(batch))
    if not isinstance(found, Tensor) or tuple(found.shape) != (len(batch),):
        came = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise SpiritLevelError(f"zero_one must return one number for each of the {len(batch)} samples, got {came}")
    if not bool(((found.double() >= 0) & (found.double() <= 1)).all()):
        raise SpiritLevelError("zero_one must return numbers between 0 and 1: the bound holds for such losses only")


def error_rates(
    problem: Problem, networks: Iterable[Mapping[str, Tensor]], zero_one: ZeroOne, most_samples: int | None = None
) -> list[float]:
    """The mean 0–1 loss of every network, over all samples or the first chunks of at least `most_samples`."""
    with problem.undisturbed(), torch.no_grad():
        return [_error_rate(problem, parameters, zero_one, most_samples) for parameters in networks]


def _error_rate(
    problem: Problem, parameters: Mapping[str, Tensor], zero_one: ZeroOne, most_samples: int | None
) -> float:
    total, seen = 0.0, 0
    for chunk, _ in problem.chunks():
        outputs = problem.outputs(parameters, chunk)
        total += float(zero_one(outputs, targets_of(chunk)).double().sum())
        seen += len(chunk)
        if most_samples is not None and seen >= most_samples:
            break
    problem.work.add(passes=seen / problem.samples)
    return total / seen


def kl_upper(mean: float, budget: float) -> float:
    """The largest q with kl(mean ‖ q) ≤ budget, where kl is the divergence of two coins.

    For n independent numbers in [0, 1] with average `mean` and budget ln(1/δ)/n this is Hoeffding's inequality in its
    first form: their expectation is at most q with probability 1 − δ.

    >>> round(kl_upper(0.0, 0.5), 6)  # 1 − e^{−1/2}
    0.393469
    """
    low, high = mean, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if _kl(mean, middle) > budget:
            high = middle
        else:
            low = middle
        if high - low <= 1e-15:
            break
    return high


def _kl(p: float, q: float) -> float:
    if q >= 1:
        return 0.0 if p >= 1 else math.inf
    first = p * math.log(p / q) if p > 0 else 0.0
    return first + ((1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else 0.0)
