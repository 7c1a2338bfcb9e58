"""Tables as csv files: numbers in full, and no text that a spreadsheet would run."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from spiritlevel.study.results import GAPS, Cell, Quantities, Study, is_of_network

# What a spreadsheet takes for the beginning of a formula, also in the wide forms that some of them accept.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A table with a header; numbers in full, nothing for nan, and no text that a spreadsheet would run."""
    cells = ([_csv_cell(row.get(column)) for column in columns] for row in rows)
    return "".join(map(_line, ([harmless(column) for column in columns], *cells)))


def _line(cells: Sequence[str]) -> str:
    """A line of a table; written with both line endings first, so that a text that holds either of them is quoted."""
    stream = io.StringIO(newline="")
    csv.writer(stream, lineterminator="\r\n").writerow(cells)
    return stream.getvalue().removesuffix("\r\n") + "\n"


def read_csv_text(text: str) -> list[dict[str, str]]:
    """The rows of a table that `csv_text` wrote, with texts as they were before; a ValueError where the text is cut off."""
    try:
        rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    except csv.Error as error:
        raise ValueError(str(error)) from None
    columns = [original(column) for column in rows[0]] if rows else []
    for number, row in enumerate(rows, start=1):
        if len(row) != len(columns):
            raise ValueError(f"row {number} has {len(row)} entries for {len(columns)} columns")
    if text and not text.endswith(("\n", "\r")):  # the last number may have lost its digits
        raise ValueError("it ends in the middle of a line")
    return [dict(zip(columns, map(original, row), strict=True)) for row in rows[1:]]


def harmless(text: str) -> str:
    """A text that no spreadsheet runs: one that could be a formula has an apostrophe before it.

    >>> harmless("=1+1"), harmless("mlp:8"), harmless("'=1")
    ("'=1+1", 'mlp:8', "''=1")
    """
    return f"'{text}" if text.lstrip("'").startswith(_FORMULA) else text


def original(text: str) -> str:
    """What `harmless` was given.

    >>> original("'=1+1"), original("mlp:8"), original("''=1")
    ('=1+1', 'mlp:8', "'=1")
    """
    return text[1:] if text.startswith("'") and text.lstrip("'").startswith(_FORMULA) else text


def _csv_cell(entry: Any) -> str:
    if entry is None or (isinstance(entry, float) and math.isnan(entry)):
        return ""
    if isinstance(entry, bool):
        return "true" if entry else "false"
    if isinstance(entry, float):
        return repr(entry)
    return harmless(entry) if isinstance(entry, str) else json.dumps(entry)


# Name in a result → column. What may also be a factor is named so that it cannot be taken for one.
TRAINING = {
    "reached": "reached",
    "stop_reason": "stop_reason",
    "epochs": "epochs_trained",
    "steps": "steps_trained",
    "seconds": "training_seconds",
    "train_loss": "train_loss",
    "train_accuracy": "train_accuracy",
    "test_loss": "test_loss",
    "test_accuracy": "test_accuracy",
    "gradient_norm": "gradient_norm",
}


def results_csv(study: Study) -> str:
    """`results.csv`: one row a cell, also for those that have no result.

    Factors, how the cell ended and why, losses and accuracies, the gap by each paper's definition, and for every
    quantity its value, its error (`.error`) and whether it reached the tolerance (`.converged`); those of the randomly
    rescaled twin carry `@rescaled`. What does not exist stays empty.
    """
    quantities = dict.fromkeys(_quantity_columns(study))
    seed = () if "seed" in study.factor_names else ("seed",)
    columns = ("hash", "status", "reason", *study.factor_names, *seed, *TRAINING.values(), *GAPS, *quantities)
    return csv_text(columns, (_row(cell, seed) for cell in study.cells))


def levels_csv(study: Study) -> str:
    """`levels.csv`: one row for every mark that a network came to on its way, as `results.csv` has them for its end."""
    there = {mark: study.at(mark) for mark in study.marks}
    quantities = dict.fromkeys(column for at in there.values() for column in _quantity_columns(at))
    seed = () if "seed" in study.factor_names else ("seed",)
    outcomes = (
        "epochs_trained",
        "steps_trained",
        *(name for name in TRAINING if name.startswith(("train_", "test_"))),
    )
    columns = ("hash", "at", "level", *study.factor_names, *seed, *outcomes, *GAPS, *quantities)
    return csv_text(
        columns,
        (
            {**_row(cell, seed), "at": mark.kind, "level": mark.level}
            for mark, at in there.items()
            for cell in at.measured
        ),
    )


def _quantity_columns(study: Study) -> Iterator[str]:
    for variant, suffix in (("measures", ""), ("rescaled", "@rescaled")):
        cells: list[Quantities] = [getattr(cell, variant) for cell in study.cells]
        for name in dict.fromkeys(name for quantities in cells for name in quantities):
            yield name + suffix
            # The error of a layer that is exact everywhere, and its flag, which is the measure's, would only add columns.
            exact = all(quantities[name].error == 0 for quantities in cells if name in quantities)
            if is_of_network(name) or not exact:
                yield f"{name}{suffix}.error"
            if is_of_network(name):
                yield f"{name}{suffix}.converged"


def _row(cell: Cell, seed: tuple[str, ...]) -> dict[str, Any]:
    row: dict[str, Any] = {"hash": cell.hash, "status": cell.status, "reason": cell.reason, **cell.factors}
    row |= dict.fromkeys(seed, cell.seed)
    row |= {column: _entry(cell.training.get(key)) for key, column in TRAINING.items()}
    row |= {name: cell.gap(name) for name in GAPS}
    for quantities, suffix in ((cell.measures, ""), (cell.rescaled, "@rescaled")):
        for name, quantity in quantities.items():
            row[name + suffix] = quantity.value
            row[f"{name}{suffix}.error"] = quantity.error
            row[f"{name}{suffix}.converged"] = quantity.converged
    return row


def _entry(entry: Any) -> Any:
    """An entry of a result for a table. JSON has no nan and holds the text "nan" instead; a table leaves it empty."""
    return None if entry == "nan" else entry
