"""What an engine is: it takes tasks while it has free slots, and tells which ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from spiritlevel.study.engines.endings import Outcome


@dataclass(frozen=True)
class Task:
    """Cells for one worker: the files that describe them, and how often this was tried before.

    Attempts that ended because a machine was taken away are counted apart: they are no fault of the cells'. Where the study
    lies behind a URL, the files here are a copy that no other machine need see.
    """

    cells: tuple[Path, ...]
    attempt: int = 0
    lost: int = 0
    url: str = ""

    @property
    def paths(self) -> list[str]:
        """The files as they are named on every machine."""
        if self.url:
            return [f"{self.url}/cells/{path.parent.name}/{path.name}" for path in self.cells]
        return [str(path.absolute()) for path in self.cells]


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


class Slots:
    """Counts the tasks that an engine has, `most` at a time; each may take `seconds`."""

    def __init__(self, most: int, seconds: float | None = None) -> None:
        self.most, self.seconds = most, seconds
        self.tasks: dict[Any, Any] = {}

    @property
    def free(self) -> int:
        return self.most - len(self.tasks)

    @property
    def running(self) -> int:
        return len(self.tasks)
