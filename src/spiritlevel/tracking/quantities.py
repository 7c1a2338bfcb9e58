"""What can be followed beside the measures of the library: norms of the gradient, λ_max, critical sharpness.

Each is a measure as any other: it gets the evidence of a problem and gives a value with its error. Those that belong to an
optimizer are made for one.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, optim

from spiritlevel.curvature.rounding import rounding_errors
from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.needs import Operator
from spiritlevel.measuring.readings import from_eigenpair, unavailable
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.registry import resolve_measures
from spiritlevel.measuring.value import Value
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.contract import Parameters
from spiritlevel.problem.problem import Problem, gradients_of
from spiritlevel.tracking.critical import critical_step
from spiritlevel.tracking.optimizers import learning_rate, next_update, preconditioner_of

PAPERS = {"critical": "kalra2026", "edge": "cohen2021"}

Direction = Callable[[Evidence], tuple[Parameters, float]]

# The gradient of a problem, for all quantities of one point.
_gradients: weakref.WeakKeyDictionary[Problem, tuple[float, Parameters]] = weakref.WeakKeyDictionary()


def gradient_of(problem: Problem) -> tuple[float, Parameters]:
    """L(θ) and ∇L(θ), computed once for every problem."""
    if problem not in _gradients:
        _gradients[problem] = problem.gradient()
    return _gradients[problem]


# --- norms of the gradient -------------------------------------------------------------------------------------------


def _norm(scaling: str) -> Callable[[Measure, Evidence], Value]:
    """‖S ∇L‖: the gradient's norm in the metric whose Hessian is S H S."""

    def compute(measure: Measure, evidence: Evidence) -> Value:
        problem = evidence.problem
        _, gradient = gradient_of(problem)
        flat = torch.cat([part.reshape(-1) for part in gradient.values()])
        scale = evidence.scaling(scaling)
        scaled = scale.double() * flat.double()
        size = float(scaled.norm())
        along = _split((scale * scaled.to(scale) / size) if size > 0 else torch.zeros_like(scale), gradient)
        error = rounding_errors(problem, lambda batch: [_slope(problem, batch, along)])[0]
        return Value(
            name=measure.name,
            value=size,
            error=error + torch.finfo(problem.dtype).tiny,
            exact=True,
            converged=error <= evidence.tolerance * size,
            method="one gradient",
        )

    return compute


def _split(flat: Tensor, like: Mapping[str, Tensor]) -> Parameters:
    parts = torch.split(flat, [each.numel() for each in like.values()])
    return {name: part.view(like[name].shape) for name, part in zip(like, parts, strict=True)}


def _slope(problem: Problem, batch: Batch, along: Parameters) -> float:
    """The derivative of a batch's mean loss along a direction: a mean over samples, as rounding is looked for in."""
    leaves = problem.leaves()
    with torch.enable_grad():
        parts = gradients_of(problem.chunk_loss(leaves, batch), list(leaves.values()))
    return sum(float((part.double() * along[name].double()).sum()) for name, part in zip(leaves, parts, strict=True))


# --- critical sharpness ----------------------------------------------------------------------------------------------


def _minus_gradient(evidence: Evidence) -> tuple[Parameters, float]:
    loss, gradient = gradient_of(evidence.problem)
    slope = sum(float(part.double().square().sum()) for part in gradient.values())
    return {name: -part for name, part in gradient.items()}, loss / slope if slope > 0 else 0.0


def _invariant(evidence: Evidence) -> tuple[Parameters, float]:
    """−|θ|²⊙g moves with every rescaling of single neurons as the weights do, so that the step does not change."""
    loss, gradient = gradient_of(evidence.problem)
    theta = evidence.problem.parameters
    slope = sum(float((theta[name] * part).double().square().sum()) for name, part in gradient.items())
    direction = {name: -theta[name].square() * part for name, part in gradient.items()}
    return direction, loss / slope if slope > 0 else 0.0


def _update(optimizer: optim.Optimizer) -> Direction:
    """The optimizer's own update for the gradient of the probe set, for a learning rate of one."""

    def direction(evidence: Evidence) -> tuple[Parameters, float]:
        rate = learning_rate(optimizer)
        if not rate > 0:
            raise SpiritLevelError(f"the learning rate is {rate}, so that there is no update to look along")
        moved = next_update(optimizer, evidence.problem, gradient_of(evidence.problem)[1])
        return {name: part / rate for name, part in moved.items()}, rate

    return direction


def _critical(direction_of: Direction) -> Callable[[Measure, Evidence], Value]:
    def compute(measure: Measure, evidence: Evidence) -> Value:
        problem = evidence.problem
        try:
            direction, guess = direction_of(evidence)
        except (SpiritLevelError, TypeError, RuntimeError) as error:
            return unavailable(measure, f"there is no direction: {error}")
        gradient = gradient_of(problem)[1]
        slope = sum(float((part.double() * direction[name].double()).sum()) for name, part in gradient.items())
        if not slope < 0 or not 0 < guess < math.inf:
            return unavailable(measure, "the loss does not fall along this direction, not even for a short step")
        return _searched(measure, evidence, direction, slope, evidence.starts.numbers.get(measure.name, guess))

    return compute


