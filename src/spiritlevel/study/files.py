"""The files of a study: written whole, read without trusting them. A file is whole, missing, or damaged, and damage is named."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from spiritlevel.errors import SpiritLevelError

# What is wrong with the content of a file, in words; nothing where it is as it should be.
Check = Callable[[Mapping[str, Any]], str]

_FOLDER_NAME = re.compile(r"[A-Za-z0-9_-]+")
_FILE_NAME = re.compile(r"(loss|epoch)-[0-9.e+-]+\.safetensors")
# Numbers that a training leaves; infinity and nan come as text.
_TRAINING_NUMBERS = ("train_loss", "train_accuracy", "gradient_norm")
_OUTCOMES = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")


class DamagedFileError(SpiritLevelError):
    """A file of a study that does not hold what it should."""

    def __init__(self, path: Path, damage: str, remedy: str) -> None:
        super().__init__(f"{path} is damaged ({damage}); {remedy}")
        self.path, self.damage = path, damage


def read_object(path: Path, check: Check, remedy: str) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is no file. A file that holds anything else is a `DamagedFileError`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SpiritLevelError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(path, str(error), remedy) from None
    damage = check(found) if isinstance(found, dict) else f"it holds {_kind(found)} where an object is needed"
    if damage:
        raise DamagedFileError(path, damage, remedy)
    return dict(found)


_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}


def _kind(found: Any) -> str:
    return _KINDS.get(type(found), "nothing")


def study_damage(plain: Mapping[str, Any]) -> str:
    """What is wrong with the content of `study.json`."""
    return (
        wrong_entries(plain, {"name": str, "cells": list})
        or wrong_entries(plain, {"config": dict, "factors": dict, "tied": list}, optional=True)
        or wrong_entries(plain.get("config") or {}, {"seeds": list}, optional=True)
        or wrong_entries(plain.get("factors") or {}, dict.fromkeys(plain.get("factors") or {}, list))
        or (
            "" if all(isinstance(group, list) for group in plain.get("tied") or []) else "'tied' is not a list of lists"
        )
        or next(
            (f"cell {i}: {damage}" for i, entry in enumerate(plain["cells"]) if (damage := _entry_damage(entry))), ""
        )
    )


def _entry_damage(entry: Any) -> str:
    if not isinstance(entry, dict):
        return f"is {_kind(entry)}"
    damage = wrong_entries(entry, {"hash": str}) or wrong_entries(entry, {"factors": dict, "seed": int}, optional=True)
    return damage or ("" if _FOLDER_NAME.fullmatch(entry["hash"]) else f"{entry['hash']!r} is not a hash")


def cell_damage(plain: Mapping[str, Any]) -> str:
    """What is wrong with the content of `cell.json`."""
    return wrong_entries(plain, {"config": dict, "fingerprint": str, "factors": dict})


def training_damage(plain: Mapping[str, Any]) -> str:
    """What is wrong with the content of `training.json`, or with the part of a result that repeats it."""
    wrong = wrong_entries(plain, {"reached": bool, "stop_reason": str}) or next(
        (f"{key} is not a number" for key in _TRAINING_NUMBERS if not _is_number(plain.get(key))), ""
    )
    return wrong or _along_damage(plain, {"file": str, "weights": str})


def _along_damage(plain: Mapping[str, Any], kinds: Mapping[str, type]) -> str:
    """What is wrong with the entries of a training's marks, each of which has a kind, a level and what `kinds` says."""
    along = plain.get("along") or []
    if not isinstance(along, list) or not all(isinstance(entry, dict) for entry in along):
        return "'along' is not a list of objects"
    for entry in along:
        damage = wrong_entries(entry, {"kind": str, **kinds})
        if damage or not _is_number(entry.get("level")):
            return f"'along': {damage or 'a level is not a number'}"
        if "file" in kinds and not _FILE_NAME.fullmatch(entry["file"]):
            return f"'along': {entry['file']!r} is not a file of a cell"
    return ""


