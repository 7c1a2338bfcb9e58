"""Products with the Hessian of a problem, several vectors in every pass over the data.

The graph of a chunk's gradient is built once and kept while it fits a memory budget; each vector is then pulled back
through it, which costs little more than a gradient. Chunks that do not fit are rebuilt at every pass. A preflight
compares one product with a central difference of gradients and picks a way that agrees.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from spiritlevel.curvature.preflight import Chosen, choose_method
from spiritlevel.curvature.vectors import MeanImage
from spiritlevel.curvature.ways import (
    Edges,
    Flat,
    Method,
    Objective,
    Vector,
    Ways,
    edges_of,
    inner_product,
    loss_objective,
    pull_back,
)
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.devices import memory_of
from spiritlevel.problem.problem import Problem
from spiritlevel.problem.quiet import is_undisturbed

# The graphs of gradients that are kept between products, all chunks together: so much, or an eighth of the machine's memory
# if that is less; a large model may keep as much as so many copies of itself.
GRAPH_BUDGET, GRAPH_COPIES = 1536 << 20, 4
# The part of the data that a search starts from has so many samples at least, up to a fifth of all. It is made of whole chunks,
# and of few samples there are few; a part of more than this share is not worth its products.
PART_SAMPLES, MOST_IN_PART = 200, 1 / 3
# Where samples differ in how much they curve, the part is the heaviest of them: those that hold all but so much of all mass. What
# it says is corrected on a wider part, which holds all but the first of these shares that makes it small enough.
LEFT_OF_HEAVY, LEFT_OF_WIDE = 1e-1, (5e-3, 1e-2, 2e-2)
MOST_HEAVY = 0.4  # of all samples: more are not worth their products
# Few products follow with the samples of the wider part and fewer with all others, so that of their graphs no more is kept than this.
WIDE_BUDGET, LIGHT_BUDGET = 192 << 20, 64 << 20
# Where a sample belongs: to the heavy ones, to those that stand in for the others (both are the part), to the wider part, to all.
HEAVY, PART, WIDER, ALL = range(4)
# A few of the others stand in for all of them, so that what they have in common is not overlooked: so many, or a tenth.
STANDING_IN = 128
# A difference of gradients is taken again with a step so many times as long.
SHORTER = 1 / 8


@dataclass
class _Kept:
    """The graph of one chunk's gradient: where vectors enter it and where they arrive. The gradient itself is not kept."""

    leaves: list[Tensor]
    edges: Edges
    weight: float
    place: int


