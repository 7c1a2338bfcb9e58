"""Progress of a measurement: what is being computed and how many passes over the data it has taken."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from spiritlevel.problem import Work


class Reporter:
    """Tells a listener the current stage and the passes so far; by itself it tells nobody."""

    def __init__(self, listen: Callable[[str, float], None] | None = None) -> None:
        self._listen = listen
        self._stage = ""
        self._passes = 0.0

    def stage(self, name: str) -> None:
        self._stage = name
        self._tell()

    def update(self, work: Work) -> None:
        self._passes = work.passes
        self._tell()

    def _tell(self) -> None:
        if self._listen is not None:
            self._listen(self._stage, self._passes)


@contextlib.contextmanager
def reporting(progress: bool | Callable[[str, float], None]) -> Iterator[Reporter]:
    """A reporter for `measure`: silent, with a bar on standard error, or calling the user's function."""
    if callable(progress):
        yield Reporter(progress)
        return
    if not progress:
        yield Reporter()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TextColumn("{task.fields[passes]:.0f} passes over the data"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, passes=0.0)
        yield Reporter(lambda stage, passes: bar.update(task, description=stage, passes=passes))
