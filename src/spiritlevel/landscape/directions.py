"""Directions through a minimum, in units that mean something.

A direction is a dictionary of tensors by parameter name. Its normalization says what a step of length one is: relative
to nothing, to layers, filters or single weights, or what is left of it on the quotient modulo rescaling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spiritlevel.curvature.examine import examine
from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.curvature.lanczos import eigenpair
from spiritlevel.curvature.operators import Scaled
from spiritlevel.curvature.vectors import length
from spiritlevel.curvature.ways import Flat
from spiritlevel.errors import SpiritLevelError
from spiritlevel.problem.contract import Parameters
from spiritlevel.problem.problem import Problem
from spiritlevel.symmetry import find_symmetries, layer_directions, layer_metric, neuron_directions, node_metric

Normalization = Literal["none", "layer", "filter", "neuron", "quotient", "quotient neuron"]
Toward = nn.Module | Mapping[str, Tensor]

NORMALIZATIONS: Mapping[str, str] = {
    "none": "as drawn",
    "layer": "every tensor as long as the parameter it moves: ‖V_l‖ = ‖W_l‖",
    "filter": "every row (output filter) as long as the row it moves; biases and other vectors stay",
    "neuron": "every entry times the size of the weight it moves: V_i|W_i|",
    "quotient": "layer, then without what only rescales layers",
    "quotient neuron": "neuron, then without what only rescales neurons",
}
# The diagonal scale beneath each normalization: eigenvectors are those of S H S.
_SCALES = {"quotient": "layer", "quotient neuron": "neuron"}


@dataclass
class Finder:
    """Finds directions of a problem in one normalization."""

    problem: Problem
    normalization: str
    biases: bool | None
    seed: int
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._layers = examine(self.problem).layers
        self._move = self.normalization != "filter" if self.biases is None else self.biases

    def find(self, directions: Any, count: int) -> tuple[list[str], list[Parameters]]:
        """Labels and directions, normalized."""
        if directions == "random":
            labels = [f"seed {self.seed + k}" for k in range(count)]
            return labels, [self._horizontal(self._normalized(self._random(self.seed + k))) for k in range(count)]
        if directions == "eigen":
            pairs = self._eigen(count)
            return [f"eigenvalue {value:.4g}" for value, _ in pairs], [self._horizontal(each) for _, each in pairs]
        if isinstance(directions, str):
            raise SpiritLevelError(
                f'directions must be "random", "eigen" or a model of the same architecture, got {directions!r}'
            )
        others = directions if isinstance(directions, tuple | list) else [directions]
        if count == 2 and len(others) != 2:
            raise SpiritLevelError(f"a plane needs two models besides the first, got {len(others)}")
        found = [between(self.problem, other) for other in others]
        if self.normalization != "none":
            found = [self._horizontal(self._normalized({n: d[n] for n in self.problem.parameters})) for d in found]
        return [f"to model {k + 2}" for k in range(len(found))], found

    def _random(self, seed: int) -> Parameters:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
            for name, value in self.problem.parameters.items()
        }

    def _normalized(self, direction: Parameters) -> Parameters:
        theta = self.problem.parameters
        return {name: self._scaled(name, theta[name], direction[name]) for name in theta}

    def _scaled(self, name: str, weight: Tensor, step: Tensor) -> Tensor:
        scale = _SCALES.get(self.normalization, self.normalization)
        if name not in self._layers and not self._move:
            return torch.zeros_like(step)
        if scale == "none":
            return step
        if scale == "layer":
            return step * _quotient(weight.norm(), step.norm())
        if scale == "neuron":
            return step * weight.abs()
        sizes, lengths = self._row_norms(name, weight), self._row_norms(name, step)
        return step * _quotient(sizes, lengths)

    def _row_norms(self, name: str, tensor: Tensor) -> Tensor:
        """The norm of every row (output filter), in the shape of the tensor; the size of each entry where the tensor is not a weight."""
        if name not in self._layers:
            return tensor.abs()
        layer = self._layers[name]
        rows = layer.matrix(tensor)  # (groups, rows, columns, kernel)
        norms = rows.square().sum((2, 3), keepdim=True).sqrt().expand(rows.shape)
        if layer.transposed:
            norms = norms.transpose(1, 2)
        found: Tensor = norms.reshape(tensor.shape)
        return found

    def _eigen(self, count: int) -> list[tuple[float, Parameters]]:
        """The top eigenpairs of S H S, each found beside the ones before, as directions S·u."""
        products, flat = HessianProducts(self.problem), Flat(self.problem.parameters)
        self.notes += products.notes
        scale = flat.join([self._size(name, value) for name, value in self.problem.parameters.items()])
        operator, known = Scaled(products, scale), list[Tensor]()
        found = []

        def deflated(vector: Tensor) -> Tensor:
            for u in known:
                vector = vector - (u @ vector) * u
            image = operator.image(vector)
            for u in known:
                image = image - (u @ image) * u
            return image

        generator = torch.Generator().manual_seed(self.seed)
        for k in range(min(count, flat.size)):
            start = torch.randn(flat.size, generator=generator, dtype=torch.float64).to(scale) * (scale > 0)
            pair = eigenpair(deflated, start, tolerance=1e-3)
            if not pair.converged:
                self.notes.append(f"eigenvector {k + 1} has a residual of {pair.residual:.1e}")
            vector = pair.vector * (1 if float(pair.vector.sum()) >= 0 else -1)
            known.append(vector)
            found.append((pair.value, flat.to_dict(scale * vector)))
        return found

    def _size(self, name: str, weight: Tensor) -> Tensor:
        """S at a parameter: what a step of length one means there."""
        scale = _SCALES.get(self.normalization, self.normalization)
        if name not in self._layers and not self._move:
            return torch.zeros_like(weight)
        if scale == "none":
            return torch.ones_like(weight)
        if scale == "layer":
            return weight.new_tensor(length(weight)).expand(weight.shape)
        return weight.abs() if scale == "neuron" else self._row_norms(name, weight)

    def _horizontal(self, direction: Parameters) -> Parameters:
        """Without the part that only rescales, which changes no output to first order."""
        if self.normalization not in _SCALES:
            return direction
        symmetries = find_symmetries(self.problem.model, self.problem.data.first.inputs)
        theta = {name: value.cpu() for name, value in self.problem.parameters.items()}
        by_layer = self.normalization == "quotient"
        moves = layer_directions(symmetries) if by_layer else neuron_directions(symmetries)
        if moves.dimension == 0:
            self.notes.append("this network has no such rescaling, so nothing was projected out")
            return direction
        step = {name: value.cpu() for name, value in direction.items()}
        found = moves.project_horizontal(layer_metric if by_layer else node_metric, theta, step)
        return {name: found[name].to(direction[name]) for name in direction}


def between(problem: Problem, other: Toward) -> Parameters:
    """θ' − θ for a second model or state of the same architecture, with the buffers that differ.

    A buffer that is infinite in one and not in the other cannot be mixed and is refused.
    """
    state = dict(other) if isinstance(other, Mapping) else other.state_dict()
    own = {**dict(problem.model.named_buffers()), **dict(problem.model.named_parameters())}
    missing = [name for name in own if name not in state and name in problem.parameters]
    odd = [name for name in own if name in state and state[name].shape != own[name].shape]
    if missing or odd:
        wrong = (odd or missing)[0]
        got = "no such tensor" if wrong in missing else f"shape {tuple(state[wrong].shape)}"
        raise SpiritLevelError(
            f"a line between two models needs the same architecture: {wrong} has shape {tuple(own[wrong].shape)}, "
            f"but the second model has {got}"
        )
    like = problem.parameters_like()
    moves = {
        name: _difference(state[name].detach().to(like), tensor.detach().to(like))
        for name, tensor in own.items()
        if name in state and tensor.is_floating_point()
    }
    unmixable = [name for name, step in moves.items() if not bool(step.isfinite().all())]
    if unmixable:
        raise SpiritLevelError(
            f"there is no line between the two models: {unmixable[0]} is not finite where they differ"
        )
    return {name: step for name, step in moves.items() if name in problem.parameters or bool(step.any())}


def _difference(there: Tensor, here: Tensor) -> Tensor:
    """there − here, and 0 where they are equal: a causal mask holds infinities."""
    return torch.where(there == here, 0.0, there - here)


def _quotient(size: Tensor, length: Tensor) -> Tensor:
    return torch.where(length > 0, size / torch.where(length > 0, length, 1.0), 0.0)
