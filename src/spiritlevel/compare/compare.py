"""Several trained networks side by side: who is flatter by which measure, how sure that is, and which measures agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, ClassVar

import torch
from torch import nn

from spiritlevel.errors import SpiritLevelError, losses_differ
from spiritlevel.guarantees.parts import PartValues, random_parts, sampling_error, values_on_parts, voting
from spiritlevel.measuring.minimum import not_minima
from spiritlevel.measuring.order import LARGER_IS_FLATTER, LEVEL, Sampling, order, probability_below, rounding_of
from spiritlevel.measuring.record import Measure, is_invariant
from spiritlevel.measuring.registry import ALL, resolve_measures
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.run import measure
from spiritlevel.presenting import Shown
from spiritlevel.problem.batches import Data
from spiritlevel.problem.losses import Loss, resolve_loss
from spiritlevel.saved import Format, Saved, json_ready, numbers

# More networks than this are summed up instead of listed pair by pair.
_MOST_LISTED = 4


@dataclass(frozen=True)
class Comparison(Saved, Shown):
    """How several networks rank by every measure on the same data.

    Attributes:
        reports: Network's name → its report.
        confidence: An ordering is decided where its probability is at least this, whatever the values within their bounds.
        parts: Network's name → measure → its values on the parts of the data, from which the sampling error comes.
            Empty where there is none.
        no_sampling_error: Why there is no sampling error; empty where there is one.

    A probability says what the errors leave open: bounds are taken as uniform, standard errors as normal, the sampling
    error as Student's t. With `parts` it is about all data of the same kind, as if drawn independently of the
    networks; without, about these data only.

    >>> import tempfile
    >>> flat, sharp = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.constant_(flat.weight, 1.0), nn.init.constant_(sharp.weight, 2.0)
    >>> data, name = (torch.eye(2), torch.zeros(2, 1)), "kappa_trace_sum"
    >>> found = compare({"flat": flat, "sharp": sharp}, data, "mse", measures=[name], sampling=False)
    >>> found.ranking(name), found.probability(name, "flat", "sharp"), found.verdict(name, "flat", "sharp")
    (['flat', 'sharp'], 1.0, 1)
    >>> found.undecidable(name), found.agreement(), len(found.statements()) > 0
    (False, {'kappa_trace_sum': {'kappa_trace_sum': 1.0}}, True)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found.save(f"{folder}/comparison.json")
    ...     found.to_html(f"{folder}/comparison.html")
    ...     Comparison.load(f"{folder}/comparison.json").ranking(name)
    ['flat', 'sharp']
    >>> Comparison.from_dict(found.to_dict()).ranking(name)
    ['flat', 'sharp']
    """

    _format: ClassVar = Format("spiritlevel-comparison-1", "comparison")

    reports: Mapping[str, Report]
    confidence: float = LEVEL
    parts: PartValues = field(default_factory=dict)
    no_sampling_error: str = "it was not asked for"

    @property
    def names(self) -> list[str]:
        """The names of the networks, in the order given."""
        return list(self.reports)

    @property
    def measures(self) -> list[str]:
        """The measures that every network has a finite value of."""
        first = next(iter(self.reports.values()))
        return [
            name
            for name in first
            if all(name in report and math.isfinite(report[name].value) for report in self.reports.values())
        ]

    def ranking(self, name: str) -> list[str]:
        """The networks by this measure, the flattest first."""
        sign = -1 if name in LARGER_IS_FLATTER else 1
        return sorted(self.names, key=lambda model: sign * self.reports[model][name].value)

    @property
    def comparable(self) -> bool:
        """Whether no network's loss is more than twice another's, or all were measured at the same loss (`at_loss`)."""
        if all(report.problem.get("at_loss") is not None for report in self.reports.values()):
            return True
        return not losses_differ({name: report.loss for name, report in self.reports.items()})

    def undecidable(self, name: str) -> bool:
        """Whether the values are lower bounds found by ascent, which cannot say whose maximum is larger."""
        return any(report[name].lower_bound for report in self.reports.values())

    def probability(self, name: str, first: str, second: str) -> float:
        """The probability, from the errors, that `first` is flatter than `second` by this measure.

        nan where the values are lower bounds, which leave it open.
        """
        if self.undecidable(name):
            return math.nan
        a, b = self.reports[first], self.reports[second]
        found = probability_below(a[name], b[name], rounding_of(a, b), self._sampling(name, first, second))
        return 1 - found if name in LARGER_IS_FLATTER else found

    def _sampling(self, name: str, first: str, second: str) -> Sampling | None:
        if not self.parts:
            return None
        whole = self.reports[second][name].value - self.reports[first][name].value
        both = (self.parts[model].get(name, (math.nan, math.nan)) for model in (first, second))
        return sampling_error(whole, [b - a for a, b in zip(*both, strict=True)])

    def verdict(self, name: str, first: str, second: str) -> int:
        """1 where `first` is flatter by this measure, −1 where `second` is, 0 where it is not decided."""
        a, b = self.reports[first], self.reports[second]
        sampling = self._sampling(name, first, second)
        found = order(a[name], b[name], level=self.confidence, rounding=rounding_of(a, b), sampling=sampling)
        return found if name in LARGER_IS_FLATTER else -found

    def agreement(self) -> dict[str, dict[str, float]]:
        """Kendall's τ between every two measures, over the pairs of networks; an undecided pair is a tie.

        τ = Σ v w / √(Σ v² Σ w²) with v, w the verdicts of the two measures; nan where one of them decides nothing.
        """
        pairs = list(combinations(self.names, 2))
        verdicts = {name: [self.verdict(name, a, b) for a, b in pairs] for name in self.measures}
        return {
            name: {other: _tau(mine, theirs) for other, theirs in verdicts.items()} for name, mine in verdicts.items()
        }

    def statements(self) -> list[str]:
        """What is decided and what is not, in sentences."""
        return statements(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and strings: what `save` writes."""
        pairs = list(combinations(self.names, 2))
        probabilities = {
            name: [{"first": a, "second": b, "first_is_flatter": self.probability(name, a, b)} for a, b in pairs]
            for name in self.measures
        }
        return self._format.document(
            {
                "confidence": self.confidence,
                "statements": self.statements(),
                "rankings": {name: self.ranking(name) for name in self.measures},
                "probabilities": json_ready(probabilities, null=True),
                "agreement": json_ready(self.agreement(), null=True),
                "no_sampling_error": self.no_sampling_error,
                "parts": json_ready(self.parts, null=True),
                "reports": self.reports,
            }
        )

    @classmethod
    def _from_parts(cls, saved: dict[str, Any]) -> Comparison:
        reports = {name: Report.from_dict(entry) for name, entry in saved["reports"].items()}
        parts = {
            name: {key: tuple(values) for key, values in each.items()}
            for name, each in numbers(saved.get("parts", {})).items()
        }
        return cls(reports, saved["confidence"], parts, saved.get("no_sampling_error", "it was not saved"))


