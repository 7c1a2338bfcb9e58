"""A study's page: which measure ranks its networks, the pictures of the papers, and what was left out."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spiritlevel.errors import SpiritLevelError
from spiritlevel.report.citations import citations
from spiritlevel.report.drawing import Drawing
from spiritlevel.report.numbers import Cell as Entry
from spiritlevel.report.numbers import Numbers, plain_text, seconds_text, significant, times
from spiritlevel.report.page import render_page
from spiritlevel.report.records import known_records
from spiritlevel.report.sections import Section
from spiritlevel.report.study_figures import (
    ByLevel,
    along_depth,
    attack_lines,
    boxes,
    gap_scatter,
    interval_text,
    lines,
    ranking,
    training_curves,
)
from spiritlevel.result import write_whole
from spiritlevel.study.correlate import (
    FEWEST,
    Answers,
    Contest,
    Correlations,
    Estimate,
    answers,
    contrasts,
    correlations_csv,
)
from spiritlevel.study.results import (
    GAPS,
    Axis,
    Cell,
    Study,
    factor_text,
    layer_of,
    read_curve,
    read_study,
    results_csv,
    short_name,
)
from spiritlevel.wording import listed

GAP_LABELS: Mapping[str, str] = {
    "gap_accuracy": "train − test accuracy",
    "gap_loss": "test − train loss",
    "test_error": "test error",
}
_SCATTERS, _DEPTHS = 12, 8  # pictures of one kind that a page shows
_GROUPS = 6  # markers that can be told apart
_STAYS = 0.01  # relative: what an attack moves by less has not moved


def write_study_report(folder: str | os.PathLike[str]) -> Path:
    """Write `results.csv`, `correlations.csv` and `report.html` into a study's folder; the page's path.

    From whatever cells are finished: a study that still runs can be asked too. Each file is whole or not there.
    """
    study = read_study(folder)
    found = answers(study)
    page = study.folder / "report.html"
    _write(study.folder / "results.csv", results_csv(study))
    _write(study.folder / "correlations.csv", correlations_csv(found, study))
    _write(page, study_page(study, found))
    return page


def _write(path: Path, text: str) -> None:
    """Write a file of the report, unless the folder of its study is gone: it is not made anew."""
    if not path.parent.is_dir():
        raise SpiritLevelError(f"{path.parent} is gone, so that {path.name} cannot be written; run the study again")
    try:
        write_whole(path, text)
    except OSError as error:
        raise SpiritLevelError(
            f"{path} cannot be written: {error.strerror or error}; what stood there before is unchanged. Mend that and run "
            f"`spiritlevel study report {path.parent}` again"
        ) from None


def study_page(study: Study, found: Answers) -> str:
    """The page of a study, self-contained."""
    sections: list[Section | None] = [attack_section(study)]
    for name, part in found.parts.items():
        sections += _pictures(study.parts[name], part, name)
    sections += _pictures(study, found, "all together") if found.parts else _pictures(study, found, "")
    sections += [
        factor_section(study, found),
        left_out_section(study),
        correlation_section(study, found),
        training_section(study),
        made_section(study, found),
    ]
    papers = [*([study.paper] if study.paper else []), *_papers(study)]
    return render_page(
        title=study_title(study),
        answer=study_answer(study, found),
        sections=[section for section in sections if section is not None],
        citations=citations(papers),
    )


def study_title(study: Study) -> str:
    """The heading of the page: the study and what it is, with the data that were really used where its title names others."""
    if study.title == study.name:
        return f"Study {study.name}"
    used = _data_names(study.config, study.factors)
    full = _full_size(study)
    other = full is not None and full["title"] == study.title and used != _data_names(full["config"], full["factors"])
    return f"Study {study.name}: {f'trained on {used} instead; ' if other else ''}{study.title}"


def _data_names(config: Mapping[str, Any], factors: Mapping[str, Any]) -> str:
    section = config.get("data")
    fixed = section.get("name") if isinstance(section, Mapping) else section
    return " and ".join(map(str, factors.get("data.name") or [fixed]))


def _full_size(study: Study) -> dict[str, Any] | None:
    """The built-in study of the same name at full size, as `study.json` would describe it."""
    # Only here: a study's answers need neither its file nor pydantic.
    from spiritlevel.study.config import list_studies
    from spiritlevel.study.config import read_study as read_settings

    return read_settings(study.name).to_dict() if study.name in list_studies() else None


def _pictures(study: Study, found: Answers, name: str) -> list[Section | None]:
    """What is drawn of a study, or of one of its parts under its name."""
    made = [ranking_section(study, found)]
    # Measures of different architectures side by side say little; where there are parts, they are drawn there.
    if not found.parts:
        made += [scatter_section(study, found), rescaling_section(study, found), layer_section(study, found)]
    return [section if section is None or not name else _named(section, name) for section in made]


def _named(section: Section, name: str) -> Section:
    """The section under a part's name, its pictures and tables too: what is named alike cannot be told apart by ear."""
    of = f", {plain_text(name)}"
    return replace(
        section,
        key=f"{section.key}-{name}",
        heading=section.heading + of,
        drawings=tuple(replace(drawing, title=drawing.title + of) for drawing in section.drawings),
        tables=tuple((caption + of, table) for caption, table in section.tables),
    )


