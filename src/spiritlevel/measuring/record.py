"""A measure as data: its name, paper, formula, claims and needs beside the small function that computes it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.needs import Needs
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.value import Value
from spiritlevel.problem.checks import check_whole_number

if TYPE_CHECKING:
    from spiritlevel.measuring.evidence import Evidence


@dataclass(frozen=True)
class Measure:
    """One measure of flatness.

    Attributes:
        name: What users call it.
        paper: Key of the paper that defines it, such as "petzka2019".
        summary: One line in words.
        formula: The definition.
        invariant_under: Which changes leave it alone: "layer", "neuron", "linear", "rotation", "input map". One generic test
            checks the claim both ways.
        needs: What it asks of the engine, given its options.
        compute: From the evidence to the value.
        options: Names and defaults of what can be configured.
        costly: Left out of the default set.
        of_function: Whether the scale of the outputs moves it only through the loss, so that a loss which does not see that
            scale makes it blind to it.
        in_shards: Whether it can be measured on a model that is divided among processes, each of which holds a part.

    >>> scaled = Measure(
    ...     "scaled_trace", "dinh2017", "the trace times a constant", "c · Tr H", frozenset(), options={"c": 1.0},
    ...     compute=lambda measure, evidence: Value(measure.name, measure.options["c"], 0.0, True, True, "by hand"),
    ... )
    >>> scaled.configured(c=3.0).options
    {'c': 3.0}
    """

    name: str
    paper: str
    summary: str
    formula: str
    invariant_under: frozenset[str]
    compute: Callable[[Measure, Evidence], Value]
    needs: Callable[[Measure], Needs] = lambda _measure: Needs()
    options: Mapping[str, Any] = field(default_factory=dict)
    costly: bool = False
    of_function: bool = True
    in_shards: bool = False

    def configured(self, **options: Any) -> Measure:
        """The same measure with other options; an option it does not have is refused."""
        for key, value in options.items():
            if key not in self.options:
                known = ", ".join(f"{name}={default!r}" for name, default in self.options.items()) or "none"
                raise SpiritLevelError(f"{self.name} has no option {key!r}; its options are: {known}")
            _check_option(self.name, key, value, self.options[key])
        return replace(self, options={**self.options, **options})


def _check_option(measure: str, key: str, value: Any, default: Any) -> None:
    if isinstance(default, str):
        if not isinstance(value, str):
            raise SpiritLevelError(f"{measure}: {key} must be a string, got {value!r}")
    elif isinstance(default, int):
        check_whole_number(f"{measure}: {key}", value, at_least=1)
    elif isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise SpiritLevelError(f"{measure}: {key} must be a positive number, got {value!r}")


# --- what is known of a value by its measure --------------------------------------------------------------------------


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
    scale_free = scale_free and getattr(record, "of_function", True)
    return frozenset(record.invariant_under) | ({"output"} if scale_free else frozenset())


def is_invariant(value: Value, records: Records) -> bool:
    """Whether the measure claims to survive the rescaling of layers: the least that a flatness must survive."""
    record = record_of(value, records)
    return record is not None and "layer" in record.invariant_under


def is_plain(value: Value, records: Records) -> bool:
    """Whether the measure claims no invariance to a rescaling of the weights."""
    record = record_of(value, records)
    return record is not None and not record.invariant_under & {"layer", "neuron"}
