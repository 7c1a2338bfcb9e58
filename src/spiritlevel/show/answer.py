"""The answer in a few sentences, computed from values and their errors and from nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spiritlevel.errors import losses_differ
from spiritlevel.measuring.minimum import doubts_of, not_minima
from spiritlevel.measuring.order import LARGER_IS_FLATTER, order, rounding_of
from spiritlevel.measuring.record import Records, is_invariant, is_plain, record_of
from spiritlevel.measuring.registry import known_records
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.value import Value, visible_error
from spiritlevel.show.numbers import plain_text, significant, times, with_error
from spiritlevel.show.references import scale_words

# Values that their errors do not order and that are closer than this, relative to their size, are called the same; the
# sentence states how close they are.
_SAME = 1e-3
_PLAIN_NAMES = {"hessian_spectral_norm": "plain Hessian norm", "hessian_trace": "plain Hessian trace"}
_SPELLINGS = {"kappa": "κ", "rho": "ρ", "hessian": "Hessian", "riemannian": "Riemannian", "fisher": "Fisher"}


@dataclass(frozen=True)
class Verdict:
    """How two models compare by a set of measures: the names by outcome.

    Attributes:
        first: The measures by which the first is flatter by more than the errors.
        second: The same for the second.
        undecided: A difference within the errors.
        same: Those of `undecided` that are equal to a tenth of a percent.
        spread: The largest relative difference among `same`.
    """

    first: tuple[str, ...]
    second: tuple[str, ...]
    undecided: tuple[str, ...]
    same: tuple[str, ...]
    spread: float

    @property
    def count(self) -> int:
        return len(self.first) + len(self.second) + len(self.undecided)

    @property
    def all_same(self) -> bool:
        return self.count > 0 and len(self.same) == self.count


def answer(reports: Mapping[str, Report], records: Records | None = None) -> list[str]:
    """What the numbers say, in sentences: of one report its state, of several which minimum is flatter and for whom."""
    known = known_records(records)
    if len(reports) == 1:
        ((name, report),) = reports.items()
        headline, *rest = _single(name, report, known)
        doubted = [f"{doubt[0].upper()}{doubt[1:]}." for doubt in doubts_of(report)]
        return [headline, *doubted, *rest, *_convergence(reports)]
    return [*_several(reports, known), *_convergence(reports), *_cautions(reports, known)]


def compare(first: Value, second: Value, rounding: float = 0.0) -> str | None:
    """`first` or `second`, whichever is flatter; `undecided`, or None where the two cannot be compared."""
    if not (math.isfinite(first.value) and math.isfinite(second.value)):
        return None
    found = order(first, second, rounding=rounding)
    if found == 0:
        return "undecided"
    return "first" if (found > 0) == (first.name in LARGER_IS_FLATTER) else "second"


def difference(a: float, b: float) -> float:
    """|a − b| relative to the larger of the two."""
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0


def verdict(first: Report, second: Report, names: Iterable[str]) -> Verdict:
    """The comparison of two reports by the measures that both have."""
    shared = [name for name in names if name in first and name in second]
    rounding = rounding_of(first, second)
    outcome = {name: compare(first[name], second[name], rounding) for name in shared}
    first_wins, second_wins, undecided = (
        tuple(name for name in shared if outcome[name] == key) for key in ("first", "second", "undecided")
    )
    apart = {name: difference(first[name].value, second[name].value) for name in undecided}
    same = {name: relative for name, relative in apart.items() if relative <= _SAME}
    return Verdict(first_wins, second_wins, undecided, tuple(same), max(same.values(), default=0.0))


def invariant_names(reports: Mapping[str, Report], records: Records) -> list[str]:
    """The measures that survive the rescaling of layers and are more than lower bounds, in order of appearance."""
    return [name for name, v in _all_values(reports).items() if is_invariant(v, records) and not v.lower_bound]


def plain_names(reports: Mapping[str, Report], records: Records) -> list[str]:
    """The measures that survive no rescaling and are more than lower bounds, the Hessian norm before the rest."""
    names = [name for name, v in _all_values(reports).items() if is_plain(v, records) and not v.lower_bound]
    return sorted(names, key=lambda name: list(_PLAIN_NAMES).index(name) if name in _PLAIN_NAMES else len(_PLAIN_NAMES))


def spoken(name: str) -> str:
    """A measure's name in a sentence.

    >>> spoken("kappa_trace_sum"), spoken("hessian_spectral_norm"), spoken("riemannian_sharpness")
    ('κ trace sum', 'plain Hessian norm', 'Riemannian sharpness')
    """
    words = (_SPELLINGS.get(word, word) for word in plain_text(name).split("_"))
    return _PLAIN_NAMES.get(name, " ".join(words).replace("Fisher rao", "Fisher–Rao"))


def _all_values(reports: Mapping[str, Report]) -> dict[str, Value]:
    return {name: value for report in reports.values() for name, value in report.values.items()}


def _single(name: str, report: Report, records: Records) -> list[str]:
    who = _quoted(name) if name else "The network"
    samples = report.problem.get("samples")
    over = f" over {samples:,} sample{'' if samples == 1 else 's'}" if isinstance(samples, int) else ""
    loss = f"at a loss of {significant(report.loss, 4)}{over}"
    chosen = [name for name in invariant_names({name: report}, records) if math.isfinite(report[name].value)]
    chosen.sort(key=lambda name: (-_strength(report[name], records), not report[name].exact))
    if not chosen:
        return [f"{who} was measured by {_count(len(report), 'measure')} {loss}{_without_value(report, records)}."]
    shown = chosen[:2]
    values = _listed([f"a {spoken(name)} of {_amount(report[name])}" for name in shown])
    scales = "layers and neurons" if all(_strength(report[name], records) > 1 for name in shown) else "layers"
    told = {name: words for name in shown if (words := scale_words(report, name))}
    return [
        f"{who} has {values}, whatever the scale of its {scales}.",
        *(f"For scale, the {spoken(name)} of well-known networks: {words}." for name, words in list(told.items())[:1]),
        f"Measured by {_count(len(report), 'measure')} {loss}.",
    ]


def _without_value(report: Report, records: Records) -> str:
    """Why no value that survives a rescaling can be told: there is none, only bounds, or none that is defined here."""
    surviving = {name: value for name, value in report.values.items() if is_invariant(value, records)}
    if not surviving:
        return ", which does not survive a rescaling of its weights" if len(report) == 1 else (
            ", none of which survives a rescaling of its weights"
        )  # fmt: skip
    bounds = [f"a {spoken(n)} of at least {_amount(v)}" for n, v in surviving.items() if v.lower_bound and v.available]
    if bounds:
        return f"; of what survives a rescaling of its weights, only lower bounds are known: {_listed(bounds)}"
    names = _listed([spoken(name) for name in surviving])
    return f"; what survives a rescaling of its weights has no finite value here: {names}"


def _amount(value: Value) -> str:
    """Value and error, kept together at the end of a line."""
    return with_error(value.value, visible_error(value)).replace(" ", "\u00a0")


def _strength(value: Value, records: Records) -> int:
    record = record_of(value, records)
    return 0 if record is None else len(record.invariant_under)


def _several(reports: Mapping[str, Report], records: Records) -> list[str]:
    invariant, plain = invariant_names(reports, records), plain_names(reports, records)
    twins = _twins(reports, invariant, records)
    distinct = [name for name in reports if name not in twins]
    sentences = []
    if len(distinct) == 2:
        sentences += _pair(distinct[0], distinct[1], reports, invariant, plain)
    elif len(distinct) > 2:
        sentences += _ranking({name: reports[name] for name in distinct}, invariant)
    sentences += [_twin(name, original, reports, invariant, plain) for name, original in twins.items()]
    return sentences


def _twins(reports: Mapping[str, Report], invariant: Sequence[str], records: Records) -> dict[str, str]:
    """Model → the earlier model that every measure with the widest claim takes for the same.

    Where measures survive the rescaling of neurons, those decide: the others may rightly see a rescaled neuron.
    """
    values = _all_values(reports)
    widest = [name for name in invariant if _strength(values[name], records) > 1] or list(invariant)
    found: dict[str, str] = {}
    for i, name in enumerate(names := list(reports)):
        for earlier in names[:i]:
            if earlier not in found and verdict(reports[earlier], reports[name], widest).all_same:
                found[name] = earlier
                break
    return found


def _twin(
    name: str, original: str, reports: Mapping[str, Report], invariant: Sequence[str], plain: Sequence[str]
) -> str:
    same = verdict(reports[original], reports[name], invariant)
    closeness = "exactly" if same.spread == 0 else f"to {significant(same.spread, 1)} relative"
    who = _every(same.count) if same.all_same else "every measure that survives the rescaling of neurons"
    sentence = f"{_quoted(name)} is the same as {_quoted(original)} by {who}, {closeness}"
    if not same.all_same:
        rest = [spoken(n) for n in (*same.first, *same.second, *same.undecided) if n not in same.same]
        sentence += f"; {_listed(rest)} {'differs' if len(rest) == 1 else 'differ'}"
    moved = _moved(reports[original], reports[name], plain)
    return f"{sentence}{f'; its {moved}' if moved else ''}."


def _moved(original: Report, other: Report, plain: Sequence[str]) -> str:
    """How the first plain measure that differs does: `plain Hessian norm is 10⁶ times larger`."""
    found = verdict(original, other, plain)
    for name in (name for name in plain if name in (*found.first, *found.second)):
        a, b = original[name].value, other[name].value
        if a > 0 and b > 0:
            return f"{spoken(name)} is {times(max(a, b) / min(a, b))} {'larger' if b > a else 'smaller'}"
    return ""


def _pair(a: str, b: str, reports: Mapping[str, Report], invariant: Sequence[str], plain: Sequence[str]) -> list[str]:
    by_invariant = verdict(reports[a], reports[b], invariant)
    by_plain = verdict(reports[a], reports[b], plain)
    if by_invariant.second and not by_invariant.first:
        a, b = b, a
        by_invariant, by_plain = verdict(reports[a], reports[b], invariant), verdict(reports[a], reports[b], plain)
    if not by_invariant.count:
        return ["No invariant measure was computed for both models, so nothing here says which minimum is flatter."]
    if by_invariant.first and by_invariant.second:
        return _disagreement(a, b, by_invariant)
    if not by_invariant.first:
        return [f"No invariant measure can tell {_quoted(a)} and {_quoted(b)} apart within its error."]
    return [_agreement(a, b, by_invariant) + _plain_clause(by_plain)]


def _agreement(a: str, b: str, by_invariant: Verdict) -> str:
    flatter = f"{_quoted(a)} is flatter than {_quoted(b)}"
    rest = by_invariant.count - len(by_invariant.first)
    if rest == 0:
        return f"By {_every(by_invariant.count)} {flatter}"
    told = "the other one sees no difference" if rest == 1 else f"the other {rest} see no difference"
    return (
        f"By {len(by_invariant.first)} of {by_invariant.count} invariant measures {flatter} ({told} beyond the errors)"
    )


def _plain_clause(by_plain: Verdict) -> str:
    """What the plain measures say beside invariant ones for which the first model is flatter."""
    if by_plain.second and not by_plain.first:
        subject = spoken(by_plain.second[0]) if len(by_plain.second) == 1 else "plain measures"
        return f"; the {subject} {'says' if len(by_plain.second) == 1 else 'say'} the opposite."
    if by_plain.second:
        names = _listed([spoken(name) for name in by_plain.second])
        return f"; of the plain measures, {names} {'says' if len(by_plain.second) == 1 else 'say'} the opposite."
    return "; the plain measures agree." if by_plain.first and set(by_plain.undecided) <= set(by_plain.same) else "."


def _disagreement(a: str, b: str, by_invariant: Verdict) -> list[str]:
    """How many measures stand on each side, and which on the smaller."""
    sides = sorted(((a, by_invariant.first), (b, by_invariant.second)), key=lambda side: -len(side[1]))
    (more, most), (less, few) = sides
    counts = f"{_quoted(more)} is flatter by {len(most)} of {by_invariant.count}, {_quoted(less)} by {len(few)}"
    return [
        f"The invariant measures disagree: {counts}.",
        f"{_quoted(less)} is the flatter one by {_listed([spoken(name) for name in few])}.",
    ]


def _ranking(reports: Mapping[str, Report], invariant: Sequence[str]) -> list[str]:
    shared = [name for name in invariant if all(name in r and math.isfinite(r[name].value) for r in reports.values())]
    if not shared:
        return ["No invariant measure was computed for all models, so nothing here ranks their minima."]
    order = sorted(reports, key=lambda model: reports[model][shared[0]].value)
    steps = [verdict(reports[a], reports[b], shared) for a, b in pairwise(order)]
    if all(len(step.first) == step.count for step in steps):
        ranked = ", ".join(map(_quoted, order))
        return [f"By {_every(len(shared))} the order from flattest to sharpest is {ranked}."]
    return [_flattest(reports, shared)]


def _flattest(reports: Mapping[str, Report], shared: Sequence[str]) -> str:
    winners: dict[str, int] = {}
    for name in shared:
        best = min(reports, key=lambda model: reports[model][name].value)
        if all(verdict(reports[best], reports[model], [name]).first for model in reports if model != best):
            winners[best] = winners.get(best, 0) + 1
    if len(winners) == 1 and sum(winners.values()) == len(shared):
        return f"By {_every(len(shared))} {_quoted(next(iter(winners)))} is the flattest; they do not settle the order of the others."
    if not winners:
        return "No invariant measure tells one model from all others beyond its error."
    said = _listed([f"{_quoted(model)} by {count} of {len(shared)}" for model, count in winners.items()])
    return f"The invariant measures disagree on the order; the flattest is {said}."


def _convergence(reports: Mapping[str, Report]) -> list[str]:
    open_ends = {
        model: [name for name, value in report.values.items() if value.available and not value.converged]
        for model, report in reports.items()
    }
    of = sum(value.available for report in reports.values() for value in report.values.values())
    if not of:
        return ["No measure is defined here: the notes say why."]
    if not any(open_ends.values()):
        return ["Every value reached the tolerance asked for."]
    names = dict.fromkeys(name for members in open_ends.values() for name in members)
    total = sum(len(members) for members in open_ends.values())
    return [f"{total} of {of} values did not reach the tolerance: {_listed([spoken(name) for name in names])}."]


def _cautions(reports: Mapping[str, Report], records: Records) -> list[str]:
    """Where the problems differ, or are known from few samples only, a comparison of their numbers says less."""
    found = losses_differ({plain_text(name): report.loss for name, report in reports.items()})
    found += not_minima({plain_text(name): report for name, report in reports.items()})
    for key, words in (("loss_function", "losses"), ("samples", "numbers of samples")):
        seen = list(dict.fromkeys(str(report.problem[key]) for report in reports.values() if key in report.problem))
        if len(seen) > 1:
            listed = ", ".join(map(plain_text, seen))
            found.append(f"The models were measured with different {words} ({listed}): compare with care.")
    twins = _twins(reports, invariant_names(reports, records), records)
    if len(reports) - len(twins) > 1 and not _sampled(reports):
        found.append("An order is about these data only: the errors leave out that of a finite sample.")
    return found


def _sampled(reports: Mapping[str, Report]) -> bool:
    """Whether the errors hold what a finite sample leaves open."""
    values = (value for report in reports.values() for value in report.values.values())
    return {value.error_kind for value in values if math.isfinite(value.value)} <= {"sampling", "lower bound"}


def _every(count: int) -> str:
    return "the one invariant measure" if count == 1 else "every invariant measure"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _quoted(name: str) -> str:
    return f"“{plain_text(name)}”"


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