def compare(
    models: Mapping[str, nn.Module],
    data: Any,
    loss: str | Callable[..., Any] | Loss = "cross_entropy",
    *,
    measures: str | Iterable[str | Measure] | None = None,
    confidence: float = LEVEL,
    tolerance: float = 1e-3,
    seed: int = 0,
    progress: bool | Callable[[str, float], None] = False,
    dtype: torch.dtype | None = None,
    fix_data: bool = False,
    sampling: bool = True,
) -> Comparison:
    """Rank several trained networks by every measure, on the same data, and say how sure every ordering is.

    The data are a sample, and more of them could reverse an order. So every network is measured again on the same ten
    random parts of the data, which together cost about as much as measuring it whole, and the spread of the differences
    over the parts is the sampling error of every order. Measures that are lower bounds found by ascent decide nothing.

    Args:
        models: Name → network, at least two.
        data, loss, measures, tolerance, seed, progress, dtype, fix_data: As for `measure`.
        confidence: The probability from which on an ordering counts as decided.
        sampling: Whether to include the sampling error. Without it orders are about these very data.

    >>> flat, sharp = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    >>> with torch.no_grad():
    ...     _ = flat.weight.fill_(1.0), sharp.weight.fill_(2.0)
    >>> both = {"flat": flat, "sharp": sharp}
    >>> found = compare(both, (torch.eye(2).repeat(20, 1), torch.zeros(40, 1)), "mse", measures=["kappa_trace_sum"])
    >>> found.ranking("kappa_trace_sum"), found.probability("kappa_trace_sum", "flat", "sharp")  # κ grows with ‖w‖²
    (['flat', 'sharp'], 1.0)
    """
    if not isinstance(models, Mapping) or len(models) < 2:
        came = f"{len(models)}" if isinstance(models, Mapping) else type(models).__name__
        raise SpiritLevelError(f"compare needs at least two networks as a dict of name → model, got {came}")
    if not 0.5 < confidence < 1:
        raise SpiritLevelError(f"confidence must be a number between 0.5 and 1, got {confidence!r}")
    chosen, fixed = resolve_measures(measures), resolve_loss(loss)
    with torch.random.fork_rng():  # a loader draws a seed from the global generator at every pass
        source = Data(data, fix=fix_data)

    def taken(name: str, part: Data, wanted: Sequence[Measure], said: str) -> Report:
        told = _told(progress, said)
        model = named[name]
        return measure(model, part, fixed, measures=wanted, tolerance=tolerance, seed=seed, progress=told, dtype=dtype)

    named = {str(name): model for name, model in models.items()}
    reports = {name: taken(name, source, chosen, name) for name in named}
    if not sampling:
        return Comparison(reports, confidence)
    wanted = voting(chosen, list(reports.values()))
    if not wanted:
        return Comparison(reports, confidence, {}, "no measure here decides anything")
    parts, reason = values_on_parts(
        random_parts(source, fixed, seed),
        list(named),
        lambda name, part, index: taken(name, part, wanted, f"{name}, part {index} of the data"),
    )
    return Comparison(reports, confidence, parts, reason)


