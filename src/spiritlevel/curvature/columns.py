"""Sweeps that take of every sample only the columns of ∇²ℓ that matter, and all others in one random combination.

Under cross entropy a sample of which the network is certain has hardly any curvature, and of the others most of it sits in
one or two columns. So sweeping becomes cheaper as a network fits its data.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from spiritlevel.curvature.anatomy import Anatomy
from spiritlevel.curvature.statistics import (
    COLUMNS,
    DIAGONAL,
    FISHER,
    MOST_COLUMNS,
    STATISTICS,
    TRACE,
    Sums,
    Sweep,
    TappedChunk,
    chunk_size,
    frozen,
    sweep,
    targets_of,
)
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.factors import OrderedFactor
from spiritlevel.problem.losses import output_factor
from spiritlevel.problem.problem import Problem

# Something is left where the tolerance is at least the first, and where the columns that are swept and the random one are at most
# the second of all. Small networks are swept whole.
LEAST_LEFT, WORTH_LEAVING = 1e-6, 0.75
# Samples are swept in sets that need as many columns, of this size at least: fewer are slower.
FEWEST_ALIKE = 256


def sweep_within(
    problem: Problem, anatomy: Anatomy, wanted: frozenset[str], generator: torch.Generator, tolerance: float
) -> Sweep:
    """The sweep of all columns, or of those that matter where the tolerance allows that and it saves much."""
    needed = columns_needed(problem, tolerance) if wanted - {FISHER} else None
    if needed is None:
        return sweep(problem, anatomy, wanted, generator)
    return _swept_partly(problem, anatomy, wanted, generator, needed)


def columns_needed(problem: Problem, tolerance: float) -> Tensor | None:
    """How many columns of every sample are swept one by one so that all others hold less than `tolerance` of ΣtrS.

    At a minimum that fits its data nearly all curvature sits in a few columns of a few samples. None where little is
    saved, where the network is small, or where less than 1e-6 is asked for: then all are swept, and nothing is random.
    """
    if tolerance < LEAST_LEFT or problem.ranks.size > 1 or problem.small:
        return None
    sizes = problem.survey.sizes
    if sizes is None or sizes.shape[1] > MOST_COLUMNS:
        return None
    threshold = _threshold(sizes, tolerance * float(sizes.sum(dtype=torch.float64)))
    if threshold is None:
        return None
    needed = (sizes > threshold).sum(1)
    return needed if float((needed + 1.0).mean()) <= WORTH_LEAVING * sizes.shape[1] else None


def _threshold(sizes: Tensor, left: float) -> float | None:
    """What columns must exceed so that all others sum to at most `left`; None where none or all would.

    Found by halving, without a sorted copy of as many numbers as there are columns. It lies between two sizes, so that
    rounding moves no column across it.
    """
    largest = float(sizes.max())
    below, above = 0.0, 200.0  # halvings of the largest size: too much is left, not too much
    for _ in range(40):
        middle = (below + above) / 2
        enough = float(sizes[sizes <= largest * 2.0**-middle].sum(dtype=torch.float64)) <= left
        below, above = (below, middle) if enough else (middle, above)
    leaving = sizes <= largest * 2.0**-above
    if not bool(leaving.any()) or bool(leaving.all()):
        return None
    return float((sizes[leaving].max().double() * sizes[~leaving].min().double()).sqrt())


def _swept_partly(
    problem: Problem, anatomy: Anatomy, wanted: frozenset[str], generator: torch.Generator, needed: Tensor
) -> Sweep:
    """The sweep with so many columns of every sample, and all that is left of it in one random combination."""
    together, rest = Sums(), Sums()
    curvature = wanted - {FISHER} - ({TRACE} if DIAGONAL in wanted else set())
    assert problem.survey.sizes is not None
    columns, loss = problem.survey.sizes.shape[1], 0.0
    signs = torch.randint(0, 2, problem.survey.sizes.shape, generator=generator, dtype=torch.int8) * 2 - 1
    for part, rows in _parts(problem, needed, chunk_size(problem, anatomy)):
        weight, most = problem.weight_of(part), int(needed[rows].max())
        tapped = TappedChunk(problem, anatomy, part, inputs=COLUMNS in wanted)
        loss += weight * tapped.loss
        factor = output_factor(problem.loss_function, tapped.outputs, targets_of(part))
        assert isinstance(factor, OrderedFactor)  # the survey has its sizes
        if most:
            tapped.accumulate(itertools.islice(factor.columns(), most), weight, curvature, together)
        if most < columns:
            tapped.accumulate([factor.rest(most, signs[rows].to(problem.device))], weight, curvature, rest)
        if FISHER in wanted:
            tapped.add_fisher(weight, together)
    problem.work.add(passes=1)
    left = {kind: dict(getattr(rest, kind)) for kind in STATISTICS}
    uncertain = _uncertain_share(problem.survey.sizes, needed)
    for kind, arrays in left.items():
        for name, array in arrays.items():
            together.add(kind, name, array)
            array.mul_(-uncertain)
    return Sweep(frozen([together]), loss, columns, False, float(needed.double().mean()), left)


def _uncertain_share(sizes: Tensor, needed: Tensor) -> float:
    """How much of what is left may be chance: 4 standard deviations of a sum whose terms have the sizes of these columns.

    A sample's term is the square of a sum with random signs, whose variance is at most twice the square of its mean. Of a
    single neuron fewer samples have a part, so that it takes several standard deviations of the whole.
    """
    places = torch.arange(sizes.shape[1])
    rest = (sizes * (places >= needed.unsqueeze(1))).sum(1, dtype=torch.float64)
    return min(1.0, 4 * float((2 * rest.square().sum()).sqrt() / rest.sum()))


def _parts(problem: Problem, needed: Tensor, size: int) -> Iterator[tuple[Batch, Tensor]]:
    """All data in parts of samples that need about as many columns, with their numbers.

    Over all data where they are in memory; of a stream chunk by chunk.
    """
    if problem.data.resident is not None:
        for alike in _alike(needed):
            for rows in torch.split(alike, size):
                yield problem.picked(rows), rows
        return
    start = 0
    for chunk, _ in problem.chunks(size):
        for rows in _alike(needed[start : start + len(chunk)]):
            yield chunk[rows.to(problem.device)], start + rows
        start += len(chunk)


def _alike(counts: Tensor) -> list[Tensor]:
    """Samples that need about as many columns, in sets of some size; the order within a set is that of the data."""
    found: list[Tensor] = []
    waiting = torch.zeros(0, dtype=torch.long)
    for count in sorted(set(counts.tolist())):
        waiting = torch.cat([waiting, (counts == count).nonzero().squeeze(1)])
        if len(waiting) >= FEWEST_ALIKE:
            found.append(waiting)
            waiting = waiting[:0]
    if len(waiting) and found and len(waiting) < FEWEST_ALIKE // 4:
        waiting = torch.cat([found.pop(), waiting])
    return [*found, waiting] if len(waiting) else found
