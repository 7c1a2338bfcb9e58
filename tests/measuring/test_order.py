"""Is A larger than B? One rule, and the same answer from all who ask it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import spiritlevel as sl
from report_samples import RECORDS, sample_report
from spiritlevel.audit.audit import _judge
from spiritlevel.audit.findings import Trial
from spiritlevel.compare.compare import Comparison
from spiritlevel.measuring.order import Sampling, margin, order, probability_below
from spiritlevel.measuring.value import ErrorKind, Value
from spiritlevel.show.answer import answer, compare, verdict


def value(number: float, error: float = 0.0, kind: ErrorKind = "exact") -> Value:
    return Value("kappa_sum", number, error, kind == "exact", True, "by hand", error_kind=kind)


def report(value: Value) -> sl.Report:
    return replace(sample_report(), values={value.name: value})


# (A, B, 1 where A is larger, −1 where B is, 0 where it is not decided); all in double precision
CASES = [
    (value(1.0), value(1.125), -1),
    (value(1.125), value(1.0), 1),
    (value(1.0), value(1.0), 0),
    (value(0.0), value(0.0), 0),
    (value(-1.0), value(1.0), -1),
    (value(1.0), value(1.0005), -1),  # a small difference is one
    (value(1.0), value(1.0 + 1e-8), 0),  # but for what rounding may do
    (value(1.0, 0.05), value(1.125, 0.05), -1),
    (value(1.0, 0.08), value(1.125, 0.05), 0),
    (value(1.0, 0.05, "bound"), value(1.125, 0.05, "bound"), -1),
    (value(1.0, 0.06, "bound"), value(1.11, 0.06, "bound"), 0),  # they overlap, by little
    (value(1.0, 0.05, "standard error"), value(1.125, 0.05, "standard error"), -1),  # 1.77 standard errors
    (value(1.0, 0.05, "standard error"), value(1.11, 0.05, "standard error"), 0),  # 1.56
    (value(1.0, 0.05, "sampling"), value(1.125, 0.05, "standard error"), -1),
    (value(1.0, 0.05, "sampling"), value(1.11, 0.05, "sampling"), 0),
    (value(1.0, 0.05, "bound"), value(1.125, 0.05, "standard error"), 0),  # 0.05 + 1.645 · 0.05
    (value(1.0, 0.05, "bound"), value(1.14, 0.05, "standard error"), -1),
    (value(1.0, 1e-9, "lower bound"), value(5.0, 1e-9, "lower bound"), 0),
    (value(1.0, 1e-9, "lower bound"), value(5.0, 0.1, "bound"), 0),  # the maximum may be 6
    (value(5.0, 1e-9, "lower bound"), value(1.0, 0.1, "bound"), 1),  # and is at least 5
    (value(1.0, math.nan, "standard error"), value(2.0), 0),
    (value(1.0, math.inf, "standard error"), value(2.0), 0),
    (value(1.0, math.inf, "bound"), value(2.0), 0),
]


@pytest.mark.parametrize(("first", "second", "larger"), CASES)
def test_compare_the_answer_and_the_audit_say_the_same(first: Value, second: Value, larger: int) -> None:
    a, b = report(first), report(second)
    flatter = {1: "second", -1: "first", 0: "undecided"}[larger]
    assert order(first, second, rounding=1e-7) == larger
    assert order(second, first, rounding=1e-7) == -larger
    assert Comparison({"a": a, "b": b}).verdict("kappa_sum", "a", "b") == -larger
    assert compare(first, second, 1e-7) == flatter
    decided = verdict(a, b, ["kappa_sum"])
    assert [*decided.first, *decided.second, *decided.undecided] == list(getattr(decided, flatter))
    found = _judge(sl.get_measure("kappa_sum"), "layer", a, [Trial("layer", 1.0, 0, b)], 1e-3, claimed=True)
    assert (found.verdict == "moves") == (larger != 0)


@pytest.mark.parametrize(("first", "second", "larger"), CASES)
def test_what_is_decided_is_as_probable_as_its_level(first: Value, second: Value, larger: int) -> None:
    if larger and not (first.lower_bound or second.lower_bound):
        assert probability_below(*((first, second) if larger < 0 else (second, first)), rounding=1e-7) >= 0.95


@pytest.mark.parametrize("freedom", [None, 1, 9])
@pytest.mark.parametrize("level", [0.6, 0.9, 0.95, 0.977, 0.98, 0.999, 0.99999])
def test_the_margin_is_where_the_probability_reaches_the_level(level: float, freedom: int | None) -> None:
    sampling = None if freedom is None else Sampling(0.3, freedom)
    far = margin(value(0.0, 0.2, "standard error"), value(0.0), level=level, sampling=sampling)
    probability = probability_below(value(0.0, 0.2, "standard error"), value(far), sampling=sampling)
    assert probability == pytest.approx(level, abs=1e-9)


def test_tails_of_few_groups_are_counted() -> None:
    """Five standard errors from eight groups of probes: a normal would call a false order once in three million."""
    generator = torch.Generator().manual_seed(0)
    groups = torch.randn(200_000, 8, generator=generator, dtype=torch.float64)
    factor = 1.2111  # the widening of standard errors from eight groups
    z = groups.mean(1) / (factor * groups.std(1) / math.sqrt(8))
    for level in (0.95, 0.99, 0.999):
        needed = margin(value(0.0, 1.0, "standard error"), value(0.0), level=level)
        wrong = float((z > needed).double().mean())
        assert wrong <= 1.1 * (1 - level) + 1e-4, (level, wrong)


def test_an_audit_of_many_pairs_asks_more_of_each() -> None:
    base, other = report(value(1.0, 0.05, "standard error")), report(value(1.125, 0.05, "standard error"))
    kappa, trials = sl.get_measure("kappa_sum"), [Trial("layer", 1.0, 0, other)]
    assert _judge(kappa, "layer", base, trials, 1e-3, claimed=True).verdict == "moves"
    found = _judge(kappa, "layer", base, trials, 1e-3, claimed=True, level=1 - 0.05 / 100)
    assert found.verdict == "undecided"


def test_the_audit_says_that_lower_bounds_decide_nothing() -> None:
    base, other = (report(value(number, 1e-9, "lower bound")) for number in (1.0, 5.0))
    found = _judge(sl.get_measure("kappa_sum"), "layer", base, [Trial("layer", 1.0, 0, other)], 1e-3, claimed=True)
    assert (found.verdict, found.factor) == ("undecided", 5.0)
    assert found.reason == "the values are lower bounds found by ascent, which cannot say whether the maximum moved"


def test_an_unknown_error_does_not_show_that_nothing_moved() -> None:
    base = report(value(1.0, math.nan, "standard error"))
    found = _judge(sl.get_measure("kappa_sum"), "layer", base, [Trial("layer", 1.0, 0, base)], 1e-3, claimed=True)
    assert found.verdict == "undecided"


def test_small_differences_beyond_the_errors_are_an_order_and_those_within_make_a_twin() -> None:
    def two(kappa: float, rho: float) -> sl.Report:
        values = {"kappa_sum": value(kappa), "rho_sum": replace(value(rho), name="rho_sum")}
        return replace(sample_report(), values=values)

    said = answer({"A": two(1.0, 1.0), "B": two(1.0005, 2.0)}, RECORDS)
    assert said[0] == "By every invariant measure “A” is flatter than “B”."
    said = answer({"A": two(1.0, 1.0), "B": two(1 + 5e-8, 1 + 5e-8)}, RECORDS)
    assert said[0] == "“B” is the same as “A” by every invariant measure, to 5×10⁻⁸ relative."
