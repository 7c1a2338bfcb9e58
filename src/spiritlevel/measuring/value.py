"""One number with everything needed to judge it, and what it cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

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
