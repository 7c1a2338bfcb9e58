"""A training on its way in one file, so that one that was stopped goes on where it was, to the same bits.

The file holds plain numbers and tensors only, and nothing in it is executed. It is written after an epoch, if the last time is long
ago, and deleted when the training has ended.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spiritlevel._version import __version__
from spiritlevel.errors import SpiritLevelError
from spiritlevel.saved import write_whole
from spiritlevel.subjects.checkpoint import read_torch_file

# Seconds of training from one writing to the next.
EVERY = 60.0


class Unfinished:
    """The file of cells that are trained together; it is theirs only: other company would train other networks.

    Attributes:
        damage: Why what the file holds could not be used; empty if it could, or if there is none.
    """

    def __init__(self, path: Path, cells: Sequence[str]) -> None:
        self.path = path
        self.whose = {"cells": list(cells), "spiritlevel": __version__, "torch": str(torch.__version__)}
        self.damage = ""
        self._last = time.monotonic()

    def read(self) -> Mapping[str, Any] | None:
        """How far the training was; None if it has to begin anew."""
        if not self.path.is_file():
            return None
        try:
            found = read_torch_file(self.path)
        except SpiritLevelError:
            self.damage = "is damaged"
            return None
        if not isinstance(found, dict) or found.get("whose") != self.whose:
            self.damage = "was written by another version, or for cells that were trained in other company"
            return None
        return dict(found["state"])

    def write_if_due(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """Write how far the training is, unless that was done a moment ago. On a full disk the training matters more."""
        if time.monotonic() - self._last < EVERY:
            return
        written = io.BytesIO()
        torch.save({"whose": self.whose, "state": dict(state())}, written)
        with contextlib.suppress(OSError):
            if self.path.parent.is_dir():  # a folder that was deleted is not created again
                write_whole(self.path, written.getvalue())
        self._last = time.monotonic()

    def forget(self) -> None:
        """Delete the file: the training has ended."""
        self.path.unlink(missing_ok=True)
