"""What lies in a study's folder: every cell with its settings, how it ended and what was measured."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from spiritlevel.errors import SpiritLevelError
from spiritlevel.saved import number
from spiritlevel.study.along import Mark, read_mark
from spiritlevel.study.store import CellFolder, StudyFolder

Status = Literal["measured", "excluded", "failed", "unfinished"]

# What the papers call generalization. The network with the larger number generalizes worse, in each of them.
GAPS: Mapping[str, Callable[[Mapping[str, float]], float]] = {
    "gap_accuracy": lambda t: t["train_accuracy"] - t["test_accuracy"],  # tsuzuku2019, section 6
    "gap_loss": lambda t: t["test_loss"] - t["train_loss"],  # petzka2019, section 4, up to a constant factor
    "test_error": lambda t: 1.0 - t["test_accuracy"],  # rangamani2019, Table 4, where every train accuracy is 1
}

# κ of a layer is neither a sum nor a maximum; the measures over layers share it.
_LAYER_NAMES = {
    "kappa_max": "kappa",
    "kappa_sum": "kappa",
    "kappa_trace_max": "kappa_trace",
    "kappa_trace_sum": "kappa_trace",
}
_OUTCOMES = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
_NUMBERS = (*_OUTCOMES, "seconds", "gradient_norm")


@dataclass(frozen=True)
class Quantity:
    """A measured number: of a network, or of one of its layers."""

    value: float
    error: float
    converged: bool


# "kappa_trace_sum" or "kappa_trace[fc1.weight]" → its value.
Quantities = Mapping[str, Quantity]


@dataclass(frozen=True)
class Attack:
    """A network made as sharp as `target` to the plain Hessian norm without changing its function, measured again."""

    target: float
    output_change: float
    measures: Quantities


@dataclass(frozen=True)
class Passed:
    """A network at a mark of its training: how far it was, and what was measured there, or why nothing was."""

    mark: Mark
    step: int
    epoch: float
    outcomes: Mapping[str, Any]
    measures: Quantities
    error: str = ""


@dataclass(frozen=True)
class Cell:
    """One network of a study.

    Attributes:
        hash: Its folder's name.
        factors: What distinguishes it, apart from its seed.
        status: `measured` where it reached the stopping rule and was measured; only those take part in statistics.
        reason: Why it was not measured, in a line; empty where it was.
        error: What went wrong, in full; empty where nothing did.
        training: Losses, accuracies and how training ended; empty where it never ended.
        measures: Network and layer quantities; an excluded network can have them too.
        rescaled: The same of a twin with randomly rescaled layers; empty where there is none.
        along: The network at every mark of its training that it came to.
    """

    hash: str
    factors: Mapping[str, Any]
    seed: int | None
    status: Status
    reason: str
    error: str = ""
    training: Mapping[str, Any] = field(default_factory=dict)
    measures: Quantities = field(default_factory=dict)
    rescaled: Quantities = field(default_factory=dict)
    attacks: tuple[Attack, ...] = ()
    along: tuple[Passed, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    problem: Mapping[str, Any] = field(default_factory=dict)

    @property
    def coordinates(self) -> Mapping[str, Any]:
        """Its place in the grid: the factors and the seed."""
        return self.factors if "seed" in self.factors or self.seed is None else {**self.factors, "seed": self.seed}

    def gap(self, name: str) -> float:
        """The generalization gap by one of the definitions in `GAPS`; nan where a number for it is missing."""
        return GAPS[name]({key: self.trained(key) for key in _OUTCOMES})

    def trained(self, name: str) -> float:
        """A number of the training, nan where it is missing."""
        return number(self.training.get(name))

    def at(self, mark: Mark) -> Cell:
        """The network as it was at a mark: measured where it came there, whatever became of it afterwards."""
        found = next((passed for passed in self.along if passed.mark == mark), None)
        if found is None or not found.measures:
            reason = f"did not come to {mark}" if found is None else f"not measured at {mark}: {found.error}"
            bare = replace(self, measures={}, rescaled={}, attacks=())
            return replace(bare, status="excluded", reason=reason) if self.training else bare
        training = {**self.training, **found.outcomes, "epochs": found.epoch, "steps": found.step}
        there = replace(self, status="measured", reason="", training=training, measures=found.measures)
        return replace(there, rescaled={}, attacks=())


@dataclass(frozen=True)
class Axis:
    """A factor of the grid, or several that are tied and move together."""

    members: tuple[str, ...]
    levels: tuple[tuple[Any, ...], ...]

    @property
    def name(self) -> str:
        """As the study names it: `training.batch_size and training.learning_rate`."""
        return " and ".join(self.members)

    @property
    def label(self) -> str:
        """The same in short: `batch_size and learning_rate`."""
        return " and ".join(map(short_name, self.members))

    @property
    def is_seed(self) -> bool:
        """A seed is chance, not a choice: no measure is asked to rank it."""
        return all(member.rpartition(".")[2] == "seed" for member in self.members)

    @property
    def is_batch_size(self) -> bool:
        """Whether it is the batch size, or several settings that are tied to it."""
        return any(short_name(member) == "batch_size" for member in self.members)

    @property
    def numeric(self) -> bool:
        """Whether its levels are numbers, which then stand by size; all else stands in the order of the grid."""
        return all(_is_number(level[0]) for level in self.levels)

    def level(self, cell: Cell) -> int:
        """The index of the cell's level."""
        return self.levels.index(tuple(_hashable(cell.coordinates.get(member)) for member in self.members))

    def text(self, level: int) -> str:
        """A level as a reader sees it: `1000 / 0.02` where two factors are tied."""
        return " / ".join(factor_text(entry) for entry in self.levels[level])


