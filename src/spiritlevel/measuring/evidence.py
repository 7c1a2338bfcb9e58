"""Evidence: what the engine found out about a problem, gathered once for all measures of a call."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from spiritlevel.curvature.anatomy import Anatomy
from spiritlevel.curvature.blocks import GaussNewtonBlocks
from spiritlevel.curvature.columns import sweep_batch, sweep_within
from spiritlevel.curvature.estimate import Estimates, merged, probe
from spiritlevel.curvature.examine import examine
from spiritlevel.curvature.fisher import fisher_by_sample, fisher_of_batch
from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.curvature.krylov import block_eigenpairs, scaled_eigenpairs
from spiritlevel.curvature.lanczos import Eigenpair
from spiritlevel.curvature.metrics import METRICS, Metrics
from spiritlevel.curvature.operators import scaling
from spiritlevel.curvature.rounding import array_shifts, rounding_errors, widened
from spiritlevel.curvature.statistics import (
    DIAGONAL,
    FISHER,
    GROUPS,
    MOST_COLUMNS,
    STATISTICS,
    TRACE,
    Sweep,
)
from spiritlevel.curvature.sums import BY_ENTRY
from spiritlevel.curvature.ways import remainder_objective
from spiritlevel.curvature.whitening import layer_metrics
from spiritlevel.measuring.needs import Needs, Operator
from spiritlevel.measuring.starts import Starts
from spiritlevel.measuring.statistics import Arrays, InDouble, Sources, Statistics, Whole, combined, plus, sources_of
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.problem import Problem
from spiritlevel.problem.sharded import division_of
from spiritlevel.problem.survey import slope_norms


@dataclass
class Gathered:
    """What has been found out so far; None for what was not asked for yet."""

    anatomy: Anatomy | None = None
    products: HessianProducts | None = None
    swept: Sweep | None = None
    estimates: Estimates | None = None
    slow_fisher: dict[str, Tensor] | None = None
    loss: float | None = None
    slope: tuple[float, float] | None = None


class Evidence:
    """Everything measures may ask for. Nothing is computed that no measure needs, and nothing twice."""

    def __init__(
        self,
        problem: Problem,
        needs: Needs,
        *,
        tolerance: float,
        seed: int,
        most_probes: int,
        probe_tolerance: float | None = None,
        starts: Starts | None = None,
    ) -> None:
        self.problem, self.needs, self.tolerance = problem, needs, tolerance
        self.probe_tolerance = tolerance if probe_tolerance is None else probe_tolerance
        self.starts = Starts() if starts is None else starts
        self._seed, self.most_probes = int(seed), most_probes  # an integer of NumPy would overflow below
        self.gathered = Gathered()
        self.layer_products, self.layer_method = 0, ""

    def generator(self, purpose: str) -> torch.Generator:
        """A stream of random numbers of its own for every purpose, so that no result depends on what else was asked."""
        digest = hashlib.blake2b(f"{self._seed} {purpose}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)

    def own_generator(self, purpose: str) -> torch.Generator:
        """The same for vectors over the parameters, which several processes may hold in parts."""
        return self.problem.shards.own(self.generator(purpose))

    @property
    def anatomy(self) -> Anatomy:
        if self.gathered.anatomy is None:
            self.gathered.anatomy = examine(self.problem)
        return self.gathered.anatomy

    @property
    def products(self) -> HessianProducts:
        if self.gathered.products is None:
            self.gathered.products = HessianProducts(self.problem)
        return self.gathered.products

    @property
    def loss(self) -> float:
        """L(θ), taken from work that has been done anyway where there is some."""
        if self.gathered.loss is None:
            known = self.known_loss()
            self.gathered.loss = self.problem.loss() if math.isnan(known) else known
        return self.gathered.loss

    def known_loss(self) -> float:
        """L(θ) if some work has brought it, else NaN."""
        gathered = self.gathered
        swept = None if gathered.swept is None else gathered.swept.loss
        product = None if gathered.products is None else gathered.products.loss
        surveyed = None if self.problem.surveyed is None else self.problem.surveyed.loss
        return next((loss for loss in (gathered.loss, swept, product, surveyed) if loss is not None), math.nan)

    def known_slope(self) -> tuple[float, float] | None:
        """‖∇L‖, and ‖D∇L‖ with D the norms of the blocks, if some work has brought them."""
        surveyed, products = self.problem.surveyed, self.gathered.products
        if surveyed is not None and surveyed.slope is not None:
            return surveyed.slope
        if self.gathered.slope is None and products is not None and products.gradient is not None:
            self._keep_slope(products.flat.to_dict(products.gradient))
        return self.gathered.slope

    def find_slope(self) -> None:
        """Take the gradient where a survey left it to products, and these did not bring it."""
        if self.problem.surveyed is not None and self.known_slope() is None:
            self._keep_slope(self.problem.gradient()[1])

    def _keep_slope(self, gradient: Mapping[str, Tensor]) -> None:
        self.gathered.slope = slope_norms(gradient, self.problem.parameters, self.problem.shards)

    def shrink(self) -> bool:
        """Halve the chunks and let go of what is kept between passes; False where a chunk cannot be halved."""
        if self.problem.whole or self.problem.chunk_size == 1:
            return False
        self.problem.chunk_size = max(1, self.problem.chunk_size // 2)
        self.known_slope()  # keeps what the products have brought
        self.gathered.products = None
        return True

    # --- statistics ----------------------------------------------------------------------------------------------

    @property
    def swept(self) -> Sweep:
        if self.gathered.swept is None:
            generator = self.generator("columns")
            self.gathered.swept = sweep_within(self.problem, self._in_metrics, self._kinds, generator, self.tolerance)
        return self.gathered.swept

    @cached_property
    def metrics(self) -> Metrics:
        """The metrics that statistics are asked for in, from forward passes."""
        kinds, layers = self.needs.statistics | self.needs.metrics, self.anatomy.layers
        turning = frozenset(layers if self.needs.metrics else self.bent)
        return layer_metrics(self.problem, layers, kinds, turning, self.generator)

    @property
    def _in_metrics(self) -> Anatomy:
        return replace(self.anatomy, metrics=self.metrics)

    @cached_property
    def _kinds(self) -> frozenset[str]:
        """The statistics to sweep and to probe: a trace costs a sweep less than a diagonal, but probes give diagonals."""
        wanted = self.needs.statistics
        if TRACE in wanted and (DIAGONAL in wanted or self.bent):
            return wanted - {TRACE} | {DIAGONAL}
        return wanted

    @cached_property
    def statistics(self) -> Statistics:
        """The best values: exact parts plus the mean of what was estimated."""
        return self.from_groups(self._kinds | self.needs.statistics, range(GROUPS))

    def from_groups(self, kinds: frozenset[str], groups: Sequence[int]) -> Statistics:
        """Statistics of these kinds, what is estimated from these groups of probes and draws only.

        They are made anew at every call: each may be as large as the model.
        """
        if TRACE in kinds and DIAGONAL in self._kinds:
            kinds = kinds | {DIAGONAL}
        swept = self.swept if self.anatomy.axes else None
        arrays = combined(kinds, self.sources, swept, self.estimates, groups)
        if FISHER in kinds and self.sees_samples:
            arrays[FISHER] |= self._slow_fisher()
        parameters, division = self.problem.parameters, division_of(self.problem)
        for kind in kinds.intersection(BY_ENTRY):
            for name, value in parameters.items():  # a parameter without effect on the outputs has a block of zeros
                if name not in arrays[kind]:
                    arrays[kind][name] = division.zeros(name, value)
        if DIAGONAL in kinds:
            arrays[TRACE] = division.sums(arrays[DIAGONAL])
        for name in parameters:
            arrays[TRACE].setdefault(name, torch.zeros((), dtype=torch.float64))
        whole = {kind: Whole(each, division) if kind in BY_ENTRY else each for kind, each in arrays.items()}
        return Statistics(self.anatomy.layers, self._weights, metrics=self.metrics, starts={}, **whole)

    def shifted(self, kinds: frozenset[str]) -> Iterator[Statistics]:
        """The same statistics with what rounding and kinks may have changed, one possible change after the other, and
        without what was left to chance."""
        spread = self._spread if DIAGONAL in kinds else []
        for shift in (*(self._shifts or []), *self._left, *spread):
            arrays = {kind: self._changed(kind, shift[kind]) if kind in kinds | {TRACE} else {} for kind in STATISTICS}
            if DIAGONAL in self._kinds:
                arrays[TRACE] = plus(self.statistics.trace, division_of(self.problem).sums(shift[DIAGONAL]))
            layers, weights, starts = self.statistics.layers, self.statistics.weights, self.statistics.starts
            yield Statistics(layers, weights, metrics=self.metrics, starts=starts, **arrays)

    def _changed(self, kind: str, changes: Arrays) -> Arrays:
        found = getattr(self.statistics, kind)
        return found.plus(changes) if isinstance(found, Whole) else plus(found, changes)

    @property
    def probes_relative_error(self) -> float:
        """What differences of gradients leave in probed blocks, where products are made of them."""
        return self.products.relative_error if self.sources.whole else 0.0

    @property
    def comparable(self) -> bool:
        """Whether the network runs in another precision, so that what rounding does can be seen."""
        return self._shifts is not None

    @cached_property
    def _shifts(self) -> list[dict[str, dict[str, Tensor]]] | None:
        formed = self.estimates.rounding_of_formed(torch.finfo(self.problem.dtype).eps)
        swept = bool(self.anatomy.axes) and not self.swept.sampled
        alone = (
            not self.problem.whole and self.problem.shards.size == 1
        )  # shifts of a divided model would be parts of arrays
        slow = self._not_swept if FISHER in self._kinds and self.sees_samples and alone else []
        if not swept and not slow:
            return formed

        division = division_of(self.problem)

        def compute(batch: Batch) -> dict[str, dict[str, Tensor]]:
            arrays: dict[str, dict[str, Tensor]] = {kind: {} for kind in STATISTICS}
            if swept:
                arrays |= sweep_batch(self.problem, self._in_metrics, self._kinds, batch)
            if slow:  # what is compared and kept of it is this process's part, as of what is swept
                found = fisher_of_batch(self.problem, slow, batch)
                arrays[FISHER] |= {name: division.part(name, found.pop(name)) for name in slow}
            return arrays

        seen = array_shifts(self.problem, compute)
        return seen if seen is None else [*seen, *formed]

    @property
    def _left(self) -> list[Mapping[str, Mapping[str, Tensor]]]:
        """What the sweep estimated from one random draw, as a change that takes it away again."""
        return [self.swept.left] if self.anatomy.axes and self.swept.left is not None else []

    @property
    def _spread(self) -> Iterator[Mapping[str, Mapping[str, Tensor]]]:
        """The same, spread evenly over the entries of a diagonal: under a root, an entry of which nothing was drawn counts most."""
        for left in self._left:
            even = {name: torch.full_like(part, -float(part.mean())) for name, part in left[DIAGONAL].items()}
            yield {kind: even if kind == DIAGONAL else {} for kind in STATISTICS}

    @property
    def partly_swept(self) -> bool:
        """Whether the sweep left something small to chance."""
        return bool(self._left)

    @property
    def _weights(self) -> Arrays:
        return Whole(InDouble(self.problem.parameters), self.problem.shards)

    @cached_property
    def sees_samples(self) -> bool:
        """Whether the loss of a single sample is available; a loss of the form (model, batch) gives means over batches."""
        return not self.problem.whole or self.problem.data.pieces(divide=False) == self.problem.samples

    @property
    def bent(self) -> list[str]:
        """The parameters whose blocks of H are more than their Gauss–Newton part, or not swept at all."""
        return [name for name in self.problem.parameters if not self.anatomy.exact(name)]

    @cached_property
    def sources(self) -> Sources:
        """Which part of every parameter's statistics comes from where."""
        return sources_of(list(self.problem.parameters), self.anatomy, lambda: self.products.method == "kept graph")

    @property
    def estimated(self) -> frozenset[str]:
        """The parameters whose statistics are not exact."""
        if not self.needs.statistics - {FISHER}:
            return frozenset()
        sampled = self.sources.swept if self.anatomy.axes and self.swept.sampled else frozenset()
        return self.estimates.inexact() | sampled

    @property
    def estimates(self) -> Estimates:
        """What probes say, found once, of every block that is more than its Gauss–Newton part."""
        if self.gathered.estimates is None:
            self.gathered.estimates = self._probe(self._kinds - {FISHER})
        return self.gathered.estimates

    def _probe(self, kinds: frozenset[str]) -> Estimates:
        if not (self.bent and kinds):
            return Estimates()
        parts = []
        if self.sources.remainder:
            rest = HessianProducts(self.problem, objective=remainder_objective, method="kept graph")
            known = {kind: {name: draws[0] for name, draws in self.swept.found[kind].items()} for kind in kinds}
            parts.append(self._probed(rest, self.sources.remainder, kinds, known))
        if self.sources.whole:
            parts.append(self._probed(self.products, self.sources.whole, kinds, {}))
        return merged(parts)

    def _probed(
        self, products: HessianProducts, names: Sequence[str], kinds: frozenset[str], known: Mapping[str, Arrays]
    ) -> Estimates:
        """Each metric with random numbers of its own: what else is asked for must not change what a symmetry leaves alone."""
        plain = kinds.difference(METRICS)
        families = [(plain, "probes")] if plain else []
        families += [(frozenset([kind]), f"probes {kind}") for kind in METRICS if kind in kinds]
        one = functools.partial(probe, products, self.anatomy.layers, names, known=known, metrics=self.metrics)
        one = functools.partial(one, tolerance=self.probe_tolerance, most_probes=self.most_probes)
        return merged(one(wanted=family, generator=self.generator(purpose)) for family, purpose in families)

    def _slow_fisher(self) -> dict[str, Tensor]:
        """Parameters the sweep cannot read sample by sample: one gradient a sample, for these only."""
        if self.gathered.slow_fisher is None:
            missing = self._not_swept
            self.gathered.slow_fisher = fisher_by_sample(self.problem, missing) if missing else {}
        return self.gathered.slow_fisher

    @property
    def _not_swept(self) -> list[str]:
        return [name for name in self.problem.parameters if name not in self.anatomy.axes]

    # --- eigenvalues ---------------------------------------------------------------------------------------------

    def scaling(self, name: str) -> Tensor:
        """The diagonal of S as a flat vector."""
        for each in self.needs.operators:
            if each.scaling == name and each.diagonal is not None:
                return each.diagonal(self.problem)
        return scaling(self.problem.parameters, name, self.problem.shards)

    @cached_property
    def eigenpairs(self) -> Mapping[Operator, Eigenpair]:
        """The extreme eigenpairs of all operators asked for."""
        wanted = [(functools.partial(self.scaling, each.scaling), each.end) for each in self.needs.operators]
        start = torch.randn(self.products.flat.size, generator=self.own_generator("start"), dtype=torch.float64)
        start = start.to(self.problem.parameters_like())
        warm = [self.starts.of(each, start.numel()) for each in self.needs.operators]
        pairs = scaled_eigenpairs(self.products, wanted, start, self.tolerance, warm)
        self.starts.keep(zip(self.needs.operators, pairs, strict=True))
        split = self.products.flat.to_dict
        vectors = [split(scale() * pair.vector) for (scale, _), pair in zip(wanted, pairs, strict=True)]
        errors = rounding_errors(self.problem, lambda batch: self.products.forms(batch, vectors), self.products.order)
        relative, steps = (
            self.products.relative_error,
            self.products.step_errors(vectors, [pair.value for pair in pairs]),
        )
        pairs = [
            widened(pair, error + step + relative * abs(pair.value), self.tolerance)
            for pair, error, step in zip(pairs, errors, steps, strict=True)
        ]
        return dict(zip(self.needs.operators, pairs, strict=True))

    @cached_property
    def layer_eigenpairs(self) -> Mapping[str, Eigenpair]:
        """λ_max of every layer's block of H, from the sweep's δ where the block is Gauss–Newton.

        `layer_products` and `layer_method` say what it cost and how the products were made. No preflight is run where
        every block is Gauss–Newton.
        """
        few_columns = self._num_outputs() <= MOST_COLUMNS
        exact = [name for name in self.anatomy.layers if self.anatomy.exact(name) and few_columns]
        others = [name for name in self.anatomy.layers if name not in exact]
        shapes = {name: self.problem.parameters[name].shape for name in self.anatomy.layers}
        generator, like = self.own_generator("layers"), self.problem.parameters_like()
        start = {
            name: torch.randn(shape.numel(), generator=generator, dtype=torch.float64).to(like)
            for name, shape in shapes.items()
        }
        found: dict[str, Eigenpair] = {}
        made = ["from kept derivatives of the layers' outputs"] if exact else []
        made += [f"by {self.products.method}"] if others else []
        before = self.problem.work.products
        if exact:
            if self.gathered.products is not None:
                self.gathered.products.release()  # one budget at a time: these blocks keep deltas instead of graphs
            blocks = GaussNewtonBlocks(self.problem, self.anatomy, exact, tolerance=self.tolerance)
            part = blocks.on_part if blocks.has_part() else None
            starts, warm = {name: start[name] for name in exact}, self._warm(exact)
            search = functools.partial(block_eigenpairs, blocks, part, shapes, starts)
            search = functools.partial(search, other_part=blocks.on_other_part, heavy=blocks.heavy_first)
            search = functools.partial(search, wider_part=blocks.on_wider_part if blocks.is_wider else None)
            pairs = search(self.tolerance, warm, cheap=self.problem.small)
            found |= self._widened(pairs, blocks.forms, more=blocks.left_out(self.generator("left out")))
        if others:
            starts, warm = {name: start[name] for name in others}, self._warm(others)
            self.products.expect_many()
            search = functools.partial(block_eigenpairs, self._block_products, None, shapes, starts)
            pairs = search(self.tolerance, warm, self.problem.shards, cheap=self.products.cheap)
            vectors = [{name: pair.vector.view(shapes[name])} for name, pair in pairs.items()]
            values = [pair.value for pair in pairs.values()]
            steps = dict(zip(pairs, self.products.step_errors(vectors, values), strict=True))
            found |= self._widened(pairs, self._block_forms, self.products.order, self.products.relative_error, steps)
        self.starts.keep(found.items())
        self.layer_products, self.layer_method = math.ceil(self.problem.work.products - before), " and ".join(made)
        return {name: found[name] for name in self.anatomy.layers}

    def _warm(self, names: Sequence[str]) -> dict[str, Tensor]:
        return self.starts.of_blocks({name: self.problem.parameters[name].numel() for name in names})

    def _widened(
        self,
        pairs: Mapping[str, Eigenpair],
        forms: Callable[[Batch, Mapping[str, Tensor]], list[float]],
        order: float = 1.0,
        relative: float = 0.0,
        more: Mapping[str, float] | None = None,
    ) -> dict[str, Eigenpair]:
        """Eigenpairs of blocks whose errors hold what rounding did, and for each block what else is named in `more`."""
        vectors = {name: pair.vector.view(self.problem.parameters[name].shape) for name, pair in pairs.items()}
        errors = rounding_errors(self.problem, lambda batch: forms(batch, vectors), order)
        return {
            name: widened(pair, error + relative * abs(pair.value) + (more or {}).get(name, 0.0), self.tolerance)
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
        moves = self.problem.shards.any
        return tuple(name for name, value in self.problem.parameters.items() if not moves(bool(value.any())))
