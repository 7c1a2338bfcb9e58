"""The page in a browser: quiet, sortable, narrow, accessible, and deaf to hostile names.

What it needs is told in `pages.py`.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from test_report_figures import contrast
from test_report_page import hostile_report

from pages import HOSTILE, requests, started_browser, visit  # noqa: F401
from report_samples import RECORDS, demo_reports, sample_report
from spiritlevel.show.page import report_fragment, report_page

PAGES = ("demo", "single", "hostile", "fragment")
KEYS = {"enter": "\ue007", "space": "\ue00d"}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name → address of every page under test."""
    folder: Path = tmp_path_factory.mktemp("pages")
    names = ("long " * 30, HOSTILE[0])
    sources = {
        "demo": report_page(demo_reports(), records=RECORDS),
        "single": report_page({"": sample_report()}, records=RECORDS),
        "hostile": report_page({name: hostile_report() for name in names}, title="x" * 400, records=RECORDS),
        "fragment": "<!DOCTYPE html><html lang=en><title>Notebook</title><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'><link rel=icon href=data:,>"
        f"<main><h1>Notebook</h1>{report_fragment(sample_report(), records=RECORDS)}</main></html>",
    }
    for name, source in sources.items():
        (folder / f"{name}.html").write_text(source, encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in sources}


def column(browser: Any, index: int) -> list[str]:
    script = (
        "return [...document.querySelectorAll('.sl-summary tbody tr')].map(row => row.cells[arguments[0]].dataset.sort)"
    )
    return list(browser.execute_script(script, index))


@pytest.mark.parametrize("name", PAGES)
def test_no_errors_and_no_requests(browser: Any, pages: dict[str, str], name: str) -> None:
    visit(browser, pages[name])
    for button in browser.find_elements("css selector", "thead button, #theme"):
        browser.execute_script("arguments[0].click()", button)
    browser.execute_script("dispatchEvent(new Event('beforeprint')); dispatchEvent(new Event('afterprint'))")
    assert browser.get_log("browser") == []
    assert requests(browser) == []


def test_a_page_that_asks_or_complains_would_be_noticed(browser: Any, tmp_path: Path) -> None:
    loud = tmp_path / "loud.html"
    loud.write_text("<script src='https://example.org/x.js'></script><script>undefinedFunction()</script>")
    visit(browser, loud.as_uri())
    assert len(browser.get_log("browser")) >= 1
    assert requests(browser) == ["https://example.org/x.js"]


def test_tables_sort_by_click(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["demo"])
    before = column(browser, 1)
    header = browser.find_elements("css selector", ".sl-summary thead th")[1]
    header.find_element("css selector", "button").click()
    ascending = [float(entry) for entry in column(browser, 1)]
    assert ascending == sorted(map(float, before))
    assert header.get_attribute("aria-sort") == "ascending"
    header.find_element("css selector", "button").click()
    assert [float(entry) for entry in column(browser, 1)] == ascending[::-1]
    assert header.get_attribute("aria-sort") == "descending"
    assert len(browser.find_elements("css selector", ".sl-summary [aria-sort]")) == 1


@pytest.mark.parametrize("key", sorted(KEYS))
def test_tables_sort_by_keyboard(browser: Any, pages: dict[str, str], key: str) -> None:
    visit(browser, pages["demo"])
    names = column(browser, 0)
    browser.execute_script("document.querySelector('#kind').focus()")
    browser.switch_to.active_element.send_keys("\ue004")
    focused = browser.switch_to.active_element
    assert focused.tag_name == "button"
    assert focused.text.startswith("Measure")
    focused.send_keys(KEYS[key])
    assert column(browser, 0) == sorted(names) != names


def test_the_numbers_of_a_picture_sort_too(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["demo"])
    browser.find_element("css selector", "#neurons details summary").click()
    table = browser.find_element("css selector", "#neurons details[open] table")
    table.find_elements("css selector", "thead button")[1].click()
    script = "return [...arguments[0].tBodies[0].rows].map(row => Number(row.cells[1].dataset.sort))"
    numbers = browser.execute_script(script, table)
    assert numbers == sorted(numbers)
    assert len(numbers) == 3


def test_layers_have_one_table_that_sorts(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["single"])
    (table,) = browser.find_elements("css selector", "#layers table")
    table.find_elements("css selector", "thead button")[2].click()
    shown = "return [...arguments[0].tBodies[0].rows].filter(row => !row.hidden).map(row => Number(row.cells[2].dataset.sort))"
    numbers = browser.execute_script(shown, table)
    assert numbers == sorted(numbers)
    assert len(numbers) >= 3
    assert not browser.find_elements("css selector", "#layers details")


