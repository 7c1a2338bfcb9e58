"""Davidson's method: an eigenpair of an operator that differs little from one whose leading eigenpairs are known.

Where a few samples hold nearly all of the curvature, their eigenvectors are cheap to find, and those of all data differ
from them by what the other samples add. The residual r with all data says by how much: to first order the eigenvector
moves by −(A − θ)⁻¹ r, in which the operator over the few samples stands for A. Two or three products with all data then
do what takes Lanczos, which knows nothing of A, five to eight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from spiritlevel.curvature.lanczos import Care, Eigenpair, End, Lanczos, chosen, error_bound
from spiritlevel.curvature.vectors import dot, length, refuse_nonfinite, unit
from spiritlevel.problem.shards import WHOLE, Shards

# So many products at most; what has not converged by then goes on as a search of its own.
MOST_PRODUCTS = 6
# The known eigenvectors that corrections are made of: so many, with eigenvalues of at least this share of the wanted one.
MOST_KNOWN, LEAST_KNOWN = 6, 0.1
# Of eigenvalues nearer to the first than this share all are started from: what differs between the operators may change their order.
# Operators that differ more may change it more; so many are started from at most.
CLEAR_GAP, WIDE_GAP, MOST_STARTED = 0.05, 0.2, 4
# No eigenvalue of A is taken to be nearer to θ than this share of it: a correction is a small step.
NEAREST = 1e-2
# A known vector of which less than this lies outside of what was found says nothing more.
LEAST_APART = 0.5
# Where a value turns out to be less than this share of what was known, the similar operator is not similar: a few samples that stand
# in for many may curve more than all of them.
MISLED = 0.5


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


class _Pair(NamedTuple):
    """A Ritz pair, what its image has outside of it, and how long that is."""

    value: float
    vector: Tensor
    outside: Tensor
    residual: float


class Davidson:
    """A process like `Lanczos`: hands out the vector whose product it needs, and takes the product.

    Args:
        known: What is known of a similar operator; the search starts from its first vector, and from those whose eigenvalues are near.
        otherwise: Makes the search that goes on where this one does not converge; None to end with what there is.
        tolerance, end, care: As for `Lanczos`.
        near: How near, as a share of the first eigenvalue.

    Attributes:
        misled: Whether what is known says nothing about this operator.
    """

    def __init__(
        self,
        known: Known,
        otherwise: Callable[[], Lanczos] | None,
        *,
        tolerance: float,
        end: End,
        care: Care,
        shards: Shards = WHOLE,
        near: float = CLEAR_GAP,
    ) -> None:
        self.tolerance, self.end = tolerance, end
        self._known, self._otherwise, self._care, self._shards = known, otherwise, care, shards
        self._basis: list[Tensor] = []
        self._images: list[Tensor] = []
        self._matrix = torch.zeros(0, 0, dtype=torch.float64)  # VᵀAV
        self._other: Lanczos | None = None
        self._own: Eigenpair | None = None
        self._near, self.misled = near, False
        rivals = (known.values - known.values[0]).abs() <= near * known.values[0].abs()
        self._started = min(int(rivals.sum()), MOST_STARTED)  # the nearest come first
        self._waiting = [unit(vector, shards) for vector in known.vectors[: self._started]]
        self._request = self._waiting.pop(0)

    @property
    def request(self) -> Tensor:
        return self._request if self._other is None else self._other.request

    @property
    def requests(self) -> list[Tensor]:
        """All vectors whose products it takes next, each by `advance`: those it starts from need not wait for each other."""
        return [self.request, *self._waiting]

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
        refuse_nonfinite(product, self._shards)
        self._append(self._request, product)
        if self._waiting:
            self._request = self._waiting.pop(0)
            return
        first, *others = pairs = self._leading()
        if self._starts_another(first):
            return
        over = self._overtaking(first, others)
        if self._judge(first, others, over):
            return
        doubted = first if over <= self._allowed(first) else max(others, key=lambda pair: pair.residual)
        step = None if self.misled else self._correction(doubted.outside, doubted.value)
        if len(self._basis) < MOST_PRODUCTS + len(pairs) - 1 and step is not None:
            self._request = step
        elif self._otherwise is not None:
            self._other = self._otherwise()
            self._images = []  # as large as the model each; how many there were is known from the basis
        else:
            self._own = self._ended(first, math.inf)

    def _starts_another(self, first: _Pair) -> bool:
        """Whether a known vector that was not started from turns out to be near, because the wanted value is less than was known."""
        while self._started < len(self._known.values) and self._is_near(
            float(self._known.values[self._started]), first
        ):
            vector = self._less_basis(self._known.vectors[self._started])
            self._started += 1
            if length(vector, self._shards) > LEAST_APART:
                self._request = unit(vector, self._shards)
                return True
        self.misled = abs(first.value) < MISLED * float(self._known.values[0].abs())
        return False

    def _is_near(self, value: float, first: _Pair) -> bool:
        beyond = _side(self.end, first) * (value - first.value)
        return beyond >= -self._near * abs(first.value)

    def _less_basis(self, vector: Tensor) -> Tensor:
        for _ in range(2):
            for each in self._basis:
                vector = vector - self._dot(each, vector) * each
        return vector

    def _leading(self) -> list[_Pair]:
        """As many Ritz pairs as there are vectors that were started from, the wanted one first and those nearest to it after it."""
        values, vectors = torch.linalg.eigh(self._matrix)
        values, vectors = self._shards.agreed(values), self._shards.agreed(vectors)
        nearness = (values - values[chosen(values, self.end)]).abs()
        pairs = []
        for index in nearness.argsort(stable=True)[: self._started].tolist():
            vector, image = (_combined(vectors[:, index], each) for each in (self._basis, self._images))
            outside = image - float(values[index]) * vector
            pairs.append(_Pair(float(values[index]), vector, outside, length(outside, self._shards)))
        return pairs

    def _overtaking(self, first: _Pair, others: list[_Pair]) -> float:
        """How far beyond the wanted Ritz value the eigenvalue next to another one may be."""
        side = _side(self.end, first)
        return max([0.0, *(side * (pair.value - first.value) + pair.residual for pair in others)])

    def _allowed(self, first: _Pair) -> float:
        """How much may be left in doubt about which eigenvalue is the wanted one: little also where the tolerance is loose."""
        return min(self.tolerance, self._care.residual) * abs(first.value)

    def _gap(self, first: _Pair, others: list[_Pair]) -> float:
        """How far the next eigenvalue is: as this basis shows it where it holds the next vector, else as the similar operator does."""
        gaps = [abs(first.value - pair.value) - pair.residual for pair in others]
        gaps += [] if others else [self._known.gap * abs(first.value)]
        gaps += [abs(first.value - float(value)) for value in self._known.values[self._started :]]
        return max(0.0, min(gaps))

    def _append(self, vector: Tensor, image: Tensor) -> None:
        self._basis.append(vector)
        self._images.append(image)
        size = len(self._basis)
        column = torch.tensor([self._dot(each, image) for each in self._basis], dtype=torch.float64)
        grown = torch.zeros(size, size, dtype=torch.float64)
        grown[:-1, :-1] = self._matrix
        grown[-1, :], grown[:, -1] = column, column
        self._matrix = grown

    def _judge(self, first: _Pair, others: list[_Pair], over: float) -> bool:
        """The bound of Kato and Temple; what may overtake counts as error."""
        size = abs(first.value)
        rounding = 16 * torch.finfo(first.vector.dtype).eps * size
        bound = max(error_bound(first.residual, self._gap(first, others)), over)
        enough = (
            len(self._basis) >= self._care.fewest and first.residual <= self._care.residual * size and not self.misled
        )
        if not enough or bound > self.tolerance * size or over > self._allowed(first):
            return False
        self._own = self._ended(first, bound + rounding)
        return True

    def _ended(self, first: _Pair, error: float) -> Eigenpair:
        others, converged = self._known.vectors[1:].clone(), error <= self.tolerance * abs(first.value)
        vector = unit(first.vector, self._shards)
        return Eigenpair(first.value, vector, others, error, first.residual, converged, len(self._basis))

    def known(self) -> Known:
        """What this search has found, for a search on an operator that is more similar still.

        Its own leading pairs take the place of those it started from; what it did not start from is taken as known before.
        """
        first, *others = self._leading()
        pairs = [(pair.value, pair.vector) for pair in (first, *others)]
        for value, vector in zip(*(part[self._started :] for part in self._known[:2]), strict=True):
            apart = self._apart(vector, [each for _, each in pairs])
            if apart is not None:
                pairs.append((float(value), apart))
        values = torch.tensor([value for value, _ in pairs], dtype=torch.float64)
        gap = self._gap(first, others) / abs(first.value) if first.value else 0.0
        return Known(values, torch.stack([vector for _, vector in pairs]), gap)

    def _apart(self, vector: Tensor, others: list[Tensor]) -> Tensor | None:
        """A unit vector at a right angle to the others; None where most of it lies among them."""
        for each in others:
            vector = vector - self._dot(each, vector) * each
        return unit(vector, self._shards) if length(vector, self._shards) > LEAST_APART else None

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
        step = self._less_basis(step)
        left = length(step, self._shards)
        return unit(step, self._shards) if left > 1e-3 * size > 0 else None

    def _dot(self, first: Tensor, second: Tensor) -> float:
        return dot(first, second, self._shards)


def _side(end: End, first: _Pair) -> float:
    """In which direction a value is further towards the wanted end."""
    return -1.0 if end == "smallest" or (end == "magnitude" and first.value < 0) else 1.0


def _combined(weights: Tensor, vectors: list[Tensor]) -> Tensor:
    total = float(weights[0]) * vectors[0]
    for weight, vector in zip(weights[1:].tolist(), vectors[1:], strict=True):
        total.add_(vector, alpha=weight)
    return total
