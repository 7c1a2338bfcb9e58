"""Studies behind a URL: on `file://` through processes that see the URL only, and on `memory://` in this process."""

import json
import platform
import shutil
import sys
import time
from pathlib import Path

import fsspec
import pytest
from test_study_run import ALONE, Here

from spiritlevel import cli
from spiritlevel.errors import SpiritLevelError
from spiritlevel.study import live, objectstore, worker
from spiritlevel.study import run as running
from spiritlevel.study.engines.endings import NODE_LOST, Outcome, taken
from spiritlevel.study.plan import read_plan
from spiritlevel.study.progress import StudyProgress
from spiritlevel.study.remote import TO_SUMMARIZE, RemoteStudy, study_at
from spiritlevel.study.run import run_study
from spiritlevel.study.worker import HELD, compute_away

ONE = ("seeds=1", "training.batch_size=16")


class Apart(Here):
    """An engine that computes in this process as another machine would: it has the URL, and does not see the driver's copy."""

    def finished(self):
        if not self.tasks:
            return super().finished()
        task = self.tasks[0]
        scripted = self.script.get(task.cells[0].parent.name, [])
        if self.tried[task.cells[0].parent.name] < len(scripted):
            return super().finished()
        self.tasks.pop(0)
        self.tried.update(path.parent.name for path in task.cells)
        assert all(path.startswith(task.url) for path in task.paths)
        return [(task, Outcome(compute_away(task.paths)))]


@pytest.fixture
def memory():
    """The URL of a folder in the memory of this process."""
    yield "memory://bucket/study"
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


def go(tiny: str, url: str, *overrides: str, engine: Here | None = None) -> tuple[running.Summary, Here]:
    """A run with an empty folder of its own."""
    engine = engine or Apart()
    with study_at(url) as folder:
        summary = run_study(read_plan(tiny, overrides=overrides or (ALONE,)), folder, engine, StudyProgress(quiet=True))
    return summary, engine


def files(url: str) -> dict[str, bytes]:
    store = objectstore.Store(url)
    return {name: store.read(name) for name in store.names()}


def leave(*command: str) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main(list(command))
    return left.value.code or 0


def test_a_study_lies_in_the_store_and_is_resumed_from_it(tiny, memory):
    summary, engine = go(tiny, memory)
    assert (len(summary.done), summary.failed, len(engine.tried)) == (4, {}, 4)
    stored = files(memory)
    names = {"cell.json", "curve.csv", "model.safetensors", "training.json", "result.json"}
    assert set(stored) == {"study.json", *(f"cells/{cell}/{name}" for cell in summary.done for name in names)}
    summary, engine = go(tiny, memory)
    assert (len(summary.done), len(engine.tried)) == (4, 0)
    assert files(memory) == stored


def test_a_study_that_measures_something_else_takes_over_its_trainings(tiny, memory):
    first, _ = go(tiny, memory, ALONE, "seeds=1")
    weights = {data for name, data in files(memory).items() if name.endswith(".safetensors")}
    second, _ = go(tiny, memory, ALONE, "seeds=1", 'measure.measures=["hessian_trace"]')
    stored = files(memory)
    assert not set(first.done) & set(second.done)
    assert {stored[f"cells/{cell}/model.safetensors"] for cell in second.done} == weights
    before, after = (
        [json.loads(stored[f"cells/{cell}/training.json"])["seconds"] for cell in cells]
        for cells in (first.done, second.done)
    )
    assert sorted(before) == sorted(after)  # trained once


def test_damaged_and_half_sent_cells_are_computed_again(tiny, memory, monkeypatch):
    summary, _ = go(tiny, memory)
    cut, half, unmeasured, _ = summary.done
    fs, root = fsspec.filesystem("memory"), "/bucket/study/cells"
    fs.pipe_file(f"{root}/{cut}/result.json", b'{"training": {')
    fs.rm_file(f"{root}/{half}/result.json")
    fs.pipe_file(f"{root}/{half}/model.safetensors", b"half of the")
    fs.rm_file(f"{root}/{unmeasured}/result.json")
    trained = []
    train = worker.train
    monkeypatch.setattr(worker, "train", lambda configs, *rest: trained.append(configs) or train(configs, *rest))
    summary, engine = go(tiny, memory)
    assert set(engine.tried) == {cut, half, unmeasured}
    assert (len(summary.done), len(trained)) == (4, 1)
    stored = files(memory)
    assert json.loads(stored[f"cells/{cut}/result.json"])["hash"] == cut
    assert stored[f"cells/{cut}/result.json.damaged"] == b'{"training": {'


