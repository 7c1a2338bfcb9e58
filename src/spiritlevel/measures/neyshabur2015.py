"""Neyshabur, Tomioka, Srebro 2015, "Norm-Based Capacity Control in Neural Networks": the path norm.

(Σ over paths of Π|w|^q)^(1/q), a number of the weights alone: no data enter. Paths start at the inputs and at the biases, go
through skip connections and pooling, and end at the outputs. Computed as a forward pass of ones through |w|^q (Gonon, Brisebarre,
Riccietti, Gribonval 2024), with the logarithm of the scale beside every tensor, so that no depth overflows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from spiritlevel.errors import TracingError
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.readings import unavailable
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.value import Value
from spiritlevel.network.paths import log_path_sum

# What every layer may add to the error, in units of the precision of doubles, or of the weights if that is less.
ROUNDING_A_LAYER = 64


def _path_norm(measure: Measure, evidence: Evidence) -> Value:
    problem, power = evidence.problem, float(measure.options["q"])
    if problem.whole:
        return unavailable(measure, "the loss calls the model itself, so there are no outputs at which paths could end")
    ones = problem.few_samples(1).map(
        lambda leaf: torch.ones_like(leaf, dtype=torch.float64) if leaf.is_floating_point() else leaf
    )
    starts = [leaf for leaf in tree_leaves(ones.inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    tensors = {**problem.fixed, **problem.leaves()}
    parameters = {name: tensors[name] for name in problem.parameters}
    try:
        with problem.undisturbed():
            log = log_path_sum(lambda: problem.outputs(parameters, ones), tensors, starts, power)
    except TracingError as refusal:
        return unavailable(measure, str(refusal))
    value = math.exp(log / power) if log / power < 709 else math.inf
    relative = ROUNDING_A_LAYER * (1 + len(tensors)) * torch.finfo(torch.float64).eps
    error = relative * value if math.isfinite(value) else 0.0
    return Value(
        measure.name,
        value,
        error,
        exact=True,
        converged=True,
        method="one forward pass of ones through |w|^q, scales in logarithms",
        details={"log_path_norm": log / power, "q": power},
        notes=("beyond the range of numbers; details hold its logarithm",) if math.isinf(value) else (),
    )


MEASURES = (
    Measure(
        "path_norm",
        "neyshabur2015",
        "sum over all paths of the product of the weights along them",
        "(Σ_paths Π |w|^q)^(1/q)",
        frozenset({"layer", "neuron"}),
        _path_norm,
        options={"q": 2.0},
        costly=True,
        of_function=False,
    ),
)
