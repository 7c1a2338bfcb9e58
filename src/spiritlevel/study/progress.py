"""How far a study is: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

# Seconds between plain lines, unless something failed.
PLAIN_EVERY = 10.0


@dataclass(frozen=True)
class Count:
    """Cells of a study by state; `found` of those done were there before this run."""

    total: int
    done: int = 0
    found: int = 0
    running: int = 0
    failed: int = 0

    @property
    def ended(self) -> int:
        """Cells that need no more work in this run."""
        return self.done + self.failed

    def __str__(self) -> str:
        return f"{self.done} of {self.total} cells done, {self.running} running, {self.failed} failed"


def time_left(count: Count, elapsed: float) -> float | None:
    """Seconds until the rest is done at the pace so far; None before the first cell of this run has ended."""
    ended = count.ended - count.found
    return elapsed / ended * (count.total - count.ended) if ended > 0 else None


def in_words(seconds: float) -> str:
    """A duration as a person says it.

    >>> in_words(42), in_words(130), in_words(7300)
    ('42 s', '2 min 10 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class StudyProgress:
    """Shows counts as they come, on standard error; shows nothing if `quiet`."""

    def __init__(self, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.live = self.console.is_terminal and not quiet
        self.quiet = quiet
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[left]}"),
            TimeElapsedColumn(),
        )
        self.bar = Progress(*columns, console=self.console, transient=True, disable=not self.live)
        self.started = self.said_at = time.monotonic()
        self.task = self.bar.add_task("", total=None, left="")
        self.said: Count | None = None

    def __enter__(self) -> StudyProgress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def show(self, count: Count) -> None:
        """The counts now; a plain line when cells ended, at most one every ten seconds, and the last one always."""
        now = time.monotonic()
        left = time_left(count, now - self.started)
        remaining = "" if left is None or count.ended == count.total else f"about {in_words(left)} left"
        self.bar.update(self.task, description=str(count), completed=count.ended, total=count.total, left=remaining)
        if self.quiet or self.live or (self.said is not None and self.said.ended == count.ended):
            return
        if self.said is None or now - self.said_at >= PLAIN_EVERY or count.ended == count.total:
            self.tell(f"{count}{remaining and ', ' + remaining}")
            self.said, self.said_at = count, now

    def tell(self, message: str) -> None:
        """A line that stays."""
        if not self.quiet:
            self.console.print(message, markup=False, highlight=False, soft_wrap=True)
