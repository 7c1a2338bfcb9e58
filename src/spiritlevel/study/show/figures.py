"""The figures of a study: measures ranked, against the gap, by factor, along the depth, before and after rescaling."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from spiritlevel.show.drawing import INK, MARKERS, Drawing, series_colour, style
from spiritlevel.show.figures import axes_of, finished, legend, look_of
from spiritlevel.show.numbers import Cell, Numbers, plain_text, shortened, significant
from spiritlevel.show.scales import LogScale, light_grid, wide_scale
from spiritlevel.study.statistics import Estimate

_UPRIGHT = 24  # characters of a label that fit beside an upright axis
_POINTS = 120  # of a training curve that are drawn
_CURVES = 48  # training curves that one picture can carry


def interval_text(found: Estimate, digits: int = 2) -> str:
    """A coefficient with its interval.

    >>> interval_text(Estimate(0.713, 0.604, 0.79)), interval_text(Estimate(-0.5)), interval_text(Estimate())
    ('0.71 [0.60, 0.79]', '−0.50', 'none')
    """
    if not found.known:
        return "none"
    ends = f" [{found.low:.{digits}f}, {found.high:.{digits}f}]" if found.bounded else ""
    return f"{found.value:.{digits}f}{ends}".replace("-", "−")


def ranking(
    series: Mapping[str, Mapping[str, Estimate]],
    *,
    title: str,
    label: str,
    further: tuple[tuple[str, ...], Mapping[str, tuple[Cell, ...]]] = ((), {}),
) -> Drawing:
    """Measures from the best down, each with its coefficient and interval; `series`: name → measure → estimate.

    The order is that of the first series; the others stand a little below it. `further` are columns for the table.
    """
    first = next(iter(series.values()))
    names = sorted((n for n in first if first[n].known), key=lambda n: -first[n].value)
    spread = 0.28 if len(series) > 1 else 0.0
    with style():
        figure, axes = axes_of(None, height=0.9 + (0.24 + 0.1 * (len(series) - 1)) * max(len(names), 2))
        for index, (name, found) in enumerate(series.items()):
            shown = [(place, found[n]) for place, n in enumerate(names) if n in found and found[n].known]
            places = [place + spread * (index - (len(series) - 1) / 2) for place, _ in shown]
            _intervals(axes, index, name if len(series) > 1 else "", places, [e for _, e in shown], vertical=False)
        for place in range(len(names)):
            axes.axhline(place + 0.5, color=INK, alpha=0.08, linewidth=0.6)
        axes.axvline(0.0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(names)), [shortened(plain_text(n), 36) for n in names])
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_ylim(len(names) - 0.4, -0.6)
        _coefficient_limits(axes, [e for found in series.values() for e in found.values()], vertical=False)
        axes.set_xlabel(label)
        legend(axes, len(series))
    columns = ("measure", *map(plain_text, series), *further[0])
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            plain_text(n),
            *(interval_text(found.get(n, Estimate())) for found in series.values()),
            *further[1].get(n, (math.nan,) * len(further[0])),
        )
        for n in names
    )
    words = f"{label} of {len(names)} measures with 95 % intervals, the best at the top." + _ends_words(first, names)
    return finished(figure, Numbers(columns, rows), plain_text(title), words)


def gap_scatter(
    values: Sequence[float],
    gaps: Sequence[float],
    groups: Sequence[str],
    *,
    title: str,
    label: str,
    gap: str,
    said: str,
    order: Sequence[str] = (),
) -> Drawing:
    """A quantity against the gap: one dot per network, one kind of marker per group, the correlation `said` above."""
    kept = [i for i in range(len(values)) if math.isfinite(values[i]) and math.isfinite(gaps[i])]
    scale = wide_scale(torch.tensor([values[i] for i in kept], dtype=torch.float64))
    names = order or list(dict.fromkeys(groups))
    with style():
        figure, axes = axes_of(None, height=2.7 + (0.16 * math.ceil(len(names) / 3) if len(names) > 1 else 0.0))
        for index, name in enumerate(names):
            own = [i for i in kept if groups[i] == name]
            # Dots that coincide with those of an earlier group must not hide them.
            axes.plot([values[i] for i in own], [gaps[i] for i in own], MARKERS[index % len(MARKERS)], alpha=0.85,
                      color=series_colour(index), label=shortened(plain_text(name), 28) or None,
                      markersize=max(6.0 - 1.3 * index, 4.2))  # fmt: skip
        if scale is not None:
            scale.apply(axes.xaxis, axes)
        light_grid(axes)
        axes.set_xlabel(shortened(plain_text(label), 50))
        axes.set_ylabel(_beside(gap))
        axes.set_title(said, fontsize=8.5, loc="left")
        legend(axes, len(names))
    rows = tuple((plain_text(groups[i]), values[i], gaps[i]) for i in kept)
    words = f"{len(kept)} networks, a dot each. {said}." + (" The scale is logarithmic." if scale is not None else "")
    table = Numbers(("group", plain_text(label), plain_text(gap)), rows)
    return finished(figure, table, plain_text(title), words)


@dataclass(frozen=True)
class ByLevel:
    """Numbers of networks by the level of a factor: series → level's index → numbers."""

    levels: Sequence[str]
    series: Mapping[str, Mapping[int, Sequence[float]]]

    def numbers(self, name: str, level: int) -> list[float]:
        return [value for value in self.series[name].get(level, ()) if math.isfinite(value)]

    @property
    def all(self) -> list[float]:
        return [v for name in self.series for level in range(len(self.levels)) for v in self.numbers(name, level)]


