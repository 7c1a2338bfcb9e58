"""Tasks of Ray Core: a cluster started here for the time of the run, or one that is joined by its address."""

from __future__ import annotations

from typing import Any

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.engines import Outcome, Task
from spiritlevel.study.worker import CRASHED, compute

WAIT = 0.2


class RayEngine:
    """One Ray task of one core for each task; the cluster must see the study's folder under the same path."""

    def __init__(self, workers: int | None = None, address: str | None = None) -> None:
        try:
            import ray
        except ImportError:
            raise SpiritLevelError(
                "engine 'ray' needs Ray, which is not installed: pip install \"spiritlevel[ray]\""
            ) from None
        self.ray: Any = ray
        # The cluster's size is the cluster's business: a number of workers bounds what is submitted at once.
        started_here = None if address is None else address
        cores = workers if address is None else None
        ray.init(
            address=started_here, num_cpus=cores, include_dashboard=False, log_to_driver=False, configure_logging=False
        )
        self.most = workers
        settings = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # A process that died is the study's business, which tries again once: Ray must not.
        options = ray.remote(num_cpus=1, max_retries=0, max_calls=1, runtime_env={"env_vars": settings})
        self._compute = options(compute)
        self._tasks: dict[Any, Task] = {}

    @property
    def free(self) -> int:
        """How many more tasks it takes now."""
        most = self.most or max(1, int(self.ray.cluster_resources().get("CPU", 1)))
        return most - len(self._tasks)

    @property
    def running(self) -> int:
        """How many tasks it has."""
        return len(self._tasks)

    def submit(self, task: Task) -> None:
        """Hand a task to the cluster."""
        self._tasks[self._compute.remote([str(path.absolute()) for path in task.cells])] = task

    def finished(self) -> list[tuple[Task, Outcome]]:
        """Tasks that returned or whose process died."""
        ready, _ = self.ray.wait(list(self._tasks), num_returns=1, timeout=WAIT) if self._tasks else ([], [])
        return [(self._tasks.pop(reference), self._outcome(reference)) for reference in ready]

    def _outcome(self, reference: Any) -> Outcome:
        try:
            return Outcome(self.ray.get(reference))
        except self.ray.exceptions.RayError as error:
            return Outcome(CRASHED, str(error))

    def stop(self) -> None:
        """Cancel all tasks and leave the cluster, or end it if it was started here."""
        for reference in self._tasks:
            self.ray.cancel(reference, force=True)
        self._tasks.clear()
        self.ray.shutdown()
