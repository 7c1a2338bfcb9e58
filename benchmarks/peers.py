"""How the peers are asked: each the way its documentation shows, in the setting that was fastest for it here.

Checks that a peer makes and that can be turned off are turned off. An estimator draws probes until its own standard
error is at the accuracy asked or its budget is used up; then the accuracy it reached stands beside its cost.
"""

from __future__ import annotations

import copy
import importlib
import math
import statistics
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.clock import Budget
from benchmarks.modules import in_modules
from benchmarks.subjects import Subject
from benchmarks.tasks import Answer, Arrays, Task, number, numbers

Ask = Callable[[Subject, Task, Budget], Answer]

LIBRARIES = ("PyHessian", "curvlinops", "BackPACK", "hessian-eigenthings")
GROUP = 5  # probes between two looks at the clock

# Networks whose graph over all data at once stays below a gigabyte: PyHessian keeps it, and is fastest so.
WHOLE_DATA = {"mlp", "conv", "lenet5", "tiny"}


def _library(name: str) -> Any:
    return importlib.import_module(name)


def _weights(subject: Subject) -> list[str]:
    return [name for name, parameter in subject.model.named_parameters() if parameter.dim() > 1]


# --- PyHessian --------------------------------------------------------------------------------------------------------


def _pyhessian(subject: Subject) -> tuple[Any, str]:
    module = _library("pyhessian")
    criterion = nn.CrossEntropyLoss()
    with warnings.catch_warnings(action="ignore"):  # about .backward(create_graph=True)
        if subject.recipe.name in WHOLE_DATA:
            return module.hessian(subject.model, criterion, data=(subject.x, subject.y), cuda=False), "data=(x, y)"
        return module.hessian(subject.model, criterion, dataloader=subject.batches, cuda=False), "dataloader=batches"


def _pyhessian_trace(subject: Subject, task: Task, budget: Budget) -> Answer:
    found, how = _pyhessian(subject)
    samples: list[float] = []
    while not samples or not (budget.used_up() or _settled(samples, task.accuracy)):
        samples += found.trace(maxIter=GROUP, tol=0.0)
    asked = f"hessian({how}).trace(), Hutchinson, {len(samples)} probes"
    return Answer(number(statistics.fmean(samples)), asked, _spread(samples), {"probes": len(samples)})


def _pyhessian_lambda(subject: Subject, task: Task, _budget: Budget) -> Answer:
    found, how = _pyhessian(subject)
    values, _ = found.eigenvalues(maxIter=1000, tol=task.accuracy, top_n=1)
    return Answer(number(values[0]), f"hessian({how}).eigenvalues(tol={task.accuracy:g}), power method")


# --- curvlinops -------------------------------------------------------------------------------------------------------


def _curvlinops(subject: Subject, parameters: list[Tensor] | None = None) -> Any:
    chosen = list(subject.model.parameters()) if parameters is None else parameters
    module = _library("curvlinops")
    return module.HessianLinearOperator(
        subject.model, nn.CrossEntropyLoss(), chosen, subject.batches, check_deterministic=False
    )


def _curvlinops_trace(subject: Subject, task: Task, budget: Budget) -> Answer:
    operator, estimate = _curvlinops(subject), _library("curvlinops").hutchinson_trace
    samples: list[float] = []
    while not samples or not (budget.used_up() or _settled(samples, task.accuracy)):
        samples.append(float(estimate(operator, GROUP)))
    probes = GROUP * len(samples)
    asked = f"hutchinson_trace(HessianLinearOperator), {probes} probes"
    return Answer(number(statistics.fmean(samples)), asked, _spread(samples), {"probes": probes})


def _curvlinops_diagonals(subject: Subject, task: Task, budget: Budget) -> tuple[list[Tensor], str]:
    operator, estimate = _curvlinops(subject), _library("curvlinops").hutchinson_diag
    samples: list[Tensor] = []
    while len(samples) < 2 or not (budget.used_up() or _worst_spread(samples) <= task.accuracy):
        samples.append(estimate(operator, GROUP).double())
    return samples, f"hutchinson_diag(HessianLinearOperator), {GROUP * len(samples)} probes"


def _curvlinops_diagonal(subject: Subject, task: Task, budget: Budget) -> Answer:
    samples, asked = _curvlinops_diagonals(subject, task, budget)
    mean = torch.stack(samples).mean(0)
    return Answer(_named(subject, mean), asked, _worst_spread(samples), {"probes": float(GROUP * len(samples))})


def _curvlinops_layer_traces(subject: Subject, task: Task, budget: Budget) -> Answer:
    operator, estimate = _curvlinops(subject), _library("curvlinops").hutchinson_diag
    samples: dict[str, list[float]] = {name: [] for name in _weights(subject)}
    while not (
        all(samples.values())
        and (budget.used_up() or all(_settled(values, task.accuracy) for values in samples.values()))
    ):
        named = _named(subject, estimate(operator, GROUP).double())
        for name, values in samples.items():
            values.append(float(named[name].sum()))
    probes = GROUP * len(next(iter(samples.values())))
    asked = f"hutchinson_diag(HessianLinearOperator) summed over every weight, {probes} probes"
    means = {name: statistics.fmean(values) for name, values in samples.items()}
    return Answer(numbers(means), asked, max(map(_spread, samples.values())), {"probes": probes})


