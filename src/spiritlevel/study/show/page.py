"""A study's page: which measure ranks its networks, the pictures of the papers, and what was left out."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spiritlevel.errors import SpiritLevelError, listed
from spiritlevel.measuring.registry import known_records
from spiritlevel.saved import write_whole
from spiritlevel.show.citations import citations
from spiritlevel.show.numbers import Cell as Entry
from spiritlevel.show.numbers import Numbers, plain_text, seconds_text
from spiritlevel.show.page import render_page
from spiritlevel.show.sections import Section
from spiritlevel.study.correlate import Answers, answers, correlations_csv
from spiritlevel.study.csv_tables import levels_csv, results_csv
from spiritlevel.study.plan import list_studies, read_plan
from spiritlevel.study.results import GAPS, Cell, Study, factor_text, read_curve, read_study, short_name
from spiritlevel.study.settings import flattened
from spiritlevel.study.show.along import along_section
from spiritlevel.study.show.answer import study_answer
from spiritlevel.study.show.figures import training_curves
from spiritlevel.study.show.labels import GAP_LABELS, estimate_text, is_main
from spiritlevel.study.show.pictures import (
    attack_section,
    factor_section,
    group_networks,
    layer_section,
    ranking_section,
    rescaling_section,
    scatter_section,
)
from spiritlevel.study.statistics import Estimate


def write_study_report(folder: str | os.PathLike[str]) -> Path:
    """Write `results.csv`, `correlations.csv` and `report.html` into a study's folder; the page's path.

    And `levels.csv` where networks were measured along their training.

    From whatever cells are finished: a study that still runs can be asked too. Each file is whole or not there.
    """
    study = read_study(folder)
    found = answers(study)
    page = study.folder / "report.html"
    _write(study.folder / "results.csv", results_csv(study))
    _write(study.folder / "correlations.csv", correlations_csv(found, study))
    if study.marks:
        _write(study.folder / "levels.csv", levels_csv(study))
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
        along_section(study, found),
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
    return read_plan(study.name).to_dict() if study.name in list_studies() else None


def _pictures(study: Study, found: Answers, name: str) -> list[Section | None]:
    """What is drawn of a study, or of one of its parts under its name."""
    made = [ranking_section(study, found)]
    # Measures of different architectures side by side say little; where there are parts, they are drawn there.
    if not found.parts:
        made += [scatter_section(study, found), rescaling_section(study, found), layer_section(study, found)]
    return [section if section is None or not name else _named(section, name) for section in made]


def _named(section: Section, name: str) -> Section:
    """The section with the part's name in every heading: in a screen reader, equal headings could not be distinguished."""
    of = f", {plain_text(name)}"
    return replace(
        section,
        key=f"{section.key}-{name}",
        heading=section.heading + of,
        drawings=tuple(replace(drawing, title=drawing.title + of) for drawing in section.drawings),
        tables=tuple((caption + of, table) for caption, table in section.tables),
    )


# --- sections ------------------------------------------------------------------------------------------------------


def left_out_section(study: Study) -> Section | None:
    """Every cell without a measurement, with the reason."""
    cells = [cell for cell in study.cells if cell.status != "measured"]
    if not cells and not study.unknown_folders:
        return None
    rows = tuple((cell.hash, f"{cell.status}: {plain_text(cell.reason)}", _place(cell)) for cell in cells)
    text = "No statistic on this page takes these networks into account."
    unread = (
        f"{study.unknown_folders} folders of cells belong to no cell of this study as it stands and were not read; an earlier "
        "version of it may have made them."
    )
    columns = ("cell", "what happened", "factors")
    tables = (("Excluded, failed and unfinished networks", Numbers(columns, rows)),) if rows else ()
    return Section("left-out", "Left out", (text, *([unread] if study.unknown_folders else [])), (), tables)


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
    rows = [row for row in found.rows if is_main(row, study)]
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
            *(estimate_text(getattr(r, key)) for key in kinds.values()),
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
            (plain_text(r.quantity), *map(estimate_text, (r.psi_mean, *(r.psi.get(a.name, Estimate()) for a in axes))))
            for r in rows
        )
        tables.append((f"Granulated Kendall (Jiang et al. 2020){who}", Numbers(psi, granulated)))
    others = tuple((plain_text(r.quantity), *(_kendall(found, r.quantity, gap) for gap in GAPS)) for r in rows)
    tables.append((f"Kendall τ with every gap{who}", Numbers(("measure", *(GAP_LABELS[gap] for gap in GAPS)), others)))
    return tables


def training_section(study: Study) -> Section | None:
    """How the networks were trained: loss and accuracy along the epochs."""
    grouping = group_networks(study)
    group = {cell.hash: text for cell, text in zip(study.measured, grouping.texts, strict=True)}
    trained = [cell for cell in study.cells if cell.training]
    curves = {cell.hash: read_curve(study, cell) for cell in trained}
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


def _place(cell: Cell) -> str:
    return plain_text(", ".join(f"{short_name(n)} {factor_text(entry)}" for n, entry in cell.coordinates.items()))


def _reductions(study: Study) -> list[tuple[Entry, ...]]:
    """What differs from the built-in study of the same name at full size; nothing for a study of one's own."""
    full = _full_size(study)
    if full is None:
        return []
    sides = [
        {str(key): str(text) for key, text in (*_settings({"factors": factors}), *_fixed(config, factors))}
        for factors, config in ((study.factors, study.config), (full["factors"], full["config"]))
    ]
    keys = [key for key in dict.fromkeys([*sides[0], *sides[1]]) if key != "data.folder"]
    return [
        (key, *(side.get(key, "not set") for side in sides)) for key in keys if sides[0].get(key) != sides[1].get(key)
    ]


def _kendall(found: Answers, quantity: str, gap: str) -> str:
    row = found.row(quantity, gap)
    return "–" if row is None else estimate_text(row.kendall)


def _papers(study: Study) -> list[str]:
    records = known_records()
    names = [name.partition("(")[0] for name in study.quantities(layers=False)]
    return [records[name].paper for name in names if name in records]


def _measuring(cell: Cell) -> dict[str, Any]:
    wanted = ("loss_function", "dtype", "parameters")
    return {key: cell.problem[key] for key in wanted if key in cell.problem}


def _settings(plain: Mapping[str, Any]) -> Iterable[tuple[Entry, ...]]:
    """Every setting with its dotted name; those that are not set are left out."""
    for key, entry in flattened(plain):
        if entry not in (None, "", []):
            listed = isinstance(entry, list | tuple) and not any(isinstance(item, Mapping) for item in entry)
            text = ", ".join(map(factor_text, entry)) if listed else factor_text(entry)
            yield (plain_text(key), plain_text(text))


def _fixed(config: Mapping[str, Any], factors: Mapping[str, Any]) -> Iterable[tuple[Entry, ...]]:
    """The settings that no factor changes from network to network."""
    return (row for row in _settings(config) if row[0] not in factors)


def _distinct(mappings: Sequence[Mapping[str, Any]]) -> Numbers:
    """Every key with the values that occur."""
    rows = []
    for key in dict.fromkeys(key for mapping in mappings for key in mapping):
        texts = list(dict.fromkeys(factor_text(mapping[key]) for mapping in mappings if key in mapping))
        rows.append((plain_text(key), plain_text(listed(texts))))
    return Numbers(("entry", "value"), tuple(rows))