@dataclass(frozen=True)
class Study:
    """A study's folder as it stands: its grid, and every cell in the grid's order."""

    folder: Path
    name: str
    title: str
    version: str
    paper: str | None
    gap: str
    config: Mapping[str, Any]
    factors: Mapping[str, Any]
    tied: tuple[tuple[str, ...], ...]
    cells: tuple[Cell, ...]
    unknown_folders: int

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """What the cells differ in; factors that are tied count as one."""
        return _axes(self.cells, self.tied)

    @cached_property
    def parts(self) -> Mapping[str, Study]:
        """The study network by network and data set by data set, where there are several: curvatures of different
        architectures are of different sizes, and the papers correlate within one."""
        names = [n for n in ("data.name", "model.name") if len({c.factors.get(n) for c in self.cells}) > 1]
        parts: dict[str, list[Cell]] = {}
        for cell in self.cells if names else ():
            parts.setdefault(", ".join(str(cell.factors.get(name)) for name in names), []).append(cell)
        return {name: replace(self, cells=tuple(cells)) for name, cells in parts.items()}

    @cached_property
    def marks(self) -> tuple[Mark, ...]:
        """Where its networks were measured along their training: losses as training goes, then epochs."""
        found = {passed.mark for cell in self.cells for passed in cell.along}
        losses = sorted((mark for mark in found if mark.kind == "loss"), key=lambda mark: -mark.level)
        return (*losses, *sorted(found.difference(losses), key=lambda mark: mark.level))

    def at(self, mark: Mark) -> Study:
        """The study at a mark: every network as it was there."""
        return replace(self, cells=tuple(cell.at(mark) for cell in self.cells))

    @property
    def measured(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.status == "measured")

    def with_status(self, status: Status) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.status == status)

    @property
    def factor_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for cell in self.cells for name in cell.factors))

    def quantities(self, layers: bool | None = None) -> tuple[str, ...]:
        """The quantities measured on at least one network; `layers` keeps those of layers, or those of networks."""
        names = dict.fromkeys(name for cell in self.measured for name in cell.measures)
        return tuple(name for name in names if layers is None or layers != is_of_network(name))

    def column(self, name: str, rescaled: bool = False) -> list[float]:
        """The values of a quantity, one for each measured network; nan where a network lacks it."""
        found = [(cell.rescaled if rescaled else cell.measures).get(name) for cell in self.measured]
        return [math.nan if quantity is None else quantity.value for quantity in found]


