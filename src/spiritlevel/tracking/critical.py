"""Critical sharpness: 2/η_c, η_c the smallest step along a direction that raises the loss (Kalra et al. 2026).

Found with losses only: doubling or halving from a guess until the loss is seen to rise, then narrowing. For a quadratic it
is dᵀHd/(−gᵀd), whatever the length of d is in: twice as long a direction has half the step and twice the sharpness.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

# Doublings or halvings after which there is no such step, and losses in all.
MOST_DOUBLINGS, MOST_LOSSES = 60, 200


@dataclass(frozen=True)
class CriticalStep:
    """The loss is not above its start after `low` and is above it after `high`.

    Attributes:
        low, high: The step lies between them; high is infinite where no step raised the loss, low 0 where every step did.
        losses: How many losses it took.
    """

    low: float
    high: float
    losses: int

    @property
    def found(self) -> bool:
        return self.low > 0 and math.isfinite(self.high)


def critical_step(rise: Callable[[float], float], slope: float, guess: float, tolerance: float) -> CriticalStep:
    """The step η at which `rise(η)` = L(θ + ηd) − L(θ) turns positive, to a relative width of `tolerance`.

    `slope` is gᵀd, which must be negative; `guess` any positive step. A loss that is not finite has risen.

    >>> found = critical_step(lambda step: -step + 5 * step**2, -1.0, 1.0, 1e-6)  # turns positive at 0.2
    >>> round(found.low, 6), round(found.high, 6), found.losses < 10
    (0.2, 0.2, True)
    """
    search = _Search(rise, slope)
    search.bracket(guess, tolerance)
    while search.open(tolerance):
        search.narrow(tolerance)
    return CriticalStep(search.low, search.high, search.losses)


class _Search:
    """A bracket of the step, narrowed by straight lines through rise(η)/η, which is one itself for a quadratic."""

    def __init__(self, rise: Callable[[float], float], slope: float) -> None:
        self._rise, self._slope = rise, slope
        self.low, self._at_low = 0.0, slope
        self.high, self._at_high = math.inf, math.inf
        self.losses = 0

    def look(self, step: float) -> None:
        rise = self._rise(step)
        self.losses += 1
        if rise <= 0:
            self.low, self._at_low = step, rise / step
        else:  # NaN has risen too
            self.high, self._at_high = step, rise / step if math.isfinite(rise) else math.inf

    def bracket(self, step: float, tolerance: float) -> None:
        """By doubling or halving, at first only as far as a quadratic of this slope says."""
        self.look(step)
        for count in range(MOST_DOUBLINGS):
            if self.low > 0 and math.isfinite(self.high):
                return
            rising = math.isinf(self.high)
            near = self._turn() * (1 + (0.3 if rising else -0.3) * tolerance)
            far = 2 * self.low if rising else self.high / 2
            between = self.low < near < far if rising else far < near < self.high
            self.look(near if count < 2 and between else far)

    def _turn(self) -> float:
        """Where a quadratic with the slope of the start turns that has the rise seen so far."""
        step, seen = (self.low, self._at_low) if math.isinf(self.high) else (self.high, self._at_high)
        return step * self._slope / (self._slope - seen) if seen > self._slope else math.inf

    def open(self, tolerance: float) -> bool:
        bracketed = self.low > 0 and math.isfinite(self.high)
        return bracketed and self.high - self.low > tolerance * self.high and self.losses < MOST_LOSSES

    def narrow(self, tolerance: float) -> None:
        """One look where the line crosses zero, a little to the side from which the bracket closes; in the middle where
        the line says nothing."""
        width = self.high - self.low
        share = self._at_low / (self._at_low - self._at_high) if math.isfinite(self._at_high) else 0.5
        place = self.low + width * (share if 0 <= share <= 1 else 0.5)
        margin = 0.3 * tolerance * self.high
        aim = place + margin if place - self.low < self.high - place else place - margin
        before = width
        self.look(min(max(aim, self.low + 0.02 * width), self.high - 0.02 * width))
        if self.high - self.low > 0.5 * before and self.open(tolerance):
            self.look((self.low + self.high) / 2)
