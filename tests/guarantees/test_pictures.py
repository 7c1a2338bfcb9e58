"""The pictures and pages of the guarantees: numbers drawn are numbers given, bytes are stable, never colour alone."""

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch

from spiritlevel.guarantees.certificate import Certificate
from spiritlevel.guarantees.robustness import Point, Robustness
from spiritlevel.guarantees.show import (
    bound_against_error,
    bound_terms,
    certificate_answer,
    robustness_answer,
    robustness_curve,
)
from spiritlevel.show.drawing import Drawing

HOSTILE = "<img src=x onerror=alert(1)>$\\frac{1}{0}$ & \x00 ]]> --> </svg>"


def certificate(size: float = 1.0) -> Certificate:
    terms = {
        "training error": 0.01,
        "noise": 0.05,
        "Monte Carlo": 0.03,
        "divergence": 0.2 * size,
        "scales": 0.02,
        "description": 0.0,
        "confidence": 0.01,
        "deviation": 0.15 * size,
    }
    return Certificate(
        bound=sum(terms.values()),
        terms=terms,
        kl_bound=0.35,
        training_error=0.01,
        noisy_training_error=0.06,
        divergence=100.0,
        layers={"0.weight": 80.0, "0.bias": 20.0},
        lam=500.0,
        delta=0.05,
        samples=1000,
        draws=200,
        num_scales=2,
        method="matrix",
        test_error=0.04,
        noisy_test_error=0.08,
        noisy_test_error_spread=0.002,
    )


def robustness(holds_until: float = 0.1) -> Robustness:
    places = (0.01, 0.1, 1.0)
    curve = tuple(Point(d, d**2 + d**4, 0.1 * d**2, d**2, 3 * d**2, 5 * d**2) for d in places)
    return Robustness(
        layer="2.weight",
        delta=0.1,
        loss=0.3,
        values=(0.01,),
        mean=0.0101,
        mean_error=0.001,
        second_order=0.01,
        first_order=0.0,
        largest=0.03,
        settled=True,
        witness=torch.eye(2).unsqueeze(0),
        noise=0.0102,
        noise_error=0.0003,
        kappa=10.0,
        kappa_error=0.01,
        bound=0.05,
        curve=curve,
        holds_until=holds_until,
        matrices="orthogonal",
    )


def every_kind() -> dict[str, Drawing]:
    return {
        "terms": bound_terms({"A": certificate(), HOSTILE: certificate(4.0)}),
        "noise": bound_against_error({share: certificate(1 + share) for share in (0.0, 0.5, 1.0)}),
        "curve": robustness_curve(robustness()),
    }


@pytest.fixture(scope="module")
def drawings() -> dict[str, Drawing]:
    return every_kind()


def test_the_same_input_gives_the_same_bytes(drawings) -> None:
    sources = {name: drawing.svg() for name, drawing in drawings.items()}
    assert {name: drawing.svg() for name, drawing in every_kind().items()} == sources
    assert {name: drawing.svg() for name, drawing in drawings.items()} == sources


def test_every_picture_is_titled_described_and_harmless(drawings) -> None:
    for drawing in drawings.values():
        root = ElementTree.fromstring(drawing.svg())
        assert root.find("title").text == drawing.title
        assert len(root.find("desc").text) > 40
        assert "<img" not in drawing.svg()


def test_the_numbers_drawn_are_the_numbers_given(drawings) -> None:
    given = certificate()
    bars = drawings["terms"].figure.axes[0].patches[:5]
    assert sum(bar.get_width() for bar in bars) == pytest.approx(given.bound)
    row = drawings["terms"].table.rows[0]
    assert row == ("A", *given.terms.values(), given.bound, given.kl_bound, 0.08, 0.04)
    lines = drawings["curve"].figure.axes[0].lines
    assert [list(line.get_ydata()) for line in lines] == [
        [row[k] for row in drawings["curve"].table.rows] for k in (1, 2, 3, 4)
    ]


def test_nothing_is_told_by_colour_alone(drawings) -> None:
    hatches = [bar.get_hatch() for bar in drawings["terms"].figure.axes[0].patches[:5]]
    assert len(set(hatches)) == 5
    for name in ("noise", "curve"):
        lines = [line for line in drawings[name].figure.axes[0].lines if line.get_marker() not in ("None", "")]
        assert len({line.get_marker() for line in lines}) == len(lines) >= 4
        assert len({str(line.get_linestyle()) for line in lines}) >= 4


def test_a_curve_without_a_worst_matrix_has_no_line_for_it() -> None:
    found = robustness()
    bare = replace(found, curve=tuple(replace(point, adversarial=float("nan")) for point in found.curve))
    labels = [line.get_label() for line in robustness_curve(bare).figure.axes[0].lines]
    assert labels == ["mean F", "second order", "bound"]


def test_the_answers() -> None:
    assert certificate_answer(certificate())[0] == (
        "With probability 95 %, the network with noise on its weights errs on at most 47.0 % of new samples."
    )
    assert certificate_answer(certificate(4.0))[:2] == [
        "The bound is 1.520: vacuous, it says nothing about new samples.",
        "100 nats describe the noisy network, and there are 1,000 samples.",
    ]
    assert robustness_answer(robustness()) == [
        "Moving the features of 2.weight by a share of 0.1 raises the loss by 0.0101 on average.",
        "The worst direction found raises it by 0.0300, below the bound δ²/2·κ = 0.0500.",
        "Curvature predicts the mean to 5 % up to δ = 0.10.",
    ]
    assert robustness_answer(robustness(0.0))[-1] == ("Curvature does not predict the mean to 5 % even at δ = 0.010.")
    assert robustness_answer(robustness(math.nan))[-1].endswith("how far curvature predicts them cannot be told.")


def test_pages_hold_pictures_and_numbers(tmp_path) -> None:
    certificate().to_html(tmp_path / "bound.html")
    page = (tmp_path / "bound.html").read_text()
    assert "What flatness buys: a bound on the test error" in page
    assert page.count("<svg") == 1
    assert "Tsuzuku" in page
    robustness().to_html(tmp_path / "robustness.html")
    page = (tmp_path / "robustness.html").read_text()
    assert "What flatness buys: robustness at 2.weight" in page
    assert "Petzka" in page
