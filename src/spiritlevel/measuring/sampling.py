"""Measuring on a random subset, and how far that may lie from measuring on everything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from spiritlevel.curvature.estimate import few_groups_factor
from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.value import Cost, Value
from spiritlevel.problem.batches import Data
from spiritlevel.problem.checks import check_whole_number

# The subset is measured again in this many parts; their spread is the sampling error.
PARTS = 10


def random_subset(data: Data, samples: int, divide: bool, seed: int) -> tuple[Data, list[Data], float]:
    """A random subset, its random parts, and its share of the data. No parts where it is everything.

    Without `divide` whole batches are chosen, about as many as hold so many samples.
    """
    samples = check_whole_number("samples", samples, at_least=2)
    if samples >= data.samples:
        return data, [], 1.0
    pieces = data.pieces(divide=divide)
    count = samples if divide else round(samples * pieces / data.samples)
    if count < 2:
        raise SpiritLevelError(
            f"samples={samples} is fewer than two of the {pieces} batches, which this loss needs whole: the sampling error "
            "cannot be told from one; pass smaller batches or more samples"
        )
    order = torch.randperm(pieces, generator=torch.Generator().manual_seed(seed))[:count]
    parts = [data.select(order[index :: min(PARTS, count)], divide=divide) for index in range(min(PARTS, count))]
    return data.select(order, divide=divide), parts, count / pieces


def with_sampling_error(whole: Report, parts: Sequence[Report], planned: int, share: float, of: int) -> Report:
    """The report on the subset with the sampling error in every bar."""
    samples = whole.problem["samples"]
    if len(parts) < planned:
        note = (
            f"interrupted: measured on {samples:,} of {of:,} samples, and the error of that choice is not in the bars"
        )
        return replace(whole, notes=(note, *whole.notes), interrupted=True)
    values = {name: _widened(value, [part[name] for part in parts], share) for name, value in whole.values.items()}
    note = f"measured on {samples:,} of {of:,} samples, chosen at random; the bars hold the error of that choice"
    cost = _together([whole.cost, *(part.cost for part in parts)])
    return replace(whole, values=values, cost=cost, notes=(note, *whole.notes))


def _widened(value: Value, parts: Sequence[Value], share: float) -> Value:
    """The value with the error of the choice of samples beside its own: `converged` stays what the computation reached."""
    if not math.isfinite(value.value):  # not defined here, or infinite on any data
        return value
    sampling = _standard_error([part.value for part in parts], share)
    layer_errors = {
        name: math.hypot(
            value.layer_errors.get(name, 0.0), _standard_error([part.layers[name] for part in parts], share)
        )
        for name in value.layers
    }
    error = math.hypot(value.error, sampling)
    return replace(
        value,
        error=error,
        exact=False,
        layer_errors=layer_errors,
        details={**value.details, "sampling_error": sampling, "computing_error": value.error},
        error_kind="lower bound" if value.lower_bound else "sampling",
    )


def _standard_error(values: Sequence[float], share: float) -> float:
    """Of the mean over parts; drawn without replacement, a subset of everything has none."""
    spread = torch.tensor(values, dtype=torch.float64).std(correction=1)
    return few_groups_factor(len(values)) * float(spread) * math.sqrt((1 - share) / len(values))


def _together(costs: Sequence[Cost]) -> Cost:
    """Passes and products in units of the whole subset: a part is a fraction of it."""
    first, rest = costs[0], costs[1:]
    fraction = 1 / max(1, len(rest))
    return Cost(
        passes=first.passes + fraction * sum(cost.passes for cost in rest),
        products=first.products + fraction * sum(cost.products for cost in rest),
        gradients=first.gradients + fraction * sum(cost.gradients for cost in rest),
        seconds=sum(cost.seconds for cost in costs),
        peak_memory=max(cost.peak_memory for cost in costs),
    )
