"""Measuring one trained cell: at its minimum, after a random rescaling or move along its orbit, after attacks on its flatness."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from spiritlevel.attack.attack import sharpen
from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.registry import read_measure
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.run import measure
from spiritlevel.measuring.value import Cost
from spiritlevel.study.samples import Samples
from spiritlevel.study.settings import CellConfig, MeasureSection
from spiritlevel.subjects.factory import import_factory
from spiritlevel.subjects.seeds import seed_for
from spiritlevel.symmetry.discover import find_symmetries
from spiritlevel.symmetry.layers import rescale_layers
from spiritlevel.symmetry.layerwise import LayerScales

Pair = tuple[Tensor, Tensor]


def measured_samples(config: CellConfig, samples: Samples) -> Pair:
    """The training samples to measure on, with the labels that were trained; the same choice for every cell."""
    y = samples.labels(config)
    wanted = config.measure.samples
    if wanted is None or wanted >= len(y):
        return samples.train.x, y
    generator = torch.Generator().manual_seed(seed_for(0, "measured"))
    chosen = torch.randperm(len(y), generator=generator)[:wanted].sort().values
    return samples.train.x[chosen], y[chosen]


def measure_cell(config: CellConfig, model: nn.Module, data: Pair) -> dict[str, Any]:
    """`measures`, `rescaled` with the factors of its layers, and `attacks`, as `result.json` holds them."""
    section = config.measure
    found: dict[str, Any] = {"measures": _document(measure_all(section, model, data)), "rescaled": None, "attacks": []}
    if section.rescale is not None:
        factors = random_layer_factors(model, data[0][:4], section.rescale, _rescaling_seed(config))
        twin = rescale_layers(model, factors, data[0][:4])
        found["rescaled"] = _document(measure_all(section, twin, data))
        found["rescaling"] = factors
    if section.orbit is not None:
        twin = moved_along_orbit(model, data[0][:4], section.orbit, _rescaling_seed(config))
        found["rescaled"] = _document(measure_all(section, twin, data))
    for target in section.attack_targets:
        attack = sharpen(model, data, _loss(section.loss), target=target)
        found["attacks"].append(
            {
                "target": target,
                "before": attack.before,
                "after": attack.after,
                "output_change": attack.output_change,
                "measures": _document(measure_all(section, attack.model, data)),
            }
        )
    return found


def _rescaling_seed(config: CellConfig) -> int:
    """Every network has factors of its own: equal ones for all networks of a seed would leave their order as it was."""
    apart: dict[str, Any] = {
        "data": {"folder"},
        "training": {"ensemble", "evaluate_every", "require"},
        "measure": True,
        "seed": True,
    }
    settings = json.dumps(config.model_dump(mode="json", exclude=apart), sort_keys=True)
    return seed_for(config.seed, f"rescaling of {settings}")


def measure_along(config: CellConfig, model: nn.Module, data: Pair) -> dict[str, Any]:
    """`measures` of a network on its way, or the `error` that says why there are none: the others still count."""
    section = config.measure
    if section.measures_along is not None:
        section = section.model_copy(update={"measures": section.measures_along, "also": ()})
    try:
        return {"measures": _document(measure_all(section, model, data))}
    except SpiritLevelError as error:
        return {"measures": None, "error": str(error)}


def measure_all(section: MeasureSection, model: nn.Module, data: Pair) -> Report:
    """One report of all measures; those under a further loss are labelled `name(loss=…)`."""
    dtype = None if section.dtype is None else getattr(torch, section.dtype)

    def under(loss: str, names: tuple[str, ...] | None) -> Report:
        chosen = None if names is None else [read_measure(name) for name in names]
        return measure(model, data, _loss(loss), measures=chosen, tolerance=section.tolerance, dtype=dtype)

    report = under(section.loss, section.measures)
    for also in section.also:
        further = under(also.loss, also.measures)
        labelled = {f"{name}(loss={also.loss})": value for name, value in further.values.items()}
        report = replace(report, values={**report.values, **labelled}, cost=_sum(report.cost, further.cost))
    return report


def moved_along_orbit(model: nn.Module, example: Tensor, strength: float, seed: int) -> nn.Module:
    """The same function with other weights: a random member of all groups that were found, shifts left out."""
    symmetries = find_symmetries(model, example)
    return symmetries.sample(strength, seed, kinds=["rescaling", "linear", "rotation"]).apply(model)


def random_layer_factors(
    model: nn.Module, example: Tensor, between: tuple[float, float], seed: int
) -> dict[str, float]:
    """A factor for every layer, drawn evenly from a range; layers that must make up for others follow from them.

    In a chain of layers that is the last one, which is divided by the product of all others (petzka2019, Figure 2).
    """
    symmetries = find_symmetries(model, example)
    names = symmetries.maps
    low, high = between
    draws = torch.rand(len(names), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logs = {name: float(torch.log(low + (high - low) * draw)) for name, draw in zip(names, draws, strict=True)}
    for condition in LayerScales(symmetries).conditions(list(names)):
        *others, last = condition.exponents
        logs[last] = -sum(condition.exponents[name] * logs[name] for name in others) / condition.exponents[last]
    return {name: float(torch.tensor(value, dtype=torch.float64).exp()) for name, value in logs.items()}


def _loss(name: str) -> Any:
    return import_factory(name) if ":" in name else name


def _sum(one: Cost, other: Cost) -> Cost:
    """Both costs together; memory was used one after the other."""
    return Cost(
        one.passes + other.passes,
        one.products + other.products,
        one.gradients + other.gradients,
        one.seconds + other.seconds,
        max(one.peak_memory, other.peak_memory),
    )


def _document(report: Report) -> dict[str, Any]:
    """The report without its maximisers, which are as large as the network."""
    return report.without_witnesses().to_dict()
