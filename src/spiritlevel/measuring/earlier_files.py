"""Files of earlier versions say some things in sentences only; here these become the data that files have now."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spiritlevel.measuring.value import ErrorKind


def error_kind(value: Mapping[str, Any]) -> ErrorKind:
    """What the error of a saved value is, read off how it was computed.

    >>> error_kind({"value": 2.0, "exact": False, "method": "Lanczos, products by kept graph", "details": {}})
    'bound'
    """
    method = value["method"].lower()
    if value["exact"]:
        return "exact"
    if math.isnan(float(value["value"])):
        return "none"
    if "lower bound" in method:
        return "lower bound"
    if "sampling_error" in value["details"]:
        return "sampling"
    if "residual" in value["details"] or "certified" in method or "lanczos" in method:
        return "bound"
    return "standard error"


def interrupted(report: Mapping[str, Any]) -> bool:
    """Whether Ctrl-C ended a saved measurement early, which its first note says."""
    return bool(report["notes"]) and report["notes"][0].startswith("interrupted")
