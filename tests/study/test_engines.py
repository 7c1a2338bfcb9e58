import os
import textwrap
from pathlib import Path

import pytest

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.engines import local, make_engine
from spiritlevel.study.engines.engine import Task
from spiritlevel.study.engines.local import LocalEngine, available_cores
from spiritlevel.study.plan import read_plan
from spiritlevel.study.progress import StudyProgress
from spiritlevel.study.run import Summary, prepare, run_study
from spiritlevel.study.store import StudyFolder

FACTORIES = """\
import os
import signal
import sys
from pathlib import Path

from torch import nn


def network(input_shape, classes, width):
    if sys.argv[0].endswith("worker.py"):  # not where the study is only checked
        tried = Path(__file__).with_name(f"tried-{width}")
        if width == 3.0 or (width == 2.0 and not tried.exists()):
            tried.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return nn.Sequential(nn.Linear(*input_shape, 4), nn.ReLU(), nn.Linear(4, classes))
"""


def compute_all(engine_name: str, study: str, folder: Path, **options) -> Summary:
    engine = make_engine(engine_name, logs=folder / "jobs", workers=2, **options)
    return run_study(read_plan(study, overrides=["seeds=1"]), StudyFolder(folder), engine, StudyProgress(quiet=True))


@pytest.mark.slow
def test_local_processes_that_are_killed_cost_their_cell_only(tiny, tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text(textwrap.dedent(FACTORIES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    overrides = ["training.batch_size=16", "seeds=1", "model.name=deadly:network", "factors.model.width=[2.0, 3.0]"]
    folder = StudyFolder(tmp_path / "out")
    engine = LocalEngine(2)
    summary = run_study(read_plan(tiny, overrides=overrides), folder, engine, StudyProgress(quiet=True))
    survived, killed = folder.cells()
    assert summary.done == (survived.hash,)
    assert summary.failed == {killed.hash: "the worker was killed by signal 9"}
    assert killed.failure()["attempts"] == 2
    assert survived.result()["environment"]["threads"] == str(max(1, available_cores() // 2))


@pytest.mark.slow
def test_local_processes_end_when_the_engine_stops(tiny, tmp_path):
    study = read_plan(tiny, overrides=["training.epochs=1000000000", "training.ensemble=1"])
    groups = prepare(study, StudyFolder(tmp_path / "out"))
    engine = LocalEngine(2)
    assert (engine.free, engine.running) == (2, 0)
    for group in groups[:2]:
        engine.submit(Task(tuple(cell.cell for cell in group)))
    assert (engine.free, engine.running) == (0, 2)
    processes = [process.pid for process in engine.tasks.values()]
    engine.stop()
    assert engine.running == 0
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_cores_are_divided(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(local, "available_cores", lambda: 8)
    assert [(LocalEngine(workers).most, LocalEngine(workers).threads) for workers in (None, 2, 3, 20)] == [
        (8, 1),
        (2, 4),
        (3, 2),
        (20, 1),
    ]


def test_unknown_engines_and_options_of_others_are_refused(tmp_path):
    with pytest.raises(SpiritLevelError, match="unknown engine 'rya'; did you mean 'ray'"):
        make_engine("rya", logs=tmp_path)
    with pytest.raises(SpiritLevelError, match="an address is for engine 'ray'; engine 'local' takes none"):
        make_engine("local", logs=tmp_path, address="host:1")
    with pytest.raises(SpiritLevelError, match="settings of jobs are for engine 'slurm'; engine 'local' takes none"):
        make_engine("local", logs=tmp_path, slurm={"timeout_min": 1})


@pytest.mark.parametrize(("engine", "package"), [("ray", "ray"), ("slurm", "submitit")])
def test_what_is_not_installed_is_named(tmp_path, monkeypatch, engine, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(SpiritLevelError, match=rf'not installed: pip install "spiritlevel\[{engine}\]"'):
        make_engine(engine, logs=tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ray_computes_the_same(tiny, tmp_path):
    pytest.importorskip("ray")
    assert_the_same(compute_all("ray", tiny, tmp_path / "ray"), tiny, tmp_path, "ray")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_submitit_computes_the_same(tiny, tmp_path):
    pytest.importorskip("submitit")
    settings = {"timeout_min": 5, "cpus_per_task": 1}
    assert_the_same(compute_all("slurm", tiny, tmp_path / "slurm", slurm=settings), tiny, tmp_path, "slurm")


def test_submitit_refuses_settings_it_does_not_know(tmp_path):
    pytest.importorskip("submitit")
    with pytest.raises(SpiritLevelError, match="submitit refuses these settings"):
        make_engine("slurm", logs=tmp_path, slurm={"partitoin": "short"})


def assert_the_same(summary: Summary, study: str, folder: Path, name: str) -> None:
    from spiritlevel.study.worker import DONE, compute

    assert (len(summary.done), summary.failed) == (2, {})
    prepare(read_plan(study, overrides=["seeds=1"]), StudyFolder(folder / "here"))
    for cell in StudyFolder(folder / "here").cells():
        assert compute([cell.cell]) == DONE
        there = StudyFolder(folder / name).cell(cell.hash)
        assert there.checkpoint.read_bytes() == cell.checkpoint.read_bytes()
        assert there.result()["environment"]["threads"] == "1"


def test_a_limit_on_threads_is_kept(monkeypatch) -> None:
    monkeypatch.setattr("spiritlevel.study.engines.local.available_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert (LocalEngine(2).threads, LocalEngine().threads) == (4, 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert (LocalEngine(2).threads, LocalEngine(4).threads) == (3, 2)
