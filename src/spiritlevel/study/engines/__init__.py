"""Where cells are computed: processes of this machine, tasks of a Ray cluster, jobs of a Slurm cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.data import suggest

ENGINES = ("local", "ray", "slurm")


@dataclass(frozen=True)
class Task:
    """Cells for one worker: the files that describe them, and how often this was tried before."""

    cells: tuple[Path, ...]
    attempt: int = 0


@dataclass(frozen=True)
class Outcome:
    """How a worker ended: its exit code (see `worker`; negative for a signal) and its last words."""

    code: int
    said: str = ""


class Engine(Protocol):
    """Takes tasks while it has free slots, and tells which ended."""

    @property
    def free(self) -> int:
        """How many more tasks it takes now."""

    @property
    def running(self) -> int:
        """How many tasks it has."""

    def submit(self, task: Task) -> None:
        """Start a task."""

    def finished(self) -> list[tuple[Task, Outcome]]:
        """Tasks that ended since the last call; waits a moment where there are none."""

    def stop(self) -> None:
        """End all tasks; none is running afterwards."""


def make_engine(
    name: str,
    *,
    logs: Path,
    workers: int | None = None,
    address: str | None = None,
    slurm: Mapping[str, Any] | None = None,
) -> Engine:
    """The engine of this name; what it needs is imported only here."""
    if name not in ENGINES:
        raise SpiritLevelError(f"unknown engine {name!r}{suggest(name, ENGINES)}; known: {', '.join(ENGINES)}")
    if address is not None and name != "ray":
        raise SpiritLevelError(f"an address is for engine 'ray'; engine {name!r} takes none")
    if slurm and name != "slurm":
        raise SpiritLevelError(f"settings of jobs are for engine 'slurm'; engine {name!r} takes none")
    if name == "local":
        from spiritlevel.study.engines.local import LocalEngine

        return LocalEngine(workers)
    if name == "ray":
        from spiritlevel.study.engines.ray import RayEngine

        return RayEngine(workers, address)
    from spiritlevel.study.engines.slurm import SlurmEngine

    return SlurmEngine(workers, logs, slurm or {})
