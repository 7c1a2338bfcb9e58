"""What all sharpness maxima share: ascend in a region, return the maximiser, and say what was found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spiritlevel.curvature.ascent import Region, as_parameters, maximize
from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.value import Value


def largest_rise(
    measure: Measure,
    evidence: Evidence,
    region: Region,
    *,
    factor: float = 1.0,
    details: Mapping[str, Any] | None = None,
) -> Value:
    """factor · max over the region of (L(θ+ξ) − L(θ)) / (1 + L(θ)), as the best point that ascent found.

    The value is a lower bound of the maximum, reached at the witness. Its error is the precision of the ascent.
    """
    problem = evidence.problem
    before = problem.work.gradients
    loss = evidence.loss
    found = maximize(problem, region, tolerance=evidence.tolerance, generator=evidence.generator(measure.name))
    if not math.isfinite(found.loss):
        raise SpiritLevelError(
            f"{measure.name}: the loss is {found.loss} within epsilon={measure.options['epsilon']}, so its largest rise is not "
            "a number: ask for a smaller epsilon"
        )
    value = factor * (found.loss - loss) / (1 + loss)
    return Value(
        name=measure.name,
        value=value,
        error=evidence.tolerance * value,
        exact=False,
        converged=found.settled,
        method=f"largest value found by ascent ({problem.work.gradients - before:.0f} gradients), a lower bound",
        witness=as_parameters(problem, found.perturbation),
        details=dict(details or {}),
        error_kind="lower bound",
    )
