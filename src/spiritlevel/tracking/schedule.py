"""When to measure: within a share of the training time, every so many steps, or where the loss first falls to a level."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.record import Measure

# An interval between two steps that is longer than a minute, and so many times the mean, is a pause and no training.
PAUSE_SECONDS, PAUSE_TIMES = 60.0, 100
# What a first measurement takes, in forward passes over the probe set, until one has been timed: about what small networks take.
# One that takes more is given up when the budget is used, and the time is lost.
FIRST_GUESSES = {"statistics": 50, "operators": 90, "layer eigenvalues": 90, "gradient": 15, "critical": 30}
COSTLY = 300


@dataclass
class Clock:
    """Seconds of training and of measuring, told apart by the calls of `step`."""

    trained: float = 0.0
    spent: float = 0.0
    intervals: int = 0
    _left: float | None = None

    def enter(self, now: float) -> None:
        """A step of the training has ended."""
        if self._left is None:
            return
        interval = now - self._left
        mean = self.trained / max(1, self.intervals)
        if interval > PAUSE_SECONDS and self.intervals and interval > PAUSE_TIMES * mean:
            interval = mean
        self.trained += interval
        self.intervals += 1

    def leave(self, entered: float, now: float) -> None:
        """The training goes on."""
        self.spent += now - entered
        self._left = now


@dataclass
class Group:
    """Measures that share their work and are measured together.

    Attributes:
        names: Their names.
        cost: Seconds that the next time will take, as far as is known.
        spent: Seconds so far.
        timed: Whether it was ever finished, so that `cost` is more than a guess.
    """

    names: list[str]
    cost: float
    spent: float = 0.0
    timed: bool = False

    @property
    def afterwards(self) -> float:
        """Seconds spent once the next time is over."""
        return self.spent + self.cost

    def paid(self, seconds: float) -> None:
        """This time it took so long; the next one may take as long as the slower of this time and the times before."""
        self.cost = max(seconds, (self.cost + seconds) / 2) if self.timed else seconds
        self.spent += seconds
        self.timed = True

    def gave_up(self, seconds: float) -> None:
        """After so long it was not done: it takes twice as long, as far as is known."""
        self.cost = 2 * max(seconds, self.cost)
        self.spent += seconds


def kind_of(measure: Measure) -> str:
    """What a measure shares its work with: other readings of the sweep, other eigenvalues; or its own name."""
    needs = measure.needs(measure)
    if measure.costly:
        return measure.name
    if needs.operators:
        return "operators"
    if needs.layer_eigenvalues:
        return "layer eigenvalues"
    if needs.statistics:
        return "statistics"
    shared = [kind for kind in ("critical", "gradient") if f"{kind}_" in measure.name]
    return shared[0] if shared else measure.name


def grouped(measures: Iterable[Measure], pass_seconds: float) -> dict[str, Group]:
    """Measures by what they share, each group with a first guess of its cost."""
    groups: dict[str, Group] = {}
    for measure in measures:
        kind = kind_of(measure)
        guess = COSTLY if measure.costly else FIRST_GUESSES.get(kind, FIRST_GUESSES["statistics"])
        groups.setdefault(kind, Group([], 0.0)).names.append(measure.name)
        groups[kind].cost = max(groups[kind].cost, guess * pass_seconds)
    return groups


@dataclass
class Budget:
    """At most `overhead` times the training time, of which every group of measures has the same share in the long run."""

    overhead: float

    def due(self, clock: Clock, groups: dict[str, Group]) -> list[str]:
        """The groups to measure now: those whose next time fits into their own share, and the one whose turn it is.

        It is the turn of the group that will have taken least, this time included. It may use what the others have not
        spent yet, so that a cheap group need not wait while a costly one saves. A group that was never timed comes alone: it
        may have to be given up.
        """
        left, share = self.left(clock), self.overhead * clock.trained / len(groups)
        in_turn = sorted(groups, key=lambda kind: groups[kind].afterwards)
        found: list[str] = []
        for kind in in_turn:
            group = groups[kind]
            if group.cost <= left and (kind == in_turn[0] or group.afterwards <= share):
                if not group.timed:
                    return found or [kind]
                left -= group.cost
                found.append(kind)
        return found

    def left(self, clock: Clock) -> float:
        """The seconds that measuring may still take."""
        return self.overhead * clock.trained - clock.spent


@dataclass
class Levels:
    """Losses whose first crossing, from above, is a reason to measure."""

    left: list[float]

    @classmethod
    def of(cls, levels: float | Sequence[float]) -> Levels:
        given = [levels] if isinstance(levels, numbers.Real) else list(levels)  # type: ignore[arg-type]
        if not given or not all(_is_number(level) and math.isfinite(level) for level in given):
            raise SpiritLevelError(f"at_loss must be finite numbers, such as [1, 0.1, 0.01], got {levels!r}")
        return cls(sorted({float(level) for level in given}, reverse=True))

    def crossed(self, loss: float) -> tuple[float, ...]:
        """The levels that this loss is the first to reach; each is named once.

        >>> levels = Levels.of([1, 0.1, 0.01])
        >>> levels.crossed(2.0), levels.crossed(0.05), levels.crossed(0.5), levels.crossed(0.001)
        ((), (1.0, 0.1), (), (0.01,))
        """
        found = tuple(level for level in self.left if loss <= level)
        self.left = self.left[len(found) :]
        return found


def check_overhead(overhead: Any) -> float:
    if not _is_number(overhead) or not 0 < float(overhead) <= 1:
        raise SpiritLevelError(
            f"overhead must be a number above 0, at most 1: the share of the training time that measuring may add; "
            f"got {overhead!r}"
        )
    return float(overhead)


def _is_number(entry: Any) -> bool:
    return isinstance(entry, numbers.Real) and not isinstance(entry, bool)
