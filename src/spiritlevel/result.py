"""What a measurement returns: values with their errors, frozen, that print, save and load."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from spiritlevel.audit import Audit
    from spiritlevel.spectrum import Spectrum

FORMAT = "spiritlevel-report-1"
# The error of an exact value, relative to it, that does not reach the digits a value is printed with.
HIDDEN = 1e-5


@dataclass(frozen=True)
class Value:
    """One measure's value on one problem, with everything needed to judge it.

    Attributes:
        name: The measure's name.
        value: The number. `inf` and `nan` are possible and explained in `notes`.
        error: Absolute error: a bound for certified values, one standard error for estimates, 0.0 only where the
            value is exact up to rounding.
        exact: Whether the value is exact up to rounding.
        converged: Whether the requested tolerance was reached.
        method: How it was computed, in words.
        layers: Weight's parameter name → the measure of that layer.
        layer_errors: The same keys → absolute error of that layer's value (absent keys: exact up to rounding).
        neurons: Weight's parameter name → 1-D tensor, one entry a neuron.
        witness: Where the value is a maximum over perturbations: parameter name → the maximiser found.
        details: Further numbers of the same computation (a second-order value, a convergence history, …).
        notes: What a reader must know: blocks that dropped out, clipped traces, why something is not available.
        products: How many curvature products this number cost (shared ones are counted for every user).
    """

    name: str
    value: float
    error: float
    exact: bool
    converged: bool
    method: str
    layers: Mapping[str, float] = field(default_factory=dict)
    layer_errors: Mapping[str, float] = field(default_factory=dict)
    neurons: Mapping[str, Tensor] = field(default_factory=dict)
    witness: Mapping[str, Tensor] | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    products: int = 0

    @property
    def available(self) -> bool:
        """False where the measure is not defined on this network; `notes` say why."""
        return not math.isnan(self.value)

    @property
    def certified(self) -> bool:
        """Whether `error` bounds the distance to an eigenvalue by a residual, instead of being a standard error."""
        bounded = "residual" in self.details or any(word in self.method.lower() for word in ("certified", "lanczos"))
        return bounded and "sampling_error" not in self.details

    @property
    def lower_bound(self) -> bool:
        """Whether this is the largest value that a search found: it cannot say which of two networks has more."""
        return "lower bound" in self.method

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        if not self.available:
            return "not available"
        hidden = self.error <= (HIDDEN * abs(self.value) if self.exact else 0)
        return f"{self.value:.6g}" if hidden else f"{self.value:.6g} ± {self.error:.1g}"


@dataclass(frozen=True)
class Cost:
    """What a measurement cost.

    Attributes:
        passes: Passes over the data, of any kind.
        products: Curvature products over all the data.
        gradients: Gradients over all the data (those of the sharpness maxima are the bulk).
        seconds: Wall-clock time.
        peak_memory: Growth of the process's peak resident memory in bytes, or of the device's allocator.
    """

    passes: float = 0.0
    products: float = 0.0
    gradients: float = 0.0
    seconds: float = 0.0
    peak_memory: int = 0


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
            "loss": _plain(self.loss),
            "values": {name: _value_to_dict(value) for name, value in self.values.items()},
            "cost": _plain(vars(self.cost)),
            "problem": _plain(dict(self.problem)),
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
            loss=_number(plain["loss"]),
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

    # Presentation lives downstream; these three methods are the only places that look there, and only when called.
    def to_html(
        self, path: str | os.PathLike[str], *, audit: Audit | None = None, spectrum: Spectrum | None = None
    ) -> None:
        """Write one self-contained page, with the audit and the spectrum of the same model where they are given."""
        from spiritlevel.report.audit import audit_section
        from spiritlevel.report.page import report_page
        from spiritlevel.report.spectra import spectrum_section

        audited = None if audit is None else audit_section(audit)
        spread = None if spectrum is None else spectrum_section(spectrum)
        write_whole(path, report_page({"": self}, audit=audited, spectrum=spread))

    def __str__(self) -> str:
        from spiritlevel.report.tables import render, report_table

        return render(report_table(self))

    def _repr_html_(self) -> str:
        from spiritlevel.report.page import report_fragment

        return report_fragment(self)


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` through a temporary file and a rename, so that a reader never sees half of it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _value_to_dict(value: Value) -> dict[str, Any]:
    plain: dict[str, Any] = {key: _plain(entry) for key, entry in vars(value).items() if key != "witness"}
    plain["witness"] = None if value.witness is None else _plain(dict(value.witness))
    return plain


def _value_from_dict(plain: Mapping[str, Any]) -> Value:
    fields = dict(plain)
    fields["value"], fields["error"] = _number(plain["value"]), _number(plain["error"])
    fields["layers"] = {key: _number(entry) for key, entry in plain["layers"].items()}
    fields["layer_errors"] = {key: _number(entry) for key, entry in plain["layer_errors"].items()}
    fields["neurons"] = {key: _tensor(entry) for key, entry in plain["neurons"].items()}
    witness = plain["witness"]
    fields["witness"] = None if witness is None else {key: _tensor(entry) for key, entry in witness.items()}
    fields["details"] = from_json_ready(plain["details"])
    fields["notes"] = tuple(plain["notes"])
    return Value(**fields)


def _plain(entry: Any) -> Any:
    """Tensors to nested lists, non-finite floats to strings, mappings and sequences entry by entry."""
    if isinstance(entry, Tensor):
        return _plain(entry.detach().cpu().tolist())
    if isinstance(entry, float):
        return entry if math.isfinite(entry) else str(entry)
    if isinstance(entry, Mapping):
        return {str(key): _plain(item) for key, item in entry.items()}
    if isinstance(entry, list | tuple):
        return [_plain(item) for item in entry]
    return entry


def json_ready(entry: Any) -> Any:
    """The same in what JSON can hold: a number that is not finite becomes the string that `float` reads.

    >>> json_ready({"a": (1.0, float("inf")), "b": "text"})
    {'a': [1.0, 'inf'], 'b': 'text'}
    """
    return _plain(entry)


def from_json_ready(entry: Any) -> Any:
    """Numbers where `json_ready` put strings.

    >>> from_json_ready({"a": [1.0, "inf"], "b": "text"})
    {'a': [1.0, inf], 'b': 'text'}
    """
    if isinstance(entry, Mapping):
        return {key: from_json_ready(item) for key, item in entry.items()}
    if isinstance(entry, list):
        return [from_json_ready(item) for item in entry]
    return float(entry) if isinstance(entry, str) and entry in ("inf", "-inf", "nan") else entry


def _number(plain: float | str) -> float:
    return float(plain)


def _tensor(plain: Any) -> Tensor:
    def numbers(entry: Any) -> Any:
        return [numbers(item) for item in entry] if isinstance(entry, list) else float(entry)

    return torch.tensor(numbers(plain), dtype=torch.float64)