# --- the answer ----------------------------------------------------------------------------------------------------


def study_answer(study: Study, found: Answers) -> list[str]:
    """What the study found, in sentences: who wins and how surely, what rescaling does, what was left out."""
    parts = [_part_sentence(found)] if found.parts else []
    ranked = [*parts, *_winner_sentences(study, found), *_batch_sentences(study), *_rescaling_sentences(study, found)]
    # A study that attacks asks what an attack can do.
    return [*_attack_sentences(study), *ranked, _count_sentence(study)]


def _part_sentence(found: Answers) -> str:
    """Who ranks best within each network and data set."""
    told = []
    for name, part in found.parts.items():
        best = _best(part)
        if best is None or best.networks < FEWEST:
            told.append(f"{plain_text(name)} has too few networks to say")
        elif best.kendall.value <= 0 or best.kendall.low <= 0:
            told.append(f"{plain_text(name)} by no measure better than chance")
        else:
            shared = _shared(part.contests[False], " and {}")
            told.append(
                f"{plain_text(name)} by {plain_text(best.quantity)}{shared} (Kendall τ {interval_text(best.kendall)})"
            )
    return f"Best ranked: {'; '.join(told)}."


def _shared(held: Contest, words: str) -> str:
    """How many others rank exactly as well as the best, in these words; nothing where none does."""
    equal = sum(duel.difference.value < 1e-12 for duel in held.duels)
    return words.format("1 other" if equal == 1 else f"{equal} others") if equal else ""


def _best(found: Answers) -> Correlations | None:
    held = found.contests.get(False)
    if held is None or held.best is None:
        return None
    return next(row for row in found.rows if row.quantity == held.best)


def _winner_sentences(study: Study, found: Answers) -> list[str]:
    held, best = found.contests.get(False), _best(found)
    count = len(study.measured)
    if held is None or best is None or best.networks < FEWEST:
        return [
            f"{count} measured networks are too few to say which measure ranks them; {FEWEST} allow a first interval."
        ]
    name, tau = plain_text(best.quantity), best.kendall
    who = f"all {best.networks} networks together" if found.parts else f"the {best.networks} networks"
    interval = f", 95 % interval {_two(tau.low)} to {_two(tau.high)}" if tau.bounded else ""
    if tau.value <= 0 or (tau.bounded and tau.low <= 0):
        return [
            f"No measure ranks {who} better than chance: the best, {name}, has a Kendall τ of {_two(tau.value)}{interval}."
        ]
    share = round(100 * (1 + tau.value) / 2)
    shared = _shared(held, ", together with {}")
    sentences = [
        f"{name} ranks {who} best{shared}: Kendall τ {_two(tau.value)}{interval}.",
        f"Of two networks the one it calls sharper has the larger gap ({GAP_LABELS[study.gap]}) about {share} times in 100.",
    ]
    return [*sentences, *_lead_sentences(held, found, study)]


def _batch_sentences(study: Study) -> list[str]:
    """How much sharper the largest batches are than the smallest, by the measure of the study's own paper."""
    told: dict[str, list[str]] = {}
    for name, part in (study.parts or {"": study}).items():
        axis = next((axis for axis in part.axes if axis.numeric and "batch_size" in axis.label), None)
        found = [] if axis is None else [c for c in contrasts(part, axis) if c.times.known]
        if axis is not None and found:
            own = _of_paper([c.measure for c in found], study.paper)
            chosen = next(c for c in found if not own or c.measure == own[0])
            lead = f"From {axis.label} {chosen.first} to {chosen.last} {plain_text(chosen.measure)} changes"
            where = f" on {plain_text(name)}" if name else ""
            told.setdefault(lead, []).append(f"by a factor of {_factor_text(chosen.times)}{where}")
    return [f"{lead} {', '.join(factors)}." for lead, factors in told.items()]


