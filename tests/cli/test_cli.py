"""The command line from outside: what it prints, what it writes, how it leaves."""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

import spiritlevel as sl
from spiritlevel import cli
from spiritlevel.cli import demonstration as showcase
from spiritlevel.subjects.checkpoint import save_checkpoint
from spiritlevel.subjects.data import load_data
from spiritlevel.subjects.networks import build_model

DATA = "random:40,12,3,0"


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """A small network with weights on disk."""
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_checkpoint(build_model("mlp:6-5", input_shape=(12,), classes=3, seed=1), path)
    return path


@pytest.fixture
def measure(run, weights):
    """`spiritlevel measure` on the small network."""
    return lambda *more: run("measure", "mlp:6-5", "--checkpoint", weights, "--data", DATA, *more)


# --- measures ------------------------------------------------------------------------------------------------------


def test_version(run) -> None:
    assert run("--version") == (0, f"spiritlevel {sl.__version__}\n", "")


def test_measures_lists_every_measure_with_its_formula(run) -> None:
    code, out, err = run("measures")
    assert (code, err) == (0, "")
    for measure in sl.list_measures():
        assert measure.name in out
        assert measure.formula.split(",")[0] in out


def test_measures_as_json_are_the_records(run) -> None:
    code, out, _ = run("measures", "--json")
    entries = {entry["name"]: entry for entry in json.loads(out)}
    assert code == 0
    assert list(entries) == [measure.name for measure in sl.list_measures()]
    assert entries["rho_sum"]["invariant_under"] == ["layer", "neuron"]
    assert entries["epsilon_sharpness"]["options"] == {"epsilon": 1e-3}
    assert entries["epsilon_sharpness"]["default"] is False


@pytest.mark.parametrize("arguments", [["measures"], ["--help"], ["measure", "--help"], ["demo", "--help"]])
def test_fits_sixty_columns(run, monkeypatch, arguments) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run(*arguments)
    assert max(map(len, out.splitlines())) <= 60


def test_no_command_shows_the_help(run) -> None:
    code, out, err = run()
    assert code == 2
    assert "Commands:" in out + err


# --- measure: what comes out ---------------------------------------------------------------------------------------


def test_measure_prints_a_table_with_the_values_of_the_library(measure, weights) -> None:
    code, out, err = measure("--measures", "kappa_trace_sum,rho_sum", "--dtype", "float64")
    assert (code, err) == (0, "")
    model = build_model("mlp:6-5", input_shape=(12,), classes=3, seed=1)
    data = load_data(DATA)
    report = sl.measure(model, (data.x, data.y), measures=["kappa_trace_sum", "rho_sum"], dtype=torch.float64)
    for name in report:
        assert name in out
        assert f"{report[name].value:.5g}"[:5] in out


