"""As much accuracy as a number of seconds allows: the tolerance is tightened step by step as long as the next step fits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from spiritlevel.measuring.report import Report

# The tolerances to try in turn, each with its limit of probes: half an order of accuracy takes ten times the probes.
STEPS = ((0.1, 16), (3e-2, 64), (1e-2, 640), (3e-3, 6_400), (1e-3, 64_000), (1e-4, 640_000), (1e-5, 6_400_000))
# How much longer a step takes than the one before, where that is not known yet.
GROWTH = 3.0


def within_budget(measured: Callable[[float, int], Report], seconds: float) -> Report:
    """The report of the last step that fits; the first step is made in any case. Its notes say what was reached.

    `measured` takes a tolerance and the most probes.
    """
    started = before = time.perf_counter()
    report, spent = None, 0.0
    for tolerance, probes in STEPS:
        growth = GROWTH if report is None or not spent else max(GROWTH, (time.perf_counter() - before) / spent)
        if report is not None and time.perf_counter() - started + growth * spent > seconds:
            break
        before = time.perf_counter()
        report = measured(tolerance, probes)
        spent, reached = time.perf_counter() - before, tolerance
        if report.interrupted or all(value.exact or not value.available for value in report.values.values()):
            break
    assert report is not None
    used = time.perf_counter() - started
    note = f"accuracy bought with {used:.3g} of {seconds:.3g} seconds: a tolerance of {reached:g}"
    return replace(report, notes=(*report.notes, note), cost=replace(report.cost, seconds=used))
