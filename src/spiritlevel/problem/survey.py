"""One forward pass over all of the data before anything is measured: what runs, and which samples matter.

Which operations run may depend on the samples, so every chunk is traced. How much a sample matters is judged by the
slope of its loss at the outputs: where that is zero to all digits, so is the sample's share in almost everything. The
heaviest samples are what checks are made on, and what is computed once more in another precision to see what rounding
does; so are those with an activation so near to its kink that rounding decides on which side of it they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spiritlevel.network.layers import Function, Layer, LinearMap
from spiritlevel.network.tracing import Tracer, traced
from spiritlevel.problem.apart import check_chunk_apart, shapes_of
from spiritlevel.problem.batches import Batch, join
from spiritlevel.problem.contract import Checked
from spiritlevel.problem.factors import OrderedFactor
from spiritlevel.problem.loss_checks import check_mean_of_chunk
from spiritlevel.problem.shards import Shards

# How many of the heaviest samples are kept, and how many near a kink: a fiftieth of all, within these bounds.
FEWEST_HEAVY, MOST_HEAVY = 48, 128
# Operations with a kink at zero, and how near to it counts as on either side, in units of rounding of the layer's values.
KINKED = frozenset(["relu", "relu6", "leaky_relu", "rrelu", "prelu", "abs"])
NEAR = 16
# Norms between this and its inverse are right in the precision of their tensor.
SMALLEST = 1e-12
# Entries are divided at the median of about so many of them.
FEW_FOR_MIDDLE = 10_000
# At most this many sizes of columns are kept: 80 MB in single precision.
MOST_SIZES = 20_000_000


@dataclass(frozen=True)
class Seen:
    """What the trace of one chunk of the data showed.

    `shapes` has the shapes of the results of every parameter's uses, in order; `samples` is how many the chunk has.
    """

    layers: Mapping[str, Layer]
    bent: Mapping[str, str]
    mixed: frozenset[str]
    shapes: Mapping[str, tuple[tuple[int, ...], ...]]
    samples: int
    path: int


@dataclass(frozen=True)
class Heavy:
    """The heaviest samples of the data, the heaviest first, with the mass of each and of all samples of their kind.

    `batch` is None where there are none.
    """

    batch: Batch | None
    masses: Tensor
    total: float

    @property
    def scale(self) -> float:
        """What a sum over these samples is multiplied by to stand for all of their kind."""
        held = float(self.masses.sum())
        return self.total / held if held > 0 else 1.0

    def holding(self, share: float, fewest: int) -> Heavy:
        """The first of them that hold this share of the mass of all of their kind, and so many at least; all where they hold less."""
        if self.batch is None or not self.batch.divisible or len(self.masses) <= fewest:
            return self
        needed = 1 + int((self.masses.cumsum(0) < share * self.total).sum())
        count = max(fewest, needed)
        return self if count >= len(self.masses) else Heavy(self.batch[:count], self.masses[:count], self.total)

    def groups(self, count: int, most: int) -> list[Batch]:
        """The samples in so many groups, more where one would have more than `most`, each with heavy and light ones."""
        if self.batch is None:
            return []
        size = len(self.batch)
        if not self.batch.divisible:  # a graph, whose entries are of different lengths
            return [self.batch]
        count = max(count, -(-size // most))
        return [self.batch[torch.arange(start, size, count)] for start in range(min(count, size))]


@dataclass(frozen=True)
class Survey:
    """What one pass over all of the data showed.

    Attributes:
        loss: L(θ).
        seen: Every chunk that differs from the others in what it ran.
        heavy: The samples that curve the most: a steep loss, times how far the outputs move.
        near: Those with an activation within rounding of its kink.
        slope: ‖∇L‖, and ‖D∇L‖ with D the norms of the blocks, which no rescaling of layers changes; None where the gradient
            was not asked for.
        sizes: ‖s_k‖² of the columns of ∇²ℓ of every sample of this process, the largest first, where the loss has them
            in that order.
        masses: Σ|∂ℓ/∂f| of every sample of this process, where there are `sizes`: as large as ∇²ℓ, and what ∇²f is
            multiplied with.
        reaches: How far the outputs of every sample move with every layer's weight, squared, along ∂ℓ/∂f: (N, layers).
            Curvature is mass times reach. Samples of large inputs reach far, and are often certain for that very reason.
    """

    loss: float
    seen: list[Seen]
    heavy: Heavy
    near: Heavy
    slope: tuple[float, float] | None
    sizes: Tensor | None = None
    masses: Tensor | None = None
    reaches: Tensor | None = None

    def heaviest(self, left: float) -> Tensor | None:
        """True for the samples that hold all but this part of all mass; None where masses are not known, or all are needed.

        Where the others hold more of what some layer feels, those that hold all but this part of that are among them too. The
        mass alone decides where it can: it is the same for all networks that compute the same function.
        """
        if self.masses is None or self.reaches is None:
            return None
        least = threshold(self.masses, left * float(self.masses.sum()))
        if least is None:
            return None
        heavy = self.masses > least
        felt = self.masses.unsqueeze(1) * self.reaches
        for layer in felt.unbind(1):
            total = float(layer.sum())
            if float(layer[~heavy].sum()) > left * total:
                least = threshold(layer, left * total)
                heavy |= layer > (0.0 if least is None else least)
        return None if bool(heavy.all()) else heavy


def threshold(sizes: Tensor, left: float) -> float | None:
    """What entries must exceed so that all others sum to at most `left`; None where none or all would.

    Found by halving, each time only among the entries that are still in doubt, without a sorted copy of all of them. It
    lies between two sizes, so that rounding moves no entry across it.

    >>> threshold(torch.tensor([8.0, 1.0, 4.0, 1.0]), 2.5)
    2.0
    """
    doubtful, total, largest_left, smallest_taken = sizes.flatten(), 0.0, -1.0, math.inf
    while len(doubtful):
        low, high = _halves(doubtful)
        added = float(low.sum(dtype=torch.float64))
        if total + added <= left:
            total, largest_left, doubtful = total + added, float(low.max()), high
        else:
            smallest_taken = float(high.min() if len(high) else low.min())
            doubtful = low if len(high) else high  # equal entries go together
    if largest_left < 0 or smallest_taken == math.inf:
        return None
    return math.sqrt(largest_left) * math.sqrt(smallest_taken)


def _halves(entries: Tensor) -> tuple[Tensor, Tensor]:
    """The smaller and the larger entries, equal ones together; all in the first part where all are equal."""
    middle = entries[:: max(1, len(entries) // FEW_FOR_MIDDLE)].median()  # of some: the median of all would copy them
    low, high = entries[entries <= middle], entries[entries > middle]
    if len(high):
        return low, high
    low, high = entries[entries < middle], entries[entries == middle]
    return (low, high) if len(low) else (high, low)


def survey(problem: Checked, *, with_gradient: bool = True) -> Survey:
    """Trace every chunk, weigh every sample; what other processes found included."""
    seen: dict[Any, Seen] = {}
    shapes: set[tuple[torch.Size, ...]] = set()
    heavy, near = _Kept(problem), _Kept(problem)
    total, sizes, weighed, reaches = 0.0, list[Tensor | None](), list[Tensor](), list[dict[str, Tensor]]()
    gradient = {name: torch.zeros_like(value) for name, value in problem.parameters.items()} if with_gradient else {}
    weights = {name: float(value.double().square().sum()) for name, value in problem.parameters.items()}
    with problem.undisturbed():
        for chunk, weight in problem.chunks():
            tracer = _Surveyor(problem, chunk)
            outputs = traced(tracer, lambda leaves, chunk=chunk: problem.chunk_outputs(leaves, chunk))  # type: ignore[misc]
            found = _seen(problem, tracer, len(chunk))
            seen.setdefault((found.path, found.samples, tuple(sorted(found.shapes.items()))), found)
            if (shape := shapes_of(chunk)) not in shapes:
                check_chunk_apart(problem, outputs, chunk)
                shapes.add(shape)
            check_mean_of_chunk(problem, chunk, outputs)
            loss, masses = _weighed(problem, outputs, chunk)
            total += weight * loss
            felt = _add_gradient(gradient, problem, tracer, outputs, chunk, weight)
            curving = _curving(weights, felt, masses)
            heavy.add(chunk, curving)
            near.add(
                chunk, curving, problem.shards.joined(tracer.near, len(chunk)) if not problem.whole else tracer.near
            )
            sizes.append(column_sizes(problem, outputs, chunk) if None not in sizes else None)
            weighed.append(masses)
            reaches.append({name: _over(part, masses) for name, part in felt.items()})
    problem.work.add(passes=1)
    shared = [each for found in problem.ranks.gather(list(seen.values())) for each in found]
    problem.ranks.sum_(list(gradient.values()))
    known = [each for each in sizes if each is not None]
    together = torch.cat(known) if len(known) == len(sizes) else None
    del known, sizes  # as large as what was made of them
    of_all = None if together is None else torch.cat(weighed)
    reach = None if together is None else _side_by_side(reaches, [len(each) for each in weighed])
    slope = slope_norms(gradient, problem.parameters, problem.shards) if with_gradient else None
    return Survey(problem.ranks.total(total), shared, heavy.gathered(), near.gathered(), slope, together, of_all, reach)


def _add_gradient(
    gradient: dict[str, Tensor], problem: Checked, tracer: _Surveyor, outputs: Any, chunk: Batch, weight: float
) -> dict[str, Tensor]:
    """Backwards through the pass that was traced: ‖δ‖·‖φ‖ of every sample at every layer, and the gradient where it is wanted."""
    with torch.enable_grad():
        value = outputs if problem.whole else problem.loss_function.mean(outputs, chunk.targets)
        leaves = tracer.parameters if gradient else {}
        asked = [*leaves.values(), *(use.result for use in tracer.uses)]
        if not value.requires_grad or not asked:
            return {}
        parts = torch.autograd.grad(value, asked, allow_unused=True)
    for name, part in zip(leaves, parts, strict=False):
        if part is not None:
            gradient[name].add_(part.detach(), alpha=weight)
    felt: dict[str, Tensor] = {}
    for use, delta in zip(tracer.uses, parts[len(leaves) :], strict=True):
        if delta is not None:
            reach = len(chunk) * _lengths(delta, len(chunk)) * use.inputs
            felt[use.layer] = torch.hypot(felt[use.layer], reach) if use.layer in felt else reach
    return dict(zip(felt, torch.stack(list(felt.values())).cpu(), strict=True)) if felt else {}


def _lengths(tensor: Tensor, samples: int) -> Tensor:
    """The norm of every sample's part of a tensor, which comes first in it."""
    parts = tensor.reshape(samples, -1)
    found: Tensor = torch.linalg.vector_norm(parts, dim=1)
    if not SMALLEST < float(found.max()) < 1 / SMALLEST:  # squares overflow, or those that matter vanish
        found = torch.linalg.vector_norm(parts, dim=1, dtype=torch.float64)
    return found.double()


