"""Jobs of a Slurm cluster through submitit; where there is no Slurm, submitit's own processes on this machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.engines import launch
from spiritlevel.study.engines.endings import (
    CANCELLED,
    NO_MEMORY,
    NODE_LOST,
    PREEMPTED,
    VANISHED,
    Outcome,
    outcome_of,
    taken,
    timed_out,
)
from spiritlevel.study.engines.engine import Slots, Task

# Slurm is asked about all jobs at once and seldom; looking at their files costs nothing.
LOOK_AGAIN = 1.0
# Jobs in the queue at the same time unless --workers says otherwise.
MOST_JOBS = 200
DEFAULTS = {"timeout_min": 24 * 60, "cpus_per_task": 1}
# What Slurm calls the ends of jobs that did not end by themselves.
_STATES = {"NODE_FAIL": NODE_LOST, "BOOT_FAIL": NODE_LOST, "OUT_OF_MEMORY": NO_MEMORY, "PREEMPTED": PREEMPTED,
           "REVOKED": CANCELLED, "CANCELLED": CANCELLED}  # fmt: skip


class SlurmEngine(Slots):
    """One job for each task; the cluster must see the study's folder or URL, and `logs`."""

    def __init__(
        self, workers: int | None, logs: Path, settings: Mapping[str, Any], seconds: float | None = None
    ) -> None:
        try:
            import cloudpickle
            import submitit
        except ImportError:
            raise SpiritLevelError(
                "engine 'slurm' needs submitit, which is not installed: pip install \"spiritlevel[slurm]\""
            ) from None
        cloudpickle.register_pickle_by_value(launch)
        self.executor: Any = submitit.AutoExecutor(folder=logs)
        asked = {**DEFAULTS, **settings}
        self.threads, self.limit = int(asked["cpus_per_task"]), 60 * float(asked["timeout_min"])
        try:
            self.executor.update_parameters(name="spiritlevel", **asked)
        except (AssertionError, NameError, TypeError, ValueError) as error:
            raise SpiritLevelError(f"submitit refuses these settings: {error}") from None
        super().__init__(workers or MOST_JOBS, seconds)

    def submit(self, task: Task) -> None:
        """Queue a job."""
        self.tasks[task] = self.executor.submit(launch.launch_job, task.paths, self.threads, self.seconds)

    def finished(self) -> list[tuple[Task, Outcome]]:
        """Tasks whose job ended."""
        ended = [task for task, job in self.tasks.items() if job.done()]
        if not ended:
            time.sleep(LOOK_AGAIN)
        return [(task, self._outcome(self.tasks.pop(task))) for task in ended]

    def _outcome(self, job: Any) -> Outcome:
        error = job.exception()
        if error is None:
            return outcome_of(self.seconds or self.limit, *job.result())
        state = str(job.state).partition(" ")[0]  # "CANCELLED by 1000"
        if state in ("TIMEOUT", "DEADLINE"):
            return timed_out(self.limit, str(error))
        if state in _STATES:
            return taken(_STATES[state], str(error), job.get_info().get("NodeList", ""))
        return taken(VANISHED, str(error))

    def stop(self) -> None:
        """Cancel all jobs."""
        for job in self.tasks.values():
            job.cancel()
        self.tasks.clear()