def test_a_result_is_sent_last(tiny, memory, monkeypatch):
    monkeypatch.setattr("spiritlevel.study.away.EVERY", 60.0)  # all at once, when all is written
    sent = []
    put = objectstore.Store._replace
    monkeypatch.setattr(
        objectstore.Store, "_replace", lambda s, source, path: sent.append(source.name) or put(s, source, path)
    )
    go(tiny, memory, ALONE, *ONE)
    ends = [
        sent.index(name) for name in ("cell.json", "study.json", "model.safetensors", "training.json", "result.json")
    ]
    assert ends == sorted(ends)
    assert sent.index("curve.csv") < sent.index("training.json")
    assert sent[-1] == "result.json"


def test_failures_retries_and_lost_nodes_are_in_the_store(tiny, memory, capsys):
    with study_at(memory) as folder:
        groups = running.prepare(read_plan(tiny, overrides=[ALONE]), folder)
    first, second, *_ = (cell.hash for group in groups for cell in group)
    engine = Apart({first: [taken(NODE_LOST)], second: [Outcome(-9), Outcome(-9, "last words")]})
    summary, _ = go(tiny, memory, engine=engine)
    assert summary.failed == {second: "killed by signal 9 (out of memory?)"}
    assert summary.retried == {first: ["node lost"]}
    stored = files(memory)
    assert json.loads(stored[f"cells/{second}/failed.json"])["traceback"] == "last words"
    assert leave("study", "status", memory) == 0
    assert capsys.readouterr().out.splitlines() == [
        "3 of 4 cells done, 0 running, 0 waiting, 1 failed",
        f"{first} tried again: node lost",
        f"{second} failed: killed by signal 9 (out of memory?)",
    ]
    summary, engine = go(tiny, memory)
    assert (len(summary.done), set(engine.tried)) == (4, {second})
    assert f"cells/{second}/failed.json" not in files(memory)


def test_a_cell_at_work_is_seen_and_left_alone(tiny, memory, capsys, monkeypatch):
    with study_at(memory) as folder:
        [group] = running.prepare(read_plan(tiny, overrides=ONE), folder)
    cell = group[0].hash
    place = f"{memory}/cells/{cell}"
    sign = {"host": platform.node(), "process": 1, "since": time.time(), "doing": "training", "epoch": 2, "epochs": 3}
    fs = fsspec.filesystem("memory")
    fs.pipe_file(f"/bucket/study/cells/{cell}/running.json", json.dumps({**sign, "at": time.time()}).encode())
    assert compute_away([f"{place}/cell.json"]) == HELD
    leave("study", "status", memory)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "0 of 1 cells done, 1 running, 0 waiting, 0 failed"
    assert said[1].startswith(f"{cell} running on {platform.node()} since ")
    assert said[1].endswith(", epoch 2/3")
    # A run waits for it, and takes it when the sign grows old.
    monkeypatch.setattr(running, "HELD_PAUSE", 0.05)
    monkeypatch.setattr(live, "FRESH", 1.0)
    summary, engine = go(tiny, memory, *ONE)
    assert (summary.done, engine.tried[cell]) == ((cell,), 1)
    assert f"cells/{cell}/running.json" not in files(memory)


def test_signs_of_a_worker_come_through_the_store(tiny, memory, monkeypatch):
    seen = []
    train = worker.train

    def watched(configs, samples, after_epoch, unfinished):
        deadline = time.monotonic() + 60
        while not seen and time.monotonic() < deadline:
            with study_at(memory, TO_SUMMARIZE) as folder:
                seen.extend(running.summarize(folder).running.values())
        return train(configs, samples, after_epoch, unfinished)

    monkeypatch.setattr(worker, "train", watched)
    monkeypatch.setattr("spiritlevel.study.away.EVERY", 0.01)
    go(tiny, memory, *ONE)
    assert (seen[0]["host"], seen[0]["doing"]) == (platform.node(), "starting")


def test_an_interrupted_run_lets_go_of_its_cells(tiny, memory):
    class Interrupted(Apart):
        def finished(self):
            fs = fsspec.filesystem("memory")
            sign = {"host": "node17", "process": 1, "since": 0.0, "at": time.time()}
            for task in self.tasks:
                fs.pipe_file(f"/bucket/study/cells/{task.cells[0].parent.name}/running.json", json.dumps(sign).encode())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(tiny, memory, engine=Interrupted())
    assert not [name for name in files(memory) if "running" in name or name.startswith("runs/")]


