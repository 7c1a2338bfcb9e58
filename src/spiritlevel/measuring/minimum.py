"""Is it a minimum? The slope that is left, in the weights' own units, and what contradicts the second-order picture."""

from __future__ import annotations

from collections.abc import Mapping

from spiritlevel.measuring.report import Report
from spiritlevel.measuring.value import Value

# A change of every block of weights by this share of its norm: small, and no more than training noise moves them.
STEP = 0.01


def doubts(values: Mapping[str, Value], slope: float) -> tuple[str, ...]:
    """What a reader must know where curvature alone does not describe the loss around this point.

    slope: ‖D∇L‖ with D the norms of the blocks: what the loss changes by, to first order, for a relative change of the weights.

    >>> top = Value("riemannian_spectral_norm", 2.0, 0.0, True, True, "Lanczos")
    >>> doubts({top.name: top}, 1e-4)
    ()
    >>> print(doubts({top.name: top}, 1.0)[0][:60])
    not a minimum: the gradient is large. A change of the weight
    """
    return (*_large_gradient(values, slope), *_negative(values))


def doubts_of(report: Report) -> tuple[str, ...]:
    """What contradicts that the network of a report is at a minimum: notes that a reader must not miss."""
    return doubts(report.values, report.problem.get("gradient_metric_norm", 0.0))


def not_minima(reports: Mapping[str, Report]) -> list[str]:
    """A sentence where networks that are compared are not at a minimum, nothing where nothing speaks against it."""
    names = [f"“{name}”" for name, report in reports.items() if doubts_of(report)]
    if not names:
        return []
    who, whose = (f"{names[0]} is", "its report") if len(names) == 1 else (
        f"{', '.join(names[:-1])} and {names[-1]} are", "their reports"
    )  # fmt: skip
    return [f"{who} not at a minimum, and flatness is about curvature alone: the notes of {whose} say more."]


def _large_gradient(values: Mapping[str, Value], slope: float) -> tuple[str, ...]:
    top = values.get("riemannian_spectral_norm")
    if top is None or not top.available:
        return ()
    linear, bent = STEP * slope, STEP**2 * abs(top.value) / 2
    if not linear > bent:
        return ()
    return (
        f"not a minimum: the gradient is large. A change of the weights by {STEP:.0%} changes the loss by up to {linear:.2g} through "
        f"the slope and by at most {bent:.2g} through the curvature, which is all that flatness measures",
    )


def _negative(values: Mapping[str, Value]) -> tuple[str, ...]:
    trace, top = values.get("hessian_trace"), values.get("hessian_spectral_norm")
    if trace is not None and trace.available and trace.value < -2 * trace.error:
        return (f"not a minimum: the trace of the Hessian is negative ({trace}), so most curvature is downwards",)
    if top is not None and top.details.get("eigenvalue", 0.0) < 0:
        return (
            f"not a minimum: the largest eigenvalue of the Hessian in size is negative ({top.details['eigenvalue']:.4g})",
        )
    return ()