def _lead_sentences(held: Contest, found: Answers, study: Study) -> list[str]:
    """Whether the lead is significant, and against whom."""
    if not held.duels:
        return []
    second = held.duels[0]
    runner = found.row(second.measure, study.gap)
    tau = "" if runner is None else f" (τ {_two(runner.kendall.value)})"
    alike = [duel.measure for duel in held.duels if not duel.p < 0.05]
    sentence = (
        f"Its lead over the next, {plain_text(second.measure)}{tau}, is {'' if second.p < 0.05 else 'not '}significant "
        f"(p = {_p(second.p)}, adjusted for all pairs of measures)."
    )
    if len(alike) == len(held.duels) > 1:
        sentence += f" None of the other {len(alike)} measures can be told from it."
    elif len(alike) > 1:
        sentence += f" {len(alike)} of the other {len(held.duels)} measures cannot be told from it."
    return [sentence]


def _rescaling_sentences(study: Study, found: Answers) -> list[str]:
    pairs = _before_after(study, found)
    if not pairs:
        return []
    kept = [name for name, (before, after) in pairs.items() if abs(before.kendall.value - after.kendall.value) < 0.005]
    lost = max(pairs, key=lambda name: pairs[name][0].kendall.value - pairs[name][1].kendall.value)
    before, after = (row.kendall.value for row in pairs[lost])
    sentence = f"After a random rescaling that changes no function, {len(kept)} of {len(pairs)} measures rank as before"
    if before - after >= 0.005:
        sentence += f"; {plain_text(lost)} falls from τ {_two(before)} to {_two(after)}"
    return [sentence + "."]


def _factor_text(found: Estimate) -> str:
    ends = f" [{significant(found.low, 2)}, {significant(found.high, 2)}]" if found.bounded else ""
    return significant(found.value, 2) + ends


def _attack_sentences(study: Study) -> list[str]:
    ratios = _attack_ratios(study)
    if not ratios:
        return []
    still = _unmoved(ratios)
    moving = {name: max(v for f in found.values() for v in f) for name, found in ratios.items() if name not in still}
    if not moving:
        return [f"The attack moved none of {len(ratios)} measures."]
    worst = max(moving, key=lambda name: moving[name])
    change = max((attack.output_change for cell in study.measured for attack in cell.attacks), default=math.nan)
    return [
        f"An attack that leaves the outputs alone (largest change {significant(change, 2)}) makes {plain_text(worst)} up to "
        f"{times(moving[worst])} larger; {len(still)} of {len(ratios)} measures stay where they were."
    ]


def _count_sentence(study: Study) -> str:
    parts = [f"{len(study.measured)} of {len(study.cells)} networks are measured"]
    for status, words in (
        ("excluded", "excluded"),
        ("failed", "failed"),
        ("unfinished", "unfinished"),
    ):
        count = sum(cell.status == status for cell in study.cells)
        if count:
            parts.append(f"{count} {words}")
    return ", ".join(parts) + (", each listed below." if len(parts) > 1 else "; none is left out.")


# --- sections ------------------------------------------------------------------------------------------------------


def ranking_section(study: Study, found: Answers) -> Section | None:
    """Every measure with its τ, and how far it is behind the best."""
    rows = {row.quantity: row for row in found.rows if _is_main(row, study)}
    held = found.contests.get(False)
    if held is None or not any(row.kendall.known for row in rows.values()):
        return None
    label = "Kendall's τ"
    behind: dict[str, tuple[Entry, ...]] = {duel.measure: (duel.difference.value, duel.p) for duel in held.duels}
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
    """A picture a measure, the best first: the measure against the gap, a dot a network."""
    grouping = _grouping(study)
    gaps = [cell.gap(study.gap) for cell in study.measured]
    rows = [row for row in found.rows if _is_main(row, study) and row.networks >= 2]
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
    pairs = _before_after(study, found)
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
        (plain_text(n), _moved(study, n), *(_estimate_text(e) for e in (b.pearson, a.pearson, b.kendall, a.kendall)))
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
        # Which network it is, is no setting whose effect is asked for; it tells the boxes of others apart.
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
    ratios = _attack_ratios(study)
    if not ratios:
        return None
    still = _unmoved(ratios)
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