def _told(progress: bool | Callable[[str, float], None], name: str) -> bool | Callable[[str, float], None]:
    if isinstance(progress, bool):
        return progress
    return lambda what, passes: progress(f"{name}: {what}", passes)


def _tau(first: Sequence[int], second: Sequence[int]) -> float:
    size = math.sqrt(sum(v * v for v in first) * sum(w * w for w in second))
    return sum(v * w for v, w in zip(first, second, strict=True)) / size if size else math.nan


# --- what is decided ---------------------------------------------------------------------------------------------


def invariant(comparison: Comparison, name: str) -> bool:
    """Whether the measure claims to survive the rescaling of layers."""
    return is_invariant(next(iter(comparison.reports.values()))[name], ALL)


def statements(comparison: Comparison) -> list[str]:
    """What is decided and what is not, in sentences: by the invariant measures first, what qualifies that, and last
    what the plain ones say."""
    deciding = [name for name in comparison.measures if not comparison.undecidable(name)]
    trusted = [name for name in deciding if invariant(comparison, name)]
    plain = [name for name in deciding if name not in trusted]
    said = [] if comparison.comparable else [" ".join(not_comparable_words(comparison))]
    if not trusted:
        said.append(
            "No measure here survives a rescaling of the weights, so nothing below says which minimum is flatter."
            if plain
            else "No measure here decides which minimum is flatter."
        )
    judges, kind = (trusted, "invariant") if trusted else (plain, "plain")
    pairs = list(combinations(comparison.names, 2))
    if judges and len(comparison.names) <= _MOST_LISTED:
        said += [_pair_words(comparison, a, b, judges, kind) for a, b in pairs]
    elif judges:
        said.append(_summary_words(comparison, pairs, judges, kind))
    said += [*not_minima(comparison.reports), *_sampling_words(comparison)]
    if trusted and plain:
        said += _plain_words(comparison, pairs, trusted, plain)
    return said + _lower_bound_words(comparison)


def not_comparable_words(comparison: Comparison) -> tuple[str, str]:
    """The headline where networks sit at different losses, and what to do."""
    losses = ", ".join(f"{each.loss:.3g} for “{name}”" for name, each in comparison.reports.items())
    return (
        f"Not comparable: the losses differ ({losses}).",
        "Curvature often shrinks with the loss: compare networks trained to the same loss, or measurements taken at the same "
        "loss. Below is only whose values are smaller.",
    )