def boxes(found: ByLevel, *, title: str, label: str, factor: str) -> Drawing:
    """One box per level: dots are networks, the bar is the median, the box holds the middle half."""
    scale = wide_scale(torch.tensor(found.all, dtype=torch.float64))
    width = 0.76 / len(found.series)
    with style():
        figure, axes = axes_of(None, height=2.7)
        for index, name in enumerate(found.series):
            away = width * (index - (len(found.series) - 1) / 2)
            for level in range(len(found.levels)):
                _box(axes, index, level + away, 0.4 * width, found.numbers(name, level), name if level == 0 else "")
        _level_axis(axes, found, scale, label, factor)
    rows = tuple(_level_rows(found))
    table = Numbers((plain_text(factor), "group", "networks", "lowest", "lower quartile", "median", "upper quartile", "highest"), rows)  # fmt: skip
    return finished(figure, table, plain_text(title), _level_words(found, label, factor))


def lines(found: ByLevel, *, title: str, label: str, factor: str, places: Sequence[float]) -> Drawing:
    """The median along a numeric factor with a band over the middle half; dots are networks."""
    scale = wide_scale(torch.tensor(found.all, dtype=torch.float64))
    with style():
        figure, axes = axes_of(None, height=2.7)
        for index, name in enumerate(found.series):
            known = [level for level in range(len(found.levels)) if found.numbers(name, level)]
            at = [places[level] for level in known]
            low, middle, high = (
                [float(np.quantile(found.numbers(name, level), share)) for level in known]
                for share in (0.25, 0.5, 0.75)
            )
            axes.fill_between(at, low, high, color=series_colour(index), alpha=0.18, linewidth=0)
            axes.plot(at, middle, **look_of(index), label=shortened(plain_text(name), 28) or None)
            dots = [(places[level], value) for level in known for value in found.numbers(name, level)]
            axes.plot([x for x, _ in dots], [y for _, y in dots], ".", color=series_colour(index), markersize=2.5)
        if scale is not None:
            scale.apply(axes.yaxis, axes)
        else:
            light_grid(axes)
        axes.set_xlabel(shortened(plain_text(factor), 50))
        axes.set_ylabel(_beside(label))
        legend(axes, len(found.series))
    rows = tuple(_level_rows(found))
    table = Numbers((plain_text(factor), "group", "networks", "lowest", "lower quartile", "median", "upper quartile", "highest"), rows)  # fmt: skip
    return finished(figure, table, plain_text(title), _level_words(found, label, factor))


def along_depth(layers: Mapping[str, Estimate], whole: Mapping[str, Estimate], *, title: str, label: str) -> Drawing:
    """The coefficient of every layer along the depth, and those of the whole network as lines across."""
    names = list(layers)
    with style():
        figure, axes = axes_of(None, height=2.6 + (0.17 if whole else 0.0))
        _intervals(
            axes, 0, "single layers" if whole else "", list(range(len(names))), list(layers.values()), vertical=True
        )
        for index, (name, found) in enumerate(whole.items(), start=1):
            look = look_of(index)
            axes.axhline(found.value, color=look["color"], linestyle=look["linestyle"], linewidth=1.6,
                         label=shortened(plain_text(name), 30))  # fmt: skip
        axes.axhline(0.0, color=INK, linewidth=0.8)
        axes.set_xlim(-0.5, len(names) - 0.5)
        shown = [shortened(plain_text(n).removesuffix(".weight"), 14) for n in names]
        if len(names) <= 10:
            axes.set_xticks(range(len(names)), shown, rotation=0 if sum(map(len, shown)) <= 48 else 30,
                            ha="center" if sum(map(len, shown)) <= 48 else "right", rotation_mode="anchor")  # fmt: skip
        axes.set_xlabel("layer" if len(names) <= 10 else "layer, from the input to the output")
        _coefficient_limits(axes, [*layers.values(), *whole.values()], vertical=True)
        axes.set_ylabel(label)
        legend(axes, 1 + len(whole))
    rows = (*((n, *_cells(e)) for n, e in layers.items()), *((plain_text(n), *_cells(e)) for n, e in whole.items()))
    known = [e.value for e in layers.values() if e.known]
    words = f"{label} of {len(names)} layers in the order of the network with 95 % intervals"
    words += f", from {interval_text(Estimate(min(known)))} to {interval_text(Estimate(max(known)))}." if known else "."
    words += "".join(f" {plain_text(n)}: {interval_text(e)}." for n, e in whole.items())
    return finished(figure, Numbers(("layer", *_estimate_columns(label)), tuple(rows)), plain_text(title), words)


