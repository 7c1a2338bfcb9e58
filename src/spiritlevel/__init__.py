"""How flat is the minimum of a trained network, in numbers that no rescaling of its weights can fool."""

from spiritlevel._version import __version__
from spiritlevel.audit import Audit, audit
from spiritlevel.errors import NondeterministicError, RescalingError, SpiritLevelError, TracingError
from spiritlevel.measures import get_measure, list_measures
from spiritlevel.measures.record import Measure
from spiritlevel.measures.run import measure
from spiritlevel.problem import Problem
from spiritlevel.result import Cost, Report, Value
from spiritlevel.symmetry import Rescaling, Symmetries, canonicalize, find_symmetries, rescale_layers
from spiritlevel.symmetry.attack import Attack, flattest, sharpen, sharpen_ball

# In the order a request travels: problem, symmetry, measure, report.
__all__ = [
    "Attack",
    "Audit",
    "Cost",
    "Measure",
    "NondeterministicError",
    "Problem",
    "Report",
    "Rescaling",
    "RescalingError",
    "SpiritLevelError",
    "Symmetries",
    "TracingError",
    "Value",
    "__version__",
    "audit",
    "canonicalize",
    "find_symmetries",
    "flattest",
    "get_measure",
    "list_measures",
    "measure",
    "rescale_layers",
    "sharpen",
    "sharpen_ball",
]
