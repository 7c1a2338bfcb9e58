"""Matrices A that mix the input features of a layer: W(φ + δAφ) = (W + δWA)φ, so that a change of features is a change of W.

For a convolution A mixes input channels, the same way at every position. The groups of a grouped convolution see
different channels, so there A is one block a group: a matrix that carried channels across groups is not a change of W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spiritlevel.errors import SpiritLevelError
from spiritlevel.guarantees.posterior import as_stored
from spiritlevel.network.layers import Layer

# A matrix has the square of this many entries.
MOST_FEATURES = 8192


@dataclass(frozen=True)
class Mixing:
    """What A does to one layer's weight. A is (groups, features a group, features a group)."""

    layer: Layer
    weight: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        groups, _, columns, _ = self.layer.matrix(self.weight).shape
        return groups, columns, columns

    def product(self, a: Tensor) -> Tensor:
        """WA, as the weight is stored."""
        blocks = torch.einsum("grck,gcd->grdk", self.layer.matrix(self.weight), a.to(self.weight))
        return as_stored(self.layer, blocks, self.weight.shape)

    def slope(self, gradient: Tensor) -> Tensor:
        """The gradient in A of a function of WA with this gradient in W."""
        w, g = self.layer.matrix(self.weight), self.layer.matrix(gradient)
        return torch.einsum("grck,grdk->gcd", w, g)


def orthogonal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniformly distributed orthogonal matrices; each has norm 1.

    >>> a = orthogonal((1, 3, 3), torch.Generator().manual_seed(0))
    >>> torch.allclose(a @ a.mT, torch.eye(3, dtype=a.dtype))
    True
    """
    parts: tuple[Tensor, Tensor] = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64))
    q, r = parts
    return q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def gaussian(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Matrices of independent Gaussian entries, divided by their spectral norm."""
    g = torch.randn(shape, generator=generator, dtype=torch.float64)
    norms: Tensor = torch.linalg.matrix_norm(g, 2)
    return g / norms.unsqueeze(-1).unsqueeze(-1)


RANDOM: dict[str, Callable[[tuple[int, ...], torch.Generator], Tensor]] = {
    "orthogonal": orthogonal,
    "gaussian": gaussian,
}


def norm(a: Tensor) -> float:
    """The spectral norm of A, the largest over its blocks."""
    return float(torch.linalg.matrix_norm(a.double(), 2).max())


def given(matrices: Tensor | Sequence[Tensor], shape: tuple[int, int, int]) -> list[Tensor]:
    """The user's own matrices, each as (groups, features, features)."""
    listed = [matrices] if isinstance(matrices, Tensor) else list(matrices)
    if not listed:
        raise SpiritLevelError("no matrices were given: pass one, or 'orthogonal' or 'gaussian' for random ones")
    return [_blocks(a, shape) for a in listed]


def _blocks(a: Tensor, shape: tuple[int, int, int]) -> Tensor:
    groups, features, _ = shape
    if tuple(a.shape) == shape:
        return a.detach()
    whole = groups * features
    if tuple(a.shape) != (whole, whole):
        also = f" or one block a group, {shape}" if groups > 1 else ""
        raise SpiritLevelError(
            f"A mixes the {whole} input features of the layer, so it must have shape ({whole}, {whole}){also}; "
            f"got {tuple(a.shape)}"
        )
    parts = a.detach().reshape(groups, features, groups, features)
    blocks = torch.stack([parts[g, :, g] for g in range(groups)])
    if int(blocks.count_nonzero()) != int(a.count_nonzero()):
        raise SpiritLevelError(
            f"A carries features across the {groups} groups of a grouped convolution, which no change of its weight does: "
            f"pass one block a group, shape {shape}"
        )
    return blocks


class SpectralBall:
    """{δ·WA : ‖A‖ ≤ 1}, as a region to ascend in. A linear function of A is largest at a polar factor, which has norm 1,
    and every step goes towards one, so that nothing ever has to be projected back."""

    def __init__(self, mixing: Mixing, delta: float, axes: Sequence[Tensor] = ()) -> None:
        self._mixing, self._delta, self._axes = mixing, delta, axes
        self.last = torch.zeros(mixing.shape, dtype=mixing.weight.dtype)  # the A of the latest perturbation

    def perturbation(self, coordinates: Tensor) -> Tensor:
        self.last = coordinates.reshape(self._mixing.shape)
        return self._delta * self._mixing.product(self.last).reshape(-1)

    def slope(self, gradient: Tensor) -> Tensor:
        return self._delta * self._mixing.slope(gradient.reshape(self._mixing.weight.shape)).reshape(-1)

    def furthest(self, slope: Tensor) -> Tensor:
        parts: tuple[Tensor, ...] = torch.linalg.svd(slope.reshape(self._mixing.shape), full_matrices=False)
        return (parts[0] @ parts[2]).reshape(-1)

    def starts(self) -> list[Tensor]:
        return [self.slope(axis) for axis in self._axes]

    def random_slope(self, generator: torch.Generator) -> Tensor:
        return orthogonal(self._mixing.shape, generator).to(self._mixing.weight).reshape(-1)
