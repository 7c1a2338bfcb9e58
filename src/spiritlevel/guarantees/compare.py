"""Several trained networks side by side: who is flatter by which measure, how sure that is, and which measures agree."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import nn

from spiritlevel.batches import Data
from spiritlevel.errors import SpiritLevelError
from spiritlevel.losses import Loss
from spiritlevel.measures import ALL
from spiritlevel.measures.record import Measure
from spiritlevel.measures.run import measure
from spiritlevel.result import Report, Value, write_whole

FORMAT = "spiritlevel-comparison-1"
LARGER_IS_FLATTER = frozenset({"volume_flatness"})

# What rounding may do to a value that is exact otherwise, relative to its size.
_ROUNDING = {"float32": 1e-4, "float64": 1e-9}
# More networks than this are summed up instead of listed pair by pair.
_MOST_LISTED = 4


@dataclass(frozen=True)
class Comparison:
    """How several networks rank by every measure on the same data.

    Attributes:
        reports: Network's name → its report.
        confidence: An ordering is decided where its probability is at least this.

    A probability says what the error bars leave open: bounds are taken as uniform, standard errors as normal. It says
    nothing about other data.
    """

    reports: Mapping[str, Report]
    confidence: float = 0.95

    @property
    def names(self) -> list[str]:
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

    def probability(self, name: str, first: str, second: str) -> float:
        """The probability, from the error bars, that `first` is flatter than `second` by this measure."""
        a, b = self.reports[first], self.reports[second]
        found = probability_below(a[name], b[name], max(_rounding(a), _rounding(b)))
        return 1 - found if name in LARGER_IS_FLATTER else found

    def verdict(self, name: str, first: str, second: str) -> int:
        """1 where `first` is flatter by this measure, −1 where `second` is, 0 where it is not decided."""
        probability = self.probability(name, first, second)
        return int(probability >= self.confidence) - int(1 - probability >= self.confidence)

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
        tau = self.agreement()
        return {
            "format": FORMAT,
            "confidence": self.confidence,
            "statements": self.statements(),
            "rankings": {name: self.ranking(name) for name in self.measures},
            "probabilities": {
                name: [{"first": a, "second": b, "first_is_flatter": self.probability(name, a, b)} for a, b in pairs]
                for name in self.measures
            },
            "agreement": {
                name: {other: None if math.isnan(value) else value for other, value in row.items()}
                for name, row in tau.items()
            },
            "reports": {name: report.to_dict() for name, report in self.reports.items()},
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Comparison:
        """The comparison that `to_dict` described."""
        if plain.get("format") != FORMAT:
            raise ValueError(f"not a saved comparison: its format is {plain.get('format')!r}, needed is {FORMAT!r}")
        return cls({name: Report.from_dict(entry) for name, entry in plain["reports"].items()}, plain["confidence"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON; a file that exists at `path` afterwards is whole."""
        write_whole(path, json.dumps(self.to_dict(), indent=1, allow_nan=False))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page."""
        from spiritlevel.report.guarantees import comparison_page

        write_whole(path, comparison_page(self))

    def __str__(self) -> str:
        from spiritlevel.report.guarantees import ranking_table
        from spiritlevel.report.tables import render

        return render(ranking_table(self))


def compare(
    models: Mapping[str, nn.Module],
    data: Any,
    loss: str | Callable[..., Any] | Loss = "cross_entropy",
    *,
    measures: str | Iterable[str | Measure] | None = None,
    confidence: float = 0.95,
    tolerance: float = 1e-3,
    seed: int = 0,
    progress: bool | Callable[[str, float], None] = False,
    dtype: torch.dtype | None = None,
    fix_data: bool = False,
) -> Comparison:
    """Rank several trained networks by every measure, on the same data, and say how sure every ordering is.

    Args:
        models: Name → network, at least two.
        data, loss, measures, tolerance, seed, progress, dtype, fix_data: As for `measure`.
        confidence: The probability from which on an ordering counts as decided.

    >>> flat, sharp = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    >>> with torch.no_grad():
    ...     _ = flat.weight.fill_(1.0), sharp.weight.fill_(2.0)
    >>> both = {"flat": flat, "sharp": sharp}
    >>> found = compare(both, (torch.eye(2), torch.zeros(2, 1)), "mse", measures=["kappa_trace_sum"])
    >>> found.ranking("kappa_trace_sum"), found.probability("kappa_trace_sum", "flat", "sharp")  # κ grows with ‖w‖²
    (['flat', 'sharp'], 1.0)
    """
    if not isinstance(models, Mapping) or len(models) < 2:
        came = f"{len(models)}" if isinstance(models, Mapping) else type(models).__name__
        raise SpiritLevelError(f"compare needs at least two networks as a dict of name → model, got {came}")
    if not 0.5 < confidence < 1:
        raise SpiritLevelError(f"confidence must be a number between 0.5 and 1, got {confidence!r}")
    chosen = list(measures) if isinstance(measures, Iterable) and not isinstance(measures, str) else measures
    with torch.random.fork_rng():  # a loader draws a seed from the global generator at every pass
        source = Data(data, fix=fix_data)
    reports = {
        str(name): measure(
            model,
            source,
            loss,
            measures=chosen,
            tolerance=tolerance,
            seed=seed,
            progress=_told(progress, str(name)),
            dtype=dtype,
        )
        for name, model in models.items()
    }
    return Comparison(reports, confidence)


def _told(progress: bool | Callable[[str, float], None], name: str) -> bool | Callable[[str, float], None]:
    if isinstance(progress, bool):
        return progress
    return lambda what, passes: progress(f"{name}: {what}", passes)


# --- how sure an ordering is -------------------------------------------------------------------------------------


def probability_below(first: Value, second: Value, rounding: float = 0.0) -> float:
    """The probability that the true value of `first` is below that of `second`, from their errors.

    A standard error is that of a normal distribution; a bound, and `rounding` relative to the larger value, is the half
    width of a uniform one.

    >>> a = Value("m", 1.0, 0.0, True, True, "exact sweep")
    >>> b = Value("m", 2.0, 1.0, False, True, "random probes of the Hessian")
    >>> probability_below(a, a), round(probability_below(a, b), 4)  # a tie; Φ(1)
    (0.5, 0.8413)
    """
    gap = second.value - first.value
    slack = rounding * max(abs(first.value), abs(second.value))
    widths = [slack, *(value.error for value in (first, second) if (value.exact or value.certified))]
    spread = math.hypot(*(value.error for value in (first, second) if not (value.exact or value.certified)))
    if abs(gap) > sum(widths) + 9 * spread:
        return 1.0 if gap > 0 else 0.0
    return _mean_of_normal(gap, [width for width in widths if width > 0], spread)


def _mean_of_normal(gap: float, widths: Sequence[float], spread: float, points: int = 40) -> float:
    """P(gap + Σ width·U + spread·Z > 0), the uniforms U on [−1, 1] by midpoints."""
    nodes = (2 * torch.arange(points, dtype=torch.float64) + 1) / points - 1
    total = torch.full((1,), gap, dtype=torch.float64)
    for width in widths:
        total = (total.unsqueeze(1) + width * nodes).reshape(-1)
    if spread == 0:
        return float(((total > 0).double() + 0.5 * (total == 0).double()).mean())
    return float(torch.special.ndtr(total / spread).mean())


def _rounding(report: Report) -> float:
    return _ROUNDING.get(str(report.problem.get("dtype")), 1e-9)


def _tau(first: Sequence[int], second: Sequence[int]) -> float:
    size = math.sqrt(sum(v * v for v in first) * sum(w * w for w in second))
    return sum(v * w for v, w in zip(first, second, strict=True)) / size if size else math.nan


# --- what is decided ---------------------------------------------------------------------------------------------


def invariant(name: str) -> bool:
    """Whether the measure claims to survive the rescaling of layers."""
    record = ALL.get(name.partition("(")[0])
    return record is not None and "layer" in record.invariant_under


def statements(comparison: Comparison) -> list[str]:
    """What is decided and what is not, in sentences: by the invariant measures first, then what the plain ones say."""
    trusted = [name for name in comparison.measures if invariant(name)]
    plain = [name for name in comparison.measures if not invariant(name)]
    said = []
    if not trusted:
        said.append(
            "No measure here survives a rescaling of the weights, so nothing below says which minimum is flatter."
        )
    judges, kind = (trusted, "invariant") if trusted else (plain, "plain")
    pairs = list(combinations(comparison.names, 2))
    if len(comparison.names) <= _MOST_LISTED:
        said += [_pair_words(comparison, a, b, judges, kind) for a, b in pairs]
    else:
        said.append(_summary_words(comparison, pairs, judges, kind))
    if trusted and plain:
        said += _plain_words(comparison, pairs, trusted, plain)
    return said + _loss_words(comparison)


def _pair_words(comparison: Comparison, a: str, b: str, judges: Sequence[str], kind: str) -> str:
    verdicts = {name: comparison.verdict(name, a, b) for name in judges}
    wins = {1: [n for n, v in verdicts.items() if v == 1], -1: [n for n, v in verdicts.items() if v == -1]}
    open_ = [name for name, verdict in verdicts.items() if verdict == 0]
    if len(open_) == len(judges):
        return f"“{a}” and “{b}”: not decided by any of the {len(judges)} {kind} measures."
    if not wins[-1] or not wins[1]:
        flatter, other = (a, b) if wins[1] else (b, a)
        count = len(wins[1] or wins[-1])
        share = f"all {count}" if not open_ else f"{count} of {len(judges)}"
        rest = f"; not decided: {', '.join(open_)}" if open_ else ""
        return f"“{flatter}” is flatter than “{other}” by {share} {kind} measures{rest}."
    rest = f", {len(open_)} do not decide" if open_ else ""
    return (
        f"“{a}” and “{b}”: the measures disagree. Flatter is “{a}” by {', '.join(wins[1])}; “{b}” by "
        f"{', '.join(wins[-1])}{rest}."
    )


def _summary_words(comparison: Comparison, pairs: Sequence[tuple[str, str]], judges: Sequence[str], kind: str) -> str:
    outcomes = [{comparison.verdict(name, a, b) for name in judges} for a, b in pairs]
    agreed = sum(outcome in ({1}, {-1}) for outcome in outcomes)
    opposed = sum({1, -1} <= outcome for outcome in outcomes)
    firsts = [comparison.ranking(name)[0] for name in judges]
    flattest = max(dict.fromkeys(firsts), key=firsts.count)
    return (
        f"Of {len(pairs)} pairs of networks {agreed} are decided alike by all {len(judges)} {kind} measures, on {opposed} "
        f"the measures disagree, and {len(pairs) - agreed - opposed} are not decided by all of them. Flattest by "
        f"{firsts.count(flattest)} of {len(judges)} is “{flattest}”."
    )


def _plain_words(
    comparison: Comparison, pairs: Sequence[tuple[str, str]], trusted: Sequence[str], plain: Sequence[str]
) -> list[str]:
    """Where a plain measure says the opposite of every invariant one that decides."""
    opposed = []
    for a, b in pairs:
        votes = {comparison.verdict(name, a, b) for name in trusted} - {0}
        if len(votes) == 1:
            vote = votes.pop()
            opposed += [f"{name} (“{a}”, “{b}”)" for name in plain if comparison.verdict(name, a, b) == -vote]
    if not opposed:
        return []
    shown = ", ".join(opposed[:3]) + (f" and {len(opposed) - 3} more" if len(opposed) > 3 else "")
    return [f"The opposite order comes out by measures that a rescaling of the weights can move at will: {shown}."]


def _loss_words(comparison: Comparison) -> list[str]:
    losses = {name: report.loss for name, report in comparison.reports.items()}
    low, high = min(losses, key=lambda n: losses[n]), max(losses, key=lambda n: losses[n])
    if losses[high] <= 2 * losses[low]:
        return []
    return [
        f"The losses differ: {losses[low]:.3g} for “{low}”, {losses[high]:.3g} for “{high}”. Curvature often shrinks with the "
        "loss, so compare networks trained to the same loss where you can."
    ]


__all__ = ["Comparison", "compare", "probability_below"]