def left_out_section(study: Study) -> Section | None:
    """Every cell without a measurement, with the reason."""
    cells = [cell for cell in study.cells if cell.status != "measured"]
    if not cells and not study.strangers:
        return None
    rows = tuple((cell.hash, f"{cell.status}: {plain_text(cell.reason)}", _place(cell)) for cell in cells)
    text = "No statistic on this page takes these networks into account."
    strange = (
        f"{study.strangers} folders of cells belong to no cell of this study as it stands and were not read; an earlier "
        "version of it may have made them."
    )
    columns = ("cell", "what happened", "factors")
    tables = (("Excluded, failed and unfinished networks", Numbers(columns, rows)),) if rows else ()
    return Section("left-out", "Left out", (text, *([strange] if study.strangers else [])), (), tables)


def correlation_section(study: Study, found: Answers) -> Section | None:
    """The coefficients as tables: of all networks, and of every part."""
    tables = [
        table
        for name, part in {**found.parts, "": found}.items()
        for table in _correlation_tables(study, part, f", {plain_text(name)}" if name else "")
    ]
    if not tables:
        return None
    text = (
        f"In brackets 95 % intervals from {found.draws} resamples of the networks, bias-corrected and accelerated. Partial: "
        "given the train loss. ψ: Kendall's coefficient between networks that differ in one factor alone, averaged; Ψ is its "
        "mean over the factors, seeds left out. Every number, also of layers and after rescaling, is in correlations.csv."
    )
    return Section("correlations", "Correlations", (text,), (), tuple(tables))


def _correlation_tables(study: Study, found: Answers, who: str) -> list[tuple[str, Numbers]]:
    rows = [row for row in found.rows if _is_main(row, study)]
    rows.sort(key=lambda row: -row.kendall.value if row.kendall.known else math.inf)
    if not rows:
        return []
    kinds = {"Kendall τ": "kendall", "Spearman": "spearman", "Pearson r": "pearson",
             "partial Spearman": "partial_spearman", "partial Pearson": "partial_pearson"}  # fmt: skip
    noted = any(row.note for row in rows)
    main: tuple[tuple[Entry, ...], ...] = tuple(
        (
            plain_text(r.quantity),
            r.networks,
            *(_estimate_text(getattr(r, key)) for key in kinds.values()),
            *([r.note] if noted else []),
        )
        for r in rows
    )
    tables = [
        (
            f"With {GAP_LABELS[study.gap]}{who}",
            Numbers(("measure", "networks", *kinds, *(["note"] if noted else [])), main),
        )
    ]
    axes = [axis for axis in found.axes if any(axis.name in row.psi for row in rows)]
    if axes:
        psi = ("measure", "Ψ, mean of the factors", *(f"ψ {plain_text(axis.label)}" for axis in axes))
        granulated = tuple(
            (plain_text(r.quantity), *map(_estimate_text, (r.psi_mean, *(r.psi.get(a.name, Estimate()) for a in axes))))
            for r in rows
        )
        tables.append((f"Granulated Kendall (Jiang et al. 2020){who}", Numbers(psi, granulated)))
    others = tuple((plain_text(r.quantity), *(_kendall(found, r.quantity, gap) for gap in GAPS)) for r in rows)
    tables.append((f"Kendall τ with every gap{who}", Numbers(("measure", *(GAP_LABELS[gap] for gap in GAPS)), others)))
    return tables


def training_section(study: Study) -> Section | None:
    """How the networks were trained: loss and accuracy along the epochs."""
    grouping = _grouping(study)
    group = {cell.hash: text for cell, text in zip(study.measured, grouping.texts, strict=True)}
    trained = [cell for cell in study.cells if cell.training]
    curves = {cell.hash: read_curve(study, cell).columns for cell in trained}
    drawings = []
    for column, label, logarithmic in (("train_loss", "train loss", True), ("test_accuracy", "test accuracy", False)):
        found = {
            cell.hash: (group.get(cell.hash, cell.status), *points)
            for cell in trained
            if (points := _recorded(curves[cell.hash], column))
        }
        if found:
            title = f"{label.capitalize()} along training"
            order = [*grouping.order, *{group for group, _, _ in found.values()}.difference(grouping.order)]
            drawings.append(training_curves(found, order, title=title, label=label, logarithmic=logarithmic))
    return Section("training", "Training", (), tuple(drawings)) if drawings else None


