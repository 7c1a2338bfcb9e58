"""Tables for the terminal: one report, several side by side, and the measures themselves."""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from spiritlevel.errors import listed
from spiritlevel.measuring.record import MeasureRecord, Records, invariances, is_invariant, is_plain
from spiritlevel.measuring.registry import known_records
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.value import Value, visible_error
from spiritlevel.show.citations import CITATIONS
from spiritlevel.show.numbers import plain_text, seconds_text, significant, value_and_error
from spiritlevel.show.records import BARS, certainty

_LETTERS = {"layer": "L", "neuron": "N", "linear": "M", "rotation": "R", "input map": "I", "output": "O"}
# Below this width the error stands under its value, and what a measure survives under how sure it is.
_WIDE = 76
_BARS = "▁▂▃▄▅▆▇█"
_SURVIVES = "survives: " + ", ".join(f"{letter} {claim}" for claim, letter in _LETTERS.items())


def render(renderable: RenderableType, width: int | None = None) -> str:
    """`renderable` as plain text of that width; by default the width of the terminal, 80 where there is none."""
    columns = width or shutil.get_terminal_size((80, 24)).columns
    stream = io.StringIO()
    console = Console(file=stream, width=columns, color_system=None, force_terminal=False, force_jupyter=False)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip().splitlines())


