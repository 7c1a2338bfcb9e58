"""∇²ℓ at the outputs of each sample as a sum of columns, which a sweep pulls back through the network one by one."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


class OutputFactor(ABC):
    """A factor of ∇²ℓ_n at the outputs of each sample: ∇²ℓ_n = Σ_k sign_k s_k s_kᵀ."""

    @property
    @abstractmethod
    def num_columns(self) -> int:
        """How many columns every sample has."""

    @abstractmethod
    def columns(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Every column as a cotangent of the outputs, with its sign for each sample."""

    @abstractmethod
    def sample(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Random columns Sε with ε = ±1, whose expected outer product is the positive, then the negative part."""


class OrderedFactor(OutputFactor):
    """A factor whose columns come by their size for every sample, the largest first."""

    @abstractmethod
    def sizes(self) -> Tensor | None:
        """‖s_k‖² of every sample's columns, (N, columns); None where there are several positions, or too few classes."""

    @abstractmethod
    def combined(self, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """All columns in one, each times its weight, (N, columns)."""


@dataclass(frozen=True)
class BlockFactor(OutputFactor):
    """A factor kept as arrays: Σ over blocks d and columns r of signs·b bᵀ.

    The Hessian of most losses falls into blocks (one position of a segmentation, one output of a regression), so
    `blocks` keeps them apart: (N, D blocks, C entries a block, R columns a block). `signs` is (N, D, R) of ±1, or
    None where all are +1. `restore` gives an (N, D, C) tensor the shape of the outputs.
    """

    blocks: Tensor
    signs: Tensor | None
    restore: Callable[[Tensor], Tensor]

    @property
    def num_columns(self) -> int:
        return self.blocks.shape[1] * self.blocks.shape[3]

    def columns(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        for d in range(self.blocks.shape[1]):
            for r in range(self.blocks.shape[3]):
                vector = torch.zeros_like(self.blocks[..., 0])
                vector[:, d] = self.blocks[:, d, :, r]
                yield self.restore(vector), None if self.signs is None else self.signs[:, d, r]

    def sample(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor | None]]:
        shape = self.blocks.shape[0], self.blocks.shape[1], self.blocks.shape[3]
        signs = torch.randint(0, 2, shape, generator=generator).to(self.blocks) * 2 - 1
        if self.signs is None:
            yield self._combine(signs), None
            return
        for sign in (1.0, -1.0):
            part = (self.signs == sign).to(signs)
            if bool(part.any()):
                yield self._combine(signs * part), torch.full_like(signs[:, 0, 0], sign)

    def _combine(self, weights: Tensor) -> Tensor:
        return self.restore(torch.einsum("ndcr,ndr->ndc", self.blocks, weights))


@dataclass(frozen=True)
class SoftmaxFactor(OrderedFactor):
    """diag(p) − ppᵀ as C−1 columns for every position, made one at a time: C² numbers a sample are never there.

    The columns of a position come by the size of their p_k, the largest first.

    S = diag(√p) − p√pᵀ has C columns, but S√p = 0. With m the likeliest class, a Householder reflection Q that maps √p
    to −e_m leaves S Sᵀ = (SQ)(SQ)ᵀ and makes column m vanish, so one pull-back in C is saved. The entries of the others
    are √p_i Q_ik with Q = 1 − u uᵀ/(1 + √p_m), u = √p + e_m. Column k is of the size of √p_k and nothing cancels in it,
    so that columns of samples of which the network is certain are as accurate as all others.

    root: √p, (N, D positions, C). scale: (N, D), what every column is multiplied by. restore: As in `BlockFactor`.
    """

    root: Tensor
    scale: Tensor
    restore: Callable[[Tensor], Tensor]

    @property
    def num_columns(self) -> int:
        return self.root.shape[1] * max(1, self.root.shape[2] - 1)

    @functools.cached_property
    def _sorted(self) -> tuple[Tensor, Tensor, Tensor]:
        """The order of the classes, by falling probability with the likeliest last; √p in it, and u."""
        order = self.root.argsort(dim=2, descending=True, stable=True).roll(-1, 2)
        root = self.root.gather(2, order)
        u = root.clone()
        u[..., -1] += 1
        return order, root, u

    def columns(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        order, root, u = self._sorted
        reflected = self._reflected()
        for d in range(root.shape[1]):
            for k in range(max(1, root.shape[2] - 1)):
                vector = torch.zeros_like(root)
                if root.shape[2] > 1:  # one class has no curvature
                    torch.mul(reflected[:, d], u[:, d, k : k + 1], out=vector[:, d])
                    vector[:, d, k] += root[:, d, k] * self.scale[:, d]
                yield self.restore(torch.zeros_like(root).scatter_(2, order, vector)), None

    def _reflected(self) -> Tensor:
        """−√p_i u_i / (1 + √p_m): column k is u_k times this, plus √p_k in its own place."""
        _, root, u = self._sorted
        return -root * u / (1 + root[..., -1:]) * self.scale.unsqueeze(2)

    def sizes(self) -> Tensor | None:
        if self.root.shape[1] != 1 or self.root.shape[2] < 3:
            return None
        _, root, u = self._sorted
        reflected, own = self._reflected().square().sum(2, keepdim=True), (root * self.scale.unsqueeze(2)).square()
        cross = 2 * own * u.square() / (1 + root[..., -1:])
        return (u.square() * reflected - cross + own)[:, 0, :-1]

    def combined(self, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        order, root, u = self._sorted
        weights = torch.nn.functional.pad(weights.to(root), (0, 1)).unsqueeze(1)
        vector = self._reflected() * (u * weights).sum(2, keepdim=True) + root * weights * self.scale.unsqueeze(2)
        return self.restore(torch.zeros_like(root).scatter_(2, order, vector)), None

    def sample(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor | None]]:
        signs = torch.randint(0, 2, self.root.shape, generator=generator).to(self.root) * 2 - 1
        overlap = (self.root * signs).sum(2, keepdim=True)
        yield self.restore(self.root * (signs - self.root * overlap) * self.scale.unsqueeze(2)), None
