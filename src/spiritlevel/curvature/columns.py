"""Sweeps that take of every sample only the columns of ∇²ℓ that matter; a few samples stand for all the rest.

Under cross entropy a sample of which the network is certain has hardly any curvature, and of the others most of it sits in
one or two columns. So sweeping becomes cheaper as a network fits its data: most samples are not visited at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from spiritlevel.curvature.anatomy import Anatomy
from spiritlevel.curvature.statistics import (
    COLUMNS,
    FISHER,
    MOST_COLUMNS,
    STATISTICS,
    TRACE,
    Sweep,
    TappedChunk,
    chunk_size,
    frozen,
    sweep,
    swept_kinds,
    targets_of,
)
from spiritlevel.curvature.sums import Sums, own_parts
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.factors import OrderedFactor, OutputFactor
from spiritlevel.problem.losses import output_factor
from spiritlevel.problem.problem import Problem
from spiritlevel.problem.sharded import division_of
from spiritlevel.problem.survey import threshold

# Something is left where the tolerance is at least the first, and where the columns that are swept are at most the second of
# all. Small networks are swept whole.
LEAST_LEFT, WORTH_LEAVING = 1e-6, 0.75
# Samples are swept in sets that need as many columns, of this size at least, or of one chunk: fewer are slower.
FEWEST_ALIKE = 256
# About so many samples are drawn to stand for all that is left, or an eighth of all.
STAND_IN = 512
# Nothing is left to chance where chance may change a layer's trace by so many times the tolerance.
TOO_MUCH = 4.0
# What the columns hold that are left out where rounding is looked at.
LEFT_OF_BATCH = 1e-3
# Nor of fewer samples than these: an eighth of them says too little of the others, and there is little to save.
FEWEST_TO_LEAVE = 200


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
    saved, where the network is small or samples are few, or where less than 1e-6 is asked for: then all are swept, and nothing is random.
    """
    if tolerance < LEAST_LEFT or not problem.alone or problem.small or problem.samples < FEWEST_TO_LEAVE:
        return None
    sizes = problem.survey.sizes
    if sizes is None or sizes.shape[1] > MOST_COLUMNS:
        return None
    least = threshold(sizes, tolerance * float(sizes.sum(dtype=torch.float64)))
    if least is None:
        return None
    needed = (sizes > least).sum(1)
    if float(needed.double().mean()) > WORTH_LEAVING * sizes.shape[1]:
        return None
    return None if _misled(problem, needed, tolerance) else needed


def _misled(problem: Problem, needed: Tensor, tolerance: float) -> bool:
    """Whether samples that are certain reach so far that what is left of them is not small in some layer."""
    sizes, reaches = problem.survey.sizes, problem.survey.reaches
    assert sizes is not None
    assert reaches is not None
    left = _left(sizes, needed)
    chances, all_of_it = _chances(left), sizes.sum(1, dtype=torch.float64)
    return any(
        _deviation(left * reach, chances) > TOO_MUCH * tolerance * float(all_of_it @ reach)
        for reach in reaches.unbind(1)
    )


def _swept_partly(
    problem: Problem, anatomy: Anatomy, wanted: frozenset[str], generator: torch.Generator, needed: Tensor
) -> Sweep:
    """The sweep with so many columns of every sample; of some samples, chosen by chance, all that is left in one column."""
    together, rest = Sums(), Sums()
    curvature = swept_kinds(wanted)
    sizes = problem.survey.sizes
    assert sizes is not None
    drawn = _Drawn(sizes, needed, generator)
    swept = torch.zeros_like(needed)
    for part, rows, most in parts(problem, needed, drawn.rows, chunk_size(problem, anatomy), every=FISHER in wanted):
        weight = problem.weight_of(part)
        tapped = TappedChunk(problem, anatomy, part, inputs=COLUMNS in wanted)
        factor = output_factor(problem.loss_function, tapped.outputs, targets_of(part))
        assert isinstance(factor, OrderedFactor)  # the survey has its sizes
        problem.work.add(passes=len(part) / problem.samples)
        if most is None:
            combination = drawn.weights(rows, swept[rows]).to(problem.device)
            tapped.accumulate([factor.combined(combination)], weight, curvature, rest)
            continue
        swept[rows] = most
        if most:
            tapped.accumulate(itertools.islice(factor.columns(), most), weight, curvature, together)
        if FISHER in wanted:
            tapped.add_fisher(weight, together)
    for kind in STATISTICS:
        for name, array in getattr(rest, kind).items():
            together.add(kind, name, array)
    left = {kind: {} if kind == FISHER else drawn.uncertain(together, rest, kind) for kind in STATISTICS}
    return Sweep(frozen([together]), problem.survey.loss, sizes.shape[1], False, float(swept.double().mean()), left)