def attack_lines(
    ratios: Mapping[str, Mapping[float, Sequence[float]]], still: Sequence[str], *, title: str, networks: int
) -> Drawing:
    """Measures relative to the trained network against the sharpness asked for: medians, and bands over networks."""
    targets = sorted({target for found in ratios.values() for target in found})
    moving = [name for name in ratios if name not in still]
    scale = LogScale.of([1.0, *(v for name in moving for found in ratios[name].values() for v in found)])
    with style():
        figure, axes = axes_of(None, height=2.6 + 0.18 * math.ceil((len(moving) + bool(still)) / 2))
        for index, name in enumerate(moving):
            known = [target for target in targets if ratios[name].get(target)]
            low, middle, high = (
                [scale.place(float(np.quantile(ratios[name][t], share))) for t in known] for share in (0.0, 0.5, 1.0)
            )
            axes.fill_between(known, low, high, color=series_colour(index), alpha=0.18, linewidth=0)
            axes.plot(known, middle, **look_of(index), label=shortened(plain_text(name), 34))
        if still:
            axes.plot(targets, [1.0] * len(targets), color=INK, linewidth=2.2, label=f"{len(still)} that stay")
        scale.apply(axes.yaxis, axes)
        LogScale.of(targets).apply(axes.xaxis, axes)
        axes.set_xlabel("Hessian norm asked of the attack")
        axes.set_ylabel("ratio to the trained network")
        legend(axes, len(moving) + bool(still), always=True)
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (plain_text(name), target, *(float(np.quantile(found[target], share)) for share in (0.0, 0.5, 1.0)))
        for name, found in ratios.items()
        for target in targets
        if found.get(target)
    )
    words = f"{networks} networks, attacked without changing their function."
    if moving:
        words += f" {', '.join(map(plain_text, moving))} can be made as large as asked."
    words += f" {len(still)} measures stay where they were."
    table = Numbers(("measure", "target", "lowest ratio", "median ratio", "highest ratio"), rows)
    return finished(figure, table, plain_text(title), words)


