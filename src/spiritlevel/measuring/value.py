"""One number with everything needed to judge it, and what it cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor

# The error of an exact value, relative to it, that does not reach the digits a value is printed with.
HIDDEN = 1e-5

# What an error is; "none" where there is no value.
ErrorKind = Literal["exact", "bound", "standard error", "lower bound", "sampling", "none"]


@dataclass(frozen=True)
class Value:
    """One measure's value on one problem, with everything needed to judge it.

    Attributes:
        name: The measure's name.
        value: The number. `inf` and `nan` are possible and explained in `notes`.
        error: Absolute error; `error_kind` says of which kind.
        exact: Whether the value is exact up to rounding.
        converged: Whether the computation reached the tolerance; the sampling error of a random subset is not counted.
        method: How it was computed, in words.
        layers: Weight's parameter name → the measure of that layer.
        layer_errors: The same keys → absolute error of that layer's value (absent keys: exact up to rounding).
        neurons: Weight's parameter name → 1-D tensor, one entry a neuron.
        witness: Where the value is a maximum over perturbations: parameter name → the maximiser found.
        details: Further numbers of the same computation (a second-order value, a convergence history, …).
        notes: What a reader must know: blocks that dropped out, clipped traces, why something is not available.
        products: How many curvature products this number cost (shared ones are counted for every user).
        error_kind: "exact": what rounding may have done. "bound": the true value, an eigenvalue, is no further away.
            "standard error": one, from random probes. "sampling": one, of a random subset of the data. "lower bound": the
            precision of a search for a maximum, which may be larger. "none": the measure is not defined here. Where it
            is not given, "exact" or "standard error" as `exact` says.

    >>> trace = Value("hessian_trace", 2.0, 0.25, False, True, "random probes of the Hessian")
    >>> print(trace, float(trace), trace.available)
    2 ± 0.2 2.0 True
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
    error_kind: ErrorKind = ""  # type: ignore[assignment]

    def __post_init__(self) -> None:
        kind = self.error_kind or ("exact" if self.exact else "standard error")
        if kind not in get_args(ErrorKind) or self.exact != (kind == "exact"):
            known = ", ".join(map(repr, get_args(ErrorKind)))
            raise ValueError(
                f"error_kind must be one of {known}, and 'exact' where exact=True and only there; got "
                f"error_kind={kind!r} with exact={self.exact}"
            )
        object.__setattr__(self, "error_kind", kind)

    @property
    def available(self) -> bool:
        """False where the measure is not defined on this network; `notes` say why."""
        return not math.isnan(self.value)

    @property
    def certified(self) -> bool:
        """Whether `error` bounds the distance to an eigenvalue by a residual, instead of being a standard error."""
        return self.error_kind == "bound"

    @property
    def lower_bound(self) -> bool:
        """Whether this is the largest value that a search found: it cannot say which of two networks has more."""
        return self.error_kind == "lower bound"

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        if not self.available:
            return "not available"
        error = visible_error(self)
        return f"{self.value:.6g} ± {error:.1g}" if error else f"{self.value:.6g}"


def visible_error(value: Value) -> float:
    """The error to print beside a value: 0 where it is rounding that does not reach the digits shown."""
    return 0.0 if value.exact and value.error <= HIDDEN * abs(value.value) else value.error


def scalars(values: Mapping[str, Value], prefix: str, *, layers: bool) -> dict[str, float]:
    """Every finite number under a flat name, for loggers: `prefix/measure`, `…/error` and `…/layer/parameter`."""
    found: dict[str, float] = {}
    for name, value in values.items():
        named = {"": value.value, "/error": value.error}
        if layers:
            named |= {f"/layer/{layer}": number for layer, number in value.layers.items()}
        if value.available:
            found |= {f"{prefix}/{name}{key}": number for key, number in named.items() if math.isfinite(number)}
    return found


@dataclass(frozen=True)
class Cost:
    """What a measurement cost.

    Attributes:
        passes: Passes over the data, of any kind.
        products: Curvature products over all the data.
        gradients: Gradients over all the data (those of the sharpness maxima are the bulk).
        seconds: Wall-clock time.
        peak_memory: Growth of the process's peak resident memory in bytes, or of the device's allocator.

    >>> Cost(passes=3.0, products=2.0).products
    2.0
    """

    passes: float = 0.0
    products: float = 0.0
    gradients: float = 0.0
    seconds: float = 0.0
    peak_memory: int = 0
