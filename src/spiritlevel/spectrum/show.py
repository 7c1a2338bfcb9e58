"""Densities of eigenvalues, drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

from matplotlib.axes import Axes
from rich.console import Group, RenderableType
from rich.text import Text
from torch import nn

from spiritlevel.curvature.density import Extreme
from spiritlevel.presenting import register
from spiritlevel.problem.losses import LossLike
from spiritlevel.show.drawing import Drawing, style
from spiritlevel.show.figures import axes_of, by_name, finished, legend, look_of
from spiritlevel.show.numbers import Cell, Numbers, plain_text, shortened, significant, value_and_error, with_error
from spiritlevel.show.page import render_page
from spiritlevel.show.scales import LogScale
from spiritlevel.show.sections import Section
from spiritlevel.show.tables import render, simple_table
from spiritlevel.spectrum.spectrum import OPERATORS, Spectrum
from spiritlevel.spectrum.spectrum import spectrum as compute_spectrum


def spectrum(
    source: Spectrum | nn.Module | Mapping[str, Spectrum | nn.Module],
    data: Any = None,
    loss: LossLike = "cross_entropy",
    *,
    width: float | None = None,
    axes: Axes | None = None,
    title: str = "Density of the eigenvalues",
    **options: Any,
) -> Drawing:
    """The density of eigenvalues on a logarithmic scale with a band of two standard errors, ends marked below.

    source: spectra from `sl.spectrum`, or models, for which they are computed from `data`, `loss` and `options`.
    width: The smoothing, one for all; the widest default of them otherwise.

    >>> import torch
    >>> data = torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.zeros(2, 1)
    >>> spectrum(nn.Linear(2, 1, bias=False), data, "mse").title
    'Density of the eigenvalues'
    """
    spectra = by_name(source, lambda model: compute_spectrum(model, data, loss, **options))
    smooth = width or max(each.width for each in spectra.values())
    rows: list[tuple[Cell, ...]] = []
    with style():
        figure, axes = axes_of(axes, height=2.8)
        for index, (name, each) in enumerate(spectra.items()):
            rows += _draw_density(axes, index, name, each, smooth)
        _density_scale(axes, spectra.values(), smooth)
        operators = {OPERATORS.get(each.operator, f"the block of {each.operator}") for each in spectra.values()}
        of = f" of {plain_text(operators.pop())}" if len(operators) == 1 else ""
        axes.set_xlabel(shortened(f"eigenvalue{of}", 60))
        axes.set_ylabel("density")
        legend(axes, len(spectra))
    table = Numbers(("model", "eigenvalue", "density", "± error"), tuple(rows))
    return finished(figure, table, plain_text(title), _spectrum_words(spectra))


def spectrum_section(source: Spectrum | Mapping[str, Spectrum]) -> Section:
    """Spectra as a part of a page: their densities, and the eigenvalues at the ends with their residuals."""
    spectra = by_name(source, lambda never: never)
    rows = tuple(
        (plain_text(name), end, value, residual)
        for name, each in spectra.items()
        for end, pairs in (("largest", each.top), ("smallest", each.bottom))
        for value, residual in ((pair.value, pair.residual) for pair in pairs)
    )
    band = "" if all(each.exact for each in spectra.values()) else "; the band is two standard errors wide on each side"
    text = f"How the eigenvalues are spread, smoothed{band}."
    ends = ("Eigenvalues at the ends", Numbers(("model", "end", "eigenvalue", "residual"), rows))
    return Section("spectrum", "Spectrum", (text,), (spectrum(spectra),), (ends,))


def _draw_density(axes: Axes, index: int, name: str, each: Spectrum, width: float) -> list[tuple[Cell, ...]]:
    points = each.points()
    mean, error = each.density(points, width)
    floor = _floor(each, width)
    look = look_of(index)
    label = shortened(plain_text(name), 28)
    # A marker in the legend only, where it says whose marks stand at the lower edge.
    axes.plot(points, mean.where(mean > floor, math.nan), **{**look, "linewidth": 1.4}, markevery=[], label=label)
    low, high = ((mean + sign * 2 * error).clamp(min=floor) for sign in (-1, 1))
    axes.fill_between(points, low, high, color=look["color"], alpha=0.2, linewidth=0)
    ends = [end.value for end in (*each.top, *each.bottom)]
    axes.plot(ends, [0.03 + 0.05 * index] * len(ends), transform=axes.get_xaxis_transform(), color=look["color"],
              marker=look["marker"], markersize=4.5, linestyle="none")  # fmt: skip
    every = max(1, len(points) // 100)
    return [
        (plain_text(name), *map(float, row)) for row in zip(points[::every], mean[::every], error[::every], strict=True)
    ]


def _floor(each: Spectrum, width: float) -> float:
    """The density of less than one smoothed eigenvalue: anything below it is indistinguishable from zero."""
    return 0.05 / (each.size * width * math.sqrt(2 * math.pi))


def _density_scale(axes: Axes, spectra: Iterable[Spectrum], width: float) -> None:
    each = list(spectra)
    peaks = [float(one.density(one.points(), width)[0].max()) for one in each]
    LogScale.of([min(_floor(one, width) for one in each), 2 * max(peaks)]).apply(axes.yaxis, axes)


def _spectrum_words(spectra: Mapping[str, Spectrum]) -> str:
    parts = ["Density of eigenvalues on a logarithmic scale; marks at the lower edge are the largest and smallest."]
    for name, each in spectra.items():
        who = f"{plain_text(name)}: " if name else ""
        parts.append(
            f"{who}{each.size:,} eigenvalues from {significant(each.bottom[0].value, 3)} to "
            f"{significant(each.top[0].value, 3)}, their mean {significant(each.moment(1)[0], 3)}."
        )
    return " ".join(parts)


def spectrum_page(found: Spectrum) -> str:
    """One page: the two ends in a sentence, the density, the eigenvalues."""
    low, high = (significant(end[0].value, 4) for end in (found.bottom, found.top))
    # What is found errs to the inside, so that an end that has not converged may lie further out.
    settled = found.bottom[0].converged and found.top[0].converged
    reach = f"lie between {low} and {high}" if settled else f"reach from {low} to {high} at least"
    if found.size == 1:
        reach = f"is {high}"
    of = f"The {found.size:,} eigenvalues" if found.size > 1 else "The one eigenvalue"
    said = f"{of} of the {plain_text(found.operator)} {reach}, at a loss of {significant(found.loss, 4)}."
    return render_page(
        title=f"Spectrum of the {plain_text(found.operator)}",
        answer=[said, *map(plain_text, found.notes)],
        sections=[spectrum_section(found)],
    )


def spectrum_table(found: Spectrum) -> RenderableType:
    """The trace with its error, and the eigenvalues at both ends with their residuals."""
    table = simple_table()
    for column in ("largest", "± residual", "smallest", "± residual"):
        table.add_column(column, justify="right", no_wrap=True)
    for high, low in zip_longest(found.top, found.bottom):
        table.add_row(*_end_cells(high), *_end_cells(low))
    trace, error = (found.size * part for part in found.moment(1))
    operator = OPERATORS.get(found.operator, f"the block of {plain_text(found.operator)}")
    total = f"{significant(trace, 5)}, exact" if found.exact else with_error(trace, error)
    said = (
        f"{found.size:,} eigenvalues of {operator}; their sum is {total}"
        if found.size > 1
        else f"one eigenvalue of {operator}"
    )
    return Group(Text(said, style="bold"), Text(""), table, *(Text(f"• {plain_text(note)}") for note in found.notes))


def _end_cells(end: Extreme | None) -> tuple[str, str]:
    return ("", "") if end is None else value_and_error(end.value, end.residual)


def spectrum_text(found: Spectrum) -> str:
    """The table as plain text."""
    return render(spectrum_table(found))


register(Spectrum, section=spectrum_section, drawing=spectrum, page=spectrum_page, text=spectrum_text)