def training_curves(
    curves: Mapping[str, tuple[str, Sequence[float], Sequence[float]]],
    groups: Sequence[str],
    *,
    title: str,
    label: str,
    logarithmic: bool,
) -> Drawing:
    """One thin line per network, coloured by its group: name → (group, epochs, values)."""
    every = math.ceil(max(len(curves), 1) / _CURVES)
    shown = {name: curve for i, (name, curve) in enumerate(curves.items()) if i % every == 0}
    values = [v for _, _, line in shown.values() for v in line if math.isfinite(v)]
    scale = LogScale.of(values) if logarithmic and any(v > 0 for v in values) else None
    labelled: set[str] = set()
    with style():
        figure, axes = axes_of(None, height=2.5 + (0.16 * math.ceil(len(groups) / 3) if len(groups) > 1 else 0.0))
        for group, epochs, line in shown.values():
            look = look_of(groups.index(group))
            step = max(1, len(line) // _POINTS)
            heights = [scale.place(v) if scale is not None else v for v in line]
            named = shortened(plain_text(group), 28) if group and group not in labelled else None
            labelled.add(group)
            axes.plot(epochs[::step], heights[::step], color=look["color"], linestyle=look["linestyle"], linewidth=0.9,
                      alpha=0.7, label=named)  # fmt: skip
        if scale is not None:
            scale.apply(axes.yaxis, axes)
        else:
            light_grid(axes)
        axes.set_xlabel("epoch")
        axes.set_ylabel(label)
        legend(axes, len(groups))
    rows = tuple((n, plain_text(g), len(e), line[0], line[-1]) for n, (g, e, line) in curves.items() if len(line))
    left = f" Every {every}th of them is drawn." if every > 1 else ""
    words = f"{label} of {len(curves)} networks, epoch by epoch.{left}"
    table = Numbers(("network", "group", "epochs recorded", f"first {label}", f"last {label}"), rows)
    return finished(figure, table, plain_text(title), words)


def _intervals(
    axes: Axes, index: int, name: str, places: Sequence[float], found: Sequence[Estimate], *, vertical: bool
) -> None:
    """Markers with their intervals; a coefficient without one stands alone."""
    look = look_of(index)
    values = [e.value for e in found]
    barred = [k for k, e in enumerate(found) if e.bounded]
    ends = [[values[k] - found[k].low for k in barred], [found[k].high - values[k] for k in barred]]
    bars = np.maximum(np.array(ends, dtype=float), 0.0)
    at, middle = [places[k] for k in barred], [values[k] for k in barred]
    if barred and vertical:
        axes.errorbar(at, middle, yerr=bars, fmt="none", color=look["color"], capsize=3, linewidth=1.2)
    elif barred:
        axes.errorbar(middle, at, xerr=bars, fmt="none", color=look["color"], capsize=3, linewidth=1.2)
    marks = {"color": look["color"], "marker": look["marker"], "markersize": 6.0, "linestyle": "none"}
    x, y = (places, values) if vertical else (values, places)
    axes.plot(x, y, **marks, label=shortened(plain_text(name), 30) or None)


def _coefficient_limits(axes: Axes, found: Sequence[Estimate], *, vertical: bool) -> None:
    """From a little below the lowest end to 1, with zero always in sight."""
    lowest = min((v for e in found for v in (e.value, e.low) if not math.isnan(v)), default=0.0)
    (axes.set_ylim if vertical else axes.set_xlim)(max(min(lowest - 0.05, -0.05), -1.05), 1.05)
    light_grid(axes, "y" if vertical else "x")


def _box(axes: Axes, index: int, place: float, half: float, numbers: Sequence[float], name: str) -> None:
    look = look_of(index)
    if numbers:
        low, middle, high = (float(np.quantile(numbers, share)) for share in (0.25, 0.5, 0.75))
        corners = [[(place - half, low), (place + half, low), (place + half, high), (place - half, high)]]
        axes.add_collection(PolyCollection(corners, facecolors="none", edgecolors=INK, linewidths=0.8))
        axes.hlines([middle], [place - half], [place + half], color=INK, linewidth=1.8)
    # The golden ratio spreads neighbours far apart without chance.
    across = [place + 1.1 * half * ((i * 0.6180339887) % 1 - 0.5) for i in range(len(numbers))]
    axes.plot(across, sorted(numbers), look["marker"], color=look["color"], markersize=4.0, alpha=0.8,
              label=shortened(plain_text(name), 28) or None)  # fmt: skip


def _level_axis(axes: Axes, found: ByLevel, scale: LogScale | None, label: str, factor: str) -> None:
    if scale is not None:
        scale.apply(axes.yaxis, axes)
    else:
        light_grid(axes)
    texts = [shortened(plain_text(level), 18) for level in found.levels]
    long = sum(map(len, texts)) > 46
    axes.set_xticks(range(len(texts)), texts, rotation=25 if long else 0, ha="right" if long else "center",
                    rotation_mode="anchor")  # fmt: skip
    axes.set_xlim(-0.5, len(texts) - 0.5)
    axes.set_xlabel(shortened(plain_text(factor), 50))
    axes.set_ylabel(_beside(label))
    legend(axes, len(found.series))


def _beside(label: str) -> str:
    """A label for the upright axis, in lines that are no longer than the axis is high."""
    return "\n".join(textwrap.wrap(shortened(plain_text(label), 2 * _UPRIGHT), _UPRIGHT))


def _level_rows(found: ByLevel) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = []
    for level, text in enumerate(found.levels):
        for name in found.series:
            numbers = found.numbers(name, level)
            if numbers:
                quantiles = [float(np.quantile(numbers, share)) for share in (0, 0.25, 0.5, 0.75, 1)]
                rows.append((plain_text(text), plain_text(name), len(numbers), *quantiles))
    return rows


def _level_words(found: ByLevel, label: str, factor: str) -> str:
    parts = [
        f"{plain_text(label)} by {plain_text(factor)}; the bar or line is the median, the box or band the middle half."
    ]
    for name in found.series:
        known = [level for level in range(len(found.levels)) if found.numbers(name, level)]
        if known:
            first, last = (
                significant(float(np.median(found.numbers(name, level))), 3) for level in (known[0], known[-1])
            )
            who = f"{plain_text(name)}: median" if name else "Median"
            ends = f"{plain_text(found.levels[known[0]])} to {last} at {plain_text(found.levels[known[-1]])}"
            parts.append(f"{who} {first} at {ends}.")
    return " ".join(parts)


def _estimate_columns(name: str) -> tuple[str, str, str]:
    return plain_text(name), "low", "high"


def _cells(found: Estimate) -> tuple[float, float, float]:
    return found.value, found.low, found.high


def _ends_words(found: Mapping[str, Estimate], names: Sequence[str]) -> str:
    if not names:
        return ""
    best, worst = names[0], names[-1]
    said = f" From {plain_text(best)}, {interval_text(found[best])}"
    return said + (f", to {plain_text(worst)}, {interval_text(found[worst])}." if best != worst else ".")