def read_study(folder: str | os.PathLike[str] | StudyFolder) -> Study:
    """Everything that a study's folder holds so far. A cell without a result is unfinished, never left out."""
    stored = folder if isinstance(folder, StudyFolder) else StudyFolder(folder)
    plain = stored.study()
    cells = tuple(_read_cell(stored.cell(entry["hash"]), entry) for entry in plain["cells"])
    known = {cell.hash for cell in cells}
    present = _folders_in(stored.path / "cells")
    unknown = sum(name not in known and not name.startswith(".") for name in present)
    return described_study(stored.path, plain, cells, unknown)


def described_study(folder: Path, plain: Mapping[str, Any], cells: tuple[Cell, ...], unknown_folders: int) -> Study:
    """The study that the content of `study.json` describes, with these cells."""
    return Study(
        folder=folder,
        name=str(plain["name"]),
        title=str(plain.get("title") or plain["name"]),
        version=str(plain.get("version", "")),
        paper=plain.get("paper"),
        gap="gap_loss" if plain.get("gap") == "loss" else "gap_accuracy",
        config=plain.get("config") or {},
        factors=plain.get("factors") or {},
        tied=tuple(tuple(map(str, group)) for group in plain.get("tied") or ()),
        cells=cells,
        unknown_folders=unknown_folders,
    )


