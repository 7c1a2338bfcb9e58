"""Curvature written down as a matrix, where a network is so small that this costs less than a search for its eigenvalues.

Products with all unit vectors make the matrix, which then serves every operator S H S; no eigenvector can hide from it, and of
eigenvalues that lie close together the last one is told from the others.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.curvature.lanczos import Eigenpair, End, chosen, error_bound, gap, no_direction, toward
from spiritlevel.curvature.operators import scaling
from spiritlevel.curvature.vectors import length, refuse_nonfinite, unit
from spiritlevel.problem.shards import WHOLE

# So many products a search are worth it: the arithmetic around a product of such a network costs as much as the product.
WORTH = 100


def is_worth(size: int, searches: int) -> bool:
    """Whether a matrix of this size is cheaper than so many searches that it takes the place of."""
    return 0 < size <= WORTH * searches


def whole_hessian(products: HessianProducts) -> Tensor | None:
    """H over all parameters, (n, n) in double precision, each column as a product gave it; None where one is not finite.

    The unit vectors are as long as the parameter they belong to, so that what rescaling does to a column's size is undone
    before it can leave the range of single precision.
    """
    lengths = scaling(products.problem.parameters, "block norms")
    lengths = torch.where(lengths > 0, lengths, torch.ones_like(lengths))
    columns = torch.stack(products(list(torch.diag(lengths))), dim=1).cpu().double()
    found = columns / lengths.cpu().double()
    return found if bool(torch.isfinite(found).all()) else None


def scaled_eigenpair(hessian: Tensor, scale: Tensor, end: End, tolerance: float, further: int) -> Eigenpair:
    """One extreme eigenpair of S H S, among the vectors on which S is not zero; vectors are like `scale`."""
    kept = (scale > 0).nonzero().squeeze(1)
    if not len(kept):
        return no_direction(scale)
    diagonal, rows = scale[kept].cpu().double(), kept.cpu()
    matrix = diagonal[:, None] * hessian[rows][:, rows] * diagonal
    pair = eigenpair_of(matrix, scale, end, tolerance, further)
    vectors = scale.new_zeros(1 + len(pair.others), scale.numel())
    vectors[:, kept] = torch.cat([pair.vector[None], pair.others])
    return replace(pair, vector=vectors[0], others=vectors[1:], products=len(hessian))


class Columns:
    """The matrix of an operator on vectors like `start`, as a process: it asks for the image of every unit vector."""

    def __init__(self, start: Tensor, *, end: End, tolerance: float) -> None:
        self.end, self.tolerance, self._like = end, tolerance, start
        self._images: list[Tensor] = []
        self.result: Eigenpair | None = None

    @property
    def done(self) -> bool:
        return self.result is not None

    @property
    def request(self) -> Tensor:
        """The unit vector whose image is missing."""
        asked = torch.zeros_like(self._like)
        asked[len(self._images)] = 1
        return asked

    def advance(self, image: Tensor) -> None:
        """Take the image of `request`; after the last one it is `done`."""
        refuse_nonfinite(image, WHOLE)
        self._images.append(image.cpu().double())
        if len(self._images) == self._like.numel():
            self.result = eigenpair_of(torch.stack(self._images, dim=1), self._like, self.end, self.tolerance)


def eigenpair_of(matrix: Tensor, like: Tensor, end: End, tolerance: float, further: int = 0) -> Eigenpair:
    """One extreme eigenpair of a matrix whose columns were computed in the precision of `like`, as the vectors shall be.

    A matrix that is not symmetric was not computed exactly: by how much counts like the residual of a search.
    """
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    index = chosen(values, end)
    near = vectors[:, toward(index, min(1 + further, len(values)))].mT
    value, residual = float(values[index]), length((matrix - matrix.mT) @ near[0] / 2)
    rounding = 16 * torch.finfo(like.dtype).eps * float(values.abs().max())
    bound = error_bound(residual, gap(values, torch.full_like(values, residual), index))
    return Eigenpair(
        value=value,
        vector=unit(near[0].to(like)),
        others=near[1:].to(like),
        error=bound + rounding,
        residual=residual,
        converged=bound <= max(tolerance * abs(value), rounding),
        products=len(matrix),
        whole=True,
    )
