"""The measures by name. Which there are is registered from above; here they are found and configured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from spiritlevel.errors import SpiritLevelError, suggest
from spiritlevel.measuring.record import Measure, MeasureRecord, Records

ALL: dict[str, Measure] = {}


def register(measures: Iterable[Measure]) -> None:
    """Add measures to those that are known by name."""
    ALL.update({measure.name: measure for measure in measures})


def list_measures() -> list[Measure]:
    """Every measure as a record with `name`, `paper`, `summary`, `formula`, `invariant_under` and `options`.

    >>> [measure.formula for measure in list_measures() if measure.paper == "liang2019"]
    ['Σ_i θ_i² · (1/N) Σ_n (∂ℓ_n/∂θ_i)²', 'θᵀ I(θ) θ = (1/N) Σ_n (θ·∇ℓ_n)²']
    """
    return list(ALL.values())


def get_measure(name: str, **options: Any) -> Measure:
    """A measure by name, configured: `get_measure("epsilon_sharpness", epsilon=5e-4)`.

    >>> get_measure("epsilon_sharpness", epsilon=5e-4).options
    {'epsilon': 0.0005}
    """
    if not isinstance(name, str):
        raise SpiritLevelError(f"a measure is asked for by its name, or as what get_measure returns; got {name!r}")
    if name not in ALL:
        near = suggest(name, ALL) or "."
        raise SpiritLevelError(
            f"unknown measure {name!r}{near} `list_measures()` and `spiritlevel measures` name them all"
        )
    return ALL[name].configured(**options)


def read_measure(text: str) -> Measure:
    """`name` or `name:option=value:…`, as command lines and files of studies write it, as a configured measure."""
    name, *settings = text.split(":")
    options: dict[str, int | float | str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise SpiritLevelError(f"options of a measure are written name:option=value, got {text!r}")
        options[key] = _number_or_word(value)
    return get_measure(name, **options)


def _number_or_word(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def resolve_measures(measures: str | Iterable[str | Measure] | None) -> list[Measure]:
    """The default set for None, every measure for "all", else what the names and records stand for."""
    if measures is None:
        return [measure for measure in ALL.values() if not measure.costly]
    if isinstance(measures, str):
        return list(ALL.values()) if measures == "all" else [get_measure(measures)]
    if not isinstance(measures, Iterable):
        raise SpiritLevelError(f"measures must be names of measures or what get_measure returns, got {measures!r}")
    chosen = [measure if isinstance(measure, Measure) else get_measure(measure) for measure in measures]
    if not chosen:
        raise SpiritLevelError("no measures were asked for: pass names, or leave `measures` out for the default set")
    return chosen


def known_records(records: Records | Iterable[MeasureRecord] | None = None) -> Records:
    """Name → record: of `records`, or of every measure of the library."""
    if records is None:
        records = list_measures()
    if isinstance(records, Mapping):
        return records
    return {record.name: record for record in records}
