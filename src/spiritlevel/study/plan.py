"""A study as a TOML file: what is trained on what, which settings are crossed, what is measured.

Everything is checked before work starts; an error names the file, the line, the key and the remedy.
"""

from __future__ import annotations

import itertools
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from spiritlevel.errors import SpiritLevelError, suggest
from spiritlevel.study.settings import CROSSED, CellConfig, Factor, Head, Plan, PlannedCell, flattened

# --- reading ----------------------------------------------------------------------------------------------------------


def list_studies() -> dict[str, str]:
    """The built-in studies with their titles."""
    files = sorted((f for f in _built_in().iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return {f.name.removesuffix(".toml"): tomllib.loads(f.read_text(encoding="utf-8"))["title"] for f in files}


def _built_in() -> Traversable:
    return resources.files("spiritlevel.study") / "studies"


def read_text(name_or_file: str) -> tuple[str, str]:
    """The text of a built-in study or of a file, and what to call it in messages."""
    path = Path(name_or_file)
    if path.suffix == ".toml":
        try:
            return path.read_text(encoding="utf-8-sig"), str(path)
        except OSError as error:
            raise SpiritLevelError(f"{path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise SpiritLevelError(f"{path} is not text in UTF-8; a study is a TOML file") from None
    known = list_studies()
    if name_or_file not in known:
        raise SpiritLevelError(
            f"no built-in study {name_or_file!r}{suggest(name_or_file, known) or '.'} Built in: {', '.join(known)}. "
            "A file of your own must end in .toml"
        )
    return (_built_in() / f"{name_or_file}.toml").read_text(encoding="utf-8"), f"{name_or_file}.toml"


def read_plan(
    name_or_file: str, *, quick: bool = False, data_folder: str | None = None, overrides: Sequence[str] = ()
) -> Plan:
    """What the study in a file, or a built-in one, asks for: with its [quick] settings if wanted, then `overrides`.

    An override is "training.epochs=5", "seeds=3" or "factors.training.batch_size=[32, 64]". Setting something that is
    crossed to a single value takes it out of the grid.
    """
    text, where = read_text(name_or_file)
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SpiritLevelError(f"{where}: not valid TOML: {error}") from None
    reader = _Reader(where, _lines_of_keys(text))
    raw.setdefault("name", Path(where).stem)
    overlay = raw.pop("quick", {})
    if not isinstance(overlay, dict):
        reader.refuse(("quick",), "must be a table of settings, [quick]")
    if quick:
        raw = reader.quickened(raw, overlay)
    raw["factors"] = reader.labelled(raw.get("factors", {}))
    told = _data_names(raw)
    if data_folder is not None:
        reader.override(raw, "data.folder", data_folder, "--data-folder")
    for override in overrides:
        reader.override(raw, *read_override(override, "--set"), f"--set {override}")
    changed = _data_names(raw) != told
    plan = reader.plan(raw)
    if quick:
        return replace(plan, quick=True, title=_quick_title(plan))
    if not changed or not plan.title or ("title",) in reader.given:
        return plan
    return replace(plan, title=f"trained on {plan.data} instead; {plan.title}")


def _quick_title(plan: Plan) -> str:
    """What the small version is: the title of the whole study may name data and networks that it does not use."""
    return f"quick version, trained on {plan.data}" + (f", of “{plan.title}”" if plan.title else "")


def _data_names(raw: Mapping[str, Any]) -> list[Any]:
    """The data sets that a file names, crossed, tied to other settings or fixed."""
    levels = ((label, value) for label, values in raw["factors"].items() for value in values)
    tables = (dict(flattened(value)) if isinstance(value, dict) else {label: value} for label, value in levels)
    crossed = [table["data.name"] for table in tables if "data.name" in table]
    section = raw.get("data")
    return crossed or [section.get("name") if isinstance(section, dict) else None]


def read_override(text: str, option: str) -> tuple[str, Any]:
    """ "key=value" as both; the value as TOML writes it, and a value that is not valid TOML is read as a string."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise SpiritLevelError(f"{option} takes key=value, got {text!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return key, value


Key = tuple[str, ...]
M = TypeVar("M", bound=BaseModel)


class _Reader:
    """From plain dictionaries to a checked plan; knows where each key stands."""

    def __init__(self, where: str, lines: Mapping[Key, int]) -> None:
        self.where, self.lines = where, lines
        self.roots: tuple[Key, ...] = ((),)
        self.given: dict[Key, str] = {}  # keys that came from elsewhere, with the words for where

    def refuse(self, key: Sequence[str], message: str) -> NoReturn:
        raise SpiritLevelError(f"{self._place(tuple(key))}: {'.'.join(key)}: {message}")

    def _place(self, key: Key) -> str:
        above = [key[:length] for length in range(len(key), 0, -1)]
        if given := next((self.given[each] for each in above if each in self.given), None):
            return given
        lines = (self.lines.get((*root, *each)) for each in above for root in self.roots)
        line = next((line for line in lines if line is not None), None)
        return self.where if line is None else f"{self.where}, line {line}"

    def quickened(self, raw: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
        """The study with [quick] laid over it: keys replace keys, `factors` and sections with a `name` replace whole."""
        if not overlay:
            raise SpiritLevelError(f"{self.where} has no section [quick], so there is nothing quicker to run; add one")
        self.roots = (("quick",), ())
        made = deepcopy(raw)
        for section, settings in overlay.items():
            before = made.get(section)
            merges = isinstance(settings, dict) and isinstance(before, dict) and section != "factors"
            made[section] = {**before, **settings} if merges and "name" not in settings else settings  # type: ignore[dict-item]
        return made

    def labelled(self, factors: Any) -> dict[str, list[Any]]:
        """Factors by label: a setting's dotted name with its values, or any word with tables of tied settings."""
        if not isinstance(factors, dict):
            self.refuse(("factors",), "must be a table, [factors], of settings with lists of values")
        made: dict[str, list[Any]] = {}
        for name, values in flattened(factors):
            if not isinstance(values, list) or not values:
                self.refuse(("factors", *name.split(".")), f"must be a list of values to cross, got {values!r}")
            made[name] = values
        return made

    def override(self, raw: dict[str, Any], name: str, value: Any, said: str) -> None:
        key = tuple(part.strip("\"' ") for part in name.split("."))
        self.given[key] = said
        if key[0] == "factors":
            raw["factors"].update(self.labelled({".".join(key[1:]): value} if len(key) > 1 else value))
            return
        if tied := [label for label, values in raw["factors"].items() if label != name and name in _names(values)]:
            self.refuse(key, f"is tied to other settings; set them together: --set 'factors.{tied[0]}=[{{...}}]'")
        raw["factors"].pop(name, None)
        place = raw
        for part in key[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                self.refuse(key, f"{part!r} is a value, not a section")
        place[key[-1]] = value

    def plan(self, raw: dict[str, Any]) -> Plan:
        factors = tuple(self.factor(label, values) for label, values in raw.pop("factors").items())
        met = Counter(name for factor in factors for name in factor.names)
        for name, times in met.items():
            if times > 1:
                self.refuse(("factors", *name.split(".")), "is crossed twice; keep one of the factors")
        sections = {key: raw.pop(key) for key in list(raw) if key in CellConfig.model_fields and key != "seed"}
        head = self.checked(Head, raw, ())
        self.check_size(head, factors)
        seeds = tuple(range(head.seeds)) if isinstance(head.seeds, int) else head.seeds
        if len(set(seeds)) < len(seeds):
            self.refuse(("seeds",), f"must differ from each other, got {list(seeds)}")
        sections.setdefault("measure", {})
        cells = tuple(self.crossed(sections, factors, seeds))
        settings = cells[0].config.model_dump(mode="json", exclude={"seed"})
        return Plan(head.name, head.title, head.paper, head.gap, seeds, factors, settings, cells)

    def check_size(self, head: Head, factors: tuple[Factor, ...]) -> None:
        """Refuse a grid that is larger than the study says it may be, before it is made."""
        seeds = head.seeds if isinstance(head.seeds, int) else len(head.seeds)
        sizes = [*(len(factor.values) for factor in factors), seeds]
        count = math.prod(sizes)
        if count > head.most_cells:
            product = " × ".join(f"{size:,}" for size in sizes)
            self.refuse(
                ("seeds",),
                f"the study has {f'{product} = ' if len(sizes) > 1 else ''}{count:,} networks, more than most_cells = "
                f"{head.most_cells:,}; cross less or take fewer seeds, or, if that many are meant, --set most_cells={count}",
            )

    def factor(self, label: str, values: list[Any]) -> Factor:
        key = ("factors", *label.split("."))
        if not any(isinstance(value, dict) for value in values):
            self._check_crossable(label, key)
            return Factor((label,), tuple((value,) for value in self._distinct(values, key)))
        if "." in label:
            self.refuse(key, "a table cannot be crossed; cross the settings inside, one by one or tied under a name")
        tables = [dict(flattened(value)) if isinstance(value, dict) else {} for value in values]
        names = tuple(tables[0])
        if any(set(table) != set(names) for table in tables) or not names:
            self.refuse(key, "tied settings need the same keys in every table")
        for name in names:
            self._check_crossable(name, key)
        rows = self._distinct([[table[name] for name in names] for table in tables], key)
        return Factor(names, tuple(tuple(row) for row in rows))

    def _distinct(self, values: list[Any], key: Key) -> list[Any]:
        if any(value in values[:i] for i, value in enumerate(values)):
            self.refuse(key, f"values must differ from each other, got {values}")
        return values

    def _check_crossable(self, name: str, key: Key) -> None:
        known = list(_settings())
        if name in known:
            return
        if name in ("seed", "seeds"):
            self.refuse(key, "seeds are crossed by themselves: write `seeds = 5` or a list above the first section")
        near = suggest(name, known) or "; settings are written section.key, such as training.batch_size"
        self.refuse(key, f"no setting {name!r} to cross{near}")

    def crossed(
        self, sections: dict[str, Any], factors: tuple[Factor, ...], seeds: tuple[int, ...]
    ) -> Iterator[PlannedCell]:
        for point in itertools.product(*(factor.values for factor in factors)):
            chosen: dict[str, Any] = {}
            for factor, values in zip(factors, point, strict=True):
                chosen.update(zip(factor.names, values, strict=True))
            settings = deepcopy(sections)
            for name, value in chosen.items():
                self._set(settings, name, value)
            config = self.checked(CellConfig, {**settings, "seed": seeds[0]}, (), crossed=tuple(chosen))
            for seed in seeds:
                yield PlannedCell(dict(chosen), config.model_copy(update={"seed": seed}))

    def _set(self, settings: dict[str, Any], name: str, value: Any) -> None:
        *path, last = name.split(".")
        place: Any = settings
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                self.refuse(path, f"must be a table, because {name} is crossed")
        place[last] = value

    def checked(self, model: type[M], raw: Any, key: Key, crossed: Key = ()) -> M:
        try:
            return model.model_validate(raw)
        except ValidationError as error:
            # An unknown key is often the misspelt one that is missing: name it rather than what is missing.
            first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        except SpiritLevelError as error:
            raise SpiritLevelError(f"{self.where}: {error}") from None
        path = tuple(str(part) for part in first["loc"] if not str(part).startswith(("constrained-", "tuple[")))
        shown = (*key, *path)
        if ".".join(shown) in crossed:
            shown = ("factors", *shown)
        self.refuse(shown, _explained(first, model, path))


def _explained(error: Any, model: type[BaseModel], path: Key) -> str:
    """What pydantic found, with the remedy."""
    kind, given = error["type"], error.get("input")
    if kind == "extra_forbidden":
        known = _fields_at(model, path[:-1])
        return f"unknown key{suggest(path[-1], known) or '.'} Known here: {', '.join(known)}"
    if kind == "missing":
        return "is missing; add it"
    said = str(error["msg"]).removeprefix("Value error, ")
    said = said[0].lower() + said[1:] if not said[0].isdigit() else said
    return said if isinstance(given, dict) else f"{said}, got {given!r}"


def _fields_at(model: type[BaseModel], path: Key) -> list[str]:
    """The keys of the section that `path` leads to."""
    for part in path:
        if part.isdigit():
            continue
        model = _section_of(model.model_fields[part].annotation) or model
    fields = [name for name in model.model_fields if not (model is CellConfig and name == "seed")]
    return [*fields, "factors", "quick", *CellConfig.model_fields][: len(fields) + 6] if model is Head else fields


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((found for part in getattr(annotation, "__args__", ()) if (found := _section_of(part))), None)


def _settings() -> Iterator[str]:
    """Every setting that can be crossed, by its dotted name."""
    for section in CROSSED:
        yield from _settings_in(section, CellConfig.model_fields[section].annotation)


def _settings_in(prefix: str, annotation: Any) -> Iterator[str]:
    section = _section_of(annotation)
    if section is None:
        yield prefix
        return
    for name, field in section.model_fields.items():
        yield from _settings_in(f"{prefix}.{name}", field.annotation)


def _names(values: list[Any]) -> set[str]:
    return {name for value in values if isinstance(value, dict) for name, _ in flattened(value)}


_BARE = r"""(?:"[^"]*"|'[^']*'|[\w-]+)"""
_DOTTED = rf"{_BARE}(?:\s*\.\s*{_BARE})*"
_TABLE = re.compile(rf"\s*(\[\[?)\s*({_DOTTED})\s*\]")
_ASSIGNMENT = re.compile(rf"\s*({_DOTTED})\s*=")


def _lines_of_keys(text: str) -> dict[Key, int]:
    """The line of every table and key; what stands inside a value has the line of the value."""
    found: dict[Key, int] = {}
    table: Key = ()
    met: Counter[Key] = Counter()
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TABLE.match(line):
            table = _split_key(match[2])
            if match[1] == "[[":
                met[table] += 1
                table = (*table, str(met[table] - 1))
            found.setdefault(table, number)
        elif match := _ASSIGNMENT.match(line):
            found.setdefault((*table, *_split_key(match[1])), number)
    return found


def _split_key(dotted: str) -> Key:
    parts = (part.strip("\"'") for part in re.findall(_BARE, dotted))
    return tuple(piece for part in parts for piece in part.split("."))
