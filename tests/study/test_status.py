"""Where every cell is: at work and how far, waiting, tried again, excluded or failed; and what a run says of it."""

import json
import os
import platform
import time

import pytest
from test_study_run import ALONE, Here, go, names

from spiritlevel import cli
from spiritlevel.study import live, worker
from spiritlevel.study import run as running
from spiritlevel.study.engines.endings import NODE_LOST, Outcome, taken, timed_out
from spiritlevel.study.live import AtWork, at_work, attempts_at, note_attempt
from spiritlevel.study.plan import read_plan
from spiritlevel.study.progress import StudyProgress
from spiritlevel.study.run import prepare, run_study
from spiritlevel.study.status import is_at_work, summarize
from spiritlevel.study.store import StudyFolder, locked


@pytest.fixture
def folder(tiny, tmp_path) -> StudyFolder:
    prepare(read_plan(tiny, overrides=[ALONE]), StudyFolder(tmp_path / "out"))
    return StudyFolder(tmp_path / "out")


def test_a_worker_says_where_it_is_and_how_far(folder, monkeypatch):
    cell = folder.cells()[0]
    seen = []
    train = worker.train

    def watched(configs, samples, after_epoch, unfinished):
        def look(epoch, losses):
            after_epoch(epoch, losses)
            signs[-1]._write()
            seen.append((at_work(cell), summarize(folder).lines()))

        return train(configs, samples, look, unfinished)

    signs = []
    enter = AtWork.__enter__
    monkeypatch.setattr(AtWork, "__enter__", lambda sign: signs.append(sign) or enter(sign))
    monkeypatch.setattr(worker, "train", watched)
    assert worker.compute([cell.cell]) == worker.DONE
    said, lines = seen[1]
    assert (said["host"], said["process"], said["epoch"], said["epochs"]) == (platform.node(), os.getpid(), 2, 3)
    curve = cell.curve.read_text().splitlines()[2].split(",")
    assert said["train_loss"] == float(curve[1])
    assert lines[0] == "0 of 4 cells done, 1 running, 3 waiting, 0 failed"
    assert lines[1].startswith(f"{cell.hash} running on {platform.node()} since ")
    assert lines[1].endswith(f", epoch 2/3, loss {float(curve[1]):.3g}")
    assert at_work(cell) is None
    assert not (cell.path / "running.json").exists()


def test_the_sign_of_a_killed_worker_counts_no_longer(folder):
    cell = folder.cells()[0]
    with locked([cell]), AtWork([cell]):
        assert at_work(cell) is not None
        left_behind = (cell.path / "running.json").read_text()
    (cell.path / "running.json").write_text(left_behind)
    assert at_work(cell) is None  # nobody holds the cell
    elsewhere = json.dumps({**json.loads(left_behind), "host": "another"})
    (cell.path / "running.json").write_text(elsewhere)
    assert at_work(cell) is not None  # locks of another machine may not be seen from here
    os.utime(cell.path / "running.json", (0, time.time() - 2 * live.FRESH))
    assert at_work(cell) is None
    (cell.path / "running.json").write_text("{")
    assert at_work(cell) is None


def test_signs_go_on_while_a_worker_is_busy(folder, monkeypatch):
    monkeypatch.setattr(live, "FIRST_BEAT", 0.01)
    cell = folder.cells()[0]
    with locked([cell]), AtWork([cell]) as sign:
        sign.say("measuring")
        deadline = time.monotonic() + 600
        while (at_work(cell) or {}).get("doing") != "measuring" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert summarize(folder).lines()[1].endswith(", measuring")


