"""The last layer under cross entropy in closed form: one forward pass, however many classes there are.

The Hessian in the logits of one position is diag(p) − ppᵀ, so that Σ_ss' ⟨w_s, w_s'⟩ (diag(p) − ppᵀ)_ss' is the variance of
the rows of W when s is drawn with the probabilities p, and relative flatness is E ‖φ‖² Var_p(w_s).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spiritlevel.curvature.moments import as_blocks
from spiritlevel.network.layers import Function, LinearMap, ParameterMode
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.factors import SoftmaxFactor
from spiritlevel.problem.losses import output_factor
from spiritlevel.problem.problem import Problem

# Probabilities that are laid out at a time.
ROWS_BYTES = 64 << 20


class _Last(ParameterMode):
    """Keeps the latest linear map and its result."""

    use: tuple[LinearMap, Tensor] | None = None

    def on_linear(self, linear: LinearMap) -> Any:
        result = linear.rebuild(linear.inputs)
        self.use = (linear, result)
        return result

    def on_other(self, _name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)


def last_layer_flatness(problem: Problem) -> tuple[str, float] | None:
    """The last layer's name and E ‖φ‖² Var_p(w_s); None where the outputs are not those of a dense layer or not logits."""
    if problem.whole:
        return None
    total, names = 0.0, set()
    for chunk, weight in problem.chunks():
        found = last_layer_flatness_of(problem, chunk)
        if found is None:
            return None
        names.add(found[0])
        total += weight * found[1]
    problem.work.add(passes=1)
    total = problem.ranks.total(total)
    return (names.pop(), total) if len(names) == 1 else None


def last_layer_flatness_of(problem: Problem, batch: Batch) -> tuple[str, float] | None:
    """The same for the mean over one batch."""
    parameters = problem.leaves()
    with problem.undisturbed(), torch.no_grad():
        mode = _Last(parameters)
        with mode:
            outputs = problem.outputs(parameters, batch)
        if mode.use is None or not isinstance(outputs, Tensor) or batch.targets is None:
            return None
        linear, result = mode.use
        factor = output_factor(problem.loss_function, outputs, batch.targets)
        if linear.kind != "dense" or not isinstance(factor, SoftmaxFactor) or not _same(outputs, result):
            return None
        weight = as_blocks(linear.layer, "dense", linear.weight)[0].mT.double()  # (classes, inputs)
        probabilities = factor.root.double().square().flatten(0, 1)
        scale = factor.scale.double().square().flatten()
        phi = linear.inputs.reshape(-1, weight.shape[1]).double()
        share = scale * phi.square().sum(1)
        return linear.layer.name, float((share * row_variances(weight, probabilities)).sum() / len(batch))


def _same(outputs: Tensor, result: Tensor) -> bool:
    """Whether the outputs are the layer's results, with the classes in the second dimension where there are positions."""
    result = result.movedim(-1, 1) if result.dim() > 2 else result
    return outputs.shape == result.shape and bool(torch.equal(outputs, result))


def row_variances(weight: Tensor, probabilities: Tensor) -> Tensor:
    """Var_{s∼p}(w_s) = Σ_s p_s ‖w_s − Σ p w‖² for every row of probabilities, taken around the likeliest row of W.

    Around the mean itself nearly everything would cancel for a network that is certain.

    >>> weight = torch.tensor([[0.0], [2.0]], dtype=torch.float64)
    >>> row_variances(weight, torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=torch.float64)).tolist()
    [1.0, 0.0]
    """
    squares = weight.square().sum(1)
    found = []
    for p in torch.split(probabilities, max(1, ROWS_BYTES // (8 * weight.shape[0]))):
        best = p.argmax(1, keepdim=True)
        others = p.scatter(1, best, 0.0)
        centre = weight[best.squeeze(1)]
        distances = squares - 2 * centre @ weight.mT + squares[best]
        mean = others @ weight - others.sum(1, keepdim=True) * centre
        found.append((others * distances.clamp(min=0)).sum(1) - mean.square().sum(1))
    return torch.cat(found)
