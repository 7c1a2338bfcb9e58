"""The Hessian of one batch times a vector, in each way that torch offers.

`by_graph` differentiates the graph of the gradient and is the cheapest; `forward_over_reverse` serves operations that have a
forward derivative only; `by_difference` needs nothing but gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from spiritlevel.curvature.cheap import CheapSecondDerivatives
from spiritlevel.curvature.twofold import Asked
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.contract import Parameters
from spiritlevel.problem.problem import Problem, gradients_of
from spiritlevel.problem.tensors import is_about_precision

Method = Literal["kept graph", "jvp of the gradient", "central differences"]
Objective = Callable[[Problem, Parameters, Batch], Tensor]
Edges = list[GradientEdge | None]
Vector = Mapping[str, Tensor]  # on some parameters
# The ends of a difference, in steps: to both sides of a point, or to one.
CENTRAL, FORWARD, BACKWARD = (1, -1), (1, 0), (0, -1)


def loss_objective(problem: Problem, parameters: Parameters, chunk: Batch) -> Tensor:
    """The mean loss over a chunk: its Hessian is H."""
    return problem.chunk_loss(parameters, chunk)


def remainder_objective(problem: Problem, parameters: Parameters, chunk: Batch) -> Tensor:
    """Σ_n r_n·f_n with r = ∇ℓ held fixed: its Hessian is H less the Gauss–Newton matrix."""
    outputs = problem.outputs(parameters, chunk)
    probe = outputs.detach().requires_grad_()
    (slope,) = torch.autograd.grad(problem.loss_function.mean(probe, chunk.targets), probe)
    total: Tensor = (outputs * slope).sum()
    return total


class Flat:
    """Parameters as one vector and back."""

    def __init__(self, parameters: Parameters) -> None:
        self.names = list(parameters)
        self.shapes = [parameters[name].shape for name in self.names]
        self.sizes = [shape.numel() for shape in self.shapes]
        self.size = sum(self.sizes)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.reshape(-1) for part in parts])

    def split(self, vector: Tensor) -> list[Tensor]:
        pieces = torch.split(vector, self.sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def to_dict(self, vector: Tensor) -> Parameters:
        return dict(zip(self.names, self.split(vector), strict=True))

    def slices(self) -> dict[str, slice]:
        ends = torch.tensor(self.sizes).cumsum(0).tolist()
        return {name: slice(end - size, end) for name, end, size in zip(self.names, ends, self.sizes, strict=True)}


class Ways:
    """Products with the Hessian of one batch's objective, at any point."""

    def __init__(self, problem: Problem, objective: Objective, flat: Flat) -> None:
        self.problem, self.objective, self.flat = problem, objective, flat
        self._runs_in_double = True  # until it says otherwise

    def gradient(self, point: Parameters, batch: Batch) -> list[Tensor]:
        leaves = self.problem.leaves(point)
        with torch.enable_grad():
            return gradients_of(self.objective(self.problem, leaves, batch), list(leaves.values()))

    def by_graph(self, point: Parameters, batch: Batch, direction: list[Tensor]) -> list[Tensor]:
        return self.images_by_graph(point, batch, [direction])[0]

    def images_by_graph(
        self, point: Parameters, batch: Batch, directions: Sequence[list[Tensor]]
    ) -> list[list[Tensor]]:
        """The products with several directions, by one graph."""
        leaves = {name: value.detach().requires_grad_() for name, value in point.items()}
        _, gradient = self.graph(leaves, batch)
        _refuse_dead_ends(gradient)
        return [pull_back(edges_of(gradient), list(leaves.values()), direction) for direction in directions]

    def graph(self, leaves: Parameters, batch: Batch, *, values: bool = True) -> tuple[Tensor, list[Tensor]]:
        """The objective of a batch and its gradient, to be differentiated once more; without `values`, for nothing else."""
        asked = Asked()
        with torch.enable_grad(), CheapSecondDerivatives(None if values else asked):
            value = self.objective(self.problem, leaves, batch)  # which may take gradients of its own
            asked.values = values
            return value, gradients_of(value, list(leaves.values()), create_graph=True)

    def forward_over_reverse(self, parameters: Parameters, chunk: Batch, parts: list[Tensor]) -> list[Tensor]:
        names = self.flat.names

        def gradient(*tensors: Tensor) -> tuple[Tensor, ...]:
            def value(*point: Tensor) -> Tensor:
                return self.objective(self.problem, dict(zip(names, point, strict=True)), chunk)

            found: tuple[Tensor, ...] = torch.func.grad(value, argnums=tuple(range(len(names))))(*tensors)
            return found

        point = tuple(parameters[name].detach() for name in names)
        return list(torch.func.jvp(gradient, point, tuple(parts))[1])

    def by_difference(
        self,
        parameters: Parameters,
        chunk: Batch,
        parts: list[Tensor],
        stretch: float = 1.0,
        sides: tuple[int, int] = CENTRAL,
    ) -> list[Tensor]:
        """(∇L(θ+hv) − ∇L(θ−hv)) / 2h with h at the cube root of the precision, relative to θ and v; or of one side only.

        In double precision wherever the network runs in it: in single precision a step that is long enough to be seen is often
        too long for a network of many kinks.
        """
        if self.distance(parts) == 0:
            return [torch.zeros_like(part) for part in parts]
        own = parts[0].dtype
        if own == torch.float32 and self._runs_in_double:
            try:
                with self.problem.in_precision(torch.float64) as double:
                    point = {name: value.double() for name, value in parameters.items()}
                    found = self._difference(point, double(chunk), [part.double() for part in parts], stretch, sides)
                return [part.to(own) for part in found]
            except RuntimeError as error:
                if not is_about_precision(error):
                    raise
                self._runs_in_double = False
        return self._difference(parameters, chunk, parts, stretch, sides)

    def _difference(
        self, parameters: Parameters, chunk: Batch, parts: list[Tensor], stretch: float, sides: tuple[int, int]
    ) -> list[Tensor]:
        values = [parameters[name] for name in self.flat.names]
        step = self._step(values, parts, stretch)
        ends = []
        for side in sides:
            moved = [value + side * step * part for value, part in zip(values, parts, strict=True)]
            ends.append(self.gradient(dict(zip(self.flat.names, moved, strict=True)), chunk))
        width = (sides[0] - sides[1]) * step
        return [(last - first) / width for last, first in zip(*ends, strict=True)]

    def noise_of_difference(
        self, parameters: Parameters, parts: list[Tensor], gradient: float, stretch: float = 1.0
    ) -> float:
        """How long a difference of gradients of this length may be by rounding alone, where they are all the same."""
        if not any(bool(part.any()) for part in parts):
            return 0.0
        eps = torch.finfo(torch.float64 if self._runs_in_double else parts[0].dtype).eps
        values = [parameters[name].double() for name in self.flat.names]
        return eps * gradient / self._step(values, [part.double() for part in parts], stretch)

    def hidden_by_rounding(self, parts: list[Tensor]) -> float:
        """How much of vᵀHv a difference of gradients may not show, because rounding takes it from the steepest samples'."""
        problem = self.problem
        with problem.undisturbed():
            size = self.distance(self.gradient(problem.parameters, problem.telling_samples(2)))
        return self.noise_of_difference(problem.parameters, parts, size) * self.distance(parts)

    def _step(self, values: list[Tensor], parts: list[Tensor], stretch: float) -> float:
        precision: float = torch.finfo(values[0].dtype).eps ** (1 / 3)
        return precision * self._reach(values, parts) * 0.1 * stretch

    def distance(self, first: list[Tensor], second: list[Tensor] | None = None) -> float:
        """The length of a vector over the parameters, or of the difference of two."""
        return self.problem.shards.norm(distance(first, second))

    def _reach(self, values: list[Tensor], parts: list[Tensor]) -> float:
        """How many times a direction goes into the parameters: into the matrix that it moves the most, for its size.

        Rescaled networks have matrices of very different sizes, and a step that suits the largest leaves the others far behind.
        """
        matrices = [self.problem.is_matrix(name) for name in self.flat.names]
        sizes = [
            (self.distance([value]), self.distance([part]))
            for value, part, matrix in zip(values, parts, matrices, strict=True)
            if matrix
        ]
        reaches = [size / moved for size, moved in sizes if size > 0 and moved > 0]
        return min(reaches, default=max(self.distance(values), 1e-30) / self.distance(parts))


