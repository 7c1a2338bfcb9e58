"""What is done to inputs: asked for, taken from the data, or brought by a checkpoint; and what a wrong one looks like."""

import json

import pytest
import safetensors.torch
import torch
from torch import nn

from refusals import refused
from spiritlevel.cli import main
from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.report import Report
from spiritlevel.saved import sha256_of
from spiritlevel.study.samples import load_samples
from spiritlevel.study.settings import DataSection
from spiritlevel.subjects.checkpoint import save_checkpoint
from spiritlevel.subjects.data import load_data
from spiritlevel.subjects.networks import build_model
from spiritlevel.subjects.preprocessing import KNOWN, Standardization, of_checkpoint, statistics_of


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A network trained on standardized digits, its folder, and the mean and deviation it saw."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("standardized")
    data = load_data("digits")
    asked = statistics_of(data)
    x, y = asked.applied(data).x, data.y
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        model[1].weight.mul_(20)
        model[1].bias.mul_(20)
    names = {"0": "1", "2": "3"}
    weights = {
        f"layers.{k}.{p}": getattr(model[int(v)], p).detach() for k, v in names.items() for p in ("weight", "bias")
    }
    return folder, asked, weights, float(nn.functional.cross_entropy(model(x), y).detach())


def measured(folder, name, *options):
    target = folder / "report.json"
    main(["measure", "mlp:16", "--data", "digits", "--checkpoint", str(folder / name), "--measures", "hessian_trace",
          "--json", str(target), "--quiet", *options])  # fmt: skip
    return Report.load(target)


def quietly(*arguments):
    with pytest.raises(SystemExit) as end:
        measured(*arguments)
    assert end.value.code in (0, None)
    return Report.load(arguments[0] / "report.json")


def test_statistics_are_those_of_every_channel():
    data = load_data("digits")
    found = statistics_of(data)
    assert found.mean == pytest.approx((float(data.x.mean()),), rel=1e-5)
    assert found.std == pytest.approx((float(data.x.std(correction=0)),), rel=1e-5)
    moved = found.applied(data)
    assert abs(float(moved.x.mean())) < 1e-4
    assert moved.normalisation.startswith("x / 16, then")


def save(folder, weights, name, metadata=None):
    safetensors.torch.save_file(weights, folder / name, metadata=metadata)


def test_preprocessing_on_the_command_line(trained, capsys):
    folder, asked, weights, loss = trained
    names = list(build_model("mlp:16", input_shape=(1, 8, 8), classes=10).state_dict())
    weights = dict(zip(names, weights.values(), strict=True))
    save(folder, weights, "plain.safetensors")
    save(folder, weights, "telling.safetensors",
         {"mean": json.dumps(asked.mean), "std": json.dumps(asked.std)})  # fmt: skip
    mean, std = (",".join(map(str, part)) for part in (asked.mean, asked.std))
    raw = quietly(folder, "plain.safetensors")
    said = capsys.readouterr().err
    assert raw.loss > 2.3
    assert "warning: the loss on the training data" in said
    assert "is worse than chance (ln 10 = 2.303)" in said
    assert "See --mean, --std, --standardize and --label-noise" in raw.notes[0]
    for name, options in (
        ("plain.safetensors", ("--mean", mean, "--std", std)),
        ("plain.safetensors", ("--standardize",)),
        ("telling.safetensors", ()),
    ):
        report = quietly(folder, name, *options)
        assert report.loss == pytest.approx(loss, rel=1e-4)
        assert "worse than chance" not in " ".join(report.notes)
        assert report.problem["source"]["preprocessing"].startswith("x / 16, then (x - (")
        assert "preprocessing: x / 16, then" in capsys.readouterr().err
    page = folder / "page.html"
    quietly(folder, "telling.safetensors", "--html", str(page))
    text = page.read_text()
    for fact in (
        "digits, train split, 1,442 samples",
        "telling.safetensors (sha256 ",
        "as said by telling.safetensors",
        "UTC",
    ):
        assert fact in text


def test_wrong_use(capsys):
    for options, message in (
        (["--mean", "0.5"], "--mean and --std belong together: give both"),
        (["--mean", "a", "--std", "1"], "--mean must be numbers separated by commas, one for each channel, got 'a'"),
        (["--device", "nowhere"], "--device nowhere cannot be used here"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["measure", "tests:x", "--data", "digits", *options])
        assert end.value.code == 2
        assert message in capsys.readouterr().err


def test_known_checkpoints_are_known_by_their_content(tmp_path, monkeypatch):
    file = tmp_path / "weights.th"
    file.write_bytes(b"weights")
    assert of_checkpoint(file) is None
    monkeypatch.setitem(KNOWN, sha256_of(file)[:8], ((0.5,), (0.25,)))
    assert of_checkpoint(file) == Standardization((0.5,), (0.25,), "weights.th, a known checkpoint")


@pytest.mark.parametrize("mean", ["half", '["a"]', '{"a": 1}', "[NaN]", "[]", "null"])
def test_a_checkpoint_whose_metadata_are_no_numbers_is_refused(tmp_path, mean):
    path = tmp_path / "net.safetensors"
    save_checkpoint(build_model("mlp:4", input_shape=(2,), classes=3), path, {"mean": mean, "std": "[1.0]"})
    with pytest.raises(
        SpiritLevelError, match="in its metadata, which should be a list of numbers in JSON, one for each channel"
    ):
        of_checkpoint(path)


def test_one_number_in_the_metadata_stands_for_every_channel(tmp_path):
    path = tmp_path / "net.safetensors"
    save_checkpoint(build_model("mlp:4", input_shape=(2,), classes=3), path, {"mean": "0.5", "std": "[0.25]"})
    assert of_checkpoint(path) == Standardization((0.5,), (0.25,), "net.safetensors itself")


def test_samples_are_random_with_a_seed():
    everything = load_data("digits")
    first, again, other = (load_data("digits", samples=50, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.x, other.x)
    assert not torch.equal(first.x, everything.x[:50])
    assert torch.equal(load_data("digits", samples=50).x, everything.x[:50])


def test_preprocessing_of_a_study():
    section = DataSection(name="digits", mean=(0.25,), std=(0.5,))
    plain = DataSection(name="digits")
    assert set(plain.model_dump(mode="json")) == {"name", "folder", "label_noise", "train_samples", "test_samples"}
    assert "mean" in section.model_dump(mode="json")
    moved, raw = load_samples(section), load_samples(plain)
    assert torch.allclose(moved.test.x, (raw.test.x - 0.25) / 0.5)
    with pytest.raises(ValueError, match="`mean` and `std` belong together"):
        DataSection(name="digits", mean=(0.25,))


def test_refusals():
    with refused("digits has 1 channels; `standardized` needs as many means and positive deviations, got mean=(0.0, 1.0), std=(1.0, 1.0)"):  # fmt: skip
        Standardization((0.0, 1.0), (1.0, 1.0)).applied(load_data("digits"))


def test_a_checkpoint_that_is_not_there_or_damaged_is_refused_in_words(tmp_path, run) -> None:
    options = ("measure", "mlp:4", "--data", "digits", "--checkpoint")
    for name in ("nowhere.safetensors", "nowhere.pt"):
        code, _, said = run(*options, tmp_path / name)
        assert (code, "FileNotFound" in said) == (2, False)
        assert f"no checkpoint file {tmp_path / name}: pass the path of" in " ".join(said.split())
    (tmp_path / "cut.safetensors").write_bytes(b"123")
    code, _, said = run(*options, tmp_path / "cut.safetensors")
    assert code == 2
    assert "is not a whole safetensors file" in " ".join(said.split())
