"""Logarithmic axes whose ticks a person can read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from torch import Tensor

from spiritlevel.show.drawing import INK
from spiritlevel.show.numbers import power_of_ten, significant

_MANTISSAS = ((1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9))


@dataclass(frozen=True)
class LogScale:
    """A logarithmic axis from `low` to `high`, with a line at `floor` for what is not positive, where there is any."""

    low: float
    high: float
    floor: float | None

    @classmethod
    def of(cls, values: Iterable[float], floor: bool = False) -> LogScale:
        finite = [float(v) for v in values if math.isfinite(v)]
        positive = [value for value in finite if value > 0] or [1.0]
        low, high = min(positive), max(positive)
        # A scale narrower than this would blow rounding up into a landscape.
        if high / low < 3:
            middle = math.sqrt(low * high)
            low, high = middle / 1.9, middle * 1.9
        below = floor or len(finite) > sum(value > 0 for value in finite)
        margin, step = max((high / low) ** 0.06, 1.1), max((high / low) ** 0.12, 1.3)
        return cls(low / margin, high * margin, low / margin / step if below else None)

    def place(self, value: float) -> float:
        return value if value > 0 else (self.floor or self.low)

    def ticks(self) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for mantissas in _MANTISSAS if last - first <= 3 else ():
            fine = [m * 10.0**e for e in range(first, last + 1) for m in mantissas]
            inside = [tick for tick in fine if self.low <= tick <= self.high]
            if 3 <= len(inside) <= 8:
                return inside
        every = max(1, math.ceil((last - first) / 6))
        return [10.0**e for e in range(first, last + 1) if e % every == 0 and self.low <= 10.0**e <= self.high]

    def apply(self, axis: Axis, axes: Axes) -> None:
        vertical = axis is axes.yaxis
        bottom = self.floor / math.sqrt(self.low / self.floor) if self.floor else self.low
        (axes.set_yscale if vertical else axes.set_xscale)("log")
        (axes.set_ylim if vertical else axes.set_xlim)(bottom, self.high)
        ticks = self.ticks() + ([self.floor] if self.floor else [])
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
        powers = all(_is_power(tick) for tick in self.ticks())
        axis.set_major_formatter(
            FuncFormatter(lambda tick, _: "≤ 0" if tick == self.floor else tick_text(tick, powers))
        )
        light_grid(axes, "y" if vertical else "x")


def light_grid(axes: Axes, axis: Literal["x", "y"] = "y") -> None:
    """Faint lines at the ticks of one axis."""
    axes.grid(axis=axis, color=INK, alpha=0.15, linewidth=0.6)


def _is_power(value: float) -> bool:
    exponent = math.log10(value)
    return abs(exponent - round(exponent)) < 1e-9


def tick_text(value: float, powers: bool) -> str:
    """What stands at a tick; `powers` if all ticks are powers of ten. Beside 15000 stands 10000, not 10⁴."""
    if _is_power(value) and not 1e-4 < value < 1e4 and (powers or "×" in significant(value, 1)):
        return power_of_ten(round(math.log10(value)))
    # Some ticks have two digits: 15000 must not stand as 20000.
    digits = 1 if math.isclose(float(f"{value:.0e}"), value) else 2
    return f"{value:g}" if 1e-3 <= value < 1e4 else significant(value, digits)


_WIDE = 30.0  # from this ratio on a scale is logarithmic


def wide_scale(values: Tensor) -> LogScale | None:
    """A logarithmic scale for positive values of several magnitudes."""
    finite = values[values.isfinite()]
    wide = finite.numel() > 0 and bool(finite.min() > 0) and bool(finite.max() > _WIDE * finite.min())
    return LogScale.of(finite.tolist()) if wide else None
