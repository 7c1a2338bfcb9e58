"""Evidence: what the engine found out about a problem, gathered once for all measures of a call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from spiritlevel.batches import Batch
from spiritlevel.curvature.anatomy import Anatomy, examine
from spiritlevel.curvature.blocks import GaussNewtonBlocks
from spiritlevel.curvature.estimate import Estimates, few_groups_factor, mean_of, probe
from spiritlevel.curvature.hessian import HessianProducts, loss_objective, remainder_objective
from spiritlevel.curvature.krylov import block_eigenpairs, scaled_eigenpairs
from spiritlevel.curvature.lanczos import Eigenpair, length
from spiritlevel.curvature.rounding import rounding_errors, widened
from spiritlevel.curvature.statistics import (
    COLUMNS,
    DIAGONAL,
    FISHER,
    GROUPS,
    MOST_COLUMNS,
    ROWS,
    STATISTICS,
    TRACE,
    Sweep,
    sweep,
)
from spiritlevel.layers import Layer
from spiritlevel.measures.record import Needs, Operator
from spiritlevel.problem import Problem

Arrays = Mapping[str, Tensor]


@dataclass(frozen=True)
class Statistics:
    """Layer statistics as measures read them.

    Attributes:
        layers: Weight's parameter name → layer.
        weights: Parameter name → values.
        trace: Parameter name → trace of its block of H.
        diagonal: Parameter name → diagonal of its block of H.
        rows, columns: Weight's name → w_jᵀ H_jj w_j of every row (column) j.
        fisher: Parameter name → (1/N) Σ_n (∂ℓ_n/∂θ_i)².
    """

    layers: Mapping[str, Layer]
    weights: Arrays
    trace: Arrays = field(default_factory=dict)
    diagonal: Arrays = field(default_factory=dict)
    rows: Arrays = field(default_factory=dict)
    columns: Arrays = field(default_factory=dict)
    fisher: Arrays = field(default_factory=dict)


class _InDouble(Mapping[str, Tensor]):
    """Tensors in double precision, each converted when it is read: all at once would be twice the model."""

    def __init__(self, tensors: Arrays) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].double()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Evidence:
    """Everything measures may ask for. Nothing is computed that no measure needs, and nothing twice."""

    def __init__(self, problem: Problem, needs: Needs, *, tolerance: float, seed: int, most_probes: int) -> None:
        self.problem, self.needs, self.tolerance = problem, needs, tolerance
        self._seed, self.most_probes = seed, most_probes
        self.estimates: Estimates | None = None

    def generator(self, purpose: str) -> torch.Generator:
        """A stream of random numbers of its own for every purpose, so that no result depends on what else was asked."""
        return torch.Generator().manual_seed((self._seed * 1_000_003 + sum(map(ord, purpose)) * 7919) % (1 << 63))

    @cached_property
    def anatomy(self) -> Anatomy:
        return examine(self.problem)

    @cached_property
    def products(self) -> HessianProducts:
        return HessianProducts(self.problem)

    @cached_property
    def loss(self) -> float:
        """L(θ), taken from work that has been done anyway where there is some."""
        known = self.known_loss()
        return self.problem.loss() if math.isnan(known) else known

    def known_loss(self) -> float:
        """L(θ) if some work has brought it, else NaN."""
        if "loss" in self.__dict__:
            return self.loss
        if "swept" in self.__dict__:
            return self.swept.loss
        if "products" in self.__dict__ and self.products.loss is not None:
            return self.products.loss
        return math.nan

    def shrink(self) -> bool:
        """Halve the chunks and let go of what is kept between passes; False where a chunk cannot be halved."""
        if self.problem.whole or self.problem.chunk_size == 1:
            return False
        self.problem.chunk_size = max(1, self.problem.chunk_size // 2)
        self.__dict__.pop("products", None)
        return True

    # --- statistics ----------------------------------------------------------------------------------------------

    @cached_property
    def swept(self) -> Sweep:
        return sweep(self.problem, self.anatomy, self._kinds, self.generator("columns"))

    @cached_property
    def _kinds(self) -> frozenset[str]:
        """What is swept and probed: a trace is had more cheaply than a diagonal, but probes give diagonals."""
        wanted = self.needs.statistics
        if TRACE in wanted and (DIAGONAL in wanted or self.bent):
            return wanted - {TRACE} | {DIAGONAL}
        return wanted

    @cached_property
    def statistics(self) -> Statistics:
        """The best values: exact parts plus the mean of what was estimated."""
        return self._combine(self._kinds | self.needs.statistics, mean_of, lambda probed: probed.mean())

    def leaving_one_out(self, kinds: frozenset[str]) -> Iterator[Statistics]:
        """Statistics of these kinds with one group of probes left out, for every group; none where nothing was estimated.

        One after the other: each may be as large as the model.
        """
        for group in range(GROUPS if self.estimated else 0):
            yield self._combine(
                kinds,
                lambda draws, group=group: _without(draws, group),  # type: ignore[misc]
                lambda probed, group=group: probed.without(group),
            )

    @property
    def _weights(self) -> Arrays:
        return _InDouble(self.problem.parameters)

    @cached_property
    def sees_samples(self) -> bool:
        """Whether the loss of a single sample can be had; a loss of the form (model, batch) gives means over batches."""
        return not self.problem.whole or self.problem.data.pieces(divide=False) == self.problem.samples

    @property
    def bent(self) -> list[str]:
        """The parameters whose blocks of H are more than their Gauss–Newton part, or not swept at all."""
        return [name for name in self.problem.parameters if not self.anatomy.exact(name)]

    @cached_property
    def estimated(self) -> frozenset[str]:
        """The parameters whose statistics are not exact."""
        names = set(self.bent)
        if not self.needs.statistics - {FISHER}:
            names = set()
        if self.anatomy.axes and self.needs.statistics and self.swept.sampled:
            names |= set(self.anatomy.swept)
        return frozenset(names)

    def _combine(
        self,
        kinds: frozenset[str],
        draws_mean: Callable[[list[Tensor]], Tensor],
        probed_mean: Callable[..., Tensor],
    ) -> Statistics:
        arrays: dict[str, dict[str, Tensor]] = {kind: {} for kind in STATISTICS}
        if TRACE in kinds and DIAGONAL in self._kinds:
            kinds = kinds | {DIAGONAL}
        if self.anatomy.axes:
            for kind in kinds:
                store = arrays[kind]
                for name in getattr(self.swept.groups[0], kind):
                    parts = [getattr(group, kind) for group in self.swept.groups]
                    store[name] = draws_mean([part[name] for part in parts if name in part])
        for kind, found in self._probe().found.items():
            for name, probed in found.items() if kind in kinds else ():
                part = probed_mean(probed)
                arrays[kind][name] = arrays[kind][name] + part if name in arrays[kind] else part
        if FISHER in kinds and self.sees_samples:
            self._complete_fisher(arrays[FISHER])
        weights = self._weights
        for kind in kinds & {DIAGONAL, FISHER}:
            for name in weights:  # a parameter the outputs never feel has a block of zeros
                if name not in arrays[kind]:
                    arrays[kind][name] = torch.zeros_like(weights[name])
        if DIAGONAL in kinds:
            arrays[TRACE] = {name: diagonal.sum() for name, diagonal in arrays[DIAGONAL].items()}
        for name in weights:
            arrays[TRACE].setdefault(name, torch.zeros((), dtype=torch.float64))
        return Statistics(self.anatomy.layers, weights, **arrays)

    def _probe(self) -> Estimates:
        """Probe, once, every block that is more than its Gauss–Newton part."""
        if self.estimates is not None:
            return self.estimates
        curvature = self._kinds - {FISHER}
        bent = self.bent
        if not bent or not curvature:
            self.estimates = Estimates()
            return self.estimates
        known: dict[str, Arrays] = {}
        swept = [name for name in bent if name in self.anatomy.axes]
        if swept and self.products.method == "kept graph":
            known = {kind: getattr(self.swept.groups[0], kind) for kind in curvature}
        groups = [(remainder_objective, swept), (loss_objective, [name for name in bent if name not in swept])]
        if not known:
            groups = [(loss_objective, bent)]
            for kind in (DIAGONAL, ROWS, COLUMNS):
                for name in swept:
                    for group in self.swept.groups:
                        getattr(group, kind).pop(name, None)
        self.estimates = Estimates()
        for objective, names in groups:
            if names:
                products = self.products
                if objective is remainder_objective:
                    products = HessianProducts(self.problem, objective=objective, method="kept graph")
                found = probe(
                    products,
                    self.anatomy.layers,
                    names,
                    curvature,
                    known if objective is remainder_objective else {},
                    tolerance=self.tolerance,
                    most_probes=self.most_probes,
                    generator=self.generator("probes"),
                )
                self.estimates.products += found.products
                for kind, entries in found.found.items():
                    self.estimates.found.setdefault(kind, {}).update(entries)
        return self.estimates

    def _complete_fisher(self, store: dict[str, Tensor]) -> None:
        """Parameters the sweep cannot read sample by sample: one gradient a sample, for these only."""
        missing = [name for name in self.problem.parameters if name not in self.anatomy.axes]
        if not missing:
            return
        if "_slow_fisher" not in self.__dict__:
            self._slow_fisher = _fisher_by_sample(self.problem, missing)
        store.update(self._slow_fisher)

    # --- eigenvalues ---------------------------------------------------------------------------------------------

    def scaling(self, name: str) -> Tensor:
        """The diagonal of S as a flat vector."""
        values = list(self.problem.parameters.values())
        if name == "identity":
            return torch.cat([torch.ones_like(value).reshape(-1) for value in values])
        if name == "block norms":
            return torch.cat([value.new_tensor(length(value)).expand(value.numel()) for value in values])
        return torch.cat([value.abs().reshape(-1) for value in values])

    @cached_property
    def eigenpairs(self) -> Mapping[Operator, Eigenpair]:
        """The extreme eigenpairs of all operators asked for."""
        wanted = [(functools.partial(self.scaling, each.scaling), each.end) for each in self.needs.operators]
        start = torch.randn(self.products.flat.size, generator=self.generator("start"), dtype=torch.float64)
        start = start.to(self.problem.parameters_like())
        pairs = scaled_eigenpairs(self.products, wanted, start, self.tolerance)
        split = self.products.flat.to_dict
        vectors = [split(scaling() * pair.vector) for (scaling, _), pair in zip(wanted, pairs, strict=True)]
        errors = rounding_errors(self.problem, lambda batch: self.products.forms(batch, vectors), self.products.order)
        pairs = [widened(pair, error, self.tolerance) for pair, error in zip(pairs, errors, strict=True)]
        return dict(zip(self.needs.operators, pairs, strict=True))

    @cached_property
    def layer_eigenpairs(self) -> Mapping[str, Eigenpair]:
        """λ_max of every layer's block of H, from the sweep's δ where the block is Gauss–Newton."""
        few_columns = self._num_outputs() <= MOST_COLUMNS
        exact = [name for name in self.anatomy.layers if self.anatomy.exact(name) and few_columns]
        others = [name for name in self.anatomy.layers if name not in exact]
        shapes = {name: self.problem.parameters[name].shape for name in self.anatomy.layers}
        generator, like = self.generator("layers"), self.problem.parameters_like()
        start = {
            name: torch.randn(shape.numel(), generator=generator, dtype=torch.float64).to(like)
            for name, shape in shapes.items()
        }
        found: dict[str, Eigenpair] = {}
        if exact:
            if "products" in self.__dict__:
                self.products.release()  # one budget at a time: these blocks keep deltas instead of graphs
            blocks = GaussNewtonBlocks(self.problem, self.anatomy, exact)
            part = blocks.on_part if blocks.has_part() else None
            pairs = block_eigenpairs(blocks, part, shapes, {name: start[name] for name in exact}, self.tolerance)
            found |= self._widened(pairs, blocks.forms)
        if others:
            starts = {name: start[name] for name in others}
            pairs = block_eigenpairs(self._block_products, None, shapes, starts, self.tolerance)
            found |= self._widened(pairs, self._block_forms, self.products.order)
        return {name: found[name] for name in self.anatomy.layers}

    def _widened(
        self,
        pairs: Mapping[str, Eigenpair],
        forms: Callable[[Batch, Mapping[str, Tensor]], list[float]],
        order: float = 1.0,
    ) -> dict[str, Eigenpair]:
        """Eigenpairs of blocks with what rounding did in their errors."""
        vectors = {name: pair.vector.view(self.problem.parameters[name].shape) for name, pair in pairs.items()}
        errors = rounding_errors(self.problem, lambda batch: forms(batch, vectors), order)
        return {
            name: widened(pair, error, self.tolerance)
            for (name, pair), error in zip(pairs.items(), errors, strict=True)
        }

    def _block_forms(self, batch: Batch, vectors: Mapping[str, Tensor]) -> list[float]:
        return self.products.forms(batch, [{name: vector} for name, vector in vectors.items()])

    def _block_products(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        images = self.products.within([{name: vector} for name, vector in vectors.items()])
        return {name: image[name] for name, image in zip(vectors, images, strict=True)}

    def _num_outputs(self) -> int:
        if self.problem.loss_function.whole_batch:
            return 0
        with self.problem.undisturbed(), torch.no_grad():
            outputs = self.problem.outputs(self.problem.parameters, self.problem.few_samples(1))
        return int(outputs[0].numel()) if isinstance(outputs, Tensor) and outputs.dim() else 0

    def dropped_blocks(self) -> tuple[str, ...]:
        """Parameter tensors of norm zero, which have no metric."""
        return tuple(name for name, value in self.problem.parameters.items() if not bool(value.any()))


def jackknife(values: Iterable[float]) -> float:
    """Standard error of a statistic from its values with one group left out, widened for the number of groups."""
    left_out = torch.tensor(list(values), dtype=torch.float64)
    count = len(left_out)
    if count < 2:
        return 0.0
    spread = float((left_out - left_out.mean()).square().sum())
    return few_groups_factor(count) * math.sqrt((count - 1) / count * spread)


def _without(draws: list[Tensor], group: int) -> Tensor:
    """The mean with one group of draws left out, or the exact array where there is only one."""
    if len(draws) == 1:
        return draws[0]
    return mean_of([draw for index, draw in enumerate(draws) if index != group])


def _fisher_by_sample(problem: Problem, names: list[str]) -> dict[str, Tensor]:
    sums = {name: torch.zeros_like(problem.parameters[name], dtype=torch.float64) for name in names}
    with problem.undisturbed(), torch.enable_grad():
        for chunk, weight in problem.chunks():
            leaves = problem.leaves()
            for n in range(len(chunk)):
                loss = problem.chunk_loss(leaves, chunk[n : n + 1])
                parts = torch.autograd.grad(loss, [leaves[name] for name in names], allow_unused=True)
                for name, part in zip(names, parts, strict=True):
                    if part is not None:
                        sums[name].add_(part.double().square(), alpha=weight / len(chunk))
    problem.work.add(passes=1, gradients=1)
    problem.ranks.sum_(list(sums.values()))
    return sums
