"""What rescaling and other coordinates do to flatness, drawn (Dinh et al. 2017, Figures 4 and 5)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.run import measure
from spiritlevel.problem.losses import LossLike
from spiritlevel.problem.problem import Problem
from spiritlevel.show.drawing import INK, Drawing, series_colour, style
from spiritlevel.show.figures import OwnFigure, axes_of, finished, legend, look_of
from spiritlevel.show.numbers import Cell, Numbers, plain_text, shortened, significant, times
from spiritlevel.show.scales import LogScale
from spiritlevel.symmetry import find_symmetries, power_family, rescale_layers

ATTACKED = (
    "hessian_spectral_norm",
    "hessian_trace",
    "riemannian_spectral_norm",
    "kappa_trace_sum",
    "normalized_sharpness",
    "rho_sum",
)


def attack(
    model: nn.Module,
    data: Any,
    loss: LossLike = "cross_entropy",
    *,
    measures: Iterable[str | Measure] = ATTACKED,
    alphas: Sequence[float] = (1e-3, 1e-2, 0.1, 1.0, 10.0, 1e2, 1e3),
    layers: tuple[str, str] | None = None,
    tolerance: float = 1e-2,
    axes: Axes | None = None,
    title: str = "Measures along a rescaling that changes no output",
) -> Drawing:
    """Measures of T_α θ = (αθ₁, …, α⁻¹θ₂) relative to those of θ (Dinh et al. 2017, section 4 and Figure 4).

    layers: The two weights that are multiplied and divided by α; the first and the last layer by default. Biases follow.

    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    >>> _ = nn.init.constant_(model[0].weight, 1.0), nn.init.constant_(model[2].weight, 1.0)
    >>> data, chosen = (torch.ones(2, 1), torch.ones(2, 1)), ["hessian_trace", "kappa_trace_sum"]
    >>> attack(model, data, "mse", measures=chosen, alphas=[0.1, 1.0]).title
    'Measures along a rescaling that changes no output'
    """
    inputs = Problem(model, loss, data).data.first.inputs
    first, second = layers or _ends_of_chain(model, inputs)
    chosen = list(measures)
    reports = {}
    for alpha in dict.fromkeys([1.0, *map(float, alphas)]):
        twin = model if alpha == 1.0 else rescale_layers(model, {first: alpha, second: 1 / alpha}, inputs)
        reports[alpha] = measure(twin, data, loss, measures=chosen, tolerance=tolerance)
    places = sorted(reports)
    ratios = {
        name: [reports[alpha][name].value / reports[1.0][name].value for alpha in places]
        for name in reports[1.0]
        if reports[1.0][name].available and reports[1.0][name].value
    }
    with style():
        figure, axes = axes_of(axes, height=2.7 + 0.18 * math.ceil(len(ratios) / 2))
        for index, (name, values) in enumerate(ratios.items()):
            axes.plot(places, values, **look_of(index), label=shortened(plain_text(name), 34))
        LogScale.of(places).apply(axes.xaxis, axes)
        LogScale.of([v for values in ratios.values() for v in values]).apply(axes.yaxis, axes)
        axes.set_xlabel(shortened(plain_text(f"α: {first} · α, {second} / α"), 60))
        axes.set_ylabel("value / value at α = 1")
        legend(axes, len(ratios))
    rows: tuple[tuple[Cell, ...], ...] = tuple((name, *values) for name, values in ratios.items())
    return finished(figure, Numbers(("measure", *(f"α = {a:g}" for a in places)), rows), title, _attack_words(ratios))


def _ends_of_chain(model: nn.Module, inputs: Any) -> tuple[str, str]:
    maps = find_symmetries(model, inputs).maps
    if len(maps) < 2:
        raise SpiritLevelError(f"a rescaling needs two layers, and this network has {len(maps)}")
    return maps[0], maps[-1]


def _attack_words(ratios: Mapping[str, Sequence[float]]) -> str:
    spans = {name: max(values) / min(values) for name, values in ratios.items() if min(values) > 0}
    still = [name for name, span in spans.items() if span < 1.05]
    moved = {name: span for name, span in spans.items() if span >= 1.05}
    words = [f"Every network on this picture computes the same function. {len(still)} of {len(ratios)} measures stay."]
    if moved:
        worst = max(moved, key=lambda name: moved[name])
        words.append(f"{plain_text(worst)} moves most: its largest value is {times(moved[worst])} its smallest.")
    return " ".join(words)


_WELLS = ((-2.0, 0.55, 0.90), (0.0, 0.50, 0.95), (2.0, 0.45, 1.00))  # centre, width and depth of three minima
_CHANGES = (None, (-2.0, 0.3, 0.3), (0.0, 0.1, -0.35), (0.0, 0.05, 0.3))  # θ̂, b, a


def reparametrizations(
    *,
    changes: Sequence[tuple[float, float, float] | None] = _CHANGES,
    axes: Sequence[Axes] | None = None,
    title: str = "One loss, four parametrizations",
) -> Drawing:
    """A one-dimensional loss with three minima in other coordinates η = (|θ−θ̂|²+b)^a (θ−θ̂) (Dinh et al. 2017, Figure 5).

    changes: (θ̂, b, a) for every panel, None for the loss as it is. axes: As many as there are panels. The dots are a
    regular grid in θ; the number at every minimum is its curvature d²L/dη².

    >>> reparametrizations().title
    'One loss, four parametrizations'
    """
    if axes is not None and len(axes) != len(changes):
        raise SpiritLevelError(f"{len(changes)} panels need as many axes, got {len(axes)}")
    minima = [_minimum(centre) for centre, _, _ in _WELLS]
    with style():
        if axes is None:
            figure: Any = OwnFigure(figsize=(6.4, 4.4), layout="constrained")
            panels = list(figure.subplots(2, math.ceil(len(changes) / 2), sharey=True).flat)
        else:
            figure, panels = axes[0].get_figure(root=True), list(axes)
        for panel in panels if axes is not None else panels[:: math.ceil(len(changes) / 2)]:
            panel.set_ylabel("loss")
        curvatures = [_draw_panel(panel, change, minima) for panel, change in zip(panels, changes, strict=False)]
    names = [_change_text(change) for change in changes]
    rows: tuple[tuple[Cell, ...], ...] = tuple((name, *values) for name, values in zip(names, curvatures, strict=True))
    columns = ("coordinate", *(f"curvature at θ = {float(theta):.3g}" for theta in minima))
    orders = [" < ".join(f"{float(minima[i]):.2g}" for i in sorted(range(3), key=lambda i: c[i])) for c in curvatures]
    words = "The same three minima in other coordinates. From flattest to sharpest: " + "; ".join(
        f"{name}: {order}" for name, order in zip(names, orders, strict=True)
    )
    return finished(figure, Numbers(columns, rows), plain_text(title), f"{words}.")


def _valleys(theta: Tensor) -> Tensor:
    wells = [depth * torch.exp(-((theta - centre) ** 2) / (2 * width**2)) for centre, width, depth in _WELLS]
    return torch.ones_like(theta) - torch.stack(wells).sum(0) + 0.01 * theta**2


def _minimum(start: float) -> Tensor:
    """The minimum next to `start`, by Newton's method."""
    theta = torch.tensor([start], dtype=torch.float64)
    for _ in range(30):
        slope, bend = _derivatives(theta)
        theta = theta - slope / bend
    return theta


