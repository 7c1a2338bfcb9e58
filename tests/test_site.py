"""What the site is built from: its pages, its gallery, its notebooks, and the check of its links. `make docs` builds it."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def build():
    sys.path.insert(0, str(ROOT / "docs/site"))
    pytest.importorskip("mkdocs")
    found = importlib.util.spec_from_file_location("site_build", ROOT / "docs/site/build.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    yield module
    sys.path.remove(str(ROOT / "docs/site"))


def test_every_page_of_the_navigation_exists():
    made = {"index.md", "api.md", "gallery.md", "notebooks.md", "CONTRIBUTING.md", "CHANGELOG.md", "README.md"}
    named = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]))
    assert named - made == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_links_that_lead_nowhere_and_things_of_others_are_found(build, tmp_path):
    (tmp_path / "there.html").write_text('<h2 id="part">Part</h2>')
    (tmp_path / "index.html").write_text(
        '<a href="there.html#part">fine</a><a href="there.html#gone">broken</a><a href="#nothing">broken</a>'
        '<a href="https://example.org">fine</a><a class="x" href="gone.html">broken</a>'
        '<img alt="" src="https://example.org/x.png"><link rel="stylesheet" href="https://example.org/x.css">'
    )
    assert build.broken_links(tmp_path) == [
        "index.html: there.html#gone leads nowhere",
        "index.html: #nothing leads nowhere",
        "index.html: gone.html leads nowhere",
        "index.html: https://example.org/x.png would be loaded from elsewhere",
        "index.html: a style sheet of https://example.org/x.css would be loaded from elsewhere",
    ]


def test_the_gallery_has_pictures_and_each_says_what_it_shows(build):
    assert len(build.PICTURES) >= 12
    assert all(draw.__doc__ for draw in build.PICTURES)
    assert build.PICTURES[10]().title  # the one that computes nothing; the build draws all


def test_the_page_of_names_has_every_public_one(build):
    text = build.api()
    for name in (*build.sl.__all__, *(f"plot.{each}" for each in build.sl.plot.__all__)):
        assert name in ("__version__", "plot") or f"::: spiritlevel.{name}\n" in text


def test_there_are_five_notebooks_without_outputs():
    books = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
    assert len(books) >= 5
    for book in books:
        cells = json.loads(book.read_text(encoding="utf-8"))["cells"]
        assert cells[0]["source"][0].startswith("# ")
        assert not any(cell.get("outputs") for cell in cells)
