"""What a tracker has seen: a row for every point at which something was measured."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from spiritlevel.errors import SpiritLevelError, suggest
from spiritlevel.measuring.report import value_from_dict
from spiritlevel.measuring.value import Cost, Value, scalars
from spiritlevel.presenting import show
from spiritlevel.saved import Format, number, numbers, write_whole

FORMAT = Format("spiritlevel-history-1", "history")


@dataclass(frozen=True)
class Point:
    """One point of a training: `point["rho_sum"]` is a `Value`; `point["step"]`, `["epoch"]`, `["loss"]` and `["cost"]` too.

    Attributes:
        step: The step it belongs to.
        loss: The loss of the probe set, where a measure brought it; nan where none did.
        values: Measure's name → its value; measures that were not due are not there.
        epoch: As it was passed to `step`.
        train_loss: As it was passed to `step`; nan where it was not.
        thresholds: Measure's name → the value from which on the optimizer is unstable, at this point's learning rate.
        cost: What it cost.
        reason: "budget", "every", "at_loss" or "forced".
        levels: The levels of `at_loss` that the loss reached here for the first time.
        notes: What a reader must know: why something is missing.
    """

    step: int
    loss: float
    values: Mapping[str, Value]
    epoch: float | None = None
    train_loss: float = math.nan
    thresholds: Mapping[str, float] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    reason: str = "forced"
    levels: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Any:
        if key in ("step", "epoch", "loss", "train_loss", "cost"):
            return getattr(self, key)
        if key not in self.values:
            known = ", ".join(self.values) or "no measure"
            raise KeyError(f"step {self.step} has no {key!r}; it has step, epoch, loss, train_loss, cost and {known}")
        return self.values[key]

    def __contains__(self, key: object) -> bool:
        return key in self.values

    def scalars(self, prefix: str = "flatness", *, layers: bool = True) -> dict[str, float]:
        """Every finite number under a flat name, as `Report.scalars`, with the lines of stability: `…/threshold`."""
        loss = {f"{prefix}/loss": self.loss} if math.isfinite(self.loss) else {}
        lines = {f"{prefix}/{name}/threshold": line for name, line in self.thresholds.items() if name in self.values}
        return loss | scalars(self.values, prefix, layers=layers) | lines

    def joined(self, later: Point) -> Point:
        """This point with what was measured later at the same step."""
        costs = {
            name: getattr(self.cost, name) + getattr(later.cost, name)
            for name in ("passes", "products", "gradients", "seconds")
        }
        return replace(
            later,
            loss=later.loss if math.isfinite(later.loss) else self.loss,
            train_loss=later.train_loss if math.isfinite(later.train_loss) else self.train_loss,
            epoch=self.epoch if later.epoch is None else later.epoch,
            values={**self.values, **later.values},
            cost=Cost(**costs, peak_memory=max(self.cost.peak_memory, later.cost.peak_memory)),
            levels=self.levels + later.levels,
            notes=tuple(dict.fromkeys((*self.notes, *later.notes))),
        )


class History(Sequence[Point]):
    """The points of a training in the order of its steps. Printing gives a table; `history[-1]["rho_sum"]` is a `Value`.

    >>> import tempfile
    >>> rho = Value("rho_sum", 3.0, 0.0, True, True, "exact sweep", layers={"fc1.weight": 3.0})
    >>> history = History([Point(0, 0.5, {"rho_sum": rho}), Point(100, 0.25, {})])
    >>> history[0]["rho_sum"].value, history[-1]["step"], len(history), history.measures
    (3.0, 100, 2, ('rho_sum',))
    >>> history.series("rho_sum")  # steps, values, errors
    ([0], [3.0], [0.0])
    >>> print(history.to_csv().splitlines()[1])
    0,,0.5,,forced,0.0,3.0,0.0
    >>> history.records()[1]["rho_sum"], history.add(Point(100, 0.25, {"rho_sum": rho}))["rho_sum"].value  # joined with its step
    (nan, 3.0)
    >>> history.to_dataframe()["rho_sum"].plot()  # doctest: +SKIP
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     history.save(f"{folder}/history.json")
    ...     history.to_html(f"{folder}/history.html")
    ...     text = history.to_json()
    ...     History.load(f"{folder}/history.json").to_json() == History.from_dict(history.to_dict()).to_json() == text
    True
    """

    def __init__(self, points: Sequence[Point] = (), about: Mapping[str, str] | None = None) -> None:
        self._points = list(points)
        self.about = dict(about or {})  # what was measured: network, loss, samples, …

    @overload
    def __getitem__(self, index: int) -> Point: ...
    @overload
    def __getitem__(self, index: slice) -> History: ...
    def __getitem__(self, index: int | slice) -> Point | History:
        return self._points[index] if isinstance(index, int) else History(self._points[index], self.about)

    def __len__(self) -> int:
        return len(self._points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    @property
    def measures(self) -> tuple[str, ...]:
        """Every measure that some point has, in the order of their first."""
        return tuple(dict.fromkeys(name for point in self._points for name in point.values))

    @property
    def notes(self) -> tuple[str, ...]:
        """All notes of all points, each once."""
        return tuple(dict.fromkeys(note for point in self._points for note in point.notes))

    def series(self, name: str, layer: str | None = None) -> tuple[list[int], list[float], list[float]]:
        """Steps, values and errors of a measure, or of one layer of it, where it is available."""
        if name not in self.measures:
            near = suggest(name, self.measures)
            raise SpiritLevelError(
                f"the history has no {name!r}{near}; it has {', '.join(self.measures) or 'no points'}"
            )
        found = [(point.step, point.values[name]) for point in self._points if name in point]
        if layer is not None:
            rows = [(s, v.layers[layer], v.layer_errors.get(layer, 0.0)) for s, v in found if layer in v.layers]
        else:
            rows = [(step, value.value, value.error) for step, value in found if value.available]
        return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]

    def add(self, point: Point) -> Point:
        """Append a point, or join it with the last one if that has the same step."""
        if self._points and self._points[-1].step == point.step:
            point = self._points.pop().joined(point)
        self._points.append(point)
        return point

    # --- out and in ------------------------------------------------------------------------------------------------

    def records(self) -> list[dict[str, Any]]:
        """A flat dictionary a point: step, epoch, losses, seconds, and value and error of every measure; nan for none."""
        rows = []
        for point in self._points:
            row: dict[str, Any] = {"step": point.step, "epoch": point.epoch, "loss": point.loss}
            row |= {"train_loss": point.train_loss, "reason": point.reason, "seconds": point.cost.seconds}
            for name in self.measures:
                value = point.values.get(name)
                row |= {name: math.nan if value is None else value.value}
                row |= {f"{name}_error": math.nan if value is None else value.error}
            rows.append(row)
        return rows

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """A table of `records` as comma-separated values, an empty field for what is not there; written to `path` too."""
        stream = io.StringIO()
        names = [f"{name}{end}" for name in self.measures for end in ("", "_error")]
        columns = ["step", "epoch", "loss", "train_loss", "reason", "seconds", *names]
        table = csv.DictWriter(stream, columns, lineterminator="\n")
        table.writeheader()
        for row in self.records():
            table.writerow({key: _field(entry) for key, entry in row.items()})
        if path is not None:
            write_whole(path, stream.getvalue())
        return stream.getvalue()

    def to_dataframe(self) -> Any:
        """A pandas.DataFrame of `records`, indexed by step, where pandas is installed."""
        try:
            import pandas
        except ImportError:
            raise SpiritLevelError("to_dataframe needs pandas: pip install pandas; to_csv does without") from None
        return pandas.DataFrame.from_records(self.records(), index="step")

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and strings: what `save` writes."""
        return FORMAT.document({"about": self.about, "points": self._points})

    def to_json(self) -> str:
        """The same as text."""
        return FORMAT.text(self.to_dict())

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> History:
        """The history that `to_dict` described."""
        parts = FORMAT.parts(plain)
        return cls([_point(entry) for entry in parts["points"]], parts.get("about"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON; a file that exists at `path` afterwards is whole."""
        FORMAT.save(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> History:
        """Read what `save` wrote."""
        return cls.from_dict(FORMAT.load(path))

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page: the curves, the lines of stability, the table."""
        write_whole(path, show(self, "page"))

    def __str__(self) -> str:
        return str(show(self, "text"))

    def __repr__(self) -> str:
        return f"<History of {len(self)} points: {', '.join(self.measures) or 'nothing measured'}>"

    def _repr_html_(self) -> str:
        return str(show(self, "fragment"))


def _field(entry: Any) -> Any:
    return "" if entry is None or (isinstance(entry, float) and math.isnan(entry)) else entry


def _point(plain: Mapping[str, Any]) -> Point:
    return Point(
        step=int(plain["step"]),
        loss=number(plain["loss"]),
        values={name: value_from_dict(entry) for name, entry in plain["values"].items()},
        epoch=plain["epoch"],
        train_loss=number(plain["train_loss"]),
        thresholds=numbers(plain["thresholds"]),
        cost=Cost(**plain["cost"]),
        reason=plain["reason"],
        levels=tuple(numbers(plain["levels"])),
        notes=tuple(plain["notes"]),
    )
