"""Measures along training: coefficients at equal train loss, ratios between levels of a factor, paths of networks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from spiritlevel.show.drawing import INK, Drawing, style
from spiritlevel.show.figures import axes_of, finished, legend, look_of
from spiritlevel.show.numbers import Cell as Entry
from spiritlevel.show.numbers import Numbers, plain_text, shortened, significant
from spiritlevel.show.scales import LogScale
from spiritlevel.show.sections import Section
from spiritlevel.study.along import Mark
from spiritlevel.study.correlate import Answers, Contrast
from spiritlevel.study.levels import Path, losses_at, over_levels, paths, ratios_along
from spiritlevel.study.results import Axis, Study
from spiritlevel.study.show.figures import interval_text, ranking
from spiritlevel.study.show.labels import GAP_LABELS, estimate_text, factor_ratio_text, is_main, of_paper
from spiritlevel.study.statistics import Estimate

_PATHS = 3  # measures whose paths a page shows


def along_section(study: Study, found: Answers) -> Section | None:
    """What is true at equal train loss, at every level that networks came to."""
    if not study.marks:
        return None
    drawings: list[Drawing] = []
    tables = [("Networks at every mark", marks_table(study))]
    for name, part in (study.parts or {"": study}).items():
        drawn, told = _of_part(part, found.part(name) if name else found, f", {plain_text(name)}" if name else "")
        drawings += drawn
        tables += told
    text = (
        "Every network was measured where the loss of its whole training set first fell to a level, and at the end. "
        "Networks that are compared at one level have the same train loss, so that it cannot be what tells them apart."
    )
    over = (
        "Over levels: pairs of networks at the same level only, averaged over levels. Its interval draws whole networks, "
        "with all their levels."
    )
    return Section("along", "Along training", (text, over), tuple(drawings), tuple(tables))


def _of_part(study: Study, found: Answers, of: str) -> tuple[list[Drawing], list[tuple[str, Numbers]]]:
    """Coefficients at every mark, paths of the chief measures, and ratios between the ends of the batch sizes."""
    over = over_levels(study, draws=found.draws)
    caption = f"Kendall τ with {GAP_LABELS[study.gap]} at every mark{of}"
    tables = [(caption, coefficient_table(study, found, over))]
    drawings = [path_drawing(study, measure, of) for measure in followed(study)[:_PATHS]]
    if any(each.known for each in over.values()):
        first = ranking({"τ": over}, title=f"Order at equal train loss{of}", label="Kendall's τ over levels")
        drawings.insert(0, first)
    axis = batch_axis(study)
    table = None if axis is None else ratio_table(study, axis)
    if axis is not None and table is not None:
        ends = f"{plain_text(axis.label)} {axis.text(len(axis.levels) - 1)} than at {axis.text(0)}"
        tables.append((f"How many times larger at {ends}, at every mark{of}", table))
    return drawings, tables


def followed(study: Study) -> list[str]:
    """The measures that were taken at a mark, those of the study's own paper first."""
    known = dict.fromkeys(name for mark in study.marks for name in study.at(mark).quantities(layers=False))
    own = of_paper(list(known), study.paper)
    return list(dict.fromkeys([*own, *known]))


def batch_axis(study: Study) -> Axis | None:
    """The factor that holds the batch size, if it is one."""
    return next((axis for axis in study.axes if axis.numeric and axis.is_batch_size), None)


def _group_axis(study: Study) -> Axis | None:
    choices = [axis for axis in study.axes if not axis.is_seed]
    return batch_axis(study) or (choices[0] if choices else None)


def marks_table(study: Study) -> Numbers:
    """Every mark with how many networks came there, and how equal their losses are."""
    spans = losses_at(study)
    rows: list[tuple[Entry, ...]] = []
    for mark in study.marks:
        cells = study.at(mark).measured
        epochs = [cell.trained("epochs") for cell in cells]
        if mark in spans:
            rows.append((str(mark), len(cells), *spans[mark], min(epochs), max(epochs)))
    columns = ("mark", "networks", "lowest train loss", "highest train loss", "first at epoch", "last at epoch")
    return Numbers(columns, tuple(rows))


def coefficient_table(study: Study, found: Answers, over: Mapping[str, Estimate]) -> Numbers:
    """Kendall's τ of every measure at every mark, at the end and over the loss levels."""
    names = dict.fromkeys([*over, *(row.quantity for row in found.rows if is_main(row, study))])
    rows = [
        (
            plain_text(name),
            *(_tau(there, name, study.gap) for there in found.along.values()),
            _tau(found, name, study.gap),
            estimate_text(over.get(name, Estimate())),
        )
        for name in names
    ]
    return Numbers(("measure", *map(str, found.along), "the end", "over levels"), tuple(rows))


