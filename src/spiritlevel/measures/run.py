"""One call: a trained network, its data and its loss in, every measure asked for out."""

from __future__ import annotations

import math
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from spiritlevel._version import __version__
from spiritlevel.checks import refuse_nonfinite_loss
from spiritlevel.errors import SpiritLevelError
from spiritlevel.losses import Loss
from spiritlevel.measures import resolve_measures
from spiritlevel.measures.evidence import Evidence
from spiritlevel.measures.progress import reporting
from spiritlevel.measures.record import Measure, Needs
from spiritlevel.problem import Problem
from spiritlevel.result import Cost, Report, Value


def measure(
    model: nn.Module,
    data: Any,
    loss: str | Callable[..., Any] | Loss = "cross_entropy",
    *,
    measures: str | Iterable[str | Measure] | None = None,
    tolerance: float = 1e-3,
    seed: int = 0,
    progress: bool | Callable[[str, float], None] = False,
    parameters: list[str] | None = None,
    dtype: torch.dtype | None = None,
    fix_data: bool = False,
    most_probes: int = 64,
) -> Report:
    """Every measure asked for, of the minimum that `model` sits in.

    Args:
        model: A trained module. It comes back bit for bit as it was.
        data: `(x, y)`, a loader, a dataset, or a re-iterable of batches.
        loss: "cross_entropy", "mse", "normalized_cross_entropy", a callable `(outputs, targets) -> mean`, or
            `(model, batch) -> (mean, count)`.
        measures: Names or configured measures; the default set where None, "all" for every one.
        tolerance: Relative accuracy asked of anything that is not exact.
        seed: For everything random; no global random state is touched.
        progress: True for a progress bar on standard error, or a function of (what, passes so far).
        parameters: Names or patterns of the parameters to measure; all trainable ones by default.
        dtype: Measure in this precision instead of the model's own.
        fix_data: Keep the first pass over a loader that shuffles or augments, and use it for all.
        most_probes: The most random probes for a block that is not exact.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> x, y = torch.eye(2), torch.zeros(2, 1)
    >>> print(measure(model, (x, y), "mse", measures=["hessian_trace"])["hessian_trace"])  # H = 2·(1/2)·I
    2
    """
    if not (isinstance(tolerance, int | float) and 0 < tolerance < 1):
        raise SpiritLevelError(f"tolerance must be a number between 0 and 1, got {tolerance!r}")
    chosen = resolve_measures(measures)
    started, memory = time.perf_counter(), _peak_memory()
    with reporting(progress) as report:
        report.stage("checking the problem")
        problem = Problem(model, loss, data, parameters=parameters, dtype=dtype, fix_data=fix_data)
        problem.work.on_change.append(report.update)
        evidence = Evidence(problem, _union(chosen), tolerance=tolerance, seed=seed, most_probes=most_probes)
        values: dict[str, Value] = {}
        try:
            with problem.undisturbed():
                for each in chosen:
                    report.stage(each.name)
                    values[_free_label(each, values)] = each.compute(each, evidence)
                loss_value = evidence.loss
        except (ArithmeticError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            refuse_nonfinite_loss(problem)  # says where, if that is why
            raise
        if not math.isfinite(loss_value):
            refuse_nonfinite_loss(problem)
    cost = Cost(
        problem.work.passes,
        problem.work.products,
        problem.work.gradients,
        time.perf_counter() - started,
        max(0, _peak_memory() - memory),
    )
    return Report(values, loss_value, cost, _described(evidence, tolerance, seed), _environment(), _notes(evidence))


def _union(chosen: list[Measure]) -> Needs:
    needs = Needs()
    for each in chosen:
        needs = needs | each.needs(each)
    return needs


def _free_label(each: Measure, taken: dict[str, Value]) -> str:
    """The measure's name; with its options where the same measure was asked for twice."""
    if each.name not in taken:
        return each.name
    options = ", ".join(f"{key}={value}" for key, value in each.options.items())
    label = f"{each.name}({options})" if options else each.name
    return label if label not in taken else f"{label} #{sum(name.startswith(label) for name in taken) + 1}"


def _described(evidence: Evidence, tolerance: float, seed: int) -> dict[str, Any]:
    problem = evidence.problem
    anatomy = evidence.anatomy if "anatomy" in evidence.__dict__ else None
    return {
        "model": type(problem.model).__name__,
        "loss_function": problem.loss_function.name,
        "samples": problem.samples,
        "parameters": sum(tensor.numel() for tensor in problem.parameters.values()),
        "dtype": str(problem.dtype).removeprefix("torch."),
        "device": str(problem.device),
        "layers": [] if anatomy is None else list(anatomy.layers),
        "estimated_layers": {} if anatomy is None else {n: r for n, r in anatomy.bent.items() if n in anatomy.layers},
        "tolerance": tolerance,
        "seed": seed,
    }


def _notes(evidence: Evidence) -> tuple[str, ...]:
    products = evidence.products.notes if "products" in evidence.__dict__ else []
    return (*evidence.problem.notes, *products)


def _environment() -> dict[str, str]:
    return {
        "spiritlevel": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "threads": str(torch.get_num_threads()),
    }


def _peak_memory() -> int:
    """The process's peak resident memory in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
