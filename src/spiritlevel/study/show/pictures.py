"""The sections of a study's page that are pictures: the ranking, the papers' figures, the factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spiritlevel.measuring.registry import known_records
from spiritlevel.show.drawing import Drawing
from spiritlevel.show.numbers import Cell as Entry
from spiritlevel.show.numbers import Numbers, p_value, plain_text
from spiritlevel.show.sections import Section
from spiritlevel.study.correlate import Answers, Correlations, contrasts
from spiritlevel.study.results import Axis, Study, layer_of
from spiritlevel.study.show.figures import (
    ByLevel,
    along_depth,
    attack_lines,
    boxes,
    gap_scatter,
    interval_text,
    lines,
    ranking,
)
from spiritlevel.study.show.labels import (
    GAP_LABELS,
    attack_ratios,
    before_after,
    estimate_text,
    factor_ratio_text,
    is_main,
    of_paper,
    unmoved,
)

_SCATTERS, _DEPTHS = 12, 8  # pictures of one kind that a page shows


_GROUPS = 6  # markers that can be told apart


def ranking_section(study: Study, found: Answers) -> Section | None:
    """Every measure with its τ, and how far it is behind the best."""
    rows = {row.quantity: row for row in found.rows if is_main(row, study)}
    held = found.contests.get(False)
    if held is None or not any(row.kendall.known for row in rows.values()):
        return None
    label = "Kendall's τ"
    behind: dict[str, tuple[Entry, ...]] = {
        duel.measure: (duel.difference.value, p_value(duel.p)) for duel in held.duels
    }
    drawing = ranking(
        {label: {name: row.kendall for name, row in rows.items()}},
        title="Who ranks best",
        label=label,
        further=(("behind", "p"), behind),
    )
    text = (
        f"Rank correlation with the generalization gap, {GAP_LABELS[study.gap]}, over {held.networks} networks: 1 is the same "
        "order, 0 none, −1 the opposite one. Bars are 95 % bootstrap intervals. p tells whether the distance to the best could "
        "be chance; it is adjusted for all pairs of measures."
    )
    away = [f"{plain_text(name)} did not compete: {reason}." for name, reason in held.absent.items()]
    return Section("ranking", "Ranking", (text, *away), (drawing,))


def scatter_section(study: Study, found: Answers) -> Section | None:
    """One picture per measure, the best first: the measure against the gap, with one dot per network."""
    grouping = group_networks(study)
    gaps = [cell.gap(study.gap) for cell in study.measured]
    rows = [row for row in found.rows if is_main(row, study) and row.networks >= 2]
    rows.sort(key=lambda row: -row.kendall.value if row.kendall.known else math.inf)
    drawings = tuple(
        gap_scatter(
            study.column(row.quantity),
            gaps,
            grouping.texts,
            title=plain_text(row.quantity),
            label=row.quantity,
            gap=GAP_LABELS[study.gap],
            said=_said(row),
            order=grouping.order,
        )
        for row in rows[:_SCATTERS]
    )
    if not drawings:
        return None
    text = "Above each picture Kendall's τ and Pearson's r with their 95 % intervals; r takes the values as they are."
    text += f" Markers tell {plain_text(grouping.label)}." if grouping.label else ""
    if len(rows) > _SCATTERS:
        text += f" The best {_SCATTERS} of {len(rows)} measures; all are in results.csv."
    return Section("scatter", "Measures against the gap", (text,), drawings)


def rescaling_section(study: Study, found: Answers) -> Section | None:
    """Correlations before and after every network was rescaled at random, and two measures seen through it."""
    pairs = before_after(study, found)
    if not pairs:
        return None
    series = {
        "as trained": {name: before.kendall for name, (before, _) in pairs.items()},
        "rescaled at random": {name: after.kendall for name, (_, after) in pairs.items()},
    }
    straight = {
        "as trained": {name: before.pearson for name, (before, _) in pairs.items()},
        "rescaled at random": {name: after.pearson for name, (_, after) in pairs.items()},
    }
    drawings = [
        ranking(series, title="Order before and after", label="Kendall's τ"),
        ranking(straight, title="Linear correlation before and after", label="Pearson's r"),
    ]
    fall = {name: before.kendall.value - after.kendall.value for name, (before, after) in pairs.items()}
    best = max(pairs, key=lambda name: pairs[name][1].kendall.value)
    seen = dict.fromkeys([max(fall, key=lambda n: fall[n]), best])
    drawings += [_twins(study, name, *pairs[name]) for name in seen]
    rows: tuple[tuple[Entry, ...], ...] = tuple(
        (plain_text(n), _moved(study, n), *(estimate_text(e) for e in (b.pearson, a.pearson, b.kendall, a.kendall)))
        for n, (b, a) in pairs.items()
    )
    columns = ("measure", "moved by (median)", "r before", "r after", "τ before", "τ after")
    text = (
        "The layers of every network were multiplied by random factors that cancel: the same function, other weights. "
        "A measure that says something about the function correlates as before (Petzka et al. 2019, Figure 2)."
    )
    tables = (("Correlations before and after", Numbers(columns, rows)),)
    return Section("rescaling", "After random rescaling", (text,), tuple(drawings), tables)


def layer_section(study: Study, found: Answers) -> Section | None:
    """The correlation of every layer's measure along the depth, beside that of sums and maxima over the network."""
    by_base: dict[str, dict[str, Correlations]] = {}
    for row in found.rows:
        base, layer = layer_of(row.quantity)
        if layer is not None and row.gap == study.gap and not row.rescaled:
            by_base.setdefault(base, {})[layer] = row
    weights = _weight_layers(by_base)
    drawings = []
    for base, layers in by_base.items():
        known = {layer: row.pearson for layer, row in layers.items() if layer in weights and row.pearson.known}
        if len(known) > 1:
            wide = {name: found.row(name, study.gap) for name in _whole(base, study)}
            whole = {name: r.pearson for name, r in wide.items() if r is not None and r.pearson.known}
            title = f"{plain_text(base)} of single layers"
            drawings.append(along_depth(known, whole, title=title, label="Pearson's r"))
    if not drawings:
        return None
    text = (
        "Pearson's correlation of each layer's measure with the gap, as in Petzka et al. 2019, Figures 3 to 6; lines across "
        "are the measure over the whole network. Kendall's and Spearman's are in correlations.csv."
    )
    if len(drawings) > _DEPTHS:
        text += f" The first {_DEPTHS} of {len(drawings)} measures."
    return Section("layers", "Layers", (text,), tuple(drawings[:_DEPTHS]))


