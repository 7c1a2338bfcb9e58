"""Several networks measured on random parts of their data: how far more data of the same kind could move a difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.order import Sampling
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.report import Report
from spiritlevel.problem.batches import Data
from spiritlevel.problem.labelled import divides
from spiritlevel.problem.losses import Loss

# All networks are measured again on this many parts of the data; the spread over parts is the sampling error.
PARTS = 10
# Of fewer pieces than this a part says little about the whole.
LEAST_PIECES = 2

# Network → measure → its value on every part.
PartValues = Mapping[str, Mapping[str, tuple[float, ...]]]


def random_parts(data: Data, loss: Loss, seed: int) -> Iterator[Data]:
    """The data in up to ten disjoint random parts, one at a time: none where it is too little to divide."""
    divide = divides(loss, data)
    pieces = data.pieces(divide=divide)
    count = min(PARTS, pieces // LEAST_PIECES if divide else pieces)
    order = torch.randperm(pieces, generator=torch.Generator().manual_seed(seed))
    for index in range(count if count > 1 else 0):
        yield data.select(order[index::count], divide=divide)


def values_on_parts(
    parts: Iterator[Data],
    networks: Sequence[str],
    measured: Callable[[str, Data, int], Report],
) -> tuple[PartValues, str]:
    """Every network on every part, and why there is nothing where there is nothing.

    `measured` gives the report of a network on a part; the third argument is the number of the part.
    """
    found: dict[str, dict[str, tuple[float, ...]]] = {name: {} for name in networks}
    count = 0
    try:
        for count, part in enumerate(parts, start=1):
            for name in networks:
                report = measured(name, part, count)
                if report.interrupted:
                    return {}, "interrupted"
                for key, value in report.values.items():
                    found[name][key] = (*found[name].get(key, ()), value.value)
    except KeyboardInterrupt:
        return {}, "interrupted"
    except SpiritLevelError as error:
        return {}, f"part {count} of the data cannot be measured by itself: {error}"
    return (found, "") if count else ({}, "the data cannot be divided into parts")


def voting(measures: Sequence[Measure], reports: Sequence[Report]) -> list[Measure]:
    """The measures that can decide something: finite for every network and more than a lower bound."""
    columns = [list(report.values.values()) for report in reports]
    if any(len(column) != len(measures) for column in columns):
        return []  # interrupted: the reports do not have them all
    return [
        each
        for each, values in zip(measures, zip(*columns, strict=True), strict=True)
        if all(math.isfinite(value.value) and not value.lower_bound for value in values)
    ]


def sampling_error(whole: float, on_parts: Sequence[float]) -> Sampling:
    """Of a difference that is `whole` on all data and `on_parts` on its parts.

    The variance is that of the mean over parts. A measure that is not a mean over samples, such as an eigenvalue, is
    moved by the size of the sample too, to first order by c/n: the parts, K times smaller, show K−1 times what
    the whole has, which is added.

    >>> sampling_error(2.0, [1.0, 3.0, 1.0, 3.0]).error  # √(4/3 / 4)
    0.5773502691896257
    """
    count = len(on_parts)
    values = torch.tensor(list(on_parts), dtype=torch.float64)
    if not bool(values.isfinite().all()):
        return Sampling(math.inf, count - 1)
    bias = (float(values.mean()) - whole) / (count - 1)
    return Sampling(math.hypot(float(values.std(correction=1)) / math.sqrt(count), bias), count - 1)
