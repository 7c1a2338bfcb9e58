"""Answers at equal train loss: coefficients over levels against their definition, ratios and paths by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from spiritlevel.study.along import Mark
from spiritlevel.study.correlate import Answers, answers, correlations_csv
from spiritlevel.study.csv_tables import read_csv_text
from spiritlevel.study.levels import losses_at, over_levels, paths, ratios_along
from spiritlevel.study.results import Passed, Quantity, Study, read_study
from spiritlevel.study.show.along import along_section, along_sentences, batch_axis
from study_samples import fabricate

MARKS = (Mark("loss", 1.0), Mark("loss", 0.1), Mark("epoch", 5))


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A fabricated study in which κ_τ at a level follows the gap at that level, and ρ the opposite of it."""
    folder: Path = fabricate(
        tmp_path_factory.mktemp("study") / "study", "petzka-mnist", cells=24, measures=("kappa_trace_sum", "rho_sum")
    )
    made = read_study(folder)
    generator = np.random.default_rng(1)
    cells = []
    for cell in made.cells:
        along = []
        for mark in MARKS if cell.training else ():
            gap = float(generator.random())
            loss = mark.level * 0.9
            outcomes = {"train_loss": loss, "test_loss": loss + gap, "train_accuracy": 0.9, "test_accuracy": 0.8}
            noise = 0.2 * float(generator.random())
            found = {"kappa_trace_sum": math.exp(gap + noise), "rho_sum": math.exp(-gap)}
            values = {name: Quantity(value, 0.0, True) for name, value in found.items()}
            step = {1.0: 10, 5.0: 50, 0.1: 100}[mark.level]
            along.append(Passed(mark, step, step / 10, outcomes, values))
        cells.append(replace(cell, along=tuple(along)))
    return replace(made, cells=tuple(cells))


@pytest.fixture(scope="module")
def found(study: Study) -> Answers:
    return answers(study, draws=100)


def test_over_levels_is_the_mean_of_the_levels_of_tau(study: Study) -> None:
    found = over_levels(study, draws=200)
    assert set(found) == {"kappa_trace_sum", "rho_sum"}
    taus = []
    for mark in MARKS[:2]:  # levels of the loss alone
        cells = study.at(mark).measured
        pairs = [
            np.sign(one.measures["kappa_trace_sum"].value - other.measures["kappa_trace_sum"].value)
            * np.sign(one.gap("gap_loss") - other.gap("gap_loss"))
            for one, other in combinations(cells, 2)
        ]
        taus.append(np.mean(pairs))
    assert found["kappa_trace_sum"].value == pytest.approx(np.mean(taus))
    assert found["rho_sum"].value == pytest.approx(-1.0)
    assert found["kappa_trace_sum"].low < np.mean(taus) < found["kappa_trace_sum"].high


def test_a_network_at_two_levels_is_one_network(study: Study) -> None:
    """The interval does not shrink when every level is told twice under another name."""
    twice = replace(
        study,
        cells=tuple(
            replace(
                cell,
                along=(*cell.along, *(replace(p, mark=Mark("loss", p.mark.level / 2)) for p in cell.along if p.mark.kind == "loss")),
            )
            for cell in study.cells
        ),
    )  # fmt: skip
    one, other = (over_levels(each, draws=400)["kappa_trace_sum"] for each in (study, twice))
    assert other.value == pytest.approx(one.value)
    assert other.high - other.low == pytest.approx(one.high - one.low, rel=1e-9)


def test_answers_and_their_table_have_every_level(study: Study, found: Answers) -> None:
    assert tuple(found.along) == MARKS
    row = found.along[MARKS[0]].row("rho_sum", "gap_loss")
    assert row is not None
    assert row.kendall.value == -1.0
    rows = read_csv_text(correlations_csv(found, study))
    assert {row["at"] for row in rows} == {"end", "loss-1", "loss-0.1", "epoch-5"}
    [level] = [row for row in rows if row["at"] == "loss-0.1" and row["measure"] == "rho_sum" and not row["layer"]]
    assert float(level["kendall"]) == -1.0


