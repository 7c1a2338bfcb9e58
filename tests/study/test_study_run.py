import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study import run as running
from spiritlevel.study import worker
from spiritlevel.study.engines.endings import Outcome
from spiritlevel.study.engines.engine import Task
from spiritlevel.study.plan import read_plan
from spiritlevel.study.progress import Count, StudyProgress, time_left
from spiritlevel.study.run import prepare, run_study, summarize
from spiritlevel.study.store import CellFolder, StudyFolder, locked
from spiritlevel.study.worker import CRASHED, DISK_FULL, HELD, compute

ALONE = "training.ensemble=1"


class Here:
    """An engine that computes in this process; `script` says how tasks end instead, by how often they were tried."""

    def __init__(self, script=None) -> None:
        self.script = script or {}
        self.tasks: list[Task] = []
        self.tried: Counter[str] = Counter()
        self.stopped = False

    @property
    def free(self) -> int:
        return 2 - len(self.tasks)

    @property
    def running(self) -> int:
        return len(self.tasks)

    def submit(self, task: Task) -> None:
        assert self.free > 0
        self.tasks.append(task)

    def finished(self) -> list[tuple[Task, Outcome]]:
        if not self.tasks:
            time.sleep(0.01)
            return []
        task = self.tasks.pop(0)
        names = [path.parent.name for path in task.cells]
        self.tried.update(names)
        scripted = self.script.get(names[0], [])
        if self.tried[names[0]] <= len(scripted):
            return [(task, scripted[self.tried[names[0]] - 1])]
        return [(task, Outcome(compute(task.cells)))]

    def stop(self) -> None:
        self.tasks.clear()
        self.stopped = True


def go(tiny: str, folder: Path, *overrides: str, engine: Here | None = None) -> tuple[running.Summary, Here]:
    engine = engine or Here()
    study = read_plan(tiny, overrides=overrides)
    return run_study(study, StudyFolder(folder), engine, StudyProgress(quiet=True)), engine


def names(tiny: str, folder: Path, *overrides: str) -> list[str]:
    prepare(read_plan(tiny, overrides=overrides), StudyFolder(folder))
    return [cell.hash for cell in StudyFolder(folder).cells()]


def test_every_cell_is_computed(tiny, tmp_path):
    summary, engine = go(tiny, tmp_path / "out")
    assert (summary.total, len(summary.done), summary.failed, summary.missing) == (4, 4, {}, 0)
    assert engine.stopped


def test_a_second_run_computes_nothing(tiny, tmp_path):
    go(tiny, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("cells/*/result.json")}
    summary, engine = go(tiny, tmp_path / "out")
    assert len(summary.done) == 4
    assert not engine.tried
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_seeds_of_a_point_are_grouped_and_first_seeds_come_first(tiny, tmp_path):
    groups = prepare(read_plan(tiny, overrides=["seeds=3", "training.ensemble=2"]), StudyFolder(tmp_path / "out"))
    seeds = [[cell.settings()["seed"] for cell in group] for group in groups]
    sizes = [{cell.settings()["factors"]["training.batch_size"] for cell in group} for group in groups]
    assert seeds == [[0, 1], [0, 1], [2], [2]]
    assert sizes == [{16}, {30}, {16}, {30}]


def test_starts_of_one_seed_are_grouped_where_they_share_their_batches(tiny, tmp_path):
    starts = 'factors.model.initialization=["xavier_normal", "kaiming_uniform"]'
    lenets = ["data.name=random:60,1x8x8,3,0", "model.name=lenet5", "seeds=2", starts]
    groups = prepare(read_plan(tiny, overrides=lenets), StudyFolder(tmp_path / "out"))
    found = [
        [(cell.config().seed, cell.config().training.batch_size, cell.config().model.initialization) for cell in group]
        for group in groups
    ]
    pairs = [(seed, size) for seed in (0, 1) for size in (16, 30)]
    assert found == [[(*pair, "xavier_normal"), (*pair, "kaiming_uniform")] for pair in pairs]


def test_what_cannot_work_is_refused_before_anything_is_computed(tiny, tmp_path):
    for override, says in (
        ('factors.model.name=["mlp:8", "lenet"]', "lenet needs images"),
        ("data.name=mnist", "mnist is read from a folder: say which, by --data-folder"),
        ("data.train_samples=100", "samples must be a whole number from 1 to 60"),
    ):
        engine = Here()
        with pytest.raises(SpiritLevelError, match=says):
            go(tiny, tmp_path / "out", override, engine=engine)
        assert engine.stopped
        assert not engine.tried


