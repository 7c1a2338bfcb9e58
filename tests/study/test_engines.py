import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from skips import LINUX
from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.engines import launch, local, make_engine
from spiritlevel.study.engines.asked import read_resources, read_runtime_env
from spiritlevel.study.engines.endings import Outcome
from spiritlevel.study.engines.engine import Task
from spiritlevel.study.engines.local import LocalEngine, available_cores
from spiritlevel.study.live import attempts_at
from spiritlevel.study.plan import read_plan
from spiritlevel.study.progress import StudyProgress
from spiritlevel.study.remote import study_at
from spiritlevel.study.run import Summary, prepare, run_study
from spiritlevel.study.store import StudyFolder
from spiritlevel.study.worker import DONE, compute

on_linux = pytest.mark.skipif(not LINUX, reason="a cluster of Ray with two nodes needs Linux")
on_unix = pytest.mark.skipif(not LINUX, reason="submitit needs Unix")
KILLED = "killed by signal 9 (out of memory?)"

FACTORIES = """\
import os
import signal
import sys
import time
from pathlib import Path

from torch import nn


def network(input_shape, classes, width):
    if sys.argv[0].endswith("worker.py"):  # not where the study is only checked
        tried = Path(__file__).with_name(f"tried-{width}")
        if width == 3.0 or (width == 2.0 and not tried.exists()):
            tried.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if width == 5.0 and not tried.exists():
            tried.write_text(os.environ.get("COLOUR", ""))
            time.sleep(600)
    return nn.Sequential(nn.Linear(*input_shape, 4), nn.ReLU(), nn.Linear(4, classes))
"""


