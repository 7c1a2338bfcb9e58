"""The parts of a page: each a heading, some words, drawings and tables, made from reports and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from torch import Tensor

from spiritlevel.measuring.record import Records
from spiritlevel.measuring.report import Report
from spiritlevel.show.drawing import Drawing
from spiritlevel.show.figures import convergence, layer_profile, neuron_distribution
from spiritlevel.show.numbers import Cell, Numbers, bytes_text, cell_text, plain_text, seconds_text
from spiritlevel.show.ratios import ratio_comparison
from spiritlevel.show.references import reference_table
from spiritlevel.show.tables import grouped

Chart = Callable[[], Drawing]

_CHARTS, _ROWS = 16, 1000  # charts of one kind that a page shows, and layers that those of neurons have in all
_LINES = 4000  # layers that the lines along the depth have in all


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        key: Its anchor: letters and dashes.
        heading: Its heading.
        paragraphs: What to know before looking.
        drawings: Pictures, each shown with its numbers.
        tables: Caption → table, shown open.
        numbers_in_tables: Whether `tables` hold the numbers of all drawings, so that none stand beside each.
    """

    key: str
    heading: str
    paragraphs: tuple[str, ...] = ()
    drawings: tuple[Drawing, ...] = ()
    tables: tuple[tuple[str, Numbers], ...] = ()
    numbers_in_tables: bool = False


def comparison_drawing(reports: Mapping[str, Report], records: Records) -> Drawing | None:
    """Every measure of every model relative to the first model, invariant ones above plain ones; None for one model."""
    if len(reports) < 2:
        return None
    reference, first = next(iter(reports.items()))
    names = [name for name, value in first.values.items() if math.isfinite(value.value) and value.value > 0]
    groups = {
        heading: {name: _ratios(name, reports, first) for name in members}
        for heading, members in grouped(names, reports, records).items()
    }
    title = f"Every measure relative to {plain_text(reference)}"
    return ratio_comparison(groups, title=title, reference=reference) if groups else None


