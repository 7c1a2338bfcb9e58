"""Labels drawn at random: which, among how many, and how the checkpoint of a study brings them along."""

import json

import pytest
import safetensors.torch
import torch

from refusals import refused
from spiritlevel.subjects.checkpoint import read_metadata, read_state_dict, save_checkpoint
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
        "which labels they were cannot be told; give the data with their labels, as file.npz or package.module:factory"
    ):
        load_data("digits", labels=LabelNoise(0.5, 2, 400, "net.safetensors itself"))


def test_a_checkpoint_says_it_and_none_is_said_of_true_labels(tmp_path):
    model, path = build_model("mlp:4", input_shape=(2,), classes=3), tmp_path / "net.safetensors"
    noise = LabelNoise(0.3, 7, 100)
    save_checkpoint(model, path, noise.metadata)
    assert labels_of_checkpoint(path) == LabelNoise(0.3, 7, 100, "net.safetensors itself")
    save_checkpoint(model, path, {"label_noise": "0.3"})
    assert labels_of_checkpoint(path) == LabelNoise(0.3, 0, None, "net.safetensors itself")
    save_checkpoint(model, path, LabelNoise(0.0, 7).metadata)
    assert labels_of_checkpoint(path) is None
    save_checkpoint(model, path, {"label_noise": "half"})
    with refused(f"{path} says {{'label_noise': 'half'}} in its metadata, which should be numbers"):
        labels_of_checkpoint(path)


def test_the_checkpoint_of_a_study_is_measured_on_what_it_was_trained_on(tmp_path, run):
    plan = tmp_path / "noisy.toml"
    plan.write_text(
        """
        seeds = [5]
        [data]
        name = "digits"
        standardize = true
        [model]
        name = "mlp:16"
        [training]
        learning_rate = 0.1
        batch_size = 32
        epochs = 3
        [factors]
        data.label_noise = [0.0, 0.5]
        [measure]
        measures = ["hessian_trace"]
        at_loss = [2.2]
        """
    )
    code, _, said = run("study", "run", plan, "--folder", tmp_path / "out", "--workers", 1)
    assert code == 0, said
    for path in (tmp_path / "out" / "cells").iterdir():
        found = json.loads((path / "result.json").read_text())
        share = found["factors"]["data.label_noise"]
        kept = found["along"][0]
        for name, loss, trace in (
            (
                "model.safetensors",
                found["training"]["train_loss"],
                found["measures"]["values"]["hessian_trace"]["value"],
            ),
            (kept["file"], kept["train_loss"], kept["measures"]["values"]["hessian_trace"]["value"]),
        ):
            assert read_metadata(path / name).get("label_noise") == (None if share == 0 else "0.5")
            out = tmp_path / "report.json"
            options = (
                "measure",
                "mlp:16",
                "--data",
                "digits",
                "--checkpoint",
                path / name,
                "--measures",
                "hessian_trace",
            )
            code, _, said = run(*options, "--json", out, "--quiet")
            assert code == 0, said
            report = json.loads(out.read_text())
            assert report["loss"] == pytest.approx(loss, rel=1e-5)
            assert report["values"]["hessian_trace"]["value"] == pytest.approx(trace, rel=1e-4)
            told = f"0.5 of the training labels drawn anew (seed 5), as said by {name} itself"
            assert report["problem"]["source"].get("labels") == (told if share else None)
            assert (f"labels: {told}" in said) == bool(share)
            if share:
                bare = tmp_path / "bare.safetensors"  # without what it says of itself, the same by options
                safetensors.torch.save_file(read_state_dict(path / name), bare)
                asked = (*options[:5], bare, *options[6:], "--standardize", "--label-noise", 0.5)
                run(*asked, "--label-seed", 5, "--json", out, "--quiet")
                assert json.loads(out.read_text())["loss"] == report["loss"]
                run(*options, "--label-noise", 0, "--json", out, "--quiet")
                assert json.loads(out.read_text())["loss"] != pytest.approx(report["loss"], rel=0.01)
                run(*options, "--split", "test", "--json", out, "--quiet")  # of which all labels are true
                assert "labels" not in json.loads(out.read_text())["problem"]["source"]


def test_wrong_use_on_the_command_line(tmp_path, run):
    path = tmp_path / "net.safetensors"
    save_checkpoint(build_model("mlp:4", input_shape=(1, 8, 8), classes=10), path)
    options = ("measure", "mlp:4", "--data", "digits", "--checkpoint", path)
    for wrong, told in (
        (("--label-seed", 1), "--label-seed says which labels are drawn anew: say how many, by --label-noise SHARE"),
        (("--label-noise", 2), "the share of labels drawn anew must be from 0 to 1, got 2.0"),
    ):
        code, _, said = run(*options, *wrong)
        assert code == 2
        assert told in " ".join(said.split())
