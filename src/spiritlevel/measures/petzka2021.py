"""Petzka, Kamp, Adilova, Sminchisescu, Boley 2021, "Relative Flatness and Generalization".

κ_Tr(W) = Σ_ss' ⟨w_s, w_s'⟩ Tr H_ss' over pairs of rows of a layer, the same as E ‖φ‖² Tr(WᵀBW) with B the Hessian of the loss in the
layer's results. It sees the scale of single features; features divided by their standard deviation first do not.
"""

from __future__ import annotations

from spiritlevel.curvature.last_layer import last_layer_flatness, last_layer_flatness_of
from spiritlevel.curvature.metrics import NORMALIZED, RELATIVE
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.readings import exact_value, from_statistics, traces_in, unavailable, unseen_inputs
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.value import Value
from spiritlevel.problem.batches import Batch

NOT_LOGITS = (
    "it has a closed form where the outputs are those of a dense layer and the loss is cross entropy; relative_flatness has "
    "the last layer among its layers"
)


def _last(measure: Measure, evidence: Evidence) -> Value:
    """E ‖φ‖² Var_p(w_s) of the last layer."""
    problem = evidence.problem
    found = last_layer_flatness(problem)
    if found is None:
        return unavailable(measure, NOT_LOGITS)
    name, value = found

    def on_batch(batch: Batch) -> list[float]:
        again = last_layer_flatness_of(problem, batch)
        return [0.0 if again is None else again[1]]

    return exact_value(measure, evidence, value, on_batch, "closed form of the last layer, one forward pass", name)


_relative, _relative_needs = from_statistics(traces_in(RELATIVE), frozenset([RELATIVE]), shape="linear")
_read_normalized, _normalized_needs = from_statistics(traces_in(NORMALIZED), frozenset([NORMALIZED]), shape="linear")


def _normalized(measure: Measure, evidence: Evidence) -> Value:
    reason = unseen_inputs(evidence)
    return unavailable(measure, reason) if reason else _read_normalized(measure, evidence)


MEASURES = (
    Measure(
        "relative_flatness",
        "petzka2021",
        "curvature between all pairs of rows, weighted by their inner products",
        "Σ_l Σ_ss' ⟨w_s, w_s'⟩ Tr H_ss'",
        frozenset({"layer"}),
        _relative,
        _relative_needs,
        costly=True,
    ),
    Measure(
        "relative_flatness_normalized",
        "petzka2021",
        "the same for features divided by their standard deviations",
        "Σ_l Σ_ss' ⟨w_s, w_s'⟩ Tr H_ss' with W → W diag(σ), φ → φ/σ, σ_i = std φ_i",
        frozenset({"layer", "neuron"}),
        _normalized,
        _normalized_needs,
        costly=True,
    ),
    Measure(
        "relative_flatness_last",
        "petzka2021",
        "relative flatness of the last layer under cross entropy, in closed form",
        "E ‖φ‖² (Σ_s p_s ‖w_s‖² − ‖Σ_s p_s w_s‖²)",
        frozenset({"layer"}),
        _last,
        costly=True,
    ),
)