def factor_section(study: Study, found: Answers) -> Section | None:
    """The gap and the chief measures by every factor: boxes, or lines along a numeric factor of many levels."""
    drawings: list[Drawing] = []
    tables: list[tuple[str, Numbers]] = []
    told: set[frozenset[str]] = set()
    shown = _chief_measures(study, found)
    for axis in study.axes:
        # The network's kind is not a setting whose effect is asked for; it only distinguishes the boxes of the others.
        if axis.is_seed or len(axis.levels) > 24 or not study.measured or "model.name" in axis.members:
            continue
        other = _second_axis(study, axis)
        drawings.append(
            _by_level(study, axis, other, GAP_LABELS[study.gap], [c.gap(study.gap) for c in study.measured])
        )
        drawings += [_by_level(study, axis, other, name, study.column(name)) for name in shown]
        pair = frozenset({axis.name, other.name if other else ""})
        if pair not in told:
            tables.append((f"By {plain_text(axis.label)}", _level_table(study, axis, other)))
            told.add(pair)
        for name, part in (study.parts or {"": study}).items():
            tables += _contrast_table(part, axis, name)
    if not drawings:
        return None
    text = "Dots are networks; a bar or a line is the median, a box or a band the middle half of them."
    return Section("factors", "By factor", (text,), tuple(drawings), tuple(tables))


def attack_section(study: Study) -> Section | None:
    """Measures against the sharpness that an attack was asked for."""
    ratios = attack_ratios(study)
    if not ratios:
        return None
    still = unmoved(ratios)
    count = sum(bool(cell.attacks) for cell in study.measured)
    moving = sorted((n for n in ratios if n not in still), key=lambda n: -max(v for f in ratios[n].values() for v in f))
    # What moves least is left to the table where there are more lines than can be read.
    drawn = {name: ratios[name] for name in [*moving[:_GROUPS], *still]}
    drawing = attack_lines(drawn, still, title="Measures under attack", networks=count)
    text = (
        "Every network was rescaled, without changing its function, until the plain Hessian norm reached a target "
        "(Dinh et al. 2017, Theorem 4), and measured again. Bands hold all networks."
    )
    rows = tuple(
        (plain_text(name), target, float(np.median(values)))
        for name, found in ratios.items()
        for target, values in sorted(found.items())
    )
    table = ("Ratio to the trained network", Numbers(("measure", "target", "median ratio"), rows))
    extra = (table,) if len(moving) > _GROUPS else ()
    return Section("attack", "The attack", (text,), (drawing,), extra)


