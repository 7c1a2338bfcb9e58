"""This library beside an earlier revision of itself, in costs of one gradient: has a change made anything dearer?

    python -m benchmarks.revisions REVISION --subjects mlp-1,conv-1 [--tasks sweep,lambda_1e-4] [--data-folder FOLDER]

Both measure the same networks with the same weights, task by task in turns, so that a disturbance hits both; each cost stands
beside its own gradient. What is found is added to `results/revisions.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.clock import median
from benchmarks.modules import in_modules
from benchmarks.run import Settings, prepared, write_results
from benchmarks.subjects import load, named, origin
from benchmarks.tasks import TASKS, Task
from spiritlevel.measuring.registry import resolve_measures

CLONE = Path(__file__).parents[1]
ASKED = ("sweep", "lambda_1e-4", "layer_lambda", "operators", "everything")


class Revision:
    """A process with one revision of the library, and which measures it has."""

    def __init__(self, source: Path, subject: Path) -> None:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.revision_worker", str(subject)],
            env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join([str(source), str(CLONE)])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.measures: list[str] = self._answer()["measures"]

    def ask(self, task: Task, measures: Sequence[str], *, warm_up: bool = False) -> dict[str, Any]:
        """One call: what it cost and the value of its first measure."""
        job = {"measures": measures, "tolerance": task.accuracy, "unit_seconds": 0.3, "warm_up": warm_up}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        """Let the process end."""
        with self._process:  # closes both of its ends
            pass

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process of the comparison has ended; its message is above")
        found: dict[str, Any] = json.loads(line)
        return found


@contextlib.contextmanager
def sources(revision: str) -> Iterator[Path]:
    """The package as it was at this revision, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", revision, "src"], cwd=CLONE, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder) / "src"


def compared(subject: Path, before: Path, tasks: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Every task, `rounds` times in turns: costs before and now."""
    loaded = load(subject)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "subject.pt"
        content = {"model": in_modules(loaded.model), "x": loaded.x, "y": loaded.y, "batch": loaded.recipe.batch}
        torch.save(content, path)
        both = {"before": Revision(before, path), "now": Revision(CLONE / "src", path)}
        common = set(both["before"].measures) & set(both["now"].measures)
        for name in tasks:
            wanted = TASKS[name].measures or tuple(each.name for each in resolve_measures(None))
            measures = [each for each in wanted if each in common]
            for each in both.values():
                each.ask(TASKS[name], measures, warm_up=True)
            found: dict[str, list[dict[str, Any]]] = {key: [] for key in both}
            for number in range(rounds):
                for key in list(both)[:: 1 if number % 2 == 0 else -1]:
                    found[key].append(both[key].ask(TASKS[name], measures))
            yield _summary(name, found)
        for each in both.values():
            each.end()


def _summary(task: str, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    costs = {key: [float(f"{answer['cost']:.4g}") for answer in answers] for key, answers in found.items()}
    ratios = [now / before for now, before in zip(costs["now"], costs["before"], strict=True)]
    old, new = (found[key][-1]["value"] for key in ("before", "now"))
    return {"task": task, **costs, "ratio": float(f"{median(ratios):.4g}"), "apart": abs(new - old) / abs(old)}


def main(arguments: list[str]) -> None:
    """Compare, and say each result as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="a commit of this repository")
    parser.add_argument("--subjects", required=True, help="networks, each with its train loss if it is trained to one")
    parser.add_argument("--tasks", default=",".join(ASKED))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=CLONE / "benchmarks")
    parser.add_argument("--data-folder", type=Path)
    given = parser.parse_args(arguments)
    settings = Settings(given.folder, data_folder=given.data_folder)
    path = settings.results / "revisions.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    with sources(given.revision) as before:
        for key in given.subjects.split(","):
            subject, _ = prepared(settings, Path(sys.executable), named(key), ())
            about = {
                "revision": given.revision,
                "subject": named(key).name,
                "level": named(key).level,
                **origin(subject),
            }
            for each in compared(subject, before, given.tasks.split(","), given.rounds):
                record = {**about, **each}
                same = ("revision", "subject", "level", "task")
                found = [old for old in found if any(old[part] != record[part] for part in same)]
                found.append(record)
                write_results(path, found)
                print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
