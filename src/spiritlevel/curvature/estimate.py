"""Estimators for what the exact sweep does not cover, with the spread that their error bars come from.

Where a network is not piecewise linear in a parameter, its block of the Hessian is the Gauss–Newton block, which the
sweep has, plus a remainder. Only the remainder is probed with random signs v: E[v ⊙ Rv] is its diagonal, and signs on
whole rows (columns) of W give w_jᵀ R_jj w_j of all of them at once. A parameter is probed only as long as its error is
above the tolerance. A few parameters are probed one by one, so that no other block adds variance; many are probed by
one vector, which adds the variance of the blocks between them and costs one product instead of many. Where the probes
still to be drawn are as many as a block has entries, products with its unit vectors give the block itself instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from scipy import special
from torch import Tensor

from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.curvature.metrics import METRICS, LayerMetric, Metrics
from spiritlevel.curvature.rounding import Arrays, array_shifts
from spiritlevel.curvature.statistics import COLUMNS, DIAGONAL, GROUPS, ROWS, STATISTICS
from spiritlevel.network.layers import Layer
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.sharded import division_of
from spiritlevel.problem.shards import WHOLE, Shards

# So many parameters are probed one by one; more of them together.
MOST_ALONE = 8
# What rounding leaves in an entry of a block that was formed, in units of rounding of the largest.
FORMED_ROUNDING = 8
# Probe vectors and their images in one pass over the data, together; larger models take a pass for every statistic.
PASS_BUDGET = 1 << 30
# Unit vectors whose products are taken in one pass.
UNIT_VECTORS = 64

Open = list[tuple[str, str]]  # what is still probed: statistic and parameter


@functools.cache
def few_groups_factor(groups: int) -> float:
    """What a standard error from a few groups is multiplied by, so that two of them cover as often as if it were known.

    Student's t in place of the normal: 1.21 for eight groups.
    """
    return float(special.stdtrit(groups - 1, special.ndtr(2)) / 2)


@dataclass
class Probed:
    """Group means of one estimated quantity: (GROUPS, *shape), each over `probes / GROUPS` probes; (1, *shape) if exact.

    rounding: Of a block that was formed, what rounding of the products may have made of it.
    """

    groups: Tensor
    probes: int = 0
    rounding: Tensor | None = None
    shards: Shards = WHOLE

    @property
    def exact(self) -> bool:
        return len(self.groups) == 1

    def mean(self) -> Tensor:
        return mean_of(list(self.groups))

    def total_error(self) -> float:
        """Standard error of the sum over all entries."""
        totals = self.shards.totals(torch.stack([group.sum(dtype=torch.float64) for group in self.groups]))
        return few_groups_factor(len(totals)) * float(totals.std(correction=1) / len(totals) ** 0.5)

    def still_needed(self, known: Tensor | None, tolerance: float, most_probes: int) -> int:
        """Probes until the error of the total is within the tolerance, as far as one can tell, or until they run out."""
        goal = tolerance * abs(self.shards.total(float((self.mean() + (0 if known is None else known)).sum())))
        error = self.total_error()
        if error <= goal:
            return 0
        needed = self.probes * (error / goal) ** 2 if goal else float("inf")
        if math.isnan(needed):
            raise FloatingPointError("probes of the curvature contain NaN or infinity")
        return int(min(needed, most_probes)) - self.probes


def mean_of(arrays: Sequence[Tensor]) -> Tensor:
    """Their mean in double precision, one after the other: all at once would be copied, and each may be a whole layer."""
    total = arrays[0].to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    for array in arrays[1:]:
        total += array
    return total.div_(len(arrays))


@dataclass
class Estimates:
    """Everything probed: statistic → parameter → groups."""

    found: dict[str, dict[str, Probed]] = field(default_factory=dict)
    products: int = 0

    def inexact(self) -> frozenset[str]:
        """The parameters of which something is known up to a standard error only."""
        return frozenset(name for kind in self.found.values() for name, probed in kind.items() if not probed.exact)

    def rounding_of_formed(self, unit: float) -> list[dict[str, dict[str, Tensor]]]:
        """What rounding may add to the statistics of blocks that were formed: a part of the largest entry, to each of them.

        An entry that should be zero comes out as rounding, and under a square root that is no small number. Where nothing
        arrives at all it is zero in truth.
        """
        formed: dict[str, dict[str, Tensor]] = {kind: {} for kind in STATISTICS}
        for kind, entries in self.found.items():
            for name, probed in entries.items():
                if probed.exact and probed.groups.numel():
                    array = probed.groups[0]
                    shift = (array != 0) * (FORMED_ROUNDING * unit * array.abs().max())
                    formed[kind][name] = shift if probed.rounding is None else shift + probed.rounding
        return [formed] if any(formed.values()) else []


def merged(parts: Iterable[Estimates]) -> Estimates:
    """Estimates of different parameters or statistics as one."""
    together = Estimates()
    for part in parts:
        together.products += part.products
        for kind, entries in part.found.items():
            together.found.setdefault(kind, {}).update(entries)
    return together


def probe(
    products: HessianProducts,
    layers: Mapping[str, Layer],
    bent: Sequence[str],
    wanted: frozenset[str],
    known: Mapping[str, Mapping[str, Tensor]],
    *,
    tolerance: float,
    most_probes: int,
    generator: torch.Generator,
    metrics: Metrics | None = None,
) -> Estimates:
    """Probe the blocks of the parameters in `bent` until each total is known to `tolerance` or probes run out.

    An error that is within the tolerance is partly luck: of something that is rarely large, few draws show too small a mean
    and too small a spread together. So what seems known is probed half as many times again, whatever that says.

    `known` holds the exact part of each statistic, against whose size the tolerance is meant.
    """
    estimates = Estimates()
    metrics = metrics or {}
    open_kinds = [(kind, name) for kind in (DIAGONAL, ROWS, COLUMNS) if kind in wanted for name in bent]
    open_kinds = [(kind, name) for kind, name in open_kinds if kind == DIAGONAL or name in layers]
    open_kinds += [(kind, name) for kind in metrics if kind in wanted for name in bent if name in metrics[kind]]
    every = list(open_kinds)
    count = products.problem.count
    size = sum(count(name) for name in dict.fromkeys(name for _, name in open_kinds))
    # The first round is drawn in any case, and all of them where the whole Hessian takes no more products: it is exact.
    left = dict.fromkeys(open_kinds, most_probes if size <= most_probes else GROUPS)
    rounds, draw, last = 0, Draws(generator, products.problem.shards), dict[tuple[str, str], int]()
    products.expect_many()
    while open_kinds and rounds * GROUPS < most_probes:
        formed = blocks_worth_forming(products, [each for each in open_kinds if each not in last], left)
        for name in formed:
            kinds = [kind for kind, other in every if other == name]
            _form(products, layers.get(name), name, kinds, estimates, metrics)
        compared = [
            (kind, name) for kind, name in every if name in formed and products.problem.parameters[name].numel()
        ]
        _compare(products, layers, compared, estimates, draw, metrics)
        open_kinds = [(kind, name) for kind, name in open_kinds if name not in formed]
        for group in range(GROUPS if open_kinds else 0):
            _one_round(products, layers, open_kinds, group, rounds, estimates, draw, metrics)
        rounds += 1
        for kind, name in open_kinds:
            estimates.found[kind][name].probes = rounds * GROUPS
        open_kinds = [each for each in open_kinds if last.get(each, math.inf) > rounds]
        for kind, name in (each for each in open_kinds if each not in last):
            probed = estimates.found[kind][name]
            left[kind, name] = probed.still_needed(known.get(kind, {}).get(name), tolerance, most_probes)
            if left[kind, name] <= 0:
                last[kind, name] = rounds + -(-rounds // 2)
    return estimates


def blocks_worth_forming(products: HessianProducts, open_kinds: Open, left: Mapping[tuple[str, str], int]) -> list[str]:
    """The parameters whose blocks take no more products with unit vectors than there are probes still to be drawn.

    Probed one by one, every parameter counts for itself; probed together, they must all be formed to save anything. A
    central difference is no exact product, so that nothing is formed from those; nor is a block whose statistics no process has
    whole.
    """
    division = division_of(products.problem)
    names = list(dict.fromkeys(name for _, name in open_kinds))
    divided = {name for name in names if division.divides(name)}
    if products.method == "central differences":
        return []
    size = {name: products.problem.parameters[name].numel() for name in names}
    if all(sum(kind == other for other, _ in open_kinds) <= MOST_ALONE for kind, _ in open_kinds):
        probes = {name: sum(left[each] for each in open_kinds if each[1] == name) for name in names}
        return [name for name in names if name not in divided and size[name] <= probes[name]]
    most = {kind: max(left[kind, name] for other, name in open_kinds if other == kind) for kind, _ in open_kinds}
    return names if not divided and sum(size.values()) <= sum(most.values()) else []


def _form(
    products: HessianProducts,
    layer: Layer | None,
    name: str,
    kinds: Sequence[str],
    estimates: Estimates,
    metrics: Metrics,
) -> None:
    """The exact statistics of one parameter, from its block of the Hessian.

    Unit vectors are stretched to the size of its entries: of weights of 1e10 the images of vectors of size one would vanish.
    """
    weight = products.problem.parameters[name]
    stretch = _power_of_two(float(weight.double().square().mean().sqrt())) if weight.numel() else 1.0
    units = stretch * torch.eye(weight.numel(), dtype=weight.dtype, device=weight.device)
    images: list[Tensor] = []
    for some in torch.split(units, UNIT_VECTORS):
        found = products.within([{name: unit.view(weight.shape)} for unit in some])
        images += [image[name].reshape(-1).double() / stretch for image in found]
    estimates.products += len(units)
    block = torch.stack(images) if images else weight.new_zeros(0, 0, dtype=torch.float64)
    skew = (block - block.mT).abs()  # rounding: what is formed may be a difference of far larger numbers
    for kind in kinds:
        if kind in metrics:
            exact = _trace_in(metrics[kind][name], block)
            rounding = torch.zeros_like(exact)
        elif kind == DIAGONAL:
            exact = block.diagonal().reshape(weight.shape)
            rounding = skew.amax(1).reshape(weight.shape) if len(block) else torch.zeros_like(exact)
        else:
            exact, rounding = (_forms(kind, *of, layer) for of in ((block, weight), (skew, weight.abs())))
        estimates.found.setdefault(kind, {})[name] = Probed(exact.unsqueeze(0), rounding=rounding)


def _power_of_two(size: float) -> float:
    """One that is about as large, so that nothing is rounded by it; 1 for zero."""
    return 2.0 ** math.frexp(size)[1] if size > 0 else 1.0


def _compare(
    products: HessianProducts,
    layers: Mapping[str, Layer],
    formed: Open,
    estimates: Estimates,
    draw: Draws,
    metrics: Metrics,
) -> None:
    """Add what a probe of every formed block shows of rounding, taken in another precision over the heaviest samples."""
    parameters = products.problem.parameters
    of = {each: (layers.get(each[1]), metrics.get(each[0], {}).get(each[1])) for each in formed}
    vectors = {each: _probe_vector(*each, parameters[each[1]], of[each][0], draw, of[each][1]) for each in formed}

    def read(batch: Batch) -> Arrays:
        asked = [{name: vector} for (_, name), vector in vectors.items()]
        images = products.from_images(batch, asked, lambda _, image: image)
        found: Arrays = {kind: {} for kind, _ in formed}
        for ((kind, name), vector), image in zip(vectors.items(), images, strict=True):
            double = (vector.double(), image[name].double())
            found[kind][name] = _reading(kind, name, *double, layers.get(name), draw.shards)
        return found

    for shift in (array_shifts(products.problem, read, products.order) if formed else None) or []:
        for kind, name in formed:
            probed = estimates.found[kind][name]
            assert probed.rounding is not None
            probed.rounding = probed.rounding + shift[kind][name].abs()


def _trace_in(metric: LayerMetric, block: Tensor) -> Tensor:
    """The trace of a block in a metric: Z = 1 in one entry after the other."""
    units = torch.eye(metric.coordinates.numel()).to(block)
    directions = [metric.direction(unit.view(metric.coordinates)).reshape(-1) for unit in units]
    together = torch.stack(directions) if directions else block.new_zeros(0, len(block))
    return ((together @ block) * together).sum()


def _forms(kind: str, block: Tensor, weight: Tensor, layer: Layer | None) -> Tensor:
    """w_jᵀ B_jj w_j for every row or column j, from the block B."""
    assert layer is not None
    owner, count = _owners(kind, layer, weight.shape, torch.arange(weight.numel(), device=weight.device))
    w = weight.reshape(-1).double()
    same = owner.unsqueeze(1) == owner
    shares = w * ((block * same) @ w)
    return w.new_zeros(count).index_add_(0, owner, shares)


def _owners(kind: str, layer: Layer, shape: torch.Size, places: Tensor) -> tuple[Tensor, int]:
    """The number of the row or column that entries of a weight, by their places in memory, belong to; and how many there are."""
    inner, kernel = shape[1], shape[2:].numel()
    outermost = places.div(max(1, inner * kernel), rounding_mode="floor")
    if (kind == ROWS) != layer.transposed:
        return outermost, shape[0]
    block = outermost.div(max(1, shape[0] // layer.groups), rounding_mode="floor")
    return block * inner + places.div(max(1, kernel), rounding_mode="floor") % max(1, inner), layer.groups * inner


def _one_round(
    products: HessianProducts,
    layers: Mapping[str, Layer],
    kinds: Open,
    group: int,
    rounds: int,
    estimates: Estimates,
    draw: Draws,
    metrics: Metrics,
) -> None:
    """One probe of everything still open, in one pass over the data where memory allows."""
    parameters = products.problem.parameters
    requests: list[tuple[str, dict[str, Tensor]]] = []
    for kind in dict.fromkeys(kind for kind, _ in kinds):
        vectors = {
            name: _probe_vector(kind, name, parameters[name], layers.get(name), draw, metrics.get(kind, {}).get(name))
            for open_kind, name in kinds
            if open_kind == kind
        }
        alone = len(vectors) <= MOST_ALONE
        requests += [(kind, {name: v}) for name, v in vectors.items()] if alone else [(kind, vectors)]
        if draw.shards.largest(_bytes(requests)) > PASS_BUDGET // draw.shards.size:
            _read(products, layers, requests, group, rounds, estimates)
            requests = []
    _read(products, layers, requests, group, rounds, estimates)


def _bytes(requests: list[tuple[str, dict[str, Tensor]]]) -> int:
    """Of the vectors and of their images, which are summed in double precision."""
    return sum(v.numel() * (v.element_size() + 8) for _, vectors in requests for v in vectors.values())


def _read(
    products: HessianProducts,
    layers: Mapping[str, Layer],
    requests: list[tuple[str, dict[str, Tensor]]],
    group: int,
    rounds: int,
    estimates: Estimates,
) -> None:
    """Take the products and add what they say to the means of this group."""
    if not requests:
        return
    images, shards = products.within([vectors for _, vectors in requests]), products.problem.shards
    division = division_of(products.problem)
    estimates.products += len(requests)
    for (kind, vectors), found in zip(requests, images, strict=True):
        store = estimates.found.setdefault(kind, {})
        for name, vector in vectors.items():
            sample = _reading(kind, name, vector, found.pop(name), layers.get(name), shards)
            divided = kind == DIAGONAL and division.divides(name)  # of a row or a column every process knows the whole
            if divided and not shards.divided:
                sample = division.part(name, sample)
            if name not in store:
                store[name] = Probed(sample.new_zeros(GROUPS, *sample.shape), shards=division if divided else WHOLE)
            mean = store[name].groups[group]
            mean += (sample - mean) / (rounds + 1)


class Draws:
    """Random signs: of rows and columns the same in every process, of entries each process's own."""

    def __init__(self, generator: torch.Generator, shards: Shards) -> None:
        self.shards = shards
        self._common, self._own = generator, shards.own(generator)

    def common(self, shape: torch.Size, like: Tensor) -> Tensor:
        return _signs(shape, like, self._common)

    def own(self, like: Tensor) -> Tensor:
        return _signs(like.shape, like, self._own)