def _refuse_dead_ends(gradient: list[Tensor]) -> None:
    """Raise where an operation cannot be differentiated again.

    torch marks it (`once_differentiable`) by a node that raises when it is reached. It leads to no
    parameter, so it never is: its part of the product would be missing without a word.
    """
    waiting: list[Any] = [part.grad_fn for part in gradient]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::Error":
            raise RuntimeError("an operation of the network is marked as differentiable only once")
        waiting.extend(following for following, _ in node.next_functions)


def edges_of(gradient: list[Tensor]) -> Edges:
    """Where vectors enter the graph of a gradient; nowhere for a part that does not depend on the parameters."""
    return [get_gradient_edge(part) if part.requires_grad else None for part in gradient]


def pull_back(edges: Edges, leaves: list[Tensor], vectors: list[Tensor]) -> list[Tensor]:
    """∂(gradient·vectors)/∂leaves."""
    live = [(edge, vector) for edge, vector in zip(edges, vectors, strict=True) if edge is not None]
    if not live:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(
        [edge for edge, _ in live], leaves, [vector for _, vector in live], retain_graph=True, allow_unused=True
    )
    return [torch.zeros_like(leaf) if part is None else part for leaf, part in zip(leaves, found, strict=True)]


def inner_product(first: Vector, second: Vector) -> float:
    """In double precision, over the parameters of the second.

    >>> inner_product({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 4.0])})
    11.0
    """
    return sum(float((first[name].double() * part.double()).sum()) for name, part in second.items())


def distance(first: list[Tensor], second: list[Tensor] | None = None) -> float:
    parts = first if second is None else [a - b for a, b in zip(first, second, strict=True)]
    return math.hypot(*(float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in parts))
