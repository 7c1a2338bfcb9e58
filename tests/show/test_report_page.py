"""The page: what it says, that it needs nothing from outside, and that names from users stay text."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import spiritlevel.show.page as page_module
from pages import HOSTILE, Outline
from report_samples import LAYERS, RECORDS, demo_reports, only, sample_report
from spiritlevel.measuring.registry import list_measures
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.run import measure
from spiritlevel.measuring.value import Value
from spiritlevel.show.citations import CITATIONS, citations
from spiritlevel.show.figures import convergence
from spiritlevel.show.numbers import Numbers, value_and_error
from spiritlevel.show.page import render_page, report_fragment, report_page
from spiritlevel.show.sections import Section
from spiritlevel.show.tables import render, report_table


def hostile_report() -> Report:
    """A report in which every name and note that can come from a user is hostile."""
    layers = {name: float(i + 1) for i, name in enumerate(HOSTILE)}
    neurons = {name: torch.tensor([0.0, 1.0, 2.0]) for name in HOSTILE}
    values = {
        name: Value(
            name,
            1.5,
            0.1,
            False,
            False,
            name,
            layers=layers,
            neurons=neurons,
            notes=HOSTILE,
            details={"history": [1.0, 2.0]},
        )
        for name in HOSTILE
    }
    values["rho_sum"] = replace(sample_report()["rho_sum"], layers=layers, neurons=neurons)
    base = sample_report()
    strange = {name: name for name in HOSTILE}
    return Report(values, 0.5, base.cost, strange, strange, notes=HOSTILE)


@pytest.fixture(scope="module")
def demo() -> str:
    return report_page(demo_reports(), records=RECORDS)


@pytest.fixture(scope="module")
def single() -> str:
    return report_page({"": sample_report()}, records=RECORDS)


def test_it_opens_with_the_answer(demo: str) -> None:
    answer = re.search(r'<p class="sl-answer">(.*?)</p>', demo)
    assert answer is not None
    assert (
        answer[1] == "By every invariant measure “small batch” is flatter than “large batch”; the plain measures agree."
    )
    assert demo.index("sl-answer") < demo.index('id="summary"') < demo.index('id="layers"') < demo.index('id="neurons"')
    assert demo.index('id="neurons"') < demo.index('id="cost"') < demo.index('id="cite"')
    assert "its plain Hessian norm is 10⁶ times larger" in demo


def test_the_summary_has_every_measure_with_value_error_certainty_and_badges(single: str) -> None:
    body = single[single.index("<tbody role") : single.index("</tbody>")]
    rows = {re.sub("<.*?>", "", row): row for row in body.split("<tr")[1:]}
    assert len(rows) == 11
    (kappa,) = [row for text, row in rows.items() if "kappa_sum" in text]
    for part in (
        "<strong>88.000</strong>",
        "± 0.003",
        "certified",
        "Σ_l ‖W_l‖² λ_max(H_l)",
        ">layer</span>",
        'title="unchanged',
    ):
        assert part in kappa
    assert ">neuron</span>" not in kappa
    (epsilon,) = [row for text, row in rows.items() if "epsilon_sharpness" in text]
    assert "not converged" in epsilon
    assert ">none</span>" in epsilon


def test_what_a_badge_means_can_be_read_without_hovering(single: str) -> None:
    meanings = single[single.index('sl-meanings">') :]
    for words in ("W₁ → αW₁", "row i of Wₗ", "f → αf", "exact up to rounding", "certified by its residual"):
        assert words in Outline(meanings).text


def test_every_picture_has_its_numbers_in_a_table(demo: str) -> None:
    figures = re.findall(r"<figure.*?</figure>", demo, re.S)
    assert len(figures) == len(re.findall("<svg", demo)) >= 9
    for figure in figures:
        assert "<title " in figure
        assert "<desc " in figure
        if "of every layer</figcaption>" not in figure:  # those of layers are in one table below all of them
            assert re.search("<details( open)?><summary>Numbers", figure)
            assert "<table" in figure
    assert demo.count("<h3>Every layer</h3>") == 1


def test_cost_environment_and_papers(demo: str) -> None:
    text = Outline(demo).text
    for words in (
        "curvature products",
        "84 MB",
        "2.13.0",
        "Sharp Minima Can Generalize",
        "arXiv:1912.00058",
        "@inproceedings{dinh2017",
    ):
        assert words in text
    assert "On Large-Batch Training" not in text


def test_it_needs_nothing_from_outside(demo: str, single: str) -> None:
    for html in (demo, single):
        assert len(html.encode()) < 2_000_000
        assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", html)
        outline = Outline(html)
        for tag, attributes in outline.elements:
            assert tag not in {"iframe", "object", "embed", "img", "base", "form"}
            for name in ("src", "href", "xlink:href"):
                assert (attributes.get(name) or "#").startswith(("#", "data:,"))
        assert len(outline.all("script")) == 1


def test_the_same_reports_give_the_same_bytes(demo: str) -> None:
    assert report_page(demo_reports(), records=RECORDS) == demo


def test_names_of_users_are_text() -> None:
    reports = {name: hostile_report() for name in HOSTILE[:2]}
    audit = Section(
        "audit", HOSTILE[0], HOSTILE, tables=((HOSTILE[1], Numbers(HOSTILE[:2], ((HOSTILE[0], HOSTILE[1]),))),)
    )
    for html in (
        report_page(reports, title=HOSTILE[1], audit=audit, records=RECORDS),
        report_page({HOSTILE[0]: hostile_report()}, records=RECORDS),
        report_fragment(hostile_report(), records=RECORDS),
    ):
        outline = Outline(html)
        tags = {tag for tag, _ in outline.elements}
        assert not tags & {"img", "b1", "i"}
        assert len(outline.all("script")) <= 1
        assert not any(name.startswith("on") for _, attributes in outline.elements for name in attributes)
        assert not any("alert" in (attributes.get("href") or "") for _, attributes in outline.elements)
        assert "<img src=x onerror=alert(1)>" in outline.text
        assert "{{ 7*7 }}" in outline.text
        assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", html)


def test_one_report_or_several_give_the_same_sections(demo: str, single: str) -> None:
    def anchors(html: str) -> list[str]:
        return re.findall(r'<section id="([a-z]+)"', html)

    assert anchors(demo) == ["summary", "layers", "neurons", "convergence", "cost", "made", "cite"]
    assert anchors(single) == ["summary", "scale", *anchors(demo)[1:]]  # one network beside well-known ones


def test_an_audit_stands_right_after_the_summary() -> None:
    drawing = convergence({"kappa_sum": [1.0, 1.0]}, title="Measures against the strength of rescaling")
    audit = Section(
        "audit", "Audit", ("Nothing moved.",), (drawing,), (("Verdicts", Numbers(("measure",), (("kappa_sum",),))),)
    )
    html = report_page({"A": sample_report()}, audit=audit, records=RECORDS)
    assert re.findall(r'<section id="([a-z]+)"', html)[:3] == ["summary", "audit", "scale"]
    assert "Nothing moved." in html
    assert "Measures against the strength of rescaling" in html
    assert '<a href="#audit">Audit</a>' in html


def test_a_lone_drawing_has_its_numbers_beside_it_and_two_neighbours_stand_side_by_side() -> None:
    drawing = convergence({"a": [1.0, 2.0]}, title="A")
    one, words = Section("one", "One", drawings=(drawing,)), Section("words", "Words", ("words",))
    table = Section("table", "Table", drawings=(drawing,), tables=(("T", Numbers(("a",), (("b",),))),))
    sections = [replace(one, key="p"), replace(one, key="q"), one, words, table]
    html = render_page(title="Study", answer=[], sections=sections)
    layouts = dict(re.findall(r'<section id="([a-z]+)"(?: class="([a-z-]+)")?', html))
    assert layouts == {"p": "sl-half", "q": "sl-half", "one": "sl-lone", "words": "", "table": "sl-lone", "made": ""}
    assert html.count("<details open>") == 2
    assert html.count("<details>") == 2


def test_a_page_can_be_made_of_sections_alone() -> None:
    html = render_page(title="Study", answer=["Yes."], sections=[Section("one", "One", ("words",))])
    assert '<p class="sl-answer">Yes.</p>' in html
    assert 'id="summary"' not in html
    assert 'id="one"' in html


def test_no_reports_no_page() -> None:
    with pytest.raises(ValueError, match=r"^a page needs at least one report; `reports` is empty$"):
        report_page({})


def test_a_report_without_records_layers_or_neurons_still_has_a_page() -> None:
    html = report_page({"x": only(sample_report(), "fisher_rao_norm")}, records={})
    assert "not known" in html
    assert 'id="layers"' not in html
    assert 'id="cite"' not in html


@pytest.mark.long
def test_a_deep_and_wide_network_stays_under_two_megabytes() -> None:
    layers = {f"blocks.{i}.attention.projection.weight": 1.0 + i for i in range(200)}
    neurons = {name: torch.rand(1000, generator=torch.Generator().manual_seed(1)) for name in layers}
    values = {
        name: replace(
            sample_report()["rho_sum"],
            name=name,
            layers={layer: scale * value for layer, value in layers.items()},
            neurons={layer: scale * values for layer, values in neurons.items()},
        )
        for scale, name in enumerate(RECORDS, start=1)
    }
    report = replace(sample_report(), values=values)
    page = report_page({"A": report, "B": report}, records=RECORDS)
    size = len(page.encode())
    assert size < 2_000_000
    assert "The first 10 of 11 charts" in page


def test_a_fragment_styles_nothing_but_itself() -> None:
    fragment = report_fragment(sample_report(), records=RECORDS)
    assert fragment.startswith('<div class="sl sl-fragment">')
    assert "<script" not in fragment
    assert "<html" not in fragment
    assert fragment.count("<style>") == 1
    style = fragment[fragment.index("<style>") + 7 : fragment.index("</style>")]
    selectors = re.sub(r"\{[^{}]*\}", ";", re.sub(r"@media[^{]*\{(.*?\})\s*\}", r"\1", style, flags=re.S)).split(";")
    for selector in (part.strip() for group in selectors for part in group.split(",") if part.strip()):
        assert re.match(
            r"(\.sl[ -]|\.sl$|html\.sl|body\S* \.sl-fragment|html\[theme=\"dark\"\] \.sl-fragment)", selector
        ), selector
    for name in (*LAYERS, "kappa_sum", "<svg"):
        assert name in fragment


def test_headings_descend_one_by_one_and_ids_are_unique(demo: str) -> None:
    outline = Outline(demo)
    levels = [int(tag[1]) for tag, _ in outline.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_parts_of_the_page_are_installed_with_the_package() -> None:
    folder = Path(page_module.__file__).parent
    for name in ("page.html.jinja", "page.css", "shared.css", "page.js"):
        assert (folder / name).is_file()


def test_citations_are_listed_once_and_unknown_papers_left_out() -> None:
    assert [entry.key for entry in citations(["dinh2017", "nobody1900", "dinh2017", "liang2019"])] == [
        "dinh2017",
        "liang2019",
    ]
    assert CITATIONS["dinh2017"].short == "Dinh et al. 2017"
    assert CITATIONS["dinh2017"].text.startswith("Laurent Dinh, Razvan Pascanu, Samy Bengio and Yoshua Bengio: Sharp")
    assert (
        "author = {Dinh, Laurent and Pascanu, Razvan and Bengio, Samy and Bengio, Yoshua}"
        in CITATIONS["dinh2017"].bibtex
    )


def test_a_report_shows_itself(tmp_path: Path) -> None:
    report = sample_report()
    report.to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert report._repr_html_().startswith('<div class="sl')
    assert "kappa_sum" in str(report)


def test_every_measure_of_the_library_has_a_paper_to_cite() -> None:
    assert {record.paper for record in list_measures()} <= set(CITATIONS)


def test_a_measured_network_from_end_to_end() -> None:
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    report = measure(model, (x, torch.arange(20) % 2), "cross_entropy", measures="all")
    html, table = report_page({"tiny": report}), render(report_table(report), 120)
    for name, value in report.values.items():
        assert name in table
        assert f'data-sort="{name}"' in html
        assert value_and_error(value.value, value.error)[0] in html
    assert "over 20 samples" in html
