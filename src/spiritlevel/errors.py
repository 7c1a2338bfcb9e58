"""The errors a user meets, and words that several messages share. Each says what is required, what came, what to do."""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence


class SpiritLevelError(ValueError):
    """Something the user passed cannot be measured; the message says what to change."""


class NondeterministicError(SpiritLevelError):
    """Two passes over the problem disagree, so that no second derivative of it means anything."""


class TracingError(SpiritLevelError):
    """The network's graph cannot be followed, so nothing certain can be said about its symmetries."""


class RescalingError(SpiritLevelError):
    """A rescaling would change the function or does not fit the numbers of the model's dtype."""


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


def suggest(name: str, known: Iterable[str]) -> str:
    """'; did you mean …?' with the nearest of the `known` names, or nothing where none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