def _curving(weights: Mapping[str, float], felt: Mapping[str, Tensor], masses: Tensor) -> Tensor:
    """Mass times reach of every sample, over all layers in units of their weights (‖W‖²); the mass where no layer tells.

    Where all weights that are felt are zero, as in a last layer that was never trained, every layer counts by its largest reach.
    """
    reaches = {name: _over(part, masses) for name, part in felt.items()}
    in_weights = [weights[name] * part for name, part in reaches.items()]
    by_layer = [part / part.max() for part in reaches.values() if 0 < float(part.max()) < math.inf]
    for parts in (in_weights, by_layer):
        found = masses * torch.stack(parts).sum(0) if parts else masses
        if bool(found.any()) and bool(torch.isfinite(found).all()):
            return found
    return masses


def _over(felt: Tensor, masses: Tensor) -> Tensor:
    """How far a sample's outputs move, squared; nothing is known of one without mass, and nothing matters."""
    return torch.where(masses > 0, felt / masses.clamp_min(torch.finfo(torch.float64).tiny), 0.0).square()


def _side_by_side(reaches: list[dict[str, Tensor]], samples: list[int]) -> Tensor:
    """Samples of all chunks by layers; a layer that a chunk does not use is zero there."""
    layers = sorted({name for each in reaches for name in each})
    parts = [
        torch.stack([each.get(name, torch.zeros(count, dtype=torch.float64)) for name in layers], 1)
        if layers
        else torch.zeros(count, 0, dtype=torch.float64)
        for each, count in zip(reaches, samples, strict=True)
    ]
    return torch.cat(parts)


