"""From evidence to values: what the measures of all papers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from spiritlevel.curvature.lanczos import Eigenpair
from spiritlevel.curvature.statistics import COLUMNS, DIAGONAL, DRAWS, FISHER, ROWS, TRACE
from spiritlevel.measures.evidence import Evidence, Statistics, jackknife
from spiritlevel.measures.record import Measure, Needs, Operator
from spiritlevel.result import Value
from spiritlevel.wording import listed

NO_LAYERS = "no trainable parameter serves as the matrix of a linear map, so there are no layers to measure"


@dataclass(frozen=True)
class Reading:
    """What a measure reads off layer statistics: numbers without errors."""

    value: float
    layers: Mapping[str, float] = field(default_factory=dict)
    neurons: Mapping[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def from_statistics(
    read: Callable[[Statistics], Reading], kinds: frozenset[str], *, everything: bool = False
) -> tuple[Callable[[Measure, Evidence], Value], Callable[[Measure], Needs]]:
    """`compute` and `needs` of a measure that is a function of layer statistics.

    Its error is the jackknife over groups of probes, which holds for any smooth function of them. `everything` says
    that the measure reads all parameters, not only weights of layers.
    """

    def compute(measure: Measure, evidence: Evidence) -> Value:
        if not (everything or evidence.anatomy.layers):
            return unavailable(measure, NO_LAYERS)
        reading = read(evidence.statistics)
        left_out = [read(statistics) for statistics in evidence.leaving_one_out(kinds)]
        relevant = set(evidence.problem.parameters if everything else evidence.anatomy.layers)
        exact = not (evidence.estimated & relevant) or kinds == frozenset([FISHER])
        error = 0.0 if exact else jackknife(other.value for other in left_out)
        layer_errors = {
            name: jackknife(other.layers[name] for other in left_out)
            for name in reading.layers
            if not exact and name in evidence.estimated
        }
        return Value(
            name=measure.name,
            value=reading.value,
            error=error,
            exact=exact,
            converged=exact or error <= evidence.tolerance * abs(reading.value),
            method=_method(evidence, exact),
            layers=reading.layers,
            layer_errors=layer_errors,
            neurons=reading.neurons,
            notes=reading.notes,
            products=0 if evidence.estimates is None else evidence.estimates.products,
        )

    return compute, lambda measure: Needs(statistics=kinds)


def _method(evidence: Evidence, exact: bool) -> str:
    if exact:
        return "exact sweep"
    if evidence.anatomy.axes and evidence.swept.sampled:
        return f"sampled output columns ({DRAWS} draws of {evidence.swept.num_columns})"
    if evidence.anatomy.axes:
        return "exact Gauss–Newton part, remainder by random probes"
    return "random probes of the Hessian"


def from_eigenpair(
    operator: Operator, read: Callable[[Eigenpair], float] = lambda pair: pair.value
) -> tuple[Callable[[Measure, Evidence], Value], Callable[[Measure], Needs]]:
    """`compute` and `needs` of a measure that is an extreme eigenvalue of a scaled Hessian."""

    def compute(measure: Measure, evidence: Evidence) -> Value:
        pair = evidence.eigenpairs[operator]
        return eigenvalue(measure, evidence, operator, pair, read(pair))

    return compute, lambda measure: Needs(operators=(operator,))


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
    direction = evidence.scaling(operator.scaling) * pair.vector
    return Value(
        name=measure.name,
        value=value,
        error=pair.error,
        exact=False,
        converged=pair.converged,
        method=f"{method}, products by {evidence.products.method}",
        witness=evidence.products.flat.to_dict(direction),
        details={"residual": pair.residual, **(details or {})},
        notes=_dropped(evidence, operator),
        products=pair.products,
    )


def _dropped(evidence: Evidence, operator: Operator) -> tuple[str, ...]:
    blocks = evidence.dropped_blocks() if operator.scaling == "block norms" else ()
    return (f"blocks of norm zero drop out: {listed(blocks)}",) if blocks else ()


def unavailable(measure: Measure, reason: str) -> Value:
    """A measure that is not defined on this network."""
    return Value(measure.name, float("nan"), 0.0, exact=False, converged=False, method="not available", notes=(reason,))


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
    "unavailable",
]
