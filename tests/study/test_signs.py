"""The sign test against pairs counted by hand."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats
from typer.testing import CliRunner

from spiritlevel.cli import app
from spiritlevel.study.results import Cell, Quantity, Study, read_study
from spiritlevel.study.show.winners import standings_table, winner_sentences
from spiritlevel.study.signs import Environment, SignTest, environments_csv, gap_noise, pairs_of, sign_error
from study_samples import fabricate

BATCHES = (16, 32, 64)


def study(gaps: dict[tuple[int, int], float], **measures: dict[tuple[int, int], float]) -> Study:
    """Networks by (batch, seed): their gap, and what each measure says; `rescaled` is 1 everywhere."""
    cells = []
    for (batch, seed), gap in gaps.items():
        training = {"train_loss": 0.0, "test_loss": gap, "train_accuracy": 1.0, "test_accuracy": 1.0}
        found = {name: Quantity(values[batch, seed], 0.0, True) for name, values in measures.items()}
        twin = dict.fromkeys(found, Quantity(1.0, 0.0, True))
        cell = Cell(f"{batch}{seed}", {"training.batch_size": batch}, seed, "measured", "", training=training)
        cells.append(replace(cell, measures=found, rescaled=twin))
    return Study(Path(), "made", "made", "", None, "gap_loss", {}, {}, (), tuple(cells), 0)


def grid(function) -> dict[tuple[int, int], float]:  # type: ignore[no-untyped-def]
    return {(batch, seed): function(batch, seed) for batch in BATCHES for seed in range(3)}


GAPS = grid(lambda batch, seed: math.log2(batch) + 0.1 * seed)
RIGHT, WRONG = GAPS, grid(lambda batch, seed: -batch - 0.1 * seed)
# Right between 16 and 64 and between 32 and 64, wrong between 16 and 32 for one seed of the first.
ONCE = {**grid(lambda batch, seed: batch), (16, 0): 40}


def test_errors_are_counted_pair_by_pair() -> None:
    test = SignTest([study(GAPS, right=RIGHT, wrong=WRONG, once=ONCE)], draws=200)
    assert len(test.environments) == 3
    assert set(test.errors("right").values()) == {0.0}
    assert set(test.errors("wrong").values()) == {1.0}
    near = Environment("made", "end", "batch_size", "16", "32")
    noise = math.sqrt(2 * 0.01)  # three seeds 0.1 apart have a variance of 0.01 in every setting
    weights = {(i, j): 2 * stats.norm.cdf((1 + 0.1 * (j - i)) / noise) - 1 for i in range(3) for j in range(3)}
    expected = sum(weights[0, j] for j in range(3)) / sum(weights.values())
    assert test.errors("once")[near] == pytest.approx(expected)
    standings = {standing.measure: standing for standing in test.standings()}
    assert standings["once"].worst == pytest.approx(expected)
    assert standings["once"].where == near
    assert standings["once"].seeds == pytest.approx(expected / 3)
    assert standings["once"].mean.value == pytest.approx(expected / 3)
    assert standings["right"].rescaled == (0.5, 0.0)  # a twin that says the same of every network is a coin
    assert [standing.measure for standing in test.standings()] == ["right", "once", "wrong"]
    assert test.lead("right", "wrong").value == 1.0


def test_a_pair_whose_gap_is_chance_hardly_counts() -> None:
    gaps = {**GAPS, (16, 0): 5.0, (32, 1): 5.0000001}
    pair = next(
        pair for pair in pairs_of([study(gaps, right=RIGHT)]) if pair.networks == ("made/160", "made/321")
    )  # fmt: skip
    assert pair.weight < 1e-6
    noise = gap_noise(study(gaps), [axis for axis in study(gaps).axes if not axis.is_seed])
    assert noise > 0


def test_without_seeds_every_pair_is_sure() -> None:
    gaps = {(batch, 0): float(batch) for batch in BATCHES}
    assert {pair.weight for pair in pairs_of([study(gaps, right=gaps)])} == {1.0}
    test = SignTest([study(gaps, right=gaps)], draws=100)
    assert not test.environments  # one pair each: too few for a worst case
    assert winner_sentences(test) == [
        "No environment has 3 sure pairs of networks yet, so that no measure can be judged."
    ]


def test_test_samples_make_accuracies_unsure() -> None:
    made = study(GAPS)
    cells = [replace(cell, training={**cell.training, "test_accuracy": 0.9}, data={"samples_test": 900}) for cell in made.cells]  # fmt: skip
    with_accuracy = replace(made, gap="gap_accuracy", cells=tuple(cells))
    assert gap_noise(with_accuracy, []) == pytest.approx(math.sqrt(2 * 0.9 * 0.1 / 900))


def test_ties_are_half_an_error_and_what_is_not_defined_is_none() -> None:
    assert sign_error(1.0, 1.0, 2.0) == 0.5
    assert math.isnan(sign_error(math.nan, 1.0, 2.0))


def test_fragility_over_studies_and_tables() -> None:
    test = SignTest([study(GAPS, m=RIGHT), replace(study(GAPS, m=WRONG), name="other")], draws=100)
    [standing] = test.standings()
    assert standing.studies == 0.5
    assert standing.better_than_chance == 0.5
    rows = list(csv.DictReader(environments_csv(test).splitlines()))
    assert {(row["study"], float(row["m"])) for row in rows} == {("made", 0.0), ("other", 1.0)}


def test_the_command_names_the_winner_and_writes_page_and_table(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "study", "petzka-mnist", cells=36)
    page, table = tmp_path / "page.html", tmp_path / "signs.csv"
    done = CliRunner().invoke(app, ["study", "correlate", str(folder), "--page", str(page), "--csv", str(table)])
    assert done.exit_code == 0, done.output
    best = SignTest([read_study(folder)]).standings()[0].measure
    assert f"{best} errs least: a mean sign error of 0." in done.output
    assert best in page.read_text(encoding="utf-8")
    assert table.read_text(encoding="utf-8").startswith("study,at,factor,first,last,")
    assert standings_table(SignTest([read_study(folder)], draws=100)).rows[0][0] == best


def test_measures_that_err_alike_share_the_lead() -> None:
    test = SignTest([study(GAPS, one=RIGHT, two=RIGHT, wrong=WRONG)], draws=100)
    [first, second, rescaled, last] = winner_sentences(test)
    assert first.startswith("one, together with 1 other, errs least: a mean sign error of 0.00")
    assert second.startswith("Its lead over wrong, 1.00")
    assert rescaled == (
        "After the random rescaling, which changes no function, one errs on 50 % of the pairs at the end, 0 % before; "
        "of measures that keep their error, wrong errs least."
    )
    assert last.startswith("The mildest worst case is that of one and 1 other: it errs on 0 % of the pairs in ")


def test_worst_cases_are_compared_in_the_same_environments() -> None:
    """A measure that was not tried where the others err has no milder worst case for it, and no lead."""
    many = {(batch, seed): math.log2(batch) + 0.01 * seed for batch in BATCHES for seed in range(12)}
    studies = [study(many, here=many, everywhere=many), replace(study(GAPS, everywhere=WRONG), name="other")]
    test = SignTest(studies, draws=100)
    assert test.lead("here", "everywhere").value == 0
    first, *_, last = winner_sentences(test)
    assert first.startswith("here, together with 1 other, errs least: a mean sign error of 0.00")
    assert "over the 3 environments that all measures share, where a coin has 0.5" in first
    assert last == "In 3 further environments, where not all were measured: everywhere 1.00."
    standings = {standing.measure: standing for standing in test.standings()}
    assert [standings[name].worst for name in ("here", "everywhere")] == [0.0, 0.0]
    assert standings["everywhere"].elsewhere == (1.0, 3)
    assert standings["here"].elsewhere[1] == 0
    assert standings["everywhere"].rescaled == (0.5, 0.0)
    table = standings_table(test)
    assert {row[0]: (row[1], row[-1]) for row in table.rows} == {"here": (3, "–"), "everywhere": (3, "1.00 over 3")}


def test_measures_that_share_no_environment_stand_in_their_own() -> None:
    """Each is defined on nine pairs in ten, and nowhere are all of them."""
    places = [f"study {i}" for i in range(10)]
    measures = {f"m{i}": RIGHT for i in range(10)}
    studies = [
        replace(study(GAPS, **{name: values for name, values in measures.items() if name != f"m{i}"}), name=place)
        for i, place in enumerate(places)
    ]
    twin = dict.fromkeys(measures, Quantity(1.0, 0.0, True))  # of which all are known
    studies = [replace(each, cells=tuple(replace(cell, rescaled=twin) for cell in each.cells)) for each in studies]
    test = SignTest(studies, draws=50)
    assert test.common == test.environments
    assert [standing.environments for standing in test.standings()] == [27] * 10
    assert all(math.isnan(standing.rescaled[0]) for standing in test.standings())
    assert winner_sentences(test)[0].startswith("m1, together with 9 others, errs least: a mean sign error of 0.00")


def test_a_worst_case_that_all_share_has_no_winner() -> None:
    last = winner_sentences(SignTest([study(GAPS, one=WRONG, two=WRONG)], draws=100))[-1]
    assert last.startswith(
        "The worst case is equally bad for all of them: each errs on as many as 100 % of the pairs in "
    )
    assert last.endswith(", so that no measure is right everywhere.")
