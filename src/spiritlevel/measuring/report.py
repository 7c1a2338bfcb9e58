"""What a measurement returns: values with their errors, frozen, that print, save and load."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spiritlevel.measuring.value import Cost, Value
from spiritlevel.presenting import show
from spiritlevel.saved import as_number, as_plain, as_tensor, from_json_ready, write_whole

FORMAT = "spiritlevel-report-1"


@dataclass(frozen=True)
class Report:
    """Every value of one call of `measure`, with the problem it belongs to.

    `report[name]` is a `Value`; iteration goes over names in the order asked for. Printing gives a table.
    """

    values: Mapping[str, Value]
    loss: float
    cost: Cost
    problem: Mapping[str, Any]
    environment: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Value:
        try:
            return self.values[name]
        except KeyError:
            known = ", ".join(self.values)
            raise KeyError(f"this report has no {name!r}; it has {known}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __contains__(self, name: object) -> bool:
        return name in self.values

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the measurement early; the first note names what is missing."""
        return bool(self.notes) and self.notes[0].startswith("interrupted")

    def without_witnesses(self) -> Report:
        """The same without the maximisers, each of which is as large as the model: for files."""
        return replace(self, values={name: replace(value, witness=None) for name, value in self.values.items()})

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and strings: what `save` writes. Non-finite numbers become the strings JSON lacks."""
        return {
            "format": FORMAT,
            "loss": as_plain(self.loss),
            "values": {name: _value_to_dict(value) for name, value in self.values.items()},
            "cost": as_plain(vars(self.cost)),
            "problem": as_plain(dict(self.problem)),
            "environment": dict(self.environment),
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Report:
        """The report that `to_dict` described."""
        if plain.get("format") != FORMAT:
            raise ValueError(f"not a saved report: its format is {plain.get('format')!r}, needed is {FORMAT!r}")
        return cls(
            values={name: _value_from_dict(entry) for name, entry in plain["values"].items()},
            loss=as_number(plain["loss"]),
            cost=Cost(**plain["cost"]),
            problem=plain["problem"],
            environment=plain["environment"],
            notes=tuple(plain["notes"]),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON; a file that exists at `path` afterwards is whole.

        Witnesses are written too: `report.without_witnesses().save(path)` makes a small file of a large model.
        """
        write_whole(path, json.dumps(self.to_dict(), indent=1, allow_nan=False))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read what `save` wrote."""
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))

    # How a report is shown is registered from above, where it is known; see `presenting`.
    def to_html(
        self, path: str | os.PathLike[str], *, audit: object | None = None, spectrum: object | None = None
    ) -> None:
        """Write one self-contained page, with the audit and the spectrum of the same model where they are given."""
        audited = None if audit is None else show(audit, "section")
        spread = None if spectrum is None else show(spectrum, "section")
        write_whole(path, show(self, "page", audit=audited, spectrum=spread))

    def __str__(self) -> str:
        return str(show(self, "text"))

    def _repr_html_(self) -> str:
        return str(show(self, "fragment"))


def _value_to_dict(value: Value) -> dict[str, Any]:
    plain: dict[str, Any] = {key: as_plain(entry) for key, entry in vars(value).items() if key != "witness"}
    plain["witness"] = None if value.witness is None else as_plain(dict(value.witness))
    return plain


def _value_from_dict(plain: Mapping[str, Any]) -> Value:
    fields = dict(plain)
    fields["value"], fields["error"] = as_number(plain["value"]), as_number(plain["error"])
    fields["layers"] = {key: as_number(entry) for key, entry in plain["layers"].items()}
    fields["layer_errors"] = {key: as_number(entry) for key, entry in plain["layer_errors"].items()}
    fields["neurons"] = {key: as_tensor(entry) for key, entry in plain["neurons"].items()}
    witness = plain["witness"]
    fields["witness"] = None if witness is None else {key: as_tensor(entry) for key, entry in witness.items()}
    fields["details"] = from_json_ready(plain["details"])
    fields["notes"] = tuple(plain["notes"])
    return Value(**fields)
