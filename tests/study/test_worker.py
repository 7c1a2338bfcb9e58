import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.report import Report
from spiritlevel.study import store, worker
from spiritlevel.study.plan import read_plan
from spiritlevel.study.run import prepare
from spiritlevel.study.store import CellFolder, StudyFolder, locked
from spiritlevel.study.worker import CRASHED, DISK_FULL, DONE, HELD, REFUSED, compute, main
from spiritlevel.subjects.checkpoint import read_state_dict


def cells(tiny: str, folder: Path, *overrides: str) -> list[CellFolder]:
    study_folder = StudyFolder(folder)
    prepare(read_plan(tiny, overrides=overrides), study_folder)
    return study_folder.cells()


def test_a_cell_in_a_result_out(tiny, tmp_path):
    [cell] = cells(tiny, tmp_path / "out", "training.batch_size=16", "seeds=1")
    assert compute([cell.cell]) == DONE
    result = cell.result()
    assert set(result) == {
        *("hash", "factors", "seed", "training", "measures", "rescaled", "attacks", "along", "environment", "data")
    }
    assert result["hash"] == cell.hash
    assert result["training"].keys() >= {
        *("reached", "stop_reason", "epochs", "steps", "seconds", "train_loss", "train_accuracy"),
        *("test_loss", "test_accuracy", "train_error", "gradient_norm"),
    }
    assert result["training"]["train_error"] == pytest.approx(1 - result["training"]["train_accuracy"])
    assert result["data"]["samples_train"] == result["data"]["samples_measured"] == 60
    assert Report.from_dict(result["measures"])["hessian_trace"].value > 0
    assert len((cell.path / "curve.csv").read_text().splitlines()) == 1 + 3
    assert read_state_dict(cell.checkpoint)["fc1.weight"].shape == (8, 6)
    assert not list(cell.path.glob(".*"))  # no temporary file is left


def test_a_second_time_nothing_is_done(tiny, tmp_path, monkeypatch):
    cell = cells(tiny, tmp_path / "out")[0]
    assert compute([cell.cell]) == DONE
    written = cell.result()
    monkeypatch.setattr(worker, "_compute", lambda folders: pytest.fail("computed again"))
    assert compute([cell.cell]) == DONE
    assert cell.result() == written


def test_the_same_cell_in_two_places_is_the_same_bit_for_bit(tiny, tmp_path):
    made = [cells(tiny, tmp_path / name)[0] for name in ("one", "other")]
    for cell in made:
        assert compute([cell.cell]) == DONE
    one, other = (cell.result() for cell in made)
    for result in (one, other):
        result["training"].pop("seconds")
        result["measures"].pop("cost")
    assert one == other
    assert made[0].checkpoint.read_bytes() == made[1].checkpoint.read_bytes()


def test_seeds_trained_together_have_a_result_each(tiny, tmp_path):
    together = cells(tiny, tmp_path / "together")[:2]
    assert compute([cell.cell for cell in together]) == DONE
    for cell in together:
        alone = next(c for c in cells(tiny, tmp_path / "alone") if c.hash == cell.hash)
        assert compute([alone.cell]) == DONE
        one, other = cell.result(), alone.result()
        assert (one["training"]["ensemble"], other["training"]["ensemble"]) == (2, 1)
        assert one["training"]["train_loss"] == pytest.approx(other["training"]["train_loss"], rel=1e-4)
        values = (result["measures"]["values"]["kappa_trace_sum"]["value"] for result in (one, other))
        assert next(values) == pytest.approx(next(values), rel=1e-3)


def test_what_was_trained_is_only_measured(tiny, tmp_path, monkeypatch):
    pair = cells(tiny, tmp_path / "out")[:2]
    compute([cell.cell for cell in pair])
    expected = pair[1].result()["measures"]["values"]
    (pair[1].path / "result.json").unlink()
    monkeypatch.setattr(worker, "train", lambda *_: pytest.fail("trained again"))
    assert compute([cell.cell for cell in pair]) == DONE
    assert pair[1].result()["measures"]["values"] == expected


def test_a_study_that_measures_something_else_does_not_train_again(tiny, tmp_path, monkeypatch):
    before = cells(tiny, tmp_path / "out")[0]
    compute([before.cell])
    monkeypatch.setattr(worker, "train", lambda *_: pytest.fail("trained again"))
    after = cells(tiny, tmp_path / "out", 'measure.measures=["rho_sum"]')[0]
    assert after.hash != before.hash
    assert compute([after.cell]) == DONE
    assert list(after.result()["measures"]["values"]) == ["rho_sum"]
    assert after.result()["training"] == before.result()["training"]
    assert (after.path / "curve.csv").read_text() == (before.path / "curve.csv").read_text()


def test_networks_that_did_not_arrive_are_kept_and_measured_only_if_asked(tiny, tmp_path):
    rule = "training.stop={train_accuracy=1.0}"
    excluded = cells(tiny, tmp_path / "out", rule)[0]
    assert compute([excluded.cell]) == DONE
    assert excluded.result()["training"]["reached"] is False
    assert excluded.result()["measures"] is None
    measured = cells(tiny, tmp_path / "out", rule, "measure.measure_excluded=true")[0]
    assert compute([measured.cell]) == DONE
    assert measured.result()["measures"] is not None


