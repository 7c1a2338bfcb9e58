"""An audit as a table, a section of a page with one picture for each kind of change, and a page of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spiritlevel.audit.audit import KINDS, OF_INPUTS
from spiritlevel.audit.findings import Audit, Finding
from spiritlevel.errors import listed
from spiritlevel.measuring.registry import known_records
from spiritlevel.presenting import register
from spiritlevel.show.citations import citations
from spiritlevel.show.drawing import INK, MARKERS, Drawing, style
from spiritlevel.show.figures import axes_of, finished, legend, legend_columns, look_of
from spiritlevel.show.numbers import Numbers, factor_text, plain_text, shortened, significant
from spiritlevel.show.page import facts_of, render_page
from spiritlevel.show.scales import LogScale
from spiritlevel.show.sections import Section
from spiritlevel.show.tables import Fitted, measure_name, render, simple_table

_MARKS = {"invariant": "✓", "moves": "✗", "undecided": "?"}
# Changes that do not leave the function of the same data alone.
_BESIDE_WEIGHTS = ("output scale", *OF_INPUTS)


def audit_table(audit: Audit) -> RenderableType:
    """Measures down, kinds of change across: ✓ survives, ✗ with the largest factor seen, ? undecided."""
    lines = [Text(line, style="dim") for line in _footnotes(audit)]
    table = Fitted(lambda width: _verdicts(audit, width))
    return Group(*(Text(line) for line in audit_answer(audit)), Text(""), table, *lines)


def _verdicts(audit: Audit, width: int) -> Table:
    """The table of verdicts: where all kinds do not fit beside long names, those are broken between words."""
    table = simple_table()
    table.add_column("measure", no_wrap=True)
    for kind in audit.kinds:
        table.add_column(plain_text(kind), justify="left")
    for name in audit.original:
        cells = (_cell(audit.finding(name, kind)) for kind in audit.kinds)
        table.add_row(measure_name(name, max(width - 14 * len(audit.kinds), 18)), *cells)
    return table


def _cell(finding: Finding) -> Text:
    mark = _MARKS[finding.verdict]
    if finding.verdict == "moves":
        text = Text(f"{mark} {factor_text(finding.factor)}", style="bold red" if finding.claim_fails else "")
        return text + Text(" claims not to", style="bold red") if finding.claim_fails else text
    return Text(mark, style="green" if finding.verdict == "invariant" else "yellow")


def _footnotes(audit: Audit) -> list[str]:
    marks = {"invariant": "✓ survives", "moves": "✗ moves, by the factor shown", "undecided": "? undecided"}
    seen = {finding.verdict for finding in audit.findings}
    notes = ["   ".join(words for verdict, words in marks.items() if verdict in seen)]
    notes += [
        f"{f.measure} under {f.kind}: {f.reason}" for f in audit.findings if f.verdict == "undecided" and f.reason
    ]
    return notes + [f"{kind} changes were not audited: {reason}" for kind, reason in audit.skipped.items()]


def audit_answer(audit: Audit) -> list[str]:
    """What the audit found, in sentences."""
    if not audit.findings:
        return ["Nothing was audited: this network has no change of the kinds that were asked for."]
    rescalings = [kind for kind in audit.kinds if kind not in _BESIDE_WEIGHTS]
    names = list(audit.original)
    survive = [n for n in names if all(audit.verdict(n, kind) == "invariant" for kind in rescalings)]
    moving = [f for f in audit.findings if f.kind in rescalings and f.verdict == "moves"]
    answer = []
    if rescalings:
        does = "survives" if len(survive) == 1 else "survive"
        answer.append(f"{len(survive)} of {len(names)} measures {does} {_changes(audit, rescalings)}.")
        if survive:
            answer.append(f"{'It is' if len(survive) == 1 else 'They are'} {', '.join(survive)}.")
    if moving:
        worst = max(moving, key=lambda finding: finding.factor)
        answer.append(
            f"{len({f.measure for f in moving})} can be moved without changing the function; the furthest, "
            f"{worst.measure}, {_by(worst.factor)} under {worst.kind} changes."
        )
    return [*answer, *_claim_words(audit)]


def _changes(audit: Audit, rescalings: Sequence[str]) -> str:
    """What a measure survives that survived: more was not tried where kinds were chosen."""
    if set(KINDS) <= {*audit.kinds, *audit.skipped, *_BESIDE_WEIGHTS}:
        return "every change of weights that leaves this network's function alone"
    tried = f"{', '.join(rescalings[:-1])} and {rescalings[-1]}" if len(rescalings) > 1 else rescalings[0]
    return (
        f"the {plain_text(tried)} changes of weights, which leave this network's function alone; no others were tried"
    )


def _by(factor: float) -> str:
    return f"by a factor of {significant(factor, 3)}" if math.isfinite(factor) else "beyond any factor"


def _claim_words(audit: Audit) -> list[str]:
    """Whether the measures survive what they claim to, as far as this audit could tell."""
    claimed = [finding for finding in audit.findings if finding.claimed]
    undecided = [f"{f.measure} under {f.kind}" for f in claimed if f.verdict == "undecided"]
    failed = [f"{f.measure} under {f.kind}" for f in audit.failed_claims]
    if failed:
        return [f"Claims that fail here: {', '.join(failed)}."]
    if not claimed:
        return ["No measure here claims to survive what was tried."]
    if undecided:
        some = len(undecided) < len(claimed)
        said = (
            "No claim to survive fails here, but some are undecided" if some else "No claim to survive is decided here"
        )
        return [f"{said}: {listed(undecided, 6)}."]
    return ["Every measure that claims to survive does."]


def audit_section(audit: Audit) -> Section:
    """The audit as a part of a page: the table of verdicts and a picture for each kind."""
    columns = ("measure", *map(plain_text, audit.kinds))
    rows = tuple((name, *(_cell(audit.finding(name, kind)).plain for kind in audit.kinds)) for name in audit.original)
    return Section(
        "audit",
        "Audit",
        (
            "The weights were changed without changing the function, more and more strongly, and measured again. "
            "A measure that means something about the function stays where it was.",
            *_footnotes(audit),
        ),
        tuple(audit_drawing(audit, kind) for kind in audit.kinds),
        (("Verdict and largest factor seen", Numbers(columns, rows)),),
    )


def audit_drawing(audit: Audit, kind: str) -> Drawing:
    """Value relative to the original against the strength of the change: every measure that moves, and all that stay.

    Every one that moves has a look and a name of its own; a value that became infinite stands at the upper edge.
    """
    strengths = sorted({trial.strength for trial in audit.trials if trial.kind == kind})
    lines = {name: _ratios(audit, name, kind, strengths) for name in audit.original}
    moving = [name for name in lines if audit.verdict(name, kind) == "moves"]
    moving.sort(key=lambda name: audit.factor(name, kind), reverse=True)
    still = [name for name in lines if audit.verdict(name, kind) == "invariant"]
    scale = LogScale.of([1.0, *(ratio for name in moving for ratio in lines[name])])
    entries = len(moving) + bool(still)
    labels = [shortened(plain_text(name), 34) for name in moving]
    with style():
        figure, axes = axes_of(None, height=2.4 + 0.18 * math.ceil(entries / legend_columns(labels)))
        places = [0.0, *strengths]
        for index, name in enumerate(moving):
            heights = [_height(scale, ratio) for ratio in (1.0, *lines[name])]
            axes.plot(places, heights, **_look(index), label=labels[index])
        if still:
            axes.plot(
                places, [1.0] * len(places), color=INK, linewidth=2.2, label=_counted(len(still), "invariant measure")
            )
        scale.apply(axes.yaxis, axes)
        axes.set_xlabel(f"strength of the change ({plain_text(kind)})")
        axes.set_ylabel("value / value of the original")
        legend(axes, entries, always=entries > 0)
    table = Numbers(("measure", *(f"strength {s:g}" for s in strengths)), tuple((n, *r) for n, r in lines.items()))
    return finished(
        figure, table, f"Measures under {plain_text(kind)} changes", _moving_words(audit, kind, moving, still)
    )


def _look(index: int) -> dict[str, Any]:
    """Of a line of its own among many: once all markers are used, they come again with other colours and dashes."""
    look = look_of(index)
    shifted = index + index // len(MARKERS)
    return {**look, "marker": MARKERS[shifted % len(MARKERS)], "markersize": max(4.0, look["markersize"] - index // 2)}


def _height(scale: LogScale, ratio: float) -> float:
    return scale.high if ratio == math.inf else scale.place(ratio)


def _moving_words(audit: Audit, kind: str, moving: Sequence[str], still: Sequence[str]) -> str:
    move = (
        f"{_counted(len(moving), 'measure')} {'moves' if len(moving) == 1 else 'move'} under {plain_text(kind)} changes"
    )
    words = f"{move} and {len(still)} {'stays' if len(still) == 1 else 'stay'}."
    if not moving:
        return words
    return f"{words} {moving[0]} moves furthest, {_by(audit.factor(moving[0], kind))}."


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _ratios(audit: Audit, name: str, kind: str, strengths: Sequence[float]) -> list[float]:
    """The largest ratio to the original at every strength, over seeds; below one where the value fell."""
    base = audit.original[name].value
    found = []
    for strength in strengths:
        values = [t.report[name].value for t in audit.trials if t.kind == kind and t.strength == strength]
        ratios = [1.0 if value == base else value / base if base else math.inf for value in values]
        found.append(max(ratios, key=lambda ratio: abs(math.log(ratio)) if ratio > 0 else math.inf))
    return found


def audit_page(audit: Audit) -> str:
    """One self-contained page: the answer, the audit, and the original's measures."""
    records = known_records()
    papers = [records[name].paper for name in audit.original if name in records]
    return render_page(
        title="Which measures survive rescaling?",
        answer=audit_answer(audit),
        sections=[audit_section(audit)],
        citations=citations(papers),
        facts=facts_of({"": audit.original}),
    )


def audit_text(audit: Audit) -> str:
    """The table as plain text."""
    return render(audit_table(audit))


register(Audit, text=audit_text, page=audit_page, section=audit_section)
