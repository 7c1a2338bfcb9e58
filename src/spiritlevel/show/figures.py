"""The figures of a report: layers along the depth, neurons of a layer, convergence.

Each function takes data and gives a `Drawing`: the figure and the table of the numbers in it. Series differ by colour,
marker and dash, never by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from spiritlevel.errors import SpiritLevelError
from spiritlevel.show.drawing import DASHES, INK, MARKERS, Drawing, series_colour, style
from spiritlevel.show.numbers import Cell, Numbers, plain_text, shortened, significant
from spiritlevel.show.scales import LogScale, light_grid

_WIDTH = 4.7  # inches: legible when a telephone shrinks it, two side by side on a desk
_DECADES = 8.0  # of neurons shown below the largest; smaller ones stand at the lower edge
_DOTS, _ALL_DOTS = 80, 400  # the most dots of a layer, and of a figure
_MARKERS = 120  # the most markers of a line
_BAR = 0.02  # relative errors smaller than this are narrower than a marker


def layer_profile(
    series: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    label: str = "value",
    errors: Mapping[str, Mapping[str, float]] | None = None,
    axes: Axes | None = None,
) -> Drawing:
    """Values of layers along the depth on a logarithmic scale, one line each for `series`: label → layer → value.

    What is zero or negative has no place on that scale and is marked on the line `≤ 0` below it.
    """
    layers = list(dict.fromkeys(layer for profile in series.values() for layer in profile))
    scale = LogScale.of(value for profile in series.values() for value in profile.values())
    with style():
        rows_below = math.ceil(len(series) / legend_columns(series)) if len(series) > 1 else 0
        figure, axes = axes_of(axes, height=2.4 + 0.18 * rows_below)
        for index, (name, profile) in enumerate(series.items()):
            places = [i for i, layer in enumerate(layers) if not math.isnan(profile.get(layer, math.nan))]
            values = [profile[layers[i]] for i in places]
            spread = [abs((errors or {}).get(name, {}).get(layers[i], 0.0)) for i in places]
            _line(axes, index, name, places, values, spread, scale)
        scale.apply(axes.yaxis, axes)
        _layer_ticks(axes, layers)
        axes.set_ylabel(shortened(plain_text(label), 34))
        legend(axes, len(series))
    rows = tuple((layer, *_row(series, layer)) for layer in layers)
    table = Numbers(("layer", *map(plain_text, series)), rows)
    return finished(figure, table, plain_text(title), _profile_words(series, len(layers)))


def neuron_distribution(
    neurons: Mapping[str, Tensor],
    *,
    title: str,
    label: str = "ρ",
    limits: tuple[float, float] | None = None,
    axes: Axes | None = None,
) -> Drawing:
    """How a value is spread over the neurons of every layer: dots, quartiles, and dead neurons counted below.

    A layer's dots are evenly spaced ranks of its sorted values, so that each stands for the same share of neurons; the
    bar is the median, the box holds the middle half. Neurons that are exactly zero are dead. `limits` fixes the scale.
    """
    strips = {layer: _Strip.of(values) for layer, values in neurons.items()}
    shown = [*(limits or ()), *(v for strip in strips.values() for v in strip.alive)]
    lowest = max(shown, default=1.0) / 10**_DECADES
    scale = LogScale.of((max(value, lowest) for value in shown), floor=True)
    with style():
        figure, axes = axes_of(axes, height=2.7)
        _draw_strips(axes, list(strips.values()), scale)
        scale.apply(axes.yaxis, axes)
        _layer_ticks(axes, list(neurons))
        axes.set_ylabel(shortened(plain_text(label), 34))
    columns = (
        "layer",
        "neurons",
        "dead",
        "negative",
        "smallest",
        "lower quartile",
        "median",
        "upper quartile",
        "largest",
    )
    rows = tuple((layer, *strip.numbers()) for layer, strip in strips.items())
    dead, total = sum(strip.dead for strip in strips.values()), sum(strip.count for strip in strips.values())
    words = (
        f"One strip of dots for each of {len(strips)} layers on a logarithmic scale, with median and quartiles. "
        f"{dead} of {total} neurons are dead: exactly zero, marked by crosses below the scale."
        f"{_smaller(strips.values(), lowest)}"
    )
    return finished(figure, Numbers(columns, rows), plain_text(title), words)


def convergence(
    histories: Mapping[str, Sequence[float]],
    *,
    title: str,
    label: str = "estimate",
    axes: Axes | None = None,
) -> Drawing:
    """The estimates of an iteration, step by step, one line each for `histories`: label → estimates."""
    values = [value for history in histories.values() for value in history]
    wide = bool(values) and min(values) > 0 and max(values) > 10 * min(values)
    with style():
        figure, axes = axes_of(axes, height=2.5)
        for index, (name, history) in enumerate(histories.items()):
            steps = range(1, len(history) + 1)
            every = max(1, len(history) // 12)
            axes.plot(steps, history, **look_of(index), markevery=every, label=shortened(plain_text(name), 28))
        if wide:
            LogScale.of(values).apply(axes.yaxis, axes)
        axes.set_xlabel("iteration")
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.set_ylabel(shortened(plain_text(label), 34))
        light_grid(axes)
        legend(axes, len(histories))
    length = max(map(len, histories.values()), default=0)
    rows = tuple((k + 1, *(h[k] if k < len(h) else math.nan for h in histories.values())) for k in range(length))
    ends = "; ".join(f"{plain_text(n)}: {len(h)} iterations, from {significant(h[0])} to {significant(h[-1])}"
                     for n, h in histories.items() if h)  # fmt: skip
    words = f"Estimates against the number of iterations. {ends}."
    return finished(figure, Numbers(("iteration", *map(plain_text, histories)), rows), plain_text(title), words)


@dataclass(frozen=True)
class _Strip:
    """One layer's neurons: the positive values sorted, how many are exactly zero, how many negative."""

    alive: tuple[float, ...]
    dead: int
    negative: int
    count: int

    @classmethod
    def of(cls, values: Tensor) -> _Strip:
        flat = values.detach().to("cpu", torch.float64).flatten()
        alive = torch.sort(flat[flat > 0]).values.tolist()
        return cls(tuple(alive), int((flat == 0).sum()), int((flat < 0).sum()), flat.numel())

    def quantile(self, share: float) -> float:
        """The value at that share of the ranks of the positive ones, between neighbours by interpolation."""
        if not self.alive:
            return math.nan
        rank = share * (len(self.alive) - 1)
        lower = math.floor(rank)
        upper = min(lower + 1, len(self.alive) - 1)
        return self.alive[lower] + (rank - lower) * (self.alive[upper] - self.alive[lower])

    def numbers(self) -> tuple[int | float, ...]:
        return (self.count, self.dead, self.negative, *(self.quantile(share) for share in (0, 0.25, 0.5, 0.75, 1)))

    def dots(self, most: int) -> list[float]:
        """At most that many of the positive values, at evenly spaced ranks, smallest and largest among them."""
        count = min(len(self.alive), most)
        return [self.alive[round(i * (len(self.alive) - 1) / max(count - 1, 1))] for i in range(count)]

    def words(self) -> str:
        """What is not positive: `3 dead, 1 below 0`."""
        return ", ".join(
            f"{count} {what}" for count, what in ((self.dead, "dead"), (self.negative, "below 0")) if count > 0
        )


