"""Geodesics of products GHᵀ modulo the invertible matrices between their factors.

G and H have n columns each, and (GA⁻¹, HAᵀ) is the same product for every invertible A. Two metrics do not see A:

- "inv": ⟨η, ζ⟩ = Tr((GᵀG)⁻¹ η_Gᵀ ζ_G + (HᵀH)⁻¹ η_Hᵀ ζ_H);
- "mix": ⟨η, ζ⟩ = Tr((HᵀH) η_Gᵀ ζ_G + (GᵀG) η_Hᵀ ζ_H).

Changes (−GB, HBᵀ) only move along the orbit; horizontal ones are orthogonal to all of them. Coordinates u of a change are those in
which its length is ‖u‖, in a basis that the product chooses: the same u is the same change of the product for every A.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Metric = Literal["inv", "mix"]
Order = Literal["first", "second", "exact"]
Change = tuple[Tensor, Tensor]

# Steps of the fourth-order integration of an exact geodesic: on a quarter of the curvature radius its error is below 1e-8.
STEPS = 16
# Gram matrices that are worse conditioned are taken for singular.
WORST_CONDITION = 1e12


@dataclass(frozen=True)
class ProductSpace:
    """The changes of one pair (G, H), each of full column rank."""

    g: Tensor
    h: Tensor
    metric: Metric

    @property
    def singular(self) -> bool:
        """Whether a factor lacks full column rank, so that there is no metric."""
        grams = [part.mT @ part for part in (self.g, self.h)]
        return any(not float(torch.linalg.cond(gram)) < WORST_CONDITION for gram in grams)

    @cached_property
    def roots(self) -> tuple[Tensor, Tensor]:
        """(n, n) matrices P with PᵀP = GᵀG and HᵀH, in the basis of the product's singular vectors."""
        left, _, right = torch.linalg.svd(_core(self.g, self.h))
        qg, qh = (torch.linalg.qr(part) for part in (self.g, self.h))
        u, v = qg.Q @ left, qh.Q @ right.mT
        signs = torch.where(
            u.gather(0, u.abs().argmax(0, keepdim=True)) < 0, -1.0, 1.0
        )  # either sign is a singular vector
        return (u * signs).mT @ self.g, (v * signs).mT @ self.h

    def change(self, coordinates: Change) -> Change:
        """ξ of coordinates u: uP for "inv", uP⁻ᵀ of the other factor for "mix"."""
        pg, ph = self.roots
        if self.metric == "inv":
            return coordinates[0] @ pg, coordinates[1] @ ph
        return _over(coordinates[0], ph.mT), _over(coordinates[1], pg.mT)

    def coordinates(self, change: Change) -> Change:
        """The inverse of `change`."""
        pg, ph = self.roots
        if self.metric == "inv":
            return _over(change[0], pg), _over(change[1], ph)
        return change[0] @ ph.mT, change[1] @ pg.mT

    def inner(self, first: Change, second: Change) -> Tensor:
        a, b = self.coordinates(first), self.coordinates(second)
        return (a[0] * b[0]).sum() + (a[1] * b[1]).sum()

    def horizontal(self, change: Change) -> Change:
        """The nearest change that is orthogonal to the orbit: (ξ_G + GΛ, ξ_H − HΛᵀ)."""
        shift = self._inv_shift(change) if self.metric == "inv" else self._mix_shift(change)
        return change[0] + self.g @ shift, change[1] - self.h @ shift.mT

    def _inv_shift(self, change: Change) -> Tensor:
        """Λ of AΛᵀ + ΛᵀA = B, A = GᵀG HᵀH, B = GᵀG Hᵀξ_H − ξ_Gᵀ G HᵀH, in the eigenvectors of A."""
        gg, hh = self.g.mT @ self.g, self.h.mT @ self.h
        right = gg @ self.h.mT @ change[1] - change[0].mT @ self.g @ hh
        values, basis = self._product_basis
        turned: Tensor = torch.linalg.solve(basis, right @ basis) / (values.unsqueeze(1) + values)
        return _over(basis @ turned, basis).mT

    @cached_property
    def _product_basis(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of A = GᵀG HᵀH."""
        root = torch.linalg.cholesky(self.g.mT @ self.g)
        values, vectors = torch.linalg.eigh(root.mT @ (self.h.mT @ self.h) @ root)
        return values, root @ vectors

    def _mix_shift(self, change: Change) -> Tensor:
        gg, hh = self.g.mT @ self.g, self.h.mT @ self.h
        shift: Tensor = (_over(change[1].mT @ self.h, hh) - torch.linalg.solve(gg, self.g.mT @ change[0])) / 2
        return shift

    def moved(self, change: Change, order: Order) -> Change:
        """(G, H) at time one of the geodesic that starts with this velocity, to first or second order or integrated."""
        if order == "first":
            return self.g + change[0], self.h + change[1]
        if order == "second":
            bent = acceleration(self.metric, (self.g, self.h), change)
            return self.g + change[0] + bent[0] / 2, self.h + change[1] + bent[1] / 2
        return _integrated(self.metric, (self.g, self.h), change)


def _core(g: Tensor, h: Tensor) -> Tensor:
    """R_G R_Hᵀ, whose singular vectors are those of GHᵀ in the bases of the columns."""
    core: Tensor = torch.linalg.qr(g).R @ torch.linalg.qr(h).R.mT
    return core


def _over(matrix: Tensor, divisor: Tensor) -> Tensor:
    """matrix · divisor⁻¹."""
    quotient: Tensor = torch.linalg.solve(divisor, matrix, left=False)
    return quotient


def acceleration(metric: Metric, at: Change, velocity: Change) -> Change:
    """−Γ(ξ, ξ): what bends a geodesic."""
    (g, h), (x, y) = at, velocity
    if metric == "inv":
        return _inv_bend(g, x), _inv_bend(h, y)
    return _mix_bend(g, h, x, y), _mix_bend(h, g, y, x)


def _inv_bend(g: Tensor, x: Tensor) -> Tensor:
    gram = g.mT @ g
    return _over(x, gram) @ (x.mT @ g + g.mT @ x) - _over(g, gram) @ (x.mT @ x)


def _mix_bend(g: Tensor, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return _over(g @ (y.mT @ y) - x @ (y.mT @ h + h.mT @ y), h.mT @ h)


def _integrated(metric: Metric, start: Change, velocity: Change) -> Change:
    """Runge and Kutta's fourth-order steps for γ'' = −Γ(γ', γ')."""
    point, speed = start, velocity
    step = 1 / STEPS

    def slope(p: Change, v: Change) -> tuple[Change, Change]:
        return v, acceleration(metric, p, v)

    for _ in range(STEPS):
        slopes = [slope(point, speed)]
        for part in (0.5, 0.5, 1.0):
            dp, dv = slopes[-1]
            slopes.append(slope(_plus(point, dp, part * step), _plus(speed, dv, part * step)))
        weights = (step / 6, step / 3, step / 3, step / 6)
        for (dp, dv), weight in zip(slopes, weights, strict=True):
            point, speed = _plus(point, dp, weight), _plus(speed, dv, weight)
    return point


def _plus(change: Change, other: Change, factor: float) -> Change:
    return change[0] + factor * other[0], change[1] + factor * other[1]


def moved_entries(weight: Tensor, coordinates: Tensor, order: Order) -> Tensor:
    """The same for single weights in the metric (ξ/w)²: the exact geodesic is w·e^t with t = ξ/w."""
    if order == "exact":
        return weight * coordinates.exp()
    return weight * (1 + coordinates + (coordinates.square() / 2 if order == "second" else 0))