def _tau(found: Answers, name: str, gap: str) -> str:
    row = found.row(name, gap)
    return "–" if row is None else estimate_text(row.kendall)


def ratio_table(study: Study, axis: Axis) -> Numbers | None:
    """How many times larger every measure is at the last level of a factor, at every mark and at the end."""
    ratios_of = ratios_along(study, axis)
    found = {measure: ratios_of[measure] for measure in followed(study) if measure in ratios_of}
    places: list[Mark | None] = [*study.marks, None]
    places = [place for place in places if any(place in ratios for ratios in found.values())]
    if not places:
        return None
    rows = tuple((plain_text(name), *(_ratio(ratios.get(place)) for place in places)) for name, ratios in found.items())
    return Numbers(("measure", *("the end" if place is None else str(place) for place in places)), rows)


def _ratio(found: Contrast | None) -> str:
    return "–" if found is None or not found.times.known else factor_ratio_text(found.times)


def path_drawing(study: Study, measure: str, of: str = "", label: str = "") -> Drawing:
    """Every network's path in the plane of train loss and measure; networks of one level share a colour."""
    axis = _group_axis(study)
    found = paths(study, measure)
    texts = [] if axis is None else [axis.text(i) for i in range(len(axis.levels))]
    groups = [0 if axis is None else axis.level(path.cell) for path in found]
    return paths_drawing(
        found, groups, texts, measure=label or measure, of=of, factor="" if axis is None else axis.label
    )


def paths_drawing(
    found: Sequence[Path], groups: Sequence[int], texts: Sequence[str], *, measure: str, of: str = "", factor: str = ""
) -> Drawing:
    """Lines in the plane of train loss and measure, training going to the right; the last point of each is its end."""
    losses = LogScale.of([loss for path in found for loss in path.losses])
    values = LogScale.of([value for path in found for value in path.values])
    labelled: set[int] = set()
    with style():
        figure, axes = axes_of(None, height=3.0 + 0.16 * math.ceil(len(texts) / 3))
        for path, group in sorted(zip(found, groups, strict=True), key=lambda pair: pair[1]):
            look = look_of(group) | {"linewidth": 0.9, "markersize": 3.6}
            name = shortened(plain_text(texts[group]), 28) if texts and group not in labelled else None
            labelled.add(group)
            axes.plot([losses.place(x) for x in path.losses], [values.place(y) for y in path.values], **look,
                      alpha=0.75, label=name)  # fmt: skip
            if path.marks[-1] == "the end":
                axes.plot([losses.place(path.losses[-1])], [values.place(path.values[-1])], "o", color=INK,
                          markersize=6.5, fillstyle="none", markeredgewidth=0.8)  # fmt: skip
        losses.apply(axes.xaxis, axes)
        values.apply(axes.yaxis, axes)
        axes.invert_xaxis()
        axes.set_xlabel("train loss, falling as training goes; a ring is the end")
        axes.set_ylabel(shortened(plain_text(measure), 30))
        legend(axes, len(labelled), always=bool(texts))
    rows: tuple[tuple[Entry, ...], ...] = tuple(
        (path.cell.hash, texts[group] if texts else "", mark, loss, value)
        for path, group in zip(found, groups, strict=True)
        for mark, loss, value in zip(path.marks, path.losses, path.values, strict=True)
    )
    table = Numbers(("network", plain_text(factor) or "group", "mark", "train loss", plain_text(measure)), rows)
    networks = f"{len(found)} network{'' if len(found) == 1 else 's'}"
    words = f"{plain_text(measure)} of {networks} against the train loss, from mark to mark.{_ends(found)}"
    return finished(figure, table, f"{plain_text(measure)} along training{of}", words)


def _ends(found: Sequence[Path]) -> str:
    ends = [path.values[-1] for path in found]
    if len(ends) == 1:
        return f" Last value {significant(ends[0], 2)}."
    return f" Last values from {significant(min(ends), 2)} to {significant(max(ends), 2)}." if ends else ""


def along_sentences(study: Study, found: Answers) -> list[str]:
    """What holds at equal train loss, in a sentence."""
    if found.parts or not any(mark.kind == "loss" for mark in study.marks):
        return []
    over = {name: each for name, each in over_levels(study, draws=found.draws).items() if each.low > 0}
    if not over:
        return ["At equal train loss, over all levels, no measure ranks the networks surely better than chance."]
    best = max(over, key=lambda name: over[name].value)
    return [f"At equal train loss, over all levels, {plain_text(best)} ranks best: τ {interval_text(over[best])}."]
