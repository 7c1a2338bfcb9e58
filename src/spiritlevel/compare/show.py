"""A comparison of networks as a table and a page: who is flatter, how sure that is, and which measures agree."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spiritlevel.compare.compare import Comparison, invariant, not_comparable_words
from spiritlevel.measuring.value import visible_error
from spiritlevel.presenting import register
from spiritlevel.show.numbers import Cell, Numbers, plain_text, significant, value_and_error
from spiritlevel.show.page import report_page
from spiritlevel.show.sections import Section
from spiritlevel.show.tables import Fitted, measure_name, render, simple_table

_MATRIX = 8  # measures whose agreement a terminal can show
_FEWEST = 4  # networks from which on agreement over their pairs says something


def ranking_table(comparison: Comparison) -> RenderableType:
    """Every measure with its ranking, the flattest first, and how sure every step of it is; then what is decided."""
    table = Fitted(lambda width: _rankings(comparison, width))
    lines: list[RenderableType] = [Text(f"• {line}") for line in map(plain_text, comparison.statements())]
    notes = [Text(_probability_words(comparison), style="dim")]
    return Group(*lines, Text(losses_line(comparison)), Text(""), table, *notes, *_agreement_lines(comparison))


def _heading(comparison: Comparison) -> str:
    first = "flattest first" if comparison.comparable else "smaller values first"
    return f"{first}: value ± error (probability of coming after the one before)"


def _rankings(comparison: Comparison, width: int) -> Table:
    """A row a measure, invariant ones above those that a rescaling can move at will; no entry is broken in two."""
    table = simple_table()
    label = min(max(map(len, comparison.measures), default=8), max(width // 3, 18))
    table.add_column("measure", no_wrap=True)
    table.add_column(_heading(comparison))
    groups = {
        "invariant": [name for name in comparison.measures if invariant(comparison, name)],
        "plain: a rescaling moves these at will": [n for n in comparison.measures if not invariant(comparison, n)],
    }
    for heading, names in groups.items():
        if names:
            table.add_row("", Text(heading, style="italic"))
        for name in names:
            ranking = _packed(_ranking(comparison, name), max(width - label - 2, 20))
            table.add_row(measure_name(name, label), Text("\n".join(ranking)))
    return table


def _packed(entries: list[str], width: int) -> list[str]:
    """The entries, separated by commas, on as few lines of that width as hold them.

    >>> _packed(["small 2.2 ± 0.3", "large 4.6 ± 0.5", "twin 9"], 24)
    ['small 2.2 ± 0.3,', 'large 4.6 ± 0.5, twin 9']
    """
    lines = [""]
    for i, entry in enumerate(entries):
        text = entry + ("," if i < len(entries) - 1 else "")
        if lines[-1] and len(lines[-1]) + 1 + len(text) > width:
            lines.append("")
        lines[-1] += f" {text}" if lines[-1] else text
    return lines


def _probability_words(comparison: Comparison) -> str:
    """What the probabilities are about."""
    if comparison.no_sampling_error:
        return "probabilities are about these data only"
    count = max(len(values) for found in comparison.parts.values() for values in found.values())
    return (
        f"probabilities are about data of the same kind; every network was measured again on {count} random parts of these, "
        "which cost about as much as measuring it once"
    )


def _agreement_lines(comparison: Comparison) -> list[RenderableType]:
    """Kendall's τ as a matrix where it fits, its extremes where not."""
    if len(comparison.names) < _FEWEST:
        return []
    tau = comparison.agreement()
    if len(tau) <= _MATRIX:
        table = simple_table()
        table.add_column("Kendall's τ", overflow="fold")
        for number, _ in enumerate(tau, start=1):
            table.add_column(str(number), justify="right")
        for number, (name, row) in enumerate(tau.items(), start=1):
            cells = ("–" if math.isnan(value) else f"{value:.2f}".replace("-", "−") for value in row.values())
            table.add_row(f"{number} {name}", *cells)
        return [table]
    pairs = [(tau[a][b], a, b) for a, b in combinations(tau, 2) if not math.isnan(tau[a][b])]
    if not pairs:
        return [Text("Kendall's τ between measures: none of them decides an order")]
    low, high = min(pairs), max(pairs)
    least = f"least {low[0]:.2f} ({low[1]}, {low[2]})".replace("-", "−")
    return [
        Text(f"Kendall's τ between measures: {least}, most {high[0]:.2f}; the matrix is in agreement() and on the page")
    ]


