"""Where the processor's time of one call goes, in gradients: `python -m benchmarks.phases SUBJECT.pt [TASK …]`.

A subject is a file that a run of the benchmark left in its `.cache`. Every phase counts what its functions take without the
phases inside them, so that the column adds up.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.clock import median, unit_times
from benchmarks.ours import answer
from benchmarks.subjects import Subject, load
from benchmarks.tasks import TASKS, Task

# Where a phase begins: the function as its caller finds it.
PHASES = {
    "spiritlevel.problem.problem.Problem.__init__": "problem and checks of the model",
    "spiritlevel.problem.problem.survey": "survey",
    "spiritlevel.problem.problem.Problem.check_derivatives": "check of the gradient",
    "spiritlevel.measuring.evidence.examine": "look at the layers",
    "spiritlevel.curvature.hessian.choose_method": "check of H·v",
    "spiritlevel.measuring.evidence.sweep_within": "sweep",
    "spiritlevel.measuring.evidence.array_shifts": "rounding of the sweep",
    "spiritlevel.measuring.evidence.rounding_errors": "rounding of eigenvalues",
    "spiritlevel.measuring.evidence.scaled_eigenpairs": "Krylov vectors",
    "spiritlevel.measuring.evidence.block_eigenpairs": "Krylov vectors of layers",
    "spiritlevel.curvature.hessian.HessianProducts.has_part": "graphs",
    "spiritlevel.curvature.hessian.HessianProducts.on_part": "H·v on the part",
    "spiritlevel.curvature.hessian.HessianProducts.on_wider_part": "H·v on the wider part",
    "spiritlevel.curvature.hessian.HessianProducts.__call__": "H·v on all data",
    "spiritlevel.curvature.hessian.HessianProducts.step_errors": "steps of differences",
    "spiritlevel.curvature.blocks.GaussNewtonBlocks.has_part": "layers: δ",
    "spiritlevel.curvature.blocks.GaussNewtonBlocks.on_part": "layers: products on the part",
    "spiritlevel.curvature.blocks.GaussNewtonBlocks.on_wider_part": "layers: products on the wider part",
    "spiritlevel.curvature.blocks.GaussNewtonBlocks.__call__": "layers: products on all data",
    "spiritlevel.curvature.blocks.GaussNewtonBlocks.left_out": "layers: what is left out",
}
REST = "readings and the rest"


class Phases:
    """Seconds and calls of every phase, each without the phases inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {REST: 0.0}
        self.calls: dict[str, int] = {}
        self._inside = [REST]
        self._since = time.process_time()

    def _turn(self) -> None:
        now = time.process_time()
        phase = self._inside[-1]
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """What is done inside belongs to this phase."""
        self._turn()
        self._inside.append(phase)
        self.calls[phase] = self.calls.get(phase, 0) + 1
        try:
            yield
        finally:
            self._turn()
            self._inside.pop()

    def stop(self) -> None:
        self._turn()

    def watched(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self.of(phase):
                return function(*args, **kwargs)

        return inside


def phases_of(subject: Subject, task: Task) -> Phases:
    """One call of `measure`, watched."""
    found = Phases()
    patches = [mock.patch(where, found.watched(_resolved(where), phase)) for where, phase in PHASES.items()]
    for patch in patches:
        patch.start()
    try:
        answer(subject, task)
        found.stop()
    finally:
        for patch in patches:
            patch.stop()
    return found


def _resolved(where: str) -> Callable[..., Any]:
    import pkgutil

    found: Callable[..., Any] = pkgutil.resolve_name(where)
    return found


def lines(subject: Subject, task: Task) -> list[str]:
    """The table of one task, in gradients timed before and after it."""
    before = unit_times(subject.gradient, 0.5)
    found = phases_of(subject, task)
    unit = median([*before, *unit_times(subject.gradient, 0.5)])
    rows = sorted(found.seconds.items(), key=lambda row: -row[1])
    total = sum(found.seconds.values()) / unit
    shown = [f"{seconds / unit:8.2f}  {found.calls.get(phase, 1):4d}×  {phase}" for phase, seconds in rows]
    return [f"{task.title}: {total:.2f} gradients", *shown]


def main(arguments: list[str]) -> None:
    """Tables of the tasks that are named, or of the four that targets are set for."""
    torch.set_num_threads(1)
    subject = load(Path(arguments[0]))
    names = arguments[1:] or ["sweep", "lambda_1e-4", "operators", "everything"]
    for name in names:
        few = Subject(subject.recipe, subject.model, subject.x[:200], subject.y[:200])
        answer(few, TASKS[name])
        print("\n".join([*lines(subject, TASKS[name]), ""]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
