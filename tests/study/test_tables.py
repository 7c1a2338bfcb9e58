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
