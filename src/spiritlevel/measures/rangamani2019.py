"""Rangamani, Nguyen, Kumar, Phan, Chin, Tran 2019, "A Scale Invariant Flatness Measure for Deep Network Minima".

The metric g(η, ξ) = Σ ⟨η, ξ⟩/‖block‖² makes the Hessian of the loss a function on equivalent networks: its eigenvalues
are those of D H D with D = blockdiag(‖block‖ I).
"""

from __future__ import annotations

import torch

from spiritlevel.curvature.ascent import Ball
from spiritlevel.curvature.operators import Scaled
from spiritlevel.curvature.power import power_method
from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.needs import Needs, Operator
from spiritlevel.measuring.readings import eigenvalue, from_eigenpair, unavailable
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.sharpness import largest_rise
from spiritlevel.measuring.value import Value

RIEMANNIAN = Operator("block norms", "largest")
NODEWISE = Operator("entries", "largest")


def _spectral_norm(measure: Measure, evidence: Evidence) -> Value:
    """λ_max(D H D), by Lanczos or by the paper's Algorithm 1."""
    if measure.options["method"] == "lanczos":
        pair = evidence.eigenpairs[RIEMANNIAN]
        return eigenvalue(measure, evidence, RIEMANNIAN, pair, pair.value)
    if evidence.problem.shards.divided:
        return unavailable(measure, 'the power method is not run on a model in shards: ask for method="lanczos"')
    scale = evidence.scaling(RIEMANNIAN.scaling)
    start = torch.randn(scale.shape, generator=evidence.generator("start"), dtype=torch.float64).to(scale)
    found = power_method(
        Scaled(evidence.products, scale).image,
        start * (scale > 0),
        tolerance=evidence.tolerance,
        most_products=int(measure.options["most_products"]),
    )
    details = {"history": found.values, "changes": found.changes}
    return eigenvalue(
        measure, evidence, RIEMANNIAN, found.pair, found.pair.value, details, "power method (Algorithm 1)"
    )


def _spectral_needs(measure: Measure) -> Needs:
    method = measure.options["method"]
    if method not in ("lanczos", "power"):
        raise SpiritLevelError(f'riemannian_spectral_norm: method must be "lanczos" or "power", got {method!r}')
    return Needs(operators=(RIEMANNIAN,)) if method == "lanczos" else Needs()


def _sharpness(measure: Measure, evidence: Evidence) -> Value:
    """The largest rise over ‖ξ‖_g ≤ ε."""
    radius = float(measure.options["epsilon"])
    pair = evidence.eigenpairs[RIEMANNIAN]
    region = Ball(evidence.scaling(RIEMANNIAN.scaling), radius, (pair.vector, *pair.others))
    second_order = pair.value * radius * radius / (2 * (1 + evidence.loss))
    return largest_rise(measure, evidence, region, details={"epsilon": radius, "second_order": second_order})


_nodewise_compute, _nodewise_needs = from_eigenpair(NODEWISE)

MEASURES = (
    Measure(
        "riemannian_spectral_norm",
        "rangamani2019",
        "largest eigenvalue of the Hessian on the quotient manifold",
        "λ_max(D H D),  D = blockdiag(‖block‖ I)",
        frozenset({"layer"}),
        _spectral_norm,
        _spectral_needs,
        options={"method": "lanczos", "most_products": 1000},
        in_shards=True,
    ),
    Measure(
        "riemannian_nodewise_spectral_norm",
        "rangamani2019",
        "the same with the metric of single weights",
        "λ_max(|θ| H |θ|)",
        frozenset({"layer", "neuron"}),
        _nodewise_compute,
        _nodewise_needs,
        in_shards=True,
    ),
    Measure(
        "riemannian_sharpness",
        "rangamani2019",
        "largest rise of the loss in a ball of the invariant metric",
        "max_{‖ξ‖_g ≤ ε} (L(θ+ξ) − L(θ)) / (1 + L(θ))",
        frozenset({"layer"}),
        _sharpness,
        lambda _measure: Needs(operators=(RIEMANNIAN,)),
        options={"epsilon": 1e-3},
        costly=True,
    ),
)
