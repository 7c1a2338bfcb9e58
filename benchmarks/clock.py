"""Time in gradients, and a limit to it.

Time is that of the processor, user and system: with one thread it is the time on a quiet machine, and it stays nearly
the same on a busy one.
"""

from __future__ import annotations

import contextlib
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType

# How often the unit is timed at least, before and after every task.
FEWEST = 2


class OutOfTime(Exception):
    """A measurement took longer than it may."""


@dataclass
class Budget:
    """What one measurement may take: estimators stop by themselves at `seconds`, everything else is stopped later."""

    seconds: float
    started: float = field(default_factory=time.process_time)
    charged: float | None = None
    longest: float = 0.0

    def restart(self) -> None:
        """Count from here: what was done before was only to find a setting."""
        self.longest = self.at_least()
        self.started = time.process_time()

    def at_least(self) -> float:
        """What an answer that was stopped would have taken at least: the longest try so far."""
        return max(self.longest, self.spent())

    def charge(self, seconds: float) -> None:
        """Count so much, whatever the clock says."""
        self.charged = seconds

    def spent(self) -> float:
        return time.process_time() - self.started if self.charged is None else self.charged

    def used_up(self) -> bool:
        return self.spent() > self.seconds


def unit_times(gradient: Callable[[], object], seconds: float) -> list[float]:
    """Times of one gradient, repeated for so long."""
    times: list[float] = []
    while len(times) < FEWEST or sum(times) < seconds:
        started = time.process_time()
        gradient()
        times.append(time.process_time() - started)
    return times


def median(values: list[float]) -> float:
    return float(statistics.median(values))


@dataclass
class Limit:
    """Whether the time was up: a library may wrap the exception that stopped it."""

    reached: bool = False


@contextlib.contextmanager
def limited(seconds: float, limit: Limit) -> Iterator[None]:
    """Raise `OutOfTime` inside after so many seconds, and note it in `limit`."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        limit.reached = True
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
