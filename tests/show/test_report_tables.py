"""Tables for the terminal: they fit the width, and they say what the report says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.cells import cell_len

from report_samples import LAYERS, RECORDS, demo_reports, only, sample_report
from spiritlevel.measuring.registry import list_measures
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.value import Cost, Value
from spiritlevel.show.numbers import significant, value_and_error
from spiritlevel.show.tables import comparison_table, measures_table, render, report_table, sparkline

WIDTHS = (60, 80, 120)
HOSTILE = "[bold red]x[/] \x1b[31mred\x1b[0m\r\n</script>"


def fits(text: str, width: int) -> bool:
    return all(cell_len(line) <= width for line in text.splitlines())


def joined(text: str) -> str:
    """The text with the breaks within names undone."""
    return "".join(text.split())


@pytest.mark.parametrize("width", WIDTHS)
def test_a_report_fits_and_names_every_measure_with_its_value(width: int) -> None:
    report = sample_report()
    text = render(report_table(report, RECORDS), width)
    assert fits(text, width)
    assert "…" not in text
    for value in report.values.values():
        number, error = value_and_error(value.value, value.error)
        assert number in text
        assert error in text
    for word in (
        "exact",
        "certified",
        "estimated",
        "✗",
        "LN····",
        "L·····",
        "······",
        "█",
        "loss 0.01234",
        "1,797 samples",
    ):
        assert word in text
    assert "volume_flatness: infinite: the network can be rescaled" in " ".join(text.split())


@pytest.mark.parametrize("width", [80, 120])
def test_wide_enough_a_measure_takes_one_line(width: int) -> None:
    text = render(report_table(sample_report(), RECORDS), width)
    (line,) = [line for line in text.splitlines() if line.startswith("kappa_sum")]
    assert line.split() == ["kappa_sum", "88.000", "0.003", "certified", "L·····", "▁█▄"]


@pytest.mark.parametrize("width", WIDTHS)
def test_models_stand_side_by_side_invariant_measures_first(width: int) -> None:
    text = render(comparison_table(demo_reports(), RECORDS), width)
    assert fits(text, width)
    assert "…" not in text
    (header,) = [line for line in text.splitlines() if line.startswith("measure")]
    assert header.split() == ["measure", "small", "batch", "large", "batch", "twin"]
    assert text.index("invariant") < text.index("rho_sum") < text.index("plain") < text.index("hessian_trace")
    (line,) = [line for line in text.splitlines() if line.startswith("hessian_trace")]
    assert line.split() == ["hessian_trace", "50.40", "144.2", "3.120×10⁷"]


def test_more_models_than_fit_go_below_each_other() -> None:
    reports = {f"model {i}": sample_report(scale=i) for i in range(1, 10)}
    text = render(comparison_table(reports, RECORDS), 60)
    assert fits(text, 60)
    assert all(name in text for name in reports)
    assert text.count("measure ") == 3


def test_a_measure_that_one_model_lacks_is_a_dash() -> None:
    reports = {"A": sample_report(), "B": only(sample_report(), "rho_sum")}
    text = render(comparison_table(reports, RECORDS), 80)
    (line,) = [line for line in text.splitlines() if line.startswith("kappa_trace_sum")]
    assert line.split() == ["kappa_trace_sum", "688.0", "–"]


def test_a_note_is_told_once_with_the_models_it_belongs_to() -> None:
    noted = replace(sample_report()["rho_sum"], notes=("a layer was skipped",))
    some = replace(sample_report(), values={**sample_report().values, "rho_sum": noted})
    text = " ".join(render(comparison_table({"A": some, "B": sample_report()}, RECORDS), 80).split())
    assert "rho_sum (A): a layer was skipped" in text
    assert text.count("2 dead neurons add exactly 0") == 1


@pytest.mark.parametrize("width", WIDTHS)
def test_the_measures_with_formulas_invariances_and_papers(width: int) -> None:
    text = render(measures_table(RECORDS), width)
    assert fits(text, width)
    for record in RECORDS.values():
        assert record.name in text
        assert joined(record.formula) in joined(text)
        assert joined(record.summary) in joined(text)
    assert "Petzka et al. 2019" in text
    (line,) = [line for line in text.splitlines() if line.strip().startswith("rho_sum")]
    assert line.split() == ["rho_sum", "LN····"]


def test_the_measures_of_the_library_by_default() -> None:
    text = render(measures_table(), 80)
    assert fits(text, 80)
    assert all(record.name in text for record in list_measures())


def test_names_are_text_and_never_markup_or_terminal_codes() -> None:
    value = Value(HOSTILE, 1.0, 0.0, True, True, HOSTILE, layers={HOSTILE: 1.0}, notes=(HOSTILE,))
    report = Report({HOSTILE: value}, 0.1, Cost(), {}, {}, notes=(HOSTILE,))
    for table in (report_table(report, RECORDS), comparison_table({HOSTILE: report}, RECORDS)):
        text = render(table, 120)
        assert "\x1b" not in text
        assert "\r" not in text
        assert "[bold red]x[/]" in text


def test_what_is_not_available_says_so() -> None:
    value = Value("volume_flatness", float("nan"), 0.0, False, False, "none", notes=("no rescaling symmetry",))
    report = Report({"volume_flatness": value}, 0.1, Cost(), {}, {})
    for width in WIDTHS:
        text = render(report_table(report, RECORDS), width)
        assert "n/a" in text
        assert "no rescaling symmetry" in text
        assert "✗" not in text


def test_a_measure_without_a_record_claims_nothing() -> None:
    report = only(sample_report(), "rho_sum")
    (line,) = [line for line in render(report_table(report, {}), 80).splitlines() if line.startswith("rho_sum")]
    assert "?" in line.split()


def test_the_loss_that_sees_no_output_scale_adds_the_third_invariance() -> None:
    report = only(sample_report(), "rho_sum")
    normalized = replace(report, problem={"loss_function": "normalized_cross_entropy"})
    assert "LN···O" in render(report_table(normalized, RECORDS), 80)
    assert "LN···O" not in render(report_table(report, RECORDS), 80)


def test_a_sparkline_follows_the_logarithm_and_keeps_peaks() -> None:
    assert sparkline([1.0, 10.0, 100.0, 1000.0]) == "▁▃▆█"
    assert sparkline([2.0, 2.0, 2.0]) == "▅▅▅"
    assert sparkline([0.0, -1.0, float("inf"), 1.0]) == "·––▅"
    long = [1.0] * 100
    long[50] = 1e6
    assert sparkline(long, 10) == "▁▁▁▁▁█▁▁▁▁"
    assert sparkline([]) == ""


def test_no_report_is_too_small() -> None:
    assert "0 measures" in render(report_table(Report({}, 0.5, Cost(), {}, {}), RECORDS), 60)
    assert len(LAYERS) == 3


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [
        (1.0, 1e-14, ("1.0000", "1.0×10⁻¹⁴")),
        (0.3, 0.5, ("0.3", "0.5")),
        (999.96, 0.04, ("999.96", "0.04")),
        (-2.34567, 0.1, ("−2.35", "0.10")),
        (float("inf"), 0.0, ("∞", "")),
        (float("nan"), 0.0, ("–", "")),
        (5.0, float("inf"), ("5.0", "unknown")),
        (0.0, 0.02, ("0", "0.02")),
        (1e-30, 1e-32, ("1.000×10⁻³⁰", "1.0×10⁻³²")),
    ],
)
def test_digits_follow_the_error(value: float, error: float, shown: tuple[str, str]) -> None:
    assert value_and_error(value, error) == shown


@pytest.mark.parametrize("exponent", range(-12, 13))
def test_a_shown_number_is_the_number(exponent: int) -> None:
    value = 1.23456789 * 10.0**exponent
    text = significant(value).translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")).replace("×10", "e")
    assert float(text) == pytest.approx(value, rel=5e-5)