def _ranking_text(comparison: Comparison, name: str) -> str:
    return ", ".join(_ranking(comparison, name))


def _ranking(comparison: Comparison, name: str) -> list[str]:
    """The networks by a measure, each with its value and how surely it comes after the one before."""
    order = comparison.ranking(name)
    if comparison.undecidable(name):
        return [f"undecided (lower bounds): {plain_text(order[0])}", *map(plain_text, order[1:])]
    steps = (
        f"{_with_value(comparison, name, after)} ({_percent(comparison.probability(name, before, after))})"
        for before, after in pairwise(order)
    )
    return [_with_value(comparison, name, order[0]), *steps]


def _with_value(comparison: Comparison, name: str, model: str) -> str:
    value = comparison.reports[model][name]
    number, error = value_and_error(value.value, value_error(comparison, name, model), digits=4)
    return f"{plain_text(model)} {number}" + (f" ± {error}" if error else "")


def value_error(comparison: Comparison, name: str, model: str) -> float:
    """The error of a value with that of a finite sample, where parts of the data tell it."""
    own = visible_error(comparison.reports[model][name])
    parts = [part for part in comparison.parts.get(model, {}).get(name, ()) if math.isfinite(part)]
    if len(parts) < 2:
        return own
    mean = sum(parts) / len(parts)
    spread = sum((part - mean) ** 2 for part in parts) / (len(parts) - 1)
    return math.hypot(own, math.sqrt(spread / len(parts)))


def losses_line(comparison: Comparison) -> str:
    """Every network's loss."""
    return "loss: " + ", ".join(f"{plain_text(n)} {significant(r.loss, 4)}" for n, r in comparison.reports.items())


def _percent(probability: float) -> str:
    """Rounded down, so that nothing looks surer than it is."""
    if probability >= 0.999:
        return "≥ 99.9 %"
    return (
        f"{math.floor(1000 * probability) / 10:.1f} %" if probability >= 0.99 else f"{math.floor(100 * probability)} %"
    )


def agreement_numbers(comparison: Comparison) -> Numbers:
    """Kendall's τ between every two measures."""
    tau = comparison.agreement()
    return Numbers(("measure", *tau), tuple((name, *row.values()) for name, row in tau.items()))


def comparison_page(comparison: Comparison) -> str:
    """The page of all reports, with the rankings, the probabilities and the agreement of the measures as a section."""
    pairs = list(combinations(comparison.names, 2))
    columns = ("measure", *(f"{plain_text(a)} before {plain_text(b)}" for a, b in pairs))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (name, *(comparison.probability(name, a, b) for a, b in pairs)) for name in comparison.measures
    )
    ranks: tuple[tuple[Cell, ...], ...] = tuple((n, _ranking_text(comparison, n)) for n in comparison.measures)
    agreement = (
        (("Kendall's τ between measures, undecided pairs as ties", agreement_numbers(comparison)),)
        if len(comparison.names) >= _FEWEST
        else ()
    )
    section = Section(
        "ranking",
        "Who is flatter, and how sure that is" if comparison.comparable else "Whose values are smaller, and how sure that is",
        (_capitalized(_probability_words(comparison)) + ".", _capitalized(losses_line(comparison)) + "."),
        (),
        ((_capitalized(_heading(comparison)), Numbers(("measure", "ranking"), ranks)),
         (f"Probability that the first {'is flatter than' if comparison.comparable else 'has a smaller value than'} the second", Numbers(columns, rows)),
         *agreement),
    )  # fmt: skip
    names = ", ".join(map(plain_text, comparison.names))
    title = f"{'Which minimum is flatter' if comparison.comparable else 'Not comparable'}: {names}"
    said = comparison.statements()
    if not comparison.comparable:
        said = [*not_comparable_words(comparison), *said[1:]]  # the headline in a sentence of its own
    return report_page(comparison.reports, title=title, audit=section, said=[*map(plain_text, said)])


def _capitalized(sentence: str) -> str:
    """With a capital first; names of networks stay as they are."""
    return sentence[:1].upper() + sentence[1:]


def comparison_text(comparison: Comparison) -> str:
    """The table as plain text."""
    return render(ranking_table(comparison))


register(Comparison, text=comparison_text, page=comparison_page)
