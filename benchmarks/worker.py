"""One process: one library, one subject, some tasks, one thread. `python -m benchmarks.worker job.json`."""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import ours, peers, reference
from benchmarks.clock import Budget, Limit, limited, median, unit_times
from benchmarks.subjects import Recipe, Subject, load, prepare
from benchmarks.tasks import TASKS, Answer, Arrays, Task, distance
from spiritlevel.measuring.run import measure
from spiritlevel.problem.problem import Problem

OURS = "spiritlevel"


def main(job_path: str) -> None:
    """Do what the file says and write the results beside it."""
    torch.set_num_threads(1)
    path = Path(job_path)
    job = json.loads(path.read_text(encoding="utf-8"))
    result = JOBS[job["kind"]](job)
    path.with_suffix(".out").write_text(json.dumps(result, ensure_ascii=False), encoding="utf-8")


def _prepare(job: dict[str, Any]) -> list[Any]:
    folder, checkpoint = job["data_folder"], job["checkpoint"]
    recipe = Recipe(**{**job["recipe"], "shape": tuple(job["recipe"]["shape"])})
    prepare(recipe, Path(job["subject"]), folder and Path(folder), checkpoint and Path(checkpoint))
    if job["reference"]:
        wanted = {TASKS[name].answer for name in job["tasks"]}
        reference.write(Path(job["subject"]), Path(job["reference"]), wanted)
    return []


def _measure(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Every task once, each between two timings of the gradient."""
    torch.manual_seed(job["seed"])
    subject = load(Path(job["subject"]))
    truth = reference.read(Path(job["reference"]))[0] if job["reference"] else {}
    try:
        _warm_up(job["library"], subject, TASKS[job["tasks"][0]])
    except Exception as error:
        return [_failure(job, name, error) for name in job["tasks"]]
    return [_one(job, subject, TASKS[name], truth) for name in job["tasks"]]


def _warm_up(library: str, subject: Subject, task: Task) -> None:
    """The first task on one batch: what a process does once, such as imports and conversions, is nobody's cost."""
    batch = subject.recipe.batch
    subject.gradient()
    if library == "BackPACK":
        peers.extended(subject)
    else:
        few = Subject(subject.recipe, subject.model, subject.x[:batch], subject.y[:batch])
        _asker(library, task)(few, task, Budget(0.0))


def _one(job: dict[str, Any], subject: Subject, task: Task, truth: dict[str, Arrays]) -> dict[str, Any]:
    gc.collect()
    before = unit_times(subject.gradient, job["unit_seconds"])
    seconds = min(job["seconds"], job["gradients"] * median(before))
    budget = Budget(seconds)
    record: dict[str, Any] = {"library": job["library"], "task": task.name}
    limit = Limit()
    try:
        with limited(max(seconds * 1.5, job["seconds"]), limit):
            answer = _asker(job["library"], task)(subject, task, budget)
            spent = budget.spent()
    except Exception as error:
        if limit.reached:
            return {**record, "status": "over budget", "cost": budget.at_least() / median(before)}
        return _failure(job, task.name, error)
    unit = median([*before, *unit_times(subject.gradient, job["unit_seconds"])])
    off = distance(task, answer.arrays, truth[task.answer]) if task.answer in truth else None
    return {
        **record,
        "status": "measured",
        "asked": answer.asked,
        "seconds": spent,
        "unit": unit,
        "cost": spent / unit,
        "error": off,
        "standard_error": _finite(answer.standard_error),
        "rate": answer.rate,
        "counts": {key: value for key, value in answer.counts.items() if isinstance(value, int | float)},
    }


def _asker(library: str, task: Task) -> Callable[[Subject, Task, Budget], Answer]:
    if library == OURS:
        return lambda subject, task, _budget: ours.answer(subject, task)
    return peers.ASK[library][task.name]


def _failure(job: dict[str, Any], task: str, error: Exception) -> dict[str, Any]:
    said = str(error).strip().splitlines() or [type(error).__name__]
    return {"library": job["library"], "task": task, "status": "failed", "reason": f"{type(error).__name__}: {said[0]}"}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# --- memory -----------------------------------------------------------------------------------------------------------


def _memory(job: dict[str, Any]) -> list[dict[str, Any]]:
    """How far one call raises the peak of the process, and what it has to hold at least."""
    subject = load(Path(job["subject"]))
    few = Subject(subject.recipe, subject.model, subject.x[: subject.recipe.batch], subject.y[: subject.recipe.batch])
    few.gradient()
    task = TASKS[job["tasks"][0]]
    names = None if task.measures is None else list(task.measures)
    measure(subject.model, (subject.x[:8], subject.y[:8]), measures=names, tolerance=task.accuracy)  # loads code
    before = memory_now()
    report = measure(subject.model, (subject.x, subject.y), measures=names, tolerance=task.accuracy)
    grown = memory_peak() - before
    problem = Problem(subject.model, "cross_entropy", (subject.x, subject.y))
    products = [value.products for value in report.values.values()]
    size = 4 * subject.parameters
    return [
        {
            "task": task.name,
            "samples": len(subject.x),
            "peak": grown,
            "parameters": size,
            "chunk": _chunk_bytes(problem),
            "krylov": size * sum(products),
        }
    ]


def _chunk_bytes(problem: Problem) -> int:
    chunk, _ = next(iter(problem.chunks()))
    with problem.undisturbed():
        return problem.bytes_kept(lambda: problem.chunk_loss(problem.leaves(), chunk))


def memory_now() -> int:
    """Bytes this process holds; the peak counts from here. Linux only, because ru_maxrss knows the parent's peak too.

    What was freed is given back first: a call that runs in the memory of the warm-up would seem to take none.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def memory_peak() -> int:
    """The most bytes this process held since `memory_now`."""
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


JOBS: dict[str, Callable[[dict[str, Any]], list[Any]]] = {"prepare": _prepare, "measure": _measure, "memory": _memory}

if __name__ == "__main__":
    assert os.environ.get("OMP_NUM_THREADS") == "1", "the benchmark runs with one thread: set OMP_NUM_THREADS=1"
    main(sys.argv[1])
