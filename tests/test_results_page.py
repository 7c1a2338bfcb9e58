"""The page of results can be made again: tables between its marks, figures and csv files beside it."""

import csv
import re
import runpy
from pathlib import Path

import pytest

from study_samples import fabricate

ROOT = Path(__file__).resolve().parents[1]
MAKE = runpy.run_path(str(ROOT / "docs" / "results" / "make.py"))
PAGE = "# Results\n\n<!-- begin petzka-mnist -->\n\nold\n\n<!-- end petzka-mnist -->\n\nkept\n"


def test_a_study_fills_its_place_on_the_page(tmp_path):
    page = tmp_path / "results.md"
    page.write_text(PAGE, encoding="utf-8")
    MAKE["make"](fabricate(tmp_path / "study", "petzka-mnist", cells=14), page)
    text = page.read_text(encoding="utf-8")
    assert "old" not in text
    assert text.startswith(
        "# Results\n\n<!-- begin petzka-mnist -->\n\n**14 networks: 11 measured, 1 excluded, 1 failed, 1 unfinished.**"
    )
    assert text.endswith("<!-- end petzka-mnist -->\n\nkept\n")
    pictures = re.findall(r"\]\(([^)\s]+\.png)\)", text)
    assert len(pictures) == 4
    assert all((tmp_path / picture).stat().st_size for picture in pictures)
    folder = tmp_path / "results" / "petzka-mnist"
    rows = list(csv.DictReader((folder / "results.csv").read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 14
    # What the table says is what the file of correlations says.
    found = csv.DictReader((folder / "correlations.csv").read_text(encoding="utf-8").splitlines())
    whole = next(
        r
        for r in found
        if r["measure"] == "rho_sum" and not r["layer"] and r["variant"] == "trained" and r["gap"] == "gap_loss"
    )
    line = next(line for line in text.splitlines() if line.startswith("| ρ, sum over neurons"))
    assert f"**{float(whole['pearson']):.2f}**".replace("-", "−") in line


def test_csv_files_are_shortened_and_nothing_else():
    text = "hash,x,y\n12e45678,0.1234567890123,125\nab,-1.23456789e-05,0.05\n"
    assert MAKE["short"](text) == "hash,x,y\n12e45678,0.123457,125\nab,-1.23457e-05,0.05\n"


def test_a_page_without_a_place_is_left_alone(tmp_path):
    page = tmp_path / "results.md"
    page.write_text("# Results\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="has no place for petzka-mnist"):
        MAKE["make"](fabricate(tmp_path / "study", "petzka-mnist", cells=8), page)
    assert page.read_text(encoding="utf-8") == "# Results\n"


def test_the_committed_page_has_a_place_for_every_study_and_every_picture():
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for name in MAKE["TELLERS"]:
        assert f"<!-- begin {name} -->" in text
        assert f"<!-- end {name} -->" in text
    assert "{{" not in text
