"""What is known of a cell before it has a result: where it is at work and how far, and how earlier attempts ended.

cells/HASH/running.json     from its worker, anew every few seconds; gone when the worker ends by itself
cells/HASH/attempts.json    how attempts ended that gave no result; from the run that tried again

Where a study lies behind a URL, no lock is seen: there a sign that is young says that a cell is at work.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from spiritlevel.errors import SpiritLevelError
from spiritlevel.saved import json_ready, write_json
from spiritlevel.study.files import read_object, wrong_entries
from spiritlevel.study.locks import is_held
from spiritlevel.study.mirror import Mirror
from spiritlevel.study.store import CellFolder

# Seconds between two signs of life; the first ones come sooner, for whoever is watching.
FIRST_BEAT, LAST_BEAT = 1.0, 15.0
# A sign of life from another machine counts for so many seconds where the lock of its cell is not seen from here.
FRESH = 60.0
# Notes in a sign that it came through a store, by its URL.
_THROUGH = "through"


class AtWork:
    """Says in the folders of cells that this process is at work on them, since when, and how far it is.

    A sign that cannot be written, on a full disk say, is left out: the cells matter more.
    """

    def __init__(self, folders: Sequence[CellFolder]) -> None:
        self.files = [_sign(folder) for folder in folders]
        self.now: dict[str, Any] = {"host": platform.node(), "process": os.getpid(), "since": time.time()}
        self.losses: Mapping[int, float] = {}
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)

    def say(self, doing: str, **further: Any) -> None:
        """What it does now: the next sign says so."""
        self.now = {**self.now, "doing": doing, **further}

    def after_epoch(self, epoch: int, losses: Mapping[int, float]) -> None:
        """Notice that an epoch ended with these train losses, by the position of the cell."""
        self.losses = {**self.losses, **losses}
        self.say("training", epoch=epoch)

    def __enter__(self) -> AtWork:
        self.say("starting")
        self._write()
        self._beats.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._beats.join()
        for file in self.files:
            with contextlib.suppress(OSError):
                file.unlink()

    def _beat(self) -> None:
        pause = FIRST_BEAT
        while not self._ended.wait(pause):
            self._write()
            pause = min(2 * pause, LAST_BEAT)

    def _write(self) -> None:
        now, losses = self.now, self.losses
        for position, file in enumerate(self.files):
            loss = {"train_loss": losses[position]} if position in losses else {}
            with contextlib.suppress(OSError):
                if file.parent.is_dir():  # a folder that was deleted is not created again
                    write_json(file, json_ready({**now, "at": time.time(), **loss}))


def _sign(folder: CellFolder) -> Path:
    return folder.path / "running.json"


def at_work(folder: CellFolder) -> dict[str, Any] | None:
    """What the worker of a cell says of itself; None where none is at work on it. A killed worker's sign stays behind."""
    said = _read(_sign(folder), {"host": str, "process": int, "since": float})
    if said is None or not (is_held(folder.path / "lock") or _is_fresh_from_elsewhere(_sign(folder), said)):
        return None
    return said


def _is_fresh_from_elsewhere(sign: Path, said: Mapping[str, Any]) -> bool:
    with contextlib.suppress(OSError):
        elsewhere = said["host"] != platform.node() or _THROUGH in said
        return elsewhere and time.time() - sign.stat().st_mtime < FRESH
    return False


def bring_sign(mirror: Mirror, name: str) -> None:
    """Bring the sign of a worker out of a store, as old as the worker says; the lock of its cell is not seen from here."""
    content = mirror.store.read(name)
    if (said := _said(content)) is None:
        mirror.forget(name)
        return
    mirror.write(name, json.dumps({**said, _THROUGH: mirror.store.url}).encode())
    os.utime(mirror.path / name, (said["at"], said["at"]))
    mirror.note(name)


def is_claimed(content: bytes | None) -> bool:
    """Whether a sign in a store, if there is one, is young: a worker has the cell."""
    said = _said(content)
    return said is not None and time.time() - said["at"] < FRESH


def _said(content: bytes | None) -> dict[str, Any] | None:
    """A sign that says how old it is."""
    try:
        said = json.loads(content or b"")
    except ValueError:
        return None
    return said if isinstance(said, dict) and isinstance(said.get("at"), int | float) else None


def note_attempt(folder: CellFolder, how: str) -> None:
    """Add how an attempt ended."""
    write_json(folder.path / "attempts.json", {"ended": [*attempts_at(folder), how]})


def attempts_at(folder: CellFolder) -> list[str]:
    """How earlier attempts ended that gave no result, in words."""
    found = _read(folder.path / "attempts.json", {"ended": list}) or {}
    return list(map(str, found.get("ended", [])))


def _read(path: Path, kinds: Mapping[str, type]) -> dict[str, Any] | None:
    """What a file says; nothing where it is damaged, because nothing depends on it."""
    with contextlib.suppress(SpiritLevelError):
        return read_object(path, lambda plain: wrong_entries(plain, kinds), "")
    return None


def holder_of(folder: CellFolder) -> str:
    """Who wrote its name into the lock of a cell last, or who signs where no lock is seen: host and process."""
    if (said := _claim(folder)) is not None:
        return f"{said['host']} {said['process']}"
    with contextlib.suppress(OSError):
        return (folder.path / "lock").read_text(errors="replace").strip()
    return ""


def held(folders: Sequence[CellFolder]) -> Iterator[CellFolder]:
    """Those of the cells that a process holds."""
    return (folder for folder in folders if is_held(folder.path / "lock") or _claim(folder) is not None)


def _claim(folder: CellFolder) -> dict[str, Any] | None:
    """The young sign of a worker whose lock cannot be seen, because it came through a store."""
    said = at_work(folder)
    return said if said is not None and _THROUGH in said else None
