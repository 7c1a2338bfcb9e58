"""Words that several messages share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first few of the names, and how many more there are.

    >>> listed(["a", "b", "c", "d", "e", "f"])
    'a, b, c, d and 2 more'
    >>> listed(["a", "b"])
    'a, b'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def losses_differ(losses: Mapping[str, float]) -> list[str]:
    """A sentence where one network's loss is more than twice another's, nothing where it is not.

    >>> losses_differ({"a": 0.1, "b": 0.15})
    []
    >>> losses_differ({"a": 0.1, "b": 0.35})[0].partition(". C")[0]
    'The losses differ: 0.1 for “a”, 0.35 for “b”'
    """
    known = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
    if not known:
        return []
    low, high = min(known, key=lambda name: known[name]), max(known, key=lambda name: known[name])
    if known[high] - known[low] <= abs(known[low]):
        return []
    return [
        f"The losses differ: {known[low]:.3g} for “{low}”, {known[high]:.3g} for “{high}”. Curvature often shrinks with the "
        "loss, so compare networks trained to the same loss where you can."
    ]
