"""The answer in sentences: derived from values and errors, and silent where they say nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from report_samples import RECORDS, demo_reports, only, sample_report
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.value import ErrorKind, Value
from spiritlevel.show.answer import answer, compare


def value(number: float, error: float = 0.0, kind: ErrorKind = "bound", name: str = "kappa_sum") -> Value:
    kind = kind if error else "exact"
    return Value(name, number, error, kind == "exact", True, "by hand", error_kind=kind)


def report(**numbers: float | Value) -> Report:
    values = {n: v if isinstance(v, Value) else value(v, name=n) for n, v in numbers.items()}
    return replace(sample_report(), values=values)


def said(reports: dict[str, Report]) -> str:
    return " ".join(answer(reports, RECORDS))


def test_the_twin_of_the_demo() -> None:
    sentences = answer(demo_reports(), RECORDS)
    assert sentences[0] == (
        "By every invariant measure “small batch” is flatter than “large batch”; the plain measures agree."
    )
    assert sentences[1] == (
        "“twin” is the same as “small batch” by every invariant measure, to 3×10⁻⁹ relative; "
        "its plain Hessian norm is 10⁶ times larger."
    )
    assert sentences[2] == "3 of 33 values did not reach the tolerance: epsilon sharpness."


def test_what_is_not_a_minimum_is_said_right_after_the_headline() -> None:
    sharp = report(kappa_sum=1.0, riemannian_spectral_norm=2.0)
    assert "ot a minimum" not in said({"": sharp})
    steep = replace(sharp, problem={**sharp.problem, "gradient_metric_norm": 1.0})
    assert answer({"": steep}, RECORDS)[1].startswith("Not a minimum: the gradient is large.")


def test_networks_that_are_compared_and_not_at_a_minimum_are_named() -> None:
    flat, sharp = (
        report(kappa_sum=1.0, riemannian_spectral_norm=2.0),
        report(kappa_sum=3.0, riemannian_spectral_norm=2.0),
    )
    assert "not at a minimum" not in said({"A": flat, "B": sharp})
    steep = replace(sharp, problem={**sharp.problem, "gradient_metric_norm": 1.0})
    told = "“B” is not at a minimum, and flatness is about curvature alone: the notes of its report say more."
    assert told in said({"A": flat, "B": steep})
    assert "“A” and “B” are not at a minimum" in said({"A": steep, "B": steep})


def test_what_survives_and_has_no_value_is_not_told_as_not_surviving() -> None:
    nothing = replace(value(math.nan), error_kind="none", exact=False)
    assert answer({"": report(kappa_sum=nothing)}, RECORDS) == [
        "The network was measured by 1 measure at a loss of 0.01234 over 1,797 samples; what survives a rescaling of its weights "
        "has no finite value here: κ sum.",
        "No measure is defined here: the notes say why.",
    ]
    found = report(kappa_sum=value(2.0, 0.5, "lower bound"), hessian_trace=1.0)
    assert answer({"": found}, RECORDS)[0].endswith(
        "; of what survives a rescaling of its weights, only lower bounds are known: a κ sum of at least 2.0\u00a0±\u00a00.5."
    )
    assert answer({"": report(hessian_trace=1.0)}, RECORDS)[0].endswith(
        "which does not survive a rescaling of its weights."
    )
    assert answer({"": report(hessian_trace=1.0, hessian_spectral_norm=1.0)}, RECORDS)[0].endswith(
        ", none of which survives a rescaling of its weights."
    )


def test_values_that_do_not_exist_are_not_counted_as_reached() -> None:
    nothing = replace(value(math.nan), error_kind="none", exact=False)
    slow = replace(value(2.0, 0.5), converged=False)
    sentence = answer({"": report(kappa_sum=nothing, rho_sum=slow, hessian_trace=1.0)}, RECORDS)[-1]
    assert sentence == "1 of 2 values did not reach the tolerance: ρ sum."


def test_the_plain_measure_says_the_opposite() -> None:
    flat, sharp = report(kappa_sum=1.0, rho_sum=2.0, hessian_spectral_norm=9.0), report(
        kappa_sum=3.0, rho_sum=4.0, hessian_spectral_norm=5.0
    )  # fmt: skip
    expected = "By every invariant measure “A” is flatter than “B”; the plain Hessian norm says the opposite."
    assert answer({"A": flat, "B": sharp}, RECORDS)[0] == expected
    assert answer({"B": sharp, "A": flat}, RECORDS)[0] == expected


def test_the_measures_disagree() -> None:
    first, second = report(kappa_sum=1.0, rho_sum=4.0, fisher_rao_norm=4.0), report(
        kappa_sum=3.0, rho_sum=2.0, fisher_rao_norm=2.0
    )  # fmt: skip
    assert answer({"A": first, "B": second}, RECORDS)[:2] == [
        "The invariant measures disagree: “B” is flatter by 2 of 3, “A” by 1.",
        "“A” is the flatter one by κ sum.",
    ]


def test_what_a_search_found_is_a_lower_bound_and_does_not_vote() -> None:
    first, second = (
        report(kappa_sum=number, rho_sum=value(1 / number, 1e-9, "lower bound", "rho_sum")) for number in (1.0, 2.0)
    )
    assert answer({"A": first, "B": second}, RECORDS)[0] == "By the one invariant measure “A” is flatter than “B”."


def test_a_difference_within_the_errors_is_no_difference() -> None:
    first, second = report(kappa_sum=value(1.0, 0.3)), report(kappa_sum=value(1.5, 0.3))
    assert "No invariant measure can tell “A” and “B” apart within its error." in said({"A": first, "B": second})
    mixed = report(kappa_sum=value(1.5, 0.3), rho_sum=2.0)
    assert "By 1 of 2 invariant measures “A” is flatter than “B” (the other one sees no difference" in said(
        {"A": report(kappa_sum=value(1.0, 0.3), rho_sum=1.0), "B": mixed}
    )


def test_without_invariant_measures_nothing_is_claimed() -> None:
    first, second = report(hessian_trace=1.0), report(hessian_trace=2.0)
    sentences = said({"A": first, "B": second})
    assert "nothing here says which minimum is flatter" in sentences
    assert "is flatter than" not in sentences


def test_several_models_are_ranked_only_if_all_measures_agree() -> None:
    agreeing = {name: report(kappa_sum=x, rho_sum=x) for name, x in (("C", 3.0), ("A", 1.0), ("B", 2.0))}
    assert said(agreeing).startswith("By every invariant measure the order from flattest to sharpest is “A”, “B”, “C”.")
    disagreeing = {**agreeing, "B": report(kappa_sum=0.5, rho_sum=2.0)}
    assert "disagree on the order; the flattest is “B” by 1 of 2 and “A” by 1 of 2." in said(disagreeing)
    tied = {**agreeing, "B": report(kappa_sum=value(2.9, 0.5), rho_sum=value(2.9, 0.5, name="rho_sum"))}
    assert "“A” is the flattest; they do not settle the order of the others." in said(tied)


def test_a_rescaled_neuron_is_a_twin_for_those_who_survive_it() -> None:
    first = report(rho_sum=1.0, kappa_sum=1.0, hessian_spectral_norm=2.0)
    second = report(rho_sum=1.0, kappa_sum=7.0, hessian_spectral_norm=8.0)
    assert answer({"A": first, "B": second}, RECORDS)[0] == (
        "“B” is the same as “A” by every measure that survives the rescaling of neurons, exactly; κ sum differs; "
        "its plain Hessian norm is 4.0 times larger."
    )


def test_one_report_states_values_loss_and_convergence() -> None:
    sentences = [said for said in answer({"": sample_report()}, RECORDS) if not said.startswith("For scale")]
    assert sentences == [
        "The network has a normalized sharpness of 7.6000 and a ρ sum of 7.8310, "
        "whatever the scale of its layers and neurons.",
        "Measured by 11 measures at a loss of 0.01234 over 1,797 samples.",
        "1 of 11 values did not reach the tolerance: epsilon sharpness.",
    ]
    good = only(sample_report(), "kappa_sum", "hessian_trace")
    assert (
        answer({"net": good}, RECORDS)[0]
        == "“net” has a κ sum of 88.000\u00a0±\u00a00.003, whatever the scale of its layers."
    )
    assert answer({"net": good}, RECORDS)[-1] == "Every value reached the tolerance asked for."
    plain = only(sample_report(), "hessian_trace")
    assert "which does not survive a rescaling" in answer({"net": plain}, RECORDS)[0]


def test_different_problems_are_pointed_out() -> None:
    other = replace(sample_report(scale=2.0), problem={"loss_function": "mse", "samples": 10})
    sentences = said({"A": sample_report(), "B": other})
    assert "different losses (cross_entropy, mse)" in sentences
    assert "different numbers of samples (1797, 10)" in sentences
    assert "different" not in said(demo_reports())


@pytest.mark.parametrize(
    ("first", "second", "outcome"),
    [
        (value(1.0), value(2.0), "first"),
        (value(2.0), value(1.0), "second"),
        (value(1.0), value(1.0005), "first"),
        (value(0.0), value(0.0), "undecided"),
        (value(-1.0), value(1.0), "first"),
        (value(1.0, 0.6), value(2.0, 0.6), "undecided"),
        (value(1.0, 0.4), value(2.0, 0.4), "first"),
        (value(1.0, 0.44, "standard error"), value(2.0, 0.44, "standard error"), "undecided"),  # 94.6 %
        (value(1.0, 0.42, "standard error"), value(2.0, 0.42, "standard error"), "first"),  # 95.4 %
        (value(1.0, float("nan")), value(2.0), "undecided"),
        (value(1.0, float("inf")), value(2.0), "undecided"),
        (value(float("inf")), value(2.0), None),
        (value(1.0), value(float("nan")), None),
        (value(1.0, name="volume_flatness"), value(2.0, name="volume_flatness"), "second"),
    ],
)
def test_comparison_of_two_values(first: Value, second: Value, outcome: str | None) -> None:
    assert compare(first, second) == outcome