def test_measure_fits_sixty_columns(measure, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = measure()
    assert max(map(len, out.splitlines())) <= 60
    assert "hessian_spectral_norm" in out


def test_measure_writes_json_that_loads_back_and_a_page(measure, tmp_path) -> None:
    saved, page = tmp_path / "deep" / "report.json", tmp_path / "report.html"
    code, out, err = measure("--measures", "rho_sum", "--json", saved, "--html", page, "--seed", 3)
    assert code == 0
    assert "rho_sum" in out
    assert err == f"wrote {saved}\nwrote {page}\n"
    report = sl.Report.load(saved)
    assert report["rho_sum"].exact
    assert report.problem["seed"] == 3
    assert "rho_sum" in page.read_text(encoding="utf-8")


def test_quiet_writes_and_says_nothing(measure, tmp_path) -> None:
    assert measure("--measures", "rho_sum", "--json", tmp_path / "r.json", "--quiet") == (0, "", "")
    assert "rho_sum" in sl.Report.load(tmp_path / "r.json")


def test_json_to_standard_output_is_nothing_but_json(measure) -> None:
    code, out, err = measure("--measures", "rho_sum", "--json", "-")
    assert (code, err) == (0, "")
    assert sl.Report.from_dict(json.loads(out))["rho_sum"].value > 0


def test_all_and_options_of_measures(measure, tmp_path) -> None:
    saved = tmp_path / "r.json"
    assert measure("--measures", "all", "--json", saved, "-q")[0] == 0
    assert list(sl.Report.load(saved)) == [each.name for each in sl.list_measures()]
    assert measure("--measures", "epsilon_sharpness:epsilon=5e-4, rho_sum", "--json", saved, "-q")[0] == 0
    assert sl.Report.load(saved)["epsilon_sharpness"].details["epsilon"] == 5e-4
    assert measure("--measures", "riemannian_spectral_norm:method=power", "--json", saved, "-q")[0] == 0
    assert "Algorithm 1" in sl.Report.load(saved)["riemannian_spectral_norm"].method


def test_samples_and_split_choose_the_data(measure, tmp_path) -> None:
    losses = []
    for more in ([], ["--samples", "7"], ["--split", "test"]):
        assert measure("--measures", "hessian_trace", "--json", tmp_path / "r.json", "-q", *more)[0] == 0
        report = sl.Report.load(tmp_path / "r.json")
        losses.append((report.problem["samples"], report.loss))
    assert [samples for samples, _ in losses] == [40, 7, 40]
    assert len({loss for _, loss in losses}) == 3


def test_your_own_model_data_and_loss(run, tmp_path, monkeypatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def network(classes): return torch.nn.Linear(4, classes)\n"
        "def data(): return torch.eye(4), torch.tensor([0, 1, 2, 0])\n"
        "def loss(outputs, targets): return (outputs[torch.arange(len(targets)), targets] ** 2).mean()\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["measure", "mine:network", "--data", "mine:data", "--loss", "mine:loss", "--measures", "hessian_trace"]
    code, _, err = run(*arguments, "--json", "r.json", "-q")
    assert (code, err) == (0, "")
    report = sl.Report.load("r.json")
    assert report["hessian_trace"].value == pytest.approx(2 * (1 + 1))  # one weight and one bias a sample, twice each
    assert report.problem["loss_function"] == "loss"


# --- measure: what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--measures", "kapa_sum"], "unknown measure 'kapa_sum'; did you mean 'kappa_sum'? `list_measures()` and `spiritlevel measures` name them all"),
        (["--measures", ","], "--measures is empty; give names separated by commas, all, or leave it out"),
        (["--measures", "epsilon_sharpness:5e-4"], "options of a measure are written name:option=value, got 'epsilon_sharpness:5e-4'"),
        (["--measures", "keskar_subspace_sharpness:dimension=2.5"], "keskar_subspace_sharpness: dimension must be a whole number of at least 1, got 2.5"),
        (["--measures", "rho_sum:epsilon=1"], "rho_sum has no option 'epsilon'; its options are: none"),
        (["--loss", "cross-entropy"], "unknown loss 'cross-entropy'; did you mean 'cross_entropy'? Known: cross_entropy, mse, normalized_cross_entropy, package.module:function"),
        (["--dtype", "float16"], "--dtype must be float32 or float64, got 'float16'"),
        (["--split", "valid"], "--split must be train or test, got 'valid'"),
        (["--tolerance", "-1"], "tolerance must be a number between 0 and 1, got -1.0"),
        (["--quiet"], "--quiet prints no result, so nothing would be left of the work: add --json or --html"),
        (["--samples", "0"], "samples must be a whole number of at least 2, got 0"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_plain_sentence_and_code_2(measure, more, message) -> None:
    assert measure(*more) == (2, "", f"error: {message}\n")


def test_a_built_in_network_needs_its_weights(run) -> None:
    said = "error: 'mlp:6-5' is a built-in network, which starts with random weights; pass its trained ones by --checkpoint\n"
    assert run("measure", "mlp:6-5", "--data", DATA) == (2, "", said)


def test_a_checkpoint_of_another_network_lists_what_differs(run, weights) -> None:
    code, out, err = run("measure", "mlp:7-5", "--checkpoint", weights, "--data", DATA)
    assert (code, out) == (2, "")
    assert "does not fit FullyConnected" in err
    assert "fc1.weight: (6, 12) in the file, (7, 12) in the model" in err


def test_unknown_names_suggest_the_nearest(run, weights) -> None:
    code, _, err = run("measure", "lent", "--checkpoint", weights, "--data", DATA)
    assert code == 2
    assert "unknown model 'lent'; did you mean 'lenet'?" in err
    code, _, err = run("measure", "mlp:6-5", "--checkpoint", weights, "--data", "digit")
    assert code == 2
    assert "unknown data set 'digit'; did you mean 'digits'?" in err
    code, _, err = run("mesure")
    assert code == 2
    assert "measure" in err.partition("No such command 'mesure'")[2]


def test_places_that_cannot_be_written_are_refused_before_any_work(measure, run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("spiritlevel.measuring.run.measure", lambda *_, **__: pytest.fail("work was done"))
    (tmp_path / "file").write_text("")
    assert measure("--json", tmp_path) == (2, "", f"error: --json must name a file, but {tmp_path} is a folder\n")
    code, _, err = measure("--html", tmp_path / "file" / "page.html")
    assert code == 2
    assert f"because {tmp_path / 'file'} is a file, not a folder" in err
    monkeypatch.setattr(showcase, "run_demo", lambda *_: pytest.fail("work was done"))
    code, _, err = run("demo", "--out", tmp_path / "file" / "deeper")
    assert (code, err) == (2, f"error: --out must name a folder, but {tmp_path / 'file'} is a file\n")


def test_places_without_permission_are_refused(measure, run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK)
    page = tmp_path / "page.html"
    said = f"error: --html: {page} cannot be written; choose a place where you may write\n"
    assert measure("--html", page) == (2, "", said)
    said = f"error: --out: {tmp_path} cannot be written to; choose a folder where you may write\n"
    assert run("demo", "--out", tmp_path) == (2, "", said)


def test_debug_shows_the_traceback_wherever_it_stands(weights) -> None:
    arguments = ["measure", "mlp:6-5", "--data", DATA, "--checkpoint", str(weights), "--dtype", "half"]
    for given in (["--debug", *arguments], [*arguments, "--debug"]):
        with pytest.raises(sl.SpiritLevelError, match="--dtype must be float32 or float64"):
            cli.main(given)


def test_an_unexpected_error_is_named_and_leaves_with_1(run, tmp_path, monkeypatch) -> None:
    (tmp_path / "broken.py").write_text("def network(): raise RuntimeError('no such luck')\n")
    monkeypatch.chdir(tmp_path)
    said = "failed: RuntimeError: no such luck\nRun the same command with --debug to see where.\n"
    assert run("measure", "broken:network", "--data", DATA) == (1, "", said)


def test_a_full_disk_is_told_with_the_file_and_leaves_with_1(run, weights, tmp_path, monkeypatch) -> None:
    def full(*_arguments) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    given = ["mlp:6-5", "--data", DATA, "--checkpoint", weights, "--measures", "hessian_trace", "--quiet"]
    said = f"failed: {tmp_path / 'a.json'}: No space left on device\n"
    assert run("measure", *given, "--json", tmp_path / "a.json") == (1, "", said)


# --- demo and module -----------------------------------------------------------------------------------------------


def test_module_runs_as_a_program(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["spiritlevel", "--version"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("spiritlevel", run_name="__main__")
    assert not left.value.code
    assert capsys.readouterr().out == f"spiritlevel {sl.__version__}\n"


def test_the_bar_tells_stage_and_passes(monkeypatch, capsys) -> None:
    from spiritlevel.measuring import progress

    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(progress, "Console", lambda **_: _terminal())
    with progress.passes_bar() as listen:
        listen("riemannian_nodewise_spectral_norm", 12.0)
    drawn = capsys.readouterr().err
    assert "riemannian_nodew" in drawn
    assert "12 passes over the data" in drawn
    with progress.passes_bar(shown=False) as listen:
        listen("kappa_sum", 3.0)
    assert capsys.readouterr().err == ""


def _terminal():
    from rich.console import Console

    return Console(file=sys.stderr, force_terminal=True, width=60, legacy_windows=False)
