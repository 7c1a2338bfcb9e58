"""Σ c ‖rightᵀ g left‖² over samples and columns of a sweep: the trace of a layer's Gauss–Newton block in a metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from spiritlevel.curvature import kernels
from spiritlevel.curvature.metrics import LayerMetric, Metrics
from spiritlevel.curvature.sums import Total
from spiritlevel.curvature.taps import LinearUse, SampleAxis

Arrived = list[tuple[Tensor, Tensor | None] | None]


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
    covariance = metric.covariance.to(like)
    if metric.kind == "dense" and len(uses) == 1 and uses[0].phi.dim() == 2 and uses[0].axis == SampleAxis(0):
        return DenseSums(kind, fitted, covariance[0], uses[0])
    return SharedSums(kind, fitted, covariance, uses)


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
    """Any other layer: several positions, or several uses. Columns wait for one another, as in `LayerSums`.

    Three ways lead to the same sum, and the one with the fewest multiplications is taken: leftᵀ on the inputs of every
    position ("inputs") or on g of every column ("gradients"), then Tr(C Σ gᵀg); or inner products of positions ("pairs").
    """

    def __init__(self, kind: str, metric: LayerMetric, covariance: Tensor, uses: list[LinearUse]) -> None:
        self._kind, self._metric, self._c, self._uses = kind, metric, covariance, uses
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
        way = self._way(shares.shape[1])
        alike = bool((shares == shares[0, 0]).all())
        total = shares.new_zeros((), dtype=torch.float64)
        for part in self._factors[0].blocks(self._bytes_a_sample(way, shares.shape[1])):
            if way == "pairs":
                total += self._by_pairs(deltas[0], shares[part], part)
            else:
                total += self._by_columns(way, deltas, shares[part], part, alike=alike)
        self._total = total if self._total is None else self._total + total

    def _way(self, columns: int) -> str:
        """What costs the fewest multiplications for a sample; an operation on an entry counts as `ENTRYWISE` of them."""
        _, r, s = self._metric.coordinates
        _, a, b = self._factors[0].weight.shape
        positions = sum(each.positions for each in self._factors)
        left = self._metric.left
        turned = 0 if left is None else kernels.ENTRYWISE * a if left.dim() == 2 else a * r
        costs = {
            "inputs": positions * (turned + columns * r * b) + columns * r * b * b // 2,
            "gradients": columns * b * (positions * a + turned + r * b // 2),
        }
        if len(self._factors) == 1:
            pairs = positions * (r + columns * s + kernels.ENTRYWISE)
            costs["pairs"] = positions * (turned + columns * b * s + pairs)
        return min(costs, key=lambda way: costs[way])

    def _bytes_a_sample(self, way: str, columns: int) -> int:
        groups, r, s = self._metric.coordinates
        _, a, b = self._factors[0].weight.shape
        positions = sum(each.positions for each in self._factors)
        if way == "pairs":
            entries = positions * (a + r + columns * (b + 2 * s) + 2 * positions)
        else:
            entries = positions * (a + b + (r if way == "inputs" else 0)) + (a + r) * b
        return groups * entries * self._metric.right.element_size()

    def _by_columns(self, way: str, deltas: list[list[Tensor]], shares: Tensor, part: slice, *, alike: bool) -> Tensor:
        """Σ_k c Tr(C gᵀ Σ⁺ g), column by column: nothing but g of one column is laid out."""
        lefts = [factors.left(part) for factors in self._factors]
        if way == "inputs":
            lefts = [self._metric.inputs(left) for left in lefts]
        total = shares.new_zeros((), dtype=torch.float64)
        for column, own in enumerate(zip(*deltas, strict=True)):
            rights = [_column(*each, part) for each in zip(self._factors, self._uses, own, strict=True)]
            g = torch.bmm(lefts[0], rights[0])
            for left, right in zip(lefts[1:], rights[1:], strict=True):
                g = g.baddbmm_(left, right)
            g = g if way == "inputs" else self._metric.inputs(g)
            total += self._in_covariance(g, shares[:, column], alike=alike)
        return total

    def _in_covariance(self, g: Tensor, share: Tensor, *, alike: bool) -> Tensor:
        """Σ c Tr(C gᵀg) of g with shape (samples × groups, r, b)."""
        groups, b, _ = self._c.shape
        if groups == 1 and alike:
            rows = g.reshape(-1, b)
            return (kernels.gram(rows) * self._c[0]).sum(dtype=torch.float64) * share[0]
        parted = g.reshape(len(share), groups, -1, b).transpose(0, 1)  # (groups, samples, r, b)
        weighted = parted * share.reshape(1, -1, 1, 1)
        moment = weighted.flatten(1, 2).mT @ parted.flatten(1, 2)
        return (moment * self._c).sum(dtype=torch.float64)

    def _by_pairs(self, deltas: list[Tensor], shares: Tensor, part: slice) -> Tensor:
        """Σ_pq (Σ_k c δ_kpᵀ C δ_kq)(φ_pᵀ Σ⁺ φ_q) of a layer with one use."""
        groups, _, s = self._metric.coordinates
        left = self._metric.inputs(self._factors[0].left(part))
        right = self._metric.results(self._factors[0].right(deltas, part))
        weights = shares.repeat_interleave(groups, 0).repeat_interleave(s, 1)
        inner = torch.bmm(right * weights.unsqueeze(1), right.mT)
        return (torch.bmm(left.mT, left) * inner).sum(dtype=torch.float64)

    def finish(self, name: str, sums: Total) -> None:
        if self._total is not None:
            sums.add(self._kind, name, self._total)


def _column(factors: kernels.Gradients, use: LinearUse, delta: Tensor, part: slice) -> Tensor:
    """δ of one column and some samples, (samples × groups, positions, b): a view where samples come first."""
    if use.axis == SampleAxis(0) and use.linear.layer.groups == 1:
        own = delta[part]
        if use.linear.kind == "dense":
            return own.reshape(len(own), -1, own.shape[-1])
        if use.linear.kind == "convolution":
            return own.reshape(len(own), own.shape[1], -1).mT
    return factors.right([delta], part)