def _sampling_words(comparison: Comparison) -> list[str]:
    if not comparison.no_sampling_error:
        return []
    return [
        "These orders are about these data only: the error of a finite sample is not included "
        f"({comparison.no_sampling_error}), and more data may reverse them."
    ]


def _lower_bound_words(comparison: Comparison) -> list[str]:
    names = [name for name in comparison.measures if comparison.undecidable(name)]
    if not names:
        return []
    return [f"Undecided, because the values are lower bounds found by ascent: {', '.join(names)}."]


def _pair_words(comparison: Comparison, a: str, b: str, judges: Sequence[str], kind: str) -> str:
    verdicts = {name: comparison.verdict(name, a, b) for name in judges}
    wins = {1: [n for n, v in verdicts.items() if v == 1], -1: [n for n, v in verdicts.items() if v == -1]}
    open_ = [name for name, verdict in verdicts.items() if verdict == 0]
    if len(open_) == len(judges):
        whom = f"any of the {len(judges)} {kind} measures" if len(judges) > 1 else f"the one {kind} measure"
        return f"“{a}” and “{b}”: not decided by {whom}."
    if not wins[-1] or not wins[1]:
        flatter, other = (a, b) if wins[1] else (b, a)
        count = len(wins[1] or wins[-1])
        share = f"{count} of {len(judges)}" if open_ else f"all {count}" if count > 1 else "the one"
        plural = "s" if len(judges) > 1 else ""
        rest = f"; not decided: {', '.join(open_)}" if open_ else ""
        if not comparison.comparable:
            return f"“{flatter}” has smaller values than “{other}” by {share} {kind} measure{plural}{rest}."
        return f"“{flatter}” is flatter than “{other}” by {share} {kind} measure{plural}{rest}."
    rest = f", {len(open_)} do not decide" if open_ else ""
    which = "Flatter" if comparison.comparable else "Smaller"
    return (
        f"“{a}” and “{b}”: the measures disagree. {which} is “{a}” by {', '.join(wins[1])}; “{b}” by "
        f"{', '.join(wins[-1])}{rest}."
    )


def _summary_words(comparison: Comparison, pairs: Sequence[tuple[str, str]], judges: Sequence[str], kind: str) -> str:
    outcomes = [{comparison.verdict(name, a, b) for name in judges} for a, b in pairs]
    agreed = sum(outcome in ({1}, {-1}) for outcome in outcomes)
    opposed = sum({1, -1} <= outcome for outcome in outcomes)
    firsts = [comparison.ranking(name)[0] for name in judges]
    flattest = max(dict.fromkeys(firsts), key=firsts.count)
    which = "Flattest" if comparison.comparable else "Smallest"
    return (
        f"Of {len(pairs)} pairs of networks {agreed} are decided alike by all {len(judges)} {kind} measures, on {opposed} "
        f"the measures disagree, and {len(pairs) - agreed - opposed} are not decided by all of them. {which} by "
        f"{firsts.count(flattest)} of {len(judges)} is “{flattest}”."
    )


def _plain_words(
    comparison: Comparison, pairs: Sequence[tuple[str, str]], trusted: Sequence[str], plain: Sequence[str]
) -> list[str]:
    """Where a plain measure says the opposite of every invariant one that decides."""
    opposed = []
    for a, b in pairs:
        decisions = {comparison.verdict(name, a, b) for name in trusted} - {0}
        if len(decisions) == 1:
            decision = decisions.pop()
            opposed += [f"{name} (“{a}”, “{b}”)" for name in plain if comparison.verdict(name, a, b) == -decision]
    if not opposed:
        return []
    shown = ", ".join(opposed[:3]) + (f" and {len(opposed) - 3} more" if len(opposed) > 3 else "")
    return [f"The opposite order comes out by measures that a rescaling of the weights can move at will: {shown}."]


__all__ = ["Comparison", "compare", "probability_below"]