def slope_norms(
    gradient: Mapping[str, Tensor], parameters: Mapping[str, Tensor], shards: Shards
) -> tuple[float, float]:
    """‖∇L‖, and ‖D∇L‖ with D the norms of the blocks."""
    sizes = {name: shards.norm(float(part.double().norm())) for name, part in gradient.items()}
    own = {name: shards.norm(float(part.double().norm())) for name, part in parameters.items()}
    return math.hypot(*sizes.values()), math.hypot(*(own[name] * size for name, size in sizes.items()))


def seen_on(problem: Checked, batch: Batch) -> Seen:
    """What the trace of one batch shows."""
    tracer = _Surveyor(problem, batch)
    traced(tracer, lambda leaves: problem.chunk_outputs(leaves, batch))
    return _seen(problem, tracer, len(batch))


def _seen(problem: Checked, tracer: Tracer, samples: int) -> Seen:
    found = tracer.trace
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in found.calls:
        shapes.setdefault(name, []).append(shape)
    return Seen(
        {name: layer for name, layer in found.layers.items() if name in problem.parameters},
        dict(found.bent),
        frozenset(found.mixed),
        {name: tuple(each) for name, each in shapes.items()},
        samples,
        hash(found.path),
    )


class _Use(NamedTuple):
    """A layer at work in a trace: its result, and the norm of every sample's input."""

    layer: str
    result: Tensor
    inputs: Tensor


