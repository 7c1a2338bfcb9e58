"""What every library is asked for, and how far an answer is from the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Arrays = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """One question.

    Attributes:
        name: Its key in the results.
        title: What a reader calls it.
        measures: What this library is asked for; None for the default set.
        accuracy: Relative accuracy asked.
        answer: Which entry of the reference an answer is compared with; None where there is only a cost.
    """

    name: str
    title: str
    measures: tuple[str, ...] | None
    accuracy: float = 1e-2
    answer: str | None = None


SWEEP = ("hessian_trace", "kappa_trace_sum", "rho_sum", "rho_row_sum", "normalized_sharpness")
OPERATORS = ("hessian_spectral_norm", "riemannian_spectral_norm", "riemannian_nodewise_spectral_norm")

TASKS = {
    task.name: task
    for task in (
        Task("trace", "total trace", ("hessian_trace",), 1e-3, "trace"),
        Task("layer_traces", "trace of every layer", ("kappa_trace_sum",), 1e-3, "layer_traces"),
        Task("diagonal", "diagonal", ("normalized_sharpness",), 1e-3, "diagonal"),
        Task("rho", "all ρ, rows and columns", ("rho_sum", "rho_row_sum"), 1e-3, "rho"),
        Task("lambda_1e-2", "λ_max(H) to 1e-2", ("hessian_spectral_norm",), 1e-2, "lambda"),
        Task("lambda_1e-4", "λ_max(H) to 1e-4", ("hessian_spectral_norm",), 1e-4, "lambda"),
        Task("riemannian", "λ_max(DHD) to 1e-4", ("riemannian_spectral_norm",), 1e-4, "riemannian"),
        Task("layer_lambda", "λ_max of every layer to 1e-4", ("kappa_sum",), 1e-4, "layer_lambda"),
        Task("normalized_sharpness", "normalized sharpness", ("normalized_sharpness",), 1e-3, "normalized_sharpness"),
        Task("sweep", "all layers' trace, diagonal, both ρ, normalized sharpness", SWEEP, 1e-3),
        Task("operators", "λ_max of H, DHD and |θ|H|θ| to 1e-4", OPERATORS, 1e-4),
        Task("everything", "the default set", None, 1e-3),
    )
}

# What is followed as problems grow, and what more where a network was trained to a loss.
GROWING = ("sweep", "lambda_1e-4", "layer_lambda")
GROWING_FITTED = (*GROWING, "operators", "everything")


@dataclass(frozen=True)
class Answer:
    """What a library answered.

    Attributes:
        arrays: Named arrays; a number is one array.
        asked: Exactly what the library was asked to do.
        standard_error: Relative, of an estimator, by its own probes.
        counts: Probes, products or passes it took.
        rate: The standard error falls like the cost to the power of minus this.
    """

    arrays: Arrays
    asked: str
    standard_error: float | None = None
    counts: Mapping[str, float] = field(default_factory=dict)
    rate: float = 0.5


def number(value: float) -> Arrays:
    return {"": torch.tensor([value], dtype=torch.float64)}


def numbers(values: Mapping[str, float]) -> Arrays:
    return {name: torch.tensor([value], dtype=torch.float64) for name, value in values.items()}


def distance(task: Task, found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Relative error: of one number, the worst of several, or the norm of arrays."""
    if task.answer in ("diagonal", "rho"):
        difference = sum(float((found[name].double() - truth).square().sum()) for name, truth in reference.items())
        return math.sqrt(difference / sum(float(truth.square().sum()) for truth in reference.values()))
    return max(
        float((found[name].double() - truth).abs().max() / truth.abs().max()) for name, truth in reference.items()
    )
