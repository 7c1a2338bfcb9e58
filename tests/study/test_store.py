import json
import multiprocessing
from pathlib import Path

import pytest

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study import naming
from spiritlevel.study.naming import hash_of, training_hash_of
from spiritlevel.study.plan import read_plan
from spiritlevel.study.run import prepare
from spiritlevel.study.store import CellFolder, StudyFolder, locked
from spiritlevel.study.train import Epoch


def test_a_cell_is_named_by_settings_data_and_version(tiny, monkeypatch):
    cells = read_plan(tiny).cells
    names = [hash_of(cell.config, "data") for cell in cells]
    assert len(set(names)) == len(names) == 4
    assert names[0] == hash_of(read_plan(tiny).cells[0].config, "data")
    assert hash_of(cells[0].config, "other data") != names[0]
    monkeypatch.setattr(naming, "__version__", "0.0.0")
    assert hash_of(cells[0].config, "data") != names[0]


def test_where_the_data_lie_and_who_trains_together_is_no_part_of_a_name(tiny):
    overrides = ["data.name=mnist", "training.ensemble=2"]
    here = read_plan(tiny, data_folder="/here", overrides=overrides[:1]).cells[0].config
    there = read_plan(tiny, data_folder="/there", overrides=overrides).cells[0].config
    assert hash_of(here, "data") == hash_of(there, "data")


def test_what_is_trained_does_not_depend_on_what_is_measured(tiny):
    one = read_plan(tiny).cells[0].config
    other = read_plan(tiny, overrides=["measure.tolerance=0.1"]).cells[0].config
    assert hash_of(one, "data") != hash_of(other, "data")
    assert training_hash_of(one, "data") == training_hash_of(other, "data")
    assert training_hash_of(one, "data") != training_hash_of(one.model_copy(update={"seed": 5}), "data")


def test_the_folder_describes_the_study_and_every_cell(tiny, tmp_path):
    folder = StudyFolder(tmp_path / "out")
    prepare(read_plan(tiny), folder)
    described = json.loads((tmp_path / "out/study.json").read_text())
    assert described["name"] == "tiny"
    assert described["factors"] == {"training.batch_size": [16, 30]}
    assert [(cell["factors"], cell["seed"]) for cell in described["cells"]] == [
        ({"training.batch_size": size}, seed) for size in (16, 30) for seed in (0, 1)
    ]
    for entry, cell in zip(described["cells"], folder.cells(), strict=True):
        settings = json.loads((tmp_path / "out/cells" / entry["hash"] / "cell.json").read_text())
        assert settings["hash"] == entry["hash"] == cell.hash
        assert settings["factors"] == entry["factors"]
        assert settings["config"]["training"]["batch_size"] == entry["factors"]["training.batch_size"]
        assert settings["config"]["seed"] == settings["seed"] == entry["seed"]


def test_a_folder_of_another_study_is_refused(tiny, tmp_path):
    folder = StudyFolder(tmp_path / "out")
    prepare(read_plan(tiny), folder)
    prepare(read_plan(tiny, overrides=["seeds=3"]), folder)  # the same study may grow
    assert len(folder.cells()) == 6
    with pytest.raises(SpiritLevelError, match="holds the study 'tiny', not 'other'; choose another folder"):
        prepare(read_plan(tiny, overrides=["name=other"]), folder)


def test_a_folder_without_study_and_a_damaged_file_are_refused(tmp_path):
    with pytest.raises(
        SpiritLevelError, match=r"holds no study: no file study.json; `spiritlevel study run` makes one"
    ):
        StudyFolder(tmp_path).study()
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(SpiritLevelError, match="holds no study"):
        StudyFolder(tmp_path / "study.json").study()
    with pytest.raises(SpiritLevelError, match=r"study.json is damaged .*; run the study again, which writes it anew"):
        StudyFolder(tmp_path).study()


def test_curves_are_tables(tmp_path):
    CellFolder(tmp_path).write_curve([Epoch(1, 2.0, 0.5, 2.5, 0.25, 0.1)])
    assert (tmp_path / "curve.csv").read_text() == (
        "epoch,train_loss,train_accuracy,test_loss,test_accuracy,learning_rate\n1,2.0,0.5,2.5,0.25,0.1\n"
    )


def test_a_result_takes_an_earlier_failure_away(tmp_path):
    cell = CellFolder(tmp_path)
    cell.write_failure("it broke", "where it broke", 1)
    assert cell.failure() == {"error": "it broke", "traceback": "where it broke", "attempts": 1}
    cell.write_result({"hash": cell.hash, "training": {"reached": True}})
    assert cell.done
    assert cell.failure() is None
    assert not (tmp_path / "failed.json").exists()


def test_a_cell_is_held_by_one_process_at_a_time(tmp_path):
    cells = [CellFolder(tmp_path / name) for name in "ab"]
    for cell in cells:
        cell.path.mkdir()
    with locked(cells) as held:
        assert held
        with locked(cells[1:]) as also_held:
            assert not also_held
    with locked(cells[1:]) as held:
        assert held


def _hold_and_die(path: Path) -> None:
    import os
    import signal

    with locked([CellFolder(path)]):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_holds_nothing(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_hold_and_die, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -9
    assert (tmp_path / "lock").exists()
    with locked([CellFolder(tmp_path)]) as held:
        assert held
