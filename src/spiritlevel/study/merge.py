"""Two descriptions of one study as one: runs with other seeds or other levels of a factor share a folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spiritlevel.saved import json_ready
from spiritlevel.study.settings import flattened

# Settings that the name of a cell does not depend on.
_NOT_IN_NAMES = ("data.folder", "training.ensemble", "seeds")


def comparable(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two descriptions differ at most in their seeds and in the levels of their factors."""
    return not differences(before, now)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What else two descriptions differ in: setting → its values in both, None where one does not have it."""
    one, other = _fixed(before), _fixed(json_ready(now))
    pairs = {key: (one.get(key), other.get(key)) for key in (*one, *other)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _fixed(described: Mapping[str, Any]) -> dict[str, Any]:
    """What all cells of a study share."""
    factors = described.get("factors") or {}
    # A setting that is not set is one that an earlier version did not have.
    settings = {
        key: value
        for key, value in flattened(described.get("config") or {})
        if key not in (*factors, *_NOT_IN_NAMES) and value not in (None, [], ())
    }
    head = {key: described.get(key) for key in ("version", "tied", "gap")}
    return {**settings, **head, "factors": sorted(factors)}


def merged(before: Mapping[str, Any], now: Mapping[str, Any], further: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The description `now` with `further` cells from before, in the order of the common grid."""
    now = json_ready(now)
    cells = [*now["cells"], *further]
    groups = _groups(now)
    levels = {
        group: _occurring(_levels(before, now, group), [_level(cell, group) for cell in cells]) for group in groups
    }
    seeds = list(dict.fromkeys([*_seeds(before), *_seeds(now), *(cell.get("seed") for cell in cells)]))
    kept = {cell.get("seed") for cell in cells}
    return {
        **now,
        "factors": {
            name: [level[i] for level in levels[group]] for group in groups for i, name in enumerate(group)
        },
        "config": {**now["config"], "seeds": [seed for seed in seeds if seed in kept]},
        "cells": sorted(
            cells,
            key=lambda cell: (*(levels[group].index(_level(cell, group)) for group in groups), seeds.index(cell.get("seed"))),
        ),
    }  # fmt: skip


def _occurring(known: Iterable[list[Any]], met: Sequence[list[Any]]) -> list[list[Any]]:
    """The levels that are met, each once, in the order of those known before."""
    found: list[list[Any]] = []
    for level in (*(level for level in known if level in met), *met):
        if level not in found:
            found.append(level)
    return found


def _groups(described: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The factors, those that are tied together."""
    tied = {name: tuple(group) for group in described["tied"] for name in group}
    return list(dict.fromkeys(tied.get(name, (name,)) for name in described["factors"]))


def _levels(before: Mapping[str, Any], now: Mapping[str, Any], group: Sequence[str]) -> list[list[Any]]:
    """The levels of both in order: a row for each, with as many entries as factors are tied."""
    rows = [row for each in (before, now) for row in zip(*(each["factors"][name] for name in group), strict=False)]
    return [list(row) for row in rows]


def _level(cell: Mapping[str, Any], group: Sequence[str]) -> list[Any]:
    return [(cell.get("factors") or {}).get(name) for name in group]


def _seeds(described: Mapping[str, Any]) -> list[Any]:
    return list((described.get("config") or {}).get("seeds") or [])
