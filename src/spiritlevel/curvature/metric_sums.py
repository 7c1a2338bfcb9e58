"""Σ c ‖rightᵀ g left‖² over samples and columns of a sweep: the trace of a layer's Gauss–Newton block in a metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from spiritlevel.curvature import kernels
from spiritlevel.curvature.metrics import LayerMetric, Metrics
from spiritlevel.curvature.taps import LinearUse, SampleAxis

Arrived = list[tuple[Tensor, Tensor | None] | None]


class Total(Protocol):
    """Where sums are added up."""

    def add(self, kind: str, name: str, array: Tensor) -> None: ...


class MetricSums(Protocol):
    """What adds up one layer over the columns of one chunk."""

    def add(self, arrived: Arrived, share: Tensor) -> None: ...
    def gather(self) -> None: ...
    def finish(self, name: str, sums: Total) -> None: ...


def metric_sums(
    linear: Mapping[str, list[LinearUse]], metrics: Metrics, wanted: frozenset[str]
) -> list[tuple[str, MetricSums]]:
    """What adds up every layer in every metric that is wanted."""
    return [
        (name, _sums_for(kind, metric, linear[name]))
        for kind, layers in metrics.items()
        if kind in wanted
        for name, metric in layers.items()
        if name in linear
    ]


def _sums_for(kind: str, metric: LayerMetric, uses: list[LinearUse]) -> MetricSums:
    like = uses[0].result
    fitted = metric.to(like)
    if metric.kind == "lookup":
        return LookupSums(kind, fitted, uses)
    if metric.kind == "dense" and len(uses) == 1 and uses[0].phi.dim() == 2 and uses[0].axis == SampleAxis(0):
        return DenseSums(kind, fitted, metric.covariance[0].to(like), uses[0])
    return SharedSums(kind, fitted, uses)


class DenseSums:
    """A dense layer with one position a sample: Tr(C Σ_nk ‖leftᵀφ_n‖² δ_nk δ_nkᵀ)."""

    def __init__(self, kind: str, metric: LayerMetric, covariance: Tensor, use: LinearUse) -> None:
        self._kind = kind
        self._lengths = torch.linalg.vector_norm(metric.inputs(use.phi.mT.unsqueeze(0))[0], dim=0)
        self._c = covariance
        self._waiting: dict[bool, list[Tensor]] = {True: [], False: []}  # by sign
        self._total = self._c.new_zeros((), dtype=torch.float64)

    def add(self, arrived: Arrived, share: Tensor) -> None:
        if arrived[0] is None:
            return
        scale = (self._lengths * share.abs().sqrt()).unsqueeze(1)
        scaled = arrived[0][0] * scale
        positive = share >= 0
        if bool(positive.all()):
            self._waiting[True].append(scaled)
        else:
            self._waiting[True].append(scaled[positive])
            self._waiting[False].append(scaled[~positive])

    def gather(self) -> None:
        """Take the sums over the columns that wait: side by side they make one product of a good size."""
        for positive, rows in self._waiting.items():
            if rows:
                moment = kernels.gram(torch.cat(rows))
                self._total += (1 if positive else -1) * (moment * self._c).sum(dtype=torch.float64)
                rows.clear()

    def finish(self, name: str, sums: Total) -> None:
        sums.add(self._kind, name, self._total)


class LookupSums:
    """An embedding, where Σ⁺ is diagonal: Σ over entries of Σ⁺ ‖rightᵀg‖², tokens of a sample merged."""

    def __init__(self, kind: str, metric: LayerMetric, uses: list[LinearUse]) -> None:
        self._kind, self._metric, self._uses = kind, metric, uses
        self._total = metric.right.new_zeros((), dtype=torch.float64)

    def add(self, arrived: Arrived, share: Tensor) -> None:
        pairs = [(use, pair[0]) for use, pair in zip(self._uses, arrived, strict=True) if pair is not None]
        if not pairs:
            return
        indices, summed, portion = kernels.merged_tokens(pairs)
        squares = torch.linalg.vector_norm(summed @ self._metric.right[0], dim=2).square()
        scale = 1.0 if self._metric.left is None else self._metric.left[0][indices].square()
        self._total += (squares * scale * portion * share.unsqueeze(1)).sum(dtype=torch.float64)

    def gather(self) -> None:
        """Nothing waits."""

    def finish(self, name: str, sums: Total) -> None:
        sums.add(self._kind, name, self._total)


class SharedSums:
    """Any other layer: several positions, or several uses. Columns wait for one another, as in `LayerSums`."""

    def __init__(self, kind: str, metric: LayerMetric, uses: list[LinearUse]) -> None:
        self._kind, self._metric, self._uses = kind, metric, uses
        self._factors: list[kernels.Gradients] = []
        self._waiting: list[tuple[Arrived, Tensor]] = []
        self._total: Tensor | None = None

    def add(self, arrived: Arrived, share: Tensor) -> None:
        if any(pair is not None for pair in arrived):
            self._waiting.append((arrived, share))

    def gather(self) -> None:
        """Take the sums over the columns that wait."""
        if not self._waiting:
            return
        self._factors = self._factors or [kernels.Gradients(use) for use in self._uses]
        shares, deltas = kernels.side_by_side(self._uses, self._waiting)
        self._waiting = []
        columns = shares.shape[1]
        total = shares.new_zeros((), dtype=torch.float64)
        for part in self._factors[0].blocks(self._bytes_a_sample(columns)):
            total += self._part(deltas, shares[part], part)
        self._total = total if self._total is None else self._total + total

    def _bytes_a_sample(self, columns: int) -> int:
        groups, r, s = self._metric.coordinates
        entries = sum(
            f.bytes_a_sample(columns) // f.weight.element_size() + groups * f.positions * (r + columns * s)
            for f in self._factors
        )
        return (entries + groups * r * columns * s) * self._metric.right.element_size()

    def _part(self, deltas: list[list[Tensor]], shares: Tensor, part: slice) -> Tensor:
        if self._on_gradient(shares.shape[1]):
            found = [each.product(own, part) for each, own in zip(self._factors, deltas, strict=True)]
            return self._squares(self._metric.gradients(torch.stack(found).sum(0)), shares)
        sides = [
            (self._metric.inputs(factors.left(part)), self._metric.results(factors.right(own, part)))
            for factors, own in zip(self._factors, deltas, strict=True)
        ]
        groups, r, s = self._metric.coordinates
        columns = shares.shape[1]
        left, right = sides[0]
        positions = left.shape[2]
        if len(sides) == 1 and positions * (r + columns * s + kernels.ENTRYWISE) < columns * r * s:
            weights = shares.repeat_interleave(groups, 0).repeat_interleave(s, 1)
            inner = torch.bmm(right * weights.unsqueeze(1), right.mT)
            return (torch.bmm(left.mT, left) * inner).sum(dtype=torch.float64)
        g = torch.bmm(left, right)
        for other, more in sides[1:]:
            g = g.baddbmm_(other, more)
        return self._squares(g.reshape(*g.shape[:2], columns, s), shares)

    def _on_gradient(self, columns: int) -> bool:
        """Whether roots are cheaper to apply to g than to φ and δ at every position."""
        _, r, s = self._metric.coordinates
        _, a, b = self._factors[0].weight.shape
        left = 0 if self._metric.left is None or self._metric.left.dim() == 2 else a * r
        positions = sum(each.positions for each in self._factors)
        return columns * (left * s + a * b * s) < positions * (left + columns * b * s)

    def _squares(self, g: Tensor, shares: Tensor) -> Tensor:
        """Σ c ‖g‖² of g with shape (samples × groups, r, columns, s)."""
        sums = g.square_().sum((1, 3))
        return (sums.reshape(len(shares), -1, shares.shape[1]).sum(1) * shares).sum(dtype=torch.float64)

    def finish(self, name: str, sums: Total) -> None:
        if self._total is not None:
            sums.add(self._kind, name, self._total)