def _probe_vector(
    kind: str, name: str, weight: Tensor, layer: Layer | None, draw: Draws, metric: LayerMetric | None = None
) -> Tensor:
    if metric is not None:
        return metric.direction(draw.common(metric.coordinates, metric.right)).to(weight)
    if kind == DIAGONAL or layer is None:
        return draw.own(weight)
    if draw.shards.divided:
        owner, count = _own_owners(kind, name, weight, layer, draw.shards)
        return weight * draw.common(torch.Size([count]), weight)[owner]
    matrix = layer.matrix(weight)  # (groups, rows, columns, kernel)
    shape = (*matrix.shape[:2], 1, 1) if kind == ROWS else (matrix.shape[0], 1, matrix.shape[2], 1)
    return _stored(layer, matrix * draw.common(torch.Size(shape), weight), weight)


def _own_owners(kind: str, name: str, part: Tensor, layer: Layer, shards: Shards) -> tuple[Tensor, int]:
    """The same for this process's part of a weight."""
    places = shards.first(name) + torch.arange(part.numel(), device=part.device)
    return _owners(kind, layer, shards.shape(name, part), places)


def _reading(
    kind: str, name: str, vector: Tensor, image: Tensor, layer: Layer | None, shards: Shards = WHOLE
) -> Tensor:
    """v ⊙ Rv, summed over each row or column; the signs cancel because each stands for a whole row or column."""
    product = vector * image
    if kind in METRICS:
        return product.sum(dtype=torch.float64)
    if kind == DIAGONAL or layer is None:
        return product
    if shards.divided:
        owner, count = _own_owners(kind, name, product, layer, shards)
        return shards.totals(product.new_zeros(count).index_add_(0, owner, product))
    matrix = layer.matrix(product)
    return matrix.sum((2, 3)).reshape(-1) if kind == ROWS else matrix.sum((1, 3)).reshape(-1)


def _stored(layer: Layer, matrix: Tensor, weight: Tensor) -> Tensor:
    """Back from (groups, rows, columns, kernel) to the shape the weight is stored in."""
    return (matrix.transpose(1, 2) if layer.transposed else matrix).reshape(weight.shape)


def _signs(shape: torch.Size, like: Tensor, generator: torch.Generator) -> Tensor:
    return (torch.randint(0, 2, shape, generator=generator) * 2 - 1).to(like)
