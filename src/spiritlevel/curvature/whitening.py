"""The metrics of all layers of a problem, from one or two forward passes over its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from spiritlevel.curvature.metrics import (
    METRICS,
    MOST_INPUTS,
    NORMALIZED,
    RELATIVE,
    WELL_CONDITIONED,
    WHITENED,
    Factor,
    LayerMetric,
    Metrics,
    composed,
    factored,
    lookup_metric,
    normalized_metric,
    relative_metric,
    turned,
    whitened_metric,
)
from spiritlevel.curvature.moments import Moment, moments
from spiritlevel.network.layers import Layer
from spiritlevel.problem.problem import Problem

Generators = Callable[[str], torch.Generator]


def layer_metrics(
    problem: Problem, layers: Mapping[str, Layer], kinds: frozenset[str], probed: frozenset[str], generator: Generators
) -> Metrics:
    """Metric → layer → its roots, for the metrics in `kinds`.

    probed: The layers whose blocks are probed with random changes, for which roots are chosen that turn with the inputs.
    generator: Random numbers for a purpose.
    """
    kinds = kinds & frozenset(METRICS)
    if not kinds:
        return {}
    parameters = problem.parameters
    layers = {name: layer for name, layer in layers.items() if parameters[name].numel()}
    wide = frozenset(name for name, layer in layers.items() if inputs_of(layer, parameters[name].shape) > MOST_INPUTS)
    sketches = {name: generator(f"sketch {name}") for name in probed if WHITENED in kinds}
    found = moments(problem, layers, full=lambda name: WHITENED in kinds and name not in wide, sketches=sketches)
    metrics: dict[str, dict[str, LayerMetric]] = {}
    if WHITENED in kinds:
        metrics[WHITENED] = _whitened(problem, found, probed, generator)
    if RELATIVE in kinds:
        metrics[RELATIVE] = {
            name: relative_metric(layer, _kind(layer, found), parameters[name], raw=name in probed)
            for name, layer in layers.items()
            if name in found or not layer.followed
        }
    if NORMALIZED in kinds:
        metrics[NORMALIZED] = {
            name: normalized_metric(each, parameters[name], raw=name in probed) for name, each in found.items()
        }
    return metrics


def _kind(layer: Layer, found: Mapping[str, Moment]) -> str:
    """What a layer does with its inputs: of those that are not followed all are matrices."""
    return found[layer.name].kind if layer.name in found else "dense"


def inputs_of(layer: Layer, shape: torch.Size) -> int:
    """Inputs of a layer as a matrix, those of every group alone; an embedding's, which never mix, count too."""
    if layer.transposed:
        return shape[0] // layer.groups
    return shape[1:].numel()


def _whitened(
    problem: Problem, found: Mapping[str, Moment], probed: frozenset[str], generator: Generators
) -> dict[str, LayerMetric]:
    single = problem.dtype == torch.float32
    full = {name: moment for name, moment in found.items() if moment.second.dim() == 3}
    factors = {name: [factored(sigma, single=single) for sigma in moment.second] for name, moment in full.items()}
    factors |= _refined(problem, full, factors)
    metrics = {}
    for name, moment in found.items():
        weight = problem.parameters[name]
        if moment.kind == "lookup":
            metrics[name] = _lookup(moment, problem, generator if name in probed else None)
        elif name in factors and any(factor.rank for factor in factors[name]):  # else its inputs are zero, and so is it
            own = factors[name]
            if moment.sketch is not None:
                own = [turned(factor, sketch) for factor, sketch in zip(own, moment.sketch, strict=True)]
            metrics[name] = whitened_metric(moment, weight, own, raw=name in probed, single=single)
    return metrics


def _lookup(moment: Moment, problem: Problem, generator: Generators | None) -> LayerMetric:
    name = moment.layer.name
    unused = int((moment.second == 0).sum())
    notes = (f"{name}: {unused} of {moment.second.numel()} entries are never looked up and drop out",) * bool(unused)
    if moment.also:
        notes += (f"{name}: also used otherwise ({moment.also}); its metric is that of its first use (lookup)",)
    random = None if generator is None else generator(f"sketch {name}")
    return lookup_metric(moment, problem.parameters[name], moment.second, random, notes)


def _refined(
    problem: Problem, found: Mapping[str, Moment], factors: Mapping[str, list[Factor]]
) -> dict[str, list[Factor]]:
    """Better factors for layers whose Σ is badly conditioned, from the moments of inputs whitened by the first ones."""
    single = problem.dtype == torch.float32  # whose inputs are less accurate than the moments
    poor = [
        name
        for name, own in factors.items()
        if not single and max(factor.condition for factor in own) > WELL_CONDITIONED
    ]
    if not poor:
        return {}
    most = {name: max(factor.rank for factor in factors[name]) for name in poor}
    through = {
        name: torch.stack(
            [torch.nn.functional.pad(factor.back, (0, most[name] - factor.rank)) for factor in factors[name]]
        )
        for name in poor
    }
    again = moments(problem, {name: found[name].layer for name in poor}, full=lambda _: True, through=through)
    return {
        name: [
            composed(factor, replace(factored(sigma[: factor.rank, : factor.rank], single=False), condition=1.0))
            for factor, sigma in zip(factors[name], again[name].second, strict=True)
        ]
        for name in poor
    }
