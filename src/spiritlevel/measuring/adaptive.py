"""What adaptive sharpness is made of: how far every weight may move, on which samples, and under which loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spiritlevel.curvature.ascent import Maximum, Region, Slopes, maximize
from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.value import Value
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.contract import Parameters
from spiritlevel.problem.problem import Problem, Work, gradients_of

CHOICES = {
    "norm": ("l2", "linf"),
    "scale": ("element", "filter"),
    "logits": ("as they are", "normalized"),
}
OPTIONS: Mapping[str, Any] = {"rho": 0.5, "norm": "l2", "scale": "element", "logits": "as they are"}


def check_choices(measure: Measure) -> None:
    """Refuse an option whose value is not one of the allowed words."""
    for key, words in CHOICES.items():
        chosen = measure.options.get(key, words[0])
        if chosen not in words:
            known = " or ".join(f'"{word}"' for word in words)
            raise SpiritLevelError(f"{measure.name}: {key} must be {known}, got {chosen!r}")


def adaptive_scale(evidence: Evidence, scale: str) -> Tensor:
    """|θ_i| of every entry, or for a filter the norm of all its weights; other parameters count entry by entry."""
    if scale == "element":
        return evidence.scaling("entries")
    layers = evidence.anatomy.layers
    found = []
    for name, value in evidence.problem.parameters.items():
        layer = layers.get(name)
        if layer is None:
            found.append(value.abs().reshape(-1))
            continue
        matrix = layer.matrix(value)  # (groups, rows, columns, kernel)
        norms = matrix.double().square().sum((2, 3), keepdim=True).sqrt().to(value).expand(matrix.shape)
        found.append((norms.transpose(1, 2) if layer.transposed else norms).reshape(-1))
    return torch.cat(found)


def measured_problem(measure: Measure, problem: Problem) -> Problem | None:
    """The problem itself, or the same with normalized logits; None where its loss has none."""
    if measure.options["logits"] == "as they are":
        return problem
    if problem.loss_function.name == "normalized_cross_entropy":
        return problem
    if problem.loss_function.name != "cross_entropy":
        return None
    names = list(problem.parameters)
    return Problem(problem.model, "normalized_cross_entropy", problem.data, parameters=names, dtype=problem.dtype)


@dataclass
class OnBatch:
    """One batch of a problem as a problem of its own: a loss and its gradient at any point."""

    problem: Problem
    batch: Batch
    weight: float

    @property
    def parameters(self) -> Parameters:
        return self.problem.parameters

    @property
    def work(self) -> Work:
        return self.problem.work

    def loss(self, parameters: Mapping[str, Tensor] | None = None) -> float:
        with self.problem.undisturbed(), torch.no_grad():
            value = float(self.problem.chunk_loss(parameters or self.parameters, self.batch))
        self.work.add(passes=self.weight)
        return value

    def gradient(self, parameters: Mapping[str, Tensor] | None = None) -> tuple[float, Parameters]:
        leaves = self.problem.leaves(parameters)
        with self.problem.undisturbed(), torch.enable_grad():
            value = self.problem.chunk_loss(leaves, self.batch)
            found = gradients_of(value, list(leaves.values()))
        self.work.add(passes=self.weight, gradients=self.weight)
        return float(value.detach()), dict(zip(leaves, found, strict=True))


def batches_of(problem: Problem, size: int) -> Iterator[OnBatch]:
    """The data in batches of `size` samples."""
    problem.check_derivatives()
    for chunk, weight in problem.chunks(size):
        yield OnBatch(problem, chunk, weight)


@dataclass(frozen=True)
class Searched:
    """The mean over batches of the largest rise found, whether all searches settled, the last maximum, and what it took."""

    rise: float
    settled: bool
    last: Maximum
    batches: int
    gradients: float


def searched(
    measure: Measure,
    evidence: Evidence,
    problem: Problem,
    region: Region,
    seen: Callable[[Slopes], Slopes] = lambda slopes: slopes,
) -> Searched | str:
    """The largest rise within a region, on all data or on every batch of m samples; a sentence that says why there is none.

    seen: What is climbed in the region's coordinates, for a loss in those of the parameters.
    """
    size, before = int(measure.options["m"]), problem.work.gradients
    if size and problem.whole:
        return "a loss that calls the model itself keeps its own batches: leave m out"
    parts: list[tuple[Slopes, float]] = [(problem, 1.0)]
    if size:
        parts = [(each, each.weight) for each in batches_of(problem, size)]
    rise, settled, found = 0.0, True, Maximum(0.0, torch.zeros(0), True)
    for index, (part, weight) in enumerate(parts):
        generator = evidence.generator(f"{measure.name} {index}")
        found = maximize(seen(part), region, tolerance=evidence.tolerance, generator=generator)
        if not math.isfinite(found.loss):
            return f"the loss is {found.loss} within rho={measure.options['rho']}: ask for a smaller rho"
        rise += weight * (found.loss - part.loss())
        settled = settled and found.settled
    rise = problem.ranks.total(rise) if size else rise
    return Searched(rise, settled, found, len(parts), problem.work.gradients - before)


def largest_mean_rise(
    measure: Measure,
    evidence: Evidence,
    found: Searched,
    witness: Mapping[str, Tensor],
    details: Mapping[str, Any],
    notes: tuple[str, ...] = (),
) -> Value:
    """What a search found, as a value; on batches there is no single witness."""
    size = int(measure.options["m"])
    return Value(
        measure.name,
        found.rise,
        evidence.tolerance * abs(found.rise),
        exact=False,
        converged=found.settled,
        method=f"largest value found by ascent ({found.gradients:.0f} gradients), a lower bound",
        witness=None if size else witness,
        details={
            "rho": float(measure.options["rho"]),
            **({"m": size, "batches": found.batches} if size else {}),
            **details,
        },
        notes=notes,
        error_kind="lower bound",
    )
