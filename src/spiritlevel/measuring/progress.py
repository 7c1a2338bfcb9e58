"""Progress of a measurement: what is being computed, the passes over the data so far, and about how long it still takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from spiritlevel.measuring.evidence import Evidence
from spiritlevel.problem.problem import Work

Listener = Callable[[str, float], None]

# What parts of a plan usually take, in passes over the data; only the time left is guessed from these.
SWEEP, EIGENPAIRS, LAYER_EIGENPAIRS = 1, 20, 14


def expected_passes(evidence: Evidence) -> float:
    """About how many passes over the data the evidence will take."""
    needs = evidence.needs
    passes = 1.0
    if needs.statistics:
        known = evidence.gathered.anatomy is not None  # not worth finding out for this alone
        passes += SWEEP + (evidence.most_probes if known and evidence.bent else 0)
    if needs.operators:
        passes += EIGENPAIRS
    if needs.layer_eigenvalues:
        passes += LAYER_EIGENPAIRS
    return passes


class Reporter:
    """Reports the current stage, the passes so far and a guess of the time left to a listener, if there is one."""

    def __init__(self, listen: Listener | None = None) -> None:
        self._listen = listen
        self._stage = self._prefix = ""
        self._passes = 0.0
        self._expected: Callable[[], float] = lambda: 0.0
        self._started = time.monotonic()

    def within(self, prefix: str) -> None:
        """Put this before the names of the following stages."""
        self._prefix = prefix

    def expect(self, passes: Callable[[], float]) -> None:
        """Begin a plan that takes about this many passes; the function is called when an estimate is needed."""
        self._expected, self._passes, self._started = passes, 0.0, time.monotonic()

    def stage(self, name: str) -> None:
        self._stage = name
        self._tell()

    def update(self, work: Work) -> None:
        self._passes = work.passes
        self._tell()

    def time_left(self) -> float | None:
        """Seconds, at the pace so far; None while there is no pace or the plan is exceeded."""
        left = self._expected() - self._passes
        if left <= 0 or self._passes <= 0:
            return None
        return (time.monotonic() - self._started) / self._passes * left

    def _tell(self) -> None:
        if self._listen is not None:
            left = self.time_left()
            told = "" if left is None or left < 1 else f", about {_duration(left)} left"
            self._listen(f"{self._prefix}{self._stage}{told}", self._passes)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextlib.contextmanager
def reporting(progress: bool | Listener) -> Iterator[Reporter]:
    """A reporter for `measure`: silent, with a bar on standard error, or calling the user's function."""
    if callable(progress):
        yield Reporter(progress)
        return
    with passes_bar(shown=progress) as listen:
        yield Reporter(listen if progress else None)


@contextlib.contextmanager
def passes_bar(shown: bool = True) -> Iterator[Listener]:
    """A listener for `measure(progress=…)`; it draws nothing unless `shown` and standard error is a terminal."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        TextColumn("{task.fields[passes]}", table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
    )
    hidden = not (shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=hidden, expand=True) as bar:
        task = bar.add_task("", total=None, passes="")

        def listen(stage: str, passes: float) -> None:
            bar.update(task, description=stage, passes=f"{passes:.0f} passes over the data" if passes else "")

        yield listen
