"""What is known about a measure beyond its number: its record, what it survives, how sure its value is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from spiritlevel.measuring.registry import list_measures
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.value import Value

INVARIANCES: Mapping[str, str] = {
    "layer": "unchanged when a whole layer is multiplied by α and another divided by it: W₁ → αW₁, W₂ → W₂/α",
    "neuron": "unchanged when one neuron is rescaled: row i of Wₗ and bₗᵢ times α, column i of Wₗ₊₁ divided by α",
    "output": "unchanged when the outputs of the network are multiplied by a constant: f → αf",
}

CERTAINTIES: Mapping[str, str] = {
    "exact": "exact up to rounding",
    "certified": "certified by its residual: an eigenvalue lies at least as near to it as the error shown",
    "estimated": "from random probes or a search; the error shown is one standard error where there is one",
}


class MeasureRecord(Protocol):
    """The record of a measure, as `list_measures` gives it."""

    @property
    def name(self) -> str: ...
    @property
    def paper(self) -> str: ...
    @property
    def formula(self) -> str: ...
    @property
    def invariant_under(self) -> frozenset[str]: ...
    @property
    def summary(self) -> str: ...


Records = Mapping[str, MeasureRecord]


def known_records(records: Records | Iterable[MeasureRecord] | None = None) -> Records:
    """Name → record: of `records`, or of every measure of the library."""
    if records is None:
        records = list_measures()
    if isinstance(records, Mapping):
        return records
    return {record.name: record for record in records}


def record_of(value: Value, records: Records) -> MeasureRecord | None:
    """The record of the measure behind `value`, also where it was configured: `name(epsilon=…)`."""
    return records.get(value.name) or records.get(value.name.partition("(")[0])


def invariances(value: Value, report: Report, records: Records) -> frozenset[str] | None:
    """Which rescalings leave this value alone on this problem; None for a measure without a record.

    The claim of the measure, and the scale of the outputs where the loss itself does not see it.
    """
    record = record_of(value, records)
    if record is None:
        return None
    scale_free = report.problem.get("loss_function") == "normalized_cross_entropy"
    return frozenset(record.invariant_under) | ({"output"} if scale_free else frozenset())


def is_invariant(value: Value, records: Records) -> bool:
    """Whether the measure claims to survive the rescaling of layers: the least that a flatness must survive."""
    record = record_of(value, records)
    return record is not None and "layer" in record.invariant_under


def is_plain(value: Value, records: Records) -> bool:
    """Whether the measure claims no invariance to a rescaling of the weights."""
    record = record_of(value, records)
    return record is not None and not record.invariant_under & {"layer", "neuron"}


def can_rank(value: Value) -> bool:
    """Whether the value can say which of two is larger: the largest rise that a search found is only a lower bound."""
    return not value.lower_bound


def certainty(value: Value) -> str:
    """`exact`, `certified` (by a residual, which bounds the distance to an eigenvalue) or `estimated`, from what the value says about itself."""
    if value.exact:
        return "exact"
    return "certified" if value.certified else "estimated"