def test_two_runs_see_each_other(tiny, memory, tmp_path):
    with study_at(memory) as folder:
        running.prepare(read_plan(tiny, overrides=[ALONE]), folder)
    first = RemoteStudy(memory, tmp_path / "first")
    with first.at_work():
        with study_at(memory, TO_SUMMARIZE) as folder:
            assert folder.is_at_work()
        other = RemoteStudy(memory, tmp_path / "second")
        other._sign = "runs/another-1.json"
        with pytest.raises(SpiritLevelError, match=r"another run is at work in .* with other settings"):
            running.prepare(read_plan(tiny, overrides=[ALONE, "training.epochs=2"]), other)
    with study_at(memory, TO_SUMMARIZE) as folder:
        assert not folder.is_at_work()


@pytest.mark.long
def test_the_commands_take_urls(tiny, tmp_path, capsys, monkeypatch):
    """Through the local engine: processes that bring their cells, and send what they find."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    settings = ["--set", "seeds=1", "--set", "training.batch_size=16", "--quiet"]
    assert leave("study", "run", tiny, "--folder", "file://out", *settings) == 0
    names = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"study.json", "results.csv", "correlations.csv", "report.html"} < names
    cells = [path.name for path in (tmp_path / "out/cells").iterdir()]
    assert {f"cells/{cell}/{name}" for cell in cells for name in ("result.json", "log.txt", "curve.csv")} < names
    assert not [name for name in names if "running" in name or ".part" in name]
    assert not list((tmp_path / "cache").rglob("study-*"))
    url = (tmp_path / "out").as_uri()
    capsys.readouterr()
    assert leave("study", "status", url) == 0
    assert capsys.readouterr().out == "1 of 1 cells done, 0 running, 0 waiting, 0 failed\n"
    page = (tmp_path / "out/report.html").read_text()
    (tmp_path / "out/report.html").unlink()
    assert leave("study", "report", url) == 0
    assert capsys.readouterr().err == f"wrote {url}/report.html\n"
    assert len((tmp_path / "out/report.html").read_text()) == pytest.approx(len(page), abs=500)
    assert leave("study", "correlate", url, "--csv", str(tmp_path / "signs.csv")) == 0
    said = capsys.readouterr().out
    shutil.rmtree(tmp_path / "out/cells")  # its tables say the same
    assert leave("study", "correlate", url, "--csv", str(tmp_path / "signs.csv")) == 0
    assert capsys.readouterr().out == said


def test_what_is_not_installed_or_not_known_is_refused(tiny, monkeypatch):
    for url, says in (
        ("s3://bucket/study", "s3:// needs a package that is not installed: pip install s3fs"),
        ("gs://bucket/study", "gs:// needs a package that is not installed: pip install gcsfs"),
        ("gcss://bucket/study", "fsspec knows no protocol 'gcss'; did you mean 'gcs'?"),
        ("s9://bucket/study", "fsspec knows no protocol 's9'; s3, gs, az and file are some"),
        ("simplecache::s3://bucket/study", "is a chain of file systems; give the URL of the store itself"),
    ):
        with pytest.raises(SpiritLevelError, match=says.replace("?", r"\?")):
            objectstore.Store(url)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(SpiritLevelError, match=r'not installed: pip install "spiritlevel\[objectstore\]"'):
        objectstore.Store("memory://bucket")


def test_a_folder_does_without_fsspec(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert len(go(tiny, str(tmp_path / "out"), ALONE, *ONE, engine=Here())[0].done) == 1


def test_where_there_is_no_study_the_url_is_named(memory, capsys):
    assert leave("study", "status", memory) == 2
    said = capsys.readouterr().err
    assert said == f"error: {memory} holds no study: no file study.json; `spiritlevel study run` makes one\n"
    assert leave("study", "run", "dinh-attack", "--folder", "out", "--work-folder", "w") == 2
    assert capsys.readouterr().err == "error: --work-folder is for results behind a URL; out is a folder itself\n"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PermissionError(13, "Access Denied"), "no permission (Access Denied)"),
        (ConnectionError("host is down\nand more"), "not reachable (host is down)"),
        (type("NoCredentialsError", (Exception,), {})("none found"), "no credentials (none found)"),
        (NotImplementedError(), "this kind of store cannot do that"),
        (
            FileNotFoundError("The specified bucket does not exist"),
            "it is not there (The specified bucket does not exist)",
        ),
    ],
)
def test_a_store_that_fails_says_so_in_a_line(tiny, memory, tmp_path, capsys, monkeypatch, error, says):
    def fail(*given, **named):
        raise error

    monkeypatch.setattr(objectstore, "PAUSES", (0.0,))
    fs = fsspec.filesystem("memory")
    monkeypatch.setattr(fs, "put_file", fail)
    work = ["--work-folder", str(tmp_path / "work")]
    assert leave("study", "run", tiny, "--folder", memory, "--quiet", *work) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"cannot be written: {says}: stopped. What is finished stays" in said
    assert said.startswith(f"error: {memory}/")
    if not isinstance(error, FileNotFoundError):
        monkeypatch.setattr(fs, "cat_file", fail)
        assert leave("study", "status", memory) == 1
        assert capsys.readouterr().err == f"failed: {memory}/study.json: cannot be read: {says}\n"


def test_a_store_is_asked_again(memory, monkeypatch):
    left = [ConnectionError("later"), TimeoutError("later")]
    store = objectstore.Store(memory)
    store.fs.pipe_file("/bucket/study/name", b"content")
    cat = store.fs.cat_file
    monkeypatch.setattr(objectstore, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(store.fs, "cat_file", lambda path: cat(path) if not left else (_ for _ in ()).throw(left.pop()))
    assert store.read("name") == b"content"


def test_a_node_that_does_not_reach_the_store_says_so(tiny, memory, capsys):
    class Unreached(Apart):
        """Memory is of one process: another one would not see it."""

        def finished(self):
            if not self.tasks:
                return super().finished()
            task = self.tasks.pop(0)
            code = compute_away([path.replace(memory, "memory://elsewhere") for path in task.paths])
            return [(task, Outcome(code, f"what was said before\n{capsys.readouterr().err.strip()}"))]

    with study_at(memory) as folder:
        [[earlier]] = running.prepare(read_plan(tiny, overrides=[ALONE, *ONE]), folder)
        earlier.write_failure("of a run before", "", 1)
        folder.share([earlier])
    summary, _ = go(tiny, memory, ALONE, *ONE, engine=Unreached())
    [(cell, told)] = summary.failed.items()
    seen = f"not seen from {platform.node()}: every node must reach the store of the study by its URL"
    assert told == f"memory://elsewhere/cells/{cell}/cell.json: {seen}"
    assert json.loads(files(memory)[f"cells/{cell}/failed.json"])["attempts"] == 2


def test_a_folder_behind_a_url_that_is_deleted_is_not_made_again(tiny, tmp_path):
    class Deleting(Apart):
        def finished(self):
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            return super().finished()

    with pytest.raises(SpiritLevelError, match="stopped"):
        go(tiny, (tmp_path / "out").as_uri(), engine=Deleting())
    assert not (tmp_path / "out").exists()


def test_a_file_does_not_make_its_folder_unless_told_so(memory, tmp_path):
    """Some file systems of fsspec would."""
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells/name").write_text("content")
    store = objectstore.Store(memory)
    with pytest.raises(objectstore.StoreError, match="cells/name") as raised:
        store.put(["cells/name"], tmp_path)
    assert raised.value.strerror == "cannot be written: it is not there (No such file or directory)"
    assert store.names() == set()
    store.put(["cells/name"], tmp_path, make=True)
    assert store.read("cells/name") == b"content"


def test_what_refuses_a_cell_names_its_url(tiny, memory):
    with study_at(memory) as folder:
        [group] = running.prepare(read_plan(tiny, overrides=ONE), folder)
    cell = f"cells/{group[0].hash}/cell.json"
    settings = json.loads(files(memory)[cell])
    settings["config"]["seed"] = 7
    fsspec.filesystem("memory").pipe_file(f"/bucket/study/{cell}", json.dumps(settings).encode())
    assert compute_away([f"{memory}/{cell}"]) == worker.REFUSED
    told = json.loads(files(memory)[cell.replace("cell.json", "failed.json")])["error"]
    assert told.startswith(f"{memory}/{cell} holds other settings")


def test_the_copy_of_a_run_lies_in_the_users_cache(monkeypatch):
    from spiritlevel.study.remote import default_work_folder

    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_work_folder("s3://a/b").parent == Path("/cache/spiritlevel/studies")
    assert default_work_folder("s3://a/b") != default_work_folder("s3://a/c")


def test_copies_of_runs_that_were_killed_are_deleted(memory, tmp_path):
    with study_at(memory, work=tmp_path) as at_work, at_work.at_work():
        killed = tmp_path / f"study-{platform.node()}-killed"
        killed.mkdir()
        (killed / "running").touch()
        with study_at(memory, work=tmp_path) as other:
            assert set(tmp_path.iterdir()) == {at_work.path, other.path}
    assert list(tmp_path.iterdir()) == []


def test_status_names_a_damaged_file_by_its_url(tiny, memory, capsys):
    with study_at(memory) as folder:
        [group] = running.prepare(read_plan(tiny, overrides=ONE), folder)
    place = f"cells/{group[0].hash}/result.json"
    fsspec.filesystem("memory").pipe_file(f"/bucket/study/{place}", b"[")
    for form in ([], ["--json"]):
        leave("study", "status", memory, *form)
        assert f"{memory}/{place} is damaged" in capsys.readouterr().out
