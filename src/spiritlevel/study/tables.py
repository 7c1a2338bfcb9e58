"""A study from its tables alone: `study.json`, `results.csv` and `levels.csv` say what its cells said, without weights."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.along import Mark
from spiritlevel.study.csv_tables import TRAINING, read_csv_text
from spiritlevel.study.files import read_object, study_damage
from spiritlevel.study.results import (
    GAPS,
    Cell,
    Passed,
    Quantities,
    Quantity,
    Status,
    Study,
    described_study,
    read_study,
)

Row = TypeVar("Row")

_RESCALED = "@rescaled"
_SUFFIXES = (".error", ".converged")
_TEXTS = ("stop_reason",)
_REMEDY = "`spiritlevel study report` writes it anew in the folder of the study"


def read_study_or_tables(folder: str | os.PathLike[str]) -> Study:
    """The study in a folder: from its cells where it has them, else from its tables."""
    return read_study(folder) if (Path(folder) / "cells").is_dir() else read_tables(folder)


def read_tables(folder: str | os.PathLike[str]) -> Study:
    """The study that `study.json`, `results.csv` and, where there is one, `levels.csv` in a folder tell of.

    Attacks, the environment and the data's fingerprints are in the cells only, so that they are missing here.
    """
    path = Path(folder)
    plain = read_object(path / "study.json", study_damage, "copy it anew from the folder of the study")
    if plain is None:
        raise SpiritLevelError(f"{path} holds no study: no file study.json; `spiritlevel study run` makes one")
    factors = set(plain.get("factors") or {})
    results, levels = path / "results.csv", path / "levels.csv"
    cells = _read(results, lambda row: _cell(row, factors))
    _check_complete(results, {entry["hash"] for entry in plain["cells"]}, {cell.hash for cell in cells})
    passed: dict[str, list[Passed]] = {}
    for name, found in _read(levels, lambda row: (row["hash"], _passed(row, factors))) if levels.exists() else ():
        passed.setdefault(name, []).append(found)
    whole = tuple(replace(cell, along=tuple(passed.get(cell.hash, ()))) for cell in cells)
    return described_study(path, plain, whole, 0)


def _read(path: Path, read: Callable[[Mapping[str, str]], Row]) -> list[Row]:
    """What `read` makes of every row of a table; one that cannot be read is named."""
    return [_read_row(path, row, read) for row in _rows(path)]


def _read_row(path: Path, row: Mapping[str, str], read: Callable[[Mapping[str, str]], Row]) -> Row:
    try:
        return read(row)
    except SpiritLevelError:
        raise
    except KeyError as error:
        raise SpiritLevelError(f"{path} has no column {error}; {_REMEDY}") from None
    except (ValueError, OverflowError) as error:
        raise SpiritLevelError(f"{path} is damaged (cell {row['hash']}: {error}); {_REMEDY}") from None


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        rows = read_csv_text(path.read_text(encoding="utf-8-sig"))  # a spreadsheet may put a mark before the text
    except OSError as error:
        raise SpiritLevelError(
            f"{path} cannot be read: {error.strerror}; `spiritlevel study report` writes it"
        ) from None
    except ValueError as error:
        raise SpiritLevelError(f"{path} is damaged ({error}); {_REMEDY}") from None
    if rows and "hash" not in rows[0]:
        raise SpiritLevelError(f"{path} has no column 'hash': it is not a table of `spiritlevel study report`")
    return rows


def _check_complete(path: Path, listed: set[str], found: set[str]) -> None:
    """Refuse a table that lacks cells of the study, or has others: statistics of a part would be taken for the whole."""
    if listed != found:
        raise SpiritLevelError(
            f"{path} is not the table of study.json beside it: {len(listed - found)} of its {len(listed)} cells have no row, and "
            f"{len(found - listed)} rows are of other cells; {_REMEDY}"
        )


def _cell(row: Mapping[str, str], factors: set[str]) -> Cell:
    status = row.get("status", "")
    if status not in get_args(Status):
        raise SpiritLevelError(
            f"cell {row['hash']}: status must be one of {', '.join(get_args(Status))}, got {status!r}"
        )
    training = {name: _entry(name, row[column]) for name, column in TRAINING.items() if row.get(column)}
    return Cell(
        row["hash"],
        {name: json.loads(_json(row[name])) for name in row if name in factors},
        int(row["seed"]) if row.get("seed") else None,
        status,  # type: ignore[arg-type]
        row.get("reason", ""),
        error=row.get("reason", "") if status == "failed" else "",
        training=training,
        measures=_quantities(row, factors, ""),
        rescaled=_quantities(row, factors, _RESCALED),
    )


def _passed(row: Mapping[str, str], factors: set[str]) -> Passed:
    mark = Mark("epoch" if row["at"] == "epoch" else "loss", float(row["level"]))
    outcomes = {name: _number(row.get(name, "")) for name in TRAINING if name.startswith(("train_", "test_"))}
    step, epoch = int(_number(row["steps_trained"])), _number(row["epochs_trained"])
    return Passed(mark, step, epoch, outcomes, _quantities(row, factors, ""))


def _entry(name: str, text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if name in _TEXTS:
        return text
    return int(text) if text.isdecimal() else _number(text)


def _json(text: str) -> str:
    """A factor as JSON: the table writes texts without quotes."""
    try:
        json.loads(text)
    except ValueError:
        return json.dumps(text)
    return text


def _quantities(row: Mapping[str, str], factors: set[str], suffix: str) -> Quantities:
    known = {"hash", "status", "reason", "seed", "at", "level", *TRAINING.values(), *GAPS, *factors}
    names = [name for name in row if name not in known and not name.endswith(_SUFFIXES) and row[name]]
    return {
        name.removesuffix(suffix): Quantity(
            _number(row[name]), _number(row.get(f"{name}.error") or "0"), row.get(f"{name}.converged", "true") == "true"
        )
        for name in names
        if name.endswith(_RESCALED) == bool(suffix)
    }


def _number(text: str) -> float:
    return float(text) if text else math.nan
