"""High-precision values that answers are compared with, computed once for a subject.

Diagonals, traces and ρ: the exact sweep in float64, with some entries of the diagonal checked by double backward.
Eigenvalues: the Rayleigh quotient, in float64 and by plain double backward over the batches, of an eigenvector known to
1e-6; its error is of the order of the residual squared over the gap, and the residual is kept beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.ours import evidence_for, rho_arrays
from benchmarks.subjects import Subject, load
from benchmarks.tasks import Arrays, number, numbers
from spiritlevel.measuring.registry import resolve_measures

TIGHT = 1e-6
CHECKED_ENTRIES = 2

# Answer → the measure whose eigenvector it is the Rayleigh quotient of.
OPERATORS = {"lambda": "hessian_spectral_norm", "riemannian": "riemannian_spectral_norm"}


def write(subject_path: Path, path: Path, wanted: Collection[str | None]) -> None:
    """Compute the reference of a prepared subject, with those eigenvalues that are wanted, and write it to `path`."""
    subject = load(subject_path)
    arrays = _statistics(subject)
    checks = {"diagonal entries": _checked_diagonal(subject, arrays["diagonal"])}
    operators = {answer: measure for answer, measure in OPERATORS.items() if answer in wanted}
    if operators:
        _eigenvalues(subject, operators, arrays, checks)
    if "layer_lambda" in wanted:
        _layer_eigenvalues(subject, arrays, checks)
    torch.save({"arrays": arrays, "checks": checks}, path)


def read(path: Path) -> tuple[dict[str, Arrays], dict[str, float]]:
    """Named answers, and how well they were checked."""
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content["arrays"], content["checks"]


def _statistics(subject: Subject) -> dict[str, Arrays]:
    names = ("hessian_trace", "kappa_trace_sum", "rho_sum", "rho_row_sum", "normalized_sharpness")
    evidence = evidence_for(subject, names, 1e-6, torch.float64)
    found = evidence.statistics
    sharpness = resolve_measures("normalized_sharpness")[0]
    return {
        "diagonal": dict(found.diagonal),
        "trace": number(sum(float(entry.sum()) for entry in found.diagonal.values())),
        "layer_traces": numbers({name: float(found.diagonal[name].sum()) for name in found.layers}),
        "rho": rho_arrays(found.columns, found.rows),
        "normalized_sharpness": number(sharpness.compute(sharpness, evidence).value),
    }


def _checked_diagonal(subject: Subject, diagonal: Arrays) -> float:
    """The largest relative deviation among the largest entries of a few tensors, by double backward in float64."""
    model = copy.deepcopy(subject.model).double()
    worst = 0.0
    named = dict(model.named_parameters())
    for name in list(named)[:: max(1, len(named) // CHECKED_ENTRIES)][:CHECKED_ENTRIES]:
        place = int(diagonal[name].argmax())
        unit = torch.zeros_like(named[name])
        unit.view(-1)[place] = 1.0
        value = float(product(subject, model, [named[name]], [unit])[0].view(-1)[place])
        worst = max(worst, abs(value / float(diagonal[name].view(-1)[place]) - 1))
    return worst


def _eigenvalues(
    subject: Subject, operators: Mapping[str, str], arrays: dict[str, Arrays], checks: dict[str, float]
) -> None:
    evidence = evidence_for(subject, tuple(operators.values()), TIGHT)
    model = copy.deepcopy(subject.model).double()
    parameters = list(model.parameters())
    for answer, operator in zip(operators, evidence.needs.operators, strict=True):
        scale = evidence.scaling(operator.scaling).double()
        vector = evidence.eigenpairs[operator].vector.double()
        pieces = _split(scale * vector, parameters)
        image = scale * torch.cat([part.reshape(-1) for part in product(subject, model, parameters, pieces)])
        arrays[answer], checks[f"residual of {answer}"] = _rayleigh(vector, image)


def _layer_eigenvalues(subject: Subject, arrays: dict[str, Arrays], checks: dict[str, float]) -> None:
    evidence = evidence_for(subject, ("kappa_sum",), TIGHT)
    model = copy.deepcopy(subject.model).double()
    named = dict(model.named_parameters())
    found: Arrays = {}
    for name, pair in evidence.layer_eigenpairs.items():
        vector = pair.vector.double()
        image = product(subject, model, [named[name]], [vector.view_as(named[name])])[0].reshape(-1)
        value, residual = _rayleigh(vector, image)
        found[name] = value[""]
        checks["residual of layer_lambda"] = max(checks.get("residual of layer_lambda", 0.0), residual)
    arrays["layer_lambda"] = found


def _rayleigh(vector: Tensor, image: Tensor) -> tuple[Arrays, float]:
    value = float(vector @ image / (vector @ vector))
    return number(value), float((image - value * vector).norm() / (abs(value) * vector.norm()))


def product(subject: Subject, model: nn.Module, parameters: Sequence[Tensor], vector: Sequence[Tensor]) -> list[Tensor]:
    """H·v for the given parameters of `model`, by plain double backward over the batches."""
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for x, y in subject.batches:
        loss = F.cross_entropy(model(x.to(parameters[0])), y)
        gradient = torch.autograd.grad(loss, parameters, create_graph=True)
        found = torch.autograd.grad(gradient, parameters, list(vector), allow_unused=True)
        for sum_, part in zip(total, found, strict=True):
            if part is not None:
                sum_.add_(part, alpha=len(x) / len(subject.x))
    return total


def _split(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(vector, [parameter.numel() for parameter in like])
    return [piece.view_as(parameter) for piece, parameter in zip(pieces, like, strict=True)]
