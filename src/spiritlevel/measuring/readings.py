"""From evidence to values: what the measures of all papers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from spiritlevel.curvature.lanczos import Eigenpair
from spiritlevel.curvature.rounding import UNKNOWN, rounding_errors
from spiritlevel.curvature.statistics import COLUMNS, DIAGONAL, DRAWS, FISHER, ROWS, TRACE
from spiritlevel.errors import listed
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.extrapolation import Estimated, Shape, estimated, subsets_for
from spiritlevel.measuring.needs import Needs, Operator
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.statistics import NoisyStatistics, Spread, Statistics, Whole
from spiritlevel.measuring.value import Value
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.sharded import division_of

# The least that rounding leaves in an exact value, in units of the precision.
ROUNDING = 4
# The same for blocks that are made of products.
FORMED = 1024
# The share of what clipping is found to have added that may be curvature after all, or as much more noise.
OPEN = 0.2
NO_LAYERS = "no trainable parameter serves as the matrix of a linear map, so there are no layers to measure"


@dataclass(frozen=True)
class Reading:
    """What a measure reads off layer statistics: numbers without errors."""

    value: float
    layers: Mapping[str, float] = field(default_factory=dict)
    neurons: Mapping[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    doubts: Mapping[str, float] = field(default_factory=dict)  # layer → how far it may be off beyond what readings show


def from_statistics(
    read: Callable[[Statistics], Reading],
    kinds: frozenset[str],
    *,
    everything: bool = False,
    shape: Shape = "any",
    smooth: bool = False,
) -> tuple[Callable[[Measure, Evidence], Value], Callable[[Measure], Needs]]:
    """`compute` and `needs` of a measure that is a function of layer statistics.

    Its error comes from groups of probes, for any function of them; the bias that noise gives a function that is not
    linear is extrapolated from readings with fewer probes and taken off (extrapolation.py). `everything` says that the
    measure reads all parameters, not only weights of layers; `shape` how value and layers depend on the statistics;
    `smooth` that it takes off by itself what clipping adds (clipping.py), so that its bias is that of a smooth function.
    """

    def compute(measure: Measure, evidence: Evidence) -> Value:
        if not (everything or evidence.anatomy.layers):
            return unavailable(measure, NO_LAYERS)
        reading = read(evidence.statistics)
        if not math.isfinite(reading.value):
            raise OverflowError(f"{measure.name} is {reading.value}")
        relevant = frozenset(evidence.problem.parameters if everything else evidence.anatomy.layers)
        noisy = frozenset() if kinds == frozenset([FISHER]) else evidence.estimated & relevant
        exact = not noisy and (kinds == frozenset([FISHER]) or not evidence.partly_swept)
        found = _rounded(reading, [read(each) for each in evidence.shifted(kinds)], evidence)
        if noisy:
            readings = (read(_with_spread(evidence, kinds, groups)) for groups in subsets_for(shape, smooth))
            numbers = [(each.value, each.layers) for each in readings]
            without = estimated(shape, numbers, noisy, smooth)
            found = _both_errors(_in_doubt(without, reading) if smooth else without, found)
        return Value(
            name=measure.name,
            value=found.value,
            error=found.error
            + torch.finfo(evidence.problem.dtype).tiny,  # smaller values are indistinguishable from zero
            exact=exact,
            converged=found.error <= (evidence.probe_tolerance if noisy else evidence.tolerance) * abs(found.value),
            method=_method(evidence, not noisy),
            layers=found.layers,
            layer_errors=found.layer_errors,
            neurons=reading.neurons,
            details={"noise_bias": reading.value - found.value} if found.value != reading.value else {},
            notes=reading.notes,
            products=evidence.estimates.products if noisy else 0,
            error_kind="exact" if exact else "standard error",
        )

    return compute, lambda _measure: Needs(statistics=kinds)


def _with_spread(evidence: Evidence, kinds: frozenset[str], groups: Sequence[int]) -> Statistics:
    """Statistics from these groups of probes, with what they say of the noise of diagonals."""
    statistics = evidence.from_groups(kinds, groups)
    if DIAGONAL not in kinds:
        return statistics
    spread = Spread(evidence.sources, evidence.swept if evidence.anatomy.axes else None, evidence.estimates, groups)
    whole = Whole(spread, division_of(evidence.problem))
    return NoisyStatistics(**vars(statistics), spread=whole, degrees=len(groups) - 1)


def traces_in(kind: str) -> Callable[[Statistics], Reading]:
    """The trace of every layer's block in a metric, and their sum."""

    def read(statistics: Statistics) -> Reading:
        found, metrics = getattr(statistics, kind), statistics.metrics.get(kind, {})
        layers = {name: float(found[name]) if name in found else 0.0 for name in statistics.layers}
        doubts = {name: metric.doubt * abs(layers[name]) for name, metric in metrics.items()}
        notes = tuple(note for metric in metrics.values() for note in metric.notes)
        return Reading(sum(layers.values()), layers, notes=notes, doubts=doubts)

    return read


def unseen_inputs(evidence: Evidence) -> str:
    """Why nothing that asks for the inputs of every layer can be had; empty where all of them are seen."""
    hidden = [name for name, layer in evidence.anatomy.layers.items() if not layer.followed]
    if not hidden:
        return ""
    return f"layers whose inputs are not seen, because they are used in a way that is not followed: {listed(hidden)}"


