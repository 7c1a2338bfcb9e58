"""Which measure can be relied on: the sign test of Dziugaite et al. 2020, over all studies, levels and factors.

Two networks that differ in one factor are a pair. A measure errs on it if it calls the one with the smaller gap the sharper:
sign error (1 − sgn ΔC sgn ΔG)/2, a tie counting a half. Pairs of one study at one level that differ in the same two values of
the same factor are an *environment*; a measure is as robust as its worst one. A pair counts by how sure the sign of its gap is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product

import numpy as np
from scipy import special

from spiritlevel.study.csv_tables import csv_text
from spiritlevel.study.results import Axis, Cell, Quantities, Study, is_of_network
from spiritlevel.study.statistics import COMPETES, CONFIDENCE, RESAMPLES, Array, Estimate

# Sure pairs that an environment must hold, by their effective number (Σw)²/Σw²: fewer say nothing about a worst case.
FEWEST_PAIRS = 3.0
END = "end"
_Group = Callable[["Environment"], tuple[str, ...]]


@dataclass(frozen=True)
class Environment:
    """Where pairs are alike: the study (or its part), the mark of training, the factor and its two values."""

    study: str
    at: str
    factor: str
    first: str
    last: str

    def __str__(self) -> str:
        return f"{self.study}, {self.at}: {self.factor} {self.first} and {self.last}"


@dataclass(frozen=True)
class Pair:
    """Two networks that differ in one factor (and perhaps in their seed).

    Attributes:
        weight: How sure the sign of the gap is: 2Φ(|ΔG|/noise) − 1, 0 where it is a coin toss, 1 where it is certain.
        errors: Measure → its sign error.
        rescaled: The same after the random rescaling of both, where there is one.
        networks: Their names; a network at two levels is one network.
    """

    environment: Environment
    weight: float
    errors: Mapping[str, float]
    rescaled: Mapping[str, float]
    networks: tuple[str, str]


def pairs_of(studies: Sequence[Study]) -> list[Pair]:
    """All pairs of all studies, at the end of training and at every level of the train loss."""
    found: list[Pair] = []
    for study in studies:
        places = {END: study, **{str(mark): study.at(mark) for mark in study.marks if mark.kind == "loss"}}
        for at, there in places.items():
            for part, own in (there.parts or {"": there}).items():
                found += _pairs(own, f"{study.name}{f' {part}' if part else ''}", at)
    return found


def _pairs(study: Study, name: str, at: str) -> Iterator[Pair]:
    factors = [axis for axis in study.axes if not axis.is_seed]
    noise = gap_noise(study, factors)
    for axis in factors:
        others = [other for other in factors if other is not axis]
        settings: dict[tuple[int, ...], dict[int, list[Cell]]] = {}
        for cell in study.measured:
            place = tuple(other.level(cell) for other in others)
            settings.setdefault(place, {}).setdefault(axis.level(cell), []).append(cell)
        for levels in settings.values():
            for first, last in combinations(sorted(levels), 2):
                environment = Environment(name, at, axis.label, axis.text(first), axis.text(last))
                for one, other in product(levels[first], levels[last]):
                    yield _pair(environment, one, other, study.gap, noise)


def _pair(environment: Environment, one: Cell, other: Cell, gap: str, noise: float) -> Pair:
    away = other.gap(gap) - one.gap(gap)
    sure = 1.0 if math.isnan(noise) else 1.0 if noise == 0 else float(2 * special.ndtr(abs(away) / noise) - 1)
    weight = 0.0 if math.isnan(away) or away == 0 else sure
    named = (f"{environment.study}/{one.hash}", f"{environment.study}/{other.hash}")
    errors = _sign_errors(one.measures, other.measures, away)
    return Pair(environment, weight, errors, _sign_errors(one.rescaled, other.rescaled, away), named)


def _sign_errors(one: Quantities, other: Quantities, gap: float) -> dict[str, float]:
    """Measure → its sign error, of those that both networks have."""
    shared = [name for name in one if name in other and is_of_network(name)]
    return {name: sign_error(one[name].value, other[name].value, gap) for name in shared}


def sign_error(first: float, last: float, gap: float) -> float:
    """0 where the measure moves with the gap, 1 where it moves against it, a half for a tie; nan where it is not defined.

    >>> sign_error(1.0, 2.0, 0.1), sign_error(2.0, 1.0, 0.1), sign_error(1.0, 1.0, 0.1)
    (0.0, 1.0, 0.5)
    """
    if math.isnan(first) or math.isnan(last) or math.isnan(gap):
        return math.nan
    return float(1 - np.sign(last - first) * np.sign(gap)) / 2


def gap_noise(study: Study, factors: Sequence[Axis]) -> float:
    """The standard deviation by which chance moves the difference of two gaps.

    Chance is the seed, seen in networks of one setting, and for accuracies the finite test set. nan where neither is known:
    then every pair counts as sure.
    """
    groups: dict[tuple[int, ...], list[float]] = {}
    for cell in study.measured:
        groups.setdefault(tuple(axis.level(cell) for axis in factors), []).append(cell.gap(study.gap))
    spreads = [(len(gaps) - 1, float(np.var(gaps, ddof=1))) for gaps in groups.values() if len(gaps) > 1]
    freedom = sum(count for count, _ in spreads)
    parts = [sum(count * spread for count, spread in spreads) / freedom] if freedom else []
    if study.gap == "gap_accuracy":
        tested = [(cell.trained("test_accuracy"), cell.data.get("samples_test")) for cell in study.measured]
        known = [accuracy * (1 - accuracy) / count for accuracy, count in tested if count]
        parts += [float(np.mean(known))] if known else []
    return math.sqrt(2 * sum(parts)) if parts else math.nan


@dataclass(frozen=True)
class Standing:
    """How a measure stands in the sign test, in the environments that all measures share (`SignTest.common`).

    Attributes:
        mean: Its sign error, the mean over environments, with an interval from resampled networks.
        worst: Its largest sign error in one environment, which is `where`.
        better_than_chance: The share of environments in which it errs on fewer than half of the pairs.
        seeds: How often one pair of an environment says the opposite of most others: the mean over environments.
        levels: How often one level of training says the opposite of most others, for the same factor and values.
        studies: The same from study to study.
        rescaled: Its mean sign error at the end after the random rescaling, and before it in the same environments.
        elsewhere: Its mean sign error in environments that not all measures share, and in how many of them it is defined.
    """

    measure: str
    environments: int
    mean: Estimate
    worst: float
    where: Environment | None
    better_than_chance: float
    seeds: float
    levels: float
    studies: float
    rescaled: tuple[float, float]
    elsewhere: tuple[float, int]


class SignTest:
    """The sign test of all measures that are defined on enough pairs."""

    def __init__(self, studies: Sequence[Study], *, draws: int = RESAMPLES, seed: int = 0) -> None:
        self.pairs = [pair for pair in pairs_of(studies) if pair.weight > 0]
        self.draws, self.seed = draws, seed

    @cached_property
    def environments(self) -> tuple[Environment, ...]:
        """Those with enough sure pairs."""
        every: dict[Environment, list[float]] = {}
        for pair in self.pairs:
            every.setdefault(pair.environment, []).append(pair.weight)
        return tuple(
            e for e, weights in every.items() if sum(weights) ** 2 / sum(w * w for w in weights) >= FEWEST_PAIRS
        )

    @cached_property
    def _used(self) -> list[Pair]:
        known = set(self.environments)
        return [pair for pair in self.pairs if pair.environment in known]

    @cached_property
    def measures(self) -> tuple[str, ...]:
        """The measures that are defined on nine pairs in ten."""
        counts: dict[str, int] = {}
        for pair in self._used:
            for name, error in pair.errors.items():
                counts[name] = counts.get(name, 0) + math.isfinite(error)
        return tuple(name for name, count in counts.items() if count >= COMPETES * len(self._used))

    def errors(self, measure: str, *, rescaled: bool = False) -> dict[Environment, float]:
        """Environment → the weighted mean sign error of a measure."""
        sums: dict[Environment, tuple[float, float]] = {}
        for pair in self._used:
            error = (pair.rescaled if rescaled else pair.errors).get(measure, math.nan)
            if math.isfinite(error):
                above, below = sums.get(pair.environment, (0.0, 0.0))
                sums[pair.environment] = (above + pair.weight * error, below + pair.weight)
        return {environment: above / below for environment, (above, below) in sums.items()}

    @cached_property
    def common(self) -> tuple[Environment, ...]:
        """Those in which all measures are defined: only there can they be compared. All of them where there is none."""
        return _shared([self.errors(name) for name in self.measures]) or self.environments

    @cached_property
    def _common_rescaled(self) -> tuple[Environment, ...]:
        """Those in which all measures are defined both before and after the rescaling."""
        return _shared([self.errors(name, rescaled=after) for name in self.measures for after in (False, True)])

    def standings(self) -> tuple[Standing, ...]:
        """All measures, the smallest mean sign error first."""
        found = [self._standing(name) for name in self.measures]
        return tuple(sorted(found, key=lambda standing: (standing.mean.value, standing.worst)))

    def _standing(self, measure: str) -> Standing:
        everywhere, common = self.errors(measure), set(self.common)
        errors = {environment: error for environment, error in everywhere.items() if environment in common}
        elsewhere = [error for environment, error in everywhere.items() if environment not in common]
        where = max(errors, key=lambda environment: errors[environment])
        rescaled = self.errors(measure, rescaled=True)
        after, before = ([of[environment] for environment in self._common_rescaled] for of in (rescaled, errors))
        return Standing(
            measure,
            len(errors),
            self._mean(errors, measure),
            errors[where],
            where,
            float(np.mean([error < 0.5 for error in errors.values()])),
            float(np.mean([min(error, 1 - error) for error in errors.values()])),
            _disagreement(errors, lambda e: (e.study, e.factor, e.first, e.last)),
            _disagreement(_by_study(errors), lambda _: ()),
            (_mean(after), _mean(before)),
            (_mean(elsewhere), len(elsewhere)),
        )

    def _mean(self, errors: Mapping[Environment, float], measure: str) -> Estimate:
        return Estimate(
            _mean(list(errors.values())), *_ends(_mean_of_known(self._resampled[measure][:, self._columns]))
        )

    def lead(self, first: str, other: str) -> Estimate:
        """How much larger the mean sign error of `other` is, on the same resamples of networks and in the same environments."""
        mine, its = self.errors(first), self.errors(other)
        plain = _mean([its[environment] - mine[environment] for environment in self.common if environment in mine and environment in its])  # fmt: skip
        drawn = self._resampled[other] - self._resampled[first]
        return Estimate(plain, *_ends(_mean_of_known(drawn[:, self._columns])))

    @cached_property
    def _columns(self) -> list[int]:
        """Where the common environments lie among all of them."""
        common = set(self.common)
        return [i for i, environment in enumerate(self.environments) if environment in common]

    @cached_property
    def _resampled(self) -> dict[str, Array]:
        """Measure → its sign error in every resample and environment, nan where it has no pair there; networks are drawn study by
        study, with all their levels."""
        names = sorted({name for pair in self._used for name in pair.networks})
        position = {name: i for i, name in enumerate(names)}
        weights = _drawn_by_study(names, self.draws, self.seed)
        first, last = (np.array([position[pair.networks[side]] for pair in self._used], dtype=int) for side in (0, 1))
        counted = weights[:, first] * weights[:, last] * np.array([pair.weight for pair in self._used])
        index = {environment: i for i, environment in enumerate(self.environments)}
        member = np.zeros((len(self._used), len(index)))
        for row, pair in enumerate(self._used):
            member[row, index[pair.environment]] = 1.0
        found = {}
        for name in self.measures:
            errors = np.array([pair.errors.get(name, math.nan) for pair in self._used])
            known = np.isfinite(errors)
            above, below = (counted[:, known] * errors[known]) @ member[known], counted[:, known] @ member[known]
            found[name] = np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)
        return found


def _shared(errors: Sequence[Mapping[Environment, float]]) -> tuple[Environment, ...]:
    """The environments of all of these, in the order of the first."""
    return tuple(environment for environment in errors[0] if all(environment in of for of in errors)) if errors else ()


def _mean(errors: Sequence[float]) -> float:
    return float(np.mean(errors)) if errors else math.nan


def _drawn_by_study(names: Sequence[str], draws: int, seed: int) -> Array:
    """How often each network counts in every draw; as many of each study as it has."""
    generator = np.random.default_rng(seed)
    studies = np.array([name.rpartition("/")[0] for name in names])
    weights = np.zeros((draws, len(names)))
    for study in sorted(set(studies.tolist())):
        own = np.flatnonzero(studies == study)
        weights[:, own] = generator.multinomial(len(own), np.full(len(own), 1 / len(own)), size=draws)
    return weights


def _mean_of_known(errors: Array) -> Array:
    """The mean over environments of every draw, of those that it has any pair of."""
    known = np.isfinite(errors)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: Array = np.where(known, errors, 0.0).sum(1) / known.sum(1)
    return mean


def _ends(draws: Array) -> tuple[float, float]:
    known = draws[np.isfinite(draws)]
    if len(known) < len(draws) / 2 or np.ptp(known) < 1e-12:
        return math.nan, math.nan
    low, high = np.quantile(known, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _by_study(errors: Mapping[Environment, float]) -> dict[Environment, float]:
    """The mean error of every study."""
    names = dict.fromkeys(environment.study for environment in errors)
    return {
        Environment(name, "", "", "", ""): float(np.mean([error for e, error in errors.items() if e.study == name]))
        for name in names
    }


def _disagreement(errors: Mapping[Environment, float], group: _Group) -> float:
    """Of environments that are alike but for one thing, the share that has the sign of the minority."""
    groups: dict[tuple[str, ...], list[bool]] = {}
    for environment, error in errors.items():
        groups.setdefault(group(environment), []).append(error < 0.5)
    several = [signs for signs in groups.values() if len(signs) > 1]
    minority = sum(min(sum(signs), len(signs) - sum(signs)) for signs in several)
    return minority / sum(map(len, several)) if several else math.nan


def environments_csv(test: SignTest) -> str:
    """One row for every environment, a column for every measure: the whole distribution of sign errors."""
    columns = ("study", "at", "factor", "first", "last", *test.measures)
    errors = {name: test.errors(name) for name in test.measures}
    return csv_text(
        columns,
        ({**vars(e), **{name: errors[name].get(e, math.nan) for name in test.measures}} for e in test.environments),
    )
