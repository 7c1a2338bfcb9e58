"""Tables as csv files: numbers in full, and no text that a spreadsheet would run."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# What a spreadsheet takes for the beginning of a formula, also in the wide forms that some of them accept.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A table with a header; numbers in full, nothing for nan, and no text that a spreadsheet would run."""
    cells = ([_csv_cell(row.get(column)) for column in columns] for row in rows)
    return "".join(map(_line, ([harmless(column) for column in columns], *cells)))


def _line(cells: Sequence[str]) -> str:
    """A line of a table; written with both ends of a line first, so that either of them in a text is quoted."""
    stream = io.StringIO(newline="")
    csv.writer(stream, lineterminator="\r\n").writerow(cells)
    return stream.getvalue().removesuffix("\r\n") + "\n"


def read_csv_text(text: str) -> list[dict[str, str]]:
    """The rows of a table that `csv_text` wrote, with texts as they were before."""
    return [
        {original(column): original(entry) for column, entry in row.items()}
        for row in csv.DictReader(io.StringIO(text, newline=""))
    ]


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