class _Surveyor(Tracer):
    """A trace that also notices which samples have an activation within rounding of its kink, and how large inputs are."""

    def __init__(self, problem: Checked, batch: Batch) -> None:
        origin = problem.shards.origin if problem.shards.divided else None
        super().__init__(problem.leaves(), origin, problem.fixed.values())
        self._samples = len(batch) if problem.whole else len(problem.shards.rows(batch))
        self._close = NEAR * torch.finfo(problem.dtype).eps if problem.dtype == torch.float32 else 0.0
        self.near = torch.zeros(self._samples, dtype=torch.bool, device=problem.device)
        self._weighs = not problem.whole and not problem.shards.divided
        self.uses: list[_Use] = []

    def on_linear(self, linear: LinearMap) -> Any:
        result = super().on_linear(linear)
        if self._weighs and isinstance(result, Tensor) and result.requires_grad:
            self._weigh(linear, result)
        return result

    def _weigh(self, linear: LinearMap, result: Tensor) -> None:
        if all(each.dim() and each.numel() and not len(each) % self._samples for each in (result, linear.inputs)):
            self.uses.append(_Use(linear.layer.name, result, self._input_lengths(linear)))

    def _input_lengths(self, linear: LinearMap) -> Tensor:
        if linear.kind == "lookup":  # one-hot inputs
            return torch.ones(self._samples, dtype=torch.float64, device=linear.inputs.device)
        return _lengths(linear.inputs.detach(), self._samples)

    def on_other(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in KINKED and self._close and args and isinstance(args[0], Tensor):
            self._look_near_the_kink(args[0].detach())
        return super().on_other(name, function, args, kwargs)

    def _look_near_the_kink(self, values: Tensor) -> None:
        if not values.dim() or len(values) != self._samples or not values.numel():
            return
        sizes = values.abs()
        close = self._close * sizes.mean()
        if bool(sizes.amin() <= close):  # in most chunks no activation is
            near = (sizes <= close) & (sizes > 0)  # zero is zero in every precision
            self.near |= near.flatten(1).any(1) if near.dim() > 1 else near


def _weighed(problem: Checked, outputs: Any, chunk: Batch) -> tuple[float, Tensor]:
    """The loss of a chunk, and how much every sample matters; of a batch that stays whole its loss stands for all of it."""
    if problem.whole:
        return float(outputs.detach()), torch.full((1,), abs(float(outputs.detach())), dtype=torch.float64)
    if not isinstance(outputs, Tensor) or not outputs.dim() or len(outputs) != len(chunk):
        with torch.no_grad():
            loss = problem.loss_function.mean(outputs, chunk.targets)
        return float(loss), torch.ones(len(chunk), dtype=torch.float64)
    loss, slopes = problem.slopes(outputs, chunk)
    return loss, slopes.reshape(len(slopes), -1).abs().sum(1).cpu().double()


def column_sizes(problem: Checked, outputs: Any, chunk: Batch) -> Tensor | None:
    """How large the columns of ∇²ℓ are, on the CPU; None where the loss does not give them, or they are too many."""
    columns = outputs[0].numel() if isinstance(outputs, Tensor) and outputs.dim() == 2 else MOST_SIZES
    if problem.loss_function.curvature is None or problem.data.samples * columns > MOST_SIZES:
        return None
    factor = problem.loss_function.curvature(outputs.detach(), chunk.targets)  # type: ignore[arg-type]
    found = factor.sizes() if isinstance(factor, OrderedFactor) else None
    return None if found is None else found.cpu()


class _Kept:
    """The heaviest samples so far."""

    def __init__(self, problem: Checked) -> None:
        self._problem = problem
        self._count = max(FEWEST_HEAVY, min(MOST_HEAVY, problem.data.samples // 50))
        self._batch: Batch | None = None
        self._masses = torch.zeros(0, dtype=torch.float64)
        self._total = 0.0

    def add(self, chunk: Batch, masses: Tensor, chosen: Tensor | None = None) -> None:
        if self._problem.whole:
            self._total += float(masses.sum())
            if chosen is None:
                self._take(chunk, masses)
            return
        rows = torch.arange(len(chunk)) if chosen is None else chosen.nonzero().squeeze(1).cpu()
        masses = masses[rows]
        self._total += float(masses.sum())
        order = masses.argsort(descending=True, stable=True)[: self._count]
        if len(order):
            self._merge(chunk[rows[order].to(self._problem.device)], masses[order])

    def _merge(self, batch: Batch, masses: Tensor) -> None:
        together = batch if self._batch is None else join([self._batch, batch])
        if together is None:  # of another shape: what is heavier stays
            if float(masses.sum()) > float(self._masses.sum()):
                self._batch, self._masses = batch, masses
            return
        masses = torch.cat([self._masses, masses])
        order = masses.argsort(descending=True, stable=True)[: self._count]
        self._batch, self._masses = together[order.to(self._problem.device)], masses[order]

    def gathered(self) -> Heavy:
        """Those of all processes."""
        everyone: list[tuple[Batch | None, Tensor, float]] = self._problem.ranks.gather(
            (self._batch, self._masses, self._total)
        )
        self._batch, self._masses, self._total = everyone[0]
        for batch, masses, total in everyone[1:]:
            self._total += total
            if batch is not None:
                self._take(batch, masses)
        return Heavy(self._batch, self._masses, self._total)

    def _take(self, batch: Batch, masses: Tensor) -> None:
        if not self._problem.whole:
            self._merge(batch, masses)
        elif self._batch is None or bool(masses > self._masses):
            self._batch, self._masses = batch, masses