def _eigsh(operator: Any, tolerance: float) -> float:
    linalg = _library("scipy.sparse.linalg")
    start = np.random.default_rng(0).standard_normal(operator.shape[0]).astype(np.float32)
    return float(linalg.eigsh(operator, k=1, which="LA", tol=tolerance, v0=start, return_eigenvectors=False)[0])


def _curvlinops_lambda(subject: Subject, task: Task, _budget: Budget) -> Answer:
    value = _eigsh(_curvlinops(subject).to_scipy(), task.accuracy)
    return Answer(
        number(value), f'scipy eigsh(HessianLinearOperator.to_scipy(), k=1, which="LA", tol={task.accuracy:g})'
    )


def _curvlinops_riemannian(subject: Subject, task: Task, _budget: Budget) -> Answer:
    sparse = _library("scipy.sparse")
    scale = sparse.linalg.aslinearoperator(sparse.diags_array(_block_norms(subject).numpy()))
    value = _eigsh(scale @ _curvlinops(subject).to_scipy() @ scale, task.accuracy)
    return Answer(
        number(value), f'scipy eigsh(D @ HessianLinearOperator.to_scipy() @ D, which="LA", tol={task.accuracy:g})'
    )


def _curvlinops_layer_lambda(subject: Subject, task: Task, _budget: Budget) -> Answer:
    named = dict(subject.model.named_parameters())
    found = {name: _eigsh(_curvlinops(subject, [named[name]]).to_scipy(), task.accuracy) for name in _weights(subject)}
    return Answer(
        numbers(found), f"scipy eigsh(HessianLinearOperator of one weight, tol={task.accuracy:g}), layer by layer"
    )


# --- BackPACK ---------------------------------------------------------------------------------------------------------


def _backpack_diagonal_arrays(subject: Subject) -> Arrays:
    backpack, extensions = _library("backpack"), _library("backpack.extensions")
    model = extended(subject)
    criterion = backpack.extend(nn.CrossEntropyLoss())
    names = [name for name, _ in subject.model.named_parameters()]
    total = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in subject.model.parameters()]
    for x, y in subject.batches:
        model.zero_grad()
        with backpack.backpack(extensions.DiagGGNExact()):
            criterion(model(x), y).backward()
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        for sum_, parameter in zip(total, trained, strict=True):
            found: Tensor = parameter.diag_ggn_exact  # type: ignore[attr-defined]
            sum_.add_(found, alpha=len(x) / len(subject.x))
    return dict(zip(names, total, strict=True))


_extended: dict[int, nn.Module] = {}


def extended(subject: Subject) -> nn.Module:
    """The network as BackPACK wants it, converted once and outside of the clock."""
    if id(subject) not in _extended:
        model: nn.Module = in_modules(copy.deepcopy(subject.model))
        if torch.dist(model(subject.x[:8]), subject.model(subject.x[:8])) > 1e-4:
            raise RuntimeError("the network written in modules differs")
        model = _library("backpack").extend(model.eval(), use_converter=not isinstance(model, nn.Sequential))
        shapes = [parameter.shape for parameter in model.parameters() if parameter.requires_grad]
        if shapes != [parameter.shape for parameter in subject.model.parameters()]:
            raise RuntimeError("BackPACK's converter reordered the parameters")
        _extended[id(subject)] = model.eval()
    return _extended[id(subject)]


BACKPACK_ASKED = "DiagGGNExact over the batches (equal to DiagHessian on these networks, and as fast within a tenth)"


def _backpack_diagonal(subject: Subject, _task: Task, _budget: Budget) -> Answer:
    return Answer(_backpack_diagonal_arrays(subject), BACKPACK_ASKED)


def _backpack_trace(subject: Subject, _task: Task, _budget: Budget) -> Answer:
    found = _backpack_diagonal_arrays(subject)
    return Answer(number(sum(float(entry.sum()) for entry in found.values())), f"sum of {BACKPACK_ASKED}")


def _backpack_layer_traces(subject: Subject, _task: Task, _budget: Budget) -> Answer:
    found = _backpack_diagonal_arrays(subject)
    return Answer(numbers({name: float(found[name].sum()) for name in _weights(subject)}), f"sums of {BACKPACK_ASKED}")


# --- hessian-eigenthings ----------------------------------------------------------------------------------------------


def _eigenthings(subject: Subject, weight: str | None = None) -> Any:
    module = _library("hessian_eigenthings")
    chosen = None if weight is None else module.match_names(weight)
    loss = module.supervised_loss(F.cross_entropy)
    return module.HessianOperator(subject.model, subject.batches, loss, param_filter=chosen)


def _eigenthings_trace(subject: Subject, _task: Task, _budget: Budget) -> Answer:
    found = _library("hessian_eigenthings").trace(_eigenthings(subject), num_matvecs=HUTCH_PROBES, seed=0)
    error = abs(found.stderr / found.estimate)
    asked = f"trace(HessianOperator, num_matvecs={HUTCH_PROBES}), Hutch++"
    return Answer(number(found.estimate), asked, error, rate=1.0)