def _searched(measure: Measure, evidence: Evidence, direction: Parameters, slope: float, guess: float) -> Value:
    problem = evidence.problem
    base = problem.loss()

    def moved(step: float) -> Parameters:
        like = problem.parameters
        return {name: value + step * direction[name].to(value) for name, value in like.items()}

    found = critical_step(lambda step: problem.loss(moved(step)) - base, slope, guess, evidence.tolerance)
    if not found.found:
        where = f"not even a step of {found.low:.3g} raises the loss" if found.low > 0 else "every step raises the loss"
        return unavailable(measure, f"{where} along this direction ({found.losses} losses)")
    step = 2 * found.low * found.high / (found.low + found.high)  # 2/step is the middle of 2/high and 2/low
    evidence.starts.numbers[measure.name] = step

    def rise(batch: Batch) -> list[float]:
        with torch.no_grad():
            after, before = (problem.chunk_loss(each, batch) for each in (moved(step), problem.parameters))
        return [float(after) - float(before)]

    noise = rounding_errors(problem, rise)[0] / abs(slope)
    value = 2 / step
    error = 1 / found.low - 1 / found.high + value * noise / step
    return Value(
        name=measure.name,
        value=value,
        error=error,
        exact=False,
        converged=error <= evidence.tolerance * value,
        method=f"search for the step that raises the loss ({found.losses + 1} losses)",
        details={"step": step, "slope": slope},
        error_kind="bound",
    )


# --- all of them -----------------------------------------------------------------------------------------------------


def _record(
    name: str, summary: str, formula: str, invariant: Iterable[str], compute: Any, needs: Any = None
) -> Measure:
    paper = PAPERS["critical" if name.startswith("critical") else "edge"]
    record = Measure(name, paper, summary, formula, frozenset(invariant), compute)
    return record if needs is None else replace(record, needs=needs)


LARGEST = Operator("identity", "largest")

_FIXED = (
    _record("gradient_norm", "norm of the gradient", "‖∇L‖", (), _norm("identity")),
    _record("riemannian_gradient_norm", "norm of the gradient in the metric of blocks", "‖D ∇L‖,  D = blockdiag(‖block‖ I)",
            ("layer",), _norm("block norms")),
    _record("riemannian_nodewise_gradient_norm", "norm of the gradient in the metric of single weights", "‖|θ| ∇L‖",
            ("layer", "neuron"), _norm("entries")),
    _record("hessian_largest_eigenvalue", "largest eigenvalue of the Hessian", "λ_max(H)", (), *from_eigenpair(LARGEST)),
    _record("critical_sharpness_gradient", "critical sharpness along the gradient",
            "2/η,  η the least with L(θ − ηg) > L(θ)", (), _critical(_minus_gradient)),
    _record("critical_sharpness_invariant", "critical sharpness along the gradient in the metric of single weights",
            "2/η,  η the least with L(θ − η|θ|²g) > L(θ)", ("layer", "neuron"), _critical(_invariant)),
)  # fmt: skip

OF_AN_OPTIMIZER = ("critical_sharpness", "preconditioned_largest_eigenvalue")
NAMES = (*(record.name for record in _FIXED), *OF_AN_OPTIMIZER)


def _of(name: str, optimizer: optim.Optimizer | None) -> Measure:
    if optimizer is None:
        raise SpiritLevelError(f"{name} belongs to an optimizer: pass optimizer=… to the tracker")
    if name == "critical_sharpness":
        formula = "2/η,  η the least with L(θ + ηu) > L(θ),  u the optimizer's update for a learning rate of 1"
        return _record(
            name, "critical sharpness along the optimizer's update", formula, (), _critical(_update(optimizer))
        )
    diagonal = preconditioner_of(optimizer)
    if diagonal is None:
        raise SpiritLevelError(
            f"preconditioned_largest_eigenvalue needs an optimizer that divides by a diagonal (Adam, AdamW, RMSprop), got "
            f"{type(optimizer).__name__}"
        )
    parts = from_eigenpair(Operator("preconditioner", "largest", diagonal))
    return _record(name, "largest eigenvalue of the preconditioned Hessian", "λ_max(P⁻¹H)", (), *parts)


def default_names(optimizer: optim.Optimizer | None) -> tuple[str, ...]:
    """Invariant flatness, the sharpness that the optimizer feels, and critical sharpness."""
    felt = "hessian_largest_eigenvalue" if preconditioner_of(optimizer) is None else "preconditioned_largest_eigenvalue"
    own = () if optimizer is None else ("critical_sharpness",)
    return ("rho_sum", "riemannian_nodewise_spectral_norm", felt, "critical_sharpness_invariant", *own)


def resolve(measures: str | Iterable[str | Measure] | None, optimizer: optim.Optimizer | None) -> list[Measure]:
    """Names of the library and of this page, or configured measures, as measures."""
    if measures is None:
        measures = default_names(optimizer)
    elif isinstance(measures, str):
        measures = (measures,) if measures != "all" else (*resolve_measures("all"), *(r.name for r in _FIXED))
    known = {record.name: record for record in _FIXED}
    found: list[Measure] = []
    for each in measures:
        if isinstance(each, str) and each in known:
            found.append(known[each])
        elif isinstance(each, str) and each in OF_AN_OPTIMIZER:
            found.append(_of(each, optimizer))
        else:
            found += resolve_measures([each])
    names = [each.name for each in found]
    if not found or len(set(names)) < len(names):
        raise SpiritLevelError(f"a tracker needs measures, each once, got {names}")
    return found


__all__ = ["NAMES", "OF_AN_OPTIMIZER", "default_names", "gradient_of", "resolve"]
