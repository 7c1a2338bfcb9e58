"""Models relative to a first one: a row a measure, with a break of the scale where some ratios are far beyond the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from spiritlevel.show.drawing import INK, Drawing, style
from spiritlevel.show.figures import axes_of, finished, legend, look_of
from spiritlevel.show.numbers import Numbers, factor_text, plain_text, shortened, significant
from spiritlevel.show.scales import LogScale

# Heading → measure → model → (ratio to the first model, its error).
Ratios = Mapping[str, Mapping[str, Mapping[str, tuple[float, float]]]]

_FAR = 30.0  # from this factor on a ratio is not drawn to scale, where others would be pressed together by it
_STRIP = 0.32  # the room beyond a break, as a share of the scale


def ratio_comparison(groups: Ratios, *, title: str, reference: str, axes: Axes | None = None) -> Drawing:
    """Models relative to a first one, a row a measure, on a logarithmic scale with a line at 1.

    `groups`: heading → measure → model → (ratio, its error), for instance invariant measures above plain ones. Where some
    ratios are a million and others two, those far away stand beyond a break of the scale, with their factor beside them.
    """
    groups = {
        heading: {m: {k: v for k, v in models.items() if k != reference} for m, models in group.items()}
        for heading, group in groups.items()
    }
    rows = [(heading, measure, models) for heading, group in groups.items() for measure, models in group.items()]
    names = list(dict.fromkeys(model for _, _, models in rows for model in models))
    ruler = Ruler.of(ratio for _, _, models in rows for ratio, _ in models.values())
    with style():
        figure, axes = axes_of(axes, height=0.95 + 0.23 * (len(rows) + len(groups)))
        depth = _ratio_rows(axes, groups, names, ruler)
        ruler.apply(axes)
        axes.axvline(1.0, color=INK, linewidth=0.8)
        axes.set_ylim(depth - 0.4, -0.6)
        axes.set_xlabel(f"ratio to {shortened(plain_text(reference), 30)}")
        legend(axes, len(names), always=True)
    cells = tuple(
        (heading, measure, model, ratio, error)
        for heading, measure, models in rows
        for model, (ratio, error) in models.items()
    )
    table = Numbers(("kind", "measure", "model", f"ratio to {plain_text(reference)}", "± error"), cells)
    return finished(figure, table, plain_text(title), _ratio_words(groups, reference))


@dataclass(frozen=True)
class Ruler:
    """A logarithmic scale for ratios, with room beyond it on either side for those that are far away.

    >>> ruler = Ruler.of([0.5, 1.0, 2.0, 1e6])
    >>> ruler.broken, ruler.far(2.0), ruler.far(1e6), ruler.place(1e6) < 30
    (True, False, True, True)
    >>> Ruler.of([1.0, 1e6]).broken  # nothing that a break would make easier to read
    False
    """

    scale: LogScale
    below: bool
    above: bool

    @classmethod
    def of(cls, ratios: Iterable[float]) -> Ruler:
        known = [ratio for ratio in ratios if ratio > 0 and math.isfinite(ratio)]
        near = [ratio for ratio in known if 1 / _FAR <= ratio <= _FAR]
        if all(0.95 < ratio < 1.05 for ratio in near):
            return cls(LogScale.of([1.0, *known]), below=False, above=False)
        below, above = min(known) < 1 / _FAR, max(known) > _FAR
        return cls(LogScale.of([1.0, *near] if below or above else [1.0, *known]), below, above)

    @property
    def broken(self) -> bool:
        return self.below or self.above

    @property
    def _strip(self) -> float:
        return math.pow(self.scale.high / self.scale.low, _STRIP)

    def far(self, ratio: float) -> bool:
        return (self.above and ratio > _FAR) or (self.below and ratio < 1 / _FAR)

    def place(self, ratio: float) -> float:
        """Where a ratio stands: to scale, or at the near edge of the room beyond."""
        if not self.far(ratio):
            return ratio
        if ratio > 1:
            return self.scale.high * math.pow(self._strip, 0.25)
        return self.scale.low / math.pow(self._strip, 0.75)

    def apply(self, axes: Axes) -> None:
        self.scale.apply(axes.xaxis, axes)
        low, high = self.scale.low, self.scale.high
        axes.set_xlim(low / self._strip if self.below else low, high * self._strip if self.above else high)
        for edge in ([low] if self.below else []) + ([high] if self.above else []):
            axes.axvline(edge, color=INK, linewidth=1.2, linestyle=":")
            above = edge == high
            axes.annotate(
                "far beyond" if above else "far below",
                (edge, 1),
                (3, -8) if above else (-3, -8),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="left" if above else "right",
                fontsize=8,
            )


def _ratio_rows(axes: Axes, groups: Ratios, names: Sequence[str], ruler: Ruler) -> int:
    """Draw every group's heading and its rows from the top; the number of lines used."""
    ticks: list[str] = []
    labelled: set[str] = set()
    for heading, group in groups.items():
        ticks.append(plain_text(heading))
        for measure, models in group.items():
            axes.axhline(len(ticks), color=INK, alpha=0.1, linewidth=0.6)
            for model, (ratio, error) in models.items():
                if ratio > 0 and math.isfinite(ratio):
                    label = None if model in labelled else shortened(plain_text(model), 24)
                    labelled.add(model)
                    _dot(axes, names.index(model), label, len(ticks), (ratio, error), ruler)
            ticks.append(shortened(plain_text(measure), 33))
    axes.set_yticks(range(len(ticks)), ticks)
    headings = {plain_text(heading) for heading in groups}
    for text in axes.get_yticklabels():
        text.set_fontweight("bold" if text.get_text() in headings else "normal")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return len(ticks)


def _dot(axes: Axes, index: int, label: str | None, depth: int, measured: tuple[float, float], ruler: Ruler) -> None:
    ratio, error = measured
    look = look_of(index + 1)
    at = ruler.place(ratio)
    axes.plot([at], [depth], **{**look, "linestyle": "none", "label": label})
    if ruler.far(ratio):
        words = factor_text(ratio) if ratio > 1 else significant(ratio, 1)
        axes.annotate(words, (at, depth), (6, -3), textcoords="offset points", fontsize=8)
        return
    spread = error if math.isfinite(error) else 0.0
    bars = [[min(spread, 0.9 * ratio)], [spread]]
    axes.errorbar([at], [depth], xerr=bars, fmt="none", color=look["color"], capsize=3, linewidth=1)


def _ratio_words(groups: Ratios, reference: str) -> str:
    parts = [f"Every measure of every model divided by that of {plain_text(reference)}, on a logarithmic scale."]
    for heading, group in groups.items():
        by_model: dict[str, list[float]] = {}
        for models in group.values():
            for model, (ratio, _) in models.items():
                by_model.setdefault(model, []).append(ratio)
        for model, ratios in by_model.items():
            span = f"{significant(min(ratios), 3)} to {significant(max(ratios), 3)}"
            parts.append(f"{plain_text(heading)}, {plain_text(model)}: {span}.")
    return " ".join(parts)
