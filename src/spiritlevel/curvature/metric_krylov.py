"""The largest eigenvalue of the Hessian in a metric of the layers: of Sᵀ H S with V = S Z = right Z leftᵀ in every layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.curvature.krylov import BASIS_BUDGET, FEWEST_VECTORS, THOROUGH, block_eigenpairs
from spiritlevel.curvature.lanczos import ORDINARY, Eigenpair, eigenpair
from spiritlevel.curvature.metrics import LayerMetric

Layers = Mapping[str, LayerMetric]


class InMetric:
    """Changes of all layers as one vector of coordinates Z."""

    def __init__(self, metrics: Layers, like: Tensor) -> None:
        self._metrics = {name: metric.to(like) for name, metric in metrics.items()}
        self.shapes = {name: metric.coordinates for name, metric in metrics.items()}
        self._like = like

    def start(self, generator: torch.Generator) -> dict[str, Tensor]:
        return {
            name: torch.randn(shape.numel(), generator=generator, dtype=torch.float64).to(self._like)
            for name, shape in self.shapes.items()
        }

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([parts[name].reshape(-1) for name in self.shapes])

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        pieces = torch.split(vector, [shape.numel() for shape in self.shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}

    def directions(self, coordinates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the coordinates stand for, in the shapes of the weights."""
        return {name: self._metrics[name].direction(z.view(self.shapes[name])) for name, z in coordinates.items()}

    def pulled_back(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._metrics[name].pulled_back(each) for name, each in gradients.items()}


def metric_eigenpair(
    products: HessianProducts, space: InMetric, start: Mapping[str, Tensor], tolerance: float
) -> Eigenpair:
    """λ_max of Sᵀ H S over all layers together."""

    def matvec(vector: Tensor) -> Tensor:
        (image,) = products.within([space.directions(space.split(vector))])
        return space.join(space.pulled_back(image))

    first = space.join(start)
    vectors = min(200, max(FEWEST_VECTORS, BASIS_BUDGET // max(1, first.numel() * first.element_size())))
    care = THOROUGH if products.cheap else ORDINARY
    return eigenpair(matvec, first, tolerance=tolerance, most_vectors=vectors, care=care)


def metric_block_eigenpairs(
    products: HessianProducts, space: InMetric, start: Mapping[str, Tensor], tolerance: float
) -> dict[str, Eigenpair]:
    """λ_max of every layer's own block of Sᵀ H S."""

    def blocks(vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        images = products.within([{name: each} for name, each in space.directions(vectors).items()])
        return space.pulled_back({name: image[name] for name, image in zip(vectors, images, strict=True)})

    return block_eigenpairs(blocks, None, space.shapes, start, tolerance, cheap=products.cheap)
