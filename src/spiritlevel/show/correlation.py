"""A measure against generalization, drawn, with its correlation and interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from matplotlib.axes import Axes
from scipy import stats

from spiritlevel.errors import SpiritLevelError
from spiritlevel.show.drawing import MARKERS, Drawing, series_colour, style
from spiritlevel.show.figures import axes_of, finished, legend
from spiritlevel.show.numbers import Numbers, plain_text, shortened
from spiritlevel.show.scales import wide_scale


def scatter(
    values: Sequence[float] | Mapping[str, Sequence[float]],
    gaps: Sequence[float] | Mapping[str, Sequence[float]],
    *,
    label: str = "measure",
    gap: str = "generalization gap",
    correlation: Literal["spearman", "kendall", "pearson"] = "spearman",
    confidence: float = 0.95,
    axes: Axes | None = None,
    title: str | None = None,
) -> Drawing:
    """A measure against the generalization gap, a dot a network, with their correlation and its interval.

    values, gaps: Lists of equal length, or lists by group (for instance by batch size), drawn with a marker each; the
    correlation is over all. Ranks do not depend on the scale of the axes, `pearson` does: it takes values as they are.

    >>> scatter([1.0, 2.0, 3.0, 4.0], [0.1, 0.2, 0.4, 0.3], label="kappa_sum").title
    'kappa_sum against generalization gap'
    """
    groups = {str(k): list(map(float, v)) for k, v in (values if isinstance(values, Mapping) else {"": values}).items()}
    others = {str(k): list(map(float, v)) for k, v in (gaps if isinstance(gaps, Mapping) else {"": gaps}).items()}
    if {k: len(v) for k, v in groups.items()} != {k: len(v) for k, v in others.items()}:
        raise SpiritLevelError("values and gaps must have the same groups with the same number of entries")
    x, y = (
        [v for part in groups.values() for v in part],
        [others[k][i] for k, p in groups.items() for i in range(len(p))],
    )
    found = correlate(x, y, correlation, confidence)
    scale = wide_scale(torch.tensor(x))
    with style():
        figure, axes = axes_of(axes, height=3.0)
        for index, name in enumerate(groups):
            axes.plot(groups[name], others[name], MARKERS[index % len(MARKERS)], color=series_colour(index), alpha=0.85,
                      label=shortened(plain_text(name), 28) or None)  # fmt: skip
        if scale is not None:
            scale.apply(axes.xaxis, axes)
        axes.set_xlabel(shortened(plain_text(label), 50))
        axes.set_ylabel(shortened(plain_text(gap), 40))
        said = f"{correlation.capitalize()} {found[0]:.2f} [{found[1]:.2f}, {found[2]:.2f}]"
        axes.set_title(said.replace("-", "−"), fontsize=8.5, loc="left")
        legend(axes, len(groups))
    rows = tuple((name, a, b) for name in groups for a, b in zip(groups[name], others[name], strict=True))
    words = (
        f"{len(x)} networks. {correlation.capitalize()}'s correlation of {plain_text(label)} with {plain_text(gap)} is "
        f"{found[0]:.3f}, with {confidence:.0%} confidence between {found[1]:.3f} and {found[2]:.3f}."
    )
    table = Numbers(("group", plain_text(label), plain_text(gap)), rows)
    return finished(figure, table, plain_text(title or f"{label} against {gap}"), words)


def correlate(
    x: Sequence[float], y: Sequence[float], kind: str = "spearman", confidence: float = 0.95
) -> tuple[float, float, float]:
    """A correlation with its interval from Fisher's transformation; (−1, 1) where five pairs or fewer say nothing.

    The standard error of artanh r is 1/√(n−3) for Pearson, √(1.06/(n−3)) for Spearman and √(0.437/(n−4)) for Kendall
    (Fieller, Hartley and Pearson 1957).
    """
    spreads = {"pearson": (1.0, 3), "spearman": (1.06, 3), "kendall": (0.437, 4)}
    if kind not in spreads:
        raise SpiritLevelError(f"correlation must be one of {', '.join(spreads)}; got {kind!r}")
    if len(x) < 3 or len(set(x)) < 2 or len(set(y)) < 2:
        raise SpiritLevelError(f"a correlation needs at least 3 networks that differ in both numbers, got {len(x)}")
    compute = {"pearson": stats.pearsonr, "spearman": stats.spearmanr, "kendall": stats.kendalltau}[kind]
    r = max(-1.0, min(1.0, float(compute(x, y)[0])))
    variance, taken = spreads[kind]
    if len(x) <= 5 or abs(r) == 1.0:
        return (r, -1.0, 1.0) if len(x) <= 5 else (r, r, r)
    half = stats.norm.ppf(0.5 + confidence / 2) * math.sqrt(variance / (len(x) - taken))
    return r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)
