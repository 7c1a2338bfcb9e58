"""A study read from its tables is the study read from its cells."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.csv_tables import results_csv
from spiritlevel.study.results import read_study
from spiritlevel.study.tables import read_study_or_tables, read_tables
from study_samples import fabricate


def test_tables_tell_what_the_cells_tell(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "study", "petzka-mnist", cells=14)
    study = read_study(folder)
    tables = tmp_path / "tables"
    tables.mkdir()
    shutil.copy(folder / "study.json", tables)
    (tables / "results.csv").write_text(results_csv(study), encoding="utf-8")
    found = read_study_or_tables(tables)
    assert found.axes == study.axes
    assert found.quantities() == study.quantities()
    for one, other in zip(found.cells, study.cells, strict=True):
        kept = replace(other, attacks=(), environment={}, data={}, problem={}, training=one.training)
        assert replace(one, error=kept.error) == kept
        assert {name: other.training[name] for name in one.training} == dict(one.training)
    assert results_csv(found) == results_csv(study)


def test_what_is_not_a_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpiritLevelError, match=r"holds no study: no file study\.json"):
        read_tables(tmp_path)
    folder = fabricate(tmp_path / "study", "petzka-mnist", cells=4)
    shutil.copy(folder / "study.json", tmp_path)
    with pytest.raises(SpiritLevelError, match=r"results\.csv cannot be read.*study report` writes it"):
        read_tables(tmp_path)
    (tmp_path / "results.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SpiritLevelError, match="has no column 'hash'"):
        read_tables(tmp_path)
    (tmp_path / "results.csv").write_text("hash,status\nab,lost\n")
    with pytest.raises(SpiritLevelError, match=r"cell ab: status must be one of measured, .* got 'lost'"):
        read_tables(tmp_path)


def cut(text: str) -> str:
    """Without the last row."""
    return "".join(text.splitlines(keepends=True)[:-1])


def with_entry(text: str, column: str, entry: str) -> str:
    """The table with another entry in its second row."""
    header, first, second, *rest = text.splitlines()
    cells = second.split(",")
    cells[header.split(",").index(column)] = entry
    return "\n".join([header, first, ",".join(cells), *rest, ""])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: text[: len(text) // 2], r"is damaged \(row \d+ has \d+ entries for \d+ columns\)"),
        (lambda text: text[:-3], r"is damaged \(it ends in the middle of a line\)"),
        (cut, "1 of its 4 cells have no row, and 0 rows are of other cells"),
        (lambda text: "", "4 of its 4 cells have no row"),
        (lambda text: text.encode() + b"\xff\n", r"is damaged \('utf-8' codec"),
        (lambda text: with_entry(text, "seed", "1.5"), r"is damaged \(cell \w+: invalid literal for int.* '1\.5'\)"),
        (lambda text: with_entry(text, "kappa_sum", "abc"), r"is damaged \(cell \w+: could not convert .* 'abc'\)"),
        (lambda text: with_entry(text, "hash", "ffff"), "1 of its 4 cells have no row, and 1 rows are of other cells"),
    ],
)
def test_a_damaged_table_is_refused_and_not_read_in_part(tmp_path: Path, damage, told: str) -> None:
    folder = fabricate(tmp_path / "study", cells=4, failed=0, unfinished=0)
    (tmp_path / "study.json").write_bytes((folder / "study.json").read_bytes())
    text = damage(results_csv(read_study(folder)))
    (tmp_path / "results.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SpiritLevelError, match=rf"results\.csv .*{told}.*study report` writes it anew"):
        read_tables(tmp_path)


def test_what_a_spreadsheet_does_to_a_table_is_no_damage(tmp_path: Path) -> None:
    """A mark at the beginning, other line ends."""
    folder = fabricate(tmp_path / "study", cells=4)
    (tmp_path / "study.json").write_bytes((folder / "study.json").read_bytes())
    text = results_csv(read_study(folder))
    (tmp_path / "results.csv").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert results_csv(read_tables(tmp_path)) == text


def test_a_table_of_levels_without_its_columns_is_refused(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "study", cells=4)
    (tmp_path / "study.json").write_bytes((folder / "study.json").read_bytes())
    (tmp_path / "results.csv").write_text(results_csv(read_study(folder)))
    (tmp_path / "levels.csv").write_text("hash,at\nab,loss\n")
    with pytest.raises(SpiritLevelError, match=r"levels\.csv has no column 'level'; .* writes it anew"):
        read_tables(tmp_path)
