"""Jobs of a Slurm cluster through submitit; where there is no Slurm, submitit's own processes on this machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.engines.engine import Outcome, Slots, Task
from spiritlevel.study.worker import CRASHED, compute_with

# Slurm is asked about all jobs at once and seldom; looking at their files costs nothing.
LOOK_AGAIN = 1.0
# Jobs in the queue at the same time unless --workers says otherwise.
MOST_JOBS = 200
DEFAULTS = {"timeout_min": 24 * 60, "cpus_per_task": 1}


class SlurmEngine(Slots):
    """One job for each task; the cluster must see the study's folder under the same path."""

    def __init__(self, workers: int | None, logs: Path, settings: Mapping[str, Any]) -> None:
        try:
            import submitit
        except ImportError:
            raise SpiritLevelError(
                "engine 'slurm' needs submitit, which is not installed: pip install \"spiritlevel[slurm]\""
            ) from None
        self.executor: Any = submitit.AutoExecutor(folder=logs)
        asked = {**DEFAULTS, **settings}
        self.threads = int(asked["cpus_per_task"])
        try:
            self.executor.update_parameters(name="spiritlevel", **asked)
        except (NameError, TypeError, ValueError) as error:
            raise SpiritLevelError(f"submitit refuses these settings: {error}") from None
        super().__init__(workers or MOST_JOBS)

    def submit(self, task: Task) -> None:
        """Queue a job."""
        self.tasks[task] = self.executor.submit(
            compute_with, self.threads, [str(path.absolute()) for path in task.cells]
        )

    def finished(self) -> list[tuple[Task, Outcome]]:
        """Tasks whose job ended."""
        ended = [task for task, job in self.tasks.items() if job.done()]
        if not ended:
            time.sleep(LOOK_AGAIN)
        return [(task, self._outcome(self.tasks.pop(task))) for task in ended]

    @staticmethod
    def _outcome(job: Any) -> Outcome:
        error = job.exception()
        return Outcome(job.result()) if error is None else Outcome(CRASHED, str(error))

    def stop(self) -> None:
        """Cancel all jobs."""
        for job in self.tasks.values():
            job.cancel()
        self.tasks.clear()