def test_a_study_that_requires_less_or_more_judges_the_same_networks_anew(tiny, tmp_path, monkeypatch):
    rule = "training.stop={train_accuracy=1.0}"
    excluded = cells(tiny, tmp_path / "out", rule)[0]
    compute([excluded.cell])
    assert excluded.result()["training"]["reached"] is False
    monkeypatch.setattr(worker, "train", lambda *_: pytest.fail("trained again"))
    less = cells(tiny, tmp_path / "out", rule, "training.require={train_loss=1e9}")[0]
    assert compute([less.cell]) == DONE
    assert less.result()["training"]["reached"] is True
    assert less.result()["measures"] is not None
    more = cells(tiny, tmp_path / "out", rule, "training.require={train_loss=1e-9}")[0]
    assert compute([more.cell]) == DONE
    assert more.result()["training"]["reached"] is False
    assert more.result()["measures"] is None


def test_networks_that_diverged_are_kept_and_not_measured(tiny, tmp_path):
    diverged = cells(tiny, tmp_path / "out", "training.learning_rate=1e30", "measure.measure_excluded=true")[0]
    assert compute([diverged.cell]) == DONE
    result = diverged.result()
    assert (result["training"]["stop_reason"], result["training"]["reached"]) == ("diverged", False)
    assert result["measures"] is None
    assert json.loads((diverged.path / "result.json").read_text()) == result


def test_a_cell_that_another_process_holds_is_left_alone(tiny, tmp_path):
    cell = cells(tiny, tmp_path / "out")[0]
    with locked([cell]):
        assert compute([cell.cell]) == HELD
    assert not cell.done


def test_refused_input_is_written_down(tiny, tmp_path, monkeypatch):
    pair = cells(tiny, tmp_path / "out")[:2]

    def refuse(*_: object) -> None:
        raise SpiritLevelError("no such thing; use another")

    monkeypatch.setattr(worker, "train", refuse)
    assert compute([cell.cell for cell in pair]) == REFUSED
    for cell in pair:
        failure = cell.failure()
        assert (failure["error"], failure["attempts"]) == ("no such thing; use another", 1)
        assert "Traceback" in failure["traceback"]
    monkeypatch.undo()
    assert compute([cell.cell for cell in pair]) == DONE
    assert not any(cell.failure() for cell in pair)


def test_a_crash_while_measuring_costs_its_own_cell_only(tiny, tmp_path, monkeypatch):
    pair = cells(tiny, tmp_path / "out")[:2]
    measure = worker.measure_cell

    def crash_once(config, *rest):
        if config.seed == 0:
            raise RuntimeError("broken")
        return measure(config, *rest)

    monkeypatch.setattr(worker, "measure_cell", crash_once)
    assert compute([cell.cell for cell in pair]) == CRASHED
    assert pair[0].failure()["error"] == "RuntimeError: broken"
    assert pair[1].done
    compute([cell.cell for cell in pair])
    assert pair[0].failure()["attempts"] == 2


def test_data_that_changed_are_refused(tiny, tmp_path):
    cell = cells(tiny, tmp_path / "out")[0]
    settings = cell.settings()
    settings["config"]["data"]["name"] = "random:60,6,3,1"
    store.write_json(cell.cell, settings)
    assert compute([cell.cell]) == REFUSED
    assert "random:60,6,3,1 has other content than when the study was started" in cell.failure()["error"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("place", ["save_checkpoint", "measure_cell"])
def test_a_full_disk_is_told_apart_and_leaves_nothing_half(tiny, tmp_path, monkeypatch, place, code):
    cell = cells(tiny, tmp_path / "out")[0]

    def full(*_: object) -> None:
        raise OSError(code, "full")

    monkeypatch.setattr(worker, place, full)
    assert compute([cell.cell]) == DISK_FULL
    assert not cell.done
    assert cell.failure() is None
    monkeypatch.undo()
    assert compute([cell.cell]) == DONE


def test_a_disk_that_fills_up_while_the_result_is_written_leaves_none(tiny, tmp_path, monkeypatch):
    cell = cells(tiny, tmp_path / "out")[0]

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("spiritlevel.measuring.report.os.fsync", full)
    assert compute([cell.cell]) == DISK_FULL
    assert sorted(path.name for path in cell.path.iterdir()) == ["cell.json", "lock"]


def test_the_command_line_of_the_worker(tiny, tmp_path, capsys):
    cell = cells(tiny, tmp_path / "out")[0]
    assert main([]) == REFUSED
    assert main(["--what"]) == REFUSED
    assert "usage: python -m spiritlevel.study.worker CELL.json" in capsys.readouterr().err
    assert main([str(cell.cell)]) == DONE


@pytest.mark.slow
def test_a_worker_ends_when_who_started_it_does(tiny, tmp_path):
    endless = cells(tiny, tmp_path / "out", "training.epochs=1000000000")[0]
    command = [sys.executable, "-m", "spiritlevel.study.worker", worker.UNTIL_STDIN_CLOSES, str(endless.cell)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=600) == worker.ORPHANED