def exact_value(
    measure: Measure,
    evidence: Evidence,
    value: float,
    on_batch: Callable[[Batch], list[float]],
    method: str,
    layer: str = "",
) -> Value:
    """A number that is a mean over samples and computed exactly, with what rounding may have changed; `on_batch` gives it
    for one batch. Of a single layer where that is named."""
    (error,) = rounding_errors(evidence.problem, on_batch)
    precision = torch.finfo(evidence.problem.dtype)
    error += ROUNDING * precision.eps * abs(value) + precision.tiny
    return Value(
        measure.name,
        value,
        error,
        exact=True,
        converged=error <= evidence.tolerance * abs(value),
        method=method,
        layers={layer: value} if layer else {},
        layer_errors={layer: error} if layer else {},
    )


def _rounded(reading: Reading, shifted: list[Reading], evidence: Evidence) -> Estimated:
    """An exact reading with the error that rounding and kinks leave in it."""
    relative = (ROUNDING if evidence.comparable else UNKNOWN) * torch.finfo(evidence.problem.dtype).eps
    if evidence.estimates.found:  # what is made of products is not compared with another precision
        relative += evidence.probes_relative_error + FORMED * torch.finfo(evidence.problem.dtype).eps
    error = relative * abs(reading.value) + sum(abs(other.value - reading.value) for other in shifted)
    error += sum(reading.doubts.values())
    layers = {
        name: relative * abs(value)
        + sum(abs(other.layers[name] - value) for other in shifted)
        + reading.doubts.get(name, 0.0)
        for name, value in reading.layers.items()
    }
    return Estimated(reading.value, error, reading.layers, layers)


def _in_doubt(noise: Estimated, read: Reading) -> Estimated:
    """An estimate whose error holds what is open of the noise that was taken off, value as read less value as given."""
    layers = {
        name: math.hypot(error, OPEN * (read.layers[name] - noise.layers[name]))
        for name, error in noise.layer_errors.items()
    }
    error = math.hypot(noise.error, OPEN * (read.value - noise.value))
    return replace(noise, error=error, layer_errors=layers)


def _both_errors(noise: Estimated, rounding: Estimated) -> Estimated:
    """An estimate whose error holds that of its exact part too: a maximum may lie in a layer that no probe touches."""
    layers = {name: math.hypot(noise.layer_errors.get(name, 0.0), e) for name, e in rounding.layer_errors.items()}
    return replace(noise, error=math.hypot(noise.error, rounding.error), layer_errors=layers)


def _method(evidence: Evidence, exact: bool) -> str:
    if exact:
        parts = [_sweep_method(evidence)] if evidence.anatomy.axes or not evidence.estimates.found else []
        return ", ".join([*parts, *["whole blocks by products with unit vectors"][: len(evidence.estimates.found)]])
    if evidence.anatomy.axes and evidence.swept.sampled:
        return f"sampled output columns ({DRAWS} draws of {evidence.swept.num_columns})"
    if evidence.sources.remainder:
        return "exact Gauss–Newton part, remainder by random probes"
    return "random probes of the Hessian"


def _sweep_method(evidence: Evidence) -> str:
    if not evidence.partly_swept:
        return "exact sweep"
    swept = evidence.swept
    return f"sweep of {swept.swept_columns:.2g} of {swept.num_columns} columns a sample, the rest from random samples"


def from_eigenpair(
    operator: Operator, read: Callable[[Eigenpair], float] = lambda pair: pair.value
) -> tuple[Callable[[Measure, Evidence], Value], Callable[[Measure], Needs]]:
    """`compute` and `needs` of a measure that is an extreme eigenvalue of a scaled Hessian."""

    def compute(measure: Measure, evidence: Evidence) -> Value:
        pair = evidence.eigenpairs[operator]
        return eigenvalue(measure, evidence, operator, pair, read(pair))

    return compute, lambda _measure: Needs(operators=(operator,))


def eigenvalue(
    measure: Measure,
    evidence: Evidence,
    operator: Operator,
    pair: Eigenpair,
    value: float,
    details: Mapping[str, Any] | None = None,
    method: str = "Lanczos",
) -> Value:
    """An eigenvalue with its certificate; the maximiser is the eigenvector, in the parameters' own coordinates."""
    whole = not evidence.problem.shards.divided  # a direction that no process holds whole is no witness
    direction = evidence.scaling(operator.scaling) * pair.vector if whole else None
    return Value(
        name=measure.name,
        value=value,
        error=pair.error,
        exact=False,
        converged=pair.converged,
        method=f"{'whole Hessian' if pair.whole else method}, products by {evidence.products.method}",
        witness=None if direction is None else evidence.products.flat.to_dict(direction),
        details={"residual": pair.residual, "eigenvalue": pair.value, **(details or {})},
        notes=_dropped(evidence, operator),
        products=pair.products,
        error_kind="bound",
    )


def _dropped(evidence: Evidence, operator: Operator) -> tuple[str, ...]:
    blocks = evidence.dropped_blocks() if operator.scaling == "block norms" else ()
    return (f"blocks of norm zero drop out: {listed(blocks)}",) if blocks else ()


def unavailable(measure: Measure, reason: str) -> Value:
    """A measure that is not defined on this network."""
    return Value(
        name=measure.name,
        value=float("nan"),
        error=0.0,
        exact=False,
        converged=False,
        method="not available",
        notes=(reason,),
        error_kind="none",
    )


__all__ = [
    "COLUMNS",
    "DIAGONAL",
    "FISHER",
    "NO_LAYERS",
    "ROWS",
    "TRACE",
    "Reading",
    "eigenvalue",
    "from_eigenpair",
    "from_statistics",
    "traces_in",
    "unavailable",
]
