"""A folder on this machine and the same folder behind a URL: files are brought and sent, and what is the same is not sent again.

Files are sent in an order in which whoever finds one finds what it speaks of: weights before `training.json`, a cell's result
last of the cell, `study.json` last of all.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from spiritlevel.study.objectstore import Store

# Where a file stands in the order; all others come first.
_ORDER = {
    "training.json": 1,
    "attempts.json": 2,
    "failed.json": 2,
    "running.json": 2,
    "result.json": 3,
    "study.json": 4,
}
# Signs between processes of one machine, what a launcher sends by itself, and what is too large to be sent every minute.
_STAYS = frozenset({"lock", "running", "log.txt", "unfinished.pt"})

Stamp = tuple[int, int]


class Mirror:
    """A folder, and what it has in common with the store: the local files that are the same there, folder by folder."""

    def __init__(self, store: Store, path: Path) -> None:
        self.store, self.path = store, path
        self._same: defaultdict[str, dict[str, Stamp]] = defaultdict(dict)

    def has(self, name: str) -> bool:
        """Whether a file was brought or sent."""
        folder, file = posixpath.split(name)
        return file in self._same[folder]

    def bring(self, names: Iterable[str]) -> None:
        """Copy files that are in the store."""
        wanted = list(names)
        self.store.get(wanted, self.path)
        for name in wanted:
            self.note(name)

    def bring_if_there(self, names: Iterable[str]) -> None:
        """Copy files that come and go; those that the store does not have are deleted here."""
        for name in names:
            content = self.store.read(name)
            if content is None:
                self.forget(name)
            else:
                self.write(name, content)

    def write(self, name: str, content: bytes) -> None:
        """A file as the store has it."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        self.note(name)

    def forget(self, name: str) -> None:
        """Delete a file here that the store does not have."""
        folder, file = posixpath.split(name)
        self._same[folder].pop(file, None)
        (self.path / name).unlink(missing_ok=True)

    def note(self, name: str) -> None:
        """Take a file as it is here for what the store has."""
        folder, file = posixpath.split(name)
        self._same[folder][file] = _stamp(self.path / name)

    def send(self, folders: Iterable[str], *, make: bool = False) -> None:
        """Send what was written in these folders, and delete in the store what is gone from them."""
        stages: defaultdict[int, dict[str, Stamp]] = defaultdict(dict)
        gone = []
        for folder in folders:
            found, same = self._files(folder), self._same[folder]
            for file, stamp in found.items():
                if same.get(file) != stamp:
                    stages[_ORDER.get(file, 0)][posixpath.join(folder, file)] = stamp
            gone += [posixpath.join(folder, file) for file in same if file not in found]
        for _, stage in sorted(stages.items()):
            self._send(stage, make)
        self.store.remove(gone)
        for name in gone:
            self.forget(name)

    def _send(self, stage: Mapping[str, Stamp], make: bool) -> None:
        there = {name: stamp for name, stamp in stage.items() if (self.path / name).exists()}  # a sign comes and goes
        self.store.put(there, self.path, make=make)
        for name, stamp in there.items():  # as it was before: what has changed since is sent again
            folder, file = posixpath.split(name)
            self._same[folder][file] = stamp

    def _files(self, folder: str) -> dict[str, Stamp]:
        found = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for path in (self.path / folder).iterdir():
                if path.name not in _STAYS and not path.name.startswith("."):
                    with contextlib.suppress(FileNotFoundError):
                        if path.is_file():
                            found[path.name] = _stamp(path)
        return found


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_mtime_ns, found.st_size
