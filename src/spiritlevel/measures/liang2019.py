"""Liang, Poggio, Rakhlin, Stokes 2019, "Fisher–Rao Metric, Geometry, and Complexity of Neural Networks".

The paper's norm is the quadratic form θᵀI(θ)θ = E(θ·∇ℓ)² with the empirical Fisher matrix I: `fisher_rao_full`. It is a number of the
function's own slope along θ, which no linear symmetry changes. `fisher_rao_norm` takes the diagonal of I only, as Tsuzuku,
Sato and Sugiyama do in their comparison; it survives rescalings, but not a change of basis in a head of attention.
"""

from __future__ import annotations

from spiritlevel.curvature.fisher import fisher_form, fisher_form_of
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.readings import FISHER, Reading, exact_value, from_statistics, unavailable
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.statistics import Statistics
from spiritlevel.measuring.value import Value


def _fisher_rao(statistics: Statistics) -> Reading:
    layers = {
        name: float((statistics.weights[name].square() * statistics.fisher[name]).sum()) for name in statistics.weights
    }
    return Reading(sum(layers.values()), layers)


NO_SAMPLES = (
    "it needs the gradient of every sample, and a loss of the form (model, batch) gives only means over batches: pass "
    "batches of one sample, or a loss of the form (outputs, targets)"
)

_read, _needs = from_statistics(_fisher_rao, frozenset([FISHER]), everything=True)


def _compute(measure: Measure, evidence: Evidence) -> Value:
    return _read(measure, evidence) if evidence.sees_samples else unavailable(measure, NO_SAMPLES)


def _full(measure: Measure, evidence: Evidence) -> Value:
    """(1/N) Σ_n (θ·∇ℓ_n)²."""
    if not evidence.sees_samples:
        return unavailable(measure, NO_SAMPLES)
    problem = evidence.problem
    problem.check_derivatives()
    method = "derivatives of every sample's loss along θ"
    return exact_value(measure, evidence, fisher_form(problem), lambda batch: [fisher_form_of(problem, batch)], method)


MEASURES = (
    Measure(
        "fisher_rao_norm",
        "liang2019",
        "squared weights times squared per-sample gradients",
        "Σ_i θ_i² · (1/N) Σ_n (∂ℓ_n/∂θ_i)²",
        frozenset({"layer", "neuron"}),
        _compute,
        _needs,
        in_shards=True,
    ),
    Measure(
        "fisher_rao_full",
        "liang2019",
        "squared slope of every sample's loss along the weights themselves",
        "θᵀ I(θ) θ = (1/N) Σ_n (θ·∇ℓ_n)²",
        frozenset({"layer", "neuron", "linear", "rotation"}),
        _full,
        costly=True,
    ),
)
