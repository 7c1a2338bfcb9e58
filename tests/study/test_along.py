"""Weights along a training: kept at the first crossing, measured, found again after an interruption, without a trace."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from spiritlevel._version import __version__
from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.run import measure
from spiritlevel.study import measuring, worker
from spiritlevel.study.along import FARTHEST, SPARE_PASSES, Mark, Watch
from spiritlevel.study.evaluation import evaluate
from spiritlevel.study.naming import hash_of
from spiritlevel.study.plan import read_plan
from spiritlevel.study.results import read_study
from spiritlevel.study.run import prepare
from spiritlevel.study.samples import load_samples
from spiritlevel.study.settings import CellConfig, MeasureSection
from spiritlevel.study.show.page import write_study_report
from spiritlevel.study.store import CellFolder, StudyFolder
from spiritlevel.study.tables import read_tables
from spiritlevel.study.trail import Place, Trail, first_crossing
from spiritlevel.study.train import Trained, build, train
from spiritlevel.study.worker import DONE, compute
from spiritlevel.subjects.checkpoint import load_checkpoint

LEVELS = [1.0, 0.9, 0.7]


def config(at_loss: list[float], at_epochs: tuple[int, ...] = (), seed: int = 0, **training: Any) -> CellConfig:
    settings = {"learning_rate": 0.5, "batch_size": 16, "epochs": 30, **training}
    sections = {"data": {"name": "random:60,6,3,0"}, "model": {"name": "mlp:16"}, "training": settings}
    measures = {"at_loss": at_loss, "at_epochs": at_epochs}
    return CellConfig.model_validate({**sections, "measure": measures, "seed": seed})


def trained(*configs: CellConfig) -> list[Trained]:
    return train(configs, load_samples(configs[0].data))


def state(found: Trained) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in found.model.state_dict().values()])


# --- when to look -----------------------------------------------------------------------------------------------------


def watch(*levels: float, samples: int = 1000, batch_size: int = 50) -> Watch:
    return Watch(MeasureSection(at_loss=levels, at_epochs=(2,)), samples, batch_size)


def test_a_level_is_suspected_once_the_mean_of_batches_is_there_and_reported_once():
    eye = watch(0.5, 0.1)
    assert not eye.suspects(2.0)
    assert eye.suspects(0.4)
    assert eye.passed(0.45) == [Mark("loss", 0.5)]
    assert eye.passed(0.4) == []
    assert eye.passed(0.05, epoch=2) == [Mark("loss", 0.1), Mark("epoch", 2)]
    assert not eye.suspects(0.0)  # nothing is left to look for


def test_a_loss_that_is_not_a_number_crosses_nothing():
    eye = watch(0.5)
    assert not eye.suspects(math.nan)
    assert eye.passed(math.nan) == []
    assert eye.suspects(0.1)


def test_passes_in_vain_are_few_and_teach_how_the_training_set_differs():
    eye = watch(0.5)
    assert eye.suspects(0.4)
    assert eye.passed(0.6) == []
    eye.missed()
    assert eye.ratio == pytest.approx(1.5)
    eye.passed(1e9)
    assert eye.ratio == FARTHEST
    looked = 0
    for _ in range(200):  # ten epochs at a batch loss far below a level that the training set never reaches
        if eye.suspects(0.01):
            eye.passed(0.6)
            eye.missed()
            looked += 1
    assert SPARE_PASSES - 1 <= looked <= SPARE_PASSES


@pytest.mark.parametrize(
    "loss", [lambda t: math.exp(-t / 3), lambda t: 1 / (1 + t) ** 3, lambda t: 2 * math.exp(-((t / 6) ** 2))]
)
def test_levels_are_noticed_in_time_though_batches_have_five_times_the_loss(loss):
    """A network that learns by heart; what a few samples say of the loss after `t` epochs is off by a tenth, up or down."""
    eye = watch(1, 0.3, 0.1, 0.03, 0.01, 1e-3, samples=60_000, batch_size=256)
    noticed, looks, trail = {}, 0, Trail(torch.nn.Linear(1, 1))

    def at(place: Place) -> float:
        return loss(place.step / eye.steps_per_epoch)

    while eye.levels and eye.steps < 40 * eye.steps_per_epoch:
        now = loss(eye.steps / eye.steps_per_epoch)
        eye.suspects(5 * now)
        trail.follow(eye.steps)
        if eye.wants_a_look():
            looks += 1
            off = 1.1 if looks % 2 else 0.9
            if eye.looked(now * off):
                found = first_crossing(
                    trail.places, eye.levels[0], lambda place, off=off: off * at(place), lambda p: (at(p), 1.0)
                )
                noticed |= {mark.level: found[1][0] for mark in eye.passed(found[1][0])} if found else {}
                if found is None:
                    eye.missed()
            trail.forget(eye.steps)
    assert len(noticed) == 6
    assert all(0.6 * level < now <= level for level, now in noticed.items()), noticed
    assert 0.3 * looks * 2000 < 0.07 * eye.steps * 256  # a forward pass through layers of 512 costs 0.3 of a step


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [1, 3])
def test_training_is_the_same_bit_for_bit_with_and_without_levels(seeds: int) -> None:
    plain = trained(*(config([], seed=seed) for seed in range(seeds)))
    followed = trained(*(config(LEVELS, (3, 7), seed=seed, evaluate_every=4) for seed in range(seeds)))
    for one, other in zip(plain, followed, strict=True):
        assert torch.equal(state(one), state(other))
        assert one.steps == other.steps == 30 * 4
        assert other.along


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("evaluate_every", [1, 30])
def test_weights_are_those_of_the_first_crossing(seeds: int, evaluate_every: int) -> None:
    """With the whole training set as one batch every step is an epoch, and a curve of all epochs is an oracle."""
    configs = [
        config(LEVELS, (5,), seed=seed, batch_size=60, evaluate_every=evaluate_every, epochs=90)
        for seed in range(seeds)
    ]
    curves = trained(*(config([], seed=seed, batch_size=60, epochs=90) for seed in range(seeds)))
    samples = load_samples(configs[0].data)
    for cell, found, curve in zip(configs, trained(*configs), curves, strict=True):
        crossings = {kept.mark.level: kept for kept in found.along if kept.mark.kind == "loss"}
        assert list(crossings) == LEVELS
        for level, kept in crossings.items():
            first = next(row.epoch for row in curve.curve if row.train_loss <= level)
            # A batch has its loss before the step: where epochs are not evaluated, it tells a step later.
            assert kept.step == first if evaluate_every == 1 else kept.step in (first, first + 1)
            assert kept.scores.train_loss == curve.curve[kept.step - 1].train_loss <= level
            model = build(cell, samples.train)
            model.load_state_dict(dict(kept.weights))
            assert evaluate(model.eval(), samples.train.x, samples.train.y)[0] == pytest.approx(
                kept.scores.train_loss, rel=1e-5
            )
            assert evaluate(model, samples.test.x, samples.test.y)[0] == pytest.approx(kept.scores.test_loss, rel=1e-5)
        [fifth] = [kept for kept in found.along if kept.mark == Mark("epoch", 5)]
        assert fifth.scores.train_loss == curve.curve[4].train_loss


# --- in a study -------------------------------------------------------------------------------------------------------


def cells(tiny: str, folder: Path, *overrides: str) -> list[CellFolder]:
    prepare(read_plan(tiny, overrides=overrides), StudyFolder(folder))
    return StudyFolder(folder).cells()


ALONG = (
    "measure.at_loss=[1.09, 1.0, 0.001]",
    "measure.at_epochs=[2]",
    'measure.measures_along=["kappa_trace_sum"]',
    "training.epochs=30",
    "training.require={train_loss = 0.001}",
)


def test_a_study_measures_every_network_at_its_levels_whatever_becomes_of_it(tiny: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for cell in cells(tiny, folder, *ALONG):
        assert compute([cell.cell]) == DONE
    study = read_study(folder)
    assert study.marks == (Mark("loss", 1.09), Mark("loss", 1.0), Mark("epoch", 2))
    assert not study.measured  # none of them gets to 0.001
    there = study.at(Mark("loss", 1.0))
    assert [cell.reason for cell in there.cells] == ["", "", "did not come to train loss 1", ""]
    assert there.quantities(layers=False) == ("kappa_trace_sum",)
    first = there.measured[0]
    assert first.trained("train_loss") <= 1.0
    # What is measured there is what the kept weights give.
    own = CellFolder(folder / "cells" / first.hash)
    samples = load_samples(own.config().data)
    model = load_checkpoint(build(own.config(), samples.train), own.path / "loss-1.safetensors").eval()
    report = measure(model, (samples.train.x, samples.train.y), measures=["kappa_trace_sum"])
    assert first.measures["kappa_trace_sum"].value == pytest.approx(report["kappa_trace_sum"].value, rel=1e-6)
    assert {cell.reason for cell in study.at(Mark("loss", 0.001)).cells} == {"did not come to train loss 0.001"}
    write_study_report(folder)
    assert "Along training" in (folder / "report.html").read_text(encoding="utf-8")
    tables = tmp_path / "tables"
    tables.mkdir()
    for name in ("study.json", "results.csv", "levels.csv"):
        (tables / name).write_bytes((folder / name).read_bytes())
    for one, other in zip(read_tables(tables).cells, study.cells, strict=True):
        assert sorted(one.along, key=lambda p: p.mark.name) == sorted(other.along, key=lambda p: p.mark.name)


def test_levels_are_measured_without_training_again_and_lost_weights_are_trained_again(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = cells(tiny, tmp_path / "out", *ALONG, "seeds=1")[0]
    assert compute([one.cell]) == DONE
    before = one.result()
    assert before is not None
    (one.path / "result.json").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(worker, "train", lambda *_: pytest.fail("trained again"))
        assert compute([one.cell]) == DONE
    after = one.result()
    assert after is not None
    strip = [{**entry, "measures": entry["measures"]["values"]} for entry in after["along"]]
    assert strip == [{**entry, "measures": entry["measures"]["values"]} for entry in before["along"]]
    (one.path / "result.json").unlink()
    (one.path / "loss-1.safetensors").write_bytes(b"not weights")
    assert one.training_damage() == "loss-1.safetensors is damaged"
    (one.path / "loss-1.safetensors").unlink()
    assert one.training_damage() == "weights on the way, loss-1.safetensors, are missing"
    assert compute([one.cell]) == DONE
    assert (one.path / "loss-1.safetensors").is_file()


def test_other_measures_adopt_the_training_with_its_levels_and_other_levels_do_not(tiny: str, tmp_path: Path) -> None:
    [first, *_] = cells(tiny, tmp_path / "out", *ALONG, "seeds=1")
    assert compute([first.cell]) == DONE
    [second, *_] = cells(tiny, tmp_path / "out", *ALONG, "seeds=1", 'measure.measures_along=["rho_sum"]')
    assert second.hash != first.hash
    assert second.training() is not None
    [third, *_] = cells(tiny, tmp_path / "out", *ALONG, "seeds=1", "measure.at_loss=[1.1]")
    assert third.training() is None


def test_a_level_that_cannot_be_measured_says_why_and_the_others_count(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refusing(section: MeasureSection, *_: object) -> object:
        raise SpiritLevelError("no curvature today")

    [one, *_] = cells(tiny, tmp_path / "out", *ALONG, "seeds=1")
    monkeypatch.setattr(measuring, "measure_all", refusing)
    assert compute([one.cell]) == DONE
    study = read_study(tmp_path / "out")
    assert study.at(Mark("loss", 1.0)).cells[0].reason == "not measured at train loss 1: no curvature today"


def test_cells_without_levels_keep_their_names() -> None:
    cell = config([])
    settings = cell.model_dump(mode="json", exclude={"data": {"folder"}, "training": {"ensemble"}})
    for key in ("at_loss", "at_epochs", "measures_along", "orbit"):
        del settings["measure"][key]
    whole = {"config": settings, "data": "f", "version": __version__}
    canonical = json.dumps(whole, sort_keys=True, separators=(",", ":"))
    assert hash_of(cell, "f") == hashlib.sha256(canonical.encode()).hexdigest()[:16]
    assert hash_of(config([0.5]), "f") != hash_of(cell, "f")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("measure.at_loss=[1, 0.1, 1]", "names a level twice"),
        ("measure.at_loss=[0]", "greater than 0"),
        ("measure.at_epochs=[4]", r"names epoch 4, but training\.epochs is 3"),
        ('measure.measures_along=["rho_sum"]', "name one of them too"),
        ('measure.measures_along=["rho"]', "unknown measure"),
    ],
)
def test_levels_that_cannot_be_are_refused(tiny: str, setting: str, said: str) -> None:
    with pytest.raises(SpiritLevelError, match=said):
        read_plan(tiny, overrides=[setting])


def test_a_folder_from_before_levels_is_one_of_the_same_study(tiny: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    cells(tiny, folder, "seeds=1")
    plain = json.loads((folder / "study.json").read_text())
    for key in ("at_loss", "at_epochs", "measures_along"):
        del plain["config"]["measure"][key]
    (folder / "study.json").write_text(json.dumps(plain))
    assert len(cells(tiny, folder, "seeds=[1]")) == 4  # the cells of seed 0 stay beside those of seed 1