def test_a_worker_that_was_killed_is_tried_once_more(tiny, tmp_path):
    first = names(tiny, tmp_path / "out", ALONE)[0]
    summary, engine = go(tiny, tmp_path / "out", ALONE, engine=Here({first: [Outcome(-9)]}))
    assert (len(summary.done), summary.failed) == (4, {})
    assert engine.tried[first] == 2


def test_a_worker_that_is_killed_again_costs_its_cell_only(tiny, tmp_path, capsys):
    first = names(tiny, tmp_path / "out", ALONE)[0]
    summary, engine = go(tiny, tmp_path / "out", ALONE, engine=Here({first: [Outcome(-9), Outcome(-9, "last words")]}))
    assert summary.failed == {first: "killed by signal 9 (out of memory?)"}
    assert len(summary.done) == 3
    assert engine.tried[first] == 2
    failure = json.loads((tmp_path / "out/cells" / first / "failed.json").read_text())
    assert failure == {"error": "killed by signal 9 (out of memory?)", "traceback": "last words", "attempts": 2}
    summary, _ = go(tiny, tmp_path / "out", ALONE)  # a new run tries again
    assert (len(summary.done), summary.failed) == (4, {})


def test_a_group_that_crashed_is_tried_cell_by_cell(tiny, tmp_path):
    pairs = "training.ensemble=2"
    together = names(tiny, tmp_path / "out", pairs)
    script = {together[0]: [Outcome(CRASHED), Outcome(CRASHED, "oh")]}
    summary, engine = go(tiny, tmp_path / "out", pairs, engine=Here(script))
    assert summary.failed == {together[0]: f"ended with code {CRASHED}"}
    assert set(summary.done) == set(together[1:])
    assert [engine.tried[name] for name in together] == [2, 2, 1, 1]


def test_refused_input_is_not_tried_again(tiny, tmp_path, monkeypatch):
    def refuse(*_):
        raise SpiritLevelError("cannot be")

    monkeypatch.setattr(worker, "train", refuse)
    summary, engine = go(tiny, tmp_path / "out")
    assert set(summary.failed.values()) == {"cannot be"}
    assert len(summary.failed) == 4
    assert set(engine.tried.values()) == {1}


@pytest.mark.parametrize("where", ["worker", "here"])
def test_a_full_disk_stops_the_run_with_a_remedy(tiny, tmp_path, monkeypatch, where):
    last = names(tiny, tmp_path / "out", ALONE)[-1]
    engine = Here({last: [Outcome(DISK_FULL)]})
    if where == "here":

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(StudyFolder, "write", full)
    with pytest.raises(SpiritLevelError, match=r"no space left for .*free some space and run the same command again"):
        go(tiny, tmp_path / "out", ALONE, engine=engine)
    assert engine.stopped
    monkeypatch.undo()
    finished = {cell.hash for cell in StudyFolder(tmp_path / "out").cells() if cell.done}
    assert bool(finished) == (where == "worker")
    summary, after = go(tiny, tmp_path / "out", ALONE)
    assert len(summary.done) == 4
    assert not finished & set(after.tried)


def test_an_interruption_stops_the_workers_and_says_how_to_go_on(tiny, tmp_path, capsys):
    class Interrupted(Here):
        def finished(self):
            raise KeyboardInterrupt

    engine = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        run_study(read_plan(tiny), StudyFolder(tmp_path / "out"), engine, StudyProgress())
    assert engine.stopped
    assert "interrupted; what is finished stays, and the same command goes on" in capsys.readouterr().err


def test_a_cell_of_another_run_is_waited_for(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "HELD_PAUSE", 0.05)
    first = names(tiny, tmp_path / "out", ALONE)[0]
    cell = StudyFolder(tmp_path / "out").cell(first)
    let_go = threading.Event()

    def other_run() -> None:
        with locked([cell]):
            let_go.wait(20)

    other = threading.Thread(target=other_run)
    other.start()
    engine = Here()
    threading.Timer(0.5, let_go.set).start()
    summary, _ = go(tiny, tmp_path / "out", ALONE, engine=engine)
    other.join()
    assert len(summary.done) == 4
    assert engine.tried[first] == 1  # looked at, and submitted when it was free


