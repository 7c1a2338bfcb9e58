"""Labels drawn at random: which, among how many, and how the checkpoint of a study brings them along."""

import json

import pytest
import torch

from refusals import refused
from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.report import Report
from spiritlevel.study.plan import read_plan
from spiritlevel.study.run import prepare
from spiritlevel.study.store import StudyFolder
from spiritlevel.study.worker import DONE, compute
from spiritlevel.subjects.checkpoint import read_metadata, read_state_dict, save_checkpoint, save_state_dict
from spiritlevel.subjects.data import load_data
from spiritlevel.subjects.labels import LabelNoise, labels_of_checkpoint
from spiritlevel.subjects.networks import build_model


def test_a_share_of_the_labels_is_drawn_anew():
    y = torch.zeros(10_000, dtype=torch.int64)
    assert torch.equal(LabelNoise(0.0).applied(y, 10), y)
    half = LabelNoise(0.5).applied(y, 10)
    assert (half != 0).float().mean().item() == pytest.approx(0.45, abs=0.02)  # a tenth is drawn as it was
    assert torch.equal(LabelNoise(0.5).applied(y, 10), half)
    assert not torch.equal(LabelNoise(0.5, seed=1).applied(y, 10), half)
    assert torch.bincount(LabelNoise(1.0).applied(y, 10)).min() > 850


def test_samples_are_chosen_of_labels_that_are_drawn_among_all():
    noise = LabelNoise(0.5, seed=3)
    whole = load_data("digits", labels=noise)
    some = load_data("digits", samples=50, seed=1, labels=noise)
    true = load_data("digits", samples=50, seed=1)
    assert torch.equal(some.x, true.x)
    assert not torch.equal(some.y, true.y)
    rows = [int((whole.x == image).flatten(1).all(1).nonzero()[0]) for image in some.x]
    assert torch.equal(some.y, whole.y[rows])


def test_refusals():
    with refused("the share of labels drawn anew must be from 0 to 1, got 1.5"):
        LabelNoise(1.5)
    with refused("targets are real numbers: labels can be drawn anew of classes only"):
        LabelNoise(0.5).applied(torch.zeros(3, 2), 2)
    with refused(
        "0.5 of the training labels drawn anew (seed 2), as said by net.safetensors itself among 400 samples, and here are 1,442: "
        "which labels they were cannot be told. Give the data with the labels that were trained, as file.npz or package.module:factory; "
        "--label-noise 0 takes the labels as the data have them"
    ):
        load_data("digits", labels=LabelNoise(0.5, 2, 400, said_by="net.safetensors itself"))
    with pytest.raises(SpiritLevelError, match=r"drawn anew \(seed 2\) among 9 classes, and here are 10: which labels"):
        load_data("digits", labels=LabelNoise(0.5, 2, classes=9))
    assert torch.equal(LabelNoise(0.0, among=3).applied(torch.arange(4), 4), torch.arange(4))  # none was drawn


def test_a_checkpoint_says_it_and_none_is_said_of_true_labels(tmp_path):
    model, path = build_model("mlp:4", input_shape=(2,), classes=3), tmp_path / "net.safetensors"
    noise = LabelNoise(0.3, 7, 100, 3)
    save_checkpoint(model, path, noise.metadata)
    assert labels_of_checkpoint(path) == LabelNoise(0.3, 7, 100, 3, "net.safetensors itself")
    save_checkpoint(model, path, {"label_noise": "0.3"})
    assert labels_of_checkpoint(path) == LabelNoise(0.3, 0, said_by="net.safetensors itself")
    save_checkpoint(model, path, LabelNoise(0.0, 7).metadata)
    assert labels_of_checkpoint(path) is None
    save_checkpoint(model, path, {"label_noise": "half"})
    with refused(
        f"{path} says {{'label_noise': 'half'}} in its metadata, which should be numbers; "
        "--label-noise 0 takes the labels as the data have them"
    ):
        labels_of_checkpoint(path)


