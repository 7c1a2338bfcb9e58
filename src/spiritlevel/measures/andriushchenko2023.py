"""Andriushchenko, Croce, Müller, Hein, Flammarion 2023, "A Modern Look at the Relationship between Sharpness and Generalization".

The mean rise of the loss under noise in proportion to the weights: Gaussian of standard deviation ρ|θ| (ℓ2), or uniform on ±ρ|θ|
(ℓ∞). Dividing the data into batches does not change a mean; dividing logits by their size does, because their scale is
otherwise part of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from spiritlevel.curvature.estimate import few_groups_factor
from spiritlevel.curvature.ways import Flat
from spiritlevel.measures.kwon2021 import NO_LOGITS
from spiritlevel.measuring.adaptive import OPTIONS, adaptive_scale, check_choices, measured_problem
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.needs import Needs
from spiritlevel.measuring.readings import unavailable
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.value import Value

# The fewest pairs of opposite draws: fewer say little about their spread.
FEWEST_PAIRS = 8


def _average(measure: Measure, evidence: Evidence) -> Value:
    problem = measured_problem(measure, evidence.problem)
    if problem is None:
        return unavailable(measure, NO_LOGITS)
    flat = Flat(problem.parameters)
    base = flat.join(list(problem.parameters.values()))
    loss, rises = problem.loss(), []
    for noise in _noises(measure, evidence):
        sides = [problem.loss(flat.to_dict(base + sign * noise)) for sign in (1, -1)]
        rises.append(sum(sides) / 2 - loss)
        if not math.isfinite(rises[-1]):
            return unavailable(
                measure, f"the loss is not finite under noise of rho={measure.options['rho']}: ask for a smaller rho"
            )
        if len(rises) >= FEWEST_PAIRS and _standard_error(rises) <= evidence.tolerance * abs(_mean(rises)):
            break
    value, error = _mean(rises), _standard_error(rises)
    return Value(
        measure.name,
        value,
        error + torch.finfo(problem.dtype).eps * abs(loss),
        exact=False,
        converged=error <= evidence.tolerance * abs(value),
        method=f"mean over {len(rises)} pairs of opposite draws",
        details={"rho": float(measure.options["rho"])},
    )


def _noises(measure: Measure, evidence: Evidence) -> Iterator[Tensor]:
    scale = float(measure.options["rho"]) * adaptive_scale(evidence, str(measure.options["scale"]))
    generator = evidence.generator(measure.name)
    for _ in range(max(FEWEST_PAIRS, evidence.most_probes)):
        if measure.options["norm"] == "l2":
            draw = torch.randn(scale.shape, generator=generator, dtype=torch.float64)
        else:
            draw = 2 * torch.rand(scale.shape, generator=generator, dtype=torch.float64) - 1
        yield scale * draw.to(scale)


def _mean(rises: list[float]) -> float:
    return math.fsum(rises) / len(rises)


def _standard_error(rises: list[float]) -> float:
    deviation = math.fsum((rise - _mean(rises)) ** 2 for rise in rises) / (len(rises) - 1)
    return few_groups_factor(len(rises)) * math.sqrt(deviation / len(rises))


def _needs(measure: Measure) -> Needs:
    check_choices(measure)
    return Needs()


MEASURES = (
    Measure(
        "adaptive_sharpness_average",
        "andriushchenko2023",
        "mean rise of the loss under noise in proportion to every weight's size",
        "E_{ε ∼ N(0, ρ² diag θ²)} L(θ+ε) − L(θ)",
        frozenset({"layer", "neuron"}),
        _average,
        _needs,
        options={**OPTIONS, "rho": 0.1},
        costly=True,
    ),
)
