"""Ibayashi, Hamaguchi, Imaizumi 2021, "Minimum Sharpness: Scale-invariant Parameter-robustness of Neural Networks".

The trace of the Hessian depends on how the layers share their scale; its minimum over all ways to share it does not. The trace
of a rescaled network is Σ h·d⁻² with h the diagonal of H, convex in the logarithms of the factors, so that the minimum is found to
rounding. The paper has one factor a layer; with one a neuron the minimum does not depend on those either.
"""

from __future__ import annotations

from collections.abc import Callable

from spiritlevel.errors import RescalingError, TracingError, listed
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.needs import Needs
from spiritlevel.measuring.readings import DIAGONAL, Reading, from_statistics, unavailable
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.statistics import Statistics
from spiritlevel.measuring.value import Value
from spiritlevel.symmetry import Symmetries
from spiritlevel.symmetry.canonical import least_value
from spiritlevel.symmetry.discover import symmetries_of
from spiritlevel.symmetry.layerwise import LayerScales


def _read(symmetries: Symmetries, *, layers: bool) -> Callable[[Statistics], Reading]:
    """min Tr H over the orbit of one factor a layer, or one a neuron."""
    spread = LayerScales(symmetries).spread if layers else None

    def read(statistics: Statistics) -> Reading:
        diagonal = {name: statistics.diagonal[name] for name in statistics.weights}
        below = [name for name, entries in diagonal.items() if bool((entries < 0).any())]
        notes = (f"negative diagonal entries clipped to 0 in {listed(below)}",) if below else ()
        masses = {name: entries.clamp(min=0) for name, entries in diagonal.items()}
        return Reading(least_value(symmetries, masses, -1, spread), notes=notes)

    return read


def _minimum(*, layers: bool) -> Callable[[Measure, Evidence], Value]:
    def compute(measure: Measure, evidence: Evidence) -> Value:
        problem = evidence.problem
        try:
            symmetries = symmetries_of(problem)
        except TracingError as error:
            return unavailable(measure, f"the network's graph cannot be followed: {error}")
        found, _ = from_statistics(_read(symmetries, layers=layers), frozenset([DIAGONAL]), everything=True)
        try:
            return found(measure, evidence)
        except RescalingError as error:
            return unavailable(measure, str(error))

    return compute


def _needs(_measure: Measure) -> Needs:
    return Needs(statistics=frozenset([DIAGONAL]))


MEASURES = (
    Measure(
        "minimum_sharpness",
        "ibayashi2021",
        "least Hessian trace over all rescalings of layers",
        "min_α Tr H(α·θ), one factor α a layer",
        frozenset({"layer"}),
        _minimum(layers=True),
        _needs,
        costly=True,
        of_function=False,
    ),
    Measure(
        "minimum_sharpness_neurons",
        "ibayashi2021",
        "least Hessian trace over all rescalings of neurons",
        "min_α Tr H(α·θ), one factor α a neuron",
        frozenset({"layer", "neuron"}),
        _minimum(layers=False),
        _needs,
        costly=True,
        of_function=False,
    ),
)
