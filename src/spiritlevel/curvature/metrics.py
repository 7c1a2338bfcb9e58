"""Metrics on the changes of a layer, and the trace of the layer's block of the Hessian in them.

A metric is a pair of roots: Σ⁺ = left leftᵀ on the side of the inputs φ and C = right rightᵀ on the side of the results. A
change V = right Z leftᵀ with independent entries of Z raises the loss by ½·Σ C_ss' (Σ⁺)_jj' H_sj,s'j' on average; that sum
is Σ ‖rightᵀ g left‖² over the gradients g of the sweep. Three metrics are made here:

- "whitened": Σ = E φφᵀ and C = WΣWᵀ, so that the results of the layer receive noise of the covariance they have themselves;
- "relative": Σ = 1 and C = WWᵀ;
- "normalized": the same for features divided by their standard deviations.

The roots of a layer whose block is probed with random Z turn with the inputs and the results: the same Z then stands for the
same change of the function in every network that a linear symmetry leads to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from spiritlevel.curvature.moments import Moment, as_blocks, as_stored
from spiritlevel.network.layers import Layer

METRICS = WHITENED, RELATIVE, NORMALIZED = "whitened", "relative", "normalized"

# Layers with more inputs have no Σ that could be factored: it alone would take half a gigabyte.
MOST_INPUTS = 8192
# An eigenvalue of Σ (of unit diagonal) below this share of the largest is rounding: in units of the number of inputs and
# the precision of sums, or of the square of what rounding leaves in single-precision inputs.
RANK_MARGIN, SINGLE_NOISE = 4, 32
# So far above that share an eigenvalue may still be rounding.
UNCERTAIN = 100
# Σ is taken once more, of whitened inputs, where its condition is worse: sums of squares lose twice the digits.
WELL_CONDITIONED = 1e5


@dataclass(frozen=True)
class LayerMetric:
    """The metric of one layer.

    Attributes:
        layer, kind, shape: The layer, what it does with its inputs, and the shape of its weight.
        left: The root of Σ⁺: (groups, a, r), a diagonal (groups, a), or None for the identity.
        right: The root of C: (groups, b, s).
        rank, size: The rank of Σ, and how many inputs there are.
        doubt: How far, relatively, what is measured in this metric may be off by rounding in it.
        notes: What a reader must know.
    """

    layer: Layer
    kind: str
    shape: torch.Size
    left: Tensor | None
    right: Tensor
    rank: int
    size: int
    doubt: float = 0.0
    notes: tuple[str, ...] = ()

    @cached_property
    def covariance(self) -> Tensor:
        """C, (groups, b, b)."""
        return self.right @ self.right.mT

    def to(self, like: Tensor) -> LayerMetric:
        """The same in the precision and on the device of a tensor."""
        return replace(self, left=None if self.left is None else self.left.to(like), right=self.right.to(like))

    def inputs(self, phi: Tensor) -> Tensor:
        """leftᵀφ of φ with shape (samples × groups, a, positions)."""
        if self.left is None:
            return phi
        groups = len(self.left)
        parted = phi.reshape(-1, groups, *phi.shape[1:])
        turned = parted * self.left.unsqueeze(2) if self.left.dim() == 2 else self.left.mT @ parted
        return turned.flatten(0, 1)

    def results(self, delta: Tensor) -> Tensor:
        """rightᵀδ of δ with shape (samples × groups, positions, columns × b)."""
        groups, b, s = self.right.shape
        parted = delta.reshape(-1, groups, delta.shape[1] * (delta.shape[2] // b), b)
        return (parted @ self.right).reshape(*delta.shape[:2], -1, s).flatten(2)

    @property
    def coordinates(self) -> torch.Size:
        """The shape of Z: (groups, r, s)."""
        groups, b, s = self.right.shape
        inputs = self.shape.numel() // (groups * b) if self.left is None else self.left.shape[-1]
        return torch.Size((groups, inputs, s))

    def direction(self, z: Tensor) -> Tensor:
        """V = right Z leftᵀ in the shape of the weight."""
        if self.left is not None:
            z = z * self.left.unsqueeze(2) if self.left.dim() == 2 else self.left @ z
        return as_stored(self.layer, self.kind, z @ self.right.mT, self.shape)

    def pulled_back(self, gradient: Tensor) -> Tensor:
        """The adjoint of `direction`: rightᵀ g left as Z."""
        z = as_blocks(self.layer, self.kind, gradient) @ self.right
        if self.left is None:
            return z
        return z * self.left.unsqueeze(2) if self.left.dim() == 2 else self.left.mT @ z


Metrics = Mapping[str, Mapping[str, LayerMetric]]


# --- whitened ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Factor:
    """Σ = F Fᵀ of one group of inputs: F (a, r), L (a, r) with Lᵀ F = 1, how well conditioned, how many of r in doubt."""

    forward: Tensor
    back: Tensor
    condition: float
    uncertain: int = 0

    @property
    def rank(self) -> int:
        return self.forward.shape[1]


def factored(sigma: Tensor, *, single: bool) -> Factor:
    """The factor of a moment matrix, inputs brought to the same size first: their scale must not decide what counts.

    `single` says that the inputs were computed in single precision.
    """
    scale = sigma.diagonal().clamp(min=0).sqrt()
    alive = scale.nonzero().squeeze(1)
    scale = scale[alive]
    corr = sigma[alive][:, alive] / scale.unsqueeze(1) / scale
    size = len(alive)
    if not size:
        return Factor(sigma.new_zeros(len(sigma), 0), sigma.new_zeros(len(sigma), 0), 1.0)
    largest = float(corr.abs().sum(1).max())
    noise = max(RANK_MARGIN * size * torch.finfo(torch.float64).eps, SINGLE_NOISE**2 * _single() ** 2 * single)
    roots = _by_cholesky(corr, UNCERTAIN * noise * largest) or _by_eigenvalues(corr, noise * largest)
    forward, back, smallest, uncertain = roots
    full = sigma.new_zeros(len(sigma), forward.shape[1])
    return Factor(
        full.index_copy(0, alive, scale.unsqueeze(1) * forward),
        full.index_copy(0, alive, back / scale.unsqueeze(1)),
        largest / smallest,
        uncertain,
    )


def _single() -> float:
    return float(torch.finfo(torch.float32).eps)


def _by_cholesky(corr: Tensor, least: float) -> tuple[Tensor, Tensor, float, int] | None:
    """Roots of a matrix that surely has no eigenvalue below `least`; None for any other. Far cheaper than eigenvalues."""
    root, failed = torch.linalg.cholesky_ex(corr)
    if int(failed):
        return None
    inverse = torch.linalg.solve_triangular(root, torch.eye(len(root)).to(root), upper=False)
    smallest = float(1 / inverse.square().sum())
    return (root, inverse.mT, smallest, 0) if smallest > least else None


def _by_eigenvalues(corr: Tensor, least: float) -> tuple[Tensor, Tensor, float, int]:
    values, vectors = torch.linalg.eigh(corr)
    keep = values > least
    values, vectors = values[keep], vectors[:, keep]
    roots = values.sqrt()
    return vectors * roots, vectors / roots, float(values.min()), int((values < UNCERTAIN * least).sum())


def composed(first: Factor, second: Factor) -> Factor:
    """The factor of Σ from a first one and that of the moments of Lᵀφ."""
    return Factor(
        first.forward @ second.forward, first.back @ second.back, first.condition, first.uncertain + second.uncertain
    )


def turned(factor: Factor, sketch: Tensor) -> Factor:
    """The same with the columns of F in a basis that the data choose: they turn with φ, whatever root was found first."""
    basis = _orthogonal((factor.back.mT @ sketch)[:, : factor.rank])
    return replace(factor, forward=factor.forward @ basis, back=factor.back @ basis)


def _orthogonal(matrix: Tensor) -> Tensor:
    """Q of matrix = QR with a positive diagonal of R, which makes it the only one."""
    q, r = torch.linalg.qr(matrix)
    signed: Tensor = q * torch.where(r.diagonal() < 0, -1.0, 1.0)
    return signed


def whitened_metric(moment: Moment, weight: Tensor, factors: list[Factor], *, raw: bool, single: bool) -> LayerMetric:
    """Σ = E φφᵀ and C = WΣWᵀ; `raw` keeps roots that turn with the inputs, which may be larger than they need be."""
    blocks = as_blocks(moment.layer, moment.kind, weight.double())
    most = max(factor.rank for factor in factors)
    left = torch.stack([_padded(factor.back, most) for factor in factors])
    forward = torch.stack([_padded(factor.forward, most) for factor in factors])
    right = blocks.mT @ forward
    condition = max(factor.condition for factor in factors)
    rank, size = sum(factor.rank for factor in factors), blocks.shape[0] * blocks.shape[1]
    # What is left of rounding once the moments were taken of whitened inputs goes with the root of the condition.
    root = min(condition, WELL_CONDITIONED) + condition**0.5
    doubt = torch.finfo(torch.float64).eps * root + (_single() * condition**0.5 if single else 0.0)
    doubt += sum(factor.uncertain for factor in factors) / max(1, rank)
    return LayerMetric(
        moment.layer,
        moment.kind,
        weight.shape,
        left,
        right if raw else compressed(right),
        rank,
        size,
        doubt,
        _notes(moment, rank, size),
    )


def _padded(matrix: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(matrix, (0, columns - matrix.shape[1]))


def _notes(moment: Moment, rank: int, size: int) -> tuple[str, ...]:
    name = moment.layer.name
    notes = [f"{name}: its inputs span {rank} of {size} dimensions, and noise stays within them"] if rank < size else []
    if moment.also:
        notes.append(
            f"{name}: also used otherwise ({moment.also}); its metric is that of its first use ({moment.kind})"
        )
    return tuple(notes)


def compressed(right: Tensor) -> Tensor:
    """A root of the same C with no more columns than rows."""
    if right.shape[1] >= right.shape[2]:
        return right
    triangle: Tensor = torch.linalg.qr(right.mT, mode="r").R
    return triangle.mT


def lookup_metric(
    moment: Moment, weight: Tensor, frequency: Tensor, generator: torch.Generator | None, notes: tuple[str, ...]
) -> LayerMetric:
    """The metric of an embedding whose Σ has this diagonal; with a generator, C's root turns with the results."""
    root = frequency.double().sqrt()
    basis, triangle = torch.linalg.qr(root.mT * weight.double())  # (entries, s), (s, b)
    right = triangle.mT
    if generator is not None:
        random = torch.randn(len(weight), right.shape[1], generator=generator, dtype=torch.float64).to(root)
        right = right @ _orthogonal(basis.mT @ (root.mT * random))
    left = torch.where(root > 0, 1 / torch.where(root > 0, root, 1.0), 0.0)
    rank = int((root > 0).sum())
    return LayerMetric(
        moment.layer, moment.kind, weight.shape, left, right.unsqueeze(0), rank, root.shape[1], notes=notes
    )


