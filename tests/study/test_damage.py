"""Files of a study that are damaged or missing: named, set aside, computed again, and said in a line."""

import json
import threading
from pathlib import Path

import pytest
from test_study_run import ALONE, Here

from spiritlevel import cli
from spiritlevel.errors import SpiritLevelError
from spiritlevel.study import worker
from spiritlevel.study.plan import read_plan
from spiritlevel.study.progress import StudyProgress
from spiritlevel.study.results import read_curve, read_study
from spiritlevel.study.run import Summary, prepare, run_study, summarize
from spiritlevel.study.show.page import write_study_report
from spiritlevel.study.store import CellFolder, StudyFolder
from spiritlevel.study.worker import DONE, REFUSED, compute

ONE = (ALONE, "seeds=1", "training.batch_size=16")
# A file that ends early, that holds nothing, that holds something else, that is no text at all.
DAMAGES = ("{", "{}", "[]", "null", '{"name": 1, "cells": 2, "config": {}, "training": {}}', b"\xff\x00", "[" * 100_000)


def run(tiny: str, folder: Path, *overrides: str) -> tuple[Summary, Here]:
    engine = Here()
    study = read_plan(tiny, overrides=(*ONE, *overrides))
    return run_study(study, StudyFolder(folder), engine, StudyProgress()), engine


def damage(path: Path, content: str | bytes) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture
def finished(tiny: str, tmp_path: Path) -> CellFolder:
    run(tiny, tmp_path / "out")
    return StudyFolder(tmp_path / "out").cells()[0]


@pytest.mark.parametrize("content", DAMAGES)
def test_damaged_settings_are_written_anew(tiny, tmp_path, finished, capsys, content):
    whole, result = finished.cell.read_bytes(), finished.result()
    damage(finished.cell, content)
    capsys.readouterr()
    summary, engine = run(tiny, tmp_path / "out")
    assert (len(summary.done), summary.failed) == (1, {})
    # The folder is named by the settings and the result is whole, so that nothing needs to be computed.
    assert not engine.tried
    assert (finished.cell.read_bytes(), finished.result()) == (whole, result)
    said = [line for line in capsys.readouterr().err.splitlines() if finished.hash in line]
    assert len(said) == 1
    assert said[0].startswith(f"cell {finished.hash}: cell.json is damaged (")
    assert said[0].endswith("; it is written anew")


@pytest.mark.parametrize("content", DAMAGES)
def test_a_damaged_result_is_measured_again_without_training(tiny, tmp_path, finished, capsys, monkeypatch, content):
    before = finished.result()
    damage(finished.path / "result.json", content)
    [told] = summarize(StudyFolder(tmp_path / "out")).failed.values()
    assert "result.json is damaged (" in told
    assert told.endswith("run the study again, which measures the network again")
    assert read_study(tmp_path / "out").cells[0].status == "failed"
    write_study_report(tmp_path / "out")
    monkeypatch.setattr(worker, "train", lambda *_: pytest.fail("trained again"))
    summary, _ = run(tiny, tmp_path / "out")
    assert (len(summary.done), summary.failed) == (1, {})
    assert finished.result()["measures"]["values"] == before["measures"]["values"]
    assert "; it is measured again" in capsys.readouterr().err
    assert (finished.path / "result.json.damaged").exists()


@pytest.mark.parametrize("content", DAMAGES)
def test_a_damaged_training_is_trained_again(tiny, tmp_path, finished, capsys, content):
    weights = finished.checkpoint.read_bytes()
    (finished.path / "result.json").unlink()
    damage(finished.path / "training.json", content)
    summary, _ = run(tiny, tmp_path / "out")
    assert (len(summary.done), summary.failed) == (1, {})
    assert f"cell {finished.hash}: training.json is damaged (" in capsys.readouterr().err
    assert finished.checkpoint.read_bytes() == weights


def _changed(weights: bytes) -> bytes:
    """One bit of the last weight turned over: the file still loads."""
    return weights[:-1] + bytes([weights[-1] ^ 1])


WEIGHTS = {"missing": None, "empty": b"", "short": b"\x10", "changed": _changed}


