"""A history drawn: curves against step and loss with their errors and lines of stability, a table, a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from rich.console import Group, RenderableType
from rich.text import Text

from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.value import Value, visible_error
from spiritlevel.presenting import facts, register
from spiritlevel.show.drawing import INK, Drawing, series_colour, style
from spiritlevel.show.figures import axes_of, finished, legend, look_of
from spiritlevel.show.numbers import Cell, Numbers, plain_text, seconds_text, shortened, significant, with_error
from spiritlevel.show.page import pictures_fragment, render_page
from spiritlevel.show.scales import LogScale, light_grid
from spiritlevel.show.sections import Section
from spiritlevel.show.tables import Fitted, measure_name, render, simple_table
from spiritlevel.tracking.history import History, Point
from spiritlevel.tracking.tracker import Tracker

Against = Literal["step", "loss"]

_ROWS = 20  # of a table in the terminal: the first ones and the last
_LAYERS = 12  # lines of layers that one picture can carry
_MARKERS = 30
_BESIDE, _COLUMN = 32, 22  # letters for step, loss and time, and for a measure


@dataclass(frozen=True)
class Curve:
    """One line: places, values, half widths of its band, and the lines of stability at the same places."""

    label: str
    places: list[float]
    values: list[float]
    errors: list[float]
    lines: list[float]


def history(
    source: History | Tracker | Mapping[str, History | Tracker],
    measures: str | Iterable[str] | None = None,
    *,
    against: Against = "step",
    layers: bool = False,
    axes: Axes | None = None,
    title: str | None = None,
) -> Drawing:
    """Measures along a training, on a logarithmic scale, with bands for their errors and dotted lines of stability.

    source: A tracker or its history, or several by name.
    measures: Names; all that the history has where None.
    against: "step", or "loss": the training loss where it was passed to `step`, else that of the probe set.
    layers: One line a layer instead of one a measure.

    >>> values = [Value("rho_sum", number, 0.1, False, True, "random probes") for number in (4.0, 2.0)]
    >>> drawn = history(History([Point(k, 1 / (k + 1), {"rho_sum": value}) for k, value in enumerate(values)]))
    >>> drawn.title, len(drawn.table.rows)
    ('rho_sum along the training', 2)
    """
    if against not in ("step", "loss"):
        raise SpiritLevelError(f'against must be "step" or "loss", got {against!r}')
    runs = {str(name): _history_of(each) for name, each in _named(source).items()}
    names = _names(runs.values(), measures)
    curves = [curve for run in runs for curve in _curves(run, runs[run], names, against, layers)]
    if not any(curve.places for curve in curves):
        raise SpiritLevelError("there is nothing to draw: the history has no point with these measures")
    loss = _loss_words(point for run in runs.values() for point in run if any(name in point for name in names))
    with style():
        figure, axes = axes_of(axes, height=2.6 + 0.18 * math.ceil(len(curves) / 2) * (len(curves) > 1))
        _draw(axes, curves, against)
        axes.set_xlabel("step" if against == "step" else loss)
        axes.set_ylabel(shortened(names[0] if len(names) == 1 else "value", 34))
        legend(axes, len(curves), always=any(curve.lines for curve in curves))
    label = names[0] if len(names) == 1 else "Measures"
    left_out = max((len(_layers(run, name)) for run in runs.values() for name in names), default=0) if layers else 0
    words = _words(curves) + (f" The first {_LAYERS} of {left_out} layers." if left_out > _LAYERS else "")
    table = _numbers(curves, "step" if against == "step" else loss)
    return finished(figure, table, plain_text(title or f"{label} along the training"), words)


def _loss_words(points: Iterable[Point]) -> str:
    """Which loss curves are drawn against: that of the training only where it was told."""
    known = {math.isfinite(point.train_loss) for point in points}
    if known == {True}:
        return "training loss"
    return "training loss, or that of the probe set where it was not told" if True in known else "loss of the probe set"


def _layers(history: History, name: str) -> list[str]:
    """The layers that a measure has a value for, at any point."""
    return list(dict.fromkeys(layer for point in history if name in point for layer in point[name].layers))


def _named(source: Any) -> Mapping[str, Any]:
    return source if isinstance(source, Mapping) else {"": source}


def _history_of(source: Any) -> History:
    found = source.history if isinstance(source, Tracker) else source
    if not isinstance(found, History):
        raise SpiritLevelError(f"a tracker or its history can be drawn, got {type(source).__name__}")
    return found


def _names(runs: Iterable[History], measures: str | Iterable[str] | None) -> list[str]:
    if isinstance(measures, str):
        return [measures]
    return list(dict.fromkeys(name for run in runs for name in run.measures)) if measures is None else list(measures)


def _curves(run: str, history: History, names: Sequence[str], against: Against, layers: bool) -> Iterator[Curve]:
    for name in names:
        history.series(name)  # says what is wrong with a name that is not there
        points = [point for point in history if name in point and point[name].available]
        label = ": ".join(part for part in (plain_text(run), name if len(names) > 1 or not run else "") if part)
        if not layers:
            yield _curve(label or name, points, name, against, [(p[name].value, _width(p[name])) for p in points])
            continue
        for layer in _layers(history, name)[:_LAYERS]:
            kept = [point for point in points if layer in point[name].layers]
            values = [(p[name].layers[layer], p[name].layer_errors.get(layer, 0.0)) for p in kept]
            yield _curve(plain_text(f"{run} {layer}".strip()), kept, "", against, values)


def _curve(
    label: str, points: Sequence[Point], name: str, against: Against, values: Sequence[tuple[float, float]]
) -> Curve:
    losses = [point.train_loss if math.isfinite(point.train_loss) else point.loss for point in points]
    places = losses if against == "loss" else [float(point.step) for point in points]
    lines = [point.thresholds.get(name, math.nan) for point in points]
    lines = lines if any(map(math.isfinite, lines)) else []
    kept = [k for k, place in enumerate(places) if math.isfinite(place) and (against == "step" or place > 0)]
    if against == "loss":
        kept.sort(key=lambda k: -places[k])
    return Curve(
        label,
        [places[k] for k in kept],
        [values[k][0] for k in kept],
        [values[k][1] for k in kept],
        [lines[k] for k in kept] if lines else [],
    )


def _width(value: Value) -> float:
    """Half the width of a band: the error, two of them where it is a standard error."""
    return 2 * value.error if value.error_kind in ("standard error", "sampling") else value.error


def _draw(axes: Axes, curves: Sequence[Curve], against: Against) -> None:
    scale = LogScale.of(number for curve in curves for number in (*curve.values, *curve.lines))
    for index, curve in enumerate(curves):
        heights = [scale.place(value) for value in curve.values]
        every = math.ceil(max(len(heights), 1) / _MARKERS)
        look = {**look_of(index), "markersize": 3.5, "linewidth": 1.2}
        axes.plot(curve.places, heights, **look, markevery=every, label=shortened(curve.label, 40))
        low = [max(v - e, scale.low) for v, e in zip(curve.values, curve.errors, strict=True)]
        high = [max(v + e, scale.low) for v, e in zip(curve.values, curve.errors, strict=True)]
        axes.fill_between(curve.places, low, high, color=series_colour(index), alpha=0.2, linewidth=0)
        if curve.lines:
            label = shortened(f"stable below: {curve.label}", 48)
            axes.plot(curve.places, curve.lines, color=INK, linestyle=(index, (1.5, 1.5)), linewidth=1.1, label=label)
    scale.apply(axes.yaxis, axes)
    if against == "loss":
        LogScale.of(place for curve in curves for place in curve.places).apply(axes.xaxis, axes)
        axes.invert_xaxis()  # the training goes to the right
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        light_grid(axes)


def _numbers(curves: Sequence[Curve], against: str) -> Numbers:
    rows: list[tuple[Cell, ...]] = []
    for curve in curves:
        lines = curve.lines or [math.nan] * len(curve.places)
        rows += [
            (curve.label, int(place) if against == "step" else place, value, error, line)
            for place, value, error, line in zip(curve.places, curve.values, curve.errors, lines, strict=True)
        ]
    return Numbers(
        ("measure", against, "value", "± error", "line of stability"),
        tuple(rows),
    )


def _words(curves: Sequence[Curve]) -> str:
    parts = ["Values along a training on a logarithmic scale, bands for their errors."]
    for curve in curves:
        if curve.values:
            first, last = significant(curve.values[0], 3), significant(curve.values[-1], 3)
            parts.append(f"{curve.label}: {len(curve.values)} points, from {first} to {last}.")
        if curve.lines and math.isfinite(curve.lines[-1]):
            parts.append(f"The optimizer is stable below {significant(curve.lines[-1], 3)} (dotted).")
    return " ".join(parts)


# --- tables and pages ------------------------------------------------------------------------------------------------


def history_table(history: History) -> RenderableType:
    """A row a point: step, epoch, loss, values with errors, seconds; the middle of a long history is left out.

    As many measures beside each other as fit, the others in tables below.
    """
    notes = [Text(f"• {plain_text(note)}") for note in history.notes]
    if not history.measures:
        return Group(Text("nothing has been measured yet"), *notes)

    return Fitted(lambda width: Group(*(_part(history, part) for part in _parts(history, width - _BESIDE)), *notes))


def _parts(history: History, width: int) -> list[list[str]]:
    """The measures in groups that fit beside each other, at least one in each."""
    parts: list[list[str]] = []
    left = 0
    for name in history.measures:
        needed = 1 + max(len(line) for line in (*_heading(name).plain.splitlines(), *_cells(history, name)))
        if not parts or needed > left:
            parts.append([])
            left = width
        parts[-1].append(name)
        left -= needed
    return parts


def _heading(name: str) -> Text:
    return measure_name(name, _COLUMN - 2)


def _cells(history: History, name: str) -> list[str]:
    return [_cell(point, name) for point in _shown(history)]


def _shown(history: History) -> list[Point]:
    """All points; of many the first and the last."""
    points = list(history)
    return points if len(points) <= _ROWS else [*points[: _ROWS // 2], *points[-_ROWS // 2 :]]


def _part(history: History, names: Sequence[str]) -> RenderableType:
    table = simple_table()
    epochs = any(point.epoch is not None for point in history)
    columns: list[str | Text] = ["step", *(["epoch"] if epochs else []), "loss", *map(_heading, names), "time"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for place, point in enumerate(_shown(history)):
        if len(history) > _ROWS and place == _ROWS // 2:
            table.add_row("…")
        epoch = ["" if point.epoch is None else f"{point.epoch:.4g}"] if epochs else []
        cells = [_cell(point, name) for name in names]
        table.add_row(str(point.step), *epoch, _loss(point.loss), *cells, seconds_text(point.cost.seconds))
    return table


def _loss(loss: float) -> str:
    return significant(loss, 4) if math.isfinite(loss) else "–"


def _cell(point: Point, name: str) -> str:
    if name not in point:
        return ""
    value = point[name]
    return with_error(value.value, visible_error(value)) if value.available else "–"


def _all_points(history: History) -> Numbers:
    columns = ("step", "epoch", "loss", "train loss", *history.measures, "seconds")
    rows = [
        (
            point.step,
            math.nan if point.epoch is None else point.epoch,
            point.loss,
            point.train_loss,
            *(float(point.values[name]) if name in point else math.nan for name in history.measures),
            point.cost.seconds,
        )
        for point in history
    ]
    return Numbers(columns, tuple(rows))


def _section(history: History, name: str) -> Section:
    drawings = [partial(_drawn, history, name, against="step"), partial(_drawn, history, name, against="loss")]
    if any(point[name].layers for point in history if name in point):
        drawings.append(partial(_drawn, history, name, against="step", layers=True))
    found = [drawing for draw in drawings if (drawing := draw()) is not None]
    return Section(name.replace("_", "-"), name, (), tuple(found))


def _drawn(source: History, name: str, *, against: Against, layers: bool = False) -> Drawing | None:
    titles = {"step": f"{name} against step", "loss": f"{name} against {_loss_words(p for p in source if name in p)}"}
    count = len(_layers(source, name))
    which = "every layer" if count <= _LAYERS else f"the first {_LAYERS} of {count} layers"
    title = f"{name} of {which}" if layers else titles[against]
    try:
        return history(source, name, against=against, layers=layers, title=title)
    except SpiritLevelError:  # no point with this measure, or none with a loss
        return None


def history_page(history: History) -> str:
    """The page: what was measured when, a section a measure, all points in a table."""
    sections = [_section(history, name) for name in history.measures]
    points = Section("points", "All points", (), (), (("Every point", _all_points(history)),))
    return render_page(
        title="Flatness along a training",
        answer=_said(history),
        sections=[*filter(_drawings, sections), points],
        facts={**facts(), **history.about},
    )


def _drawings(section: Section) -> bool:
    return bool(section.drawings)


def _said(history: History) -> list[str]:
    if not history:
        return ["Nothing has been measured yet."]
    seconds = seconds_text(sum(point.cost.seconds for point in history))
    said = [f"{len(history)} points from step {history[0].step:,} to {history[-1].step:,}; measuring took {seconds}."]
    for name in history.measures:
        values = [point[name] for point in history if name in point and point[name].available]
        if len(values) > 1:
            first, last = (with_error(value.value, visible_error(value)) for value in (values[0], values[-1]))
            said.append(f"{name} went from {first} to {last}.")
    return [*said, *map(plain_text, history.notes)]


def history_fragment(history: History) -> str:
    """For the cell of a notebook: one picture a measure against step, without script."""
    drawings = [drawing for name in history.measures if (drawing := _drawn(history, name, against="step")) is not None]
    return pictures_fragment(_said(history)[0], Section("history", "History", (), tuple(drawings)))


def history_text(history: History) -> str:
    """The table as plain text."""
    return render(history_table(history))


register(History, text=history_text, page=history_page, fragment=history_fragment, drawing=history)
