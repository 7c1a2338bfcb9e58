"""The dense oracle: every second derivative of a small problem, written down. For tests and for n up to a few thousand."""

from __future__ import annotations

import torch
from torch import Tensor

from spiritlevel.problem.problem import Problem


def dense_hessian(problem: Problem) -> Tensor:
    """∇²L over all parameters in the order of `problem.parameters`: (n, n), by double backward, row by row.

    Independent of the engine: one graph over each chunk, no taps, no probes.
    """
    size = sum(tensor.numel() for tensor in problem.parameters.values())
    if size > 5000:
        raise ValueError(
            f"a dense Hessian of {size} parameters would take {size * size * 8 / 1e9:.1f} GB; 5000 is the limit"
        )
    total = torch.zeros(size, size, dtype=torch.float64)
    with problem.undisturbed(), torch.enable_grad():
        for chunk, weight in problem.chunks():
            leaves = problem.leaves()
            values = list(leaves.values())
            loss = problem.chunk_loss(leaves, chunk)
            gradient = _flat(torch.autograd.grad(loss, values, create_graph=True, allow_unused=True), values)
            for i in range(size):
                if gradient.requires_grad:
                    row = torch.autograd.grad(gradient[i], values, retain_graph=True, allow_unused=True)
                    total[i] += weight * _flat(row, values).double()
    return (total + total.mT) / 2


def _flat(parts: tuple[Tensor | None, ...], like: list[Tensor]) -> Tensor:
    return torch.cat(
        [
            torch.zeros_like(value).reshape(-1) if part is None else part.reshape(-1)
            for part, value in zip(parts, like, strict=True)
        ]
    )
