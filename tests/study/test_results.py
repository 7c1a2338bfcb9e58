"""A study's folder as rows: every cell is told, whatever became of it, and the columns are what they say."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.csv_tables import results_csv
from spiritlevel.study.files import result_damage
from spiritlevel.study.results import Cell, Study, _finished, described_study, read_curve, read_study
from study_samples import GRIDS, fabricate

MEASURES = ("hessian_trace", "kappa_max", "kappa_trace_sum", "rho_max")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fabricate(
        tmp_path_factory.mktemp("study"), "petzka-mnist", excluded=2, failed=1, unfinished=3, measures=MEASURES
    )


@pytest.fixture(scope="module")
def study(folder: Path) -> Study:
    return read_study(folder)


@pytest.fixture(scope="module")
def rows(study: Study) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(results_csv(study))))


def test_every_cell_is_a_row_with_its_fate(rows: list[dict[str, str]]) -> None:
    assert len(rows) == 48
    fates = [row["status"] for row in rows]
    assert {fate: fates.count(fate) for fate in set(fates)} == {
        "measured": 42,
        "excluded": 2,
        "failed": 1,
        "unfinished": 3,
    }
    for row in rows:
        assert bool(row["reason"]) == (row["status"] != "measured")
    assert "100 epochs passed" in rows[0]["reason"]
    assert "0.83" in rows[0]["reason"]
    assert rows[44]["reason"] == "RuntimeError: the worker was killed (signal 9) (2 attempts)"


def test_a_row_holds_what_the_cells_result_holds(folder: Path, rows: list[dict[str, str]]) -> None:
    row = rows[10]
    result = json.loads((folder / "cells" / row["hash"] / "result.json").read_text())
    training, values = result["training"], result["measures"]["values"]
    assert int(row["training.batch_size"]) == result["factors"]["training.batch_size"]
    assert int(row["seed"]) == result["seed"]
    assert float(row["gap_accuracy"]) == pytest.approx(
        training["train_accuracy"] - training["test_accuracy"], abs=1e-15
    )
    assert float(row["gap_loss"]) == pytest.approx(training["test_loss"] - training["train_loss"], abs=1e-15)
    assert float(row["test_error"]) == pytest.approx(1 - training["test_accuracy"], abs=1e-15)
    for name in MEASURES:
        assert float(row[name]) == values[name]["value"]
        assert float(row[f"{name}.error"]) == values[name]["error"]
        assert row[f"{name}.converged"] == str(values[name]["converged"]).lower()
        assert float(row[f"{name}@rescaled"]) == result["rescaled"]["values"][name]["value"]
    assert float(row["kappa_trace[2.weight]"]) == values["kappa_trace_sum"]["layers"]["2.weight"]
    assert float(row["kappa[2.weight]"]) == values["kappa_max"]["layers"]["2.weight"]
    assert float(row["kappa[2.weight].error"]) == values["kappa_max"]["layer_errors"]["2.weight"]
    assert float(row["rho_max[0.weight]@rescaled"]) == result["rescaled"]["values"]["rho_max"]["layers"]["0.weight"]


def test_what_does_not_exist_is_empty(rows: list[dict[str, str]]) -> None:
    excluded, unfinished = rows[0], rows[-1]
    assert excluded["train_accuracy"] == "0.83"
    assert excluded["kappa_max"] == ""
    assert unfinished["train_loss"] == unfinished["gap_loss"] == unfinished["kappa_max"] == ""
    assert unfinished["training.batch_size"] == "8000"


def test_tied_factors_are_one_axis_and_seeds_are_known(study: Study) -> None:
    batch, start, seed = study.axes
    assert batch.name == "training.batch_size and training.learning_rate"
    assert batch.label == "batch_size and learning_rate"
    assert [batch.text(level) for level in range(4)] == ["1000 / 0.02", "2000 / 0.1", "4000 / 0.4", "8000 / 1.6"]
    assert batch.numeric
    assert not start.numeric
    assert [start.text(level) for level in range(2)] == [
        "xavier_normal",
        "uniform",
    ]  # the grid's order, not the alphabet's
    assert seed.is_seed
    assert not batch.is_seed


def test_networks_of_different_kinds_are_parts(tmp_path: Path) -> None:
    study = read_study(fabricate(tmp_path, "rangamani-mnist", measures=MEASURES))
    assert {name: len(part.cells) for name, part in study.parts.items()} == {"fully_connected": 10, "lenet": 10}
    for part in study.parts.values():
        assert [axis.label for axis in part.axes] == ["batch_size", "seed"]
    assert dict(read_study(fabricate(tmp_path / "one", "tsuzuku-mnist", cells=8)).parts) == {}


def change(folder: Path, number: int, **fields: Any) -> Study:
    """The study after the result of one cell was changed."""
    name = json.loads((folder / "study.json").read_text())["cells"][number]["hash"]
    path = folder / "cells" / name / "result.json"
    result = json.loads(path.read_text())
    for key, entry in fields.items():
        *place, last = key.split("__")
        target = result
        for part in place:
            target = target[part]
        target[last] = entry
    path.write_text(json.dumps(result))
    return read_study(folder)


def small(tmp_path: Path) -> Path:
    return fabricate(tmp_path, cells=8, excluded=1, failed=0, unfinished=0, measures=MEASURES)


def test_numbers_that_are_none_stay_out_of_the_table(tmp_path: Path) -> None:
    study = change(small(tmp_path), 0, training__train_loss="nan", training__train_accuracy="nan")
    row = next(csv.DictReader(io.StringIO(results_csv(study))))
    assert row["train_loss"] == row["gap_loss"] == row["gap_accuracy"] == ""
    assert row["status"] == "excluded"
    study = change(tmp_path, 3, measures__values__hessian_trace__value="inf")
    assert math.isinf(study.column("hessian_trace")[2])
    assert ",inf," in results_csv(study)


def test_an_excluded_network_that_was_measured_anyway_is_told_but_takes_no_part(tmp_path: Path) -> None:
    folder = small(tmp_path)
    study = change(folder, 3, training__reached=False)
    assert len(study.measured) == 6
    assert len(study.column("hessian_trace")) == 6
    row = list(csv.DictReader(io.StringIO(results_csv(study))))[3]
    assert row["status"] == "excluded"
    assert float(row["hessian_trace"]) > 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "result.json is damaged (Expecting"),
        ("[]", "result.json is damaged (it holds a list where an object is needed)"),
        ("{}", "result.json is damaged (it has no 'training')"),
        ('{"training": 3}', "result.json is damaged ('training' is a number)"),
        ('{"training": {"reached": true}, "measures": {"values": {"x": 3}}}', "(x is not a measured value)"),
        ('{"training": {"reached": true}, "attacks": [{}]}', "(an attack has no target)"),
        ("[" * 100_000, "result.json is damaged ("),
    ],
)
def test_a_damaged_result_is_a_failed_cell_with_the_remedy(tmp_path: Path, text: str, told: str) -> None:
    folder = small(tmp_path)
    name = json.loads((folder / "study.json").read_text())["cells"][5]["hash"]
    (folder / "cells" / name / "result.json").write_text(text)
    cell = read_study(folder).cells[5]
    assert cell.status == "failed"
    assert told in cell.reason
    assert cell.reason.endswith("run the study again, which measures the network again")


def test_a_result_whose_numbers_are_none_is_a_failed_cell(tmp_path: Path) -> None:
    cell = change(small(tmp_path), 5, training__test_loss=[1.0]).cells[5]
    assert cell.status == "failed"
    assert cell.reason.startswith("result.json is damaged ('test_loss' is not a number); run the study again")


def _places(entry: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a JSON document, the first entry of every list."""
    if place:
        yield place
    inner = entry.items() if isinstance(entry, dict) else list(enumerate(entry))[:1] if isinstance(entry, list) else ()
    for key, each in inner:
        yield from _places(each, (*place, key))