def _smaller(strips: Iterable[_Strip], lowest: float) -> str:
    count = sum(value < lowest for strip in strips for value in strip.alive)
    return f" {count} are smaller than the scale and stand at its lower edge." if count else ""


def _draw_strips(axes: Axes, strips: Sequence[_Strip], scale: LogScale) -> None:
    """Dots, boxes and medians of every layer, and crosses for what is not positive, each kind in one stroke."""
    most = min(_DOTS, _ALL_DOTS // max(len(strips), 1))
    dots = [(place, i, y) for place, strip in enumerate(strips) for i, y in enumerate(strip.dots(most))]
    if most >= 5:
        # The golden ratio spreads neighbours in rank far apart without chance.
        across = [place + 0.5 * ((i * 0.6180339887) % 1 - 0.5) for place, i, _ in dots]
        inside = [max(y, scale.low) for _, _, y in dots]
        axes.plot(across, inside, ".", color=series_colour(1), markersize=3.5, alpha=0.75)
    alive = [(place, strip) for place, strip in enumerate(strips) if strip.alive]
    places = [place for place, _ in alive]
    low, middle, high = ([max(strip.quantile(share), scale.low) for _, strip in alive] for share in (0.25, 0.5, 0.75))
    corners = [
        [(place - 0.31, bottom), (place + 0.31, bottom), (place + 0.31, top), (place - 0.31, top)]
        for place, bottom, top in zip(places, low, high, strict=True)
    ]
    axes.add_collection(PolyCollection(corners, facecolors="none", edgecolors=INK, linewidths=0.8))
    axes.hlines(middle, [p - 0.31 for p in places], [p + 0.31 for p in places], color=INK, linewidth=1.8)
    crossed = [(place, strip.words()) for place, strip in enumerate(strips) if strip.words()]
    floor = scale.place(0.0)
    crosses = [place for place, _ in crossed]
    axes.plot(crosses, [floor] * len(crosses), "x", color=series_colour(0), markersize=6, markeredgewidth=1.6)
    for place, words in crossed if len(strips) <= 8 else ():
        axes.annotate(words, (place, floor), (6, -3), textcoords="offset points", fontsize=8)


class OwnFigure(Figure):
    """A figure that was made here: its layout and its legend are ours to settle; those of a user are not."""


def axes_of(axes: Axes | None, height: float, projection: str | None = None) -> tuple[Figure, Axes]:
    """The user's axes with their figure, or new ones."""
    if axes is None:
        new = OwnFigure(figsize=(_WIDTH, height), layout="constrained")
        return new, new.add_subplot(projection=projection)
    figure = axes.get_figure(root=True)
    if figure is None:
        raise ValueError("the axes belong to no figure; pass axes of a figure")
    return figure, axes


def finished(figure: Figure, table: Numbers, title: str, description: str) -> Drawing:
    """The drawing, its layout settled once, so that drawing it again gives the same bytes."""
    layout = figure.get_layout_engine() if isinstance(figure, OwnFigure) else None
    if layout is not None:
        with style():
            layout.execute(figure)
        figure.set_layout_engine("none")
    return Drawing(figure, table, title, description)


def look_of(index: int) -> dict[str, Any]:
    """Colour, marker and dash of a series; later ones are finer, so that lines that coincide all stay visible."""
    look = index % len(MARKERS)
    fine = 0.72 ** min(index, 4)
    size = {"linewidth": 0.9 + 1.1 * fine, "markersize": 3.5 + 3.5 * fine}
    return {"color": series_colour(index), "marker": MARKERS[look], "linestyle": DASHES[look], **size}


def _line(
    axes: Axes, index: int, name: str, places: list[int], values: list[float], spread: list[float], scale: LogScale
) -> None:
    heights = [scale.place(value) for value in values]
    every = math.ceil(max(len(places), 1) / _MARKERS)
    look = look_of(index)
    crowded = min(1.0, 20 / max(len(places), 1))  # beside sixty others a marker and its line are finer
    finer = {key: max(look[key] * crowded, least) for key, least in (("markersize", 2.5), ("linewidth", 1.0))}
    axes.plot(places, heights, **{**look, **finer}, markevery=every, label=shortened(plain_text(name), 28))
    barred = [k for k, error in enumerate(spread) if values[k] > 0 and _BAR * values[k] < error < math.inf]
    if barred:
        below = [min(spread[k], values[k] * 0.9) for k in barred]
        above = [spread[k] for k in barred]
        at, middle = [places[k] for k in barred], [values[k] for k in barred]
        axes.errorbar(at, middle, [below, above], fmt="none", color=series_colour(index), capsize=3, linewidth=1)
    crossed = [k for k, value in enumerate(values) if value <= 0]
    axes.plot([places[k] for k in crossed], [heights[k] for k in crossed], "x", color=INK, markersize=11, zorder=5)


def _layer_ticks(axes: Axes, layers: Sequence[str]) -> None:
    """Names where they fit, else the number of the layer; the table has the names."""
    names = [shortened(plain_text(layer).removesuffix(".weight"), 14) for layer in layers]
    axes.set_xlim(-0.5, max(len(layers) - 0.5, 0.5))
    if len(layers) <= 10:
        crowded = sum(map(len, names)) > 44
        axes.set_xticks(range(len(layers)), names, rotation=35 if crowded else 0, ha="right" if crowded else "center")
        axes.set_xlabel("layer")
    else:
        every = math.ceil(len(layers) / 12)
        axes.set_xticks(range(0, len(layers), every), [str(i + 1) for i in range(0, len(layers), every)])
        axes.set_xlabel("layer (its number along the depth; names in the table)")


def legend_columns(labels: Iterable[str]) -> int:
    """How many entries fit beside each other; in points a handle with its gaps takes 44, a letter 4.6."""
    return max(1, int(72 * _WIDTH // (44 + 4.6 * max(map(len, labels), default=0))))


def legend(axes: Axes, count: int, always: bool = False) -> None:
    """Names of the series below the picture, or within the axes where they are a user's; none for a single one."""
    if count > 1 or always:
        handles, labels = axes.get_legend_handles_labels()
        columns = legend_columns(labels)
        if not isinstance(axes.get_figure(root=True), OwnFigure):
            axes.legend(handles, labels, handlelength=3.0)
            return
        axes.figure.legend(handles, labels, loc="outside lower center", ncols=min(count, columns), handlelength=3.0)


def _row(series: Mapping[str, Mapping[str, float]], layer: str) -> tuple[Cell, ...]:
    return tuple(profile.get(layer, math.nan) for profile in series.values())


def _profile_words(series: Mapping[str, Mapping[str, float]], depth: int) -> str:
    parts = [f"Values of {depth} layers in the order of the network, on a logarithmic scale."]
    for name, profile in series.items():
        if profile:
            low, high = min(profile.values()), max(profile, key=lambda layer: profile[layer])
            parts.append(
                f"{plain_text(name)}: from {significant(low, 3)} to {significant(profile[high], 3)}, "
                f"largest at {plain_text(high)}."
            )
    return " ".join(parts)


def by_name(source: Any, compute: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """Results by name, those of models computed; a single one under the empty name."""
    given = dict(source) if isinstance(source, Mapping) else {"": source}
    if not given:
        raise SpiritLevelError("there is nothing to draw: an empty mapping was passed")
    return {str(name): compute(each) if isinstance(each, nn.Module) else each for name, each in given.items()}