HUTCH_PROBES, LAYER_PROBES = 15, 9


def _eigenthings_layer_traces(subject: Subject, _task: Task, _budget: Budget) -> Answer:
    trace = _library("hessian_eigenthings").trace
    found = {name: trace(_eigenthings(subject, name), num_matvecs=LAYER_PROBES, seed=0) for name in _weights(subject)}
    error = max(abs(each.stderr / each.estimate) for each in found.values())
    values = {name: each.estimate for name, each in found.items()}
    asked = f"trace(HessianOperator of one weight, num_matvecs={LAYER_PROBES}), Hutch++, layer by layer"
    return Answer(numbers(values), asked, error, rate=1.0)


def _eigenthings_lanczos(operator: Any, task: Task, budget: Budget) -> tuple[float, int]:
    """The shortest of 4, 6, 9, … steps that its own test calls converged; only that run counts."""
    steps = 4
    while True:
        budget.restart()
        found = _library("hessian_eigenthings").lanczos(
            operator, k=1, max_iter=steps, tol=task.accuracy, which="LA", seed=0
        )
        if bool(found.converged[0]):
            return float(found.eigenvalues[0]), steps
        steps = steps * 3 // 2


def _eigenthings_lambda(subject: Subject, task: Task, budget: Budget) -> Answer:
    value, steps = _eigenthings_lanczos(_eigenthings(subject), task, budget)
    asked = (
        f'lanczos(HessianOperator, k=1, max_iter={steps}, which="LA", tol={task.accuracy:g}), shorter tries not counted'
    )
    return Answer(number(value), asked)


def _eigenthings_riemannian(subject: Subject, task: Task, budget: Budget) -> Answer:
    plain, scale = _eigenthings(subject), _block_norms(subject)
    module = _library("hessian_eigenthings")
    scaled = module.LambdaOperator(lambda v: scale * plain.matvec(scale * v), plain.size)
    value, steps = _eigenthings_lanczos(scaled, task, budget)
    asked = f"lanczos(LambdaOperator(D·H·D), k=1, max_iter={steps}, tol={task.accuracy:g}), shorter tries not counted"
    return Answer(number(value), asked)


def _eigenthings_layer_lambda(subject: Subject, task: Task, budget: Budget) -> Answer:
    found, spent, most = {}, 0.0, 0
    for name in _weights(subject):
        found[name], steps = _eigenthings_lanczos(_eigenthings(subject, name), task, budget)
        spent, most = spent + budget.spent(), max(most, steps)
    budget.charge(spent)
    asked = f"lanczos(HessianOperator of one weight, k=1, max_iter≤{most}), layer by layer, shorter tries not counted"
    return Answer(numbers(found), asked)


# --- all of them ------------------------------------------------------------------------------------------------------

ASK: dict[str, dict[str, Ask]] = {
    "PyHessian": {
        "trace": _pyhessian_trace,
        "lambda_1e-2": _pyhessian_lambda,
        "lambda_1e-4": _pyhessian_lambda,
    },
    "curvlinops": {
        "trace": _curvlinops_trace,
        "layer_traces": _curvlinops_layer_traces,
        "diagonal": _curvlinops_diagonal,
        "lambda_1e-2": _curvlinops_lambda,
        "lambda_1e-4": _curvlinops_lambda,
        "riemannian": _curvlinops_riemannian,
        "layer_lambda": _curvlinops_layer_lambda,
    },
    "BackPACK": {
        "trace": _backpack_trace,
        "layer_traces": _backpack_layer_traces,
        "diagonal": _backpack_diagonal,
    },
    "hessian-eigenthings": {
        "trace": _eigenthings_trace,
        "layer_traces": _eigenthings_layer_traces,
        "lambda_1e-2": _eigenthings_lambda,
        "lambda_1e-4": _eigenthings_lambda,
        "riemannian": _eigenthings_riemannian,
        "layer_lambda": _eigenthings_layer_lambda,
    },
}


def _block_norms(subject: Subject) -> Tensor:
    return torch.cat([p.detach().norm().expand(p.numel()) for p in subject.model.parameters()])


def _named(subject: Subject, flat: Tensor) -> Arrays:
    named: Mapping[str, Tensor] = dict(subject.model.named_parameters())
    pieces = torch.split(flat, [parameter.numel() for parameter in named.values()])
    return {name: piece.view_as(named[name]) for name, piece in zip(named, pieces, strict=True)}


def _spread(samples: list[float]) -> float:
    """Relative standard error of a mean."""
    if len(samples) < 2:
        return math.inf
    return statistics.stdev(samples) / math.sqrt(len(samples)) / abs(statistics.fmean(samples))


def _settled(samples: list[float], accuracy: float) -> bool:
    return len(samples) >= 4 and _spread(samples) <= accuracy


def _worst_spread(samples: list[Tensor]) -> float:
    """Relative standard error of a mean of arrays, in norm."""
    stacked = torch.stack(samples)
    return float((stacked.var(0).sum() / len(samples)).sqrt() / stacked.mean(0).norm())
