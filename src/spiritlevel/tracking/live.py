"""The last point of a training as it runs: a line of the terminal that redraws, or a cell of a notebook."""

from __future__ import annotations

import shutil
import sys
from typing import Any, TextIO

from spiritlevel.presenting import show
from spiritlevel.tracking.history import History, Point


class Live:
    """Shows a history at every new point; in a notebook where one runs, else on standard error if that is a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._cell: Any = None

    def show(self, history: History, overhead: float) -> None:
        """Redraw for the last point of a history."""
        if _in_notebook():
            self._show_cell(history)
            return
        stream = self._stream or sys.stderr
        if stream.isatty():
            width = shutil.get_terminal_size((80, 24)).columns
            end = "\n" if history[-1].reason == "forced" else ""  # the last of a run; what comes after has its own line
            stream.write(f"\r{line(history[-1], overhead)[: width - 1]:<{width - 1}}{end}")
            stream.flush()

    def _show_cell(self, history: History) -> None:
        display: Any = sys.modules["IPython"].display
        content = display.HTML(show(history, "fragment"))
        if self._cell is None:
            self._cell = display.display(content, display_id=True)
        else:
            self._cell.update(content)


def _in_notebook() -> bool:
    """Whether this process serves a notebook; a terminal of IPython is one of a terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def line(point: Point, overhead: float) -> str:
    """A point in a line: the step, the loss, the values, and what measuring has added to the training time so far.

    >>> line(Point(100, 0.25, {}, epoch=1.0), 0.031)
    'step 100  epoch 1  loss 0.25  (measuring: 3.1 % of the training time)'
    """
    parts = [f"step {point.step}"]
    parts += [f"epoch {point.epoch:g}"] if point.epoch is not None else []
    parts += [f"loss {point.loss:.4g}"] if point.loss == point.loss else []
    parts += [f"{name} {value.value:.4g}" for name, value in point.values.items() if value.available]
    parts += ["could not be measured"] if not point.values and point.notes else []
    return "  ".join([*parts, f"(measuring: {100 * overhead:.1f} % of the training time)"])
