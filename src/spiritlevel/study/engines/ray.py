"""Tasks of Ray Core: a cluster started here for the time of the run, or one that is joined by its address."""

from __future__ import annotations

import logging
import time
from typing import Any

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.engines.engine import Outcome, Slots, Task
from spiritlevel.study.worker import CRASHED, compute_with

WAIT = 0.2


class RayEngine(Slots):
    """One Ray task of one core for each task; every node must see the study's folder under the same path."""

    def __init__(self, workers: int | None = None, address: str | None = None) -> None:
        try:
            import ray
        except ImportError:
            raise SpiritLevelError(
                "engine 'ray' needs Ray, which is not installed: pip install \"spiritlevel[ray]\""
            ) from None
        self.ray: Any = ray
        try:
            # A cluster that is joined has its own size; `workers` then bounds what is submitted at once.
            ray.init(
                address=address,
                num_cpus=workers if address is None else None,
                include_dashboard=None if address is not None else False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except ConnectionError as error:
            raise SpiritLevelError(f"no Ray cluster answers at {address}: {error}") from None
        super().__init__(workers or 0)  # 0: as many as the cluster has cores
        # A process that died is the study's business, which tries again once. A new process for each task: a cell then
        # has the memory and the threads it would have alone.
        self._compute = ray.remote(num_cpus=1, max_retries=0, max_calls=1)(compute_with)

    @property
    def free(self) -> int:
        return (self.most or max(1, int(self.ray.cluster_resources().get("CPU", 1)))) - self.running

    def submit(self, task: Task) -> None:
        """Hand a task to the cluster."""
        self.tasks[self._compute.remote(1, [str(path.absolute()) for path in task.cells])] = task

    def finished(self) -> list[tuple[Task, Outcome]]:
        """Tasks that returned or whose process died."""
        if not self.tasks:
            time.sleep(WAIT)
            return []
        ready, _ = self.ray.wait(list(self.tasks), num_returns=1, timeout=WAIT)
        return [(self.tasks.pop(reference), self._outcome(reference)) for reference in ready]

    def _outcome(self, reference: Any) -> Outcome:
        try:
            return Outcome(self.ray.get(reference))
        except self.ray.exceptions.RayError as error:
            return Outcome(CRASHED, str(error))

    def stop(self) -> None:
        """Cancel all tasks and leave the cluster, or end it if it was started here."""
        for reference in self.tasks:
            self.ray.cancel(reference, force=True)
        self.tasks.clear()
        self.ray.shutdown()
