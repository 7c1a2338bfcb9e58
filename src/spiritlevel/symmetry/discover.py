"""Finding the rescaling symmetries of a network."""

import functools
import warnings
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from spiritlevel.errors import TracingError
from spiritlevel.problem.problem import Problem
from spiritlevel.problem.tensors import as_precision
from spiritlevel.problem.wrappers import refuse_shards
from spiritlevel.symmetry import rules_elementwise, rules_linear
from spiritlevel.symmetry.group import TensorScale
from spiritlevel.symmetry.quiet import as_call, untouched
from spiritlevel.symmetry.scales import Leaf
from spiritlevel.symmetry.symmetries import Symmetries
from spiritlevel.symmetry.trace import Recorder, record
from spiritlevel.symmetry.variables import Solution, squeezed

RULES_OF = (rules_elementwise, rules_linear)
"""The modules that register a rule per operation when they are imported."""


def find_symmetries(model: nn.Module, example_input: Any) -> Symmetries:
    """All changes of the parameters of `model` that are found to leave its function in eval mode alone.

    model: comes back bit for bit as it was. example_input: a tensor, a tuple of arguments, a dict of keywords, or a loader,
    whose first batch serves.

    One forward pass on the example is recorded operation by operation and a scale variable per channel is followed
    through it: linear maps start and absorb scales, positively homogeneous operations pass them on, additions tie
    them, inputs, outputs and every operation without a rule fix them. What is left free is the result. A rescaling
    found is exact for every input; one that no rule can see may be missed. A branch on masks or token numbers among the
    inputs is followed as the example takes it. Costs one forward pass in eval mode.

    Groups of invertible matrices, rotations and shifts are looked for when they are first asked for (`groups`,
    `orbit_dimension`, `sample` with their kinds): one more pass, and a gradient of a copy in double precision. The
    example should be like real inputs: two positions at least where there is attention.

    >>> mlp = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> find_symmetries(mlp, torch.ones(1, 4)).dimension
    3
    """
    args, kwargs = as_call(example_input)
    refuse_shards(model)
    _refuse_shared_memory(model)
    with untouched(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorder = record(model, args, kwargs)
    solution = recorder.variables.solve()
    tensors = _tensor_scales(recorder, solution)
    labels = [_label(recorder, solution, tensors, k) for k in range(solution.dimension)]
    maps = [leaf.name for leaf in recorder.leaves.values() if leaf.role == "map"]
    gains = [leaf.name for leaf in recorder.leaves.values() if leaf.role == "factor"]
    return Symmetries(
        tensors,
        solution.basis,
        labels,
        _aliases(model),
        (args, kwargs),
        recorder.barriers,
        maps,
        model=model,
        gains=gains,
    )


def _tensor_scales(recorder: Recorder, solution: Solution) -> dict[str, TensorScale]:
    """The scale of every parameter and buffer that some factor moves."""
    moving = torch.from_numpy(solution.basis.getnnz(axis=1) > 0)
    found = {}
    for leaf in (*recorder.leaves.values(), *recorder.statistics.values()):
        terms = _moving_terms(leaf, solution.classes, moving)
        if terms:
            role = leaf.role if id(leaf.value) in recorder.leaves else "statistic"
            found[leaf.name] = TensorScale(leaf.name, role, leaf.value.shape, terms)
    return found


def _moving_terms(leaf: Leaf, classes: Tensor, moving: Tensor) -> tuple[tuple[float, Tensor], ...]:
    terms = [(float(c), classes[squeezed(ids)]) for c, ids in leaf.terms or ()]
    return tuple((c, rows) for c, rows in terms if bool(moving[rows].any()))


def _label(recorder: Recorder, solution: Solution, tensors: dict[str, TensorScale], factor: int) -> str:
    """The name of a factor's group: the parameter whose output channels it scales first."""
    name, _ = recorder.variables.label(solution.leaders[factor])
    return name or next((tensor.name for tensor in tensors.values() if _moves(solution, tensor, factor)), "")


def _moves(solution: Solution, tensor: TensorScale, factor: int) -> bool:
    column = solution.basis[:, [factor]].nonzero()[0]
    return any(bool(torch.isin(rows, torch.from_numpy(column).long()).any()) for _, rows in tensor.terms)


def _aliases(model: nn.Module) -> dict[str, str]:
    """For every name of a parameter or buffer the name it is known by here."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def symmetries_of(problem: Problem) -> Symmetries:
    """Those of a problem's network, on its first inputs in the precision of the weights, which that of the data may not be."""
    precisions = {each.dtype for each in problem.model.parameters() if each.is_floating_point()}
    first = problem.data.first
    if len(precisions) == 1:
        first = first.map(functools.partial(as_precision, precision=precisions.pop()))
    try:
        return find_symmetries(problem.model, first.inputs)
    except TracingError:
        raise
    except Exception as error:
        if not problem.whole:
            raise
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise TracingError(
            "the model cannot be called with a batch as it is, which only a loss of the form (model, batch) takes apart "
            f"({reason}); pass (inputs, targets) and a loss of outputs and targets"
        ) from error


def _refuse_shared_memory(model: nn.Module) -> None:
    """Different parameters in the same memory cannot be rescaled one by one."""
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in model.named_parameters() if p.numel())
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise TracingError(
                f"parameters {name} and {other} are different objects in the same memory; tie them by assigning one "
                "nn.Parameter to both modules"
            )