def _recorded(curve: Mapping[str, Sequence[float]], column: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Epochs and values of one column of a training curve, where it was recorded and is finite."""
    line = curve.get(column, ())
    epochs = curve.get("epoch", range(1, len(line) + 1))
    points = [(epoch, value) for epoch, value in zip(epochs, line, strict=True) if math.isfinite(value)]
    return (tuple(epoch for epoch, _ in points), tuple(value for _, value in points)) if points else None


def made_section(study: Study, found: Answers) -> Section:
    """What was run, on what, with which versions, and how the numbers on this page were computed."""
    finished = [cell for cell in study.cells if cell.training]
    seconds = sum(cell.trained("seconds") for cell in finished if math.isfinite(cell.trained("seconds")))
    study_rows: list[tuple[Entry, ...]] = [
        ("study", plain_text(study.name)),
        ("spiritlevel", plain_text(study.version)),
        ("networks", f"{len(study.cells)}, of which {len(study.measured)} measured"),
        ("training, all networks", seconds_text(seconds)),
        ("resamples", str(found.draws)),
    ]
    study_rows += [
        (plain_text(axis.label), ", ".join(axis.text(i) for i in range(len(axis.levels)))) for axis in study.axes
    ]
    tables = [
        ("Study", Numbers(("entry", "value"), tuple(study_rows))),
        ("Settings of all networks", Numbers(("setting", "value"), tuple(_fixed(study.config, study.factors)))),
        ("Data and measuring", _distinct([{**cell.data, **_measuring(cell)} for cell in finished])),
        ("Environment", _distinct([cell.environment for cell in finished])),
    ]
    reduced = _reductions(study)
    if reduced:
        columns = ("setting", "here", "built-in study")
        tables.insert(1, ("Different from the built-in study of this name", Numbers(columns, tuple(reduced))))
    return Section("made", "How it was made", (), (), tuple((name, table) for name, table in tables if table.rows))


# --- pieces --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Grouping:
    """What the markers of a scatter tell: a text for every measured network, and the texts in order."""

    label: str
    texts: list[str]
    order: list[str]


def _grouping(study: Study) -> _Grouping:
    """By the factor that explains most of the gap; many levels of a number are joined."""
    gaps = np.array([cell.gap(study.gap) for cell in study.measured])
    usable = [axis for axis in study.axes if not axis.is_seed and (axis.numeric or len(axis.levels) <= _GROUPS)]
    if not usable or not len(gaps):
        return _Grouping("", [""] * len(gaps), [])
    axis = max(usable, key=lambda axis: _explained(gaps, [axis.level(cell) for cell in study.measured]))
    count = len(axis.levels)
    wide = math.ceil(count / _GROUPS)
    bins = [range(i, min(i + wide, count)) for i in range(0, count, wide)]
    names = [axis.text(b[0]) if len(b) == 1 else f"{axis.text(b[0])} to {axis.text(b[-1])}" for b in bins]
    texts = [names[axis.level(cell) // wide] for cell in study.measured]
    return _Grouping(axis.label, texts, [name for name in names if name in texts])


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


def _is_main(row: Correlations, study: Study) -> bool:
    """A network's measure as trained, against the study's own gap."""
    return row.gap == study.gap and not row.rescaled and layer_of(row.quantity)[1] is None


def _before_after(study: Study, found: Answers) -> dict[str, tuple[Correlations, Correlations]]:
    """Measure → its correlations as trained and after random rescaling, where both are known."""
    pairs = {}
    for row in found.rows:
        if _is_main(row, study) and row.kendall.known:
            after = found.row(row.quantity, study.gap, rescaled=True)
            if after is not None and after.kendall.known:
                pairs[row.quantity] = (row, after)
    return pairs


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
        (row for row in found.rows if _is_main(row, study)),
        key=lambda row: -row.kendall.value if row.kendall.known else math.inf,
    )
    names = [row.quantity for row in rows]
    known = {name: records.get(name.partition("(")[0]) for name in names}
    own = _of_paper(names, study.paper)
    plain = [name for name in names if (record := known[name]) is not None and not record.invariant_under]
    return list(dict.fromkeys([*names[:1], *own[:1], *plain[:1]]))[:3]


def _of_paper(names: Sequence[str], paper: str | None) -> list[str]:
    """Those of the measures that a paper proposed."""
    records = known_records()
    found = {name: records.get(name.partition("(")[0]) for name in names}
    return [name for name, record in found.items() if record is not None and record.paper == paper]


def _place(cell: Cell) -> str:
    return plain_text(", ".join(f"{short_name(n)} {factor_text(entry)}" for n, entry in cell.coordinates.items()))


def _reductions(study: Study) -> list[tuple[Entry, ...]]:
    """What differs from the built-in study of the same name at full size; nothing for a study of one's own."""
    full = _full_size(study)
    if full is None:
        return []
    sides = [
        {str(key): str(text) for key, text in (*_flattened({"factors": factors}), *_fixed(config, factors))}
        for factors, config in ((study.factors, study.config), (full["factors"], full["config"]))
    ]
    keys = [key for key in dict.fromkeys([*sides[0], *sides[1]]) if key != "data.folder"]
    return [
        (key, *(side.get(key, "not set") for side in sides)) for key in keys if sides[0].get(key) != sides[1].get(key)
    ]


def _second_axis(study: Study, axis: Axis) -> Axis | None:
    """Another factor of few levels by which the networks of one level are told apart."""
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
    if axis.numeric and len(levels) >= 4 and len(axis.members) == 1 and "batch" not in axis.name:
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
        (plain_text(c.measure), *map(_factor_text, [c.times, *([c.at_equal_loss] if adjusted else [])])) for c in found
    )
    return [(caption + (f", {plain_text(name)}" if name else ""), Numbers(tuple(columns), rows))]


