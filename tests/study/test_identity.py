"""The code behind `package.module:factory` belongs to what a cell is."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from test_study_run import ALONE, Here

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study import naming, worker
from spiritlevel.study.identity import source_of
from spiritlevel.study.naming import hash_of
from spiritlevel.study.plan import read_plan
from spiritlevel.study.progress import StudyProgress
from spiritlevel.study.run import prepare, run_study
from spiritlevel.study.store import StudyFolder
from spiritlevel.study.worker import DONE, REFUSED, compute

NETWORK = """\
from torch import nn
from layers import hidden


def small(input_shape, classes):
    return nn.Sequential(*hidden(input_shape[0], 5), nn.Linear(5, classes))
"""
LAYERS = """\
from torch import nn


def hidden(inputs, width):
    return nn.Linear(inputs, width), nn.ReLU()
"""
LOSS = """\
from torch.nn import functional as F


def loss(outputs, targets):
    return F.cross_entropy(outputs, targets)
"""
OWN = "model.name=mynetworks:small"


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a module of the user's own, as an editor between two runs would."""
    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def edit(name: str, text: str) -> None:
        (folder / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        for known in ("mynetworks", "layers", "mylosses"):
            sys.modules.pop(known, None)

    edit("layers", LAYERS)
    edit("mynetworks", NETWORK)
    edit("mylosses", LOSS)
    yield edit
    for known in ("mynetworks", "layers", "mylosses"):
        sys.modules.pop(known, None)


def run(tiny: str, folder: Path, *overrides: str) -> Here:
    engine = Here()
    study = read_plan(tiny, overrides=[ALONE, "seeds=1", "training.batch_size=16", *overrides])
    summary = run_study(study, StudyFolder(folder), engine, StudyProgress())
    assert (summary.total, len(summary.done), summary.failed) == (1, 1, {})
    return engine


EDITS = {
    "another width": ("mynetworks", NETWORK.replace("5", "7")),
    "another function of the same weights": ("mynetworks", NETWORK.replace("nn.Linear(5", "nn.Tanh(), nn.Linear(5")),
    "another function in a module that it imports": ("layers", LAYERS.replace("ReLU", "Tanh")),
}


@pytest.mark.parametrize("edit", EDITS)
def test_code_that_was_edited_is_trained_again_and_said(tiny, tmp_path, code, capsys, edit):
    run(tiny, tmp_path / "out", OWN)
    [before] = StudyFolder(tmp_path / "out").cells()
    capsys.readouterr()
    code(*EDITS[edit])
    engine = run(tiny, tmp_path / "out", OWN)
    [after] = StudyFolder(tmp_path / "out").cells()
    assert set(engine.tried) == {after.hash} != {before.hash}
    said = capsys.readouterr().err
    assert "the code behind mynetworks:small has changed since it was trained here: 1 cell trained again" in said
    assert before.done  # nothing is lost


def test_comments_and_layout_are_no_code(tiny, tmp_path, code):
    run(tiny, tmp_path / "out", OWN)
    code("mynetworks", NETWORK.replace("\n\n\n", "\n\n\n\n# five is enough\n"))
    assert not run(tiny, tmp_path / "out", OWN).tried


def test_what_a_factory_reads_elsewhere_counts_by_what_it_builds(tiny, tmp_path, code):
    text = NETWORK.replace("5", "width()") + "\n\ndef width():\n    return int(pathlib.Path('width.txt').read_text())\n"
    code("mynetworks", "import pathlib\n" + text)
    Path("width.txt").write_text("5")
    run(tiny, tmp_path / "out", OWN)
    Path("width.txt").write_text("6")
    assert run(tiny, tmp_path / "out", OWN).tried


def test_a_loss_that_was_edited_is_measured_again_but_not_trained(tiny, tmp_path, code, monkeypatch):
    own = "measure.loss=mylosses:loss"
    run(tiny, tmp_path / "out", own)
    [before] = StudyFolder(tmp_path / "out").cells()
    code("mylosses", LOSS.replace("F.cross_entropy(outputs, targets)", "2 * F.cross_entropy(outputs, targets)"))
    monkeypatch.setattr(worker, "train", lambda *_: pytest.fail("trained again"))
    assert run(tiny, tmp_path / "out", own).tried
    [after] = StudyFolder(tmp_path / "out").cells()
    one, two = (cell.result()["measures"]["values"]["hessian_trace"]["value"] for cell in (before, after))
    assert two == pytest.approx(2 * one, rel=1e-5)


def test_code_that_is_edited_while_a_study_runs_is_refused(tiny, tmp_path, code):
    folder = StudyFolder(tmp_path / "out")
    prepare(read_plan(tiny, overrides=[OWN, "measure.loss=mylosses:loss"]), folder)
    first, second = folder.cells()[:2]
    assert compute([first.cell]) == DONE
    code("layers", LAYERS.replace("ReLU", "Tanh"))
    assert compute([second.cell]) == REFUSED
    assert second.failure()["error"] == (
        "the code behind mynetworks:small is not what it was when the study was started; run the study again, which makes "
        "new cells for it"
    )
    code("layers", LAYERS)
    code("mylosses", LOSS.replace("return", "return 2 *"))
    assert compute([second.cell]) == REFUSED
    assert "the code behind the losses is not what it was" in second.failure()["error"]


def test_settings_that_were_edited_by_hand_are_refused(tiny, tmp_path):
    folder = StudyFolder(tmp_path / "out")
    prepare(read_plan(tiny), folder)
    cell = folder.cells()[0]
    settings = cell.settings()
    settings["config"]["training"]["learning_rate"] = 0.3
    cell.cell.write_text(json.dumps(settings))
    assert compute([cell.cell]) == REFUSED
    assert "holds other settings than its folder is named by" in cell.failure()["error"]


def test_networks_of_this_library_keep_their_names(tiny, monkeypatch):
    """Folders from before the code of users counted go on where they were."""
    monkeypatch.setattr(naming, "__version__", "0.1.0")
    config = read_plan(tiny).cells[0].config
    assert hash_of(config, "data") == "4cf5da383313d5ac"


def test_installed_packages_are_not_followed(code):
    before = source_of("mynetworks:small")
    code("mynetworks", "import json\nimport numpy\n" + NETWORK)
    assert source_of("mynetworks:small") != before
    with pytest.raises(SpiritLevelError, match="no module named 'nowhere'"):
        source_of("nowhere:small")


def test_what_differs_between_processes_does_not_count(tiny, tmp_path, code):
    text = (
        NETWORK + "\n\nclass Named(nn.Linear):\n    def extra_repr(self):\n        return f'{object()} {next(order)}'\n"
    )
    text = text.replace("nn.Linear(5", "Named(5") + "\n\norder = itertools.cycle([{'a', 'b'}, \"{'b', 'a'}\"])\n"
    code("mynetworks", "import itertools\n" + text)
    run(tiny, tmp_path / "out", OWN)
