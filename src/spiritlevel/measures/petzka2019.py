"""Petzka, Adilova, Kamp, Sminchisescu 2019, "A Reparameterization-Invariant Flatness Measure for Deep Neural Networks".

κ weighs the curvature of a layer by the size of its weights, ρ does so for the weights of one neuron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.needs import Needs
from spiritlevel.measuring.readings import COLUMNS, NO_LAYERS, ROWS, TRACE, Reading, from_statistics, unavailable
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.statistics import Statistics
from spiritlevel.measuring.value import Value

Collect = Callable[[Iterable[float]], float]


def _largest(values: Iterable[float]) -> float:
    return max(values, default=0.0)


def _kappa(collect: Collect) -> Callable[[Measure, Evidence], Value]:
    """κ^l = ‖W_l‖² λ_max(H_l) over layers."""

    def compute(measure: Measure, evidence: Evidence) -> Value:
        pairs = evidence.layer_eigenpairs
        if not pairs:
            return unavailable(measure, NO_LAYERS)
        problem = evidence.problem
        squares = {name: float(problem.parameters[name].double().square().sum()) for name in pairs}
        size = {name: problem.shards.total(square) for name, square in squares.items()}
        layers = {name: size[name] * pair.value for name, pair in pairs.items()}
        errors = {name: size[name] * pair.error for name, pair in pairs.items()}
        how = (
            "whole block of every layer" if all(pair.whole for pair in pairs.values()) else "Lanczos on layers' blocks"
        )
        return Value(
            name=measure.name,
            value=collect(layers.values()),
            error=collect(errors.values()),
            exact=False,
            converged=all(pair.converged for pair in pairs.values()),
            method=f"{how}, products {evidence.layer_method}",
            layers=layers,
            layer_errors=errors,
            products=evidence.layer_products,
            error_kind="bound",
        )

    return compute


def _kappa_trace(collect: Collect) -> Callable[[Statistics], Reading]:
    """κ_τ^l = ‖W_l‖² Tr H_l over layers."""

    def read(statistics: Statistics) -> Reading:
        layers = {
            name: float(statistics.weights[name].square().sum() * statistics.trace[name]) for name in statistics.layers
        }
        return Reading(collect(layers.values()), layers)

    return read


def _rho(kind: str, collect: Collect) -> Callable[[Statistics], Reading]:
    """ρ^l(j) = w_jᵀ H_jj w_j, collected over neurons, then over layers in the same way."""

    def read(statistics: Statistics) -> Reading:
        neurons = {name: getattr(statistics, kind)[name] for name in statistics.layers}
        layers = {name: collect(values.tolist()) for name, values in neurons.items()}
        return Reading(collect(layers.values()), layers, neurons)

    return read


def _layer_needs(_measure: Measure) -> Needs:
    return Needs(layer_eigenvalues=True)


def _measure(
    name: str,
    summary: str,
    formula: str,
    claims: set[str],
    functions: tuple[Callable[[Measure, Evidence], Value], Callable[[Measure], Needs]],
) -> Measure:
    compute, needs = functions
    return Measure(name, "petzka2019", summary, formula, frozenset(claims), compute, needs, in_shards=True)


_LAYER, _NEURON = {"layer"}, {"layer", "neuron"}

MEASURES = (
    _measure("kappa_max", "largest κ of a layer", "max_l ‖W_l‖² λ_max(H_l)", _LAYER, (_kappa(_largest), _layer_needs)),
    _measure("kappa_sum", "sum of κ over layers", "Σ_l ‖W_l‖² λ_max(H_l)", _LAYER, (_kappa(sum), _layer_needs)),
    _measure(
        "kappa_trace_max",
        "largest trace κ of a layer",
        "max_l ‖W_l‖² Tr H_l",
        _LAYER,
        from_statistics(_kappa_trace(_largest), frozenset([TRACE])),
    ),
    _measure(
        "kappa_trace_sum",
        "sum of trace κ over layers",
        "Σ_l ‖W_l‖² Tr H_l",
        _LAYER,
        from_statistics(_kappa_trace(sum), frozenset([TRACE]), shape="linear"),
    ),
    _measure(
        "rho_max",
        "largest ρ of a neuron's outgoing weights",
        "max_l max_j w_jᵀ H_jj w_j, w_j a column of W_l",
        _NEURON,
        from_statistics(_rho(COLUMNS, _largest), frozenset([COLUMNS])),
    ),
    _measure(
        "rho_sum",
        "sum of ρ over neurons' outgoing weights",
        "Σ_l Σ_j w_jᵀ H_jj w_j, w_j a column of W_l",
        _NEURON,
        from_statistics(_rho(COLUMNS, sum), frozenset([COLUMNS]), shape="linear"),
    ),
    _measure(
        "rho_row_max",
        "largest ρ of a neuron's incoming weights",
        "max_l max_j w_jᵀ H_jj w_j, w_j a row of W_l",
        _NEURON,
        from_statistics(_rho(ROWS, _largest), frozenset([ROWS])),
    ),
    _measure(
        "rho_row_sum",
        "sum of ρ over neurons' incoming weights",
        "Σ_l Σ_j w_jᵀ H_jj w_j, w_j a row of W_l",
        _NEURON,
        from_statistics(_rho(ROWS, sum), frozenset([ROWS]), shape="linear"),
    ),
)
