"""Vectors over the parameters: norms, inner products and finiteness, in few passes over memory and with all digits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spiritlevel.problem.ranks import Ranks
from spiritlevel.problem.shards import WHOLE, Shards

# Norms in single precision are taken over runs of so many entries and added up in double, which is six times as fast as
# squares in double and as good between these sizes.
RUN, SAFE = 1024, 1e-12


def refuse_nonfinite(product: Tensor, shards: Shards) -> None:
    """Raise where a product is not finite. A sum tells, and costs next to nothing; one that overflows is looked into."""
    finite = math.isfinite(float(product.sum())) or bool(torch.isfinite(product).all())
    if shards.any(not finite):
        raise FloatingPointError("a curvature product contains NaN or infinity")


def dot(first: Tensor, second: Tensor, shards: Shards = WHOLE) -> float:
    """The inner product of two vectors, added up in double precision."""
    products = first * second
    even = len(products) - len(products) % RUN
    total = float(products[:even].view(-1, RUN).sum(1).sum(dtype=torch.float64))
    return shards.total(total + float(products[even:].sum(dtype=torch.float64)))


def length(vector: Tensor, shards: Shards = WHOLE) -> float:
    """‖v‖ with its squares in double precision: in single precision they overflow from 1e19 on, and vanish below 1e-19.

    Beyond the range of those, the vector is brought to size first.
    """
    return shards.norm(_own_length(vector))


def _own_length(vector: Tensor) -> float:
    if vector.dtype == torch.float32 and vector.dim() == 1 and len(vector) > 2 * RUN:
        even = len(vector) - len(vector) % RUN
        runs = torch.linalg.vector_norm(vector[:even].view(-1, RUN), dim=1).double()
        found = math.hypot(
            float(torch.linalg.vector_norm(runs)), float(torch.linalg.vector_norm(vector[even:].double()))
        )
        if SAFE < found < 1 / SAFE and float(runs.max()) < 1 / SAFE:
            return found
    found = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
    if 1e-140 < found < math.inf or not vector.numel():
        return found
    largest = vector.abs().max().double()
    return float(largest * torch.linalg.vector_norm(vector.double() / largest)) if 0 < largest < math.inf else found


def unit(vector: Tensor, shards: Shards = WHOLE) -> Tensor:
    """v/‖v‖, divided twice: the norm of a vector in single precision need not be a single precision number."""
    largest = shards.largest(float(vector.abs().max()) if vector.numel() else 0.0)
    scaled = vector / largest
    return scaled / length(scaled, shards)


class MeanImage:
    """The mean of images over chunks, in double precision; one chunk that is all of the data is taken as it is."""

    def __init__(self, like: Tensor, ranks: Ranks) -> None:
        self._like, self._alone = like, ranks.size == 1
        self._total: Tensor | None = None

    def add(self, image: Tensor, weight: float) -> None:
        """Add weight · image. The image may be the very vector it is an image of, as it is where H is the identity."""
        if self._total is None and self._alone and weight == 1:
            self._total = image.clone() if image.data_ptr() == self._like.data_ptr() else image
        else:
            self._total = self.value().add_(image, alpha=weight)

    def value(self) -> Tensor:
        if self._total is None:
            self._total = torch.zeros_like(self._like, dtype=torch.float64)
        return self._total