# --- relative ----------------------------------------------------------------------------------------------------


def relative_metric(layer: Layer, kind: str, weight: Tensor, *, raw: bool) -> LayerMetric:
    """Σ = 1 and C = WWᵀ, for which the inputs need not be known."""
    right = as_blocks(layer, kind, weight.double()).mT
    groups, _, a = right.shape
    right = right if raw and kind != "lookup" else compressed(right)
    return LayerMetric(layer, kind, weight.shape, None, right, groups * a, groups * a)


def normalized_metric(moment: Moment, weight: Tensor, *, raw: bool) -> LayerMetric:
    """Σ = diag(σ²) with σ the standard deviation of every feature: of a channel, where a kernel sees several of its positions."""
    blocks = as_blocks(moment.layer, moment.kind, weight.double())
    second = moment.second if moment.second.dim() == 2 else moment.second.diagonal(dim1=1, dim2=2)
    taps = weight.shape[2:].numel() if moment.kind == "convolution" else 1
    second, first = (_over_taps(part / max(1, moment.count), taps) for part in (second, moment.first))
    variance = second - first.square()
    constant = (variance <= 1e-9 * second) & (second > 0)
    deviation = torch.where(constant, 1.0, variance.clamp(min=0).sqrt() * (second > 0))
    left = torch.where(deviation > 0, 1 / torch.where(deviation > 0, deviation, 1.0), 0.0)
    left, deviation = (part.repeat_interleave(taps, 1) for part in (left, deviation))
    right = blocks.mT * deviation.unsqueeze(1)
    right = right if raw and moment.kind != "lookup" else compressed(right)
    count = int(constant.sum())
    note = f"{moment.layer.name}: {count} inputs that never change are taken as they are"
    size = left.numel()
    return LayerMetric(
        moment.layer, moment.kind, weight.shape, left, right, int((left > 0).sum()), size, notes=(note,) * bool(count)
    )


def _over_taps(array: Tensor, taps: int) -> Tensor:
    """(groups, channels) from (groups, channels × taps): the mean over the positions of a kernel."""
    return array.reshape(len(array), -1, taps).mean(2)