def test_status_tells_all_states_apart(folder, tmp_path, capsys):
    first, second, third, _ = folder.cells()
    note_attempt(first, "node lost")
    note_attempt(first, "killed by signal 9 (out of memory?)")
    second.write_failure("timed out after 5 min", "", 1)
    third.write_failure("of a run before", "", 2)
    with folder.at_work(), locked([third]), AtWork([third]):
        summary = summarize(folder)
        assert is_at_work(folder)
        assert (set(summary.running), set(summary.failed), len(summary.waiting)) == ({third.hash}, {second.hash}, 2)
    assert not is_at_work(folder)
    with pytest.raises(SystemExit):
        cli.main(["study", "status", str(folder.path)])
    assert capsys.readouterr().out.splitlines() == [
        "0 of 4 cells done, 0 running, 2 waiting, 2 failed",
        f"{first.hash} tried again: node lost; killed by signal 9 (out of memory?)",
        f"{second.hash} failed: timed out after 5 min",
        f"{third.hash} failed: of a run before",
        "no run is at work here: the same `spiritlevel study run` goes on where it was",
    ]
    with pytest.raises(SystemExit):
        cli.main(["study", "status", str(folder.path), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (told["at_work"], told["retried"]) == (False, {first.hash: attempts_at(first)})


def test_cells_that_a_node_takes_with_it_are_told_of_in_one_line(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(running, "GATHER", 1000.0)  # this engine computes while cells are gathered
    lost = {name: [taken(NODE_LOST, node="node17")] for name in names(tiny, tmp_path / "out", ALONE)}
    plan = read_plan(tiny, overrides=[ALONE])
    summary = run_study(plan, StudyFolder(tmp_path / "out"), Here(lost), StudyProgress())
    assert (len(summary.done), set(summary.retried)) == (4, set(lost))
    told = [line for line in capsys.readouterr().err.splitlines() if "node lost" in line]
    assert len(told) == 1
    assert told[0].startswith("4 cells (")
    assert told[0].endswith(" and 2 more): node lost (node17); tried again")


def test_a_lost_node_is_no_fault_of_a_cell_but_there_is_an_end(tiny, tmp_path):
    first, second, *_ = names(tiny, tmp_path / "out", ALONE)
    lost = taken(NODE_LOST)
    script = {first: [lost, lost, Outcome(-9), lost, lost], second: [lost] * 9}
    summary, engine = go(tiny, tmp_path / "out", ALONE, engine=Here(script))
    assert first in summary.done  # four losses and one kill
    assert summary.failed == {second: NODE_LOST}
    assert engine.tried[second] == running.MOST_LOSSES


@pytest.mark.parametrize(("ending", "as_a_whole"), [(taken(NODE_LOST), True), (Outcome(-9), False)])
def test_a_company_of_which_one_is_done_stays_together_unless_it_was_killed(tiny, tmp_path, ending, as_a_whole):
    """So that it goes on where it was; where it does not, nothing of it is left behind."""
    go(tiny, tmp_path / "out", "training.ensemble=2", "seeds=1")
    done = names(tiny, tmp_path / "out", "training.ensemble=2", "seeds=1")[0]
    together = [cell for cell in names(tiny, tmp_path / "out", "training.ensemble=2") if cell != done]
    cell = next(each for each in StudyFolder(tmp_path / "out").cells() if each.hash == done)
    cell.unfinished.write_bytes(b"how far both are")
    summary, engine = go(tiny, tmp_path / "out", "training.ensemble=2", engine=Here({done: [ending]}))
    assert summary.missing == 0
    assert engine.tried[done] == (2 if as_a_whole else 1)
    assert [engine.tried[name] for name in together].count(2) == 1
    assert not cell.unfinished.exists()


def test_what_took_too_long_alone_is_not_tried_again(tiny, tmp_path):
    pairs = "training.ensemble=2"
    together = names(tiny, tmp_path / "out", pairs)
    script = {together[0]: [timed_out(60.0), timed_out(60.0)]}
    summary, engine = go(tiny, tmp_path / "out", pairs, engine=Here(script))
    assert summary.failed == {together[0]: "timed out after 1 min"}
    assert engine.tried[together[0]] == 2  # with another seed, then alone
    summary, engine = go(tiny, tmp_path / "other", ALONE, engine=Here({together[0]: [timed_out(60.0)]}))
    assert (summary.failed, engine.tried[together[0]]) == ({together[0]: "timed out after 1 min"}, 1)


def test_a_cell_that_looks_free_from_here_is_submitted_after_ever_longer_pauses(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "HELD_PAUSE", 0.05)
    pauses = []
    wait_for = running._Held.wait_for

    def noted(waiting, task):
        asked = time.monotonic()
        wait_for(waiting, task)
        pauses.append(waiting.tasks[task] - asked)

    monkeypatch.setattr(running._Held, "wait_for", noted)
    first = names(tiny, tmp_path / "out", ALONE)[0]
    summary, engine = go(tiny, tmp_path / "out", ALONE, engine=Here({first: [Outcome(worker.HELD)] * 4}))
    assert (len(summary.done), engine.tried[first]) == (4, 5)
    assert all(pause >= least for pause, least in zip(pauses, [0.05, 0.1, 0.2, 0.4], strict=True))
