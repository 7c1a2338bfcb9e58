"""Pictures from one call, each with the numbers drawn: convergence, lines, surfaces, attacks, layers, neurons, spectra, trainings.

Every function takes results or what they are computed from, draws on `axes` where they are passed and on a figure of
its own otherwise, and returns a `Drawing`: figure, table, title, description. Series differ by colour, marker and dash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from torch import nn

from spiritlevel.attack.show import attack, reparametrizations
from spiritlevel.errors import SpiritLevelError
from spiritlevel.landscape.show import line, surface
from spiritlevel.measuring.registry import get_measure
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.run import measure
from spiritlevel.measuring.value import Value
from spiritlevel.problem.losses import LossLike
from spiritlevel.show.correlation import scatter
from spiritlevel.show.drawing import Drawing
from spiritlevel.show.figures import by_name, layer_profile, neuron_distribution
from spiritlevel.show.figures import convergence as convergence_figure
from spiritlevel.spectrum.show import spectrum
from spiritlevel.tracking.show import history

__all__ = [
    "attack",
    "convergence",
    "history",
    "layers",
    "line",
    "neurons",
    "reparametrizations",
    "scatter",
    "spectrum",
    "surface",
]

Histories = Mapping[str, Sequence[float] | Value | Report]


def convergence(
    source: Sequence[float] | Value | Report | Histories | nn.Module,
    data: Any = None,
    loss: LossLike = "cross_entropy",
    *,
    axes: Axes | None = None,
    title: str = "Convergence of the power method",
    label: str = "estimate of the eigenvalue",
) -> Drawing:
    """The estimates of an iteration, step by step (Rangamani et al. 2019, Figure 1).

    `source`: a model with `data` and `loss`, of which the Riemannian spectral norm is found by the paper's Algorithm 1;
    a report or value that carries a history; a list of estimates; or several of these by name.

    >>> convergence([1.0, 1.5, 1.75, 1.875]).title
    'Convergence of the power method'
    """
    if isinstance(source, nn.Module):
        algorithm = get_measure("riemannian_spectral_norm", method="power")
        source = measure(source, data, loss, measures=[algorithm])
    named = source if _isby_name(source) else {label: source}
    histories = {name: history for name, each in named.items() for history in _histories(each)}  # type: ignore[union-attr]
    if not histories:
        raise SpiritLevelError(
            "there is no history to draw: measure riemannian_spectral_norm with the option method='power'"
        )
    return convergence_figure(histories, title=title, label=label, axes=axes)


def _isby_name(source: Any) -> bool:
    return isinstance(source, Mapping) and not isinstance(source, Report)


def _histories(source: Any) -> list[list[float]]:
    values = list(source.values.values()) if isinstance(source, Report) else [source]
    found = [each.details.get("history", ()) if isinstance(each, Value) else each for each in values]
    return [[float(entry) for entry in each] for each in found if len(each)][:1]


def layers(
    source: Report | nn.Module | Mapping[str, Report | nn.Module],
    data: Any = None,
    loss: LossLike = "cross_entropy",
    *,
    measures: Iterable[str] = ("kappa_trace_sum",),
    axes: Axes | None = None,
    title: str | None = None,
) -> Drawing:
    """Layer measures along the depth: one line for every measure of every model.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> layers(model, (torch.eye(2), torch.zeros(2, 1)), "mse").title
    'kappa_trace_sum of every layer'
    """
    chosen = list(measures)
    reports = by_name(source, lambda model: measure(model, data, loss, measures=chosen))
    series: dict[str, Mapping[str, float]] = {}
    errors: dict[str, Mapping[str, float]] = {}
    for model, report in reports.items():
        for name in chosen:
            label = name if not model else model if len(chosen) == 1 else f"{model}: {name}"
            series[label], errors[label] = report[name].layers, report[name].layer_errors
    label = chosen[0] if len(chosen) == 1 else "value"
    return layer_profile(series, title=title or f"{label} of every layer", label=label, errors=errors, axes=axes)


def neurons(
    source: Report | nn.Module,
    data: Any = None,
    loss: LossLike = "cross_entropy",
    *,
    name: str = "rho_sum",
    axes: Axes | None = None,
    title: str | None = None,
) -> Drawing:
    """How a neuron measure is spread within every layer: dots, quartiles, and the dead neurons counted.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> neurons(model, (torch.eye(2), torch.zeros(2, 1)), "mse").title
    'rho_sum of every neuron'
    """
    report = source if isinstance(source, Report) else measure(source, data, loss, measures=[name])
    if not report[name].neurons:
        raise SpiritLevelError(f"{name} has no values of neurons; rho_sum, rho_max and rho_row_sum have")
    return neuron_distribution(report[name].neurons, title=title or f"{name} of every neuron", label=name, axes=axes)