def _folders_in(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise SpiritLevelError(f"{folder} cannot be read: {error.strerror}") from None


def layer_of(name: str) -> tuple[str, str | None]:
    """The measure in a quantity's name, and the layer if it has one.

    >>> layer_of("kappa_trace[fc1.weight]"), layer_of("rho_sum")
    (('kappa_trace', 'fc1.weight'), ('rho_sum', None))
    """
    if not name.endswith("]"):
        return name, None
    base, _, layer = name[:-1].partition("[")
    return base, layer


def is_of_network(name: str) -> bool:
    """Whether a quantity is one of the whole network, not of a layer.

    >>> is_of_network("kappa_trace[fc1.weight]"), is_of_network("rho_sum")
    (False, True)
    """
    return layer_of(name)[1] is None


def short_name(factor: str) -> str:
    """A setting without its section.

    >>> short_name("training.batch_size"), short_name("model.name")
    ('batch_size', 'model')
    """
    section, _, key = factor.rpartition(".")
    return section if key == "name" and section else key


def factor_text(entry: Any) -> str:
    """A factor's value as a reader sees it.

    >>> factor_text(0.02), factor_text(1000), factor_text("xavier"), factor_text(["a", 1])
    ('0.02', '1000', 'xavier', '["a", 1]')
    """
    if isinstance(entry, str):
        return entry
    if isinstance(entry, float):
        return f"{entry:g}"
    return json.dumps(entry)


def read_curve(study: Study, cell: Cell) -> Mapping[str, tuple[float, ...]]:
    """The training of a cell, epoch by epoch: column → its numbers; nothing where there are none that can be read."""
    try:
        text = StudyFolder(study.folder).cell(cell.hash).curve.read_text(encoding="utf-8")
        rows = list(csv.DictReader(io.StringIO(text)))
        return {name: tuple(float(row[name] or "nan") for row in rows) for name in (rows[0] if rows else ())}
    except (OSError, ValueError, TypeError, csv.Error):
        return {}


def _read_cell(folder: CellFolder, entry: Mapping[str, Any]) -> Cell:
    """The cell as its folder tells it: a result before a failure, a failure before nothing."""
    unfinished = Cell(folder.hash, entry.get("factors") or {}, entry.get("seed"), "unfinished", "no result yet")
    try:
        result = folder.result()
        failure = folder.failure() if result is None else None
        if result is not None:
            return _finished(unfinished, result)
    except SpiritLevelError as error:
        within = str(error).replace(f"{folder.path}{os.sep}", "")
        return replace(unfinished, status="failed", reason=within, error=str(error))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        told = f"result.json is not a cell's result ({error!r}); delete it and run the study again"
        return replace(unfinished, status="failed", reason=told, error=told)
    if failure is not None:
        return replace(unfinished, status="failed", reason=_failure(failure), error=failure["error"])
    return unfinished


def _finished(cell: Cell, result: Mapping[str, Any]) -> Cell:
    """The cell with its result."""
    training, measures = dict(result["training"]), result.get("measures")
    for name in _NUMBERS:
        number(training.get(name))
    reached = training["reached"]
    measured = reached and measures is not None
    stopped = str(training.get("stop_reason") or "no reason given")
    reason = (
        "" if measured else "reached the stopping rule, but was not measured" if reached else _missed(stopped, training)
    )
    return replace(
        cell,
        seed=result["seed"] if _is_number(result.get("seed")) else cell.seed,
        status="measured" if measured else "excluded",
        reason=reason,
        training=training,
        measures=_quantities(measures),
        rescaled=_quantities(result.get("rescaled")),
        attacks=tuple(
            Attack(number(each["target"]), number(each.get("output_change")), _quantities(each["measures"]))
            for each in (result.get("attacks") or ())
        ),
        along=tuple(map(_passed, result.get("along") or ())),
        environment=result.get("environment") or {},
        data=result.get("data") or {},
        problem=(measures or {}).get("problem") or {},
    )


def _passed(entry: Mapping[str, Any]) -> Passed:
    outcomes = {name: number(entry.get(name)) for name in _OUTCOMES}
    place = (read_mark(entry), int(entry.get("step") or 0), number(entry.get("epoch")))
    return Passed(*place, outcomes, _quantities(entry.get("measures")), str(entry.get("error") or ""))


def _missed(stopped: str, training: Mapping[str, Any]) -> str:
    """Why a network is excluded, with where it got to."""
    accuracy, loss = number(training.get("train_accuracy")), number(training.get("train_loss"))
    return f"did not reach the stopping rule (ended: {stopped}): train accuracy {accuracy:.4g}, train loss {loss:.3g}"


def _failure(failure: Mapping[str, Any]) -> str:
    attempts = failure.get("attempts")
    # The last line of an error says what happened; the rest stays in failed.json.
    told = (str(failure.get("error") or "unknown error").strip().splitlines() or ["unknown error"])[-1]
    return told + (f" ({attempts} attempts)" if isinstance(attempts, int) and attempts > 1 else "")


def _quantities(report: Mapping[str, Any] | None) -> dict[str, Quantity]:
    """Every value of a saved report, then those of its layers."""
    found: dict[str, Quantity] = {}
    layers: dict[str, Quantity] = {}
    for name, value in ((report or {}).get("values") or {}).items():
        converged = bool(value["converged"])
        found[name] = Quantity(number(value["value"]), number(value["error"]), converged)
        errors = value.get("layer_errors") or {}
        for layer, entry in (value.get("layers") or {}).items():
            layers[f"{_layer_name(name)}[{layer}]"] = Quantity(number(entry), number(errors.get(layer, 0.0)), converged)
    return {**found, **layers}


def _layer_name(name: str) -> str:
    """What a measure's layers hold; options and another loss, in brackets after the name, stay.

    >>> _layer_name("kappa_trace_sum(loss=mse)"), _layer_name("rho_max")
    ('kappa_trace(loss=mse)', 'rho_max')
    """
    base, bracket, options = name.partition("(")
    return _LAYER_NAMES.get(base, base) + bracket + options


def _axes(cells: Sequence[Cell], tied: Sequence[Sequence[str]]) -> tuple[Axis, ...]:
    names = list(dict.fromkeys(name for cell in cells for name in cell.coordinates))
    axes: list[Axis] = []
    for name in names:
        members = next((tuple(m for m in group if m in names) for group in tied if name in group), (name,))
        if any(name in axis.members for axis in axes):
            continue
        levels = dict.fromkeys(tuple(_hashable(cell.coordinates.get(member)) for member in members) for cell in cells)
        if len(levels) > 1:
            numbers = all(_is_number(entry) for level in levels for entry in level[:1])
            axes.append(Axis(members, tuple(sorted(levels) if numbers else levels)))
    return tuple(axes)


def _is_number(entry: Any) -> bool:
    return isinstance(entry, int | float) and not isinstance(entry, bool)


def _hashable(entry: Any) -> Any:
    """An entry that can be compared and hashed."""
    return json.dumps(entry, sort_keys=True) if isinstance(entry, list | dict) else entry
