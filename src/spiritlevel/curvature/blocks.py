"""Products with the Gauss–Newton block of every layer at once, from δ and φ that are pulled back only once.

For a layer with columns δ_k and input φ, (1/N) Σ_nk sign·(δ_kᵀ V φ) δ_k φᵀ needs one application of V to φ and one
weight gradient: no pass through the network. δ is kept while it fits a memory budget and pulled back anew where not.
Columns that hold next to nothing are left out where the tolerance allows that; what they could add is told.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from spiritlevel.curvature.anatomy import Anatomy
from spiritlevel.curvature.columns import columns_needed, parts, trace_left
from spiritlevel.curvature.hessian import ALL, HEAVY, LIGHT_BUDGET, MOST_IN_PART, PART, WIDER, spread_part, tiers
from spiritlevel.curvature.statistics import TappedChunk
from spiritlevel.curvature.taps import SampleAxis
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.losses import output_factor
from spiritlevel.problem.problem import Problem

# What δ of all layers and chunks may take between products.
DELTA_BUDGET = 512 << 20
# Of the samples of the wider part, with which few products are made, no more is kept than this, that of the heavy ones included.
WIDE_DELTA_BUDGET = 128 << 20
# Columns that hold this part of the tolerance, relative to ΣtrS, are left out: an eigenvalue may be a tenth of a trace or less.
LEFT_OUT = 1e-2


@dataclass
class _Pulled:
    """One use of a layer in one chunk: δ of all columns, and the graph of z as a function of the weight alone.

    Nothing here holds the graph of the network, or z: they would take several times the memory of δ.
    """

    phi: Tensor
    apply: Callable[[Tensor, Tensor], Tensor]
    axis: SampleAxis
    leaf: Tensor
    edge: GradientEdge  # at z
    deltas: Tensor  # (columns, *z.shape)

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.deltas, self.phi))

    def image(self, vector: Tensor) -> Tensor:
        """Vφ."""
        with torch.no_grad():
            return self.apply(self.phi, vector)

    def weight_gradient(self, cotangent: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(self.edge, self.leaf, cotangent, retain_graph=True)
        return found


@dataclass
class _Chunk:
    layers: dict[str, list[_Pulled]]
    shares: Tensor  # (columns, samples): weight in the mean times sign
    weight: float
    bytes: int
    place: int = ALL


class GaussNewtonBlocks:
    """G_l·v of every named layer, all in one go over the data.

    Columns are left out that hold less than a hundredth of the `tolerance` of ΣtrS; all are taken where it is zero.
    """

    def __init__(
        self,
        problem: Problem,
        anatomy: Anatomy,
        names: Sequence[str],
        budget: int = DELTA_BUDGET,
        *,
        tolerance: float = 0.0,
    ) -> None:
        self.problem, self.names = problem, list(names)
        self._anatomy = replace(
            anatomy,
            layers={name: anatomy.layers[name] for name in names},
            axes={name: anatomy.axes[name] for name in names},
        )
        self._budget = budget
        self._needed = columns_needed(problem, LEFT_OUT * tolerance)
        self._tiers = tiers(problem)
        self._chunk_size = problem.part_chunk_size()
        self._kept: list[_Chunk] = []
        self._built = self._spent = 0  # chunks pulled back so far, and what those that are kept take
        self._weight = self._part_share = 0.0  # of this process's data, and of all processes' parts, in the mean
        self._prepared = False

    def __call__(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = self._sum(vectors, ((chunk, 1.0) for chunk in self._chunks()))
        self.problem.work.add(passes=1, products=1)
        return found

    def on_part(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same over part of the data only: a cheap stand-in to start a search from."""
        share = self._part_share
        self.problem.work.add(passes=share, products=share)
        return self._sum(vectors, self._weighted_part())

    def on_wider_part(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same over the samples that hold all but next to nothing of the mass, where `is_wider`."""
        assert self._tiers is not None
        share = 1 - len(self._tiers.others) / self.problem.samples
        self.problem.work.add(passes=share, products=share)
        return self._sum(vectors, ((chunk, 1.0) for chunk in self._chunks(WIDER)))

    def on_other_part(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same over samples that are not in the part; over the part where that holds nearly all of the mass."""
        if self.heavy_first:
            return self.on_part(vectors)
        other = spread_part(self._kept, self._weight, self.problem.samples, other=True)
        share = self.problem.ranks.total(sum(chunk.weight for chunk in other))
        self.problem.work.add(passes=share, products=share)
        return self._sum(vectors, ((chunk, 1 / share) for chunk in other))

    def left_out(self, generator: torch.Generator) -> dict[str, float]:
        """By how much the largest eigenvalue of every block may be larger than that of the columns which were taken."""
        if self._needed is None:
            return {}
        found = trace_left(self.problem, self._anatomy, self._needed, generator)
        return {name: found.get(name, 0.0) for name in self.names}

    def forms(self, batch: Batch, vectors: Mapping[str, Tensor]) -> list[float]:
        """v_lᵀ G_l v_l of one batch's mean for every named layer, in the problem's present precision."""
        chunk = self._pull(batch, 1.0)
        fitted = {name: vector.to(self.problem.parameters_like()) for name, vector in vectors.items()}
        images = {name: _product(chunk.layers.get(name, []), chunk.shares, vector) for name, vector in fitted.items()}
        return [float((vector.double() * images[name].double()).sum()) for name, vector in fitted.items()]

    def has_part(self) -> bool:
        """Whether part of the data to start from is kept; pulls the columns back if that has not happened yet."""
        if not self._prepared:
            pulled = sum(chunk.weight for chunk in self._chunks(PART if self.heavy_first else ALL))
            self.problem.work.add(passes=1 if self._prepared else pulled)
        self._part_share = self.problem.ranks.total(sum(chunk.weight for chunk in self._part()))
        return 0 < self._part_share <= (1.0 if self.heavy_first else MOST_IN_PART)

    @property
    def heavy_first(self) -> bool:
        """Whether the part is the samples that hold nearly all of the mass, not a random tenth of all."""
        return self._tiers is not None

    @property
    def is_wider(self) -> bool:
        """Whether there is a wider part between the heavy samples and all."""
        return self._tiers is not None and len(self._tiers.ring) > 0

    def _part(self) -> list[_Chunk]:
        """The heavy samples and those that stand in for the light ones, or about a tenth of the data."""
        if self.heavy_first:
            return [chunk for chunk in self._kept if chunk.place <= PART]
        return spread_part(self._kept, self._weight, self.problem.samples)

    def _weighted_part(self) -> Iterator[tuple[_Chunk, float]]:
        """The part with factors that make it stand for all of the data."""
        factor = 1 / self._part_share if self._tiers is None else self._tiers.factor
        for chunk in self._part():
            yield chunk, 1.0 if chunk.place == HEAVY else factor

    def _sum(self, vectors: Mapping[str, Tensor], chunks: Iterable[tuple[_Chunk, float]]) -> dict[str, Tensor]:
        sums = {name: torch.zeros_like(vector, dtype=torch.float64) for name, vector in vectors.items()}
        for chunk, factor in chunks:
            for name, vector in vectors.items():
                sums[name].add_(_product(chunk.layers.get(name, []), chunk.shares, vector), alpha=factor)
            del chunk
        self.problem.ranks.sum_(list(sums.values()))
        return {name: total.to(vectors[name].dtype) for name, total in sums.items()}

    def _chunks(self, last: int = ALL) -> Iterator[_Chunk]:
        """The chunks of one pass, or of its samples up to this place: kept ones first, others pulled back anew."""
        yield from [chunk for chunk in self._kept if chunk.place <= last]
        if self._prepared and len(self._kept) == self._built:
            return
        skipped = len(self._kept)
        for index, (batch, weight, most, place) in enumerate(self._batches(last)):
            if index < skipped:
                continue
            chunk = self._pull(batch, weight, most, place)
            if index == self._built:
                self._note(chunk)
            yield chunk
            del chunk  # before the next one is pulled back
        self._prepared |= last == ALL

    def _note(self, chunk: _Chunk) -> None:
        """Of a chunk that is pulled back for the first time: keep it if it fits."""
        most = (
            {WIDER: WIDE_DELTA_BUDGET, ALL: LIGHT_BUDGET}.get(chunk.place, self._budget)
            if self._tiers
            else self._budget
        )
        self._spent += chunk.bytes
        if self._spent <= min(most, self._budget) and len(self._kept) == self._built:
            self._kept.append(chunk)
        self._weight += chunk.weight
        self._built += 1

    def _batches(self, last: int) -> Iterator[tuple[Batch, float, int | None, int]]:
        """Batches up to the `last` place with their weights, how many columns of their samples are taken (None: all), and their
        place."""
        if self._needed is None and self._tiers is None:
            for batch, weight in self.problem.chunks(self._chunk_size):
                yield batch, weight, None, ALL
            return
        for place, rows in enumerate(self._tiers or [torch.arange(self.problem.samples)]):
            if self.heavy_first and place > last:
                return
            for batch, most in self._picked(rows):
                yield batch, self.problem.weight_of(batch), most, place if self.heavy_first else ALL

    def _picked(self, rows: Tensor) -> Iterator[tuple[Batch, int | None]]:
        """Batches of these samples, those together of which as many columns are taken."""
        if self._needed is None:
            for piece in torch.split(rows, self._chunk_size) if len(rows) else ():
                yield self.problem.picked(piece), None
            return
        needed = torch.zeros_like(self._needed)
        needed[rows] = self._needed[rows]
        for batch, _, most in parts(self.problem, needed, torch.zeros(0, dtype=torch.long), self._chunk_size):
            yield batch, most

    def _pull(self, batch: Batch, weight: float, most: int | None = None, place: int = ALL) -> _Chunk:
        assert batch.targets is not None
        tapped = TappedChunk(self.problem, self._anatomy, batch, inputs=False)
        factor = output_factor(self.problem.loss_function, tapped.outputs, batch.targets)
        columns = list(itertools.islice(factor.columns(), most))
        arrived = [tapped.pull(vector) for vector, _ in columns]
        layers: dict[str, list[_Pulled]] = {}
        for use in tapped.linear_uses():
            found = [pairs.pop(id(use))[0] for pairs in arrived if id(use) in pairs]  # one copy of each at a time
            deltas = torch.stack(found or [use.result * 0])
            del found
            leaf = self.problem.parameters[use.linear.layer.name].detach().requires_grad_()  # as stored
            with torch.enable_grad():
                edge = get_gradient_edge(use.linear.apply(use.phi, leaf))
            pulled = _Pulled(use.phi, use.linear.apply, use.axis, leaf, edge, deltas)
            layers.setdefault(use.linear.layer.name, []).append(pulled)
        size = sum(pulled.bytes for uses in layers.values() for pulled in uses)
        ones = torch.full((tapped.samples,), weight / tapped.samples, dtype=tapped.outputs.dtype)
        shares = torch.stack([ones if signs is None else ones * signs.cpu() for _, signs in columns])
        return _Chunk(layers, shares.to(tapped.outputs), weight, size, place)


def _product(uses: list[_Pulled], shares: Tensor, vector: Tensor) -> Tensor:
    """Σ_nk c_nk (Σ δ_k·Vφ) δ_k φᵀ over the samples and columns of one chunk, summed over the uses of a layer."""
    if not uses:
        return torch.zeros_like(vector)
    overlaps = sum(_by_column(use, use.deltas * use.image(vector)) for use in uses)
    weights = overlaps * shares
    total = torch.zeros_like(vector)
    for use in uses:
        total += use.weight_gradient((use.deltas * _spread(use, weights)).sum(0))
    return total


def _by_column(use: _Pulled, products: Tensor) -> Tensor:
    """Sum over everything but columns and samples: (columns, samples)."""
    axis = use.axis
    if axis.axis == 0 and axis.outermost:  # the common layout, without a transpose
        return products.reshape(products.shape[0], products.shape[1] // axis.repeat, -1).sum(2)
    return torch.stack([axis.split(product).flatten(1).sum(1) for product in products])


def _spread(use: _Pulled, weights: Tensor) -> Tensor:
    """(columns, samples) laid out so that it multiplies δ."""
    axis = use.axis
    count = weights.shape[1]
    entries = weights.repeat_interleave(axis.repeat, 1) if axis.outermost else weights.repeat(1, axis.repeat)
    shape = [weights.shape[0]] + [1] * (use.deltas.dim() - 1)
    shape[1 + axis.axis] = count * axis.repeat
    return entries.reshape(shape)