def test_measures_can_be_filtered(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["demo"])
    shown = "return [...document.querySelectorAll('.sl-summary tbody tr')].filter(r => r.offsetHeight).length"
    assert browser.execute_script(shown) == 11
    browser.find_element("css selector", "#filter").send_keys("KAPPA")
    assert browser.execute_script(shown) == 2
    assert browser.find_element("css selector", "#count").text == "2 of 11 shown"
    browser.find_element("css selector", "#filter").clear()
    browser.find_element("css selector", "#kind").send_keys("plain")
    assert browser.execute_script(shown) == 4


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [320, 375, 768, 1280])
def test_nothing_scrolls_sideways(browser: Any, pages: dict[str, str], name: str, width: int) -> None:
    visit(browser, pages[name], width)
    browser.execute_script("document.querySelectorAll('details').forEach(details => { details.open = true })")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script("return innerWidth") == width


def test_on_a_desk_no_table_is_cut_off_and_a_lone_drawing_uses_the_width(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["demo"])
    cut = "return [...document.querySelectorAll('.sl-tables .sl-scroll')].filter(t => t.scrollWidth > t.clientWidth).length"
    assert browser.execute_script(cut) == 0
    shares = browser.execute_script(
        "return [...document.querySelectorAll('.sl-lone')].map("
        "s => s.querySelector('details').getBoundingClientRect().right / document.querySelector('main').clientWidth)"
    )
    assert shares
    assert min(shares) > 0.9


@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_labels_of_pictures_are_large_enough_to_read(
    browser: Any, pages: dict[str, str], name: str, width: int
) -> None:
    visit(browser, pages[name], width)
    heights = browser.execute_script(
        "return [...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height)"
    )
    assert min(heights) >= 8


def test_hostile_names_are_inert(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["hostile"])
    foreign = "return document.querySelectorAll('img, iframe, script:not(:last-of-type), [onload], [onerror]').length"
    assert browser.execute_script(foreign) == 0
    assert "<img src=x onerror=alert(1)>" in browser.find_element("css selector", ".sl-summary").text
    assert browser.execute_script("return document.querySelectorAll('body > script').length") == 1


def background(browser: Any) -> str:
    return str(browser.execute_script("return getComputedStyle(document.documentElement).backgroundColor"))


def test_light_dark_toggle_and_paper(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["demo"], scheme="light")
    light = background(browser)
    marker = "return getComputedStyle(document.querySelector('#layers svg use[style*=\"--sl-0\"]')).fill"
    light_marker = browser.execute_script(marker)
    browser.find_element("css selector", "#theme").click()
    dark = background(browser)
    assert light == "rgb(255, 255, 255)" != dark
    assert browser.execute_script(marker) != light_marker
    visit(browser, pages["demo"], scheme="dark")
    assert background(browser) == dark
    assert browser.find_element("css selector", "#theme").text == "Light theme"
    browser.find_element("css selector", "#theme").click()
    assert background(browser) == light
    browser.execute_script("document.documentElement.dataset.theme = 'dark'")
    assert background(browser) == dark
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert background(browser) == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_ink_of_pictures_has_the_contrast_of_text(browser: Any, pages: dict[str, str], scheme: str) -> None:
    visit(browser, pages["demo"], scheme=scheme)
    inks = browser.execute_script(
        "return [...new Set([...document.querySelectorAll('svg text')].map(text => getComputedStyle(text).fill))]"
    )
    ground = background(browser)
    assert len(inks) == 1
    assert contrast(hexed(inks[0]), hexed(ground)) >= 4.5


def hexed(colour: str) -> str:
    """`rgb(1, 2, 3)` as `#010203`."""
    return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", colour)[:3])


def test_paper_shows_the_numbers(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["demo"])
    closed = "return document.querySelectorAll('main details:not([open])').length"
    count = browser.execute_script(closed)
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script(closed) == 0
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script(closed) == count > 0


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        ("demo", 375, "light"),
        pytest.param("demo", 1280, "dark", marks=pytest.mark.long),
        pytest.param("hostile", 375, "dark", marks=pytest.mark.long),
        ("fragment", 1280, "light"),
    ],
)
def test_axe_finds_nothing(browser: Any, pages: dict[str, str], name: str, width: int, scheme: str) -> None:
    visit(browser, pages[name], width, scheme)
    browser.execute_script("document.querySelectorAll('details').forEach(details => { details.open = true })")
    browser.execute_script((resources.files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8"))
    found = browser.execute_async_script("axe.run(document).then(arguments[arguments.length - 1])")
    told = [(entry["id"], [node["html"][:200] for node in entry["nodes"][:3]]) for entry in found["violations"]]
    assert told == []
    assert {"color-contrast", "heading-order", "svg-img-alt", "label"} <= {entry["id"] for entry in found["passes"]} | {
        entry["id"] for entry in found["inapplicable"]
    }
