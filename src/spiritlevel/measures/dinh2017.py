"""Dinh, Pascanu, Bengio, Bengio 2017, "Sharp Minima Can Generalize For Deep Nets": the plain measures it breaks."""

from __future__ import annotations

import torch
from torch import Tensor

from spiritlevel.curvature.ascent import Ball
from spiritlevel.errors import TracingError
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.needs import Needs, Operator
from spiritlevel.measuring.readings import TRACE, Reading, from_eigenpair, from_statistics, unavailable
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.sharpness import largest_rise
from spiritlevel.measuring.statistics import Statistics
from spiritlevel.measuring.value import Value
from spiritlevel.problem.contract import Parameters
from spiritlevel.problem.problem import Problem
from spiritlevel.symmetry import Rescaling, Symmetries
from spiritlevel.symmetry.discover import symmetries_of

PLAIN = Operator("identity", "magnitude")


def _trace(statistics: Statistics) -> Reading:
    layers = {name: float(statistics.trace[name]) for name in statistics.weights}
    return Reading(sum(layers.values()), layers)


def _epsilon_sharpness(measure: Measure, evidence: Evidence) -> Value:
    """The largest rise over ‖θ'−θ‖ ≤ ε."""
    radius = float(measure.options["epsilon"])
    pair = evidence.eigenpairs[PLAIN]
    region = Ball(evidence.scaling("identity"), radius, (pair.vector, *pair.others))
    second_order = abs(pair.value) * radius * radius / (2 * (1 + evidence.loss))
    return largest_rise(measure, evidence, region, details={"epsilon": radius, "second_order": second_order})


# --- volume flatness: Theorem 2 ----------------------------------------------------------------------------------


def _volume_flatness(measure: Measure, evidence: Evidence) -> Value:
    """Infinite for every network with a positive rescaling symmetry; the proof is carried out as a witness.

    A box B of half-width r' around θ stays within ε of the loss; T_α maps it to a disjoint box of no smaller volume in
    which the loss is the same; so do T_α², T_α³, … Each copy is checked by sampling.
    """
    problem, epsilon = evidence.problem, float(measure.options["epsilon"])
    try:
        symmetries = symmetries_of(problem)
    except TracingError as error:
        return unavailable(measure, f"the network's graph cannot be followed: {error}")
    step = _direction(symmetries, problem.parameters)
    if step is None:
        return unavailable(measure, "the network has no rescaling symmetry, so the volume may be finite")
    unit, moving = step
    base = evidence.loss
    radius = _radius(problem, base, epsilon, moving, evidence.generator("volume"))
    alpha = 2 * (moving + radius) / (moving - radius)
    copies = _copies(problem, unit, alpha, radius, evidence.generator("copies"))
    return Value(
        name=measure.name,
        value=float("inf"),
        error=0.0,
        exact=True,
        converged=all(copy["largest_loss"] < base + epsilon for copy in copies),
        method="Theorem 2, with disjoint copies of a box checked by sampling",
        details={"epsilon": epsilon, "radius": radius, "alpha": alpha, "copies": copies},
        error_kind="exact",
    )


def _direction(symmetries: Symmetries, parameters: Parameters) -> tuple[Rescaling, float] | None:
    """e times one factor (or divided by it), so that volumes do not shrink, and the largest entry it multiplies."""
    for factor in range(symmetries.dimension):
        logs = torch.zeros(symmetries.dimension, dtype=torch.float64)
        logs[factor] = 1.0
        scales = symmetries.log_scales(logs)
        powers = {name: scales[name].expand(parameters[name].shape) for name in scales if name in parameters}
        sign = 1.0 if sum(float(power.sum()) for power in powers.values()) >= 0 else -1.0
        grown = [
            (float(values.max()), float(power.max()))
            for name, p in powers.items()
            if bool((power := sign * p).max() > 0)
            for values in [parameters[name].abs()[power == power.max()]]
        ]
        largest = max(grown, default=(0.0, 0.0))
        if largest[0] > 0:
            return Rescaling(symmetries, sign * logs / largest[1]), largest[0]
    return None


def _radius(problem: Problem, base: float, epsilon: float, moving: float, generator: torch.Generator) -> float:
    """r' ≤ half the largest moving entry, halved until random points of the box stay within ε of the loss."""
    radius = moving / 2
    for _ in range(60):
        if max(problem.loss(point) for point in _points(problem.parameters, radius, 4, generator)) < base + epsilon / 2:
            return radius
        radius /= 2
    return radius


def _points(parameters: Parameters, radius: float, count: int, generator: torch.Generator) -> list[Parameters]:
    def corner(value: Tensor) -> Tensor:
        return radius * (torch.randint(0, 2, value.shape, generator=generator) * 2 - 1).to(value)

    return [{name: value + corner(value) for name, value in parameters.items()} for _ in range(count)]


def _copies(
    problem: Problem,
    unit: Rescaling,
    alpha: float,
    radius: float,
    generator: torch.Generator,
) -> list[dict[str, float]]:
    """θ-boxes under T_α^k for k = 0, 1, 2: the largest loss sampled in each."""
    found = []
    power = float(torch.tensor(alpha).log())
    for k in range(3):
        rescaling = unit ** (k * power)
        points = [rescaling.transform(point) for point in _points(problem.parameters, radius, 4, generator)]
        found.append({"power": float(k), "largest_loss": max(problem.loss(point) for point in points)})
    return found


_norm_compute, _norm_needs = from_eigenpair(PLAIN, lambda pair: abs(pair.value))
_trace_compute, _trace_needs = from_statistics(_trace, frozenset([TRACE]), everything=True, shape="linear")

MEASURES = (
    Measure(
        "hessian_spectral_norm",
        "dinh2017",
        "largest absolute eigenvalue of the Hessian",
        "max |λ(H)|",
        frozenset(),
        _norm_compute,
        _norm_needs,
        in_shards=True,
    ),
    Measure(
        "hessian_trace",
        "dinh2017",
        "trace of the Hessian",
        "Tr H",
        frozenset(),
        _trace_compute,
        _trace_needs,
        in_shards=True,
    ),
    Measure(
        "epsilon_sharpness",
        "dinh2017",
        "largest rise of the loss in a Euclidean ball",
        "max_{‖θ'−θ‖ ≤ ε} (L(θ') − L(θ)) / (1 + L(θ))",
        frozenset(),
        _epsilon_sharpness,
        lambda _measure: Needs(operators=(PLAIN,)),
        options={"epsilon": 1e-3},
        costly=True,
    ),
    Measure(
        "volume_flatness",
        "dinh2017",
        "volume of the connected region of nearly the same loss",
        "vol C(L, θ, ε),  C ∋ θ connected with L < L(θ) + ε",
        frozenset({"layer", "neuron", "linear", "rotation"}),
        _volume_flatness,
        options={"epsilon": 1e-2},
        costly=True,
    ),
)
