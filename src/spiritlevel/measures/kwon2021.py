"""Kwon, Kim, Park, Choi 2021, "ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of Deep Neural Networks".

The largest rise of the loss over ‖T⁻¹ε‖ ≤ ρ with T = |θ|, entry by entry, or the norm of a filter. Entry by entry it survives the
rescaling of layers and neurons; with the norms of filters that of layers only. With `m` the maximum is taken for every batch of m
samples, then averaged (Foret et al. 2021). What the released code adds to |θ|, and that it treats biases as if they had no scale,
would make it depend on the scale of the weights; neither is done here.
"""

from __future__ import annotations

import math

import torch

from spiritlevel.curvature.ascent import Ball, Box, Maximum, Region, Slopes, as_parameters, maximize
from spiritlevel.measures.rangamani2019 import NODEWISE
from spiritlevel.measuring.adaptive import OPTIONS, adaptive_scale, batches_of, check_choices, measured_problem
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
    region, size = _region(measure, evidence), int(measure.options["m"])
    before = problem.work.gradients
    if size and problem.whole:
        return unavailable(measure, "a loss that calls the model itself keeps its own batches: leave m out")
    parts: list[tuple[Slopes, float]] = [(problem, 1.0)]
    if size:
        parts = [(each, each.weight) for each in batches_of(problem, size)]
    value, settled = 0.0, True
    found = Maximum(0.0, torch.zeros(0), True)
    for index, (part, weight) in enumerate(parts):
        generator = evidence.generator(f"{measure.name} {index}" if size else measure.name)
        found = maximize(part, region, tolerance=evidence.tolerance, generator=generator)
        if not math.isfinite(found.loss):
            return unavailable(
                measure, f"the loss is {found.loss} within rho={measure.options['rho']}: ask for a smaller rho"
            )
        value += weight * (found.loss - part.loss())
        settled = settled and found.settled
    gradients = problem.work.gradients - before
    value = problem.ranks.total(value) if size else value
    return Value(
        measure.name,
        value,
        evidence.tolerance * value,
        exact=False,
        converged=settled,
        method=f"largest value found by ascent ({gradients:.0f} gradients), a lower bound",
        witness=None if size else as_parameters(evidence.problem, found.perturbation),
        details={"rho": float(measure.options["rho"]), **({"m": size, "batches": len(parts)} if size else {})},
        error_kind="lower bound",
    )


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
