"""From δ and φ to sums of squares of per-sample weight gradients, for every kind of linear map.

The gradient of a weight for one sample and one column is g = Σ over positions of δ φᵀ. What is needed of it are

- Σ_n c_n g_n² entry by entry (the diagonal of a Gauss–Newton block, for all columns n and their weights c_n),
- the row sums Σ_i W_ji g_ji = Σ over positions of δ_j (Wφ)_j, and the column sums Σ_j W_ji g_ji = Σ φ_i (Wᵀδ)_i,
  which by Euler's identity never need g itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from scipy.linalg import blas
from torch import Tensor
from torch.nn import functional as F

from spiritlevel.curvature.taps import LinearUse, SampleAxis

# What the factors and the product of one block of samples take: more leaves the caches, less is all overhead.
BLOCK_BYTES = 4 << 20

# What one operation on an entry of an array costs, in multiplications within a matrix product.
ENTRYWISE = 20


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


def bias_gradient(use: LinearUse, delta: Tensor) -> Tensor:
    """Σ over positions of δ: (samples, rows)."""
    return _position_sum(use, delta)


def _position_sum(use: LinearUse, array: Tensor) -> Tensor:
    if use.axis == SampleAxis(0):  # the common layout, without a transpose
        if "convolution" in use.linear.kind:
            return array.flatten(2).sum(2) if array.dim() > 2 else array
        return array.flatten(1, -2).sum(1) if array.dim() > 2 else array
    return by_sample(use, array).sum(1)


class Gradients:
    """g of one use as a matrix product for each sample, over several columns at once: (a × positions)(positions × b).

    For a dense map and a convolution `a` runs over φ (its channels and the kernel) and `b` over the rows of δ; a
    transposed convolution has its windows in δ instead. Groups of a convolution count as samples.
    """

    def __init__(self, use: LinearUse) -> None:
        self._use, linear = use, use.linear
        self._kind, self._groups = linear.kind, linear.layer.groups
        self._kernel = tuple(linear.weight.shape[2:])
        self._phi = use.axis.split(use.phi)  # (samples, repeat, …), a view
        self.samples = len(self._phi)
        stored = linear.weight.reshape(self._groups, linear.weight.shape[0] // self._groups, -1)
        self._rows_first = self._kind == "convolution" or (self._kind == "dense" and not linear.layer.transposed)
        self.weight = (stored.mT if self._rows_first else stored).detach()  # (groups, a, b)
        sizes = use.axis.split(use.phi if self._kind == "transposed convolution" else use.result).shape
        self.positions = sizes[1:-1].numel() if self._kind == "dense" else sizes[1] * sizes[3:].numel()

    def bytes_a_sample(self, columns: int) -> int:
        """What the product of one sample and its factors take."""
        groups, a, b = self.weight.shape
        entries = groups * (a * self.positions + columns * b * (self.positions + a))
        return entries * self.weight.element_size()

    def left(self, part: slice) -> Tensor:
        """φ of some samples: (samples × groups, a, positions)."""
        phi = self._phi[part]
        if self._kind == "dense":
            return phi.reshape(len(phi), -1, phi.shape[-1]).mT
        if self._kind == "convolution":
            return self._grouped(unfold(phi.flatten(0, 1), self._kernel, self._use.linear.settings))
        return self._grouped(phi.flatten(0, 1).flatten(2).unsqueeze(2))

    def right(self, deltas: list[Tensor], part: slice) -> Tensor:
        """δ of some samples and all columns: (samples × groups, positions, columns × b)."""
        found = [self._use.axis.split(delta)[part] for delta in deltas]
        if self._kind == "dense":
            return torch.cat([delta.reshape(len(delta), -1, delta.shape[-1]) for delta in found], 2)
        if self._kind == "convolution":
            return torch.cat([self._grouped(delta.flatten(0, 1).flatten(2).unsqueeze(2)) for delta in found], 1).mT
        most = tuple(self._use.phi.shape[2:])
        windows = [unfold(delta.flatten(0, 1), self._kernel, self._use.linear.settings, most) for delta in found]
        return torch.cat([self._grouped(window) for window in windows], 1).mT

    def product(self, deltas: list[Tensor], part: slice) -> Tensor:
        """g of some samples and all columns: (samples × groups, a, columns, b)."""
        g = torch.bmm(self.left(part), self.right(deltas, part))
        return g.reshape(*g.shape[:2], len(deltas), -1)

    def blocks(self, bytes_a_sample: int) -> Iterator[slice]:
        """Runs of samples whose products stay in the caches."""
        size = max(1, BLOCK_BYTES // bytes_a_sample)
        for first in range(0, self.samples, size):
            yield slice(first, first + size)

    def sum_of_squares(self, g: Tensor, shares: Tensor) -> Tensor:
        """Σ c g² over samples and columns, c of shape (samples, columns): (groups, a, b). Overwrites g."""
        groups, a, b = self.weight.shape
        squares = g.square_().reshape(len(shares), groups, a, -1, b)
        return torch.einsum("ngakb,nk->gab", squares, shares)

    def few_positions(self, columns: int) -> bool:
        """Whether products of pairs of positions, summed over columns first, cost less than g of every column.

        Σ_k (Σ_p δ_kp φ_p)² = Σ_pq (Σ_k δ_kp δ_kq) φ_p φ_q. In multiplications; an operation entry by entry counts as
        `ENTRYWISE` of those in a matrix product.
        """
        _, a, b = self.weight.shape
        pairs = self.positions * (self.positions + 1) // 2
        by_pairs = pairs * (a * b + ENTRYWISE * (a + columns * b))
        return by_pairs < columns * (self.positions + 2 * ENTRYWISE) * a * b

    def short_positions(self, columns: int) -> bool:
        """Whether ‖g‖² costs less by inner products of positions: Σ_k ‖Σ_p δ_kp φ_pᵀ‖² = Σ_pq (Σ_k δ_kp·δ_kq)(φ_p·φ_q)."""
        _, a, b = self.weight.shape
        return self.positions * (a + columns * b + ENTRYWISE) < columns * a * b

    def trace_by_pairs(self, deltas: list[Tensor], shares: Tensor) -> Tensor:
        """Σ c ‖g‖² over samples and columns, without g."""
        groups, a, b = self.weight.shape
        total = self.weight.new_zeros((), dtype=torch.float64)
        sizes = self.positions * groups * (a + 2 * b * len(deltas) + 2 * self.positions) * self.weight.element_size()
        for part in self.blocks(sizes):
            phi, delta = self.left(part), self.right(deltas, part)
            weights = shares[part].repeat_interleave(groups, 0).repeat_interleave(b, 1)
            inner = torch.bmm(delta * weights.unsqueeze(1), delta.mT)
            total += _inner_product(torch.bmm(phi.mT, phi), inner)
        return total

    def trace(self, g: Tensor, shares: Tensor) -> Tensor:
        """Σ c ‖g‖² over samples and columns."""
        if bool((shares == shares[0, 0]).all()):
            return _inner_product(g, g) * shares[0, 0]
        sums = g.square().sum((1, 3))  # (samples × groups, columns)
        return (sums.reshape(len(shares), -1, shares.shape[1]).sum(1) * shares).sum()

    def diagonal_by_pairs(self, deltas: list[Tensor], shares: Tensor) -> Tensor:
        """Σ c g² over samples and columns in the shape of the weight, without g."""
        groups, a, b = self.weight.shape
        total = self.weight.new_zeros(groups, a, b)
        sizes = self.positions * groups * (a + 2 * b * len(deltas)) * self.weight.element_size()
        for part in self.blocks(sizes):
            phi = self.left(part).reshape(-1, groups, a, self.positions)
            phi = phi.permute(3, 1, 2, 0).contiguous()  # (p, groups, a, n)
            delta = self.right(deltas, part).reshape(-1, groups, self.positions, len(deltas), b)
            delta = delta.permute(2, 3, 1, 0, 4).contiguous()  # (p, columns, groups, n, b)
            weighted = delta * shares[part].T[:, None, :, None]
            for p in range(self.positions):
                left = (phi[p] * phi[p:]).movedim(0, 2).flatten(2, 3)  # (groups, a, pairs × n)
                right = (weighted[p] * delta[p:]).sum(1)  # (pairs, groups, n, b)
                right[1:] *= 2  # p, q and q, p
                total.baddbmm_(left, right.transpose(0, 1).flatten(1, 2))
        return self.stored(total)

    def stored(self, array: Tensor) -> Tensor:
        """(groups, a, b) in the shape of the weight."""
        return (array.mT if self._rows_first else array).reshape(self._use.linear.weight.shape)

    def column_sums(self, gradients: Tensor) -> Tensor:
        """Σ_j W_ji g_ji from g (samples × groups, a, columns, b): (samples, columns of the sweep, columns of W)."""
        groups, a, _ = self.weight.shape
        g = gradients.reshape(-1, groups, a, *gradients.shape[2:])
        sums = torch.einsum("ngakb,gab->nkga", g, self.weight)
        kernel = torch.Size(self._kernel).numel() if self._kind == "convolution" else 1
        return sums.reshape(*sums.shape[:2], groups * (a // kernel), kernel).sum(3)

    def _grouped(self, array: Tensor) -> Tensor:
        """(samples × groups, channels a group × kernel, repeat × positions) from (samples × repeat, channels, kernel,
        positions)."""
        count, channels, kernel, positions = array.shape
        repeat = self._use.axis.repeat
        inner = channels // self._groups * kernel
        if repeat == 1:
            return array.reshape(count * self._groups, inner, positions)
        parted = array.reshape(count // repeat, repeat, self._groups, inner, positions)
        return parted.permute(0, 2, 3, 1, 4).reshape(-1, inner, repeat * positions)


def unfold(
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
    indices, summed, share = merged_tokens(pairs)
    contribution = summed.square() * (share * shares.unsqueeze(1)).unsqueeze(2)
    out.index_add_(0, indices.flatten(), contribution.flatten(0, 1).to(out.dtype))


def lookup_columns(pairs: list[tuple[LinearUse, Tensor]], shares: Tensor, out: Tensor) -> None:
    """Σ_n c_n (Σ_j W_jv g_jv)² for every entry v of the vocabulary, into `out`."""
    indices, summed, share = merged_tokens(pairs)
    weight = pairs[0][0].linear.weight.detach()
    sums = (summed * weight[indices]).sum(2)
    out.index_add_(0, indices.flatten(), (sums.square() * share * shares.unsqueeze(1)).flatten().to(out.dtype))


def moving(use: LinearUse, delta: Tensor) -> Tensor:
    """δ of a lookup where the row that is looked up moves: that of a padding index is held fixed."""
    fixed = use.linear.settings.get("padding")
    return delta if fixed is None else delta * (use.phi != fixed).unsqueeze(-1)


def merged_tokens(pairs: list[tuple[LinearUse, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Indices (n, T) over all uses; δ summed over equal tokens of a sample (n, T, d); one over how many (n, T)."""
    indices = torch.cat([use.axis.split(use.phi).flatten(1) for use, _ in pairs], dim=1)
    deltas = torch.cat([by_sample(use, moving(use, delta)) for use, delta in pairs], dim=1)
    same = (indices.unsqueeze(1) == indices.unsqueeze(2)).to(deltas.dtype)
    return indices, torch.bmm(same, deltas), 1 / same.sum(2)


