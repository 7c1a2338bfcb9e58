"""Whitened flatness: the curvature of a layer for noise of the covariance that its results have themselves.

κ_w(W) = E[φᵀΣ⁺φ · Tr(C B)] with Σ = E φφᵀ over samples and positions, C = WΣWᵀ and B the Hessian of the loss in the layer's
results z = Wφ. In the weight's own block of the Hessian it is Σ C_ss' (Σ⁺)_jj' H_sj,s'j', which is also what it means where a
weight is used at several positions: the noise W → W + WΣ^½ZΣ^+½ is then the same at all of them. A change of basis that the
network absorbs on either side, W → AWB⁻¹ with φ → Bφ, leaves it alone: that of layers, neurons, gains of a normalization, heads
of attention, the residual stream and the inputs.
"""

from __future__ import annotations

from spiritlevel.curvature.metrics import MOST_INPUTS, WHITENED
from spiritlevel.curvature.whitening import inputs_of
from spiritlevel.errors import listed
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.readings import from_statistics, traces_in, unavailable
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.value import Value

SURVIVES = frozenset({"layer", "neuron", "linear", "rotation", "input map"})


_read, _needs = from_statistics(traces_in(WHITENED), frozenset([WHITENED]), shape="linear")


def too_wide(evidence: Evidence) -> str:
    """Why Σ cannot be had for this network; empty where it can."""
    shapes = {name: evidence.problem.parameters[name].shape for name in evidence.anatomy.layers}
    wide = [name for name, metric in evidence.metrics[WHITENED].items() if metric.kind == "lookup"]
    wide = [
        name
        for name, layer in evidence.anatomy.layers.items()
        if name not in wide and inputs_of(layer, shapes[name]) > MOST_INPUTS
    ]
    if not wide:
        return ""
    return f"layers with more than {MOST_INPUTS} inputs, whose second moments cannot be inverted: {listed(wide)}"


def _compute(measure: Measure, evidence: Evidence) -> Value:
    reason = too_wide(evidence)
    return unavailable(measure, reason) if reason else _read(measure, evidence)


MEASURES = (
    Measure(
        "whitened_flatness",
        "spiritlevel2026",
        "rise of the loss when a layer's results receive noise of their own covariance",
        "Σ_l E[φᵀΣ⁺φ · Tr(C B)],  Σ = E φφᵀ, C = WΣWᵀ, B = ∂²ℓ/∂z², z = Wφ",
        SURVIVES,
        _compute,
        _needs,
        costly=True,
    ),
)