def _changed(entry: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The document with another value at a place, nothing else copied than the way there."""
    if not place:
        return value
    copied = copy.copy(entry)
    if len(place) == 1 and value is ...:
        del copied[place[0]]
    else:
        copied[place[0]] = _changed(entry[place[0]], place[1:], value)
    return copied


def test_whatever_stands_in_a_result_it_is_read_or_named_as_damage(tmp_path: Path) -> None:
    """What cannot be read must be damage, which a run mends; else the cell is a dead end that only a person can clear."""
    folder = fabricate(tmp_path, "dinh-attack", excluded=0, cells=1, failed=0, unfinished=0)
    result = json.loads(next(folder.glob("cells/*/result.json")).read_text())
    for report in (result["measures"], *(attack["measures"] for attack in result["attacks"])):
        report["values"] = dict(list(report["values"].items())[:2])  # the others are alike
    mark = {"kind": "loss", "level": 0.1, "step": 7, "epoch": 0.5, "train_loss": 0.1, "measures": result["measures"]}
    result |= {"along": [mark], "rescaled": result["measures"]}
    assert result_damage(result) == ""
    bare = Cell("h", {}, 0, "unfinished", "")
    described = json.loads((folder / "study.json").read_text())
    read = named = 0
    for place in _places(result):
        for value in (..., {}, [], None, "x", math.inf, 10**400, [[1]], {"a": {}}):
            changed = _changed(result, place, value)
            if result_damage(changed):
                named += 1
                continue
            results_csv(described_study(folder, described, (_finished(bare, changed),), 0))
            read += 1
    assert min(read, named) > 100, (read, named)


def test_the_result_of_another_cell_is_not_counted(tmp_path: Path) -> None:
    folder = fabricate(tmp_path, excluded=0, cells=2, failed=0, unfinished=0)
    first, second = sorted((folder / "cells").iterdir())
    (second / "result.json").write_bytes((first / "result.json").read_bytes())
    one, two = read_study(folder).cells
    assert (one.status, two.status) == ("measured", "failed")
    assert two.reason == (
        f"result.json is damaged (it is the result of cell {first.name}); run the study again, which measures the network "
        "again"
    )


def test_a_failure_is_told_in_a_line_and_kept_in_full(tmp_path: Path) -> None:
    folder = small(tmp_path)
    name = json.loads((folder / "study.json").read_text())["cells"][5]["hash"]
    (folder / "cells" / name / "result.json").unlink()
    (folder / "cells" / name / "failed.json").write_text('{"error": "it broke\\nhere", "attempts": 2}')
    cell = read_study(folder).cells[5]
    assert (cell.status, cell.reason, cell.error) == ("failed", "here (2 attempts)", "it broke\nhere")


def test_a_result_stands_before_an_older_failure(tmp_path: Path) -> None:
    folder = small(tmp_path)
    name = json.loads((folder / "study.json").read_text())["cells"][5]["hash"]
    (folder / "cells" / name / "failed.json").write_text('{"error": "no", "attempts": 1}')
    assert read_study(folder).cells[5].status == "measured"


def test_folders_of_no_cell_are_counted(tmp_path: Path) -> None:
    folder = small(tmp_path)
    (folder / "cells" / "beef").mkdir()
    assert read_study(folder).unknown_folders == 1


def test_a_folder_without_a_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SpiritLevelError, match=r"holds no study: no file study\.json; `spiritlevel study run` makes one"
    ):
        read_study(tmp_path)
    (tmp_path / "study.json").write_text('{"name": "x"}')
    with pytest.raises(SpiritLevelError, match=r"study\.json is damaged \(it has no 'cells'\); run the study again"):
        read_study(tmp_path)
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(SpiritLevelError, match=r"study\.json is damaged"):
        read_study(tmp_path)


def test_a_measure_under_another_loss_keeps_its_label(tmp_path: Path) -> None:
    folder = small(tmp_path)
    for number in range(1, 8):
        name = json.loads((folder / "study.json").read_text())["cells"][number]["hash"]
        path = folder / "cells" / name / "result.json"
        result = json.loads(path.read_text())
        values = result["measures"]["values"]
        values["kappa_trace_sum(loss=mse)"] = values["kappa_trace_sum"]
        path.write_text(json.dumps(result))
    names = read_study(folder).quantities()
    assert "kappa_trace_sum(loss=mse)" in names
    assert "kappa_trace(loss=mse)[0.weight]" in names


def test_curves_are_read_and_their_absence_is_none(study: Study) -> None:
    curve = read_curve(study, study.cells[0])
    assert curve["epoch"][:2] == (1.0, 2.0)
    assert len(curve["train_loss"]) == study.cells[0].training["epochs"]
    assert read_curve(study, study.cells[-1]) == {}


def test_the_fixture_has_the_shape_of_every_built_in_kind(tmp_path: Path) -> None:
    for kind in GRIDS:
        study = read_study(fabricate(tmp_path / kind, kind, cells=4, excluded=0, failed=0, unfinished=0))
        assert len(study.measured) == len(study.cells)
