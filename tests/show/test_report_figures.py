"""Figures: the numbers drawn are the numbers given, the bytes are stable, the picture can be read without seeing it."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from report_samples import LAYERS, RECORDS, demo_reports, neurons, sample_report
from spiritlevel.show.drawing import Drawing, palette
from spiritlevel.show.figures import convergence, layer_profile, neuron_distribution
from spiritlevel.show.ratios import ratio_comparison
from spiritlevel.show.scales import LogScale, tick_text
from spiritlevel.show.sections import comparison_drawing, layer_section, neuron_section

HOSTILE = "<img src=x onerror=alert(1)>$\\frac{1}{0}$ & \x00 \U0001f600 ]]> --> </svg>"


def profile(**fields: object) -> Drawing:
    series = {
        "A": dict(zip(LAYERS, (1.0, 20.0, 300.0), strict=True)),
        "B": dict(zip(LAYERS, (2.0, 0.0, -3.0), strict=True)),
    }
    return layer_profile(series, title="Profile", errors={"A": {"2.weight": 4.0}}, **fields)  # type: ignore[arg-type]


def every_kind() -> dict[str, Drawing]:
    groups = {"invariant": {"kappa_sum": {"A": (1.0, 0.0), "B": (1.0, 1e-3)}}, "plain": {"trace": {"B": (1e6, 10.0)}}}
    return {
        "profile": profile(),
        "neurons": neuron_distribution(neurons(1.0), title="Neurons"),
        "ratios": ratio_comparison(groups, title="Ratios", reference="A"),
        "convergence": convergence({"A": [1.0, 2.0, 2.5, 2.6], "B": [5.0, 4.0]}, title="Convergence"),
    }


@pytest.fixture(scope="module")
def drawings() -> dict[str, Drawing]:
    return every_kind()


@pytest.fixture(scope="module")
def sources(drawings: dict[str, Drawing]) -> dict[str, str]:
    return {name: drawing.svg() for name, drawing in drawings.items()}


def test_the_same_input_gives_the_same_bytes(drawings: dict[str, Drawing], sources: dict[str, str]) -> None:
    assert {name: drawing.svg() for name, drawing in every_kind().items()} == sources
    assert {name: drawing.svg() for name, drawing in drawings.items()} == sources


def test_a_picture_has_title_description_and_role(drawings: dict[str, Drawing], sources: dict[str, str]) -> None:
    for name, source in sources.items():
        root = ElementTree.fromstring(source)
        title, description = root.find("title"), root.find("desc")
        assert title is not None
        assert description is not None
        assert root.get("role") == "img"
        assert title.text == drawings[name].title
        assert description.text == drawings[name].description
        assert root.get("aria-labelledby") == title.get("id")
        assert root.get("aria-describedby") == description.get("id")


def test_colours_are_the_pages_and_ink_is_the_texts(sources: dict[str, str]) -> None:
    known = {colour for pair in palette() for colour in pair}
    for source in sources.values():
        assert set(re.findall(r"#[0-9a-f]{6}\b", source)) <= known
        assert "currentColor" in source
        assert "var(--sl-" in source
        assert not re.search(r"date|creator|http|@import|<image|<style|<!|DejaVu", source)


def test_series_differ_in_more_than_colour() -> None:
    axes = profile().figure.axes[0]
    lines = [line for line in axes.lines if not line.get_label().startswith("_")]
    assert len(lines) == 2
    assert len({line.get_marker() for line in lines}) == 2
    assert len({str(line.get_linestyle()) for line in lines}) == 2


def contrast(first: str, second: str) -> float:
    def luminance(colour: str) -> float:
        parts = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in to_rgb(colour)]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_every_series_stands_out_on_its_ground() -> None:
    for light, dark in palette():
        assert contrast(light, "#ffffff") >= 3
        assert contrast(dark, "#15171b") >= 3


def test_layers_drawn_are_layers_given() -> None:
    drawing = profile()
    assert drawing.table.columns == ("layer", "A", "B")
    assert drawing.table.rows == (("0.weight", 1.0, 2.0), ("2.weight", 20.0, 0.0), ("4.weight", 300.0, -3.0))
    first, second, crosses = _labelled(drawing, "A"), _labelled(drawing, "B"), drawing.figure.axes[0].lines[-1]
    assert list(first.get_ydata()) == [1.0, 20.0, 300.0]
    floor = second.get_ydata()[1]
    assert 0 < floor < 1.0
    assert list(second.get_ydata()) == [2.0, floor, floor]
    assert list(crosses.get_xdata()) == [1, 2]
    assert "≤ 0" in drawing.svg()


def _labelled(drawing: Drawing, label: str):  # type: ignore[no-untyped-def]
    return next(line for line in drawing.figure.axes[0].lines if line.get_label() == label)


def test_a_layer_that_a_series_lacks_is_left_out_of_it() -> None:
    drawing = layer_profile({"A": {"x": 1.0, "y": 2.0}, "B": {"y": 3.0}}, title="t")
    assert list(_labelled(drawing, "B").get_xdata()) == [1]
    assert math.isnan(float(drawing.table.rows[0][2]))


def test_many_layers_are_numbered_and_named_in_the_table() -> None:
    deep = {f"features.{i}.block.conv.weight": 2.0**i for i in range(40)}
    drawing = layer_profile({"A": deep}, title="deep")
    source = drawing.svg()
    assert "names in the table" in source
    assert "features.3.block" not in source
    assert [row[0] for row in drawing.table.rows] == list(deep)


def test_dead_neurons_are_counted_and_marked() -> None:
    values = torch.tensor([0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, -1.0], dtype=torch.float64)
    drawing = neuron_distribution({"fc": values, "all dead": torch.zeros(4)}, title="n")
    assert drawing.table.rows[0] == ("fc", 8, 2, 1, 1.0, 2.0, 3.0, 4.0, 5.0)
    assert drawing.table.rows[1][:4] == ("all dead", 4, 4, 0)
    source = drawing.svg()
    assert "2 dead, 1 below 0" in source
    assert "4 dead" in source
    assert "6 of 12 neurons are dead" in drawing.description


def test_a_large_layer_keeps_the_picture_small_and_its_extremes() -> None:
    values = torch.logspace(-9, 3, 50_000, dtype=torch.float64)
    drawing = neuron_distribution({"wide": values}, title="n")
    assert len(drawing.svg()) < 60_000
    dots = drawing.figure.axes[0].lines[0].get_ydata()
    assert len(dots) == 80
    assert max(dots) == float(values[-1])
    # Twelve decades do not fit: what is smaller stands at the lower edge, and the description says how many.
    edge = min(dots)
    assert 1e-6 < edge <= 1.1e-5 < 1e3
    assert f"{int((values < 1e-5).sum())} are smaller than the scale" in drawing.description
    assert drawing.table.rows[0][4] == pytest.approx(1e-9)


def test_ratios_are_relative_to_the_first_model() -> None:
    drawing = comparison_drawing(demo_reports(), RECORDS)
    assert drawing is not None
    rows = {(row[1], row[2]): row for row in drawing.table.rows}
    assert rows["rho_sum", "twin"][3] == pytest.approx(1.0, rel=1e-8)
    assert rows["hessian_spectral_norm", "twin"][3] == pytest.approx(1e6)
    assert rows["hessian_spectral_norm", "twin"][0] == "plain"
    assert rows["kappa_sum", "large batch"][0] == "invariant"
    assert not any(row[1] == "volume_flatness" or row[2] == "small batch" for row in drawing.table.rows)
    assert comparison_drawing({"only": sample_report()}, RECORDS) is None


def test_a_ratio_of_a_million_leaves_the_others_readable() -> None:
    groups = {
        "invariant": {"a": {"A": (1.0, 0.0), "B": (1.5, 0.0), "C": (0.8, 0.1)}},
        "plain": {"b": {"B": (1e6, 1.0)}},
    }
    axes = ratio_comparison(groups, title="Ratios", reference="A").figure.axes[0]
    low, high = axes.get_xlim()
    assert math.log(1.5 / 0.8) > 0.3 * math.log(high / low)  # a third of the width for what is worth comparing
    (far,) = [line for line in axes.lines if line.get_marker() == "s" and line.get_ydata()[0] == 3]
    assert 1.5 < far.get_xdata()[0] < high
    assert "10⁶" in [text.get_text() for text in axes.texts]
    assert all("10⁶" not in text.get_text() for text in axes.get_xticklabels())
    # A scale without anything small to read is not broken.
    plain = {"plain": {"b": {"B": (1e6, 1.0)}, "c": {"B": (1e3, 1.0)}}}
    assert ratio_comparison(plain, title="Ratios", reference="A").figure.axes[0].get_xlim()[1] > 1e6


def test_a_ratio_carries_the_errors_of_both() -> None:
    drawing = comparison_drawing(demo_reports(), RECORDS)
    assert drawing is not None
    reports = demo_reports()
    a, b = reports["small batch"]["kappa_sum"], reports["large batch"]["kappa_sum"]
    (row,) = [row for row in drawing.table.rows if row[1:3] == ("kappa_sum", "large batch")]
    worst = (b.value + b.error) / (a.value - a.error) - b.value / a.value
    assert row[4] == pytest.approx(worst, rel=1e-3)


def test_convergence_draws_every_estimate() -> None:
    drawing = convergence({"A": [1.0, 20.0, 25.0], "B": [5.0]}, title="c")
    assert drawing.table.rows[0] == (1, 1.0, 5.0)
    assert drawing.table.rows[2][:2] == (3, 25.0)
    assert list(_labelled(drawing, "A").get_ydata()) == [1.0, 20.0, 25.0]
    assert drawing.figure.axes[0].get_yscale() == "log"
    assert convergence({"A": [1.0, -2.0]}, title="c").figure.axes[0].get_yscale() == "linear"


def test_names_from_outside_are_text() -> None:
    drawing = layer_profile({HOSTILE: {HOSTILE: 1.0, "b": 2.0}, "B": {"b": 1.0}}, title=HOSTILE, label=HOSTILE)
    for picture in (drawing, neuron_distribution({HOSTILE: torch.ones(3)}, title=HOSTILE, label=HOSTILE)):
        source = picture.svg()
        root = ElementTree.fromstring(source)
        assert {element.tag for element in root.iter()} <= {
            "svg", "title", "desc", "defs", "g", "path", "use", "text", "tspan", "clipPath", "rect",
        }  # fmt: skip
        assert "<img" not in source
        assert "\x00" not in source


def test_a_caller_may_bring_the_axes_and_global_state_is_left_alone() -> None:
    before = dict(matplotlib.rcParams)
    figure = Figure()
    axes = figure.add_subplot()
    drawing = profile(axes=axes)
    assert drawing.figure is figure
    assert axes.get_yscale() == "log"
    assert dict(matplotlib.rcParams) == before


def test_measures_with_the_same_layers_share_a_line() -> None:
    report = sample_report()
    doubled = {**report.values, "kappa_max": report["kappa_sum"]}
    section = layer_section({"": type(report)(doubled, report.loss, report.cost, report.problem, report.environment)})
    assert section is not None
    assert any("kappa_sum/max" in drawing.table.columns for drawing in section.drawings)
    ((_, table),) = section.tables
    assert table.columns[:2] == ("#", "layer")
    assert "kappa_sum/max" in table.columns
    assert [row[0] for row in table.rows] == [1, 2, 3]


def test_biases_have_no_place_along_the_depth() -> None:
    report = sample_report()
    trace = report["hessian_trace"]
    longer = type(trace)(**{**vars(trace), "layers": {**trace.layers, "0.bias": 1.0}})
    values = {**report.values, "hessian_trace": longer}
    section = layer_section({"": type(report)(values, report.loss, report.cost, report.problem, report.environment)})
    assert section is not None
    assert [row[0] for row in section.drawings[0].table.rows] == list(LAYERS)


def test_models_share_the_scale_of_their_neurons() -> None:
    section = neuron_section(demo_reports())
    assert section is not None
    assert len({drawing.figure.axes[0].get_ylim() for drawing in section.drawings}) == 1


def test_nothing_to_draw_is_no_section() -> None:
    report = sample_report()
    bare = type(report)({"fisher_rao_norm": report["fisher_rao_norm"]}, 0.1, report.cost, {}, {})
    assert layer_section({"": bare}) is None
    assert neuron_section({"": bare}) is None


def test_dollars_in_names_are_not_formulas() -> None:
    drawing = layer_profile({"$x^2$": {"$a^$": 1.0, "b": 2.0}, "B": {"b": 1.0}}, title="$t$")
    texts = [element.text for element in ElementTree.fromstring(drawing.svg()).iter("text")]
    assert "$a^$" in texts
    assert "$x^2$" in texts


def test_ticks_of_a_logarithmic_axis_say_where_they_stand() -> None:
    assert LogScale.of([8000.0, 41000.0]).ticks()[:2] == [10000.0, 15000.0]
    mixed = [tick_text(tick, powers=False) for tick in (10000.0, 15000.0, 20000.0, 1.2e-4, 1e6, 2e6)]
    assert mixed == ["10000", "15000", "20000", "1.2×10⁻⁴", "10⁶", "2×10⁶"]
    assert [tick_text(tick, powers=True) for tick in (1e-4, 1e-2, 1.0, 1e4)] == ["10⁻⁴", "0.01", "1", "10⁴"]