def _derivatives(theta: Tensor) -> tuple[Tensor, Tensor]:
    slope = torch.func.grad(lambda t: _valleys(t).sum())
    return slope(theta), torch.func.grad(lambda t: slope(t).sum())(theta)


def _draw_panel(axes: Axes, change: tuple[float, float, float] | None, minima: Sequence[Tensor]) -> list[float]:
    """The loss over η with its grid and its minima; the curvature of each."""
    fine = torch.linspace(-3.4, 3.4, 600, dtype=torch.float64)
    grid = torch.linspace(-3.4, 3.4, 35, dtype=torch.float64)

    def eta(theta: Tensor) -> Tensor:
        if change is None:
            return theta
        centre, shift, exponent = change
        return power_family(torch.tensor(centre, dtype=torch.float64), shift, exponent).from_parameters(theta)

    axes.plot(eta(fine), _valleys(fine), color=series_colour(0), linewidth=1.4)
    axes.plot(eta(grid), _valleys(grid), "o", color=series_colour(1), markersize=2.6)
    found = []
    for theta in minima:
        stretch = float(torch.func.grad(lambda t: eta(t).sum())(theta))
        found.append(float(_derivatives(theta)[1]) / stretch**2)
        place = (float(eta(theta)), float(_valleys(theta)))
        axes.annotate(significant(found[-1], 2), place, (0, -12), textcoords="offset points", ha="center", fontsize=8)
    if change is not None:
        axes.axvline(0.0, ymin=0.27, color=INK, linewidth=0.8, linestyle="--")
    axes.set_ylim(-0.28, 1.2)
    axes.set_xlabel(_change_text(change))
    return found


def _change_text(change: tuple[float, float, float] | None) -> str:
    if change is None:
        return "θ"
    return f"η with θ̂ = {change[0]:g}, b = {change[1]:g}, a = {change[2]:g}".replace("-", "−")
