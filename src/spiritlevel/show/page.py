"""One self-contained page for one report or several, and the fragment that a notebook shows."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from spiritlevel._version import __version__
from spiritlevel.measuring.minimum import doubts_of
from spiritlevel.measuring.record import Records, invariances, record_of
from spiritlevel.measuring.registry import known_records
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.value import Value, visible_error
from spiritlevel.presenting import facts as known_facts
from spiritlevel.show.answer import answer
from spiritlevel.show.citations import Citation, citations
from spiritlevel.show.drawing import Drawing, palette
from spiritlevel.show.numbers import Cell, Numbers, plain_text, value_and_error
from spiritlevel.show.records import CERTAINTIES, INVARIANCES, certainty
from spiritlevel.show.sections import (
    Section,
    comparison_drawing,
    convergence_section,
    cost_section,
    layer_section,
    neuron_section,
    reference_section,
)
from spiritlevel.show.tables import gathered_notes, grouped, headline, sparkline

_DARK_INKS = (
    "--ink: #e8e9eb; --muted: #a3a9b4; --line: #33373f; --ground: #15171b; --raised: #1f2228; --accent: #7cc0dd; "
    "--badge: #17394a; --badge-ink: #b9e2f3; --warn: #4a3508; --warn-ink: #ffdf9e; --none: #2a2d34; --none-ink: #b4b9c3;"
)


def report_page(
    reports: Mapping[str, Report],
    *,
    title: str | None = None,
    audit: Section | None = None,
    spectrum: Section | None = None,
    records: Records | None = None,
    said: Sequence[str] | None = None,
) -> str:
    """One HTML file for one model or several side by side: the answer, the numbers, the pictures, the cost, the papers.

    Args:
        reports: Model's name → its report; the name of a single model may be empty.
        title: The page's title; by default it names the models.
        audit: What the audit of these models found, as a section of its own.
        spectrum: Their spectra, likewise.
        records: Name → record of the measures; by default those of the library.
        said: The answer, where more is known than the reports say.
    """
    if not reports:
        raise ValueError("a page needs at least one report; `reports` is empty")
    known = known_records(records)
    parts = (
        audit,
        reference_section(reports),
        layer_section(reports),
        neuron_section(reports),
        spectrum,
        convergence_section(reports),
        cost_section(reports),
    )
    return render_page(
        title=title or _title(reports),
        answer=answer(reports, known) if said is None else said,
        sections=[part for part in parts if part is not None],
        summary=_summary(reports, known),
        citations=_papers(reports, known),
        facts=facts_of(reports),
    )


def report_fragment(report: Report, records: Records | None = None) -> str:
    """One report for a notebook's cell: table and pictures, styled within its own element only, without script."""
    known = known_records(records)
    sections = [part for part in (layer_section({"": report}), neuron_section({"": report})) if part is not None]
    view = _summary({"": report}, known)
    fragment: Any = _template().module.fragment
    return _compact(fragment(view, [_prepared(section) for section in sections]))


def pictures_fragment(headline: str, section: Section) -> str:
    """Pictures for a notebook's cell, below a headline, styled as `report_fragment`."""
    fragment: Any = _template().module.pictures
    return _compact(fragment(plain_text(headline), [_prepared(section)]))


def render_page(
    *,
    title: str,
    answer: Sequence[str],
    sections: Sequence[Section],
    summary: Summary | None = None,
    citations: Sequence[Citation] = (),
    facts: Mapping[str, str] | None = None,
) -> str:
    """Any page of the library: a title, the answer in sentences, a summary of measures if there is one, sections.

    facts: What was measured; what the command said where None. The date and the version are added where they are not told.
    """
    document: Any = _template().module.document
    told = {name: plain_text(fact) for name, fact in _dated(known_facts() if facts is None else facts).items()}
    prepared = _laid_out([_prepared(section) for section in sections])
    return _compact(document(plain_text(title), list(answer), summary, prepared, list(citations), __version__, told))


def _dated(facts: Mapping[str, str]) -> dict[str, str]:
    written = {} if "date" in facts else {"page written": datetime.now(UTC).strftime("%Y-%m-%d")}
    return {**facts, **written, **({} if "measured with" in facts else {"written with": f"spiritlevel {__version__}"})}