def layer_section(reports: Mapping[str, Report]) -> Section | None:
    """Layer measures along the depth: a chart a measure with a line a model, and every number in one table."""
    profiles = _layer_measures(reports)
    if not profiles:
        return None
    charts = _one_model_charts(reports, profiles) if len(reports) == 1 else _many_model_charts(reports, profiles)
    text = "Where along the depth the sharpness sits. Crosses mark layers whose value is zero or negative."
    section = _with_charts("layers", "Layers", text, charts, _LINES // max(_depth(reports) * len(reports), 1))
    return replace(section, tables=(("Every layer", layer_table(reports, profiles)),), numbers_in_tables=True)


def reference_section(reports: Mapping[str, Report]) -> Section | None:
    """One network's measures beside those of well-known ones."""
    table = reference_table(next(iter(reports.values()))) if len(reports) == 1 else None
    if table is None:
        return None
    text = (
        "The same measures of well-known networks at the ends of their training. They depend on the data, the loss and the "
        "architecture: a scale, not a ranking."
    )
    return Section("scale", "For scale", (text,), tables=(("Well-known networks", table),))


def neuron_section(reports: Mapping[str, Report]) -> Section | None:
    """How neuron measures are spread within every layer, a chart a model on a common scale."""
    charts: list[Chart] = []
    for label, name in _distinct(reports, lambda report, name: _tensors(report, name)).items():
        shown = {model: report[name].neurons for model, report in reports.items() if name in report}
        limits = _limits([values for neurons in shown.values() for values in neurons.values()])
        for model, neurons in shown.items():
            title = f"{label} of every neuron{f', {plain_text(model)}' if model else ''}"
            charts.append(partial(neuron_distribution, neurons, title=title, label=label, limits=limits))
    if not charts:
        return None
    text = (
        "Each dot stands for the same share of a layer's neurons, the bar for the median, the box for the middle half. "
        "A dead neuron is exactly zero: no sample passes through it."
    )
    return _with_charts("neurons", "Neurons", text, charts, _ROWS // max(_depth(reports), 1))


def convergence_section(reports: Mapping[str, Report]) -> Section | None:
    """The histories of iterative methods, where a value carries one."""
    charts: list[Chart] = []
    names = dict.fromkeys(name for report in reports.values() for name in report)
    for name in names:
        histories = {model or name: _history(report, name) for model, report in reports.items()}
        histories = {label: history for label, history in histories.items() if len(history) > 1}
        if histories:
            shown = plain_text(name)
            charts.append(partial(convergence, histories, title=f"Convergence of {shown}", label=shown))
    text = "The estimates of an iterative method, step by step."
    return _with_charts("convergence", "Convergence", text, charts) if charts else None


def cost_section(reports: Mapping[str, Report]) -> Section:
    """What the measurement cost, what was measured, and where."""
    costs: dict[str, list[Cell]] = {
        "passes over the data": [f"{report.cost.passes:g}" for report in reports.values()],
        "curvature products": [f"{report.cost.products:g}" for report in reports.values()],
        "gradients": [f"{report.cost.gradients:g}" for report in reports.values()],
        "time": [seconds_text(report.cost.seconds) for report in reports.values()],
        "peak memory": [bytes_text(report.cost.peak_memory) for report in reports.values()],
    }
    tables = [
        ("Cost", _by_model(reports, costs)),
        ("Problem", _by_model(reports, _entries([report.problem for report in reports.values()]))),
        ("Environment", _by_model(reports, _entries([report.environment for report in reports.values()]))),
    ]
    return Section("cost", "Cost and environment", tables=tuple((key, table) for key, table in tables if table.rows))


def _with_charts(key: str, heading: str, text: str, charts: list[Chart], fitting: int = _CHARTS) -> Section:
    """A section of at most as many charts as a page can carry; what is left out is said."""
    most = min(_CHARTS, max(1, fitting))
    if len(charts) > most:
        text += f" The first {most} of {len(charts)} charts; every number is in the saved report."
    return Section(key, heading, (text,), tuple(chart() for chart in charts[:most]))


def _depth(reports: Mapping[str, Report]) -> int:
    """The number of layers of the deepest network."""
    values = [value for report in reports.values() for value in report.values.values()]
    return max((max(len(value.layers), len(value.neurons)) for value in values), default=0)


def _ratios(name: str, reports: Mapping[str, Report], first: Report) -> dict[str, tuple[float, float]]:
    """Model → the ratio of its value to the first model's, with the error of the quotient."""
    base = first[name]
    found = {}
    for model, report in reports.items():
        if name in report and math.isfinite(report[name].value):
            ratio = report[name].value / base.value
            error = abs(ratio) * base.error / abs(base.value) + report[name].error / abs(base.value)
            found[model] = (ratio, 0.0 if report is first else error)
    return found


def _layer_measures(reports: Mapping[str, Report]) -> dict[str, str]:
    """Label → name of the measures with a value for at least one layer, those with equal layers under one label."""
    return _distinct(reports, lambda report, name: tuple(report[name].layers.items()))


def _distinct(reports: Mapping[str, Report], profile: Callable[[Report, str], tuple[object, ...]]) -> dict[str, str]:
    """Label → a measure, for those with a profile; measures whose profiles are equal in every report share a label."""
    by_profile: dict[tuple[object, ...], list[str]] = {}
    for name in dict.fromkeys(name for report in reports.values() for name in report):
        found = tuple(profile(report, name) if name in report else () for report in reports.values())
        if any(found):
            by_profile.setdefault(found, []).append(name)
    return {_merged([plain_text(name) for name in names]): names[0] for names in by_profile.values()}


def _merged(names: list[str]) -> str:
    """One label for measures that share a profile.

    >>> _merged(["kappa_max", "kappa_sum"]), _merged(["rho_sum"]), _merged(["a", "b"])
    ('kappa_max/sum', 'rho_sum', 'a/b')
    """
    shared = takewhile(lambda words: len(set(words)) == 1, zip(*(name.split("_") for name in names), strict=False))
    stem = "".join(f"{words[0]}_" for words in shared) if len(names) > 1 else ""
    return stem + "/".join(name.removeprefix(stem) for name in names)


def _tensors(report: Report, name: str) -> tuple[object, ...]:
    return tuple((layer, tuple(values.flatten().tolist())) for layer, values in report[name].neurons.items())


def _weights(report: Report, names: Mapping[str, str]) -> set[str]:
    """The layers proper: a measure over every parameter also lists biases, which have no depth of their own."""
    keys = [set(report[name].layers) for name in names.values() if name in report and report[name].layers]
    return min(keys, key=len, default=set())


def _one_model_charts(reports: Mapping[str, Report], names: Mapping[str, str]) -> list[Chart]:
    ((model, report),) = reports.items()
    kept = _weights(report, names)
    series = {
        label: {layer: value for layer, value in report[name].layers.items() if layer in kept}
        for label, name in names.items()
    }
    of = f", {plain_text(model)}" if model else ""
    return [
        partial(
            layer_profile,
            {label: profile},
            title=f"{label} of every layer{of}",
            label=label,
            errors={label: report[names[label]].layer_errors},
        )
        for label, profile in series.items()
        if profile
    ]


def layer_table(reports: Mapping[str, Report], names: Mapping[str, str]) -> Numbers:
    """Every layer of every model, numbered along the depth, with all its measures."""
    several = len(reports) > 1
    rows: list[tuple[Cell, ...]] = []
    for model, report in reports.items():
        found = {label: report[name].layers for label, name in names.items() if name in report}
        layers = list(dict.fromkeys(key for each in found.values() for key in each))
        kept = [layer for layer in layers if layer in _weights(report, names)]
        for number, layer in enumerate(kept, start=1):
            values = (found.get(label, {}).get(layer, math.nan) for label in names)
            rows.append((number, plain_text(layer), *((plain_text(model),) if several else ()), *values))
    return Numbers(("#", "layer", *(("model",) if several else ()), *names), tuple(rows[:_ROWS]))


def _many_model_charts(reports: Mapping[str, Report], names: Mapping[str, str]) -> list[Chart]:
    kept = set().union(*(_weights(report, names) for report in reports.values()))
    charts: list[Chart] = []
    for label, name in names.items():
        having = {model: report[name] for model, report in reports.items() if name in report and report[name].layers}
        series = {m: {layer: v for layer, v in value.layers.items() if layer in kept} for m, value in having.items()}
        errors = {model: value.layer_errors for model, value in having.items()}
        title = f"{label} of every layer"
        charts.append(partial(layer_profile, series, title=title, label=label, errors=errors))
    return charts


def _limits(tensors: list[Tensor]) -> tuple[float, float] | None:
    positive = [values[values > 0] for values in tensors]
    alive = [values for values in positive if values.numel()]
    return (min(float(v.min()) for v in alive), max(float(v.max()) for v in alive)) if alive else None


def _history(report: Report, name: str) -> list[float]:
    history = report[name].details.get("history", ()) if name in report else ()
    return (
        [float(entry) for entry in history if isinstance(entry, int | float)]
        if isinstance(history, list | tuple)
        else []
    )


def _by_model(reports: Mapping[str, Report], entries: Mapping[str, list[Cell]]) -> Numbers:
    """One column where all models agree, else one a model."""
    alike = all(len(set(map(str, cells))) == 1 for cells in entries.values())
    columns = ("value",) if alike else tuple(plain_text(model) or "value" for model in reports)
    return Numbers(
        ("entry", *columns), tuple((key, *(cells[:1] if alike else cells)) for key, cells in entries.items())
    )


def _entries(mappings: list[Mapping[str, object]] | list[Mapping[str, str]]) -> dict[str, list[Cell]]:
    """Key → its entry in every mapping, as text; keys that are empty everywhere are left out."""
    keys = dict.fromkeys(key for mapping in mappings for key in mapping)
    entries: dict[str, list[Cell]] = {
        plain_text(key): [_entry(mapping.get(key, "")) for mapping in mappings] for key in keys
    }
    return {key: cells for key, cells in entries.items() if any(cells)}


def _entry(entry: object) -> str:
    if isinstance(entry, float):
        return f"{entry:g}"
    if isinstance(entry, int) and not isinstance(entry, bool):
        return cell_text(entry)
    if isinstance(entry, Mapping):
        entry = [f"{key}: {item}" for key, item in entry.items()]
    words = ", ".join(map(str, entry)) if isinstance(entry, list | tuple) else str(entry)
    return words if len(words) <= 200 else f"{words[:200]}…"
