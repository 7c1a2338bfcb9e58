"""Processes of this machine: one a task, the cores divided among them."""

from __future__ import annotations

import os
import time

from spiritlevel.study.engines.endings import Outcome, timed_out
from spiritlevel.study.engines.engine import Slots, Task
from spiritlevel.study.engines.launch import Worker

LOOK_AGAIN = 0.05


def available_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads_allowed() -> int:
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdigit() and int(told) > 0 else available_cores()


class LocalEngine(Slots):
    """As many processes as `workers`, by default one a core; each has its share of the cores as threads.

    `OMP_NUM_THREADS` of this process is a limit: other work may need the remaining cores.
    """

    def __init__(self, workers: int | None = None, seconds: float | None = None) -> None:
        super().__init__(workers or available_cores(), seconds)
        self.threads = max(1, min(available_cores() // self.most, _threads_allowed()))
        self.tasks: dict[Task, Worker] = {}
        self.started: dict[Task, float] = {}

    def submit(self, task: Task) -> None:
        """Start a process."""
        self.tasks[task] = Worker(task.paths, self.threads)
        self.started[task] = time.monotonic()

    def finished(self) -> list[tuple[Task, Outcome]]:
        """Tasks whose process ended."""
        ended = [(task, outcome) for task in self.tasks if (outcome := self._outcome(task)) is not None]
        for task, _ in ended:
            self._forget(task)
        if not ended:
            time.sleep(LOOK_AGAIN)
        return ended

    def _outcome(self, task: Task) -> Outcome | None:
        worker = self.tasks[task]
        code = worker.process.poll()
        if code is not None:
            return Outcome(code, worker.last_words())
        if self.seconds is not None and time.monotonic() - self.started[task] > self.seconds:
            worker.process.kill()
            return timed_out(self.seconds, worker.last_words())
        return None

    def stop(self) -> None:
        """End all processes; what they had not finished is not in their folders."""
        for worker in self.tasks.values():
            worker.process.kill()
        for task in list(self.tasks):
            self._forget(task)

    def _forget(self, task: Task) -> None:
        self.tasks.pop(task).end()
        self.started.pop(task)
