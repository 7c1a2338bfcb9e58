"""`spiritlevel bound`, `robustness` and `compare` from outside: what they print, write and refuse."""

import json
from pathlib import Path

import pytest

from spiritlevel.subjects.checkpoint import save_checkpoint
from spiritlevel.subjects.networks import build_model

DATA = "random:40,12,3,0"


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """Two small networks with weights on disk."""
    folder = tmp_path_factory.mktemp("weights")
    for seed in (1, 2):
        save_checkpoint(
            build_model("mlp:6-5", input_shape=(12,), classes=3, seed=seed), folder / f"n{seed}.safetensors"
        )
    return folder


def test_bound_prints_the_terms_and_writes_what_is_asked(run, weights, tmp_path) -> None:
    common = ("bound", "mlp:6-5", "--checkpoint", weights / "n1.safetensors", "--data", DATA, "--draws", 5)
    code, out, _ = run(*common, "--test", "--json", tmp_path / "b.json", "--html", tmp_path / "b.html")
    assert code == 0
    for words in ("training error", "Monte Carlo", "divergence", "test error of Q", "vacuous"):
        assert words in out
    saved = json.loads((tmp_path / "b.json").read_text())
    assert saved["samples"] == 40
    assert saved["bound"] == pytest.approx(sum(saved["terms"].values()))
    assert "<svg" in (tmp_path / "b.html").read_text()
    code, out, _ = run(*common, "--prior", weights / "n1.safetensors", "--json", "-")
    assert json.loads(out)["terms"]["divergence"] == 0


def test_robustness_prints_the_curve(run, weights, tmp_path) -> None:
    common = ("robustness", "mlp:6-5", "--checkpoint", weights / "n1.safetensors", "--data", DATA)
    code, out, _ = run(*common, "--layer", "fc2", "--delta", 0.1, "--matrix-count", 2, "--html", tmp_path / "r.html")
    assert code == 0
    assert "fc2.weight, δ = 0.1" in out
    assert "bound, δ²/2·κ" in out
    assert "<svg" in (tmp_path / "r.html").read_text()
    code, _, err = run(*common, "--layer", "fc9.weight")
    assert code == 2
    assert err.startswith("error: the network has no layer 'fc9.weight'; did you mean 'fc")
    code, _, err = run(*common, "--layer", "fc2", "--delta", -1)
    assert (code, err) == (2, "error: delta must be a positive number, the size of the perturbation; got -1.0\n")


def test_compare_ranks_networks(run, weights, tmp_path) -> None:
    networks = [f"one=mlp:6-5@{weights / 'n1.safetensors'}", f"mlp:6-5@{weights / 'n2.safetensors'}"]
    common = ("compare", *networks, "--data", DATA, "--measures", "rho_sum,hessian_trace")
    code, out, _ = run(*common, "--json", tmp_path / "c.json", "--html", tmp_path / "c.html")
    assert code == 0
    assert "rho_sum" in out
    assert sorted(json.loads((tmp_path / "c.json").read_text())["rankings"]["rho_sum"]) == ["n2", "one"]
    assert "Who is flatter" in (tmp_path / "c.html").read_text()
    assert "probabilities are about data of the same kind" in " ".join(out.split())
    code, out, _ = run(*common, "--these-data", "--json", "-")
    assert code == 0
    assert json.loads(out)["parts"] == {}
    assert "These orders are about these data only" in " ".join(json.loads(out)["statements"])


def test_wrong_use_leaves_with_two(run, weights) -> None:
    one = f"mlp:6-5@{weights / 'n1.safetensors'}"
    code, _, err = run("compare", one, "--data", DATA)
    assert (code, err) == (2, "error: compare needs at least two networks as a dict of name → model, got 1\n")
    code, _, err = run("compare", one, one, "--data", DATA)
    assert (code, err) == (2, "error: two networks are called 'n1': give each a name, as in NAME=MODEL@FILE\n")
    code, _, err = run("bound", "mlp:6-5", "--checkpoint", weights / "n1.safetensors", "--data", DATA, "--quiet")
    assert code == 2
    assert err == "error: --quiet prints no result, so nothing would be left of the work: add --json or --html\n"
