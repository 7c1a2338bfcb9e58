"""Whitened flatness: the curvature of a layer for noise of the covariance that its results have themselves.

κ_w(W) = E[φᵀΣ⁺φ · Tr(C B)] with Σ = E φφᵀ over samples and positions, C = WΣWᵀ and B the Hessian of the loss in the layer's
results z = Wφ. In the weight's own block of the Hessian it is Σ C_ss' (Σ⁺)_jj' H_sj,s'j', which is also what it means where a
weight is used at several positions: the noise W → W + WΣ^½ZΣ^+½ is then the same at all of them. A change of basis that the
network absorbs on either side, W → AWB⁻¹ with φ → Bφ, leaves it alone: that of layers, neurons, gains of a normalization, heads
of attention, the residual stream and the inputs.
"""

from __future__ import annotations

from spiritlevel.curvature.metric_krylov import InMetric, metric_block_eigenpairs, metric_eigenpair
from spiritlevel.curvature.metrics import MOST_INPUTS, WHITENED
from spiritlevel.curvature.rounding import rounding_errors, widened
from spiritlevel.curvature.whitening import inputs_of
from spiritlevel.errors import listed
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.needs import Needs
from spiritlevel.measuring.readings import NO_LAYERS, from_statistics, traces_in, unavailable, unseen_inputs
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.value import Value

SURVIVES = frozenset({"layer", "neuron", "linear", "rotation", "input map"})


_read, _needs = from_statistics(traces_in(WHITENED), frozenset([WHITENED]), shape="linear")


def without_moments(evidence: Evidence) -> str:
    """Why Σ cannot be had for this network; empty where it can."""
    if reason := unseen_inputs(evidence):
        return reason
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
    reason = without_moments(evidence)
    return unavailable(measure, reason) if reason else _read(measure, evidence)


def _largest(measure: Measure, evidence: Evidence) -> Value:
    """λ_max of the Hessian in the metric, of all layers together and of each."""
    if not evidence.anatomy.layers:
        return unavailable(measure, NO_LAYERS)
    reason = without_moments(evidence)
    if reason:
        return unavailable(measure, reason)
    products, metrics = evidence.products, evidence.metrics[WHITENED]
    space = InMetric(metrics, evidence.problem.parameters_like())
    before = evidence.problem.work.products
    start = space.start(evidence.generator("whitened"))
    whole = metric_eigenpair(products, space, start, evidence.tolerance)
    blocks = metric_block_eigenpairs(products, space, start, evidence.tolerance)
    witness = space.directions(space.split(whole.vector))
    directions = space.directions({name: pair.vector for name, pair in blocks.items()})
    vectors = [witness, *({name: direction} for name, direction in directions.items())]
    rounding = rounding_errors(evidence.problem, lambda batch: products.forms(batch, vectors), products.order)
    relative = products.relative_error
    doubt = max((metric.doubt for metric in metrics.values()), default=0.0)
    found = widened(whole, rounding[0] + (relative + doubt) * abs(whole.value), evidence.tolerance)
    layers = {
        name: widened(pair, extra + (relative + metrics[name].doubt) * abs(pair.value), evidence.tolerance)
        for (name, pair), extra in zip(blocks.items(), rounding[1:], strict=True)
    }
    return Value(
        measure.name,
        found.value,
        found.error,
        exact=False,
        converged=found.converged,
        method=f"Lanczos in the metric, products by {products.method}",
        layers={name: pair.value for name, pair in layers.items()},
        layer_errors={name: pair.error for name, pair in layers.items()},
        witness=witness,
        details={"residual": found.residual},
        notes=tuple(note for metric in metrics.values() for note in metric.notes),
        products=round(evidence.problem.work.products - before),
        error_kind="bound",
    )


def _largest_needs(_measure: Measure) -> Needs:
    return Needs(metrics=frozenset([WHITENED]))


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
    Measure(
        "whitened_flatness_max",
        "spiritlevel2026",
        "largest eigenvalue of the Hessian in the metric of whitened flatness",
        "λ_max(Sᵀ H S),  S Z = C^½ Z Σ^+½ in every layer",
        SURVIVES,
        _largest,
        _largest_needs,
        costly=True,
    ),
)
