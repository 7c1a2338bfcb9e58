"""The curvatures that are looked at, made in one place: S·H·S for a diagonal S, and the block of one parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.curvature.lanczos import Eigenpair
from spiritlevel.curvature.vectors import length
from spiritlevel.problem.ranks import Group
from spiritlevel.problem.sharded import Sharded
from spiritlevel.problem.shards import WHOLE, Shards

# The name of a vector over all parameters, where vectors are divided by name.
EVERY = "every parameter"


def scaling(parameters: Mapping[str, Tensor], name: str, shards: Shards = WHOLE) -> Tensor:
    """The diagonal of S as a flat vector: ones ("identity"), the norm of the parameter that an entry belongs to ("block
    norms"), or its own size ("entries").

    >>> scaling({"w": torch.tensor([[3.0, 4.0]]), "b": torch.tensor([-2.0])}, "block norms")
    tensor([5., 5., 2.])
    """
    values = list(parameters.values())
    if name == "identity":
        return torch.cat([torch.ones_like(value).reshape(-1) for value in values])
    if name == "block norms":
        return torch.cat([value.new_full((value.numel(),), length(value, shards)) for value in values])
    return torch.cat([value.abs().reshape(-1) for value in values])


class Divided:
    """The same products for vectors of which every process holds a part, where each of them has the whole model.

    What is kept between products, a Krylov basis above all, is then divided among the processes.
    """

    def __init__(self, products: HessianProducts, group: Group) -> None:
        self.products, self.problem, self.flat = products, products.problem, products.flat
        self.shards: Shards = Sharded(group, {EVERY: torch.Size([products.flat.size])})

    def __call__(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        return self._divided(self.products, vectors)

    def on_part(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        return self._divided(self.products.on_part, vectors)

    def on_wider_part(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        return self._divided(self.products.on_wider_part, vectors)

    def on_other_part(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        return self._divided(self.products.on_other_part, vectors)

    def has_part(self) -> bool:
        return self.products.has_part()

    @property
    def heavy_first(self) -> bool:
        return self.products.heavy_first

    @property
    def is_wider(self) -> bool:
        return self.products.is_wider

    @property
    def cheap(self) -> bool:
        return self.products.cheap

    def part(self, vector: Tensor) -> Tensor:
        """This process's part of a vector, or of several side by side."""
        return self.shards.part(EVERY, vector) if vector.dim() == 1 else torch.stack([self.part(row) for row in vector])

    def whole(self, pair: Eigenpair) -> Eigenpair:
        """An eigenpair with whole vectors."""
        vector, *others = (self.shards.whole(EVERY, each) for each in (pair.vector, *pair.others))
        return replace(pair, vector=vector, others=torch.stack(others) if others else vector.new_zeros(0, len(vector)))

    def _divided(self, take: Callable[[Sequence[Tensor]], list[Tensor]], vectors: Sequence[Tensor]) -> list[Tensor]:
        images = take([self.shards.whole(EVERY, vector) for vector in vectors])
        return [self.part(images.pop(0)) for _ in vectors]


class Scaled:
    """S·H·S as a product with flat vectors; H itself where the diagonal of S is None."""

    def __init__(self, products: HessianProducts | Divided, scale: Tensor | None) -> None:
        self.products, self.scale = products, scale
        self.size = products.flat.size

    def __call__(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The images of all vectors, in one pass over the data."""
        return self.moved(self.products(self.moved(vectors)))

    def on_part(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The same over part of the data."""
        return self.moved(self.products.on_part(self.moved(vectors)))

    def on_other_part(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The same over another part of the data."""
        return self.moved(self.products.on_other_part(self.moved(vectors)))

    def image(self, vector: Tensor) -> Tensor:
        """S·H·S·v of a single vector."""
        return self([vector])[0]

    def moved(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """S·v of every vector."""
        return list(vectors) if self.scale is None else [self.scale * vector for vector in vectors]

    def reached(self, vectors: Tensor) -> Tensor:
        """What S does not make zero of a vector, or of each of several."""
        return vectors if self.scale is None else vectors.to(self.scale) * (self.scale > 0)


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
