"""How flat is the minimum of a trained network, in numbers that no rescaling of its weights can fool."""

from spiritlevel._version import __version__
from spiritlevel.errors import NondeterministicError, RescalingError, SpiritLevelError, TracingError
from spiritlevel.measures import get_measure, list_measures
from spiritlevel.measures.record import Measure
from spiritlevel.measures.run import measure
from spiritlevel.problem import Problem
from spiritlevel.result import Cost, Report, Value
from spiritlevel.symmetry import find_symmetries, rescale_layers

# In the order a request travels: problem, symmetry, measure, report.
__all__ = [
    "Cost",
    "Measure",
    "NondeterministicError",
    "Problem",
    "Report",
    "RescalingError",
    "SpiritLevelError",
    "TracingError",
    "Value",
    "__version__",
    "find_symmetries",
    "get_measure",
    "list_measures",
    "measure",
    "rescale_layers",
]
