"""Which measure ranks networks by how they generalize: correlations with bootstrap intervals, and who wins.

Every statistic here is a function of weights: how often each network counts. Weights of one give its value, those of a
resample with replacement a bootstrap draw, those that leave one network out the jackknife. All draws of all measures come
from the same resamples, so that differences between measures are paired, and everything is matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.along import Mark
from spiritlevel.study.csv_tables import csv_text
from spiritlevel.study.results import GAPS, Axis, Study, is_of_network, layer_of
from spiritlevel.study.statistics import (
    COMPETES,
    FEWEST,
    NO_ESTIMATE,
    RESAMPLES,
    Array,
    Estimate,
    Resamples,
    Statistic,
    effect,
    estimate,
    granulated,
    kendall,
    mean_of,
    partial,
    pearson,
    spearman,
)


@dataclass(frozen=True)
class Duel:
    """The winner against another measure, on the same resamples."""

    measure: str
    difference: Estimate
    p: float


@dataclass(frozen=True)
class Contest:
    """Which measure correlates most, and by how much more than each other one.

    Attributes:
        best: The measure with the largest coefficient, or None where none has one.
        duels: The others from the second down, each with the difference and its p-value. It is adjusted for all pairs of
            competitors by the largest studentized difference of every resample (Westfall and Young 1993), so that it holds
            although the winner was picked after looking.
        networks: How many networks all competitors are defined on.
        absent: Measures that did not compete, with the reason.
    """

    best: str | None
    duels: tuple[Duel, ...]
    networks: int
    absent: Mapping[str, str]


def contest(
    values: Mapping[str, Array],
    gap: Array,
    correlation: Callable[[Array, Array], Statistic] = kendall,
    *,
    draws: int = RESAMPLES,
    seed: int = 0,
) -> Contest:
    """Compare measures by their correlation with the gap, on the networks where all that compete are defined."""
    absent: dict[str, str] = {}
    for name, column in values.items():
        finite = np.isfinite(column)
        if finite.mean() < COMPETES:
            absent[name] = f"finite on {int(finite.sum())} of {len(column)} networks only"
        elif len(np.unique(column[finite])) < 2:
            absent[name] = "the same on every network"
    competing = {name: column for name, column in values.items() if name not in absent}
    shared = np.isfinite(gap)
    for column in competing.values():
        shared &= np.isfinite(column)
    if not competing or shared.sum() < 3 or len(np.unique(gap[shared])) < 2:
        return Contest(None, (), int(shared.sum()), absent)
    resamples = Resamples.of(int(shared.sum()), draws, seed)
    statistics = {name: correlation(column[shared], gap[shared]) for name, column in competing.items()}
    found = {name: float(statistic(resamples.ones)[0]) for name, statistic in statistics.items()}
    ranked = sorted((name for name in found if not math.isnan(found[name])), key=lambda name: -found[name])
    if not ranked:
        return Contest(None, (), int(shared.sum()), absent)
    p = _adjusted(ranked, found, statistics, resamples)
    duels = tuple(
        Duel(other, estimate(_difference(statistics[ranked[0]], statistics[other]), resamples), p[other])
        for other in ranked[1:]
    )
    return Contest(ranked[0], duels, int(shared.sum()), absent)


def _difference(one: Statistic, other: Statistic) -> Statistic:
    return lambda weights: one(weights) - other(weights)


def _adjusted(
    ranked: Sequence[str], found: Mapping[str, float], statistics: Mapping[str, Statistic], resamples: Resamples
) -> dict[str, float]:
    """Measure → the adjusted p-value of its difference to the first; nan where there are too few networks."""
    if resamples.networks < FEWEST or len(ranked) < 2:
        return dict.fromkeys(ranked[1:], math.nan)
    draws = np.stack([statistics[name](resamples.bootstrap) for name in ranked])
    draws = draws[:, ~np.isnan(draws).any(0)]
    values = np.array([found[name] for name in ranked])
    largest = np.zeros(draws.shape[1])
    for i, j in combinations(range(len(ranked)), 2):
        moved = draws[i] - draws[j]
        spread = moved.std()
        if spread > 1e-12:
            largest = np.maximum(largest, np.abs(moved - (values[i] - values[j])) / spread)
    p = {}
    for j in range(1, len(ranked)):
        spread = (draws[0] - draws[j]).std()
        away = values[0] - values[j]
        # Two measures that every resample ranks alike differ by nothing, or by something certain.
        reached = np.sum(largest >= away / spread) if spread > 1e-12 else len(largest) if away < 1e-12 else 0
        p[ranked[j]] = float((reached + 1) / (len(largest) + 1))
    return p


@dataclass(frozen=True)
class Contrast:
    """How many times larger a measure is at the last level of a factor than at its first.

    Attributes:
        times: The ratio of geometric means, other factors held equal.
        at_equal_loss: The same at equal train loss, by least squares on logarithms.
        overlap: Whether the train losses of the two levels overlap; if not, `at_equal_loss` is an extrapolation.
    """

    measure: str
    first: str
    last: str
    networks: int
    times: Estimate
    at_equal_loss: Estimate
    overlap: bool


def contrasts(
    study: Study, axis: Axis, *, fewest: int = 2, draws: int = RESAMPLES, seed: int = 0
) -> tuple[Contrast, ...]:
    """Every measure that is positive on all networks at the first and the last level of a factor, compared.

    Nothing where one of the two levels has less than `fewest` networks.
    """
    ends = (0, len(axis.levels) - 1)
    chosen = [i for i, cell in enumerate(study.measured) if axis.level(cell) in ends]
    cells = [study.measured[i] for i in chosen]
    step = np.array([float(axis.level(cell) == ends[1]) for cell in cells])
    if min(step.sum(), (1 - step).sum()) < fewest:
        return ()
    dummies = [
        np.array([float(other.level(cell) == level) for cell in cells])
        for other in study.axes
        if other is not axis and not other.is_seed
        for level in range(1, len(other.levels))
    ]
    held = [dummy for dummy in dummies if not _constant(dummy)]
    losses = np.array([cell.trained("train_loss") for cell in cells])
    logged = bool((losses > 0).all()) and not _constant(losses)
    overlap = logged and losses[step == 0].max() > losses[step == 1].min() and losses[step == 1].max() > losses[step == 0].min()  # fmt: skip
    resamples = Resamples.of(len(cells), draws, seed)
    found = []
    for name in study.quantities(layers=False):
        values = np.array(study.column(name))[chosen]
        if np.isfinite(values).all() and (values > 0).all():
            plain = _powers(estimate(effect(np.log(values), step, held), resamples))
            equal = [*held, np.log(losses)] if logged else None
            adjusted = (
                NO_ESTIMATE if equal is None else _powers(estimate(effect(np.log(values), step, equal), resamples))
            )
            texts = (axis.text(ends[0]), axis.text(ends[1]))
            found.append(Contrast(name, *texts, len(cells), plain, adjusted, bool(overlap)))
    return tuple(found)


def _powers(found: Estimate) -> Estimate:
    return Estimate(*(math.exp(end) for end in (found.value, found.low, found.high)))


@dataclass(frozen=True)
class Correlations:
    """A quantity against a gap: every coefficient with its interval.

    `psi` holds Jiang et al.'s coefficient for every factor, `psi_mean` their mean over all factors but seeds.
    """

    quantity: str
    rescaled: bool
    gap: str
    networks: int
    pearson: Estimate = NO_ESTIMATE
    spearman: Estimate = NO_ESTIMATE
    kendall: Estimate = NO_ESTIMATE
    partial_pearson: Estimate = NO_ESTIMATE
    partial_spearman: Estimate = NO_ESTIMATE
    psi: Mapping[str, Estimate] = field(default_factory=dict)
    psi_mean: Estimate = NO_ESTIMATE
    note: str = ""


@dataclass(frozen=True)
class Answers:
    """What a study's numbers say.

    Attributes:
        rows: The correlations of every quantity that was measured: networks' with every gap, layers' with the study's own.
        contests: Rescaled or not → who wins by Kendall's τ with the study's gap.
        parts: The same network by network and data set by data set, where the study has several. Layers are then
            correlated there alone: those of different architectures are not the same layers.
        along: The same at every mark of the trainings, where the study measures along them; with its own gap alone.
    """

    rows: tuple[Correlations, ...]
    contests: Mapping[bool, Contest]
    axes: tuple[Axis, ...]
    draws: int
    parts: Mapping[str, Answers] = field(default_factory=dict)
    along: Mapping[Mark, Answers] = field(default_factory=dict)

    def part(self, name: str) -> Answers:
        """Those of one part, at every mark too."""
        return replace(self.parts[name], along={mark: there.parts[name] for mark, there in self.along.items()})

    def row(self, quantity: str, gap: str, rescaled: bool = False) -> Correlations | None:
        wanted = (quantity, gap, rescaled)
        return next((row for row in self.rows if (row.quantity, row.gap, row.rescaled) == wanted), None)


def answers(study: Study, *, draws: int = RESAMPLES, seed: int = 0) -> Answers:
    """Correlate every measured quantity with the gaps, before and after random rescaling, and find the winner."""
    if draws < 100:
        raise SpiritLevelError(f"an interval needs at least 100 resamples, got {draws}")
    along = {mark: _with_parts(study.at(mark), draws, seed, (study.gap,)) for mark in study.marks}
    gaps = (study.gap, *(gap for gap in GAPS if gap != study.gap))
    return replace(_with_parts(study, draws, seed, gaps), along=along)


def _with_parts(study: Study, draws: int, seed: int, gaps: Sequence[str]) -> Answers:
    parts = {name: _answers(part, draws, seed, gaps, layers=True) for name, part in study.parts.items()}
    return replace(_answers(study, draws, seed, gaps, layers=not parts), parts=parts)


def _answers(study: Study, draws: int, seed: int, wanted: Sequence[str], *, layers: bool) -> Answers:
    gaps = {name: np.array([cell.gap(name) for cell in study.measured]) for name in GAPS}
    loss = np.array([cell.trained("train_loss") for cell in study.measured])
    groups = {axis.name: _other_factors(study, axis) for axis in study.axes}
    chosen = [axis.name for axis in study.axes if not axis.is_seed]
    rows: list[Correlations] = []
    contests: dict[bool, Contest] = {}
    for rescaled in (False, True):
        names = study.quantities(layers=None if layers else False)
        columns = {name: np.array(study.column(name, rescaled)) for name in names}
        columns = {name: column for name, column in columns.items() if not (rescaled and np.isnan(column).all())}
        if rescaled and not columns:
            break
        for name, column in columns.items():
            whole = is_of_network(name)
            for gap in wanted if whole else [study.gap]:
                known = groups if whole and gap == study.gap else {}
                rows.append(_correlated((name, rescaled, gap), column, gaps[gap], loss, known, chosen, draws, seed))
        network = {name: column for name, column in columns.items() if is_of_network(name)}
        contests[rescaled] = contest(network, gaps[study.gap], draws=draws, seed=seed)
    return Answers(tuple(rows), contests, study.axes, draws)


def _correlated(
    label: tuple[str, bool, str],
    x: Array,
    y: Array,
    loss: Array,
    groups: Mapping[str, list[Any]],
    chosen: Sequence[str],
    draws: int,
    seed: int,
) -> Correlations:
    finite = np.isfinite(x) & np.isfinite(y)
    count = int(finite.sum())
    missing = len(x) - count
    left = f"{missing} network{'' if missing == 1 else 's'} without a finite value" if missing else ""
    if count < 3:
        return Correlations(*label, count, note=_joined(f"{count} networks are too few", left))
    a, b, z = x[finite], y[finite], loss[finite]
    for what, column in (("measure", a), ("gap", b)):
        if _constant(column):
            return Correlations(*label, count, note=_joined(f"the {what} is the same on every network", left))
    resamples = Resamples.of(count, draws, seed)
    psi = {name: granulated(a, b, _kept(members, finite)) for name, members in groups.items()}
    loss_varies = bool(np.isfinite(z).all()) and not _constant(z)
    tau = estimate(kendall(a, b), resamples)
    few = f"fewer than {FEWEST} networks: no interval" if count < FEWEST else ""
    same = "" if few or tau.bounded else "every resample gives the same τ: no interval"
    ranked = estimate(partial(spearman, a, b, z), resamples) if loss_varies else NO_ESTIMATE
    follows = "its ranks are those of the train loss: no partial of ranks" if loss_varies and not ranked.known else ""
    return Correlations(
        *label,
        count,
        pearson=estimate(pearson(a, b), resamples),
        spearman=estimate(spearman(a, b), resamples),
        kendall=tau,
        partial_pearson=estimate(partial(pearson, a, b, z), resamples) if loss_varies else NO_ESTIMATE,
        partial_spearman=ranked,
        psi={name: estimate(statistic, resamples) for name, statistic in psi.items()},
        psi_mean=estimate(mean_of([psi[name] for name in chosen]), resamples) if psi and chosen else NO_ESTIMATE,
        note=_joined(
            few, same, left, follows, "" if loss_varies else "the train loss is the same on every network: no partial"
        ),
    )


def correlations_csv(found: Answers, study: Study) -> str:
    """`correlations.csv`: one row for every quantity, subset, variant and gap, with intervals as `_low` and `_high`."""
    kinds = ("pearson", "spearman", "kendall", "partial_pearson", "partial_spearman")
    factors = [f"psi[{axis.name}]" for axis in found.axes]
    duel = ("best", "behind_best", "behind_best_low", "behind_best_high", "p_behind_best")
    columns = [
        "measure",
        "layer",
        "subset",
        "variant",
        "at",
        "gap",
        "networks",
        *(c for k in (*kinds, "psi_mean") for c in _ends(k)),
    ]
    columns += [column for factor in factors for column in _ends(factor)] + [*duel, "note"]
    places = {"end": found, **{mark.name: there for mark, there in found.along.items()}}
    return csv_text(
        columns,
        (
            {"subset": name, "at": at, **_csv_row(row, part, study, kinds)}
            for at, there in places.items()
            for name, part in {"all": there, **there.parts}.items()
            for row in part.rows
        ),
    )


def _csv_row(row: Correlations, found: Answers, study: Study, kinds: Sequence[str]) -> dict[str, Any]:
    base, layer = layer_of(row.quantity)
    cells: dict[str, Any] = {
        "measure": base,
        "layer": layer or "",
        "variant": "rescaled" if row.rescaled else "trained",
        "gap": row.gap,
        "networks": row.networks,
        "note": row.note,
    }
    estimates = {kind: getattr(row, kind) for kind in (*kinds, "psi_mean")}
    estimates |= {f"psi[{name}]": psi for name, psi in row.psi.items()}
    if layer is None and row.gap == study.gap:
        held = found.contests[row.rescaled]
        duel = next((duel for duel in held.duels if duel.measure == row.quantity), None)
        cells["best"] = held.best == row.quantity
        if duel is not None:
            estimates["behind_best"], cells["p_behind_best"] = duel.difference, duel.p
    for name, each in estimates.items():
        cells |= dict(zip(_ends(name), (each.value, each.low, each.high), strict=True))
    return cells


def _ends(name: str) -> tuple[str, str, str]:
    return name, f"{name}_low", f"{name}_high"


def _other_factors(study: Study, axis: Axis) -> list[Any]:
    """For every measured network its level on all other axes."""
    others = [each for each in study.axes if each is not axis]
    return [tuple(each.level(cell) for each in others) for cell in study.measured]


def _kept(members: Sequence[Any], mask: NDArray[np.bool_]) -> list[Any]:
    return [member for member, keep in zip(members, mask, strict=True) if keep]


def _constant(column: Array) -> bool:
    """Whether a column does not move beyond rounding."""
    return bool(np.ptp(column) <= 1e-12 * np.abs(column).max())


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)
