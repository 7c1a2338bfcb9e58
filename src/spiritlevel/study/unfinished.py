"""A training on its way in one file, so that one that was stopped goes on where it was, to the same bits.

The file holds a line of JSON, which says whose training it is and has the digest of what follows, and then plain numbers and
tensors, of which nothing is executed. It is written after an epoch, if the last time is long ago, and deleted when the training
has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spiritlevel._version import __version__
from spiritlevel.saved import remove_halves, write_whole

# Seconds of training from one writing to the next.
EVERY = 60.0
# What a state holds: another number where `state_dict` of a training, or of something in it, holds something else.
FORMAT = 4


class Unfinished:
    """The file of cells that are trained together; it is theirs only: other company would train other networks.

    Args:
        path: The file.
        cells: The names of the cells.
        tell: Told why a file that is there cannot be used, before the training begins anew.
    """

    def __init__(self, path: Path, cells: Sequence[str], tell: Callable[[str], None] = lambda _: None) -> None:
        self.path, self._tell = path, tell
        versions = {"format": FORMAT, "spiritlevel": __version__, "torch": str(torch.__version__)}
        self.whose = {"cells": list(cells), **versions}
        self._last = time.monotonic()

    def read(self) -> Mapping[str, Any] | None:
        """How far the training was; None if it has to begin anew."""
        remove_halves(self.path)
        if not self.path.is_file():
            return None
        head, _, content = self.path.read_bytes().partition(b"\n")
        try:
            said = json.loads(head)
            whole = said.pop("sha256") == hashlib.sha256(content).hexdigest()
        except (ValueError, KeyError, AttributeError, TypeError):
            whole = False
        if not whole:
            self.refuse("is damaged")
            return None
        if said != self.whose:
            self.refuse("was written by another version, or for cells that were trained in other company")
            return None
        return dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))

    def refuse(self, why: str) -> None:
        """Say why what the file holds is of no use."""
        self._tell(f"{self.path} {why}: trained from the beginning")

    def write_if_due(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """Write how far the training is, unless that was done a moment ago.

        Where the disk or the memory is full, the training matters more.
        """
        if time.monotonic() - self._last < EVERY:
            return
        with contextlib.suppress(OSError, MemoryError):
            if self.path.parent.is_dir():  # a folder that was deleted is not created again
                write_whole(self.path, self._written(state()))
        self._last = time.monotonic()

    def _written(self, state: Mapping[str, Any]) -> bytes:
        stream = io.BytesIO()
        torch.save(dict(state), stream)
        content = stream.getvalue()
        head = {**self.whose, "sha256": hashlib.sha256(content).hexdigest()}
        return json.dumps(head).encode() + b"\n" + content
