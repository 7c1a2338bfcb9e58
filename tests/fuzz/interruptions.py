"""Ctrl-C at a chosen line of the program: the caller's model is as it was, and what is reported is what is true.

The signal is a real one, raised at the n-th line that runs in the files looked at, so that every trial can be repeated.
"""

import signal
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import spiritlevel as sl
from fuzz.check import Changed, unchanged
from fuzz.subjects import Built, Options, Subject, build

SWAPPING = ("torch/nn/utils/", "torch/_functorch/functional_call")
"""Where torch puts other tensors in the place of parameters and takes them out again."""

EVERYWHERE = ("spiritlevel/", *SWAPPING)


class LineCounter:
    """Counts the lines that run in files whose path has one of `parts`, and calls `at_line` at the given number."""

    def __init__(self, parts: tuple[str, ...], number: int = -1, at_line: Callable[[], None] | None = None) -> None:
        self.parts, self.number, self.at_line, self.count = parts, number, at_line, 0

    def __enter__(self) -> "LineCounter":
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        return self._line if any(part in path for part in self.parts) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.count += 1
        if self.count == self.number and self.at_line is not None:
            self.at_line()
        return self._line


def interrupt(subject: Subject, fraction: float, parts: tuple[str, ...] = EVERYWHERE) -> str:
    """Interrupt the measurement after this fraction of its lines: "stopped", "reported", "finished", or what is wrong."""
    built = build(subject)
    with LineCounter(parts) as lines:
        try:
            whole = _measure(built)
        except Exception:  # refused, or a crash that is none of an interruption's
            return "refused"
    number = 1 + int(fraction * (lines.count - 1))
    try:
        with unchanged(built.model), LineCounter(parts, number, lambda: signal.raise_signal(signal.SIGINT)):
            report = _measure(built)
    except KeyboardInterrupt:
        return "stopped"
    except Changed as change:
        return f"changed: {change}"
    same = all(report[name].value == whole[name].value for name in report)
    if not same:
        return "changed: values differ from those of the whole measurement"
    return "reported" if report.interrupted else "finished"


def _measure(built: Built) -> sl.Report:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sl.measure(built.model, built.data, built.loss, **built.arguments)


def interruptible(subject: Subject) -> Subject:
    """The same with a handful of measures, so that there is something to keep."""
    measures = ("hessian_trace", "rho_sum", "hessian_spectral_norm", "kappa_sum")
    return Subject(subject.network, subject.loss, subject.samples, options=Options(measures=measures))
