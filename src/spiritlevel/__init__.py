"""How flat is the minimum of a trained network, in numbers that no rescaling of its weights can fool."""

import importlib
from typing import TYPE_CHECKING, Any

from spiritlevel import presenting
from spiritlevel._version import __version__
from spiritlevel.attack.attack import Attack, flattest, sharpen, sharpen_ball
from spiritlevel.audit.audit import audit
from spiritlevel.audit.findings import Audit
from spiritlevel.compare.compare import Comparison, compare
from spiritlevel.errors import NondeterministicError, RescalingError, SpiritLevelError, TracingError
from spiritlevel.guarantees.certificate import Certificate
from spiritlevel.guarantees.pac_bayes import pac_bayes
from spiritlevel.guarantees.robustness import Robustness, feature_robustness
from spiritlevel.measures import PAPERS
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.registry import get_measure, list_measures, register
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.run import measure
from spiritlevel.measuring.value import Cost, Value
from spiritlevel.problem.losses import batch_loss
from spiritlevel.problem.problem import Problem
from spiritlevel.spectrum.spectrum import Spectrum, spectrum
from spiritlevel.symmetry import Rescaling, Symmetries, canonicalize, find_symmetries, rescale_layers
from spiritlevel.tracking.history import History
from spiritlevel.tracking.tracker import Tracker

if TYPE_CHECKING:
    from spiritlevel import plot

# In the order a request travels: problem, symmetry, measure, report.
__all__ = [
    "Attack",
    "Audit",
    "Certificate",
    "Comparison",
    "Cost",
    "History",
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
    "Tracker",
    "Value",
    "__version__",
    "audit",
    "batch_loss",
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


# What shows a result is imported when one is first shown: measuring does without matplotlib and jinja2.
presenting.shown_by(Report, "spiritlevel.show.report")
presenting.shown_by(Symmetries, "spiritlevel.symmetry.describe")
presenting.shown_by(Audit, "spiritlevel.audit.show")
presenting.shown_by(Spectrum, "spiritlevel.spectrum.show")
presenting.shown_by(Comparison, "spiritlevel.compare.show")
presenting.shown_by(Certificate, "spiritlevel.guarantees.show")
presenting.shown_by(Robustness, "spiritlevel.guarantees.show")
presenting.shown_by(History, "spiritlevel.tracking.show")

register(measure for paper in PAPERS for measure in paper.MEASURES)


def __getattr__(name: str) -> Any:
    """`plot` on first use: it brings matplotlib along, which measuring does without."""
    if name == "plot":
        return importlib.import_module("spiritlevel.plot")
    raise AttributeError(f"module 'spiritlevel' has no attribute {name!r}")
