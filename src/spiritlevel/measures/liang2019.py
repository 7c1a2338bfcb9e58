"""Liang, Poggio, Rakhlin, Stokes 2019, "Fisher–Rao Metric, Geometry, and Complexity of Neural Networks"."""

from __future__ import annotations

from spiritlevel.measuring.evidence import Evidence, Statistics
from spiritlevel.measuring.readings import FISHER, Reading, from_statistics, unavailable
from spiritlevel.measuring.record import Measure
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


MEASURES = (
    Measure(
        "fisher_rao_norm",
        "liang2019",
        "squared weights times squared per-sample gradients",
        "Σ_i θ_i² · (1/N) Σ_n (∂ℓ_n/∂θ_i)²",
        frozenset({"layer", "neuron"}),
        _compute,
        _needs,
    ),
)