def _attack_ratios(study: Study) -> dict[str, dict[float, list[float]]]:
    """Measure → target → the ratio to the trained network, of every network that was attacked."""
    ratios: dict[str, dict[float, list[float]]] = {}
    for cell in study.measured:
        for attack in cell.attacks:
            for name, after in attack.measures.items():
                before = cell.measures.get(name)
                usable = layer_of(name)[1] is None and before is not None and before.value > 0
                if usable and before is not None and math.isfinite(after.value) and after.value > 0:
                    ratios.setdefault(name, {}).setdefault(attack.target, []).append(after.value / before.value)
    return ratios


def _unmoved(ratios: Mapping[str, Mapping[float, Sequence[float]]]) -> list[str]:
    return [n for n, found in ratios.items() if all(abs(v - 1) < _STAYS for vs in found.values() for v in vs)]


def _said(row: Correlations) -> str:
    if not row.kendall.known:
        return row.note or "no correlation"
    return f"τ {interval_text(row.kendall)} · r {interval_text(row.pearson)}"


def _kendall(found: Answers, quantity: str, gap: str) -> str:
    row = found.row(quantity, gap)
    return "–" if row is None else _estimate_text(row.kendall)


def _estimate_text(found: Estimate) -> str:
    return interval_text(found) if found.known else "–"


def _two(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _p(p: float) -> str:
    return "unknown" if math.isnan(p) else "0.001 or less" if p <= 0.001 else f"{p:.2g}"


def _papers(study: Study) -> list[str]:
    records = known_records()
    names = [name.partition("(")[0] for name in study.quantities(layers=False)]
    return [records[name].paper for name in names if name in records]


def _measuring(cell: Cell) -> dict[str, Any]:
    wanted = ("loss_function", "dtype", "parameters")
    return {key: cell.problem[key] for key in wanted if key in cell.problem}


def _flattened(plain: Mapping[str, Any], lead: str = "") -> Iterable[tuple[Entry, ...]]:
    """Every setting with its dotted name; those that are not set are left out."""
    for key, entry in plain.items():
        if isinstance(entry, Mapping):
            yield from _flattened(entry, f"{lead}{key}.")
        elif entry not in (None, "", [], {}):
            listed = isinstance(entry, list | tuple) and not any(isinstance(item, Mapping) for item in entry)
            text = ", ".join(map(factor_text, entry)) if listed else factor_text(entry)
            yield (plain_text(f"{lead}{key}"), plain_text(text))


def _fixed(config: Mapping[str, Any], factors: Mapping[str, Any]) -> Iterable[tuple[Entry, ...]]:
    """The settings that no factor changes from network to network."""
    return (row for row in _flattened(config) if row[0] not in factors)


def _distinct(mappings: Sequence[Mapping[str, Any]]) -> Numbers:
    """Every key with the values that occur."""
    rows = []
    for key in dict.fromkeys(key for mapping in mappings for key in mapping):
        texts = list(dict.fromkeys(factor_text(mapping[key]) for mapping in mappings if key in mapping))
        rows.append((plain_text(key), plain_text(listed(texts))))
    return Numbers(("entry", "value"), tuple(rows))