class HessianProducts:
    """H·v for a problem, or the Hessian of another objective of the same network.

    Args:
        problem: The problem.
        objective: What is differentiated twice; the loss by default.
        budget: Bytes that kept graphs may take; by default 1.5 GB (or an eighth of the memory), or four copies of the model if
            that is more.
        method: How products are made; decided by a preflight where None.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        objective: Objective = loss_objective,
        budget: int | None = None,
        method: Method | None = None,
    ) -> None:
        self.problem, self.objective, self.shards = problem, objective, problem.shards
        self.flat = Flat(problem.parameters)
        problem.check_derivatives()
        self._ways = Ways(problem, objective, self.flat)
        chosen = choose_method(self._ways) if method is None else Chosen(method)
        self.method, self.notes, self.relative_error = chosen.method, list(chosen.notes), chosen.relative_error
        copies = GRAPH_COPIES * self.flat.size * problem.parameters_like().element_size()
        self._budget = _common_budget(problem, copies) if budget is None else budget
        self._wide_budget, self._light_budget = (min(most, self._budget) for most in (WIDE_BUDGET, LIGHT_BUDGET))
        self._chunk_size = problem.part_chunk_size()
        self._part_share = 0.0  # of all processes' parts in the mean
        self.release()
        self._bytes_per_sample: float | None = None
        self.loss: float | None = None
        self.gradient: Tensor | None = None

    def __call__(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """H times every vector, in one pass over the data."""
        found = self._sum(vectors, self._chunks())
        self.problem.work.add(passes=1, products=len(vectors))
        return found

    def on_part(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """H times every vector over part of the data only: a cheap stand-in to start a search from."""
        share = self._part_share
        found = self._sum(vectors, self._weighted_part())
        self.problem.work.add(passes=share, products=share * len(vectors))
        return found

    def on_wider_part(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """H times every vector over the samples that hold all but next to nothing of the mass, where `is_wider`."""
        assert self._tiers is not None
        found = self._sum(vectors, self._chunks(WIDER))
        share = 1 - len(self._tiers.others) / self.problem.samples
        self.problem.work.add(passes=share, products=share * len(vectors))
        return found

    def on_other_part(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """H times every vector over samples that are not in the part; over the part where that holds nearly all of the mass."""
        if self.heavy_first:
            return self.on_part(vectors)
        other = spread_part(self._kept, self._weight, self.problem.samples, other=True)
        share = self.problem.ranks.total(sum(kept.weight for kept in other))
        self.problem.work.add(passes=share, products=share * len(vectors))
        return self._sum(vectors, ((kept, kept.weight / share) for kept in other))

    def release(self) -> None:
        """Let go of the kept graphs; the next product builds them again."""
        self._kept: list[_Kept] = []
        self._prepared = False
        # Of the first pass: how many chunks have been built, what those that are kept take, and the sums of their losses,
        # weights and gradients.
        self._built, self._spent, self._value, self._weight = 0, 0, 0.0, 0.0
        self._slope: Tensor | None = None

    def expect_many(self) -> None:
        """Many products follow: keep all graphs that fit."""
        if self._tiers is not None and self._light_budget < self._budget:
            self._wide_budget = self._light_budget = self._budget
            self.release()

    @property
    def cheap(self) -> bool:
        """Whether many more products than needed may be taken: they cost next to nothing, and differences of gradients, of
        which some direction always shows the noise, are not what they are made of."""
        return self.problem.small and self.method != "central differences"

    @cached_property
    def _tiers(self) -> Tiers | None:
        return tiers(self.problem)

    @property
    def heavy_first(self) -> bool:
        """Whether the part is the samples that hold nearly all of the mass, not a random tenth of all."""
        return self._tiers is not None

    @property
    def is_wider(self) -> bool:
        """Whether there is a wider part between the heavy samples and all."""
        return self._tiers is not None and len(self._tiers.ring) > 0

    def has_part(self) -> bool:
        """Whether part of the data is kept; builds the graphs it needs if that has not happened yet."""
        if self.method == "kept graph" and not self._prepared:
            with self.problem.undisturbed():
                built = sum(weight for _, weight in self._chunks(PART if self.heavy_first else ALL))
            self.problem.work.add(passes=1 if self._prepared else built)
        self._part_share = self.problem.ranks.total(sum(kept.weight for kept in self._part()))
        return 0 < self._part_share <= (1.0 if self.heavy_first else MOST_IN_PART)

    def _part(self) -> list[_Kept]:
        """The heavy samples and those that stand in for the light ones, or about a tenth of this process's data."""
        if self._tiers is not None:
            return [kept for kept in self._kept if kept.place <= PART]
        return spread_part(self._kept, self._weight, self.problem.samples)

    def _weighted_part(self) -> Iterator[tuple[_Kept, float]]:
        """The part with weights that make it stand for all of the data."""
        factor = 1 / self._part_share if self._tiers is None else self._tiers.factor
        for kept in self._part():
            yield kept, kept.weight * (1.0 if kept.place == HEAVY else factor)

    def _sum(self, vectors: Sequence[Tensor], chunks: Iterable[tuple[Any, float]]) -> list[Tensor]:
        sums = [MeanImage(vector, self.problem.ranks) for vector in vectors]
        parts = [self.flat.split(vector) for vector in vectors]
        all_kept = self._prepared and len(self._kept) == self._built and not self.shards.divided
        quiet = all_kept and is_undisturbed(self.problem.module)  # and the model does not run
        with contextlib.nullcontext() if quiet else self.problem.undisturbed():
            for chunk in chunks:
                for total, part in zip(sums, parts, strict=True):
                    total.add(self.flat.join(self._chunk_product(chunk, part)), chunk[1])
        self.problem.ranks.sum_([total.value() for total in sums])
        return [total.value().to(vector.dtype) for total, vector in zip(sums, vectors, strict=True)]

    def within(self, requests: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """H_SS v for every request, a vector on a set S of parameters, all in one pass over the data.

        With a single parameter this is its diagonal block.
        """
        ranks = self.problem.ranks
        sums = [{name: MeanImage(vector, ranks) for name, vector in request.items()} for request in requests]
        with self.problem.undisturbed():
            for chunk in self._chunks():
                for total, request in zip(sums, requests, strict=True):
                    for name, image in self._restricted_product(chunk, request).items():
                        total[name].add(image, chunk[1])
        ranks.sum_([part.value() for total in sums for part in total.values()])
        self.problem.work.add(passes=1, products=len(requests))
        dtype = self.problem.dtype
        return [{name: part.value().to(dtype) for name, part in total.items()} for total in sums]

    # --- one chunk -----------------------------------------------------------------------------------------------

    def _chunk_product(self, chunk: tuple[Any, float], parts: list[Tensor]) -> list[Tensor]:
        content = chunk[0]
        if isinstance(content, _Kept):
            return pull_back(content.edges, content.leaves, parts)
        return self._directional(content, parts)

    def _restricted_product(self, chunk: tuple[Any, float], vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        content = chunk[0]
        if isinstance(content, _Kept):
            chosen = [self.flat.names.index(name) for name in vectors]
            edges, leaves = [content.edges[index] for index in chosen], [content.leaves[index] for index in chosen]
            return dict(zip(vectors, pull_back(edges, leaves, list(vectors.values())), strict=True))
        found = dict(zip(self.flat.names, self._directional(content, self._filled(vectors)), strict=True))
        return {name: found[name] for name in vectors}

    def _filled(self, vectors: Mapping[str, Tensor]) -> list[Tensor]:
        """A vector on some parameters as one on all of them."""
        like = self.problem.parameters_like()
        named = zip(self.flat.names, self.flat.shapes, strict=True)
        return [vectors[name] if name in vectors else like.new_zeros(shape) for name, shape in named]

    def _directional(self, chunk: Batch, parts: list[Tensor], stretch: float = 1.0) -> list[Tensor]:
        if self.method == "jvp of the gradient":
            return self._ways.forward_over_reverse(self.problem.parameters, chunk, parts)
        return self._ways.by_difference(self.problem.parameters, chunk, parts, stretch)

    def step_errors(self, vectors: Sequence[Mapping[str, Tensor]], values: Sequence[float]) -> list[float]:
        """How far vᵀHv over all data is from what a search found it to be (`values`), and depends on the step where products are
        differences of gradients. Zeros where nothing of it can be had at little cost.

        A step across a kink, or one that drowns in rounding, gives another number than a shorter one; and products that are not
        linear, as at a kink, do not add up to the number that a search makes of them. Gradients that are the same to their last
        digit differ by nothing at all, over every step: what rounding may hide counts too.
        """
        if self.method != "central differences":
            return self._missed(vectors, values) if self.problem.small else [0.0] * len(vectors)
        forms = [(self._form(vector, 1.0), self._form(vector, SHORTER)) for vector in vectors]
        found = zip(forms, values, map(self._filled, vectors), strict=True)
        return [
            max(abs(a - b), abs(a - value)) + self._ways.hidden_by_rounding(parts) for (a, b), value, parts in found
        ]

    def _missed(self, vectors: Sequence[Mapping[str, Tensor]], values: Sequence[float]) -> list[float]:
        """How far vᵀHv is from the number that a search found: no more than rounding where H is symmetric, and as large as the number
        where H is nothing but rounding, in a block of which the whole says little."""
        totals = [0.0] * len(vectors)
        with self.problem.undisturbed():
            for chunk, weight in self.problem.chunks(self._chunk_size):
                forms = self.forms(chunk, vectors)
                totals = [total + weight * form for total, form in zip(totals, forms, strict=True)]
        found = map(self.problem.ranks.total, totals)
        return [abs(total - value) for total, value in zip(found, values, strict=True)]

    def _form(self, vector: Mapping[str, Tensor], stretch: float) -> float:
        parts, total = self._filled(vector), 0.0
        with self.problem.undisturbed():
            for chunk, weight in self.problem.chunks(self._chunk_size):
                images = self._directional(chunk, parts, stretch)
                total += weight * sum(float((v.double() * i).sum()) for v, i in zip(parts, images, strict=True))
        self.problem.work.add(passes=1, products=1)
        return self.problem.ranks.total(self.problem.shards.total(total))

    def _chunks(self, last: int = ALL) -> Iterator[tuple[Any, float]]:
        """The chunks of one pass, or of its samples up to this place: kept graphs first, fresh ones after them."""
        if self.method != "kept graph":
            yield from self.problem.chunks(self._chunk_size)
            return
        yield from [(kept, kept.weight) for kept in self._kept if kept.place <= last]
        if self._prepared and len(self._kept) == self._built:
            return
        for index, (chunk, weight, place) in enumerate(self._batches(len(self._kept), last), start=len(self._kept)):
            first = index == self._built
            kept, value, slope = self._graph(chunk, weight, place, values=first)
            if first:
                self._note(kept, value, slope, len(chunk))
            del slope
            yield kept, weight
        if last == ALL:
            self._finish()

    def _batches(self, start: int, last: int) -> Iterator[tuple[Batch, float, int]]:
        """The data from the `start`-th chunk on up to the `last` place, heavy samples first where that is the order."""
        if self._tiers is None:
            for batch, weight in itertools.islice(self.problem.chunks(self._chunk_size), start, None):
                yield batch, weight, ALL
            return
        pieces = [(piece, place) for place, samples in enumerate(self._tiers) for piece in self._pieces(samples)]
        for rows, place in pieces[start:]:
            if place > last:
                return
            batch = self.problem.picked(rows)
            yield batch, self.problem.weight_of(batch), place

    def _pieces(self, rows: Tensor) -> list[Tensor]:
        return list(torch.split(rows, self._chunk_size)) if len(rows) else []

    def _note(self, kept: _Kept, value: float, slope: list[Tensor], samples: int) -> None:
        """Of a chunk whose graph is built for the first time: its loss, its gradient, and its graph if that fits."""
        self._spent += self._graph_bytes(samples)
        if self._spent <= self._budget_at(kept.place) and len(self._kept) == self._built:
            self._kept.append(kept)
        if self._slope is None:
            self._slope = torch.zeros(self.flat.size, dtype=torch.float64, device=self.problem.device)
        self._slope.add_(self.flat.join([part.detach() for part in slope]), alpha=kept.weight)
        self._value += kept.weight * value
        self._weight += kept.weight
        self._built += 1

    def _finish(self) -> None:
        """After the first pass: the loss and the gradient over all data."""
        if self._prepared:
            return
        self._prepared = True
        gradient = self._slope
        if gradient is None:  # a process without data
            gradient = torch.zeros(self.flat.size, dtype=torch.float64, device=self.problem.device)
        self.problem.ranks.sum_([gradient])
        self.loss, self.gradient = self.problem.ranks.total(self._value), gradient.to(self.problem.dtype)
        self._slope = None
        self.problem.work.add(gradients=1)

    def _budget_at(self, place: int) -> int:
        """What graphs may take, those of samples at this place included."""
        if self._tiers is None or place <= PART:
            return self._budget
        return self._wide_budget if place == WIDER else self._light_budget

    def _graph_bytes(self, samples: int) -> int:
        """What keeping the graph of a chunk takes: what autograd saves for every sample."""
        if self._bytes_per_sample is None:
            few = self.problem.few_samples(4)
            self._bytes_per_sample = self.problem.bytes_kept(lambda: self._graph(few, 1.0, ALL)) / len(few)
        return int(samples * self._bytes_per_sample)

    def _graph(
        self, chunk: Batch, weight: float, place: int, *, values: bool = False
    ) -> tuple[_Kept, float, list[Tensor]]:
        """The graph of a chunk's gradient, the chunk's mean of the objective, and the gradient where its `values` are wanted."""
        leaves = self.problem.leaves()
        value, gradient = self._ways.graph(leaves, chunk, values=values)
        return _Kept(list(leaves.values()), edges_of(gradient), weight, place), float(value.detach()), gradient

    @property
    def order(self) -> float:
        """The power of the precision that the error of a product goes with."""
        return 2 / 3 if self.method == "central differences" else 1.0

    def from_images(
        self, batch: Batch, vectors: Sequence[Mapping[str, Tensor]], read: Callable[[Vector, Vector], Any]
    ) -> list[Any]:
        """What `read` makes of v and H_SS v of one batch's mean, for every vector on a set S of parameters, in the problem's
        present precision. One after the other: each may be as large as the model."""
        like = self.problem.parameters_like()
        content = self._graph(batch, 1.0, ALL)[0] if self.method == "kept graph" else batch

        def image(vector: Vector) -> Vector:
            return self._restricted_product((content, 1.0), {name: part.to(like) for name, part in vector.items()})

        return [read(vector, image(vector)) for vector in vectors]

    def forms(self, batch: Batch, vectors: Sequence[Mapping[str, Tensor]]) -> list[float]:
        """vᵀHv of one batch's mean for every vector on some parameters, in the problem's present precision."""
        return [self.problem.shards.total(form) for form in self.from_images(batch, vectors, inner_product)]


def _common_budget(problem: Problem, copies: int) -> int:
    """What kept graphs may take, the same in every process that holds a part of the model."""
    own = max(min(GRAPH_BUDGET, memory_of(problem.device, 8 * GRAPH_BUDGET) // 8) // problem.shards.size, copies)
    return -int(problem.shards.largest(-own))


class Tiers(NamedTuple):
    """The numbers of the heavy samples, of a few that stand in for the others, of those that a wider part has besides, and of all
    that are left."""

    heavy: Tensor
    standing: Tensor
    ring: Tensor
    others: Tensor

    @property
    def factor(self) -> float:
        """What the mean over those that stand in is multiplied by to stand for all samples that are not heavy."""
        return 1 + (len(self.ring) + len(self.others)) / len(self.standing)


def tiers(problem: Problem) -> Tiers | None:
    """Which samples are heavy, where few hold nearly all of the mass, and all are in memory."""
    if not problem.alone or problem.data.resident is None:
        return None
    heavy = _few(problem, LEFT_OF_HEAVY)
    if heavy is None:
        return None
    light = (~heavy).nonzero().squeeze(1)
    mixed = light[torch.randperm(len(light), generator=torch.Generator().manual_seed(0))]  # data may be sorted by class
    count = min(STANDING_IN, -(-len(light) // 10))
    wide = next((found for left in LEFT_OF_WIDE if (found := _few(problem, left)) is not None), heavy)
    standing, rest = mixed[:count].sort().values, mixed[count:].sort().values
    return Tiers(heavy.nonzero().squeeze(1), standing, rest[wide[rest]], rest[~wide[rest]])


def _few(problem: Problem, left: float) -> Tensor | None:
    """True for the samples that hold all but this part of the mass; None where these are not few."""
    found = problem.survey.heaviest(left)
    return found if found is not None and 0 < float(found.double().mean()) <= MOST_HEAVY else None


class _Weighted(Protocol):
    weight: float


Chunks = TypeVar("Chunks", bound=_Weighted)


def spread_part(chunks: Sequence[Chunks], whole: float, samples: int, *, other: bool = False) -> list[Chunks]:
    """About a tenth of the weight `whole`, or all there is, in chunks spread evenly: data may be sorted by class.

    Of few `samples` it is up to a fifth: a hundred say little about the others, and cost more products than they save.
    `other` asks for as many other chunks, half-way between.
    """
    if not chunks:
        return []
    share = min(0.2, max(0.1, PART_SAMPLES / max(1, samples)))
    mean = sum(chunk.weight for chunk in chunks) / len(chunks)
    count = min(len(chunks), max(1, math.ceil(0.999 * share * whole / mean)))
    return [chunks[(2 * index + (not other)) * len(chunks) // (2 * count)] for index in range(count)]