def result_damage_of(cell: str) -> Check:
    """`result_damage` for the folder of one cell: a result that was copied there from another would be counted as its own."""

    def damage(plain: Mapping[str, Any]) -> str:
        other = plain.get("hash", cell)
        return result_damage(plain) or ("" if other == cell else f"it is the result of cell {other}")

    return damage


def result_damage(plain: Mapping[str, Any]) -> str:
    """What is wrong with the content of `result.json`: whatever `results.py` reads of it must be there to be read."""
    parts = {"measures": dict, "rescaled": dict, "attacks": list, "environment": dict, "data": dict}
    damage = wrong_entries(plain, {"training": dict}) or wrong_entries(plain, parts, optional=True)
    damage = damage or _along_damage(plain, {})
    if damage:
        return damage
    attacks, along = plain.get("attacks") or [], plain.get("along") or []
    if not all(isinstance(attack, dict) and _is_number(attack.get("target")) for attack in attacks):
        return "an attack has no target"
    reports = [plain.get("measures"), plain.get("rescaled"), *(each.get("measures") for each in (*attacks, *along))]
    damages = (
        wrong_entries(plain["training"], {"reached": bool}),
        _wrong_numbers(plain["training"], (*_OUTCOMES, "seconds", "gradient_norm")),
        *(_wrong_numbers(entry, (*_OUTCOMES, "epoch")) for entry in along),
        *(wrong_entries(entry, {"step": int}, optional=True) for entry in along),
        *("" if "measures" in attack else "an attack has no measures" for attack in attacks),
        *(_wrong_numbers(attack, ("output_change",)) for attack in attacks),
        *(_report_damage(report) for report in reports if report is not None and report != {}),
    )
    return next(filter(None, damages), "")


def _report_damage(report: Any) -> str:
    """What is wrong with a saved report."""
    values = report.get("values") if isinstance(report, dict) else None
    if not isinstance(values, dict):
        return "a report has no values"
    for name, value in values.items():
        if not isinstance(value, dict) or not {"value", "error", "converged"} <= set(value):
            return f"{name} is not a measured value"
        layers = {"layers": dict, "layer_errors": dict}
        if _wrong_numbers(value, ("value", "error")) or wrong_entries(value, layers, optional=True):
            return f"{name} is not a measured value"
        if any(_wrong_numbers(value.get(key) or {}, value.get(key) or ()) for key in layers):
            return f"{name} has a layer without a number"
    return wrong_entries(report, {"problem": dict}, optional=True)


def _wrong_numbers(plain: Mapping[str, Any], names: Iterable[str]) -> str:
    """The first of these entries that is no number, in words; one that is missing or null stands for nan."""
    wrong = (name for name in names if plain.get(name) is not None and not _is_number(plain[name]))
    return next((f"{name!r} is not a number" for name in wrong), "")


def failure_damage(plain: Mapping[str, Any]) -> str:
    """What is wrong with the content of `failed.json`."""
    return wrong_entries(plain, {"error": str, "attempts": int})


def wrong_entries(plain: Mapping[str, Any], kinds: Mapping[str, type], *, optional: bool = False) -> str:
    """The first entry that is missing or of another kind, in words; those that are `optional` may be missing or null."""
    for key, kind in kinds.items():
        if plain.get(key) is None:
            if not optional:
                return f"it has no {key!r}"
        elif not isinstance(plain[key], kind):
            return f"{key!r} is {_kind(plain[key])}"
    return ""


def _is_number(entry: Any) -> bool:
    try:
        float(entry)
    except (TypeError, ValueError, OverflowError):  # a whole number can be too long for a float
        return False
    return True


def set_aside(path: Path) -> None:
    """Rename a damaged file, so that it is no longer read and can still be looked at."""
    os.replace(path, path.with_name(f"{path.name}.damaged"))