NOISY = """
title = "noisy"
seeds = [5]
data = { name = "digits", standardize = true }
model = { name = "mlp:16" }
training = { learning_rate = 0.1, batch_size = 32, epochs = 3 }
factors = { data.label_noise = [0.0, 0.5] }
measure = { measures = ["hessian_trace"], at_loss = [2.2] }
"""
TOLD = "0.5 of the training labels drawn anew (seed 5), as said by {} itself"


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Share of random labels → the folder and the result of a network that a study trained on standardized inputs."""
    place = tmp_path_factory.mktemp("noisy")
    (place / "noisy.toml").write_text(NOISY)
    folder = StudyFolder(place / "out")
    for group in prepare(read_plan(str(place / "noisy.toml")), folder):
        assert compute([cell.cell for cell in group]) == DONE
    results = {path.parent: json.loads(path.read_text()) for path in (place / "out" / "cells").glob("*/result.json")}
    return {found["factors"]["data.label_noise"]: (path, found) for path, found in results.items()}


@pytest.fixture
def measured(tmp_path, run):
    """Measure weights on the digits; gives the report and what was said."""

    def call(weights, *options):
        out = tmp_path / "report.json"
        names = ("measure", "mlp:16", "--data", "digits", "--checkpoint", weights, "--measures", "hessian_trace")
        code, _, said = run(*names, *options, "--json", out, "--quiet")
        assert code == 0, said
        return Report.load(out), said

    return call


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("at", ["the end", "a train loss of 2.2"])
def test_weights_of_a_study_are_measured_on_what_they_were_trained_on(cells, measured, share, at):
    path, found = cells[share]
    there, ended = found["along"][0], found["training"]
    name, loss, at_it = (
        ("model.safetensors", ended["train_loss"], found["measures"])
        if at == "the end"
        else (there["file"], there["train_loss"], there["measures"])
    )
    report, said = measured(path / name)
    assert report.loss == pytest.approx(loss, rel=1e-5)
    assert report["hessian_trace"].value == pytest.approx(at_it["values"]["hessian_trace"]["value"], rel=1e-4)
    assert report.problem["source"].get("labels") == (TOLD.format(name) if share else None)
    assert (f"labels: {TOLD.format(name)}" in said) == bool(share)
    assert read_metadata(path / name).get("label_noise") == ("0.5" if share else None)


def test_weights_that_do_not_say_it_are_told_by_options(cells, measured, tmp_path):
    telling, bare = cells[0.5][0] / "model.safetensors", tmp_path / "bare.safetensors"
    save_state_dict(read_state_dict(telling), bare)
    expected = measured(telling)[0].loss
    assert measured(bare, "--standardize", "--label-noise", 0.5, "--label-seed", 5)[0].loss == expected
    assert measured(bare, "--standardize", "--label-noise", 0.5)[0].loss != pytest.approx(expected, rel=0.01)
    assert measured(telling, "--label-noise", 0)[0].loss != pytest.approx(expected, rel=0.01)
    assert "labels" not in measured(telling, "--split", "test")[0].problem["source"]  # all of which are true


def test_options_that_say_what_the_checkpoint_says_leave_its_seed_and_counts(cells, measured):
    telling = cells[0.5][0] / "model.safetensors"
    expected = measured(telling)[0].loss
    for options in (("--label-noise", 0.5), ("--label-noise", 0.5, "--label-seed", 5)):
        report, said = measured(telling, *options)
        assert report.loss == expected
        assert f"labels: {TOLD.format('model.safetensors')}" in said


@pytest.mark.parametrize("options", [("--label-noise", 0.4), ("--label-noise", 0.5, "--label-seed", 0)])
def test_options_that_contradict_the_checkpoint_are_refused(cells, run, options):
    path = cells[0.5][0] / "model.safetensors"
    code, _, said = run("measure", "mlp:16", "--data", "digits", "--checkpoint", path, *options)
    assert code == 2
    seed = options[3] if len(options) > 2 else 5
    assert f"{TOLD.format(path.name)}, and not {options[1]} of them (seed {seed}): on other labels" in " ".join(
        said.split()
    )


def test_the_number_of_classes_is_said_too(cells):
    path, _ = cells[0.5]
    assert read_metadata(path / "model.safetensors")["label_classes"] == "10"


def test_a_loss_worse_than_chance_may_be_that_of_other_labels(cells, measured):
    _, said = measured(cells[0.5][0] / "model.safetensors", "--mean", "-500", "--std", "0.01")
    assert "and on these labels? See --mean, --std, --standardize and --label-noise" in " ".join(said.split())


def test_wrong_use_on_the_command_line(tmp_path, run):
    path = tmp_path / "net.safetensors"
    save_checkpoint(build_model("mlp:4", input_shape=(1, 8, 8), classes=10), path)
    options = ("measure", "mlp:4", "--data", "digits", "--checkpoint", path)
    for wrong, told in (
        (("--label-seed", 1), "--label-seed says which labels are drawn anew: say how many, by --label-noise SHARE"),
        (("--label-noise", 2), "the share of labels drawn anew must be from 0 to 1, got 2.0"),
        (("--label-noise", 7, "--split", "test"), "the share of labels drawn anew must be from 0 to 1, got 7.0"),
    ):
        code, _, said = run(*options, *wrong)
        assert code == 2
        assert told in " ".join(said.split())