def sweep_batch(
    problem: Problem, anatomy: Anatomy, wanted: frozenset[str], batch: Batch
) -> dict[str, dict[str, Tensor]]:
    """The sweep of one batch's mean, to be held against the same in another precision: statistic → parameter → array.

    Of large networks only with the columns that hold nearly all of it: rounding of the others is as much smaller as they are.
    Every process sweeps the same batch, and keeps its part of the arrays that are divided.
    """
    sums = Sums(own_parts(division_of(problem)))
    tapped = TappedChunk(problem, anatomy, batch, inputs=COLUMNS in wanted)
    curvature = swept_kinds(wanted)
    if curvature:
        factor = output_factor(problem.loss_function, tapped.outputs, targets_of(batch))
        most = None if problem.small else _columns_that_matter(factor)
        tapped.accumulate(itertools.islice(factor.columns(), most), 1.0, curvature, sums)
    if FISHER in wanted:
        tapped.add_fisher(1.0, sums)
    return {kind: getattr(sums, kind) for kind in STATISTICS}


def _columns_that_matter(factor: OutputFactor) -> int | None:
    """How many of the first columns hold all but `LEFT_OF_BATCH`, taken of every sample alike; None where that is not known."""
    sizes = factor.sizes() if isinstance(factor, OrderedFactor) else None
    if sizes is None:
        return None
    held = sizes.sum(0, dtype=torch.float64).cumsum(0)
    return 1 + int((held < (1 - LEFT_OF_BATCH) * held[-1]).sum())


def trace_left(problem: Problem, anatomy: Anatomy, needed: Tensor, generator: torch.Generator) -> dict[str, float]:
    """What the columns beyond those needed hold of every parameter's trace, at most as far as chance allows to say."""
    sizes = problem.survey.sizes
    assert sizes is not None
    drawn, rest = _Drawn(sizes, needed, generator), Sums()
    for part, rows, _ in parts(problem, torch.zeros_like(needed), drawn.rows, chunk_size(problem, anatomy)):
        tapped = TappedChunk(problem, anatomy, part, inputs=False)
        factor = output_factor(problem.loss_function, tapped.outputs, targets_of(part))
        assert isinstance(factor, OrderedFactor)
        combination = drawn.weights(rows, needed[rows]).to(problem.device)
        tapped.accumulate([factor.combined(combination)], problem.weight_of(part), frozenset([TRACE]), rest)
        problem.work.add(passes=len(part) / problem.samples)
    return {name: (1 + drawn.uncertain_share) * float(total) for name, total in rest.trace.items()}


class _Drawn:
    """Samples that stand for what is left of all: each with a chance in proportion to what is left of it.

    What is left of a sample enters as one column, its columns with random signs, over the root of the sample's chance: the
    mean of every statistic, which is quadratic in columns, is right.
    """

    def __init__(self, sizes: Tensor, needed: Tensor, generator: torch.Generator) -> None:
        left = _left(sizes, needed)
        self._chances = _chances(left)
        chosen = torch.rand(len(left), generator=generator, dtype=torch.float64) < self._chances
        self.rows = chosen.nonzero().squeeze(1)
        signs = torch.randint(0, 2, (len(self.rows), sizes.shape[1]), generator=generator) * 2 - 1
        self._weights = signs / self._chances[self.rows].sqrt().unsqueeze(1)
        self.uncertain_share = min(1.0, _deviation(left, self._chances) / float(left.sum()))
        self._share_left = float(left.sum() / sizes.sum(dtype=torch.float64))

    def weights(self, rows: Tensor, swept: Tensor) -> Tensor:
        """The weights of all columns of these samples, none of those that were swept."""
        places = torch.searchsorted(self.rows, rows)
        return self._weights[places] * _from(swept, self._weights.shape[1])

    def uncertain(self, together: Sums, rest: Sums, kind: str) -> dict[str, Tensor]:
        """What chance may have changed in arrays, taken off: of what was drawn, or of what is left of an array on the whole where
        little was drawn of an entry. Of a single neuron it may have been nothing."""
        found, drawn = {}, getattr(rest, kind)
        for name, array in getattr(together, kind).items():
            mine = drawn.get(name, torch.zeros_like(array))
            total = float(array.sum())
            share = max(float(mine.sum()) / total, self._share_left) if total > 0 else 0.0
            found[name] = torch.maximum(mine, share * array).mul_(-self.uncertain_share)
        return found


