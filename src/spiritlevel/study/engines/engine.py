"""What an engine is: it takes tasks while it has free slots, and tells which ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


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


class Slots:
    """Counts the tasks that an engine has: `most` at a time."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tasks: dict[Any, Any] = {}

    @property
    def free(self) -> int:
        return self.most - len(self.tasks)

    @property
    def running(self) -> int:
        return len(self.tasks)
