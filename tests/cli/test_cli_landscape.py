"""`spiritlevel landscape` and `spiritlevel spectrum`, as a person runs them."""

import json

import pytest

from spiritlevel.landscape import landscape
from spiritlevel.subjects.checkpoint import save_checkpoint
from spiritlevel.subjects.data import load_data
from spiritlevel.subjects.networks import build_model


@pytest.fixture
def trained(tmp_path):
    data = load_data("digits", samples=60)
    for seed in (1, 2):
        model = build_model("mlp:8", input_shape=data.input_shape, classes=data.classes, seed=seed)
        save_checkpoint(model, tmp_path / f"model{seed}.safetensors")
    return ["mlp:8", "--data", "digits", "--samples", "60", "--checkpoint", str(tmp_path / "model1.safetensors")]


def test_lines_are_drawn_written_and_continued(trained, tmp_path, run, monkeypatch):
    out = tmp_path / "out"
    command = ["landscape", *trained, "--points", "5", "--seeds", "2", "--out", out]
    code, said, err = run(*command)
    assert code == 0, err
    assert "along random directions" in said
    names = {path.name for path in out.iterdir()}
    assert names == {f"line-random-layer{suffix}" for suffix in (".grid.json", ".json", ".png", ".svg")}
    found = landscape.load(out / "line-random-layer.json")
    assert found.losses.shape == (2, 5)
    assert (out / "line-random-layer.png").read_bytes().startswith(b"\x89PNG")
    picture = (out / "line-random-layer.svg").read_bytes()

    def no_more(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr(landscape, "_loss_and_accuracy", no_more)
    assert run(*command)[0] == 0
    assert (out / "line-random-layer.svg").read_bytes() == picture


def test_an_interrupted_grid_is_kept_and_said(trained, tmp_path, run, monkeypatch):
    out = tmp_path / "out"
    compute, calls = landscape._loss_and_accuracy, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return compute(*arguments)

    monkeypatch.setattr(landscape, "_loss_and_accuracy", interrupted)
    command = ["landscape", *trained, "--surface", "--points", "4", "--normalization", "filter", "--out", out]
    code, _, err = run(*command)
    assert code == 130
    assert "what is done is kept" in err
    assert len(json.loads((out / "surface-random-filter.grid.json").read_text())["values"]) == 7
    assert run(*command, "--three-d", "--quiet") == (0, "", "")
    assert len(calls) == 8 + 16 - 7
    assert landscape.load(out / "surface-random-filter.json").losses.shape == (4, 4)


def test_a_line_leads_to_another_checkpoint(trained, tmp_path, run):
    other = tmp_path / "model2.safetensors"
    command = ["landscape", *trained, "--directions", "between", "--other", other, "--points", "3", "--span", "0,1"]
    assert run(*command, "--out", tmp_path / "out")[0] == 0
    found = landscape.load(tmp_path / "out" / "line-between-none.json")
    assert found.steps.tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--directions", "sideways"], "--directions must be random, eigen or between"),
        (["--directions", "between"], "belong together"),
        (["--span", "1"], "--span must be two numbers"),
        (["--three-d"], "add --surface"),
        (["--normalization", "silly"], "normalization must be one of"),
        (["--points", "1"], "points must be at least 2"),
    ],
)
def test_wrong_use_of_landscape_is_said(trained, tmp_path, run, options, message):
    code, _, err = run("landscape", *trained, "--out", tmp_path / "out", *options)
    assert code == 2
    assert message in err


def test_a_spectrum_is_printed_drawn_and_written(trained, tmp_path, run):
    picture, json_file = tmp_path / "spectrum.png", tmp_path / "spectrum.json"
    options = ["--steps", "6", "--probes", "2", "--ends", "2"]
    code, out, err = run(
        "spectrum", *trained, *options, "--operator", "riemannian", "--picture", picture, "--json", json_file
    )
    assert code == 0, err
    assert "eigenvalues of D H D" in out
    assert "largest" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    saved = json.loads(json_file.read_text())
    assert len(saved["probes"]) == len(saved["top"]) == 2
    code, out, _ = run("spectrum", *trained, *options, "--json", "-")
    assert json.loads(out)["operator"] == "hessian"


def test_wrong_use_of_spectrum_is_said(trained, tmp_path, run):
    for options, message in (
        (["--quiet"], "add --json or --picture"),
        (["--picture", tmp_path / "spectrum.doc"], "must end in .png, .svg or .pdf"),
        (["--operator", "9.weight"], "operator must be one of"),
        (["--probes", "1"], "probes must be a whole number of at least 2, got 1"),
    ):
        code, _, err = run("spectrum", *trained, *options)
        assert code == 2
        assert message in err


def test_both_write_a_page_that_says_what_was_measured(trained, tmp_path, run):
    spectrum = ["spectrum", *trained, "--probes", "2", "--steps", "6", "--ends", "1"]
    line = ["landscape", *trained, "--points", "3", "--seeds", "1", "--out", tmp_path / "out"]
    for command, title in ((spectrum, "Spectrum of the hessian"), (line, "Landscape")):
        page = tmp_path / "page.html"
        code, _, err = run(*command, "--html", page, "--quiet")
        assert (code, err) == (0, "")
        text = page.read_text()
        assert title in text
        assert "digits, train split, 60 samples chosen at random (seed 0)" in text
        assert "model1.safetensors (sha256 " in text
