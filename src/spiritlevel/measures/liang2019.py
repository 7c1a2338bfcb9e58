"""Liang, Poggio, Rakhlin, Stokes 2019, "Fisher–Rao Metric, Geometry, and Complexity of Neural Networks"."""

from __future__ import annotations

from spiritlevel.measures.evidence import Statistics
from spiritlevel.measures.record import Measure
from spiritlevel.measures.values import FISHER, Reading, from_statistics


def _fisher_rao(statistics: Statistics) -> Reading:
    layers = {
        name: float((statistics.weights[name].square() * statistics.fisher[name]).sum()) for name in statistics.weights
    }
    return Reading(sum(layers.values()), layers)


_compute, _needs = from_statistics(_fisher_rao, frozenset([FISHER]), everything=True)

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
