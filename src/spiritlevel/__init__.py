"""How flat is the minimum of a trained network, in numbers that no rescaling of its weights can fool."""

import importlib
from typing import TYPE_CHECKING, Any

from spiritlevel._version import __version__
from spiritlevel.audit import Audit, audit
from spiritlevel.errors import NondeterministicError, RescalingError, SpiritLevelError, TracingError
from spiritlevel.guarantees.certificate import Certificate
from spiritlevel.guarantees.compare import Comparison, compare
from spiritlevel.guarantees.pac_bayes import pac_bayes
from spiritlevel.guarantees.robustness import Robustness, feature_robustness
from spiritlevel.measures import get_measure, list_measures
from spiritlevel.measures.record import Measure
from spiritlevel.measures.run import measure
from spiritlevel.problem import Problem
from spiritlevel.result import Cost, Report, Value
from spiritlevel.spectrum import Spectrum, spectrum
from spiritlevel.symmetry import Rescaling, Symmetries, canonicalize, find_symmetries, rescale_layers
from spiritlevel.symmetry.attack import Attack, flattest, sharpen, sharpen_ball

if TYPE_CHECKING:
    from spiritlevel import plot

# In the order a request travels: problem, symmetry, measure, report.
__all__ = [
    "Attack",
    "Audit",
    "Certificate",
    "Comparison",
    "Cost",
    "Measure",
    "NondeterministicError",
    "Problem",
    "Report",
    "Rescaling",
    "RescalingError",
    "Robustness",
    "Spectrum",
    "SpiritLevelError",
    "Symmetries",
    "TracingError",
    "Value",
    "__version__",
    "audit",
    "canonicalize",
    "compare",
    "feature_robustness",
    "find_symmetries",
    "flattest",
    "get_measure",
    "list_measures",
    "measure",
    "pac_bayes",
    "plot",
    "rescale_layers",
    "sharpen",
    "sharpen_ball",
    "spectrum",
]


def __getattr__(name: str) -> Any:
    """`plot` on first use: it brings matplotlib along, which measuring does without."""
    if name == "plot":
        return importlib.import_module("spiritlevel.plot")
    raise AttributeError(f"module 'spiritlevel' has no attribute {name!r}")
