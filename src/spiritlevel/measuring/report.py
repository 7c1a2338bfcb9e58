"""What a measurement returns: values with their errors, frozen, that print, save and load."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from spiritlevel.measuring import earlier_files
from spiritlevel.measuring.value import Cost, Value, scalars
from spiritlevel.presenting import Shown, show
from spiritlevel.saved import Format, Saved, as_tensor, from_json_ready, number, numbers, write_whole


@dataclass(frozen=True)
class Report(Saved, Shown):
    """Every value of one call of `measure`, with the problem it belongs to.

    `report[name]` is a `Value`; iteration goes over names in the order asked for. Printing gives a table. `interrupted`
    says whether Ctrl-C ended the measurement early; the first note then names what is missing.

    >>> import tempfile
    >>> report = Report({"hessian_trace": Value("hessian_trace", 2.0, 0.0, True, True, "exact sweep")}, 0.5, Cost(), {}, {})
    >>> float(report["hessian_trace"]), list(report), report.interrupted
    (2.0, ['hessian_trace'], False)
    >>> report
    <Report: loss 0.5; hessian_trace=2>
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report.save(f"{folder}/report.json")
    ...     report.to_html(f"{folder}/report.html")
    ...     Report.load(f"{folder}/report.json") == Report.from_dict(report.to_dict()) == report.without_witnesses()
    True
    """

    _format: ClassVar = Format("spiritlevel-report-1", "report")

    values: Mapping[str, Value]
    loss: float
    cost: Cost
    problem: Mapping[str, Any]
    environment: Mapping[str, str]
    notes: tuple[str, ...] = ()
    interrupted: bool = False

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

    def without_witnesses(self) -> Report:
        """The same without the maximisers, each of which is as large as the model: for files."""
        return replace(self, values={name: replace(value, witness=None) for name, value in self.values.items()})

    def scalars(self, prefix: str = "flatness", *, layers: bool = True) -> dict[str, float]:
        """Every finite number under a flat name, for any logger: `flatness/rho_sum`, `flatness/rho_sum/error`,
        `flatness/rho_sum/layer/fc1.weight`, `flatness/loss`.

        >>> value = Value("rho_sum", 3.0, 0.0, True, True, "exact sweep", layers={"fc1.weight": 3.0})
        >>> Report({"rho_sum": value}, 0.5, Cost(), {}, {}).scalars()
        {'flatness/loss': 0.5, 'flatness/rho_sum': 3.0, 'flatness/rho_sum/error': 0.0, 'flatness/rho_sum/layer/fc1.weight': 3.0}
        """
        loss = {f"{prefix}/loss": self.loss} if math.isfinite(self.loss) else {}
        return loss | scalars(self.values, prefix, layers=layers)

    @classmethod
    def _from_parts(cls, parts: dict[str, Any]) -> Report:
        return cls(
            values={name: value_from_dict(entry) for name, entry in parts["values"].items()},
            loss=number(parts["loss"]),
            cost=Cost(**parts["cost"]),
            problem=parts["problem"],
            environment=parts["environment"],
            notes=tuple(parts["notes"]),
            interrupted=parts["interrupted"] if "interrupted" in parts else earlier_files.interrupted(parts),
        )

    def save(self, path: str | os.PathLike[str], *, witnesses: bool = False) -> None:
        """Write JSON; a file that exists at `path` afterwards is whole.

        witnesses: Write the maximisers too, each of which is as large as the model.
        """
        self._format.save(path, (self if witnesses else self.without_witnesses()).to_dict())

    # How a report is shown is registered from above, where it is known; see `presenting`.
    def to_html(
        self, path: str | os.PathLike[str], *, audit: object | None = None, spectrum: object | None = None
    ) -> None:
        """Write one self-contained page, with the audit and the spectrum of the same model where they are given."""
        audited = None if audit is None else show(audit, "section")
        spread = None if spectrum is None else show(spectrum, "section")
        write_whole(path, show(self, "page", audit=audited, spectrum=spread))

    def __repr__(self) -> str:
        samples = self.problem.get("samples")
        counted = f", {samples:,} samples" if isinstance(samples, int) else ""
        shown = [f"{name}={value}" for name, value in list(self.values.items())[:3]]
        more = [f"… {len(self) - 3} more"] if len(self) > 3 else []
        return f"<Report: loss {self.loss:.4g}{counted}; {', '.join([*shown, *more])}>"

    def _repr_html_(self) -> str:
        return str(show(self, "fragment"))


def value_from_dict(plain: Mapping[str, Any]) -> Value:
    """A value as `to_dict` described it."""
    fields = {"error_kind": earlier_files.error_kind(plain), **plain}
    for key in ("value", "error", "layers", "layer_errors"):
        fields[key] = numbers(plain[key])
    for key in ("neurons", "witness"):
        fields[key] = None if plain[key] is None else {name: as_tensor(entry) for name, entry in plain[key].items()}
    fields["details"] = from_json_ready(plain["details"])
    fields["notes"] = tuple(plain["notes"])
    return Value(**fields)
