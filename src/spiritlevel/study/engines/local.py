"""Processes of this machine: one a task, the cores divided among them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from spiritlevel.study.engines.engine import Outcome, Slots, Task
from spiritlevel.study.store import CellFolder
from spiritlevel.study.worker import UNTIL_STDIN_CLOSES

THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
LOOK_AGAIN = 0.05
LAST_WORDS = 2000


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

    def __init__(self, workers: int | None = None) -> None:
        super().__init__(workers or available_cores())
        self.threads = max(1, min(available_cores() // self.most, _threads_allowed()))
        self.tasks: dict[Task, subprocess.Popen[bytes]] = {}

    def submit(self, task: Task) -> None:
        """Start a process; it ends with this one, because it notices when its standard input closes."""
        command = [sys.executable, "-m", "spiritlevel.study.worker", UNTIL_STDIN_CLOSES, *map(str, task.cells)]
        threads = {name: str(self.threads) for name in THREAD_SETTINGS}
        with CellFolder(task.cells[0].parent).log.open("ab") as log:
            self.tasks[task] = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **threads},
                start_new_session=True,  # an interruption reaches this process alone, which then ends the others
            )

    def finished(self) -> list[tuple[Task, Outcome]]:
        """Tasks whose process ended."""
        ended = {task: code for task, process in self.tasks.items() if (code := process.poll()) is not None}
        for task in ended:
            self._forget(task)
        if not ended:
            time.sleep(LOOK_AGAIN)
        return [(task, Outcome(code, last_words(task))) for task, code in ended.items()]

    def stop(self) -> None:
        """End all processes; what they had not finished is not in their folders."""
        for process in self.tasks.values():
            process.kill()
        for task, process in list(self.tasks.items()):
            process.wait()
            self._forget(task)

    def _forget(self, task: Task) -> None:
        process = self.tasks.pop(task)
        if process.stdin is not None:
            process.stdin.close()


def last_words(task: Task) -> str:
    """The end of what the task's process said."""
    try:
        with CellFolder(task.cells[0].parent).log.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - LAST_WORDS))
            return log.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
