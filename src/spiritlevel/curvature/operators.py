"""The curvatures that are looked at, made in one place: S·H·S for a diagonal S, and the block of one parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.curvature.lanczos import length


def scaling(parameters: Mapping[str, Tensor], name: str) -> Tensor:
    """The diagonal of S as a flat vector: ones ("identity"), the norm of the parameter that an entry belongs to ("block
    norms"), or its own size ("entries").

    >>> scaling({"w": torch.tensor([[3.0, 4.0]]), "b": torch.tensor([-2.0])}, "block norms")
    tensor([5., 5., 2.])
    """
    values = list(parameters.values())
    if name == "identity":
        return torch.cat([torch.ones_like(value).reshape(-1) for value in values])
    if name == "block norms":
        return torch.cat([value.new_tensor(length(value)).expand(value.numel()) for value in values])
    return torch.cat([value.abs().reshape(-1) for value in values])


class Scaled:
    """S·H·S as a product with flat vectors; H itself where the diagonal of S is None."""

    def __init__(self, products: HessianProducts, scale: Tensor | None) -> None:
        self.products, self.scale = products, scale
        self.size = products.flat.size

    def __call__(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The images of all vectors, in one pass over the data."""
        return self.moved(self.products(self.moved(vectors)))

    def on_part(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The same over part of the data."""
        return self.moved(self.products.on_part(self.moved(vectors)))

    def image(self, vector: Tensor) -> Tensor:
        """S·H·S·v of a single vector."""
        return self([vector])[0]

    def moved(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """S·v of every vector."""
        return list(vectors) if self.scale is None else [self.scale * vector for vector in vectors]


class Block:
    """The diagonal block of one parameter as a product with flat vectors."""

    def __init__(self, products: HessianProducts, name: str) -> None:
        self.products, self.name = products, name
        self.shape = products.problem.parameters[name].shape
        self.size = self.shape.numel()

    def __call__(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The images of all vectors, in one pass over the data."""
        found = self.products.within([{self.name: vector.view(self.shape)} for vector in vectors])
        return [image[self.name].reshape(-1) for image in found]
