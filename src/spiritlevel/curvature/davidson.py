"""Davidson's method: an eigenpair of an operator that differs little from one whose leading eigenpairs are known.

Where a few samples hold nearly all of the curvature, their eigenvectors are cheap to find, and those of all data differ
from them by what the other samples add. The residual r with all data says by how much: to first order the eigenvector
moves by −(A − θ)⁻¹ r, in which the operator over the few samples stands for A. Two or three products with all data then
do what takes Lanczos, which knows nothing of A, five to eight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from spiritlevel.curvature.lanczos import Care, Eigenpair, End, Lanczos, chosen, error_bound, length, unit
from spiritlevel.problem.shards import WHOLE, Shards

# So many products at most; what has not converged by then goes on as a search of its own.
MOST_PRODUCTS = 6
# The known eigenvectors that corrections are made of: so many, with eigenvalues of at least this share of the wanted one.
MOST_KNOWN, LEAST_KNOWN = 6, 0.1
# Of eigenvalues nearer to the first than this share all are started from: what differs between the operators may change their order.
CLEAR_GAP = 0.05
# No eigenvalue of A is taken to be nearer to θ than this share of it: a correction is a small step.
NEAREST = 1e-2


class Known(NamedTuple):
    """What a search over part of the data has found: leading Ritz values, their vectors (k, n), and the gap behind the first,
    as a share of it."""

    values: Tensor
    vectors: Tensor
    gap: float


def known_from(search: Lanczos) -> Known:
    """The leading Ritz pairs of a search, the wanted one first."""
    values, vectors = search.leading(MOST_KNOWN)
    near = values.abs() >= LEAST_KNOWN * values[0].abs()
    return Known(values[near], vectors[near.to(vectors.device)], search.relative_gap())


class Davidson:
    """A process like `Lanczos`: hands out the vector whose product it needs, and takes the product.

    Args:
        known: What is known of a similar operator; the search starts from its first vector, and from those whose eigenvalues are near.
        otherwise: Makes the search that goes on where this one does not converge.
        tolerance, end, care: As for `Lanczos`.
    """

    def __init__(
        self,
        known: Known,
        otherwise: Callable[[], Lanczos],
        *,
        tolerance: float,
        end: End,
        care: Care,
        shards: Shards = WHOLE,
    ) -> None:
        self.tolerance, self.end = tolerance, end
        self._known, self._otherwise, self._care, self._shards = known, otherwise, care, shards
        self._basis: list[Tensor] = []
        self._images: list[Tensor] = []
        self._matrix = torch.zeros(0, 0, dtype=torch.float64)  # VᵀAV
        self._other: Lanczos | None = None
        self._own: Eigenpair | None = None
        rivals = (known.values - known.values[0]).abs() <= CLEAR_GAP * known.values[0].abs()
        self._waiting = [unit(vector, shards) for vector in known.vectors[rivals.to(known.vectors.device)]]
        self._request = self._waiting.pop(0)

    @property
    def request(self) -> Tensor:
        return self._request if self._other is None else self._other.request

    @property
    def result(self) -> Eigenpair | None:
        if self._other is None or self._other.result is None:
            return self._own
        return replace(self._other.result, products=self._other.result.products + len(self._basis))

    @property
    def done(self) -> bool:
        return self.result is not None

    def advance(self, product: Tensor) -> None:
        """Take A times `request`; afterwards either `done` or a new `request`."""
        if self._other is not None:
            self._other.advance(product)
            return
        if self._shards.any(not bool(torch.isfinite(product).all())):
            raise FloatingPointError("a curvature product contains NaN or infinity")
        self._append(self._request, product)
        if self._waiting:
            self._request = self._waiting.pop(0)
            return
        values, vectors = torch.linalg.eigh(self._matrix)
        values, vectors = self._shards.agreed(values), self._shards.agreed(vectors)
        index = chosen(values, self.end)
        value = float(values[index])
        vector, image = (_combined(vectors[:, index], each) for each in (self._basis, self._images))
        remainder = image - value * vector
        if self._judge(value, vector, length(remainder, self._shards)):
            return
        step = self._correction(remainder, value)
        if len(self._basis) == MOST_PRODUCTS or step is None:
            self._other = self._otherwise()
            self._images = []  # as large as the model each; how many there were is known from the basis
            return
        self._request = step

    def _append(self, vector: Tensor, image: Tensor) -> None:
        self._basis.append(vector)
        self._images.append(image)
        size = len(self._basis)
        column = torch.tensor([self._dot(each, image) for each in self._basis], dtype=torch.float64)
        grown = torch.zeros(size, size, dtype=torch.float64)
        grown[:-1, :-1] = self._matrix
        grown[-1, :], grown[:, -1] = column, column
        self._matrix = grown

    def _judge(self, value: float, vector: Tensor, residual: float) -> bool:
        """The bound of Kato and Temple with the gap of the similar operator: this basis does not show the next eigenvalue."""
        rounding = 16 * torch.finfo(vector.dtype).eps * abs(value)
        bound = error_bound(residual, self._known.gap * abs(value))
        target = self.tolerance * abs(value)
        enough = len(self._basis) >= self._care.fewest and residual <= self._care.residual * abs(value)
        if not enough or bound > target:
            return False
        others = self._known.vectors[1:].clone()
        converged = bound + rounding <= target
        self._own = Eigenpair(
            value, unit(vector, self._shards), others, bound + rounding, residual, converged, len(self._basis)
        )
        return True

    def _correction(self, remainder: Tensor, value: float) -> Tensor | None:
        """−(A − θ)⁻¹ r with what is known of A, at a right angle to the basis; None where nothing is left of it."""
        if value == 0.0:
            return None
        vectors = self._known.vectors
        shares = self._shards.totals(vectors @ remainder)
        distances = self._known.values.to(shares) - value
        nearest = NEAREST * abs(value)
        distances = torch.where(distances < 0, distances.clamp_max(-nearest), distances.clamp_min(nearest))
        rest = remainder - vectors.mT @ shares
        step = rest / value - vectors.mT @ (shares / distances)
        size = length(step, self._shards)
        for _ in range(2):
            for each in self._basis:
                step = step - self._dot(each, step) * each
        left = length(step, self._shards)
        return unit(step, self._shards) if left > 1e-3 * size > 0 else None

    def _dot(self, first: Tensor, second: Tensor) -> float:
        return self._shards.total(float((first * second).sum(dtype=torch.float64)))


def _combined(weights: Tensor, vectors: list[Tensor]) -> Tensor:
    total = float(weights[0]) * vectors[0]
    for weight, vector in zip(weights[1:].tolist(), vectors[1:], strict=True):
        total.add_(vector, alpha=weight)
    return total