# That one bit is another only a digest tells, which an earlier version did not write.
@pytest.mark.parametrize(
    ("kind", "known"), [(kind, known) for kind in WEIGHTS for known in (True, False) if known or kind != "changed"]
)
def test_weights_that_are_missing_or_damaged_are_trained_again(tiny, tmp_path, finished, capsys, kind, known):
    weights, content = finished.checkpoint.read_bytes(), WEIGHTS[kind]
    training = json.loads((finished.path / "training.json").read_text())
    if not known:  # trained by a version that wrote no digest
        training.pop("weights")
        (finished.path / "training.json").write_text(json.dumps(training))
    finished.checkpoint.unlink()
    if content is not None:
        finished.checkpoint.write_bytes(content(weights) if callable(content) else content)
    # A finished cell needs them no more; one that is measured anew does, and so does a study that measures more.
    assert not run(tiny, tmp_path / "out")[1].tried
    capsys.readouterr()
    summary, _ = run(tiny, tmp_path / "out", 'measure.measures=["rho_sum"]')
    assert (len(summary.done), summary.failed) == (1, {})
    said = capsys.readouterr().err
    assert f"its training cannot be taken over from cell {finished.hash}, because " in said
    assert "; it is trained again" in said
    (finished.path / "result.json").unlink()
    summary, _ = run(tiny, tmp_path / "out")
    assert (len(summary.done), summary.failed) == (1, {})
    assert finished.checkpoint.read_bytes() == weights


def test_a_worker_alone_trains_again_what_is_damaged(tiny, finished, capsys):
    weights = finished.checkpoint.read_bytes()
    (finished.path / "result.json").write_text("{}")
    finished.checkpoint.unlink()
    assert compute([finished.cell]) == DONE
    assert finished.checkpoint.read_bytes() == weights
    assert "its weights, model.safetensors, are missing; it is trained again" in capsys.readouterr().err


def test_a_worker_refuses_settings_that_it_cannot_read(tiny, finished):
    (finished.path / "result.json").unlink()
    for content, told in (
        ("{}", "it has no 'config'"),
        ('{"config": {}, "fingerprint": "", "factors": {}}', "not one of a cell"),
    ):
        finished.cell.write_text(content)
        assert compute([finished.cell]) == REFUSED
        error = finished.failure()["error"]
        assert "cell.json is damaged (" in error
        assert told in error
        assert error.endswith("run the study again, which writes it anew")


@pytest.mark.parametrize("content", DAMAGES)
def test_a_damaged_failure_is_no_obstacle(tiny, tmp_path, finished, content):
    (finished.path / "result.json").unlink()
    damage(finished.path / "failed.json", content)
    [told] = summarize(StudyFolder(tmp_path / "out")).failed.values()
    assert "failed.json is damaged (" in told
    assert "failed.json is damaged (" in read_study(tmp_path / "out").cells[0].reason
    summary, _ = run(tiny, tmp_path / "out")
    assert (len(summary.done), summary.failed) == (1, {})


@pytest.mark.parametrize(
    "content",
    [
        *DAMAGES,
        '{"name": "tiny", "cells": [{}]}',
        '{"name": "tiny", "cells": [{"hash": "../.."}]}',
        '{"name": "tiny", "cells": [{"hash": "a", "seed": [1]}]}',
        '{"name": "tiny", "cells": [], "factors": {"training.batch_size": 3}}',
        '{"name": "tiny", "cells": [], "tied": [3]}',
        '{"name": "tiny", "cells": [], "config": {"seeds": 3}}',
    ],
)
def test_a_damaged_description_is_written_anew(tiny, tmp_path, finished, capsys, content):
    whole = (tmp_path / "out/study.json").read_bytes()
    damage(tmp_path / "out/study.json", content)
    for command in ("status", "report"):
        with pytest.raises(SystemExit) as left:
            cli.main(["study", command, str(tmp_path / "out")])
        assert left.value.code == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "study.json is damaged (" in said
        assert said.endswith("run the study again, which writes it anew")
    summary, engine = run(tiny, tmp_path / "out")
    assert (len(summary.done), summary.failed) == (1, {})
    assert not engine.tried
    assert "study.json is damaged (" in capsys.readouterr().err
    assert (tmp_path / "out/study.json").read_bytes() == whole


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b'epoch\n"' + b"1" * 200_000 + b'"\n', b"epoch,train_loss\n1,2,3\nx\n"]
)
def test_a_damaged_curve_costs_its_picture_only(tiny, tmp_path, finished, content):
    finished.curve.write_bytes(content)
    study = read_study(tmp_path / "out")
    assert not read_curve(study, study.cells[0])
    write_study_report(tmp_path / "out")
    assert run(tiny, tmp_path / "out", 'measure.measures=["rho_sum"]')[0].failed == {}
    finished.curve.unlink()
    assert run(tiny, tmp_path / "out", 'measure.measures=["rho_max"]')[0].failed == {}


# --- several runs in one folder ---------------------------------------------------------------------------------------