@dataclass(frozen=True)
class Fitted:
    """A renderable that is laid out once the width of the console is known."""

    layout: Callable[[int], RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.layout(options.max_width)


def report_table(report: Report, records: Records | None = None) -> RenderableType:
    """One report: every value with its error, how sure it is, what it survives, its layers as a sparkline, notes."""
    known = known_records(records)
    return Fitted(
        lambda width: Group(
            Text(headline(report) + "\n", style="bold"),
            _values_table(report, known, width),
            *_footnotes({"": report}),
        )
    )


def comparison_table(reports: Mapping[str, Report], records: Records | None = None) -> RenderableType:
    """Several reports side by side: a row a measure, a column a model; invariant measures first, plain ones after."""
    known = known_records(records)
    return Fitted(lambda width: _comparison(reports, known, width))


def measures_table(records: Records | Iterable[MeasureRecord] | None = None) -> RenderableType:
    """Every measure by paper: its name, what it survives, its formula and what it says in a line."""
    by_paper: dict[str, list[MeasureRecord]] = {}
    for record in known_records(records).values():
        by_paper.setdefault(record.paper, []).append(record)
    blocks = [_paper_block(paper, members) for paper, members in by_paper.items()]
    return Group(*blocks, Text(_SURVIVES, style="dim"))


def headline(report: Report) -> str:
    """What was measured, in a line: loss, samples, how many measures, how long."""
    parts = [f"loss {significant(report.loss, 4)}"]
    slope = report.problem.get("gradient_metric_norm")
    if isinstance(slope, float):
        parts.append(
            f"gradient {significant(report.problem['gradient_norm'], 3)}, in units of the weights {significant(slope, 3)}"
        )
    samples = report.problem.get("samples")
    if isinstance(samples, int):
        parts.append(f"{samples:,} sample{'' if samples == 1 else 's'}")
    parts.append(f"{len(report)} measure{'' if len(report) == 1 else 's'}")
    if report.cost.seconds > 0:
        parts.append(seconds_text(report.cost.seconds))
    return " · ".join(parts)


def sparkline(profile: Sequence[float], width: int = 12) -> str:
    """A profile along the depth as bars of its logarithm; `·` for zero, `–` for what has none.

    A profile longer than `width` keeps the largest of each stretch.

    >>> sparkline([1.0, 10.0, 100.0, 0.0])
    '▁▅█·'
    """
    shown = [max(profile[i] for i in stretch) for stretch in _stretches(len(profile), width)]
    logs = [math.log(value) for value in shown if value > 0 and math.isfinite(value)]
    low, span = (min(logs), max(logs) - min(logs)) if logs else (0.0, 0.0)
    return "".join(_bar(value, low, span) for value in shown)


def _bar(value: float, low: float, span: float) -> str:
    if value == 0:
        return "·"
    if not (value > 0 and math.isfinite(value)):
        return "–"
    height = (math.log(value) - low) / span if span > 1e-9 else 0.5
    return _BARS[min(int(height * len(_BARS)), len(_BARS) - 1)]


def _stretches(length: int, width: int) -> list[range]:
    count = min(length, width)
    return [range(i * length // count, (i + 1) * length // count) for i in range(count)]


def _values_table(report: Report, records: Records, width: int) -> Table:
    wide, layered = width >= _WIDE, any(value.layers for value in report.values.values())
    table = simple_table()
    table.add_column("measure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    if wide:
        table.add_column("± error", justify="right", no_wrap=True)
        table.add_column("how sure", no_wrap=True)
    table.add_column("survives" if wide else "how sure,\nsurvives", no_wrap=True)
    if layered:
        table.add_column("layers", no_wrap=True)
    for name, value in report.values.items():
        letters = _letters(invariances(value, report, records))
        cells = _wide_cells(value, letters) if wide else _narrow_cells(value, letters)
        bars = sparkline(list(value.layers.values()), 12 if width >= 100 else 8) if value.layers else ""
        table.add_row(
            measure_name(name, width - 54 if wide else max(width - 36, 12)), *cells, *([bars] if layered else [])
        )
    return table


def _wide_cells(value: Value, letters: str) -> list[Text]:
    number, error = value_and_error(value.value, visible_error(value))
    if not value.available:
        return [Text("n/a", style="dim"), Text(), Text("–", style="dim"), Text(letters)]
    return [_number(number, value), Text(error), Text(certainty(value)), Text(letters)]


def _narrow_cells(value: Value, letters: str) -> list[Text]:
    number, error = value_and_error(value.value, visible_error(value))
    if not value.available:
        return [Text("n/a", style="dim"), Text(letters)]
    beneath = Text(f"\n± {error}" if error else "")
    return [_number(number, value) + beneath, Text(f"{certainty(value)}\n{letters}")]


def _number(number: str, value: Value) -> Text:
    return Text.assemble((number, "bold"), ("" if value.converged else " ✗", "bold yellow"))


def _letters(claims: frozenset[str] | None) -> str:
    if claims is None:
        return "?"
    return "".join(letter if claim in claims else "·" for claim, letter in _LETTERS.items())


def _footnotes(reports: Mapping[str, Report], *, legend: bool = True) -> list[RenderableType]:
    """The legend of the column of what measures survive where there is one, and every note once with the measures that carry it."""
    survives = [Text(_SURVIVES, style="dim")] if legend else []
    lines: list[RenderableType] = [Text(""), *survives, *_bar_words(reports)]
    if any(value.available and not value.converged for report in reports.values() for value in report.values.values()):
        lines.append(Text("✗ the tolerance asked for was not reached", style="dim"))
    notes = Table.grid(padding=(0, 1, 0, 0))
    for note, carriers in gathered_notes(reports).items():
        notes.add_row("•", Text.assemble((f"{carriers}: " if carriers else "", "bold"), note))
    return [*lines, notes] if notes.rows else lines


def _bar_words(reports: Mapping[str, Report]) -> list[RenderableType]:
    """What the errors of these tables are, kind by kind."""
    values = [value for report in reports.values() for value in report.values.values() if math.isfinite(value.value)]
    kinds = {certainty(value) for value in values if visible_error(value)}
    said = ", ".join(f"{words} ({sure})" for sure, words in BARS.items() if sure in kinds)
    return [Text(f"± is {said}", style="dim")] if said else []


def gathered_notes(reports: Mapping[str, Report]) -> dict[str, str]:
    """Note → who carries it: measures, with the models in brackets where not all of them do; "" for the whole."""
    models: dict[str, dict[str, list[str]]] = {}
    for model, report in reports.items():
        for note in report.notes:
            models.setdefault(plain_text(note), {}).setdefault("", []).append(plain_text(model))
        for name, value in report.values.items():
            for note in value.notes:
                models.setdefault(plain_text(note), {}).setdefault(plain_text(name), []).append(plain_text(model))
    return {note: _carriers(names, len(reports)) for note, names in models.items()}


def _carriers(names: Mapping[str, list[str]], count: int) -> str:
    shown = []
    for name, models in names.items():
        some = ", ".join(models) if len(models) < count else ""
        shown.append(f"{name} ({some})" if name and some else name or some)
    return listed(shown)


def _comparison(reports: Mapping[str, Report], records: Records, width: int) -> Group:
    names = list(dict.fromkeys(name for report in reports.values() for name in report))
    label = min(max(map(len, names), default=8), 33 if width >= 100 else max(width // 3, 18))
    fitting = max(1, (width - label - 1) // 13)
    models = list(reports)
    tables = [
        _models_table({model: reports[model] for model in models[start : start + fitting]}, names, records, label)
        for start in range(0, len(models), fitting)
    ]
    return Group(*tables, *_footnotes(reports, legend=False))


def _models_table(reports: Mapping[str, Report], names: list[str], records: Records, label: int) -> Table:
    table = simple_table()
    table.add_column("measure", no_wrap=True, min_width=label)
    for model in reports:
        table.add_column(Text(plain_text(model), overflow="fold"), justify="right", overflow="fold", max_width=24)
    table.add_row("loss", *(Text(significant(report.loss, 4)) for report in reports.values()), end_section=True)
    for heading, members in grouped(names, reports, records).items():
        table.add_row(Text(heading, style="italic"))
        for i, name in enumerate(members, start=1):
            cells = (_compared(report.values.get(name)) for report in reports.values())
            table.add_row(measure_name(name, label), *cells, end_section=i == len(members))
    return table


def grouped(names: Iterable[str], reports: Mapping[str, Report], records: Records) -> dict[str, list[str]]:
    """The names in three groups, empty ones left out: invariant measures, plain ones, those without a record."""
    groups: dict[str, list[str]] = {"invariant": [], "plain": [], "other": []}
    for name in names:
        value = next((report[name] for report in reports.values() if name in report), None)
        if value is not None:
            key = "invariant" if is_invariant(value, records) else "plain" if is_plain(value, records) else "other"
            groups[key].append(name)
    return {heading: members for heading, members in groups.items() if members}


def _compared(value: Value | None) -> Text:
    if value is None:
        return Text("–", style="dim")
    if not value.available:
        return Text("n/a", style="dim")
    number, error = value_and_error(value.value, visible_error(value), digits=4)
    return _number(number, value) + Text(f"\n± {error}" if error else "", style="dim")


def _paper_block(paper: str, members: Sequence[MeasureRecord]) -> RenderableType:
    entry = CITATIONS.get(paper)
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(ratio=1)
    table.add_column(no_wrap=True, justify="right", vertical="top")
    for record in members:
        table.add_row(Text(plain_text(record.name), style="bold"), _letters(frozenset(record.invariant_under)))
        table.add_row(Padding(Text(plain_text(record.formula)), (0, 0, 0, 4)))
        table.add_row(Padding(Text(plain_text(record.summary), style="dim"), (0, 0, 0, 4)))
    title = plain_text(paper) if entry is None else f"{entry.short}: {entry.title}"
    return Group(Text(title, style="italic"), Padding(table, (0, 0, 1, 2)))


def measure_name(name: str, limit: int) -> Text:
    """A measure's name, broken after an underscore where it is longer than `limit`."""
    text = plain_text(name)
    if len(text) <= limit:
        return Text(text)
    lines = [""]
    for part in text.replace("_", "_\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(part) > limit - 2:
            lines.append("")
        lines[-1] += part
    return Text("\n  ".join(line[: limit - 2] for line in lines))


def simple_table() -> Table:
    """A table with a line below its head and nothing else."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
