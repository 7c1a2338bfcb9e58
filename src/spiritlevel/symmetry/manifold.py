"""The quotient manifold of networks modulo rescaling (Rangamani et al. 2019, section 2).

Points and tangent vectors are dictionaries of tensors by parameter name. The orbit of θ under a group of rescalings
has the vertical space V = span{∂_k T θ} as tangent space (Lemmas 2.4 and 2.6), the horizontal space is its complement
in the metric. A metric that is invariant under the group makes both move along with the orbit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spiritlevel.symmetry.layerwise import LayerScales
from spiritlevel.symmetry.symmetries import Symmetries

Point = Mapping[str, Tensor]
Metric = Callable[[Point], dict[str, Tensor]]
"""The diagonal of a metric at a point, broadcastable to the parameters; zero where the metric does not exist."""


def layer_metric(theta: Point) -> dict[str, Tensor]:
    """g(η, ξ) = Σ over tensors of ⟨η, ξ⟩/‖θ‖² (Propositions 2.3 and 2.5): invariant under one factor per tensor."""
    return {name: _inverse(value.square().sum()) for name, value in theta.items()}


def node_metric(theta: Point) -> dict[str, Tensor]:
    """g(η, ξ) = Σ_i η_i ξ_i/θ_i² (section 6): invariant under any rescaling of single parameters."""
    return {name: _inverse(value.square()) for name, value in theta.items()}


def _inverse(squares: Tensor) -> Tensor:
    """1/x, and 0 for 0: a block of norm zero has no metric and drops out."""
    return torch.where(squares > 0, 1 / torch.where(squares > 0, squares, 1.0), 0.0)


def inner(metric: Metric, theta: Point, a: Point, b: Point) -> Tensor:
    """g_θ(a, b)."""
    weights = metric(theta)
    return torch.stack([(weights[name] * a[name] * b[name]).sum() for name in theta]).sum()


def riemannian_gradient(metric: Metric, theta: Point, gradient: Point) -> dict[str, Tensor]:
    """grad L = G⁻¹ ∇L, the vector with g(grad L, ξ) = ⟨∇L, ξ⟩ for all ξ; zero where the metric does not exist."""
    weights = metric(theta)
    return {name: _inverse(weights[name]) * gradient[name] for name in theta}


@dataclass(frozen=True, eq=False)
class Directions:
    """The infinitesimal rescalings x ↦ Σ_k x_k ∂_k: exponents[name][..., k] is the log-scale of a tensor for factor k.

    Made by `neuron_directions` (one factor per channel) or `layer_directions` (one factor per layer).
    """

    exponents: dict[str, Tensor]
    dimension: int

    def vertical(self, theta: Point, coefficients: Tensor) -> dict[str, Tensor]:
        """The vertical vector Σ_k coefficients[k] ∂_k T θ: each parameter times its log-scale."""
        zero = torch.zeros((), dtype=coefficients.dtype)
        return {
            name: value * (self.exponents[name] @ coefficients if name in self.exponents else zero)
            for name, value in theta.items()
        }

    def project_vertical(self, metric: Metric, theta: Point, vector: Point) -> dict[str, Tensor]:
        """The vertical part of a vector: the nearest vertical one in the metric."""
        weights = metric(theta)
        names = [name for name in theta if name in self.exponents]
        gram = torch.zeros(self.dimension, self.dimension, dtype=torch.float64)
        right = torch.zeros(self.dimension, dtype=torch.float64)
        for name in names:
            e = self.exponents[name].expand(*theta[name].shape, -1).reshape(-1, self.dimension)
            weight = weights[name].expand(theta[name].shape).flatten().double()
            own = theta[name].flatten().double()
            gram += e.T @ (e * (weight * own * own)[:, None])
            right += e.T @ (weight * own * vector[name].flatten().double())
        coefficients = torch.from_numpy(np.linalg.lstsq(gram.numpy(), right.numpy(), rcond=None)[0])
        parts = self.vertical({name: value.double() for name, value in theta.items()}, coefficients)
        return {name: parts[name].to(theta[name].dtype) for name in theta}

    def project_horizontal(self, metric: Metric, theta: Point, vector: Point) -> dict[str, Tensor]:
        """The horizontal part of a vector: what is left after the vertical part."""
        vertical = self.project_vertical(metric, theta, vector)
        return {name: vector[name] - vertical[name] for name in theta}


def neuron_directions(symmetries: Symmetries) -> Directions:
    """One direction per independent factor: the neuron-wise counterparts of Lemmas 2.4 and 2.6.

    Dense in the number of factors: meant for networks of up to some thousands of parameters.
    """
    values = torch.from_numpy(symmetries.basis.toarray())
    exponents = {
        name: torch.stack(torch.broadcast_tensors(*(c * values[rows] for c, rows in tensor.terms))).sum(0)  # type: ignore[no-untyped-call]
        for name, tensor in symmetries.tensors.items()
        if not tensor.is_buffer
    }
    return Directions(exponents, symmetries.dimension)


def layer_directions(symmetries: Symmetries) -> Directions:
    """One direction per independent layer factor: in a chain (β_l W_l, γ_l b_l) with Σ β = 0, β_l = γ_l − γ_{l−1}."""
    scales = LayerScales(symmetries)
    exponents = {
        name: torch.from_numpy(row).view([1] * len(symmetries.tensors[name].shape) + [-1])
        for name, row in scales.rows.items()
        if not symmetries.tensors[name].is_buffer
    }
    return Directions(exponents, scales.spread.shape[1])
