"""`spiritlevel measures`: every measure with its formula and what it survives."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console

from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.registry import list_measures
from spiritlevel.show.tables import measures_table


def measures(as_json: Annotated[bool, typer.Option("--json", help="As JSON on standard output.")] = False) -> None:
    """List the measures and what they survive."""
    if as_json:
        print(json.dumps([_record(measure) for measure in list_measures()], indent=1, ensure_ascii=False))
    else:
        Console().print(measures_table())


def _record(measure: Measure) -> dict[str, Any]:
    return {
        "name": measure.name,
        "paper": measure.paper,
        "summary": measure.summary,
        "formula": measure.formula,
        "invariant_under": sorted(measure.invariant_under),
        "options": dict(measure.options),
        "default": not measure.costly,
    }
