"""The power method of rangamani2019, Algorithm 1, with its history. Kept for comparison; Lanczos is what to use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from spiritlevel.curvature.lanczos import Eigenpair
from spiritlevel.curvature.vectors import length, unit


@dataclass(frozen=True)
class PowerIteration:
    """The last Rayleigh quotient with its vector, and how it came about.

    values: The Rayleigh quotient after every product. changes: ‖v_{t+1} − v_t‖, which the paper stops on; where the
    dominant eigenvalue is negative the vector flips at every step and this never becomes small.
    """

    pair: Eigenpair
    values: list[float]
    changes: list[float]


def power_method(
    matvec: Callable[[Tensor], Tensor], start: Tensor, *, tolerance: float, most_products: int = 1000
) -> PowerIteration:
    """Iterate v ← Av/‖Av‖ until the relative change of v is at most `tolerance`."""
    values: list[float] = []
    changes: list[float] = []
    nothing = start.new_zeros(0, start.numel())
    if not length(start) > 0:
        return PowerIteration(Eigenpair(0.0, start, nothing, 0.0, 0.0, True, 0), values, changes)
    vector = unit(start)
    residual = float("inf")
    while len(values) < most_products and (not changes or changes[-1] > tolerance):
        image = matvec(vector)
        values.append(float(vector @ image))
        residual = length(image - values[-1] * vector)
        if not length(image) > 0:
            changes.append(0.0)
            break
        following = unit(image)
        changes.append(length(following - vector))
        vector = following
    converged = changes[-1] <= tolerance
    return PowerIteration(
        Eigenpair(values[-1], vector, nothing, residual, residual, converged, len(values)), values, changes
    )
