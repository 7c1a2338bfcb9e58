"""Pictures of the results: accuracy against cost, cost against the train loss, and how our costs grow. The same results give
the same bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.markers import CARETUPBASE

from benchmarks.peers import LIBRARIES
from benchmarks.tables import NAMES, Record, Results, at_accuracy, in_full, read_results
from benchmarks.tasks import GROWING, TASKS
from benchmarks.worker import OURS
from spiritlevel.saved import write_whole
from spiritlevel.show.drawing import DASHES, MARKERS, series_colour, style
from spiritlevel.show.scales import LogScale

SHOWN = ("trace", "layer_traces", "diagonal", "lambda_1e-2", "lambda_1e-4", "riemannian", "layer_lambda", "rho")
VARIED = {"samples": "samples N", "width": "parameters", "classes": "classes"}
FLOOR = 1e-8  # errors below this are rounding and drawn here


def write_pictures(folder: Path) -> list[Path]:
    """`accuracy.svg`, `losses.svg` and `growth.svg` in `folder`, for the results in `folder`/results."""
    results = read_results(folder / "results")
    drawn = {}
    if results.contests:
        drawn["accuracy.svg"] = accuracy(results)
    if networks := trained_along(results):
        drawn["losses.svg"] = losses(results, networks)
    if results.growth is not None:
        drawn["growth.svg"] = growth(results.growth["growth"])
    for name, figure in drawn.items():
        write_whole(folder / name, _svg(figure))
    return [folder / name for name in drawn]


def accuracy(results: Results) -> Figure:
    """One panel a task: cost to the right, error downwards, a mark for every library and network."""
    with style():
        figure = Figure(figsize=(9.6, 5.4), layout="constrained")
        panels = list(figure.subplots(2, 4, sharex=True, sharey=True).flat)
        drawn: list[tuple[float, float]] = []
        for axes, task in zip(panels, SHOWN, strict=True):
            for index, library in enumerate((OURS, *LIBRARIES)):
                points = [_point(results.record(name, library, task)) for name in in_full(results)]
                found = [point for point in points if point is not None]
                axes.plot(*_columns(found), **_marks(index), linestyle="none", label=library)
                drawn += found
            axes.set_title(TASKS[task].title, fontsize=9)
        for axes in panels:
            _logarithmic(axes, *_columns(drawn))
        figure.supxlabel("cost, gradients", fontsize=9)
        figure.supylabel("relative error (standard error of an estimator)", fontsize=9)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return figure


def _point(record: Record | None) -> tuple[float, float] | None:
    if record is None or record["status"] != "measured":
        return None
    error = record["standard_error"] if record.get("standard_error") is not None else record.get("error")
    return None if error is None else (record["cost"], max(error, FLOOR))


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [point[0] for point in points], [point[1] for point in points]


def _logarithmic(axes: Axes, across: Sequence[float], upwards: Sequence[float]) -> None:
    LogScale.of(across).apply(axes.xaxis, axes)
    LogScale.of(upwards).apply(axes.yaxis, axes)


ALONG = ("layer_traces", "lambda_1e-4", "everything")
MOST_SHOWN = 300.0  # gradients: what would take more to the accuracy asked is drawn as an arrow here


def trained_along(results: Results) -> dict[str, list[str]]:
    """Networks that were measured at several train losses → their keys."""
    found: dict[str, list[str]] = {}
    for key in results.contests:
        if "-" in key:
            found.setdefault(key.partition("-")[0], []).append(key)
    return {name: keys for name, keys in found.items() if len(keys) > 1}


def losses(results: Results, networks: Mapping[str, Sequence[str]]) -> Figure:
    """A row a task, a column a network: cost at the accuracy asked against the train loss, a line a library."""
    with style():
        figure = Figure(figsize=(9.6, 6.8), layout="constrained")
        panels = figure.subplots(len(ALONG), len(networks), sharex=True, sharey=True, squeeze=False)
        places = [_loss(results, key) for keys in networks.values() for key in keys]
        for row, task in zip(panels, ALONG, strict=True):
            for axes, (name, keys) in zip(row, networks.items(), strict=True):
                for index, library in enumerate((OURS, *LIBRARIES)):
                    _draw_along(axes, results, keys, task, index, library)
                axes.set_title(f"{NAMES.get(name, name)}: {TASKS[task].title}", fontsize=8)
                _logarithmic(axes, places, [2.0, MOST_SHOWN])
        panels[0][0].xaxis.set_inverted(True)
        figure.supxlabel("train loss", fontsize=9)
        figure.supylabel(f"cost at the accuracy asked, gradients (∧: more than {MOST_SHOWN:g})", fontsize=9)
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return figure


def _loss(results: Results, key: str) -> float:
    return float(results.contests[key]["subject"]["loss"])


def _draw_along(axes: Axes, results: Results, keys: Sequence[str], task: str, index: int, library: str) -> None:
    """One library's line through the train losses, and arrows where it leaves the picture."""
    costs = [at_accuracy(TASKS[task], results.record(key, library, task)) for key in keys]
    found = [(_loss(results, key), cost[0]) for key, cost in zip(keys, costs, strict=True) if cost is not None]
    inside = [point for point in found if point[1] <= MOST_SHOWN]
    beyond = [(place, MOST_SHOWN / 1.15**index) for place, cost in found if cost > MOST_SHOWN]  # none hides another
    axes.plot(*_columns(inside), **_marks(index), label=library)
    axes.plot(*_columns(beyond), **{**_marks(index), "marker": CARETUPBASE}, linestyle="none")


def growth(records: Sequence[Record]) -> Figure:
    """One panel for what is varied: our cost of three tasks."""
    with style():
        figure = Figure(figsize=(9.6, 3.2), layout="constrained")
        panels = figure.subplots(1, len(VARIED), sharey=True)
        costs = [record["cost"] for record in records if record["status"] == "measured"]
        for axes, (varied, label) in zip(panels, VARIED.items(), strict=True):
            places = _grow(axes, [record for record in records if record["varied"] == varied], varied)
            _logarithmic(axes, places, costs)
            axes.set_xlabel(label)
            axes.tick_params(axis="x", labelsize=6.5)  # 10000 and 20000 are neighbours
        panels[0].set_ylabel("cost, gradients")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return figure


def _grow(axes: Axes, records: Sequence[Record], varied: str) -> list[float]:
    """Draw a line for every subject and task; returns the places that have a point."""
    drawn: list[float] = []
    for s, subject in enumerate(dict.fromkeys(record["subject"] for record in records)):
        for t, task in enumerate(GROWING):
            mine = [
                record
                for record in records
                if (record["subject"], record["task"]) == (subject, task) and record["status"] == "measured"
            ]
            if not mine:
                continue
            places = [record["parameters" if varied == "width" else "value"] for record in mine]
            label = f"{NAMES.get(subject, subject)}: {TASKS[task].title}"
            look = {**_marks(t), "linestyle": DASHES[s]}
            axes.plot(places, [record["cost"] for record in mine], **look, label=label)
            drawn += places
    return drawn


def _marks(index: int) -> dict[str, Any]:
    return {"marker": MARKERS[index], "color": series_colour(index), "markerfacecolor": "none" if index else None}


def _svg(figure: Figure) -> str:
    stream = io.StringIO()
    with style(), matplotlib.rc_context({"svg.fonttype": "path", "figure.facecolor": "white"}):
        figure.savefig(stream, format="svg", facecolor="white", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"