@pytest.fixture
def deadly(tiny, tmp_path, monkeypatch) -> Callable[..., object]:
    """The tiny study with networks of a module in the working directory, by their widths: those kill their process."""
    (tmp_path / "deadly.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    fixed = ["training.batch_size=16", "seeds=1", "model.name=deadly:network"]
    return lambda *widths: read_plan(tiny, overrides=[*fixed, f"factors.model.width={list(widths)}"])


@pytest.mark.slow
def test_local_processes_that_are_killed_cost_their_cell_only(deadly, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    folder = StudyFolder(tmp_path / "out")
    summary = run_study(deadly(2.0, 3.0), folder, LocalEngine(2), StudyProgress())
    survived, killed = folder.cells()
    assert summary.done == (survived.hash,)
    assert summary.failed == {killed.hash: KILLED}
    assert summary.retried == {survived.hash: [KILLED]}
    assert killed.failure()["attempts"] == 2
    said = capsys.readouterr().err
    assert f"{KILLED}; tried again\n" in said
    assert f"cell {killed.hash} failed: {KILLED}\n" in said
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
    processes = [worker.process.pid for worker in engine.tasks.values()]
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
    with pytest.raises(
        SpiritLevelError, match=r"resources of a cell are for engine 'ray'.*say --slurm cpus_per_task=2"
    ):
        make_engine("slurm", logs=tmp_path, resources={"num_cpus": 2})
    with pytest.raises(SpiritLevelError, match="settings of jobs are for engine 'slurm'; engine 'local' takes none"):
        make_engine("local", logs=tmp_path, slurm={"timeout_min": 1})


@pytest.mark.parametrize(("engine", "package"), [("ray", "ray"), ("slurm", "submitit")])
def test_what_is_not_installed_is_named(tmp_path, monkeypatch, engine, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(SpiritLevelError, match=rf'not installed: pip install "spiritlevel\[{engine}\]"'):
        make_engine(engine, logs=tmp_path)


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster of two nodes that asks for a token: its address, and a call that loses or adds the second node.

    The token is in the environment of all tests (tests/conftest.py).
    """
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets lie there, whose paths must be short
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("ray_nodes.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # Ray lets its workers give way to all else, here to the other tests.
        env={**os.environ, "RAY_TMPDIR": folder, "RAY_worker_niceness": "0"},
    )

    def tell(command: str) -> None:
        process.stdin.write(f"{command}\n")
        process.stdin.flush()
        assert process.stdout.readline().strip() == command

    address = process.stdout.readline().strip()
    assert address, "the nodes of Ray did not start, which is tried five times"
    yield types.SimpleNamespace(address=address, tell=tell)
    process.communicate()
    shutil.rmtree(folder, ignore_errors=True)


def assert_killed_once_and_the_same(plan, folder: StudyFolder, summary: Summary, said: str) -> None:
    """One cell was computed, the other after it was killed once; both are bit for bit what this process computes."""
    first, second = folder.cells()
    assert (summary.done, summary.failed) == ((first.hash, second.hash), {})
    assert attempts_at(second) == [KILLED]
    assert f"cell {second.hash}: {KILLED}; tried again\n" in said
    here = StudyFolder(folder.path.with_name("here"))
    prepare(plan, here)
    assert compute([here.cell(first.hash).cell]) == DONE
    assert first.checkpoint.read_bytes() == here.cell(first.hash).checkpoint.read_bytes()
    assert all(cell.log.exists() and cell.result()["environment"]["threads"] == "1" for cell in (first, second))
    assert not list(folder.path.glob("cells/*/running.json"))


@on_linux
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_ray_computes_the_same_and_tells_of_kills(cluster, deadly, tmp_path, capsys):
    plan, folder = deadly(1.0, 2.0), StudyFolder(tmp_path / "out")
    engine = make_engine("ray", logs=tmp_path / "jobs", address=cluster.address)
    assert engine.free == 2  # as many as both nodes have cores
    summary = run_study(plan, folder, engine, StudyProgress())
    captured = capsys.readouterr()
    assert_killed_once_and_the_same(plan, folder, summary, captured.err)
    assert captured.out == ""


@on_linux
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_lost_node_of_ray_costs_one_line(cluster, deadly, tmp_path, capsys):
    """The cells ask for what only the second node has, which is lost while one is at work; another one joins later."""
    told: list[str] = []
    engine = make_engine(
        "ray",
        logs=tmp_path / "jobs",
        address=cluster.address,
        resources=read_resources(["num_cpus=0.5,far=0.5"]),
        runtime_env=read_runtime_env('{"env_vars": {"COLOUR": "green"}}'),
        tell=told.append,
    )
    assert (engine.free, told) == (2, [])  # two halves
    sleeping = tmp_path / "tried-5.0"

    def lose_and_join() -> None:
        while not sleeping.exists():
            time.sleep(0.1)
        cluster.tell("lose")
        cluster.tell("join")

    watching = threading.Thread(target=lose_and_join, daemon=True)
    watching.start()
    folder = StudyFolder(tmp_path / "out")
    summary = run_study(deadly(5.0), folder, engine, StudyProgress())
    watching.join()
    [cell] = folder.cells()
    assert (summary.done, summary.retried) == ((cell.hash,), {cell.hash: ["node lost"]})
    assert sleeping.read_text() == "green"
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "0 of 1 cells done, 0 running, 0 failed",
        f"cell {cell.hash}: node lost; tried again",
        "1 of 1 cells done, 0 running, 0 failed",
    ]
    assert captured.out == ""
    assert "Raylet is terminated" in (tmp_path / "jobs/ray.txt").read_text()


@pytest.mark.long
@on_linux
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_that_asks_for_another_token_says_so_at_once(cluster, tmp_path, monkeypatch, capfd):
    from ray._raylet import AuthenticationTokenLoader

    monkeypatch.setenv("RAY_AUTH_TOKEN", "another one")
    AuthenticationTokenLoader.instance().reset_cache()
    joined: list[object] = []  # Ray's own way in tries for 20 seconds, and then says something else
    monkeypatch.setattr("ray.init", lambda *given, **named: joined.append(named))
    try:
        with pytest.raises(SpiritLevelError, match=r"asks for a token.*set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or"):
            make_engine("ray", logs=tmp_path, address=cluster.address)
    finally:
        monkeypatch.undo()
        AuthenticationTokenLoader.instance().reset_cache()
    assert joined == []
    assert capfd.readouterr() == ("", "")


@on_linux
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_too_busy_to_answer_is_asked_again_for_its_token(monkeypatch):
    from ray import _raylet, exceptions

    from spiritlevel.study.engines.ray import ASKED, _asks_for_another_token

    answers = [exceptions.RpcError("timed out"), exceptions.AuthenticationError("no such token")]
    left = iter([*answers, *answers[:1] * ASKED])

    def client(address: str) -> None:
        raise next(left)

    monkeypatch.setitem(vars(_raylet), "GcsClient", client)
    assert _asks_for_another_token("host:1")
    assert not _asks_for_another_token("host:1")  # what is wrong, joining will tell
    assert next(left, None) is None


@pytest.mark.long
@on_linux
@pytest.mark.filterwarnings("ignore")
def test_cells_that_fit_no_node_and_settings_that_ray_refuses_are_told(cluster, tmp_path):
    told: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    engine = make_engine("ray", logs=tmp_path, address=cluster.address, resources={"num_gpus": 1}, tell=told.append)
    assert signal.getsignal(signal.SIGTERM) is before  # Ray would take it, and keep it
    engine.stop()
    assert told == [
        "no node of the Ray cluster has what a cell asks for (num_cpus=1, num_gpus=1); waiting for one that has"
    ]
    with pytest.raises(SpiritLevelError, match="Ray refuses these settings"):
        make_engine("ray", logs=tmp_path, address=cluster.address, runtime_env={"working_dir": "no/such/folder"})


@on_linux
def test_where_no_cluster_answers_it_is_said_at_once(tmp_path):
    pytest.importorskip("ray")
    with pytest.raises(SpiritLevelError, match=r"no Ray cluster answers at 127.0.0.1:1: .*; `ray start --head`"):
        make_engine("ray", logs=tmp_path, address="127.0.0.1:1")


@on_unix
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_submitit_computes_the_same_and_tells_of_kills(deadly, tmp_path, capsys):
    plan, folder = deadly(1.0, 2.0), StudyFolder(tmp_path / "out")
    settings = {"timeout_min": 5, "cpus_per_task": 1}
    engine = make_engine("slurm", logs=tmp_path / "jobs", workers=2, slurm=settings)
    assert_killed_once_and_the_same(
        plan, folder, run_study(plan, folder, engine, StudyProgress()), capsys.readouterr().err
    )


@on_unix
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_jobs_that_see_a_url_only_compute_send_and_are_tried_again(deadly, tmp_path, capsys):
    """The driver's copy lies in a folder of its own, of which a job is told nothing; the job has the URL."""
    url = (tmp_path / "store").as_uri()
    engine = make_engine("slurm", logs=tmp_path / "jobs", workers=1)
    with study_at(url) as folder:
        summary = run_study(deadly(2.0), folder, engine, StudyProgress())
        copy = folder.path
    [cell] = summary.done
    assert f"cell {cell}: {KILLED}; tried again\n" in capsys.readouterr().err
    sent = {path.name for path in (tmp_path / "store/cells" / cell).iterdir()}
    assert sent == {"attempts.json", "cell.json", "curve.csv", "log.txt", "model.safetensors", "result.json",
                    "training.json"}  # fmt: skip
    assert not copy.exists()
    assert not any(str(copy).encode() in path.read_bytes() for path in (tmp_path / "jobs").iterdir())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        "local",
        pytest.param("ray", marks=[on_linux, pytest.mark.long]),
        pytest.param("slurm", marks=[on_unix, pytest.mark.long]),
    ],
)
def test_what_takes_too_long_is_told_in_the_same_words(name, tiny, tmp_path, request):
    further = {"address": request.getfixturevalue("cluster").address} if name == "ray" else {}
    engine = make_engine(name, logs=tmp_path / "jobs", workers=1, minutes=0.005, **further)
    plan = read_plan(tiny, overrides=["seeds=1", "training.batch_size=16"])
    summary = run_study(plan, StudyFolder(tmp_path / "out"), engine, StudyProgress(quiet=True))
    assert list(summary.failed.values()) == ["timed out after 0.005 min"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [pytest.param("ray", marks=on_linux), pytest.param("slurm", marks=on_unix)])
def test_a_node_that_does_not_see_the_folder_says_so(name, tmp_path, request):
    further = {"address": request.getfixturevalue("cluster").address} if name == "ray" else {}
    engine = make_engine(name, logs=tmp_path / "jobs", workers=1, **further)
    engine.submit(Task((tmp_path / "elsewhere/cell.json",)))
    while not (ended := engine.finished()):
        pass
    engine.stop()
    [(_, outcome)] = ended
    assert "elsewhere/cell.json: every node must see the folder of the study under the same path" in outcome.how


class Job:
    """A job that Slurm ended."""

    def __init__(self, state: str) -> None:
        self.state = state

    def exception(self) -> Exception:
        return RuntimeError("has not produced any output")

    def get_info(self) -> dict[str, str]:
        return {"NodeList": "node17"}


@on_unix
def test_slurm_ends_are_told_in_the_same_words(tmp_path):
    engine = make_engine("slurm", logs=tmp_path, slurm={"timeout_min": 90})
    ends = {
        "NODE_FAIL": "node lost (node17)",
        "TIMEOUT": "timed out after 90 min",
        "OUT_OF_MEMORY": "killed for want of memory (node17)",
        "CANCELLED by 1000": "cancelled (node17)",
        "PREEMPTED": "preempted (node17)",
        "FAILED": "killed by a signal (out of memory?)",
    }
    found = {state: engine._outcome(Job(state)) for state in ends}
    assert {state: outcome.how for state, outcome in found.items()} == ends
    assert [state for state, outcome in found.items() if outcome.lost] == ["NODE_FAIL", "PREEMPTED"]
    assert [state for state, outcome in found.items() if outcome.timed_out] == ["TIMEOUT"]


@on_unix
def test_submitit_refuses_settings_it_does_not_know(tmp_path):
    with pytest.raises(SpiritLevelError, match="submitit refuses these settings"):
        make_engine("slurm", logs=tmp_path, slurm={"partitoin": "short"})
    with pytest.raises(SpiritLevelError, match=r"submitit refuses these settings: .*timeout_min"):
        make_engine("slurm", logs=tmp_path, slurm={"timeout_min": 0.5})


@pytest.mark.parametrize("number", [6, 7, 9, 11, 15])
def test_signals_are_named_with_who_usually_sends_them(number):
    assert Outcome(-number).how.startswith(f"killed by signal {number} (")


@pytest.mark.parametrize("given", ["num_gpus", "num_gpus=many", "=1", "num_cpus=-1", "num_cpus=nan"])
def test_resources_without_amounts_are_refused(given):
    with pytest.raises(SpiritLevelError, match=r"--resources takes names with amounts, num_cpus=1,num_gpus=0.25, got"):
        read_resources([given])


def test_a_runtime_environment_is_read_from_files_too(tmp_path):
    (tmp_path / "env.toml").write_text('pip = ["einops"]')
    (tmp_path / "env.json").write_text('{"pip": ["einops"]}')
    (tmp_path / "list.json").write_text("[1]")
    for name in ("env.toml", "env.json"):
        assert read_runtime_env(str(tmp_path / name)) == {"pip": ["einops"]}
    for given, says in (
        (tmp_path / "none.json", "none.json: No such file"),
        ("{what", "is neither JSON nor TOML"),
        (tmp_path / "list.json", "takes an object, as ray.init"),
    ):
        with pytest.raises(SpiritLevelError, match=says):
            read_runtime_env(str(given))


def test_a_limit_on_threads_is_kept(monkeypatch) -> None:
    monkeypatch.setattr("spiritlevel.study.engines.local.available_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert (LocalEngine(2).threads, LocalEngine().threads) == (4, 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert (LocalEngine(2).threads, LocalEngine(4).threads) == (3, 2)


@pytest.mark.skipif(not LINUX, reason="a setting of Linux's C library")
def test_workers_keep_freed_memory_unless_told_otherwise(tmp_path, monkeypatch) -> None:
    """Ten times eight tensors of 4 MB: given back to the system each time, they cost 8,000 page faults each time."""
    seen = (
        "import resource, torch\n"
        "def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "def step(): kept = [torch.ones(1_000_000) for _ in range(8)]\n"
        "for _ in range(4): step()\n"
        "before = faults()\n"
        "for _ in range(10): step()\n"
        "print(faults() - before)\n"
    )

    def count(**further: str) -> int:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        done = subprocess.run([sys.executable, "-c", seen], env=environment | further, capture_output=True, check=True)
        return int(done.stdout)

    assert count(**launch.KEPT_MEMORY) < 8_000
    assert count(MALLOC_MMAP_THRESHOLD_="131072") > 60_000
    given: list[str] = []
    monkeypatch.setattr(launch.subprocess, "Popen", lambda *_, env, **__: given.append(env["MALLOC_MMAP_THRESHOLD_"]))
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "77")
    launch.Worker([str(tmp_path / "cell.json")], 1)
    assert given == ["77"]
