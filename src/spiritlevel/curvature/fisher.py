"""Sums over per-sample gradients: the diagonal of the empirical Fisher matrix, and its quadratic form at θ."""

from __future__ import annotations

import torch
from torch import Tensor

from spiritlevel.problem.batches import Batch
from spiritlevel.problem.problem import Problem
from spiritlevel.problem.running import RunningSums
from spiritlevel.problem.sharded import sum_over_data


def fisher_by_sample(problem: Problem, names: list[str]) -> dict[str, Tensor]:
    """(1/N) Σ_n (∂ℓ_n/∂θ)² of these parameters, a gradient a sample; of several processes each has its part."""
    running = RunningSums(problem)
    like = {name: problem.parameters[name] for name in names}
    sums = {name: torch.zeros_like(like[name], dtype=torch.float64) for name in names if not running.divides(name)}
    with problem.undisturbed():
        for chunk, weight in problem.chunks():
            found = fisher_of_batch(problem, names, chunk)
            for name in names:
                part = found.pop(name)
                if running.divides(name):
                    running.give(None, name, part.mul_(weight))
                else:
                    sums[name].add_(part, alpha=weight)
    running.finish()
    problem.work.add(passes=1, gradients=1)
    return running.joined(None, sum_over_data(problem, sums))


def fisher_of_batch(problem: Problem, names: list[str], batch: Batch) -> dict[str, Tensor]:
    """The same for the mean over one batch, in the problem's present precision."""
    leaves = problem.leaves()
    sums = {name: torch.zeros_like(leaves[name], dtype=torch.float64, requires_grad=False) for name in names}
    with torch.enable_grad():
        for n in range(len(batch)):
            loss = problem.chunk_loss(leaves, batch[n : n + 1])
            parts = torch.autograd.grad(loss, [leaves[name] for name in names], allow_unused=True)
            for name, part in zip(names, parts, strict=True):
                if part is not None:
                    sums[name].add_(part.double().square(), alpha=1 / len(batch))
    return sums


def fisher_form(problem: Problem) -> float:
    """(1/N) Σ_n (θ·∇ℓ_n)², streamed over the data."""
    total = 0.0
    with problem.undisturbed():
        for chunk, weight in problem.chunks():
            total += weight * fisher_form_of(problem, chunk)
    problem.work.add(passes=2, gradients=1)
    return problem.ranks.total(total)


def fisher_form_of(problem: Problem, batch: Batch) -> float:
    """The same for the mean over one batch."""
    slopes = _slopes_by_sample(problem, batch) if problem.whole else _slopes_at_once(problem, batch)
    return float(slopes.double().square().mean())


def _slopes_at_once(problem: Problem, batch: Batch) -> Tensor:
    """θ·∇ℓ_n of every sample: ∂ℓ_n/∂f_n times Jθ, with Jθ the derivative of uᵀJθ by u."""
    leaves = problem.leaves()
    with torch.enable_grad():
        outputs = problem.outputs(leaves, batch)
        if not isinstance(outputs, Tensor) or not outputs.dim() or len(outputs) != len(batch):
            return _slopes_by_sample(problem, batch)
        _, slope = problem.slopes(outputs, batch)
        u = torch.zeros_like(outputs, requires_grad=True)
        found = list(leaves.values())
        try:
            back = torch.autograd.grad(outputs, found, u, create_graph=True, allow_unused=True)
            along = sum(
                ((part * leaf.detach()).sum() for part, leaf in zip(back, found, strict=True) if part is not None)
            )
            if not isinstance(along, Tensor) or not along.requires_grad:
                return _slopes_by_sample(problem, batch)
            (image,) = torch.autograd.grad(along, u)
        except RuntimeError:  # an operation that can be differentiated once only
            return _slopes_by_sample(problem, batch)
    return (image * slope).flatten(1).sum(1) if image.dim() > 1 else image * slope


def _slopes_by_sample(problem: Problem, batch: Batch) -> Tensor:
    """A gradient a sample; a loss that calls the model itself is asked for whole batches, of one sample each."""
    leaves = problem.leaves()
    pieces = [batch] if problem.whole else [batch[n : n + 1] for n in range(len(batch))]
    found = []
    for piece in pieces:
        with torch.enable_grad():
            parts = torch.autograd.grad(problem.chunk_loss(leaves, piece), list(leaves.values()), allow_unused=True)
        pairs = zip(parts, leaves.values(), strict=True)
        found.append(sum(float((part.double() * leaf.detach()).sum()) for part, leaf in pairs if part is not None))
    return torch.tensor(found, dtype=torch.float64)
