"""`spiritlevel study` from outside."""

import json
import re
import tomllib
from html import unescape
from pathlib import Path

import pytest

from spiritlevel.study import engines
from spiritlevel.study.engines.endings import Outcome
from spiritlevel.study.engines.engine import Task
from spiritlevel.study.plan import list_studies, read_plan
from spiritlevel.study.worker import compute
from tiny_study import TINY


class Here:
    """An engine that computes in this process, for speed."""

    crash: Outcome | None = None

    def __init__(self, workers: int | None = None, _seconds: float | None = None) -> None:
        self.workers, self.tasks = workers, list[Task]()

    @property
    def free(self) -> int:
        return 1 - len(self.tasks)

    @property
    def running(self) -> int:
        return len(self.tasks)

    def submit(self, task: Task) -> None:
        self.tasks.append(task)

    def finished(self) -> list[tuple[Task, Outcome]]:
        return [(task, self.crash or Outcome(compute(task.cells))) for task in [self.tasks.pop()]]

    def stop(self) -> None:
        self.tasks.clear()


@pytest.fixture
def run(run, monkeypatch):
    """Run `spiritlevel study …`; gives (exit code, standard output, standard error)."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("spiritlevel.study.engines.local.LocalEngine", Here)
    return lambda *arguments: run("study", *arguments)


@pytest.fixture
def study(tmp_path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def test_list_names_every_built_in_study_with_its_sizes(run):
    code, out, _ = run("list")
    assert code == 0
    for name, title in list_studies().items():
        [line] = [line for line in out.splitlines() if line.startswith(f"{name} ")]
        assert title in line
        full, quick = (len(read_plan(name, quick=quick).cells) for quick in (False, True))
        assert re.search(rf"\b{full}\s+{quick}\s*$", line)


def test_show_prints_the_file_as_it_can_be_run(run, tmp_path):
    code, out, _ = run("show", "petzka-mnist")
    assert code == 0
    copy = tmp_path / "mine.toml"
    copy.write_text(out)
    assert tomllib.loads(out)["model"]["name"] == "petzka-fc"
    assert read_plan(str(copy)).cells == read_plan("petzka-mnist").cells


def test_run_computes_and_reports_and_goes_on(run, study, tmp_path):
    out_folder = tmp_path / "out"
    code, _, err = run("run", study, "--folder", out_folder, "--set", "training.epochs=3")
    assert code == 0, err
    assert "4 of 4 cells done, 0 running, 0 failed" in err
    assert f"wrote {out_folder / 'report.html'}" in err
    results = (out_folder / "results.csv").read_text().splitlines()
    assert len(results) == 1 + 4
    assert "<html" in (out_folder / "report.html").read_text()
    assert json.loads((out_folder / "study.json").read_text())["config"]["training"]["epochs"] == 3
    code, out, _ = run("status", out_folder)
    assert (code, out) == (0, "4 of 4 cells done, 0 running, 0 waiting, 0 failed\n")
    code, _, err = run("run", study, "--folder", out_folder, "--set", "training.epochs=3")
    assert "4 of 4 cells done, 0 running, 0 failed" in err
    (out_folder / "report.html").unlink()
    code, _, _ = run("report", out_folder)
    assert code == 0
    assert (out_folder / "report.html").is_file()


def test_a_quick_run_says_so_and_names_its_data(run, study, tmp_path):
    study.write_text(
        TINY.replace("tiny", "tiny on MNIST") + '[quick]\nseeds = 1\n[quick.data]\nname = "random:50,6,3,1"\n'
    )
    code, _, err = run("run", study, "--quick", "--folder", tmp_path / "out")
    assert code == 0, err
    title = "quick version, trained on random:50,6,3,1, of “tiny on MNIST”"
    assert err.splitlines()[0] == f"tiny: {title}; 2 networks"
    assert f"<h1>Study tiny: {title}</h1>" in unescape((tmp_path / "out" / "report.html").read_text())


def test_status_names_what_is_excluded_and_what_failed(run, study, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    rule = ("--set", "training.stop={train_accuracy=1.0}", "--set", "seeds=1", "--quiet")
    assert run("run", study, "--folder", folder, *rule)[0] == 0
    _, out, _ = run("status", folder)
    assert out.splitlines()[0] == "2 of 2 cells done, 0 running, 0 waiting, 0 failed"
    assert out.splitlines()[1].startswith("2 excluded, short of what the study requires: ")
    monkeypatch.setattr(Here, "crash", Outcome(-11, "segmentation fault"))
    code, out, _ = run("run", study, "--folder", folder, "--set", "seeds=[5]", "--quiet")
    assert code == 1
    assert "2 of 2 cells failed; see `spiritlevel study status" in out
    _, out, _ = run("status", folder)
    assert out.splitlines()[0] == "0 of 2 cells done, 0 running, 0 waiting, 2 failed"
    assert out.count("failed: killed by signal 11 (segmentation fault)") == 2
    _, out, _ = run("status", folder, "--json")
    assert list(json.loads(out)["failed"].values()) == ["killed by signal 11 (segmentation fault)"] * 2


def test_the_number_of_workers_reaches_the_engine(run, study, tmp_path, monkeypatch):
    asked = []
    make = engines.make_engine
    monkeypatch.setattr(engines, "make_engine", lambda *a, **k: asked.append((a, k)) or make(*a, **k))
    assert run("run", study, "--folder", tmp_path / "out", "--workers", 3, "--set", "seeds=1", "--quiet")[0] == 0
    assert asked[0][0] == ("local",)
    assert asked[0][1]["workers"] == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "petzka-mnits", "--folder", "out"], "no built-in study 'petzka-mnits'; did you mean 'petzka-mnist'?"),
        (["run", "petzka-mnist", "--folder", "out"], "mnist is read from a folder: say which, by --data-folder"),
        (["run", "petzka-mnist", "--quick", "--folder", "out", "--engine", "rya"], "did you mean 'ray'?"),
        (["run", "petzka-mnist", "--quick", "--folder", "out", "--set", "epochs=1"], "--set epochs=1: epochs: unknown key"),
        (["run", "petzka-mnist", "--quick", "--folder", "out", "--slurm", "timeout_min"], "--slurm takes key=value"),
        (["status", "nowhere"], "nowhere holds no study"),
        (["report", "nowhere"], "nowhere"),
    ],
)  # fmt: skip
def test_wrong_use_is_a_sentence(run, arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*arguments)
    assert code == 2
    assert says in " ".join(err.split())


def test_the_toml_in_the_documentation_is_a_study(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "studies.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert blocks
    path = tmp_path / "block.toml"
    path.write_text(blocks[0])
    assert len(read_plan(str(path)).cells) == 24
    assert len(read_plan(str(path), quick=True).cells) == 4
    for name, title in list_studies().items():
        full, quick = (len(read_plan(name, quick=quick).cells) for quick in (False, True))
        assert f"| `{name}` | {title} | {full} | {quick} |" in page
