"""One call: a trained network, its data and its loss in, every measure asked for out."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import operator
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from spiritlevel._version import __version__
from spiritlevel.curvature.statistics import GROUPS
from spiritlevel.errors import SpiritLevelError, listed
from spiritlevel.measuring.budget import within_budget
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.memory import compute_within_memory
from spiritlevel.measuring.minimum import doubts
from spiritlevel.measuring.needs import Needs
from spiritlevel.measuring.progress import Reporter, expected_passes, reporting
from spiritlevel.measuring.readings import unavailable
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.registry import resolve_measures
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.sampling import random_subset, with_sampling_error
from spiritlevel.measuring.starts import Starts
from spiritlevel.measuring.value import Cost, Value
from spiritlevel.problem.batches import Data, is_small
from spiritlevel.problem.checks import check_tolerance, check_whole_number, refuse_nonfinite_loss
from spiritlevel.problem.labelled import divides
from spiritlevel.problem.losses import Loss, NoCurvature, resolve_loss
from spiritlevel.problem.problem import Problem, read_data
from spiritlevel.problem.ranks import current_ranks
from spiritlevel.problem.replica import unwrapped

# Unix has it, Windows does not.
resource: Any = importlib.import_module("resource") if importlib.util.find_spec("resource") else None


IN_SHARDS = (
    "it needs whole layers or vectors over all parameters in one process, and the model is in shards: load its full state "
    "dict into the plain module, where that fits into one process"
)
# What is asked for by default: of eigenvalues and maxima, and of what random probes estimate.
TOLERANCE, PROBE_TOLERANCE = 1e-3, 5e-2


def measure(
    model: nn.Module,
    data: Any,
    loss: str | Callable[..., Any] | Loss = "cross_entropy",
    *,
    measures: str | Iterable[str | Measure] | None = None,
    tolerance: float | None = None,
    budget: float | None = None,
    seed: int = 0,
    progress: bool | Callable[[str, float], None] = False,
    parameters: list[str] | None = None,
    dtype: torch.dtype | None = None,
    fix_data: bool = False,
    most_probes: int = 64,
    samples: int | None = None,
    distributed: bool = True,
    starts: Starts | None = None,
) -> Report:
    """Every measure asked for, of the minimum that `model` sits in.

    Ctrl-C ends it early with what is finished so far; a note of the report names what is missing.

    Args:
        model: A trained module. It comes back bit for bit as it was.
        data: `(x, y)`, a loader, a dataset, or a re-iterable of batches.
        loss: "cross_entropy", "mse", "normalized_cross_entropy", a callable `(outputs, targets) -> mean`, or
            `(model, batch) -> (mean, count)`.
        measures: Names or configured measures; the default set where None, "all" for every one.
        tolerance: Relative accuracy asked of anything that is not exact; by default 1e-3 of eigenvalues and maxima, and 5e-2
            of what is estimated from random probes, each digit of which costs a hundred times the one before.
        budget: Seconds to spend, instead of a tolerance: it is tightened as long as that fits.
        seed: For everything random; no global random state is touched.
        progress: True for a progress bar on standard error, or a function of (what, passes so far).
        parameters: Names or patterns of the parameters to measure; all trainable ones by default.
        dtype: The precision to measure in; by default the model's own, or double precision where that costs nothing.
        fix_data: Keep the first pass over a loader that shuffles or augments, and use it for all.
        most_probes: The most random probes for a block that is not exact, at least 8.
        samples: Measure on so many samples, chosen at random, and add the error of that choice to every bar.
        distributed: Inside an initialized torch.distributed group, divide the data among its processes; every process
            must make the same call with the same model and all of the data. False: measure in this process alone.
        starts: Where searches for eigenvectors ended in a call at nearby weights; those of this call start there, are
            certified as always, and leave here where they end.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> x, y = torch.eye(2), torch.zeros(2, 1)
    >>> print(measure(model, (x, y), "mse", measures=["hessian_trace"])["hessian_trace"])  # H = 2·(1/2)·I
    2
    """
    if budget is not None:
        return _in_time(
            functools.partial(
                measure, model, data, loss, measures=measures, seed=seed, progress=progress, parameters=parameters,
                dtype=dtype, fix_data=fix_data, samples=samples, distributed=distributed,
            ),
            budget, tolerance, most_probes,
        )  # fmt: skip
    plan = _Plan(
        resolve_measures(measures),
        resolve_loss(loss),
        TOLERANCE if tolerance is None else check_tolerance(tolerance),
        PROBE_TOLERANCE if tolerance is None else tolerance,
        check_whole_number("seed", seed),
        check_whole_number("most_probes", most_probes, at_least=GROUPS),
        distributed,
        starts,
    )
    with reporting(progress) as reporter, current_ranks(distributed).together():
        data = read_data(unwrapped(model, [], shards=True), data, fix_data=fix_data)
        if samples is None:
            return _in_range(functools.partial(_problem, model, data, plan, parameters), dtype, plan, reporter)
        return _on_a_subset(model, data, samples, parameters, dtype, plan, reporter)


def _in_time(measured: Callable[..., Report], budget: Any, tolerance: float | None, most_probes: int) -> Report:
    """The most accurate report that fits into so many seconds."""
    if tolerance is not None:
        raise SpiritLevelError("budget and tolerance exclude each other: a budget buys as much accuracy as it can")
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0:
        raise SpiritLevelError(f"budget must be a positive number of seconds, got {budget!r}")
    return within_budget(
        lambda asked, probes: measured(tolerance=asked, most_probes=max(probes, most_probes)), float(budget)
    )


@dataclass(frozen=True)
class _Plan:
    """What is asked of a problem."""

    measures: list[Measure]
    loss: Loss
    tolerance: float
    probe_tolerance: float
    seed: int
    most_probes: int
    distributed: bool
    starts: Starts | None = None


def _problem(
    model: nn.Module,
    data: Data,
    plan: _Plan,
    parameters: list[str] | None,
    dtype: torch.dtype | None,
) -> Problem:
    """The problem in this precision; by default the model's own, or double where that costs nothing."""
    build = functools.partial(
        Problem, model, plan.loss, data, parameters=parameters, distributed=plan.distributed, shards=True
    )
    if dtype is None and _affords_double(model, data):
        # Some networks run in their own precision only. An error that occurs in both is raised below, for their own.
        with contextlib.suppress(RuntimeError, TypeError, SpiritLevelError):
            return build(dtype=torch.float64)
    return build(dtype=dtype)


