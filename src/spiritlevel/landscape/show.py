"""The loss along lines and over planes, drawn (Rangamani et al. 2019, Figure 2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator
from torch import Tensor, nn

from spiritlevel.errors import SpiritLevelError
from spiritlevel.landscape import landscape
from spiritlevel.landscape.landscape import Line, Surface
from spiritlevel.problem.losses import LossLike
from spiritlevel.show.drawing import INK, Drawing, series_colour, style
from spiritlevel.show.figures import axes_of, by_name, finished, legend, look_of
from spiritlevel.show.numbers import Cell, Numbers, plain_text, shortened, significant
from spiritlevel.show.scales import LogScale, light_grid, wide_scale


def line(
    source: Line | nn.Module | Mapping[str, Line | nn.Module],
    data: Any = None,
    loss: LossLike = "cross_entropy",
    *,
    quantity: Literal["loss", "accuracy"] = "loss",
    axes: Axes | None = None,
    title: str | None = None,
    **options: Any,
) -> Drawing:
    """The loss along lines through one or several minima: the median over directions, and a band that holds them all.

    source: lines from `landscape.line`, or models, for which they are computed from `data`, `loss` and `options`.
    quantity: What is drawn.

    >>> data = torch.eye(2), torch.zeros(2, 1)
    >>> type(line(nn.Linear(2, 1), data, "mse", points=5)).__name__
    'Drawing'
    """
    lines = by_name(source, lambda model: landscape.line(model, data, loss, **options))
    values = {name: each.losses if quantity == "loss" else each.accuracies for name, each in lines.items()}
    drawn = {name: found for name, found in values.items() if found is not None}
    if not drawn:
        raise SpiritLevelError("there are no accuracies: the targets are not labels")
    scale = wide_scale(torch.cat([found.flatten() for found in drawn.values()])) if quantity == "loss" else None
    with style():
        figure, axes = axes_of(axes, height=2.7)
        for index, (name, found) in enumerate(drawn.items()):
            _draw_band(axes, index, name, lines[name].steps.tolist(), found, scale)
        if scale is not None:
            scale.apply(axes.yaxis, axes)
        else:
            light_grid(axes)
        axes.set_xlabel(_step_label(lines.values()))
        axes.set_ylabel(quantity)
        legend(axes, len(drawn))
    columns: list[str] = ["t"]
    for name in drawn:
        lead = f"{plain_text(name)}: " if name else ""
        columns += [f"{lead}median {quantity}", f"{lead}lowest", f"{lead}highest"]
    rows = _line_rows(lines, drawn)
    heading = title or f"{quantity.capitalize()} along {_directions_text(lines.values())}"
    return finished(figure, Numbers(tuple(columns), rows), plain_text(heading), _line_words(lines, drawn, quantity))


def _draw_band(axes: Axes, index: int, name: str, steps: list[float], found: Tensor, scale: LogScale | None) -> None:
    low, middle, high = (_along(found, share) for share in (0.0, 0.5, 1.0))
    every = max(1, len(steps) // 10)
    shown = shortened(plain_text(name), 28) or None
    axes.plot(steps, _on(scale, middle), **look_of(index), markevery=every, label=shown)
    if len(found) > 1:
        colour = series_colour(index)
        axes.fill_between(steps, _on(scale, low), _on(scale, high), color=colour, alpha=0.15, linewidth=0)
        for edge in (low, high):
            axes.plot(steps, _on(scale, edge), color=colour, linewidth=0.7, linestyle=look_of(index)["linestyle"])


def _along(found: Tensor, share: float) -> list[float]:
    """That quantile over directions at every point; infinite values count as the largest."""
    ordered = found.nan_to_num(nan=math.inf, posinf=math.inf).sort(0).values
    place = share * (len(ordered) - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return [float(a if a == b else (a + b) / 2) for a, b in zip(below, above, strict=True)]


def _on(scale: LogScale | None, values: Sequence[float]) -> list[float]:
    """Heights on the scale; what is not finite is a gap."""
    finite = [value if math.isfinite(value) else math.nan for value in values]
    return finite if scale is None else [value if math.isnan(value) else scale.place(value) for value in finite]


def _step_label(lines: Iterable[Line]) -> str:
    kinds = {each.normalization for each in lines}
    return "t" if len(kinds) != 1 or kinds == {"none"} else f"t ({kinds.pop()} normalization)"


def _directions_text(lines: Iterable[Line]) -> str:
    kinds = {_kind(label) for each in lines for label in each.labels}
    return kinds.pop() if len(kinds) == 1 else "lines of several kinds"


def _kind(label: str) -> str:
    if label.startswith("seed"):
        return "random directions"
    return "top eigenvectors" if label.startswith("eigenvalue") else "the line between two networks"


def _line_rows(lines: Mapping[str, Line], drawn: Mapping[str, Tensor]) -> tuple[tuple[Cell, ...], ...]:
    steps = sorted({float(t) for name in drawn for t in lines[name].steps})
    columns = []
    for name, found in drawn.items():
        places = {float(t): i for i, t in enumerate(lines[name].steps)}
        for share in (0.5, 0.0, 1.0):
            values = _along(found, share)
            columns.append([values[places[t]] if t in places else math.nan for t in steps])
    return tuple((t, *(column[i] for column in columns)) for i, t in enumerate(steps))


def _line_words(lines: Mapping[str, Line], drawn: Mapping[str, Tensor], quantity: str) -> str:
    parts = [f"The {quantity} against the step t along {_directions_text(lines.values())}."]
    for name, found in drawn.items():
        steps, middle = lines[name].steps, _along(found, 0.5)
        here = middle[int(steps.abs().argmin())]
        band = f", a band over {len(found)} directions" if len(found) > 1 else ""
        who = f"{plain_text(name)}: " if name else ""
        first, last = (f"{float(step):g}".replace("-", "−") for step in (steps[0], steps[-1]))
        parts.append(
            f"{who}{significant(here, 3)} nearest t = 0, {significant(middle[0], 3)} at t = {first} and "
            f"{significant(middle[-1], 3)} at t = {last}{band}."
        )
    return " ".join(parts)


def surface(
    source: Surface | nn.Module,
    data: Any = None,
    loss: LossLike = "cross_entropy",
    *,
    three_d: bool = False,
    axes: Axes | None = None,
    title: str = "Loss over a plane through the network's weights",
    **options: Any,
) -> Drawing:
    """The loss over a plane: contours with their values, or a surface in three dimensions.

    source: a surface from `landscape.surface`, or a model, for which it is computed from `data`, `loss`, `options`.
    three_d: Draw in three dimensions; axes that are passed must have that projection.

    >>> data = torch.eye(2), torch.zeros(2, 1)
    >>> surface(nn.Linear(2, 1), data, "mse", points=5).title
    "Loss over a plane through the network's weights"
    """
    found = source if isinstance(source, Surface) else landscape.surface(source, data, loss, **options)
    finite = found.losses[found.losses.isfinite()]
    logs = wide_scale(finite) is not None
    shown = found.losses.log10() if logs else found.losses
    shown = shown.masked_fill(~shown.isfinite(), math.nan)
    with style():
        figure, axes = axes_of(axes, height=3.9, projection="3d" if three_d else None)
        (_draw_three_d if three_d else _draw_contours)(axes, found, shown.numpy(), logs)
        axes.set_xlabel(shortened(f"x: {found.labels[0]}", 34))
        axes.set_ylabel(shortened(f"y: {found.labels[1]}", 34))
    rows = tuple(
        (float(x), float(y), float(found.losses[j, i])) for j, y in enumerate(found.y) for i, x in enumerate(found.x)
    )
    lowest = int(found.losses.nan_to_num(nan=math.inf, posinf=math.inf).argmin())
    at = rows[lowest]
    row, column = int(found.y.abs().argmin()), int(found.x.abs().argmin())
    centre, place = found.losses[row, column], f"({float(found.x[column]):g}, {float(found.y[row]):g})"
    words = (
        f"The loss over a plane spanned by {found.labels[0]} and {found.labels[1]}, {found.normalization} normalization. "
        f"It is {significant(float(centre), 3)} at {place}, lowest with {significant(at[2], 3)} at "
        f"({at[0]:g}, {at[1]:g}) and highest with {significant(float(finite.max()), 3)}{_beyond(found.losses)}."
    )
    return finished(figure, Numbers(("x", "y", "loss"), rows), plain_text(title), words)


def _beyond(losses: Tensor) -> str:
    """How many points of a grid have no finite loss, which no picture shows."""
    count = int((~losses.isfinite()).sum())
    return f" where it is finite; at {count} of {losses.numel()} points it is not" if count else ""


def _draw_contours(axes: Axes, found: Surface, heights: Any, logs: bool) -> None:
    levels = MaxNLocator(9).tick_values(*_ends(heights))
    axes.contourf(found.x, found.y, heights, levels=levels, cmap="cividis", alpha=0.85)
    lines = axes.contour(found.x, found.y, heights, levels=levels, colors=INK, linewidths=0.6, linestyles="-")
    roomy = [level for level in levels if float((heights < level).mean()) > 0.04]  # others would cover the middle
    texts = axes.clabel(
        lines,
        [level for level in roomy if level in lines.levels],
        fontsize=7,
        fmt=lambda level: _level_text(level, logs),
    )
    for text in texts:
        text.set_bbox({"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8})
    if float(found.x.min()) <= 0 <= float(found.x.max()) and float(found.y.min()) <= 0 <= float(found.y.max()):
        axes.plot([0], [0], "P", color="white", markeredgecolor=INK, markersize=9)
    axes.set_aspect("equal")


def _draw_three_d(axes: Any, found: Surface, heights: Any, logs: bool) -> None:
    x, y = torch.meshgrid(found.x, found.y, indexing="xy")
    axes.plot_surface(x.numpy(), y.numpy(), heights, cmap="cividis", edgecolor=INK, linewidth=0.25, antialiased=True)
    axes.zaxis.set_major_formatter(FuncFormatter(lambda level, _: _level_text(level, logs)))
    axes.set_zlabel("loss")
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.set_major_locator(MaxNLocator(5))
    axes.set_box_aspect(None, zoom=0.88)
    axes.view_init(elev=32, azim=-58)


def _ends(heights: Any) -> tuple[float, float]:
    known = torch.as_tensor(heights)
    known = known[known.isfinite()]
    if not known.numel():
        raise SpiritLevelError("the loss is not finite anywhere on this grid: choose a smaller span")
    low, high = float(known.min()), float(known.max())
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _level_text(level: float, logs: bool) -> str:
    return significant(10.0**level, 2) if logs else f"{level:.3g}"