def seeds_listed(folder: Path) -> list[tuple[int, int]]:
    described = json.loads((folder / "study.json").read_text())
    assert described["config"]["seeds"] == sorted({cell["seed"] for cell in described["cells"]})
    return [(cell["factors"]["training.batch_size"], cell["seed"]) for cell in described["cells"]]


def test_a_run_with_other_seeds_takes_nothing_from_the_study(tiny, tmp_path, capsys):
    folder = StudyFolder(tmp_path / "out")
    prepare(read_plan(tiny, overrides=["seeds=[0, 1]"]), folder)
    prepare(read_plan(tiny, overrides=["seeds=[0, 2]"]), folder)
    assert seeds_listed(folder.path) == [(size, seed) for size in (16, 30) for seed in (0, 1, 2)]
    study = read_plan(tiny, overrides=["seeds=[2]", "factors.training.batch_size=[16, 60]"])
    summary = run_study(study, folder, Here(), StudyProgress())
    assert "also lists 5 cells of other runs, which it keeps" in capsys.readouterr().err
    grid = [(size, seed) for size in (16, 30) for seed in (0, 1, 2)]
    assert seeds_listed(folder.path) == [*grid, (60, 2)]
    assert json.loads((folder.path / "study.json").read_text())["factors"] == {"training.batch_size": [16, 30, 60]}
    assert (summary.total, len(summary.done)) == (7, 2)
    assert {cell.status for cell in read_study(folder.path).cells} == {"measured", "unfinished"}


def test_runs_that_start_together_all_stay_in_the_study(tiny, tmp_path):
    def start(seed: int) -> None:
        prepare(read_plan(tiny, overrides=[f"seeds=[{seed}]"]), StudyFolder(tmp_path / "out"))

    runs = [threading.Thread(target=start, args=(seed,)) for seed in range(6)]
    for thread in runs:
        thread.start()
    for thread in runs:
        thread.join()
    described = json.loads((tmp_path / "out/study.json").read_text())
    assert sorted(cell["seed"] for cell in described["cells"]) == sorted([*range(6)] * 2)


def test_other_settings_replace_the_study_unless_another_run_is_at_work(tiny, tmp_path, capsys):
    other = read_plan(tiny, overrides=['measure.measures=["rho_sum"]'])
    folder = StudyFolder(tmp_path / "out")
    prepare(read_plan(tiny), folder)
    with StudyFolder(tmp_path / "out").at_work():
        before = (tmp_path / "out/study.json").read_bytes()
        for mine in (folder, StudyFolder(tmp_path / "out")):
            with pytest.raises(
                SpiritLevelError, match=r"another run is at work in .*out with other settings, data or code; wait"
            ):
                run_study(other, mine, Here(), StudyProgress())
        assert (tmp_path / "out/study.json").read_bytes() == before
        prepare(read_plan(tiny, overrides=["seeds=3"]), folder)  # the same study may grow under it
    summary = run_study(other, folder, Here(), StudyProgress())
    assert (summary.total, len(summary.done)) == (4, 4)
    assert "6 cells of other settings, data or code no longer listed in" in capsys.readouterr().err


def test_a_folder_that_is_deleted_under_a_run_is_said(tiny, tmp_path):
    import shutil

    class Deleting(Here):
        def finished(self):
            shutil.rmtree(tmp_path / "out")
            raise FileNotFoundError(2, "No such file or directory", str(tmp_path / "out/cells"))

    with pytest.raises(SpiritLevelError, match=r"out is gone, and with it what was computed: stopped"):
        run_study(read_plan(tiny), StudyFolder(tmp_path / "out"), Deleting(), StudyProgress(quiet=True))
    assert not (tmp_path / "out").exists()


def test_what_is_no_folder_is_not_called_gone(tiny, tmp_path):
    """Nothing was computed there, and the same command would fail again."""
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for path in (Path(tiny), tmp_path / "dangling"):
        with pytest.raises(
            SpiritLevelError, match="is a file, or a link that leads nowhere, where a study needs a folder"
        ):
            run_study(read_plan(tiny), StudyFolder(path), Here(), StudyProgress(quiet=True))


def test_a_file_that_cannot_be_written_is_named(tiny, tmp_path):
    prepare(read_plan(tiny), StudyFolder(tmp_path / "out"))

    class Refused(Here):
        def submit(self, task):
            raise PermissionError(13, "Permission denied", str(task.cells[0].parent / "log.txt"))

    with pytest.raises(SpiritLevelError, match=r"log\.txt: Permission denied: stopped\. What is finished stays"):
        run_study(read_plan(tiny), StudyFolder(tmp_path / "out"), Refused(), StudyProgress(quiet=True))