def _affords_double(model: nn.Module, data: Data) -> bool:
    """Whether double precision costs a network in single precision next to nothing.

    What a small network's curvature is made of may cancel to a few digits.
    """
    parameters = list(model.parameters())
    inputs = [leaf for leaf in tree_leaves(data.first.inputs) if isinstance(leaf, torch.Tensor)]
    if any(is_lazy(each) or each.dtype == torch.float64 for each in (*parameters, *inputs)):
        return False  # what does not fit together is refused elsewhere
    return is_small(sum(each.numel() for each in parameters), data.samples)


def _in_range(
    build: Callable[[torch.dtype | None], Problem], dtype: torch.dtype | None, plan: _Plan, reporter: Reporter
) -> Report:
    """The report on a problem, in double precision where the numbers leave the range of single precision."""
    problem = build(dtype)
    try:
        return _measured(problem, plan, reporter)
    except (ArithmeticError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
        if dtype is not None or problem.dtype != torch.float32:
            if isinstance(error, NoCurvature):  # which no scale mends
                raise SpiritLevelError(str(error)) from error
            raise SpiritLevelError(
                f"the measures leave the range of {str(problem.dtype).removeprefix('torch.')} ({error}): scale the data or the "
                "weights" + (", or pass dtype=torch.float64" if problem.dtype == torch.float32 else "")
            ) from error
    report = _measured(build(torch.float64), plan, reporter)
    note = "measured in double precision: the numbers leave the range of single precision"
    return replace(report, notes=(*report.notes, note))


def _check_range(value: Value) -> None:
    """Every value must be finite but what is known to be infinite, such as a volume."""
    infinite = value.exact and math.isinf(value.value)
    if value.error_kind != "none" and not infinite and not math.isfinite(value.value + value.error):
        raise OverflowError(f"{value.name} is {value.value} ± {value.error}")


def _evidence(problem: Problem, plan: _Plan, possible: list[Measure]) -> Evidence:
    """What the measures that are possible need, to be gathered when it is asked for."""
    needs = functools.reduce(operator.or_, (each.needs(each) for each in possible), Needs())
    problem.survey_takes_gradient = not needs.operators
    return Evidence(
        problem,
        needs,
        tolerance=plan.tolerance,
        seed=plan.seed,
        most_probes=plan.most_probes,
        probe_tolerance=plan.probe_tolerance,
        starts=plan.starts,
    )


def _measured(problem: Problem, plan: _Plan, reporter: Reporter) -> Report:
    """Every measure of the plan; after Ctrl-C those that were finished."""
    started, memory = time.perf_counter(), _peak_memory()
    possible = [each for each in plan.measures if each.in_shards or not problem.shards.divided]
    evidence = _evidence(problem, plan, possible)
    reporter.expect(functools.partial(expected_passes, evidence))
    problem.work.on_change.append(reporter.update)
    values: dict[str, Value] = {}
    missing: tuple[str, ...] = ()
    try:
        with problem.undisturbed():
            for each in plan.measures:
                reporter.stage(each.name)
                try:
                    within_reach = each in possible
                    value = compute_within_memory(each, evidence) if within_reach else unavailable(each, IN_SHARDS)
                    _check_range(value)
                    values[_free_label(each, values)] = _within(value, plan)
                except KeyboardInterrupt:
                    if not values or not problem.alone:
                        raise
                    missing = tuple(other.name for other in plan.measures[len(values) :])
                    break
            loss_value = evidence.loss if not missing else evidence.known_loss()
            if not missing:
                evidence.find_slope()
    except (ArithmeticError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        refuse_nonfinite_loss(problem)  # says where, if that is why
        raise
    finally:
        problem.work.on_change.remove(reporter.update)
    if not missing and not math.isfinite(loss_value):
        refuse_nonfinite_loss(problem)
    cost = Cost(
        problem.work.passes,
        problem.work.products,
        problem.work.gradients,
        time.perf_counter() - started,
        max(0, _peak_memory() - memory),
    )
    described = _described(evidence, plan.tolerance, plan.seed)
    slope = described.get("gradient_metric_norm", 0.0)
    notes = (*_missing_words(missing), *_notes(evidence, values), *doubts(values, slope))
    return Report(values, loss_value, cost, described, environment(), notes, interrupted=bool(missing))


def _missing_words(missing: tuple[str, ...]) -> tuple[str, ...]:
    verb = "was" if len(missing) == 1 else "were"
    return (f"interrupted: {', '.join(missing)} {verb} not finished",) if missing else ()


def _on_a_subset(
    model: nn.Module,
    data: Data,
    samples: int,
    parameters: list[str] | None,
    dtype: torch.dtype | None,
    plan: _Plan,
    reporter: Reporter,
) -> Report:
    """The measures on a random subset, with bars that say how far the same measures on all data may lie.

    The sampling error comes from random groups: the subset's own parts are measured one by one, which costs about as much
    as measuring it whole, and the spread of their values is carried over to the size of the subset.
    """
    plan = replace(plan, starts=None)  # searches on parts of the data end at other vectors
    divide = divides(plan.loss, data)
    subset, groups, share = random_subset(data, samples, divide, plan.seed)

    whole = _in_range(functools.partial(_problem, model, subset, plan, parameters), dtype, plan, reporter)
    if not groups:
        return replace(whole, notes=(*whole.notes, f"samples={samples} covers all {data.samples} samples"))
    parts: list[Report] = []
    with contextlib.suppress(KeyboardInterrupt):
        for index, group in enumerate(groups):
            reporter.within(f"sampling error, part {index + 1} of {len(groups)}: ")
            parts.append(_in_range(functools.partial(_problem, model, group, plan, parameters), dtype, plan, reporter))
    return with_sampling_error(whole, parts, len(groups), share, data.samples)


def _within(value: Value, plan: _Plan) -> Value:
    """Converged only if the error is within the tolerance: rounding may leave more than what was asked for."""
    tolerance = plan.probe_tolerance if value.error_kind == "standard error" else plan.tolerance
    if not value.converged or value.exact or value.error <= tolerance * abs(value.value) * (1 + 1e-9):
        return value
    return replace(value, converged=False)


def _free_label(each: Measure, taken: dict[str, Value]) -> str:
    """The measure's name; with its options where the same measure was asked for twice."""
    if each.name not in taken:
        return each.name
    options = ", ".join(f"{key}={value}" for key, value in each.options.items())
    label = f"{each.name}({options})" if options else each.name
    return label if label not in taken else f"{label} #{sum(name.startswith(label) for name in taken) + 1}"


def _described(evidence: Evidence, tolerance: float, seed: int) -> dict[str, Any]:
    problem = evidence.problem
    anatomy = evidence.gathered.anatomy
    return {
        "model": type(problem.model).__name__,
        "loss_function": problem.loss_function.name,
        "samples": problem.samples,
        "parameters": sum(map(problem.count, problem.parameters)),
        "dtype": str(problem.dtype).removeprefix("torch."),
        "device": str(problem.device),
        "layers": [] if anatomy is None else list(anatomy.layers),
        "estimated_layers": {} if anatomy is None else {n: r for n, r in anatomy.bent.items() if n in anatomy.layers},
        "tolerance": tolerance,
        "seed": seed,
        **_slope(evidence),
    }


def _slope(evidence: Evidence) -> dict[str, float]:
    """The gradient that is left, where a pass has brought it: as it is, and with every block in units of its norm."""
    slope = evidence.known_slope()
    return {} if slope is None else {"gradient_norm": slope[0], "gradient_metric_norm": slope[1]}


def _notes(evidence: Evidence, values: Mapping[str, Value]) -> tuple[str, ...]:
    products = evidence.gathered.products
    return (
        *evidence.problem.notes,
        *(products.notes if products is not None else ()),
        *_left_out(evidence.problem, list(values.values())),
    )


def _left_out(problem: Problem, values: Sequence[Value]) -> tuple[str, ...]:
    """Which matrices are in no layer that was measured: a reader would miss them in a sum over layers."""
    matrices = [name for name, value in problem.parameters.items() if sum(size > 1 for size in value.shape) > 1]
    missing = [name for name in matrices if any(value.layers and name not in value.layers for value in values)]
    if not missing:
        return ()
    return (
        f"not among the layers, because no activation is multiplied by them as they are: {listed(missing)}; measures of layers "
        "leave them out",
    )


def environment() -> dict[str, str]:
    """What a measurement may depend on besides its input: versions, the platform, the number of threads."""
    return {
        "spiritlevel": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "threads": str(torch.get_num_threads()),
    }


def _peak_memory() -> int:
    """The process's peak resident memory in bytes; 0 where the system does not report it."""
    if resource is None:
        return 0
    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
