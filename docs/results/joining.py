"""Tables of one study that grow over days and machines: what a folder holds, joined with what was gathered before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from spiritlevel.errors import SpiritLevelError
from spiritlevel.saved import json_ready
from spiritlevel.study.merge import differences, merged
from spiritlevel.study.plan import list_studies, read_plan
from spiritlevel.study.results import Cell, Study, described_study

# What a description says of the machine; networks of several may stand in one table.
ENVIRONMENT = "environment"
# How long a network is trained at most. Where the learning rate is constant, it changes nothing of one that ended by its stop rule.
LIMIT = "training.epochs"


def joined(before: tuple[dict[str, Any], Study], now: tuple[dict[str, Any], Study]) -> tuple[dict[str, Any], Study]:
    """Two descriptions of one study with their networks as one: every network once, none lost.

    A network is known by its place in the grid and its seed. Where both have it, a finished row stands before a failed
    one and a failed one before an unfinished one, and the later of two equals. Settings that differ are refused, but for the
    most epochs of a training at a constant rate.
    """
    (plain_before, study_before), (plain_now, study_now) = before, now
    _refuse_other_settings(plain_before, plain_now, study_before.folder, study_now.folder)
    cells = {place(cell): cell for cell in study_before.cells}
    for cell in study_now.cells:
        standing = cells.get(place(cell))
        if standing is None or _standing(cell) >= _standing(standing):
            cells[place(cell)] = cell
    of_now = {place(cell) for cell in study_now.cells}
    entries = {where: {"hash": c.hash, "factors": dict(c.factors), "seed": c.seed} for where, c in cells.items()}
    current = {**plain_now, "cells": [entry for where, entry in entries.items() if where in of_now]}
    plain = merged(plain_before, current, [entry for where, entry in entries.items() if where not in of_now])
    plain["config"] = {**plain["config"], ENVIRONMENT: _environments(plain_before, plain_now)}
    if limits := [epochs for each in (plain_before, plain_now) if (epochs := _training(each).get("epochs"))]:
        plain["config"]["training"] = {**_training(plain), "epochs": max(limits)}
    by_hash = {cell.hash: cell for cell in cells.values()}
    ordered = tuple(by_hash[entry["hash"]] for entry in plain["cells"])
    return plain, described_study(study_now.folder, plain, ordered, 0)


def place(cell: Cell) -> tuple[tuple[str, str], ...]:
    """Where a network stands in the grid: its factors and its seed."""
    return tuple(sorted((name, repr(json_ready(value))) for name, value in cell.coordinates.items()))


def _standing(cell: Cell) -> int:
    return 2 if cell.training else 1 if cell.status == "failed" else 0


def _refuse_other_settings(before: Mapping[str, Any], now: Mapping[str, Any], there: Path, folder: Path) -> None:
    found = differences(_without_environment(before), _without_environment(now))
    if all(_training(plain).get("schedule") == "constant" for plain in (before, now)):
        found.pop(LIMIT, None)
    if found:
        told = "; ".join(f"{key} is {one!r} there and {other!r} here" for key, (one, other) in found.items())
        raise SpiritLevelError(
            f"{folder} cannot be joined with the tables in {there}, because their networks were made differently: {told}. "
            "Run the study with the settings of the tables, or move the tables away to begin new ones"
        )


def _training(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    return plain["config"].get("training") or {}


def _without_environment(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {**plain, "config": {key: value for key, value in plain["config"].items() if key != ENVIRONMENT}}


def _environments(*plains: Mapping[str, Any]) -> dict[str, str]:
    """What the networks were computed by; several values of one kind stand side by side."""
    found: dict[str, dict[str, None]] = {}
    for plain in plains:
        for key, value in (plain["config"].get(ENVIRONMENT) or {}).items():
            found.setdefault(key, {}).update(dict.fromkeys(str(value).split(" and ")))
    return {key: " and ".join(values) for key, values in found.items()}


def crossed_again(plain: dict[str, Any], study: Study) -> tuple[dict[str, Any], Study]:
    """The study with the factors of the built-in one of its name: one that was set to a single value is crossed again.

    So a run of one network (`--set model.name=lenet`) joins runs of the others. Factors that the built-in study ties are tied.
    """
    if study.name not in list_studies():
        return plain, study
    groups = [factor.names for factor in read_plan(study.name).factors]
    names = [name for group in groups for name in group]
    fixed = {name: _setting(plain["config"], name) for name in names if name not in plain["factors"]}
    fixed = {name: value for name, value in fixed.items() if value is not None}
    cells = tuple(replace(cell, factors=_in_order({**fixed, **cell.factors}, names)) for cell in study.cells)
    entries = [{**entry, "factors": _in_order({**fixed, **entry["factors"]}, names)} for entry in plain["cells"]]
    levels = _in_order({**{name: [value] for name, value in fixed.items()}, **plain["factors"]}, names)
    ties = _with_ties(plain["tied"], [list(group) for group in groups], levels, entries)
    whole = {**plain, "factors": levels, "tied": ties, "cells": entries}
    return whole, described_study(study.folder, whole, cells, study.unknown_folders)


def _with_ties(
    tied: list[list[str]], groups: list[list[str]], levels: Mapping[str, list[Any]], cells: list[dict[str, Any]]
) -> list[list[str]]:
    """The ties of a run, and those of the built-in study by which its networks lie in the grid, too."""
    known = {name for group in tied for name in group}
    further = []
    for group in ([name for name in names if name in levels] for names in groups):
        if len(group) > 1 and known.isdisjoint(group):
            rows = list(zip(*(levels[name] for name in group), strict=False))
            if all(tuple(cell["factors"][name] for name in group) in rows for cell in cells):
                further.append(group)
    return sorted((*tied, *further), key=lambda group: list(levels).index(group[0]))


def _in_order(values: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    known = {name: values[name] for name in names if name in values}
    return {**known, **values}


def _setting(config: Mapping[str, Any], name: str) -> Any:
    section, _, key = name.partition(".")
    within = config.get(section)
    return within.get(key) if isinstance(within, Mapping) else None