def test_a_cell_that_another_run_finished_is_taken_as_it_is(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "HELD_PAUSE", 1000.0)
    first = names(tiny, tmp_path / "out", ALONE)[0]

    class Elsewhere(Here):
        def finished(self):
            ended = super().finished()
            if any(outcome.code == HELD for _, outcome in ended):
                compute([CellFolder(tmp_path / "out/cells" / first).cell])
            return ended

    summary, engine = go(tiny, tmp_path / "out", ALONE, engine=Elsewhere({first: [Outcome(HELD)]}))
    assert len(summary.done) == 4
    assert engine.tried[first] == 1


def test_two_runs_on_one_folder_compute_every_cell_once(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "HELD_PAUSE", 0.05)
    trained: list[int] = []
    train = worker.train

    def counted(configs, samples, *told):
        trained.extend(config.seed for config in configs)
        return train(configs, samples, *told)

    monkeypatch.setattr(worker, "train", counted)
    summaries = []
    runs = [
        threading.Thread(target=lambda: summaries.append(go(tiny, tmp_path / "out", ALONE, "seeds=4")[0]))
        for _ in range(2)
    ]
    for thread in runs:
        thread.start()
    for thread in runs:
        thread.join()
    assert [len(summary.done) for summary in summaries] == [8, 8]
    assert sorted(trained) == sorted([0, 1, 2, 3] * 2)


def test_excluded_networks_are_counted(tiny, tmp_path):
    summary, _ = go(tiny, tmp_path / "out", "training.stop={train_accuracy=1.0}")
    assert set(summary.excluded) == set(summary.done)
    assert len(summary.excluded) == 4
    assert summarize(StudyFolder(tmp_path / "out")) == summary


@pytest.mark.long
def test_a_run_that_was_killed_goes_on_where_it_was(tiny, tmp_path):
    out = tmp_path / "out"
    settings = [ALONE, "training.epochs=40"]
    flags = [flag for setting in settings for flag in ("--set", setting)]
    command = [
        sys.executable,
        "-m",
        "spiritlevel",
        "study",
        "run",
        tiny,
        "--folder",
        str(out),
        "--workers",
        "1",
        *flags,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not (done := list(out.glob("cells/*/result.json"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert 1 <= len(done) < 4
    cells = StudyFolder(out).cells()
    while time.monotonic() < deadline:  # what the killed run had started ends by itself
        with locked(cells) as free:
            if free:
                break
        time.sleep(0.05)
    assert free
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.glob("cells/*/result.json")}
    summary, engine = go(tiny, out, *settings)
    assert len(summary.done) == 4
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before
    assert set(engine.tried) == {cell.hash for cell in cells} - {path.parent.name for path in before}
    go(tiny, tmp_path / "other", *settings)
    for cell in cells:
        fresh = StudyFolder(tmp_path / "other").cell(cell.hash)
        assert cell.checkpoint.read_bytes() == fresh.checkpoint.read_bytes()
        assert cell.result()["measures"]["values"] == fresh.result()["measures"]["values"]


# --- progress ---------------------------------------------------------------------------------------------------------


def test_time_left_goes_by_the_cells_of_this_run():
    assert time_left(Count(total=10, done=4, found=4), 100.0) is None
    assert time_left(Count(total=10, done=6, found=4), 100.0) == pytest.approx(200.0)
    assert time_left(Count(total=10, done=5, found=4, failed=1), 100.0) == pytest.approx(200.0)


def test_plain_lines_where_there_is_no_terminal(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("spiritlevel.study.progress.PLAIN_EVERY", 0.0)
    run_study(read_plan(tiny, overrides=[ALONE]), StudyFolder(tmp_path / "out"), Here(), StudyProgress())
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "0 of 4 cells done, 0 running, 0 failed"
    assert lines[1].startswith("1 of 4 cells done, 1 running, 0 failed, about ")
    assert lines[-1] == "4 of 4 cells done, 0 running, 0 failed"


def test_a_live_line_on_a_terminal(tiny, tmp_path):
    import io

    from rich.console import Console

    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    failing = names(tiny, tmp_path / "out", ALONE)[0]
    engine = Here({failing: [Outcome(-9), Outcome(-9)]})
    run_study(read_plan(tiny, overrides=[ALONE]), StudyFolder(tmp_path / "out"), engine, StudyProgress(console=console))
    assert f"cell {failing} failed: killed by signal 9 (out of memory?)" in text.getvalue()
    assert "of 4 cells done" in text.getvalue()


def test_quiet_is_quiet(tiny, tmp_path, capsys):
    go(tiny, tmp_path / "out")
    assert capsys.readouterr().err == ""
