"""Tables that a spreadsheet opens and does not run."""

import csv
import io

import pytest

from spiritlevel.study.csv_tables import csv_text, read_csv_text

TEXTS = (
    "=1+1", '=HYPERLINK("http://x";"y")', "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1", "'=1", "''-", "'plain", "'",
    "a=b", "mlp:8", "a,b", 'say "so"', "two\nlines", "two\r\nlines", "old\rlines", "−3", "",
)  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_what_could_be_a_formula_is_text_and_comes_back_as_it_was(text):
    made = csv_text(["name", text or "none"], [{"name": text, text or "none": 1.5}])
    [row] = read_csv_text(made)
    assert row == {"name": text, text or "none": "1.5"}
    cells = [cell for row in csv.reader(io.StringIO(made, newline="")) for cell in row]  # as a spreadsheet sees them
    assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n", "＝")) for cell in cells)


@pytest.mark.parametrize(
    ("number", "written"), [(-1, "-1"), (-2.5, "-2.5"), (-float("inf"), "-inf"), (float("nan"), "")]
)
def test_numbers_stay_numbers(number, written):
    assert csv_text(["x"], [{"x": number}]).split("\n")[1] == (written or '""')
    assert csv_text(["x", "y"], [{"x": number, "y": True}]).split("\n")[1] == f"{written},true"
