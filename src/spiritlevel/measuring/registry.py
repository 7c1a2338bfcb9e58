"""The measures by name. Which there are is registered from above; here they are found and configured."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.record import Measure

ALL: dict[str, Measure] = {}


def register(measures: Iterable[Measure]) -> None:
    """Add measures to those that are known by name."""
    ALL.update({measure.name: measure for measure in measures})


def list_measures() -> list[Measure]:
    """Every measure as a record with `name`, `paper`, `summary`, `formula`, `invariant_under` and `options`."""
    return list(ALL.values())


def get_measure(name: str, **options: Any) -> Measure:
    """A measure by name, configured: `get_measure("epsilon_sharpness", epsilon=5e-4)`."""
    if name not in ALL:
        near = difflib.get_close_matches(name, ALL, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise SpiritLevelError(f"unknown measure {name!r}{hint} `list_measures()` names them all")
    return ALL[name].configured(**options)


def resolve_measures(measures: str | Iterable[str | Measure] | None) -> list[Measure]:
    """The default set for None, every measure for "all", else what the names and records stand for."""
    if measures is None:
        return [measure for measure in ALL.values() if not measure.costly]
    if isinstance(measures, str):
        return list(ALL.values()) if measures == "all" else [get_measure(measures)]
    chosen = [measure if isinstance(measure, Measure) else get_measure(measure) for measure in measures]
    if not chosen:
        raise SpiritLevelError("no measures were asked for: pass names, or leave `measures` out for the default set")
    return chosen