def _from(starts: Tensor, columns: int) -> Tensor:
    """True from each start on, (N, columns)."""
    return torch.arange(columns) >= starts.unsqueeze(1)


def _left(sizes: Tensor, needed: Tensor) -> Tensor:
    """What the columns beyond those needed hold of every sample."""
    return (sizes * _from(needed, sizes.shape[1])).sum(1, dtype=torch.float64)


def _chances(left: Tensor) -> Tensor:
    """With which chance every sample is drawn."""
    return (min(STAND_IN, len(left) / 8) * left / left.sum()).clamp_max(1.0)


def _deviation(terms: Tensor, chances: Tensor) -> float:
    """How much of a sum of such terms may be chance where they are drawn like that: 4 standard deviations.

    A drawn term is the square of a sum with random signs, whose second moment is at most three times the square of its mean.
    Of a single neuron fewer samples have a part, so that it takes several standard deviations of the whole.
    """
    present = chances > 0
    return 4 * float((terms[present].square() * (3 / chances[present] - 1)).sum().sqrt())


def parts(
    problem: Problem, needed: Tensor, drawn: Tensor, size: int, *, every: bool = False
) -> Iterator[tuple[Batch, Tensor, int | None]]:
    """The samples that matter, in parts that need as many columns, with their numbers and how many columns that is.

    After them come those that are drawn, with None. Samples that need no columns are left out unless `every` one is wanted.
    Over all data where they are in memory; of a stream chunk by chunk.
    """
    for take, start, count in _stretches(problem, size):
        inside = needed[start : start + count]
        for alike in _alike(inside, 0 if every else 1, size):
            for rows in torch.split(alike, size):
                yield take(rows), start + rows, int(inside[alike].max())
        for rows in torch.split(drawn[(drawn >= start) & (drawn < start + count)], size):
            if len(rows):
                yield take(rows - start), rows, None


def _stretches(problem: Problem, size: int) -> Iterator[tuple[Callable[[Tensor], Batch], int, int]]:
    """Stretches of the data from which samples can be picked: how, from where on, and how many there are."""
    if problem.data.resident is not None:
        yield problem.picked, 0, problem.samples
        return
    start = 0
    for chunk, _ in problem.chunks(size):
        yield lambda rows, chunk=chunk: chunk[rows.to(problem.device)], start, len(chunk)  # type: ignore[misc]
        start += len(chunk)


def _alike(counts: Tensor, least: int, size: int) -> list[Tensor]:
    """Samples that need about as many columns, and `least` at least, in sets that are swept in chunks of `size`.

    What would be a small chunk of its own waits for the samples that need more columns.
    """
    fewest = min(FEWEST_ALIKE, size)
    found: list[Tensor] = []
    waiting = torch.zeros(0, dtype=torch.long)
    for count in sorted(set(counts[counts >= least].tolist())):
        waiting = torch.cat([waiting, (counts == count).nonzero().squeeze(1)])
        if len(waiting) >= fewest:
            over = len(waiting) % size if len(waiting) > size else 0
            ready = len(waiting) - (over if over < fewest // 2 else 0)
            found.append(waiting[:ready])
            waiting = waiting[ready:]
    if len(waiting) and found and len(waiting) < fewest // 4:
        waiting = torch.cat([found.pop(), waiting])
    return [*found, waiting] if len(waiting) else found
