"""From δ and φ to sums of squares of per-sample weight gradients, for every kind of linear map.

The gradient of a weight for one sample and one column is g = Σ over positions of δ φᵀ. What is needed of it are

- Σ_n c_n g_n² entry by entry (the diagonal of a Gauss–Newton block, for all columns n and their weights c_n),
- the row sums Σ_i W_ji g_ji = Σ over positions of δ_j (Wφ)_j, and the column sums Σ_j W_ji g_ji = Σ φ_i (Wᵀδ)_i,
  which by Euler's identity never need g itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spiritlevel.curvature.taps import LinearUse, SampleAxis
from spiritlevel.layers import LinearMap


def by_sample(use: LinearUse, array: Tensor) -> Tensor:
    """(samples, positions, channels) of an array shaped like φ or z of this use."""
    split = use.axis.split(array)
    if "convolution" in use.linear.kind:  # (samples, repeat, channels, *space)
        return split.flatten(3).movedim(2, 3).flatten(1, 2) if split.dim() > 3 else split
    return split.reshape(split.shape[0], -1, split.shape[-1])


def row_sums(use: LinearUse, delta: Tensor, product: Tensor) -> Tensor:
    """Σ over positions of δ_j (Wφ)_j: (samples, rows)."""
    return _position_sum(use, delta * product)


def column_sums(use: LinearUse, phi_delta: Tensor) -> Tensor:
    """Σ over positions of φ_i (Wᵀδ)_i: (samples, columns)."""
    return _position_sum(use, use.phi * phi_delta)


def column_sums_of_gradient(linear: LinearMap, gradient: Tensor) -> Tensor:
    """Σ_j W_ji g_ji from g itself: (samples, columns)."""
    weighted = linear.weight.detach() * gradient
    matrices = torch.func.vmap(linear.layer.matrix)(weighted)  # (samples, groups, rows, columns, kernel)
    return matrices.sum((2, 4)).flatten(1)


def bias_gradient(use: LinearUse, delta: Tensor) -> Tensor:
    """Σ over positions of δ: (samples, rows)."""
    return _position_sum(use, delta)


def _position_sum(use: LinearUse, array: Tensor) -> Tensor:
    if use.axis == SampleAxis(0):  # the common layout, without a transpose
        if "convolution" in use.linear.kind:
            return array.flatten(2).sum(2) if array.dim() > 2 else array
        return array.flatten(1, -2).sum(1) if array.dim() > 2 else array
    return by_sample(use, array).sum(1)


class Windows:
    """φ of one use, laid out once a chunk so that every column's g is one batched matrix product."""

    def __init__(self, use: LinearUse) -> None:
        self.use = use
        self._groups = use.linear.layer.groups
        self._kernel = tuple(use.linear.weight.shape[2:])
        if use.linear.kind == "convolution":
            self._phi = self._grouped(_unfold(use.phi, self._kernel, use.linear.settings))
        elif use.linear.kind == "transposed convolution":
            self._phi = self._grouped(use.phi.flatten(2).unsqueeze(2))
        else:
            self._phi = by_sample(use, use.phi)

    def _grouped(self, array: Tensor) -> Tensor:
        """(samples × groups, channels a group × kernel, positions) from (samples, channels, kernel, positions)."""
        n, channels, kernel, positions = array.shape
        return array.reshape(n * self._groups, channels // self._groups * kernel, positions)

    def gradients(self, delta: Tensor) -> Tensor:
        """g of every sample: (samples, *weight.shape)."""
        linear = self.use.linear
        if linear.kind == "dense":
            rows = by_sample(self.use, delta)  # (n, positions, rows)
            return torch.bmm(self._phi.mT, rows) if linear.layer.transposed else torch.bmm(rows.mT, self._phi)
        if linear.kind == "convolution":
            g = torch.bmm(self._grouped(delta.flatten(2).unsqueeze(2)), self._phi.mT)
        else:  # z = φ ⊛ᵀ W: the roles of φ and δ are swapped
            windows = _unfold(delta, self._kernel, linear.settings, most=tuple(self.use.phi.shape[2:]))
            g = torch.bmm(self._phi, self._grouped(windows).mT)
        g = g.reshape(-1, *linear.weight.shape)
        repeat = self.use.axis.repeat
        return g if repeat == 1 else g.reshape(-1, repeat, *linear.weight.shape).sum(1)


def _unfold(
    array: Tensor, kernel: tuple[int, ...], settings: Mapping[str, Any], most: tuple[int, ...] | None = None
) -> Tensor:
    """(samples, channels, kernel positions, output positions) of a convolution of any dimension.

    most: At most so many output positions; a wide output padding leaves room for more than a transposed map has.
    """
    dims = len(kernel)
    stride, dilation = settings.get("stride", (1,) * dims), settings.get("dilation", (1,) * dims)
    padded = F.pad(array, _padding(settings.get("padding", (0,) * dims), kernel, dilation))
    sizes = [(padded.shape[2 + d] - dilation[d] * (kernel[d] - 1) - 1) // stride[d] + 1 for d in range(dims)]
    sizes = sizes if most is None else list(map(min, sizes, most))
    steps = padded.stride()
    view = padded.as_strided(
        (*padded.shape[:2], *kernel, *sizes),
        (
            *steps[:2],
            *(steps[2 + d] * dilation[d] for d in range(dims)),
            *(steps[2 + d] * stride[d] for d in range(dims)),
        ),
    )
    return view.flatten(2 + dims).flatten(2, 1 + dims)


def _padding(padding: tuple[int, ...] | str, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> list[int]:
    """Padding as `F.pad` wants it: last dimension first, before and after."""
    if padding == "same":
        totals = [dilation[d] * (kernel[d] - 1) for d in range(len(kernel))]
        sides = [(total // 2, total - total // 2) for total in totals]
    elif isinstance(padding, str):
        sides = [(0, 0)] * len(kernel)
    else:
        sides = [(p, p) for p in padding]
    return [side for pair in reversed(sides) for side in pair]


def lookup_squares(pairs: list[tuple[LinearUse, Tensor]], shares: Tensor, out: Tensor) -> None:
    """Σ_n c_n g_n² for an embedding, into `out`: gradients of equal tokens are added before they are squared."""
    indices, summed, share = _merged_tokens(pairs)
    contribution = summed.square() * (share * shares.unsqueeze(1)).unsqueeze(2)
    out.index_add_(0, indices.flatten(), contribution.flatten(0, 1).to(out.dtype))


def lookup_columns(pairs: list[tuple[LinearUse, Tensor]], shares: Tensor, out: Tensor) -> None:
    """Σ_n c_n (Σ_j W_jv g_jv)² for every entry v of the vocabulary, into `out`."""
    indices, summed, share = _merged_tokens(pairs)
    weight = pairs[0][0].linear.weight.detach()
    sums = (summed * weight[indices]).sum(2)
    out.index_add_(0, indices.flatten(), (sums.square() * share * shares.unsqueeze(1)).flatten().to(out.dtype))


def _merged_tokens(pairs: list[tuple[LinearUse, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Indices (n, T) over all uses; δ summed over equal tokens of a sample (n, T, d); one over how many (n, T)."""
    indices = torch.cat([use.axis.split(use.phi).flatten(1) for use, _ in pairs], dim=1)
    deltas = torch.cat([by_sample(use, delta) for use, delta in pairs], dim=1)
    fixed = pairs[0][0].linear.settings.get("padding")
    if fixed is not None:
        deltas = deltas * (indices != fixed).unsqueeze(2)
    same = (indices.unsqueeze(1) == indices.unsqueeze(2)).to(deltas.dtype)
    return indices, torch.bmm(same, deltas), 1 / same.sum(2)
