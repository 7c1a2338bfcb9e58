"""Noise at the features of a layer, with the distribution that random matrices induce (petzka2019, Appendix D.1).

Drawing one A for all samples and averaging over A is the same, in expectation, as drawing ξ_n = Aφ_n anew for every
sample. Here the features themselves are changed, while the network runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spiritlevel.network.layers import LinearMap, ParameterMode
from spiritlevel.problem.problem import Problem

# Entries of the matrices drawn for one chunk. Where one a sample would be more, samples share them at random: each still
# has the right distribution, so the mean is still right, and its spread is measured.
MOST_ENTRIES, FEWEST_MATRICES = 1_000_000, 8

Draw = Callable[[int, torch.Generator], Tensor]


class NoFeaturesError(Exception):
    """The layer's inputs are indices, to which no noise can be added."""


@dataclass(frozen=True)
class Injection:
    """φ_n + δ·A_n φ_n at every use of one layer.

    Attributes:
        problem: The problem.
        layer: The weight's name.
        shape: (groups, features, features) of A.
        draw: (count, generator) → that many matrices, (count, groups, features, features).
        direction_only: Whether A is a uniform rotation, so that Aφ is a uniform direction of the length of φ.
    """

    problem: Problem
    layer: str
    shape: tuple[int, int, int]
    draw: Draw
    direction_only: bool

    def rise(self, delta: float, generator: torch.Generator) -> float:
        """The mean loss with fresh noise for every sample."""
        total = 0.0
        with self.problem.undisturbed(), torch.no_grad():
            for chunk, weight in self.problem.chunks():
                mode = _Injecting(self.problem.parameters, self.layer, self._change(delta, len(chunk), generator))
                with mode:
                    value = self.problem.chunk_loss(self.problem.parameters, chunk)
                total += weight * float(value)
        self.problem.work.add(passes=1)
        return total

    def _matrices(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        groups, features, _ = self.shape
        number = min(count, max(FEWEST_MATRICES, MOST_ENTRIES // (groups * features**2)))
        owners = torch.arange(count) if number == count else torch.randint(number, (count,), generator=generator)
        return self.draw(number, generator), owners

    def _change(self, delta: float, count: int, generator: torch.Generator) -> Callable[[LinearMap], Tensor]:
        drawn: list[Tensor] = []  # matrices and which sample has which, the same at every use of the layer

        def change(linear: LinearMap) -> Tensor:
            if linear.kind == "lookup":
                raise NoFeaturesError
            phi, axis = linear.inputs, -1 if linear.kind == "dense" else 1
            moved = phi.movedim(axis, 1)
            flat = moved.reshape(count, self.shape[0], self.shape[1], -1)
            if self.direction_only and flat.shape[3] == 1:
                noise = _directions(flat, generator)
            else:
                drawn.extend([] if drawn else self._matrices(count, generator))
                noise = _applied(drawn[0].to(flat), drawn[1], flat)
            return (flat + delta * noise).reshape(moved.shape).movedim(1, axis)

        return change


def _applied(matrices: Tensor, owners: Tensor, flat: Tensor) -> Tensor:
    """A_n φ_n, matrix by matrix: every matrix is applied to all samples that have it."""
    noise = torch.empty_like(flat)
    for index, a in enumerate(matrices):
        mine = (owners == index).nonzero().squeeze(1).to(flat.device)
        noise[mine] = torch.einsum("gdc,ngcp->ngdp", a, flat[mine])
    return noise


def _directions(flat: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform directions, of the length of every group's features."""
    raw = torch.randn(flat.shape, generator=generator, dtype=torch.float64).to(flat)
    lengths: Tensor = flat.norm(dim=2, keepdim=True) / raw.norm(dim=2, keepdim=True)
    return raw * lengths


class _Injecting(ParameterMode):
    """Runs a network with the features of one layer changed."""

    def __init__(self, parameters: Mapping[str, Tensor], layer: str, change: Callable[[LinearMap], Tensor]) -> None:
        super().__init__(parameters)
        self._layer, self._change = layer, change

    def on_linear(self, linear: LinearMap) -> Any:
        if linear.layer.name != self._layer:
            return linear.rebuild(linear.inputs)
        return linear.rebuild(self._change(linear))
