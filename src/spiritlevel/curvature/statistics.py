"""Layer statistics in one sweep over the data: Gauss–Newton diagonals and quadratic forms of every layer, exactly.

With ∇²ℓ at the outputs factored into columns s_k (losses.py) and δ_k the column pulled back to a layer's result, the
per-sample gradients g_k = Σ δ_k φᵀ give the Gauss–Newton block (1/N) Σ_nk sign·g gᵀ. Its diagonal, the forms
w_jᵀ H_jj w_j of all rows and columns and, with ∇ℓ as the only column, the diagonal of the empirical Fisher matrix are
accumulated chunk by chunk; nothing grows with the data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from spiritlevel.curvature import kernels
from spiritlevel.curvature.anatomy import Anatomy
from spiritlevel.curvature.metric_sums import metric_sums
from spiritlevel.curvature.metrics import METRICS
from spiritlevel.curvature.sums import BY_ENTRY, Renamed, Sums, Total, given
from spiritlevel.curvature.taps import LinearUse, SampleAxis, Tap, VectorUse
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.losses import output_factor
from spiritlevel.problem.problem import Problem
from spiritlevel.problem.running import RunningSums
from spiritlevel.problem.sharded import sum_over_data

TRACE, DIAGONAL, ROWS, COLUMNS, FISHER = "trace", "diagonal", "rows", "columns", "fisher"
STATISTICS = (TRACE, DIAGONAL, ROWS, COLUMNS, FISHER, *METRICS)

# More columns than this a sample are sampled instead of swept, in this many independent draws, unless all of them are cheap
# anyway: so many multiplications take a core ten seconds in dense layers, a minute in narrow convolutions. Counted, not timed, so
# that a result depends on the problem alone.
MOST_COLUMNS = 200
DRAWS = 16
CHEAP = 250_000_000_000
# What is estimated is kept as the means of this many groups; leaving one out gives the jackknife its spread.
GROUPS = 8

# So many columns wait for one another, to make matrix products of a good size from.
SIDE_BY_SIDE = 16

# What the δ of columns that wait may take: a chunk of the sweep is as small as that makes it. Twice as much where it would be
# fewer samples than this, because fewer are slower; more are not faster.
WAITING_BYTES, WAITING_SAMPLES = 32 << 20, 128


@dataclass(frozen=True)
class Sweep:
    """The result of one sweep, which nobody changes.

    Attributes:
        found: Statistic → parameter → its exact sum, alone, or the means of groups of independent draws where columns
            were sampled. Of several processes each has its part of those that have a number for every entry.
        loss: L(θ).
        num_columns: Columns of ∇²ℓ a sample.
        sampled: Whether columns were drawn.
        swept_columns: How many of them were swept one by one, in the mean over samples.
        left: What was not swept but drawn once, taken off: statistic → parameter → array. What is found has it in it.
    """

    found: Mapping[str, Mapping[str, tuple[Tensor, ...]]]
    loss: float
    num_columns: int
    sampled: bool
    swept_columns: float
    left: Mapping[str, Mapping[str, Tensor]] | None = None


def frozen(groups: list[Sums]) -> Mapping[str, Mapping[str, tuple[Tensor, ...]]]:
    """Statistic → parameter → draws, for reading only."""
    found: dict[str, Mapping[str, tuple[Tensor, ...]]] = {}
    for kind in STATISTICS:
        stores: list[dict[str, Tensor]] = [getattr(sums, kind) for sums in groups]
        names = dict.fromkeys(name for store in stores for name in store)
        found[kind] = MappingProxyType(
            {name: tuple(store[name] for store in stores if name in store) for name in names}
        )
    return MappingProxyType(found)


def sweep(problem: Problem, anatomy: Anatomy, wanted: frozenset[str], generator: torch.Generator) -> Sweep:
    """One pass over the data: every statistic in `wanted` of every parameter that the anatomy covers."""
    running = RunningSums(problem)
    groups, loss, num_columns, sampled = _swept(problem, anatomy, wanted, generator, running)
    running.finish()
    problem.work.add(passes=1)
    for group, sums in enumerate(groups):
        for kind in STATISTICS:
            if kind in BY_ENTRY:
                found = sum_over_data(problem, getattr(sums, kind))
                setattr(sums, kind, running.joined((group, kind), found))
            else:
                problem.ranks.sum_named(getattr(sums, kind))
    return Sweep(frozen(groups), problem.ranks.total(loss), num_columns, sampled, 0.0 if sampled else num_columns)


def _swept(
    problem: Problem,
    anatomy: Anatomy,
    wanted: frozenset[str],
    generator: torch.Generator,
    running: RunningSums,
) -> tuple[list[Sums], float, int, bool]:
    """Sums over chunks in groups of draws, one group where all columns are swept; the loss, columns and whether drawn."""
    groups: list[Sums] = []
    loss, num_columns, sampled = 0.0, 0, False
    curvature = swept_kinds(wanted)
    for chunk, weight in problem.chunks(chunk_size(problem, anatomy)):
        tapped = TappedChunk(problem, anatomy, chunk, inputs=COLUMNS in wanted)
        loss += weight * tapped.loss
        if curvature:
            factor = output_factor(problem.loss_function, tapped.outputs, targets_of(chunk))
            num_columns, sampled = factor.num_columns, samples_columns(problem, anatomy, factor.num_columns)
            groups = groups or [Sums(given(running, group)) for group in range(GROUPS if sampled else 1)]
            rounds = DRAWS // GROUPS if sampled else 1
            for sums in groups * rounds:
                columns = factor.sample(generator) if sampled else factor.columns()
                tapped.accumulate(columns, weight / rounds, curvature, sums)
        groups = groups or [Sums(given(running, 0))]
        if FISHER in wanted:
            tapped.add_fisher(weight, groups[0])  # exact, so that one group is enough
    return groups, loss, num_columns, sampled


def swept_kinds(wanted: frozenset[str]) -> frozenset[str]:
    """The statistics that columns of ∇²ℓ are pulled back for; the diagonal has the trace in it."""
    return wanted - {FISHER} - ({TRACE} if DIAGONAL in wanted else set())


def samples_columns(problem: Problem, anatomy: Anatomy, columns: int) -> bool:
    """Whether so many columns a sample cost so much that a few are drawn instead, at the price of a standard error."""
    return columns > MOST_COLUMNS and columns * problem.samples * anatomy.work > CHEAP


def chunk_size(problem: Problem, anatomy: Anatomy) -> int:
    """Samples swept at once: those of the problem's chunks, or fewer, so that waiting columns stay within bounds."""
    if not anatomy.spread:
        return problem.chunk_size
    entries = anatomy.spread * min(anatomy.outputs, SIDE_BY_SIDE) * problem.parameters_like().element_size()
    fitting = max(WAITING_BYTES // entries, min(WAITING_SAMPLES, 2 * WAITING_BYTES // entries))
    return min(problem.chunk_size, max(1, fitting))


Column = tuple[Tensor, Tensor | None]


def targets_of(batch: Batch) -> Tensor:
    assert batch.targets is not None
    return batch.targets


class TappedChunk:
    """One chunk run forward with taps, ready to have columns pulled back."""

    def __init__(self, problem: Problem, anatomy: Anatomy, chunk: Batch, *, inputs: bool) -> None:
        leaves = problem.leaves()
        self._metrics = anatomy.metrics
        self._tap = Tap(leaves, anatomy.axes, inputs=inputs)
        with problem.undisturbed(), torch.enable_grad():
            with self._tap:
                outputs = problem.outputs(leaves, chunk)
            anatomy.check_path(problem, chunk, self._tap.path)
            self._graph: Tensor = outputs
            self.outputs: Tensor = outputs.detach()
            probe = self.outputs.clone().requires_grad_()
            mean = problem.loss_function.mean(probe, chunk.targets)
            gradient: Tensor = torch.autograd.grad(mean, probe)[0]
        self.loss = float(mean.detach())
        self._loss_gradient = gradient * len(chunk)
        self.samples = len(chunk)
        self._linear: dict[str, list[LinearUse]] = defaultdict(list)
        for use in self._tap.linear:
            self._linear[use.linear.layer.name].append(use)
        self._vectors: dict[str, list[LinearUse | VectorUse]] = defaultdict(list)  # biases, scales, shifts
        for vector in self._tap.vectors:
            self._vectors[vector.name].append(vector)
        for use in self._tap.linear:
            if use.bias is not None:
                self._vectors[use.bias].append(use)
        self._lone = {name for name, uses in self._vectors.items() if len(uses) == 1}
        self._shapes = {name: leaf.shape for name, leaf in leaves.items()}

    def linear_uses(self) -> list[LinearUse]:
        return self._tap.linear

    def loss_gradient(self) -> Tensor:
        """∂ℓ_n/∂f_n for every sample."""
        return self._loss_gradient

    def add_fisher(self, weight: float, sums: Sums) -> None:
        """Add the chunk's share of the diagonal of the empirical Fisher matrix."""
        fisher = Renamed(sums, DIAGONAL, FISHER)
        self.accumulate([(self.loss_gradient(), None)], weight, frozenset([DIAGONAL]), fisher)

    def accumulate(self, columns: Iterable[Column], weight: float, wanted: frozenset[str], sums: Total) -> None:
        """Pull every column back and add its share: `weight` is the chunk's in the mean over all data."""
        plain = self._linear if wanted - frozenset(METRICS) else {}
        layers = {name: _sums_for(uses, wanted, self._lone) for name, uses in plain.items()}
        every = [*layers.items(), *metric_sums(self._linear, self._metrics, wanted)]
        known = {layer.bias for layer in layers.values() if isinstance(layer, DenseSums)}
        vectors = {name: uses for name, uses in self._vectors.items() if name not in known}
        vectors = vectors if wanted & {TRACE, DIAGONAL} else {}
        found: dict[str, Tensor] = {}
        equal = self._graph.new_full((self.samples,), weight / self.samples)
        for count, (vector, signs) in enumerate(columns, start=1):
            share = equal if signs is None else equal * signs
            arrived = self.pull(vector)
            for name, layer in every:
                layer.add([arrived.get(id(use)) for use in self._linear[name]], share)
            for name, uses in vectors.items():
                parts = [_vector_gradient(use, arrived[id(use)][0]) for use in uses if id(use) in arrived]
                if parts:
                    _add(found, name, share @ _total(parts).square().reshape(self.samples, -1))
            if count % SIDE_BY_SIDE == 0:
                for _, layer in every:
                    layer.gather()
        for name, array in found.items():
            _add_diagonal(sums, wanted, name, array.reshape(self._shapes[name]))
        for name, layer in every:
            layer.gather()
            layer.finish(name, sums)

    def pull(self, vector: Tensor) -> dict[int, tuple[Tensor, Tensor | None]]:
        """δ at every use, and Wᵀδ where it is tapped, by the identity of the use."""
        edges = self._tap.edges()
        if not edges:
            return {}
        found = iter(torch.autograd.grad(self._graph, edges, vector, retain_graph=True, allow_unused=True))
        uses: list[LinearUse | VectorUse] = [*self._tap.linear, *self._tap.vectors]
        deltas = {id(use): next(found) for use in uses}
        inputs = {id(use): next(found) for use in self._tap.linear if use.phi_edge is not None}
        return {key: (delta, inputs.get(key)) for key, delta in deltas.items() if delta is not None}


def _vector_gradient(use: LinearUse | VectorUse, delta: Tensor) -> Tensor:
    """The gradient of a bias, scale or shift from one of its uses, for every sample."""
    if isinstance(use, LinearUse):
        return kernels.bias_gradient(use, delta)
    return use.reduce(delta if use.factor is None else delta * use.factor)


def _add_diagonal(sums: Total, wanted: frozenset[str], name: str, array: Tensor) -> None:
    """A diagonal that is at hand, or the trace where only that was asked for."""
    if DIAGONAL in wanted:
        sums.add(DIAGONAL, name, array)
    if TRACE in wanted:
        sums.add(TRACE, name, array.sum(dtype=torch.float64))


Arrived = list[tuple[Tensor, Tensor | None] | None]


class DenseSums:
    """The sums of a dense layer with one position a sample, over the columns of one chunk.

    There g = δφᵀ, so every sum needs only Σ_k δ_k² and Σ_k (Wᵀδ_k)²; φ and Wφ enter once, at the end. The diagonal of
    the layer's bias is Σ_k δ_k² itself; `bias` names it where no other use has a part in it.
    """

    def __init__(self, use: LinearUse, wanted: frozenset[str], bias: str | None) -> None:
        self._use, self._wanted, self.bias = use, wanted, bias
        self._squares: Tensor | None = None  # Σ_k c δ_k², (samples, rows)
        self._backs: Tensor | None = None  # Σ_k c (Wᵀδ_k)², (samples, columns)

    def add(self, arrived: Arrived, share: Tensor) -> None:
        if arrived[0] is None:
            return
        delta, back = arrived[0]
        self._squares = _plus_squares(self._squares, delta, share)
        if back is not None:
            self._backs = _plus_squares(self._backs, back, share)

    def gather(self) -> None:
        """Nothing waits."""

    def finish(self, name: str, sums: Total) -> None:
        if self._squares is None:
            return
        phi = self._use.phi.square() if self._wanted & {DIAGONAL, COLUMNS} else None
        if DIAGONAL in self._wanted and phi is not None:
            diagonal = self._squares.mT @ phi
            sums.add(DIAGONAL, name, diagonal.mT if self._use.linear.layer.transposed else diagonal)
        if TRACE in self._wanted:
            lengths = phi.sum(1) if phi is not None else torch.linalg.vector_norm(self._use.phi, dim=1).square()
            sums.add(TRACE, name, self._squares.sum(1) @ lengths)
        if self.bias is not None:
            _add_diagonal(sums, self._wanted, self.bias, self._squares.sum(0))
        if ROWS in self._wanted:
            sums.add(ROWS, name, (self._squares * self._use.product().square()).sum(0))
        if self._backs is not None and phi is not None:
            sums.add(COLUMNS, name, self._backs.mul_(phi).sum(0))


class LookupSums:
    """The sums of an embedding over the columns of one chunk."""

    def __init__(self, uses: list[LinearUse], wanted: frozenset[str]) -> None:
        self._uses, self._wanted = uses, wanted
        weight = uses[0].linear.weight.detach()
        self._squares = torch.zeros_like(weight, dtype=torch.float64)
        self._rows = torch.zeros_like(weight[0], dtype=torch.float64)
        self._columns = torch.zeros_like(weight[:, 0], dtype=torch.float64)

    def gather(self) -> None:
        """Nothing waits."""

    def add(self, arrived: Arrived, share: Tensor) -> None:
        pairs = [(use, pair[0]) for use, pair in zip(self._uses, arrived, strict=True) if pair is not None]
        if not pairs:
            return
        if self._wanted & {TRACE, DIAGONAL}:
            kernels.lookup_squares(pairs, share, self._squares)
        if COLUMNS in self._wanted:
            kernels.lookup_columns(pairs, share, self._columns)
        if ROWS in self._wanted:
            sums = [kernels.row_sums(use, kernels.moving(use, delta), use.product()) for use, delta in pairs]
            self._rows += share @ _total(sums).square()

    def finish(self, name: str, sums: Total) -> None:
        _add_diagonal(sums, self._wanted, name, self._squares)
        for kind, array in ((ROWS, self._rows), (COLUMNS, self._columns)):
            if kind in self._wanted:
                sums.add(kind, name, array)


class LayerSums:
    """The sums of any other layer over the columns of one chunk: several positions, or several uses.

    Row sums, and column sums where Wᵀδ is tapped, are taken at once. What needs g waits until several columns are
    there: side by side they make matrix products of a good size, and φ is laid out once for all of them.
    """

    def __init__(self, uses: list[LinearUse], wanted: frozenset[str]) -> None:
        self._uses, self._wanted = uses, wanted
        self._products = [use.product() for use in uses] if ROWS in wanted else []
        self._factors: list[kernels.Gradients] = []
        self._waiting: list[tuple[Arrived, Tensor]] = []
        self._found: dict[str, Tensor] = {}
        self._from_gradient = wanted & {TRACE, DIAGONAL}

    def add(self, arrived: Arrived, share: Tensor) -> None:
        pairs = [(i, *pair) for i, pair in enumerate(arrived) if pair is not None]
        if not pairs:
            return
        if ROWS in self._wanted:
            sums = [kernels.row_sums(self._uses[i], delta, self._products[i]) for i, delta, _ in pairs]
            _add(self._found, ROWS, share @ _total(sums).square())
        if COLUMNS in self._wanted:
            if all(back is not None for _, _, back in pairs):
                columns = _total([kernels.column_sums(self._uses[i], back) for i, _, back in pairs if back is not None])
                _add(self._found, COLUMNS, share @ columns.square())
            else:
                self._from_gradient |= {COLUMNS}
        if self._from_gradient:
            self._waiting.append((arrived, share))

    def gather(self) -> None:
        """Take the sums that need g over the columns that wait."""
        if not self._waiting:
            return
        self._factors = self._factors or [kernels.Gradients(use) for use in self._uses]
        shares, deltas = kernels.side_by_side(self._uses, self._waiting)
        self._waiting = []
        if len(self._uses) == 1 and self._without_gradient(self._factors[0], deltas[0], shares):
            return
        for part in self._factors[0].blocks(sum(each.bytes_a_sample(len(deltas[0])) for each in self._factors)):
            self._gather_part(deltas, shares[part], part)

    def _without_gradient(self, factors: kernels.Gradients, deltas: list[Tensor], shares: Tensor) -> bool:
        """Take the sums from pairs of positions, where that is cheaper than g of every sample and column."""
        if self._from_gradient == {DIAGONAL} and factors.few_positions(len(deltas)):
            _add(self._found, DIAGONAL, factors.diagonal_by_pairs(deltas, shares))
        elif self._from_gradient == {TRACE} and factors.short_positions(len(deltas)):
            _add(self._found, TRACE, factors.trace_by_pairs(deltas, shares))
        else:
            return False
        return True

    def _gather_part(self, deltas: list[list[Tensor]], shares: Tensor, part: slice) -> None:
        found = _total([each.product(own, part) for each, own in zip(self._factors, deltas, strict=True)])
        first = self._factors[0]
        if COLUMNS in self._from_gradient:
            _add(self._found, COLUMNS, torch.einsum("nki,nk->i", first.column_sums(found).square_(), shares))
        if TRACE in self._from_gradient:
            _add(self._found, TRACE, first.trace(found, shares))
        if DIAGONAL in self._from_gradient:
            _add(self._found, DIAGONAL, first.stored(first.sum_of_squares(found, shares)))

    def finish(self, name: str, sums: Total) -> None:
        for kind in list(self._found):  # let go of one by one: each may be as large as the layer
            sums.add(kind, name, self._found.pop(kind))


def _sums_for(uses: list[LinearUse], wanted: frozenset[str], lone: set[str]) -> DenseSums | LookupSums | LayerSums:
    """What adds up the sums of a layer; `lone` are the biases with a single use."""
    kind = uses[0].linear.kind
    if kind == "lookup":
        return LookupSums(uses, wanted)
    if kind == "dense" and len(uses) == 1 and uses[0].phi.dim() == 2 and uses[0].axis == SampleAxis(0):
        return DenseSums(uses[0], wanted, uses[0].bias if uses[0].bias in lone else None)
    return LayerSums(uses, wanted)


def _plus_squares(total: Tensor | None, array: Tensor, share: Tensor) -> Tensor:
    """total + c·array², one pass over memory for every column but the first."""
    weighted = array * share.unsqueeze(1)
    return weighted.mul_(array) if total is None else total.addcmul_(weighted, array)


def _add(store: dict[str, Tensor], key: str, array: Tensor) -> None:
    store[key] = store[key].add_(array) if key in store else array


def _total(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