@dataclass(frozen=True)
class Grouping:
    """What the markers of a scatter stand for: a text for every measured network, and the texts in order."""

    label: str
    texts: list[str]
    order: list[str]


def group_networks(study: Study) -> Grouping:
    """By the factor that explains most of the gap; many levels of a number are joined."""
    gaps = np.array([cell.gap(study.gap) for cell in study.measured])
    usable = [axis for axis in study.axes if not axis.is_seed and (axis.numeric or len(axis.levels) <= _GROUPS)]
    if not usable or not len(gaps):
        return Grouping("", [""] * len(gaps), [])
    axis = max(usable, key=lambda axis: _explained(gaps, [axis.level(cell) for cell in study.measured]))
    count = len(axis.levels)
    wide = math.ceil(count / _GROUPS)
    bins = [range(i, min(i + wide, count)) for i in range(0, count, wide)]
    names = [axis.text(b[0]) if len(b) == 1 else f"{axis.text(b[0])} to {axis.text(b[-1])}" for b in bins]
    texts = [names[axis.level(cell) // wide] for cell in study.measured]
    return Grouping(axis.label, texts, [name for name in names if name in texts])


def _explained(gaps: Any, levels: Sequence[int]) -> float:
    """The share of the variance of the gap that lies between levels."""
    at = np.array(levels)
    known = np.isfinite(gaps)
    total = float(gaps[known].var()) if known.any() else 0.0
    if total == 0:
        return 0.0
    between = sum(
        float((known & (at == level)).sum()) * float(gaps[known & (at == level)].mean() - gaps[known].mean()) ** 2
        for level in set(at[known].tolist())
    )
    return between / (int(known.sum()) * total)


def _twins(study: Study, name: str, before: Correlations, after: Correlations) -> Drawing:
    """One measure against the gap, as trained and after rescaling."""
    gaps = [cell.gap(study.gap) for cell in study.measured]
    count = len(gaps)
    return gap_scatter(
        [*study.column(name), *study.column(name, rescaled=True)],
        [*gaps, *gaps],
        ["as trained"] * count + ["rescaled at random"] * count,
        title=f"{plain_text(name)} before and after",
        label=name,
        gap=GAP_LABELS[study.gap],
        said=f"r {interval_text(before.pearson)}, then {interval_text(after.pearson)}",
        order=["as trained", "rescaled at random"],
    )


def _moved(study: Study, name: str) -> float:
    """The median factor, up or down, between a network and its rescaled twin."""
    pairs = zip(study.column(name), study.column(name, rescaled=True), strict=True)
    factors = [max(a / b, b / a) for a, b in pairs if math.isfinite(a) and math.isfinite(b) and a * b > 0]
    return float(np.median(factors)) if factors else math.nan


def _weight_layers(by_base: Mapping[str, Mapping[str, Correlations]]) -> set[str]:
    """The layers proper: a measure over every parameter also lists biases, which have no depth of their own."""
    fewest = min((set(layers) for layers in by_base.values()), key=lambda layers: len(layers), default=set())
    return {str(layer) for layer in fewest}


def _whole(base: str, study: Study) -> list[str]:
    """The measures of the whole network that a layer's measure belongs to."""
    stem, bracket, options = base.partition("(")
    wanted = {stem, f"{stem}_sum", f"{stem}_max"}
    return [
        n for n in study.quantities(layers=False) if n.partition("(")[0] in wanted and n.endswith(bracket + options)
    ]


def _chief_measures(study: Study, found: Answers) -> list[str]:
    """The winner, the best of the study's own paper, and the best plain one to set them against."""
    records = known_records()
    rows = sorted(
        (row for row in found.rows if is_main(row, study)),
        key=lambda row: -row.kendall.value if row.kendall.known else math.inf,
    )
    names = [row.quantity for row in rows]
    known = {name: records.get(name.partition("(")[0]) for name in names}
    own = of_paper(names, study.paper)
    plain = [name for name in names if (record := known[name]) is not None and not record.invariant_under]
    return list(dict.fromkeys([*names[:1], *own[:1], *plain[:1]]))[:3]


def _second_axis(study: Study, axis: Axis) -> Axis | None:
    """Another factor of few levels, which distinguishes the networks that share a level of the first."""
    others = [a for a in study.axes if a is not axis and not a.is_seed and len(a.levels) <= 4]
    return min(others, key=lambda a: (a.numeric, len(a.levels)), default=None)


def _by_level(study: Study, axis: Axis, other: Axis | None, label: str, values: Sequence[float]) -> Drawing:
    series: dict[str, dict[int, list[float]]] = {}
    order = [""] if other is None else [other.text(i) for i in range(len(other.levels))]
    for name in order:
        series[name] = {}
    for cell, value in zip(study.measured, values, strict=True):
        name = "" if other is None else other.text(other.level(cell))
        series[name].setdefault(axis.level(cell), []).append(value)
    levels = [axis.text(i) for i in range(len(axis.levels))]
    found = ByLevel(levels, {name: own for name, own in series.items() if own})
    title = f"{plain_text(label)} by {plain_text(axis.label)}"
    # Batch sizes are compared, not followed: boxes, as their papers' tables have it.
    if axis.numeric and len(levels) >= 4 and len(axis.members) == 1 and not axis.is_batch_size:
        places = [float(level[0]) for level in axis.levels]
        return lines(found, title=title, label=label, factor=axis.label, places=places)
    return boxes(found, title=title, label=label, factor=axis.label)


def _level_table(study: Study, axis: Axis, other: Axis | None) -> Numbers:
    """Test accuracy with its spread over networks, and medians, by level."""
    columns = [
        axis.label,
        *([other.label] if other else []),
        "networks",
        "test accuracy",
        "median train loss",
        "median gap",
    ]
    rows: list[tuple[Entry, ...]] = []
    for level in range(len(axis.levels)):
        for second in range(len(other.levels)) if other else [0]:
            cells = [
                cell
                for cell in study.measured
                if axis.level(cell) == level and (other is None or other.level(cell) == second)
            ]
            if cells:
                lead = [axis.text(level), *([other.text(second)] if other else [])]
                accuracy = _mean_text([100 * cell.trained("test_accuracy") for cell in cells])
                loss = float(np.median([cell.trained("train_loss") for cell in cells]))
                gap = float(np.median([cell.gap(study.gap) for cell in cells]))
                rows.append((*lead, len(cells), accuracy, loss, gap))
    return Numbers(tuple(map(plain_text, columns)), tuple(rows))


def _mean_text(percent: Sequence[float]) -> str:
    """A mean with its standard deviation.

    >>> _mean_text([97.0, 98.0]), _mean_text([97.0])
    ('97.50 ± 0.71 %', '97.00 %')
    """
    spread = f" ± {np.std(percent, ddof=1):.2f}" if len(percent) > 1 else ""
    return f"{np.mean(percent):.2f}{spread} %"


def _contrast_table(study: Study, axis: Axis, name: str) -> list[tuple[str, Numbers]]:
    """How much every measure changes from the first level of a numeric factor to its last."""
    own = next((each for each in study.axes if each.name == axis.name and each.numeric), None)
    found = () if own is None else contrasts(study, own)
    if not found:
        return []
    first = found[0]
    caption = f"How many times larger at {plain_text(axis.label)} {first.last} than at {first.first}"
    columns = ["measure", "times"]
    adjusted = any(each.at_equal_loss.known for each in found)
    if adjusted:
        columns += ["at equal train loss" + ("" if first.overlap else ", extrapolated")]
    rows = tuple(
        (plain_text(c.measure), *map(factor_ratio_text, [c.times, *([c.at_equal_loss] if adjusted else [])]))
        for c in found
    )
    return [(caption + (f", {plain_text(name)}" if name else ""), Numbers(tuple(columns), rows))]


def _said(row: Correlations) -> str:
    if not row.kendall.known:
        return row.note or "no correlation"
    return f"τ {interval_text(row.kendall)} · r {interval_text(row.pearson)}"
