"""Keskar, Mudigere, Nocedal, Smelyanskiy, Tang 2017, "On Large-Batch Training for Deep Learning"."""

from __future__ import annotations

import torch

from spiritlevel.curvature.ascent import Box
from spiritlevel.errors import SpiritLevelError
from spiritlevel.measures.dinh2017 import PLAIN
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.needs import Needs
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.sharpness import largest_rise
from spiritlevel.measuring.value import Value

# The random directions of the subspace are held in memory, all at once.
SUBSPACE_BUDGET = 2 << 30


def _sharpness(measure: Measure, evidence: Evidence) -> Value:
    """100 · the largest rise over the box |z_i| ≤ ε(|θ_i| + 1)."""
    epsilon = float(measure.options["epsilon"])
    theta = evidence.products.flat.join(list(evidence.problem.parameters.values()))
    region = Box(epsilon * (theta.abs() + 1), axes=(evidence.eigenpairs[PLAIN].vector,))
    return largest_rise(measure, evidence, region, factor=100, details={"epsilon": epsilon})


def _subspace_sharpness(measure: Measure, evidence: Evidence) -> Value:
    """The same over θ + Aᵀz, |z_i| ≤ ε(|(A⁺θ)_i| + 1), for random directions A."""
    epsilon, dimension = float(measure.options["epsilon"]), int(measure.options["dimension"])
    theta = torch.cat([value.reshape(-1) for value in evidence.problem.parameters.values()])  # no product is needed
    dimension = min(dimension, theta.numel())
    if dimension * theta.numel() * theta.element_size() > SUBSPACE_BUDGET:
        raise SpiritLevelError(
            f"keskar_subspace_sharpness: {dimension} directions of {theta.numel()} parameters take more than "
            f"{SUBSPACE_BUDGET >> 30} GB; ask for fewer with get_measure('keskar_subspace_sharpness', dimension=…)"
        )
    generator = evidence.generator("subspace")
    rows = torch.randn(dimension, theta.numel(), generator=generator).to(theta)
    rows = rows / rows.norm(dim=1, keepdim=True)
    gram = (rows @ rows.mT).double()
    coordinates = torch.linalg.solve(gram, (rows @ theta).double()).to(theta)  # A⁺θ
    region = Box(epsilon * (coordinates.abs() + 1), rows)
    return largest_rise(measure, evidence, region, factor=100, details={"epsilon": epsilon, "dimension": dimension})


MEASURES = (
    Measure(
        "keskar_sharpness",
        "keskar2017",
        "largest rise of the loss in a box",
        "100 · max_{|z_i| ≤ ε(|θ_i|+1)} (L(θ+z) − L(θ)) / (1 + L(θ))",
        frozenset(),
        _sharpness,
        lambda _measure: Needs(operators=(PLAIN,)),
        options={"epsilon": 1e-3},
        costly=True,
    ),
    Measure(
        "keskar_subspace_sharpness",
        "keskar2017",
        "largest rise of the loss in a box of a random subspace",
        "100 · max_{|z_i| ≤ ε(|(A⁺θ)_i|+1)} (L(θ+Az) − L(θ)) / (1 + L(θ))",
        frozenset(),
        _subspace_sharpness,
        options={"epsilon": 1e-3, "dimension": 100},
        costly=True,
    ),
)
