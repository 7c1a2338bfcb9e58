"""`spiritlevel audit` and `spiritlevel sharpen`, as a person runs them."""

import json

import pytest
import torch

from spiritlevel.subjects.checkpoint import load_checkpoint, save_checkpoint
from spiritlevel.subjects.data import load_data
from spiritlevel.subjects.networks import build_model


@pytest.fixture
def trained(tmp_path):
    data = load_data("digits", samples=60)
    model = build_model("mlp:8", input_shape=data.input_shape, classes=data.classes, seed=1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data.x), data.y).backward()
        optimizer.step()
    path = tmp_path / "model.safetensors"
    save_checkpoint(model, path)
    return ["mlp:8", "--data", "digits", "--samples", "60", "--checkpoint", str(path)]


def test_audit_prints_verdicts_and_writes_files(trained, tmp_path, run):
    json_file, html_file = tmp_path / "audit.json", tmp_path / "audit.html"
    code, out, err = run(
        "audit",
        *trained,
        "--measures",
        "hessian_trace,rho_sum",
        "--strengths",
        "1",
        "--json",
        json_file,
        "--html",
        html_file,
    )
    assert code == 0, err
    assert "1 of 2 measures survives every change of weights" in out
    assert "batch-norm changes were not audited" in " ".join(out.split())
    saved = json.loads(json_file.read_text())
    verdicts = {(f["measure"], f["kind"]): f["verdict"] for f in saved["findings"]}
    assert verdicts["hessian_trace", "layer"] == "moves"
    assert verdicts["rho_sum", "neuron"] == "invariant"
    assert "Which measures survive rescaling?" in html_file.read_text()


def test_audit_refuses_strengths_that_are_no_numbers(trained, run):
    code, _, err = run("audit", *trained, "--strengths", "mild,wild")
    assert code == 2
    assert err.strip() == "error: --strengths must be numbers separated by commas, got 'mild,wild'"


def test_sharpen_writes_a_twin_that_computes_the_same(trained, tmp_path, run):
    twin_file = tmp_path / "twin.safetensors"
    code, out, err = run("sharpen", *trained, "--target", "1e5", "--out", twin_file)
    assert code == 0, err
    assert "hessian_spectral_norm:" in out
    assert ".weight × " in out
    data = load_data("digits", samples=60)
    models = []
    for path in (trained[-1], twin_file):
        model = build_model("mlp:8", input_shape=data.input_shape, classes=data.classes)
        models.append(load_checkpoint(model, path))
    torch.testing.assert_close(models[0](data.x), models[1](data.x), rtol=1e-4, atol=1e-4)


def test_sharpen_refuses_a_negative_target(trained, run):
    code, _, err = run("sharpen", *trained, "--target=-3")
    assert code == 2
    assert err.strip() == "error: target must be a positive number, got -3.0"


def test_a_quiet_audit_that_writes_nothing_is_refused(trained, run):
    said = "error: --quiet prints no result, so nothing would be left of the work: add --json or --html\n"
    assert run("audit", *trained, "--quiet") == (2, "", said)