def _laid_out(sections: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two neighbours with a single drawing each stand side by side; one alone has its numbers beside its drawing."""
    small = [len(section["drawings"]) == 1 and not section["tables"] for section in sections]
    index = 0
    while index < len(sections):
        paired = small[index] and index + 1 < len(sections) and small[index + 1]
        for section in sections[index : index + 1 + paired]:
            section["layout"] = (
                "sl-half" if paired else "sl-lone" if len(section["drawings"]) == 1 and not section["bare"] else ""
            )
        index += 1 + paired
    return sections


@dataclass(frozen=True)
class Quantity:
    """One model's value of one measure, as the table shows it."""

    number: str
    error: str
    available: bool
    converged: bool
    certainty: str
    method: str
    sort: str


@dataclass(frozen=True)
class Row:
    """One measure of the summary, with a quantity a model."""

    name: str
    kind: str
    formula: str
    summary: str
    claims: list[str] | None
    layers: str
    cells: list[Quantity | None]


@dataclass(frozen=True)
class Summary:
    """The table of measures and what stands around it."""

    headline: str
    models: list[str]
    single: bool
    rows: list[Row]
    kinds: list[str]
    certainties: Mapping[str, str]
    notes: Mapping[str, str]
    picture: Mapping[str, Any] | None


def _summary(reports: Mapping[str, Report], records: Records) -> Summary:
    names = list(dict.fromkeys(name for report in reports.values() for name in report))
    groups = grouped(names, reports, records)
    rows = [_row(name, kind, reports, records) for kind, members in groups.items() for name in members]
    used = {cell.certainty for row in rows for cell in row.cells if cell is not None}
    picture = comparison_drawing(reports, records)
    told = doubts_of(next(iter(reports.values()))) if len(reports) == 1 else ()  # the answer has them
    return Summary(
        headline=headline(next(iter(reports.values()))),
        models=[plain_text(model) for model in reports],
        single=len(reports) == 1,
        rows=rows,
        kinds=list(groups),
        certainties={key: meaning for key, meaning in CERTAINTIES.items() if key in used},
        notes={note: carriers for note, carriers in gathered_notes(reports).items() if note not in told},
        picture=None if picture is None else _picture(picture),
    )


def _row(name: str, kind: str, reports: Mapping[str, Report], records: Records) -> Row:
    report = next(report for report in reports.values() if name in report)
    record = record_of(report[name], records)
    claims = invariances(report[name], report, records)
    return Row(
        name=plain_text(name),
        kind=kind,
        formula="" if record is None else record.formula,
        summary="" if record is None else record.summary,
        claims=None if claims is None else [claim for claim in INVARIANCES if claim in claims],
        layers=sparkline(list(report[name].layers.values()), 24) if len(reports) == 1 else "",
        cells=[_quantity(report[name]) if name in report else None for report in reports.values()],
    )


def _quantity(value: Value) -> Quantity:
    number, error = value_and_error(value.value, visible_error(value))
    sort = repr(value.value).replace("inf", "Infinity")
    sure = certainty(value) if value.available else "–"
    return Quantity(number, error, value.available, value.converged, sure, plain_text(value.method), sort)


def facts_of(reports: Mapping[str, Report]) -> dict[str, str]:
    """What was measured: what the command said or the file keeps, and what every report knows of its problem."""
    first = next(iter(reports.values()))
    found = dict(first.problem.get("source") or known_facts())
    for name, key in (
        ("loss", "loss_function"),
        ("parameters", "parameters"),
        ("precision", "dtype"),
        ("device", "device"),
    ):
        known = dict.fromkeys(_counted(report.problem[key]) for report in reports.values() if key in report.problem)
        if known:
            found[name] = ", ".join(known)
    if "data" not in found and isinstance(first.problem.get("samples"), int):
        found["samples"] = f"{first.problem['samples']:,}"
    if first.environment:
        found["measured with"] = ", ".join(f"{name} {version}" for name, version in first.environment.items())
    return found


def _counted(entry: Any) -> str:
    return f"{entry:,}" if isinstance(entry, int) else str(entry)


def _papers(reports: Mapping[str, Report], records: Records) -> list[Citation]:
    values = [value for report in reports.values() for value in report.values.values()]
    return citations(record.paper for value in values if (record := record_of(value, records)) is not None)


def _title(reports: Mapping[str, Report]) -> str:
    names = [plain_text(name) for name in reports if name]
    if not names:
        return "Flatness of a trained network"
    return "Flatness of " + (names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}")


def _prepared(section: Section) -> dict[str, Any]:
    """A section as the template takes it: SVG as markup, tables as cells that know how they sort."""
    return {
        "key": re.sub(r"[^a-z0-9-]+", "-", section.key.lower()),
        "heading": plain_text(section.heading),
        "paragraphs": [plain_text(paragraph) for paragraph in section.paragraphs],
        "drawings": [_picture(drawing) for drawing in section.drawings],
        "tables": [(plain_text(caption), _table(table)) for caption, table in section.tables],
        "bare": section.numbers_in_tables,
    }


def _picture(drawing: Drawing) -> dict[str, Any]:
    return {
        "title": drawing.title,
        "description": drawing.description,
        "svg": Markup(drawing.svg()),
        "table": _table(drawing.table),
    }


def _table(table: Numbers) -> dict[str, Any]:
    cells = [
        [{"text": text, "sort": _sort(cell)} for cell, text in zip(row, texts, strict=True)]
        for row, texts in zip(table.rows, table.texts(), strict=True)
    ]
    columns = [
        {"name": plain_text(name), "textual": any(isinstance(row[i], str) for row in table.rows)}
        for i, name in enumerate(table.columns)
    ]
    return {"columns": columns, "cells": cells}


def _sort(cell: Cell) -> Markup:
    """The attribute by which a cell sorts; text sorts by itself and stands to the left."""
    if isinstance(cell, str):
        return Markup(' class="sl-text"')
    text = "nan" if math.isnan(cell) else repr(cell).replace("inf", "Infinity")
    return Markup(' data-sort="{}"').format(text)


@cache
def _template() -> Any:
    # Compacted before it is hashed: compacting the whole page must not change it any more.
    script = _compact(_asset("page.js"))
    digest = base64.b64encode(sha256(script.encode()).digest()).decode()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["breakable"] = breakable
    environment.globals.update(
        explained=INVARIANCES,
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        shared_style=Markup(_asset("shared.css") + _themes()),
        page_style=Markup(_asset("page.css")),
    )
    return environment.from_string(_asset("page.html.jinja"))


def breakable(text: str) -> Markup:
    """`text` with places where a line may end, if it is long: behind underscores, slashes and the dots of names.

    >>> str(breakable("stages.0.first_weight")), str(breakable("0.weight"))
    ('stages.<wbr>0.<wbr>first_<wbr>weight', '0.weight')
    """
    if len(text) < 9:
        return escape(text)
    return Markup(re.sub(r"(?<=[_/])(?=\w)|(?<=\.)(?=[^\W\d])|(?<=[^\W\d]\.)(?=\d)", "<wbr>", str(escape(text))))


def _themes() -> str:
    """The series colours for light ground and for dark: by the reader's choice, the system's, or the notebook's."""
    light = " ".join(f"--sl-{i}: {pair[0]};" for i, pair in enumerate(palette()))
    dark = " ".join(f"--sl-{i}: {pair[1]};" for i, pair in enumerate(palette()))
    notebooks = (
        'body[data-jp-theme-light="false"] .sl-fragment, body.vscode-dark .sl-fragment, html[theme="dark"] .sl-fragment'
    )
    inks = re.sub(r"--(ink|ground|raised): [^;]+; ", "", _DARK_INKS)
    # On screen only: paper is white, whatever the reader's theme.
    return (
        f".sl {{ {light} }}\n"
        f'@media screen {{ html.sl[data-theme="dark"] {{ {_DARK_INKS} {dark} }} }}\n'
        "@media screen and (prefers-color-scheme: dark) "
        f'{{ html.sl:not([data-theme="light"]) {{ {_DARK_INKS} {dark} }} }}\n'
        f"@media screen {{ {notebooks} {{ {inks} {dark} }} }}\n"
    )


def _asset(name: str) -> str:
    return (resources.files("spiritlevel.show") / name).read_text(encoding="utf-8")


def _compact(html: str) -> str:
    """Without the blank lines that the template leaves."""
    return re.sub(r"\n\s*\n+", "\n", html).strip() + "\n"
