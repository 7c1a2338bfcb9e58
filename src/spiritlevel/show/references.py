"""Something to compare with: the same measures of a few well-known networks, made by `python -m benchmarks.references`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from spiritlevel.measuring.report import Report
from spiritlevel.show.numbers import Cell, Numbers, significant


@dataclass(frozen=True)
class Reference:
    """A well-known network with some of its measures."""

    name: str
    about: str
    loss: float
    values: Mapping[str, float]


@cache
def references() -> tuple[Reference, ...]:
    """Every network of the table that the library ships."""
    file = resources.files("spiritlevel.show") / "references.json"
    return tuple(Reference(**entry) for entry in json.loads(file.read_text(encoding="utf-8")))


def scale_words(report: Report, name: str) -> str:
    """The same measure of well-known networks, the smallest first; empty where there is nothing to compare with."""
    value = report[name].value
    known = sorted((each.values[name], each.name) for each in references() if name in each.values)
    if len(known) < 2 or not math.isfinite(value) or report.problem.get("loss_function") != "cross_entropy":
        return ""
    return ", ".join(f"{significant(other, 3)} ({who})" for other, who in known)


def reference_table(report: Report) -> Numbers | None:
    """The measures of a report beside those of well-known networks; None where they share none."""
    known = references()
    names = [name for name in report if any(name in each.values for each in known)]
    if not names or report.problem.get("loss_function") != "cross_entropy":
        return None
    rows: list[tuple[Cell, ...]] = [("this network", report.loss, *(report[name].value for name in names))]
    rows += [
        (f"{each.name}: {each.about}", each.loss, *(each.values.get(n, math.nan) for n in names)) for each in known
    ]
    return Numbers(("network", "loss", *names), tuple(rows), digits=4)  # as many as the table of the library has
