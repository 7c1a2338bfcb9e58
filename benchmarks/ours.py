"""How this library is asked: one call of `measure` a task, checks of the problem included."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from benchmarks.subjects import Subject
from benchmarks.tasks import Answer, Arrays, Task, number, numbers
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.registry import resolve_measures
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.run import measure
from spiritlevel.problem.problem import Problem


def answer(subject: Subject, task: Task) -> Answer:
    """The task's measures, in one call."""
    if task.name == "diagonal":
        return _diagonal(subject, task)
    names = None if task.measures is None else list(task.measures)
    report = measure(subject.model, (subject.x, subject.y), measures=names, tolerance=task.accuracy)
    asked = "measure(model, data)" if names is None else f"measure(model, data, measures={names})"
    counts = {
        "passes": report.cost.passes,
        "products": report.cost.products,
        "gradients": report.cost.gradients,
        "converged": float(all(value.converged for value in report.values.values())),
    }
    return Answer(_arrays(subject, task, report), f"{asked}, tolerance={task.accuracy:g}", None, counts)


def _arrays(subject: Subject, task: Task, report: Report) -> Arrays:
    sizes = {name: float(tensor.detach().double().square().sum()) for name, tensor in subject.model.named_parameters()}
    if task.answer == "layer_traces":
        return numbers({name: value / sizes[name] for name, value in report["kappa_trace_sum"].layers.items()})
    if task.answer == "layer_lambda":
        return numbers({name: value / sizes[name] for name, value in report["kappa_sum"].layers.items()})
    if task.answer == "rho":
        return rho_arrays(report["rho_sum"].neurons, report["rho_row_sum"].neurons)
    return {} if task.answer is None or task.measures is None else number(report[task.measures[0]].value)


def rho_arrays(columns: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> Arrays:
    """All ρ of columns and rows under names of their own."""
    named = {f"column {name}": values.double() for name, values in columns.items()}
    return {**named, **{f"row {name}": values.double() for name, values in rows.items()}}


def evidence_for(subject: Subject, measures: tuple[str, ...], tolerance: float, dtype: object = None) -> Evidence:
    """What `measure` gathers for these measures, with the arrays that a report sums up."""
    problem = Problem(subject.model, "cross_entropy", (subject.x, subject.y), dtype=dtype)  # type: ignore[arg-type]
    needs = [measure.needs(measure) for measure in resolve_measures(measures)]
    union = needs[0]
    for each in needs[1:]:
        union = union | each
    return Evidence(problem, union, tolerance=tolerance, seed=0, most_probes=64)


def _diagonal(subject: Subject, task: Task) -> Answer:
    assert task.measures is not None
    evidence = evidence_for(subject, task.measures, task.accuracy)
    found = dict(evidence.statistics.diagonal)
    return Answer(
        found,
        "what measure(…, measures=['normalized_sharpness']) is computed from",
        None,
        vars(evidence.problem.work).copy(),
    )
