"""Correlations against scipy and their definitions, intervals against a known truth, and a contest that can be lost."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.correlate import Answers, answers, contest, contrasts, correlations_csv
from spiritlevel.study.results import Study, read_study
from spiritlevel.study.statistics import (
    Array,
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
from study_samples import INVARIANT, PLAIN, fabricate

SCIPY = {pearson: stats.pearsonr, spearman: stats.spearmanr, kendall: stats.kendalltau}


def sample(count: int = 25, seed: int = 0, ties: bool = False) -> tuple[Array, Array, Array]:
    generator = np.random.default_rng(seed)
    z = generator.normal(size=count)
    x = np.exp(3 * (z + generator.normal(size=count)))
    y = z + generator.normal(size=count)
    return (np.round(np.log(x)), np.round(y), np.round(z, 1)) if ties else (x, y, z)


def value(statistic: Statistic, count: int) -> float:
    return float(statistic(np.ones((1, count)))[0])


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("kind", SCIPY)
def test_coefficients_are_scipys_on_the_data_and_on_every_resample(
    kind: Callable[[Array, Array], Statistic], ties: bool
) -> None:
    x, y, _ = sample(ties=ties)
    resamples = Resamples(len(x), draws=40, seed=1)
    weights = np.concatenate([resamples.ones, resamples.bootstrap, resamples.jackknife])
    found = kind(x, y)(weights)
    for draw, coefficient in zip(weights, found, strict=True):
        chosen = np.repeat(np.arange(len(x)), draw.astype(int))
        assert coefficient == pytest.approx(SCIPY[kind](x[chosen], y[chosen])[0], abs=1e-10)


def test_pearson_survives_many_magnitudes() -> None:
    """A draw without the one network that is a trillion times larger is as exact as any other."""
    x = np.array([1.0, 2.0, 3.0, 5.0, 4.0, 1e12])
    y = np.array([1.0, 2.0, 4.0, 3.0, 5.0, 9.0])
    without = np.array([[1.0, 1.0, 1.0, 1.0, 1.0, 0.0]])
    assert pearson(x, y)(without)[0] == pytest.approx(stats.pearsonr(x[:5], y[:5])[0], abs=1e-4)


def test_a_draw_in_which_nothing_moves_has_no_coefficient() -> None:
    x, y = np.array([1.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0])
    for kind in SCIPY:
        assert math.isnan(kind(x, y)(np.array([[2.0, 1.0, 0.0]]))[0])


def test_partial_correlation_is_that_of_residuals() -> None:
    x, y, z = sample()
    x = np.log(x)
    residuals = [column - np.polyval(np.polyfit(z, column, 1), z) for column in (x, y)]
    assert value(partial(pearson, x, y, z), 25) == pytest.approx(stats.pearsonr(*residuals)[0], abs=1e-12)
    ranks = [stats.rankdata(column) for column in (x, y, z)]
    residuals = [column - np.polyval(np.polyfit(ranks[2], column, 1), ranks[2]) for column in ranks[:2]]
    assert value(partial(spearman, x, y, z), 25) == pytest.approx(stats.pearsonr(*residuals)[0], abs=1e-12)


def brute_granulated(x: Array, y: Array, groups: list[object]) -> float:
    """Jiang et al. 2020, equation 5, letter by letter: the mean over groups of the mean sign of ordered pairs."""
    found = []
    for group in dict.fromkeys(groups):
        own = [i for i, other in enumerate(groups) if other == group]
        pairs = list(itertools.permutations(own, 2))
        if pairs:
            found.append(sum(np.sign(x[i] - x[j]) * np.sign(y[i] - y[j]) for i, j in pairs) / len(pairs))
    return float(np.mean(found))


@pytest.mark.parametrize("ties", [False, True])
def test_granulated_kendall_is_its_definition(ties: bool) -> None:
    grid = list(itertools.product(range(3), range(4), range(2)))
    x, y, _ = sample(len(grid), ties=ties)
    for axis in range(3):
        groups: list[object] = [tuple(v for i, v in enumerate(point) if i != axis) for point in grid]
        assert value(granulated(x, y, groups), len(grid)) == pytest.approx(brute_granulated(x, y, groups), abs=1e-12)
    missing: list[object] = [point[:2] for point in grid][3:]  # groups of one and of two
    assert value(granulated(x[3:], y[3:], missing), 21) == pytest.approx(
        brute_granulated(x[3:], y[3:], missing), abs=1e-12
    )


def test_granulated_kendall_sees_through_a_factor_that_explains_everything() -> None:
    """Two factors, the measure follows only one of them: overall it correlates, within the other it does not."""
    grid = list(itertools.product(range(4), range(4)))
    y = np.array([10.0 * a + b for a, b in grid])
    x = np.array([10.0 * a - b for a, b in grid])
    within_b = granulated(x, y, [a for a, _ in grid])
    within_a = granulated(x, y, [b for _, b in grid])
    assert value(kendall(x, y), 16) > 0.5
    assert value(within_b, 16) == -1
    assert value(within_a, 16) == 1
    assert value(mean_of([within_a, within_b]), 16) == 0


@pytest.mark.parametrize("kind", SCIPY)
def test_intervals_cover_the_truth(kind: Callable[[Array, Array], Statistic]) -> None:
    """Gaussian pairs with correlation 0.7, whose coefficients are known in closed form: 95 % intervals hold them."""
    rho = 0.7
    truth = {pearson: rho, spearman: 6 / math.pi * math.asin(rho / 2), kendall: 2 / math.pi * math.asin(rho)}[kind]
    generator = np.random.default_rng(5)
    hits = 0
    for trial in range(200):
        x = generator.normal(size=30)
        y = rho * x + math.sqrt(1 - rho**2) * generator.normal(size=30)
        found = estimate(kind(x, y), Resamples(30, draws=400, seed=trial))
        assert found.low <= found.value <= found.high
        hits += found.low <= truth <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def test_intervals_repeat_and_narrow_with_more_networks() -> None:
    x, y, _ = sample(200)
    few, many = (estimate(kendall(x[:n], y[:n]), Resamples(n, 500, 0)) for n in (20, 200))
    assert few == estimate(kendall(x[:20], y[:20]), Resamples(20, 500, 0))
    assert many.high - many.low < 0.6 * (few.high - few.low)


def test_no_interval_where_it_would_be_invention() -> None:
    x = np.arange(5.0)
    assert not estimate(kendall(x, x**2), Resamples(5)).bounded
    perfect = estimate(kendall(np.arange(9.0), np.arange(9.0)), Resamples(9))
    assert perfect.value == 1
    assert not perfect.bounded


def test_the_better_measure_wins_significantly() -> None:
    generator = np.random.default_rng(2)
    gap = generator.normal(size=60)
    values = {f"noisy {i}": gap + 2 * generator.normal(size=60) for i in range(5)}
    values["good"] = np.exp(gap + 0.2 * generator.normal(size=60))
    held = contest(values, gap)
    assert held.best == "good"
    assert [duel.measure for duel in held.duels] == sorted(
        (n for n in values if n != "good"), key=lambda n: -stats.kendalltau(values[n], gap)[0]
    )
    for duel in held.duels:
        assert duel.p < 0.01
        assert duel.difference.low > 0
        expected = stats.kendalltau(values["good"], gap)[0] - stats.kendalltau(values[duel.measure], gap)[0]
        assert duel.difference.value == pytest.approx(expected)


def test_equal_measures_are_told_apart_no_more_often_than_stated() -> None:
    """Eight measures of the same quality: a winner is always picked, yet at most one contest in twenty calls it better."""
    generator = np.random.default_rng(3)
    false = 0
    for trial in range(80):
        gap = generator.normal(size=25)
        values = {str(i): gap + generator.normal(size=25) for i in range(8)}
        false += min(duel.p for duel in contest(values, gap, draws=300, seed=trial).duels) < 0.05
    assert false <= 9  # of 80; 4 expected


def test_measures_that_rank_alike_are_no_different() -> None:
    x, gap, _ = sample(20)
    held = contest({"a": x, "b": np.log(x), "c": -x}, gap)
    assert held.best == "a"
    assert held.duels[0].measure == "b"
    assert held.duels[0].p == 1
    assert held.duels[0].difference.value == 0


def test_who_cannot_compete_is_named() -> None:
    x, gap, _ = sample(20)
    broken = x.copy()
    broken[:5] = np.inf
    held = contest({"a": x, "constant": np.ones(20), "broken": broken}, gap)
    assert held.best == "a"
    assert held.absent == {
        "constant": "the same on every network",
        "broken": "finite on 15 of 20 networks only",
    }
    assert contest({"constant": np.ones(20)}, gap).best is None
    assert contest({"a": x}, np.zeros(20)).best is None
    one = x.copy()
    one[3] = np.nan
    assert contest({"a": x, "b": one}, gap).networks == 19


def test_an_effect_is_least_squares_with_the_rest_held_equal() -> None:
    generator = np.random.default_rng(0)
    step = np.repeat([0.0, 1.0], 15)
    loss = generator.normal(size=30) + step
    y = 2.0 * step + 3.0 * loss + 0.1 * generator.normal(size=30)
    design = np.stack([np.ones(30), step, loss], axis=1)
    assert value(effect(y, step, [loss]), 30) == pytest.approx(np.linalg.lstsq(design, y)[0][1], abs=1e-10)
    assert value(effect(y, step), 30) == pytest.approx(y[15:].mean() - y[:15].mean(), abs=1e-10)
    assert math.isnan(effect(y, step)(np.concatenate([np.ones((1, 15)), np.zeros((1, 15))], axis=1))[0])


# --- a whole study -----------------------------------------------------------------------------------------------------

MEASURES = ("hessian_trace", "riemannian_spectral_norm", "kappa_trace_sum")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return read_study(fabricate(tmp_path_factory.mktemp("petzka"), "petzka-mnist", measures=MEASURES))


@pytest.fixture(scope="module")
def found(study: Study) -> Answers:
    return answers(study, draws=300)


def test_rows_hold_scipys_numbers(study: Study, found: Answers) -> None:
    gaps = [cell.gap("gap_loss") for cell in study.measured]
    for name in (*MEASURES, "kappa_trace[2.weight]"):
        row = found.row(name, "gap_loss")
        assert row is not None
        assert row.networks == len(study.measured) == 45
        assert row.pearson.value == pytest.approx(stats.pearsonr(study.column(name), gaps)[0])
        assert row.kendall.value == pytest.approx(stats.kendalltau(study.column(name), gaps)[0])
        assert row.kendall.low < row.kendall.value < row.kendall.high
    assert found.row("kappa_trace[2.weight]", "gap_accuracy") is None  # of layers only with the study's own gap


def test_psi_is_over_networks_that_differ_in_one_factor(study: Study, found: Answers) -> None:
    gaps = np.array([cell.gap("gap_loss") for cell in study.measured])
    column = np.array(study.column("riemannian_spectral_norm"))
    row = found.row("riemannian_spectral_norm", "gap_loss")
    assert row is not None
    expected = {}
    for axis in study.axes:
        groups: list[object] = [tuple(o.level(c) for o in study.axes if o is not axis) for c in study.measured]
        expected[axis.name] = brute_granulated(column, gaps, groups)
        assert row.psi[axis.name].value == pytest.approx(expected[axis.name], abs=1e-12)
    chosen = [psi for name, psi in expected.items() if name != "seed"]
    assert row.psi_mean.value == pytest.approx(np.mean(chosen), abs=1e-12)


def test_rescaling_ruins_the_plain_measure_alone(found: Answers) -> None:
    for name in MEASURES:
        before, after = (found.row(name, "gap_loss", rescaled) for rescaled in (False, True))
        assert before is not None
        assert after is not None
        moved = abs(before.kendall.value - after.kendall.value)
        assert (moved > 0.1) if name in PLAIN else (moved < 1e-12)
    assert set(found.contests) == {False, True}
    assert found.contests[True].best in INVARIANT


def test_the_table_has_every_row_and_the_winner(study: Study, found: Answers) -> None:
    rows = list(csv.DictReader(io.StringIO(correlations_csv(found, study))))
    assert len(rows) == len(found.rows)
    best = [row for row in rows if row["best"] == "true"]
    assert [(row["measure"], row["variant"]) for row in best] == [
        (found.contests[False].best, "trained"),
        (found.contests[True].best, "rescaled"),
    ]
    one = next(r for r in rows if (r["measure"], r["layer"], r["variant"]) == ("kappa_trace", "2.weight", "rescaled"))
    told = found.row("kappa_trace[2.weight]", "gap_loss", rescaled=True)
    assert told is not None
    assert (float(one["kendall"]), float(one["kendall_low"])) == (told.kendall.value, told.kendall.low)
    assert one["psi_mean"] == one["p_behind_best"] == ""
    duel = found.contests[False].duels[0]
    behind = next(
        r for r in rows if r["measure"] == duel.measure and r["variant"] == "trained" and r["gap"] == "gap_loss"
    )
    assert float(behind["p_behind_best"]) == duel.p
    assert float(behind["psi[training.batch_size and training.learning_rate]"]) <= 1


def test_parts_are_answered_apart(tmp_path: Path) -> None:
    study = read_study(fabricate(tmp_path, "rangamani-mnist", measures=MEASURES))
    found = answers(study, draws=200)
    assert set(found.parts) == {"fully_connected", "lenet"}
    part = found.parts["lenet"].row("kappa_trace_sum", "gap_accuracy")
    assert part is not None
    assert part.networks == 8
    assert found.row("kappa_trace[0.weight]", "gap_accuracy") is None
    assert found.parts["lenet"].row("kappa_trace[0.weight]", "gap_accuracy") is not None
    subsets = {row["subset"] for row in csv.DictReader(io.StringIO(correlations_csv(found, study)))}
    assert subsets == {"all", "fully_connected", "lenet"}


def test_contrasts_are_ratios_of_geometric_means(tmp_path: Path) -> None:
    study = read_study(fabricate(tmp_path, "rangamani-mnist", measures=MEASURES)).parts["lenet"]
    (axis,) = (axis for axis in study.axes if not axis.is_seed)
    compared = {each.measure: each for each in contrasts(study, axis, draws=300)}
    assert set(compared) == set(MEASURES)
    logs = np.log(study.column("kappa_trace_sum"))
    large = np.array([axis.level(cell) == 1 for cell in study.measured])
    one = compared["kappa_trace_sum"]
    assert (one.first, one.last, one.networks) == ("256", "5000", 8)
    assert one.times.value == pytest.approx(math.exp(logs[large].mean() - logs[~large].mean()))
    assert one.times.low < one.times.value < one.times.high
    assert one.at_equal_loss.known


def test_too_few_or_constant_numbers_are_told(tmp_path: Path) -> None:
    two = answers(read_study(fabricate(tmp_path / "two", cells=3, excluded=1, failed=0, unfinished=0)), draws=200)
    assert {row.note for row in two.rows} == {"2 networks are too few"}
    assert two.contests[False].best is None
    four = answers(read_study(fabricate(tmp_path / "four", cells=5, excluded=1, failed=0, unfinished=0)), draws=200)
    for row in four.rows:
        assert row.kendall.known
        assert not row.kendall.bounded
        assert "fewer than 6 networks: no interval" in row.note
    none = answers(read_study(fabricate(tmp_path / "none", cells=2, excluded=0, failed=0, unfinished=2)), draws=200)
    assert none.rows == ()


def test_too_few_resamples_are_refused(study: Study) -> None:
    with pytest.raises(SpiritLevelError, match="an interval needs at least 100 resamples, got 10"):
        answers(study, draws=10)


def test_a_measure_that_only_follows_the_train_loss_is_told(tmp_path: Path) -> None:
    folder = fabricate(tmp_path, cells=12, excluded=0, failed=0, unfinished=0, measures=["hessian_trace"])
    for path in folder.glob("cells/*/result.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        result["measures"]["values"]["hessian_trace"]["value"] = result["training"]["train_loss"] ** 2
        path.write_text(json.dumps(result), encoding="utf-8")
    row = answers(read_study(folder), draws=200).row("hessian_trace", "gap_loss")
    assert row is not None
    assert not row.partial_spearman.known
    assert row.note == "its ranks are those of the train loss: no partial of ranks"
