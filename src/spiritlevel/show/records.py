"""What the table and the page say of a value beyond its number: what it survives, and how sure it is."""

from __future__ import annotations

from collections.abc import Mapping

from spiritlevel.measuring.value import ErrorKind, Value

INVARIANCES: Mapping[str, str] = {
    "layer": "unchanged when a whole layer is multiplied by α and another divided by it: W₁ → αW₁, W₂ → W₂/α",
    "neuron": "unchanged when one neuron is rescaled: row i of Wₗ and bₗᵢ times α, column i of Wₗ₊₁ divided by α",
    "linear": "unchanged when two linear maps with nothing between them change basis: W₁ → AW₁, W₂ → W₂A⁻¹ for invertible A",
    "rotation": "unchanged when a residual stream that is normalized wherever it is read is rotated",
    "input map": "unchanged when the data go through an invertible matrix that the first layer undoes",
    "output": "unchanged when the outputs of the network are multiplied by a constant: f → αf",
}

_SURE: Mapping[ErrorKind, str] = {
    "exact": "exact",
    "bound": "certified",
    "standard error": "estimated",
    "sampling": "sampled",
    "lower bound": "at least",
    "none": "–",
}

CERTAINTIES: Mapping[str, str] = {
    "exact": "exact up to rounding; an error shown is what rounding may have done",
    "certified": "certified by its residual: an eigenvalue lies at least as near to it as the error shown",
    "estimated": "from random probes; the error shown is one standard error",
    "sampled": "from a random subset of the data; the error shown is one standard error of that choice",
    "at least": "the largest that a search found, and the maximum may be larger; the error shown is the precision of the search",
}

# The same in a few words, for a line below a table.
BARS: Mapping[str, str] = {
    "exact": "rounding",
    "certified": "a bound",
    "estimated": "one standard error",
    "sampled": "one standard error of the sample",
    "at least": "the precision of a search",
}


def certainty(value: Value) -> str:
    """How sure a value is in a word: a key of `CERTAINTIES`, or a dash where there is no value."""
    return _SURE[value.error_kind]