def test_ratios_are_those_of_the_geometric_means_at_each_mark(study: Study) -> None:
    axis = batch_axis(study)
    assert axis is not None
    found = ratios_along(study, axis, draws=200)["kappa_trace_sum"]
    assert list(found) == [*MARKS, None]
    cells = study.at(MARKS[1]).measured
    xavier = [cell for cell in cells if cell.factors["model.initialization"] == "xavier_normal"]
    assert len(xavier) < len(cells)  # the ratio holds other factors equal, so that both kinds of networks count
    logs = {
        (batch, kind): np.mean(
            [math.log(c.measures["kappa_trace_sum"].value) for c in cells
             if c.factors["training.batch_size"] == batch and c.factors["model.initialization"] == kind]
        )
        for batch in (1000, 2000) for kind in ("xavier_normal", "uniform")
    }  # fmt: skip
    within = [logs[2000, kind] - logs[1000, kind] for kind in ("xavier_normal", "uniform")]
    assert min(within) <= math.log(found[MARKS[1]].times.value) <= max(within)


def test_paths_go_from_mark_to_mark_to_the_end(study: Study) -> None:
    found = paths(study, "kappa_trace_sum")
    ended = next(path for path in found if path.cell.status == "measured")
    assert ended.marks == ("train loss 1", "epoch 5", "train loss 0.1", "the end")
    assert ended.losses[0] == 0.9
    assert ended.values[-1] == ended.cell.measures["kappa_trace_sum"].value
    excluded = next(path for path in found if path.cell.status == "excluded")
    assert excluded.marks[-1] == "train loss 0.1"
    assert losses_at(study)[MARKS[1]] == (pytest.approx(0.09), pytest.approx(0.09))


def test_the_page_tells_levels_ratios_and_paths(study: Study, found: Answers) -> None:
    section = along_section(study, found)
    assert section is not None
    captions = [caption for caption, _ in section.tables]
    assert captions[0] == "Networks at every mark"
    assert captions[1] == "Kendall τ with test − train loss at every mark"
    assert captions[2].startswith(
        "How many times larger at batch_size and learning_rate 2000 / 0.1 than at 1000 / 0.02"
    )
    titles = [drawing.title for drawing in section.drawings]
    assert titles == ["Order at equal train loss", "kappa_trace_sum along training", "rho_sum along training"]
    [sentence] = along_sentences(study, found)
    assert sentence.startswith("At equal train loss, over all levels, kappa_trace_sum ranks best: τ 0.")
    assert along_section(replace(study, cells=tuple(replace(c, along=()) for c in study.cells)), found) is None


def test_networks_of_two_kinds_are_told_apart(tmp_path: Path) -> None:
    """Curvatures of different architectures are not compared: every kind has its table, its paths and its ratios."""
    made = read_study(fabricate(tmp_path / "study", "rangamani-mnist", measures=("riemannian_spectral_norm",)))
    mark = Mark("loss", 0.5)
    outcomes = {"train_loss": 0.4, "test_loss": 0.5, "train_accuracy": 0.9, "test_accuracy": 0.8}
    both = replace(
        made,
        cells=tuple(
            replace(cell, along=(Passed(mark, 3, 0.3, outcomes, cell.measures),)) if cell.measures else cell
            for cell in made.cells
        ),
    )
    section = along_section(both, answers(both, draws=100))
    assert section is not None
    captions = [caption for caption, _ in section.tables]
    for name in ("fully_connected", "lenet"):
        assert f"Kendall τ with train − test accuracy at every mark, {name}" in captions
        assert f"How many times larger at batch_size 5000 than at 256, at every mark, {name}" in captions
        assert f"riemannian_spectral_norm along training, {name}" in [drawing.title for drawing in section.drawings]
