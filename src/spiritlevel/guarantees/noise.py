"""(62) of tsuzuku2019: noise scales by stochastic gradient, without the second-order step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from spiritlevel.guarantees.posterior import Scale
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.contract import Parameters
from spiritlevel.problem.problem import Problem

BATCH, RATE = 256, 0.05


def optimize_scales(
    problem: Problem,
    parameters: Parameters,
    offsets: Parameters,
    scales: Mapping[str, Scale],
    lam: float,
    *,
    steps: int,
    generator: torch.Generator,
) -> dict[str, Scale]:
    """min over σ, σ' of E L_S(θ + s·ε) + Σ (θ−θ₀)²/(2λs²), from the scales given, by Adam on their logarithms.

    The problem's loss stands for L_S, one draw of ε and one batch a step. What is returned is the mean of the second half
    of the path, since single steps are noisy.
    """
    moving = {name: _released(scale) for name, scale in scales.items()}
    leaves = [leaf for scale in moving.values() for leaf in _logs(scale)]
    optimizer = torch.optim.Adam(leaves, lr=RATE)
    sums = [torch.zeros_like(leaf) for leaf in leaves]
    kept, batches = steps - steps // 2, _batches(problem)
    for step in range(steps):
        with problem.undisturbed(), torch.enable_grad():
            value = _objective(problem, parameters, offsets, moving, lam, next(batches), generator)
            gradients = torch.autograd.grad(value, leaves, allow_unused=True)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        optimizer.step()
        if step >= steps - kept:
            for total, leaf in zip(sums, leaves, strict=True):
                total += leaf.detach() / kept
    found = iter(sums if steps else [leaf.detach() for leaf in leaves])
    return {name: _with_logs(scale, found) for name, scale in moving.items()}


def _objective(
    problem: Problem,
    parameters: Parameters,
    offsets: Parameters,
    scales: Mapping[str, Scale],
    lam: float,
    batch: Batch,
    generator: torch.Generator,
) -> Tensor:
    drawn, cost = dict(parameters), torch.zeros((), dtype=torch.float64)
    for name, scale in scales.items():
        theta = parameters[name].double()
        deviation = scale.deviation(theta)
        noise = torch.randn(theta.shape, generator=generator, dtype=torch.float64).to(theta.device)
        drawn[name] = (theta + deviation * noise).to(parameters[name].dtype)
        cost = cost + (offsets[name] / deviation).square().sum() / (2 * lam)
    return problem.chunk_loss(drawn, batch).double() + cost


def _batches(problem: Problem) -> Iterator[Batch]:
    while True:
        for batch, _ in problem.chunks(min(BATCH, problem.chunk_size)):
            yield batch


def _released(scale: Scale) -> Scale:
    columns = None if scale.columns is None else scale.columns.detach().clone().requires_grad_()
    return replace(scale, rows=scale.rows.detach().clone().requires_grad_(), columns=columns)


def _logs(scale: Scale) -> list[Tensor]:
    return [scale.rows] if scale.columns is None else [scale.rows, scale.columns]


def _with_logs(scale: Scale, found: Iterator[Tensor]) -> Scale:
    """The scale with new logarithms, its first column 1 again."""
    rows = next(found)
    if scale.columns is None:
        return replace(scale, rows=rows)
    columns = next(found)
    return replace(scale, rows=rows + columns[:, :1], columns=columns - columns[:, :1])
