"""Kwon, Kim, Park, Choi 2021, "ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of Deep Neural Networks".

The largest rise of the loss over ‖T⁻¹ε‖ ≤ ρ with T = |θ|, entry by entry, or the norm of a filter. Entry by entry it survives the
rescaling of layers and neurons; with the norms of filters that of layers only. With `m` the maximum is taken for every batch of m
samples, then averaged (Foret et al. 2021). What the released code adds to |θ|, and that it treats biases as if they had no scale,
would make it depend on the scale of the weights; neither is done here.
"""

from __future__ import annotations

import torch

from spiritlevel.curvature.ascent import Ball, Box, Region, as_parameters
from spiritlevel.measures.rangamani2019 import NODEWISE
from spiritlevel.measuring.adaptive import (
    OPTIONS,
    adaptive_scale,
    check_choices,
    largest_mean_rise,
    measured_problem,
    searched,
)
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.needs import Needs
from spiritlevel.measuring.readings import unavailable
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.value import Value

NO_LOGITS = "logits are normalized under cross entropy only"


def _region(measure: Measure, evidence: Evidence) -> Region:
    radius = float(measure.options["rho"])
    scale = adaptive_scale(evidence, str(measure.options["scale"]))
    if measure.options["norm"] == "linf":
        return Box(radius * scale)
    axes: tuple[torch.Tensor, ...] = ()
    if NODEWISE in evidence.needs.operators and _peaks(measure):
        pair = evidence.eigenpairs[NODEWISE]
        axes = (pair.vector, *pair.others)
    return Ball(scale, radius, axes)


def _peaks(measure: Measure) -> bool:
    """Whether the second-order model peaks along eigenvectors of |θ| H |θ|."""
    plain = measure.options["scale"] == "element" and measure.options["logits"] == "as they are"
    return plain and measure.options["norm"] == "l2" and not measure.options["m"]


def _worst_case(measure: Measure, evidence: Evidence) -> Value:
    problem = measured_problem(measure, evidence.problem)
    if problem is None:
        return unavailable(measure, NO_LOGITS)
    found = searched(measure, evidence, problem, _region(measure, evidence))
    if isinstance(found, str):
        return unavailable(measure, found)
    witness = as_parameters(evidence.problem, found.last.perturbation)
    return largest_mean_rise(measure, evidence, found, witness, {})


def _needs(measure: Measure) -> Needs:
    check_choices(measure)
    return Needs(operators=(NODEWISE,)) if _peaks(measure) else Needs()


MEASURES = (
    Measure(
        "adaptive_sharpness",
        "kwon2021",
        "largest rise of the loss when every weight moves in proportion to its size",
        "max_{‖T⁻¹ε‖ ≤ ρ} L(θ+ε) − L(θ),  T = |θ|",
        frozenset({"layer", "neuron"}),
        _worst_case,
        _needs,
        options={**OPTIONS, "m": 0},
        costly=True,
    ),
)