def gram(rows: Tensor) -> Tensor:
    """rowsᵀ rows, at half the cost of a general product where BLAS can be asked for it."""
    if rows.device.type != "cpu" or not rows.numel() or rows.dtype not in (torch.float32, torch.float64):
        return rows.mT @ rows
    syrk = blas.dsyrk if rows.dtype == torch.float64 else blas.ssyrk
    upper = torch.from_numpy(syrk(1.0, rows.contiguous().numpy().T)).to(rows.dtype)  # the other triangle is zero
    return upper + upper.triu(1).mT


def _inner_product(first: Tensor, second: Tensor) -> Tensor:
    """Over all entries. torch.dot would add millions of them one after the other, and lose three digits."""
    total: Tensor = torch.linalg.vecdot(first.flatten(1), second.flatten(1)).sum(dtype=torch.float64)
    return total


def side_by_side(
    uses: Sequence[LinearUse], waiting: Sequence[tuple[Sequence[tuple[Tensor, Tensor | None] | None], Tensor]]
) -> tuple[Tensor, list[list[Tensor]]]:
    """The columns that wait, each as what arrived at every use and its share: shares as (samples, columns), δ of every use."""
    shares = torch.stack([share for _, share in waiting], 1)
    deltas = [
        [torch.zeros_like(use.result) if pair is None else pair[0] for pair in each]
        for use, each in zip(uses, zip(*(arrived for arrived, _ in waiting), strict=True), strict=True)
    ]
    return shares, deltas
