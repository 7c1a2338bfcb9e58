"""Bounds and robustness as tables, pictures and pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from rich.console import Group, RenderableType
from rich.text import Text

from spiritlevel.guarantees.certificate import Certificate
from spiritlevel.guarantees.robustness import Robustness
from spiritlevel.presenting import register
from spiritlevel.show.citations import citations
from spiritlevel.show.drawing import INK, Drawing, series_colour, style
from spiritlevel.show.figures import axes_of, finished, legend, look_of
from spiritlevel.show.numbers import Cell, Numbers, plain_text, shortened, significant, with_error
from spiritlevel.show.page import render_page
from spiritlevel.show.scales import LogScale, light_grid
from spiritlevel.show.sections import Section
from spiritlevel.show.tables import render, simple_table

_HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----")
# The terms of a bound, gathered into what can be told apart in a bar.
_PARTS = {
    "error of the noisy network": ("training error", "noise"),
    "Monte Carlo": ("Monte Carlo",),
    "divergence": ("divergence",),
    "description": ("scales", "description"),
    "λ and δ": ("confidence", "deviation"),
}
_MEANINGS = {
    "training error": "L_S(f), without noise",
    "noise": "L_S(Q) − L_S(f), as estimated",
    "Monte Carlo": "confidence of that estimate",
    "divergence": "Σ (θ−θ₀)²/(2s²), over λ",
    "scales": "naming the noise scales, over λ",
    "description": "naming what has no noise, over λ",
    "confidence": "ln(number of λ / δ), over λ",
    "deviation": "Ψ(λ, m), over λ",
}


# --- a bound -----------------------------------------------------------------------------------------------------


def certificate_table(certificate: Certificate) -> RenderableType:
    """The terms of a bound from top to bottom, their sum, and what test data say."""
    table = simple_table()
    table.add_column("term")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for name, value, meaning in _term_rows(certificate):
        bold = "bold" if name == "bound" else ""
        told = Text(meaning, style="dim" if name in certificate.terms else "")
        table.add_row(Text(name, style=bold), Text(value, style=bold), told, end_section=name == "deviation")
    lines = [Text(line) for line in certificate_answer(certificate)]
    return Group(*lines, Text(""), table, *_notes(certificate.notes))


def _term_rows(certificate: Certificate) -> list[tuple[str, str, str]]:
    """Every term with its value and what it is, their sum, the kl form, and what test data say."""
    rows = [(name, f"{value:.4f}", _MEANINGS.get(name, "")) for name, value in certificate.terms.items()]
    rows.append(("bound", f"{certificate.bound:.4f}", "sum of the above"))
    rows.append(("kl bound", f"{certificate.kl_bound:.4f}", "Langford, Seeger, Maurer; holds by itself"))
    if certificate.test_error is not None:
        rows.append(("test error of Q", _noisy_test(certificate), "what the bounds bound, on test data"))
        rows.append(("test error of f", f"{certificate.test_error:.4f}", "the network without noise: not bounded"))
    return rows


def _notes(notes: Sequence[str]) -> list[Text]:
    return [Text(f"• {plain_text(note)}", style="dim") for note in notes]


def _noisy_test(certificate: Certificate) -> str:
    return with_error(certificate.noisy_test_error or 0.0, certificate.noisy_test_error_spread or 0.0)


def certificate_answer(certificate: Certificate) -> list[str]:
    """What the certificate says, in sentences."""
    sure = f"{100 * (1 - certificate.delta):g} %"
    said = [
        f"With probability {sure}, the network with noise on its weights errs on at most "
        f"{100 * min(1.0, certificate.bound):.1f} % of new samples."
    ]
    if certificate.vacuous:
        said = [
            f"The bound is {certificate.bound:.3f}: vacuous, it says nothing about new samples.",
            f"{certificate.divergence:,.0f} nats describe the noisy network, and there are {certificate.samples:,} samples.",
        ]
    if certificate.kl_bound < min(1.0, certificate.bound) - 5e-4:
        said.append(f"The kl form of the bound gives {100 * certificate.kl_bound:.1f} %, with the same probability.")
    return said


def bound_terms(certificates: Mapping[str, Certificate], *, title: str = "What a bound is made of") -> Drawing:
    """A stacked bar for every certificate, a line at 1, beyond which a bound says nothing, and the test errors as marks."""
    with style():
        figure, axes = axes_of(None, height=1.4 + 0.42 * len(certificates))
        for place, certificate in enumerate(certificates.values()):
            _stack(axes, place, certificate)
            if certificate.noisy_test_error is not None and certificate.test_error is not None:
                first = place == 0
                _mark(axes, certificate.noisy_test_error, place, "o", "test error of Q" if first else None)
                _mark(axes, certificate.test_error, place, "D", "test error of f" if first else None)
        axes.axvline(1.0, color=INK, linewidth=1.0, linestyle="--", label="1: says nothing")
        names = [shortened(plain_text(name), 22) for name in certificates]
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(0, 1.12 * max([1.0, *(certificate.bound for certificate in certificates.values())]))
        axes.set_xlabel("error")
        legend(axes, len(axes.get_legend_handles_labels()[1]))
    terms = list(next(iter(certificates.values())).terms) if certificates else []
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (name, *(c.terms[t] for t in terms), c.bound, c.kl_bound, *_tests(c)) for name, c in certificates.items()
    )
    columns = ("network", *terms, "bound", "kl bound", "test error of Q", "test error of f")
    return finished(figure, Numbers(columns, rows), plain_text(title), _bound_words(certificates))


def _stack(axes: Axes, place: int, certificate: Certificate) -> None:
    start = 0.0
    for index, (label, names) in enumerate(_PARTS.items()):
        width = sum(certificate.terms[name] for name in names)
        axes.barh(
            place,
            width,
            left=start,
            height=0.62,
            color=series_colour(index),
            alpha=0.45,
            hatch=_HATCHES[index],
            edgecolor=INK,
            linewidth=0.6,
            label=label if place == 0 else None,
        )
        start += width
    axes.annotate(f"{certificate.bound:.2f}", (start, place), (4, -3), textcoords="offset points", fontsize=8)


def _mark(axes: Axes, value: float, place: int, marker: str, label: str | None) -> None:
    axes.plot(
        [value], [place], marker, color=INK, markerfacecolor="none", markersize=7, markeredgewidth=1.5, label=label
    )


def _tests(certificate: Certificate) -> tuple[float, float]:
    return (
        math.nan if certificate.noisy_test_error is None else certificate.noisy_test_error,
        math.nan if certificate.test_error is None else certificate.test_error,
    )


def _bound_words(certificates: Mapping[str, Certificate]) -> str:
    parts = ["Stacked bars of the terms of each bound, left to right; from 1 on a bound says nothing."]
    for name, certificate in certificates.items():
        largest = max(certificate.terms, key=lambda term: certificate.terms[term])
        told = "" if certificate.test_error is None else f", test error of Q {_noisy_test(certificate)}"
        parts.append(f"{plain_text(name)}: {certificate.bound:.3f}, most of it {largest}{told}.")
    return " ".join(parts)


def bound_against_error(
    certificates: Mapping[float, Certificate], *, title: str = "Bound and test error over label noise"
) -> Drawing:
    """Bounds and errors against the share of labels replaced at random, one certificate for each share."""
    shares = sorted(certificates)
    chosen = [certificates[share] for share in shares]
    lines = {
        "bound": [c.bound for c in chosen],
        "kl bound": [c.kl_bound for c in chosen],
        "test error of Q": [_tests(c)[0] for c in chosen],
        "test error of f": [_tests(c)[1] for c in chosen],
        "training error of f": [c.training_error for c in chosen],
    }
    with style():
        figure, axes = axes_of(None, height=3.0)
        for index, (name, values) in enumerate(lines.items()):
            axes.plot(shares, values, **look_of(index), label=name)
        axes.axhline(1.0, color=INK, linewidth=1.0, linestyle=":")
        axes.annotate("1: says nothing", (shares[0], 1.0), (2, 3), textcoords="offset points", fontsize=8)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("share of labels replaced at random")
        axes.set_ylabel("error")
        light_grid(axes)
        legend(axes, len(lines))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (share, *(line[i] for line in lines.values())) for i, share in enumerate(shares)
    )
    held = sum(not _tests(c)[0] > c.bound for c in chosen)
    words = (
        f"From {shares[0]:g} to {shares[-1]:g} of the labels replaced, the bound goes from {significant(chosen[0].bound, 3)} "
        f"to {significant(chosen[-1].bound, 3)}. The test error of Q is below its bound at {held} of {len(shares)} points."
    )
    return finished(figure, Numbers(("share of random labels", *lines), rows), plain_text(title), words)


def certificate_page(certificate: Certificate) -> str:
    """One page: the answer, the stacked bar, the terms and the divergence of every tensor."""
    layers = tuple((name, value) for name, value in certificate.layers.items())
    section = Section(
        "bound",
        "The terms of the bound",
        (f"m = {certificate.samples:,}, δ = {certificate.delta:g}, λ = {significant(certificate.lam, 4)}, "
         f"{certificate.num_scales} noise scales ({certificate.method}), {certificate.draws} draws.",
         *certificate.notes),
        (bound_terms({"this network": certificate}),),
        (("Terms, their sum and the kl bound", Numbers(("term", "value", "what it is"), tuple(_term_rows(certificate)))),
         ("Divergence of every tensor, in nats", Numbers(("tensor", "Σ (θ−θ₀)²/(2s²)"), layers))),
        numbers_in_tables=True,
    )  # fmt: skip
    return render_page(
        title="What flatness buys: a bound on the test error",
        answer=certificate_answer(certificate),
        sections=[section],
        citations=citations(["tsuzuku2019"]),
    )


# --- feature robustness ------------------------------------------------------------------------------------------


def robustness_table(found: Robustness) -> RenderableType:
    """The rises at one δ with the second-order value and the bound, then the curve."""
    table = simple_table()
    table.add_column(f"{plain_text(found.layer)}, δ = {found.delta:g}")
    table.add_column("value", justify="right", no_wrap=True)
    for name, text in _robustness_rows(found):
        table.add_row(name, text)
    curve = simple_table()
    for column in _CURVE:
        curve.add_column(column, justify="right", no_wrap=True)
    for row in _curve_rows(found):
        curve.add_row(*(significant(float(cell), 3) for cell in row))
    lines = [Text(line) for line in robustness_answer(found)]
    return Group(*lines, Text(""), table, Text(""), curve, *_notes(found.notes))


_CURVE = ("δ", "mean F", "second order", "worst A", "bound")


def _robustness_rows(found: Robustness) -> list[tuple[str, str]]:
    error = 0.0 if math.isnan(found.mean_error) else found.mean_error
    noise = "–" if math.isnan(found.noise) else with_error(found.noise, found.noise_error)
    return [
        (f"mean of F over {len(found.values)} A ({found.matrices})", with_error(found.mean, error)),
        ("second order, δ²/2·⟨WA, H(WA)⟩", significant(found.second_order)),
        ("noise at the features", noise),
        ("largest F found, ‖A‖ ≤ 1", significant(found.largest)),
        ("bound, δ²/2·κ", significant(found.bound)),
        ("κ", with_error(found.kappa, found.kappa_error)),
    ]


def _curve_rows(found: Robustness) -> tuple[tuple[Cell, ...], ...]:
    return tuple((p.delta, p.mean, p.second_order, p.adversarial, p.bound) for p in found.curve)


def robustness_answer(found: Robustness) -> list[str]:
    """What was found, in sentences."""
    said = [
        f"Moving the features of {plain_text(found.layer)} by a share of {found.delta:g} raises the loss by "
        f"{significant(found.mean, 3)} on average."
    ]
    if not math.isnan(found.largest):
        worst, bound = significant(found.largest, 3), significant(found.bound, 3)
        below = "below" if found.largest <= found.bound else "above"
        said.append(f"The worst direction found raises it by {worst}, {below} the bound δ²/2·κ = {bound}.")
    if found.holds_until > 0:
        said.append(f"Curvature predicts the mean to 5 % up to δ = {significant(found.holds_until, 2)}.")
    elif math.isnan(found.holds_until):
        said.append("The rises are within the rounding of the loss, so how far curvature predicts them cannot be told.")
    else:
        said.append(f"Curvature does not predict the mean to 5 % even at δ = {significant(found.curve[0].delta, 2)}.")
    return said


def robustness_curve(found: Robustness, *, title: str | None = None) -> Drawing:
    """F against δ on logarithmic scales: its mean, the second-order value, the worst matrix, and the bound above them."""
    rows = _curve_rows(found)
    with style():
        figure, axes = axes_of(None, height=3.0)
        for index, name in enumerate(_CURVE[1:]):
            points = [(float(row[0]), float(row[index + 1])) for row in rows]
            shown = [(x, y) for x, y in points if y > 0 and math.isfinite(y)]
            if shown:
                axes.plot([x for x, _ in shown], [y for _, y in shown], **look_of(index), label=name)
        LogScale.of(float(row[0]) for row in rows).apply(axes.xaxis, axes)
        LogScale.of(y for row in rows for y in map(float, row[1:]) if y > 0).apply(axes.yaxis, axes)
        if found.holds_until > 0:
            axes.axvspan(found.curve[0].delta, found.holds_until, color=INK, alpha=0.08, linewidth=0)
            axes.annotate(
                "second order holds to 5 %", (found.curve[0].delta, 1.0), (3, -9), fontsize=8,
                xycoords=("data", "axes fraction"), textcoords="offset points",
            )  # fmt: skip
        axes.set_xlabel("δ, the share by which features move")
        axes.set_ylabel("rise of the loss, F")
        legend(axes, len(_CURVE) - 1, always=True)
    name = title or f"Feature robustness of {found.layer}"
    return finished(figure, Numbers(_CURVE, rows), plain_text(name), " ".join(robustness_answer(found)))


def robustness_page(found: Robustness) -> str:
    """One page: the answer, the curve and the numbers."""
    section = Section(
        "robustness",
        "Feature robustness",
        (f"F is the rise of the loss, {significant(found.loss, 4)}, when the features φ of {plain_text(found.layer)} "
         "become φ + δAφ.", *found.notes),
        (robustness_curve(found),),
        ((f"At δ = {found.delta:g}", Numbers(("quantity", "value"), tuple(_robustness_rows(found)))),),
    )  # fmt: skip
    return render_page(
        title=f"What flatness buys: robustness at {plain_text(found.layer)}",
        answer=robustness_answer(found),
        sections=[section],
        citations=citations(["petzka2019"]),
    )


def certificate_text(certificate: Certificate) -> str:
    """The table as plain text."""
    return render(certificate_table(certificate))


def certificate_drawing(certificate: Certificate) -> Drawing:
    """The terms of one bound as a stacked bar."""
    return bound_terms({"this network": certificate})


def robustness_text(robustness: Robustness) -> str:
    """The table as plain text."""
    return render(robustness_table(robustness))


register(Certificate, text=certificate_text, page=certificate_page, drawing=certificate_drawing)
register(Robustness, text=robustness_text, page=robustness_page, drawing=robustness_curve)
