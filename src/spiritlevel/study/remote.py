"""A study behind a URL: the driver's copy on this machine, which is brought up to date and sent as the run goes on.

runs/HOST-PROCESS.json     in the store, anew every few seconds: a run is at work here
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from spiritlevel.errors import SpiritLevelError
from spiritlevel.saved import user_cache
from spiritlevel.study.live import FRESH, LAST_BEAT, bring_sign
from spiritlevel.study.locks import is_held
from spiritlevel.study.mirror import Mirror
from spiritlevel.study.naming import Contents
from spiritlevel.study.objectstore import Store, is_url
from spiritlevel.study.settings import Plan
from spiritlevel.study.store import CellFolder, StudyFolder, Tell, silent

# What is brought of every cell to read a study, and to go on with one.
TO_SUMMARIZE = frozenset({"result.json"})
_TO_REPORT = frozenset({"result.json", "curve.csv"})
_TO_RUN = frozenset({"result.json", "curve.csv", "training.json", "cell.json"})
_TABLES = ("results.csv", "levels.csv")
# What comes and goes while cells are computed.
_LIVE = ("failed.json", "attempts.json", "running.json")


class RemoteStudy(StudyFolder):
    """A study behind a URL, with a folder of this machine in which it is worked on."""

    def __init__(self, url: str, path: Path) -> None:
        super().__init__(path)
        self.mirror = Mirror(Store(url), path)
        self.store, self.url = self.mirror.store, self.mirror.store.url
        self._sign = f"runs/{platform.node()}-{os.getpid()}.json"

    def words(self, text: str) -> str:
        """A message about files of the copy as one about files behind the URL."""
        return text.replace(f"{self.path}{os.sep}", f"{self.url}/").replace(str(self.path), self.url)

    def pull(self, wanted: frozenset[str]) -> None:
        """Bring the files of these names of every cell, and what its worker and its runs say of it."""
        self.mirror.bring_if_there(("study.json", *_TABLES))
        cells: dict[str, set[str]] = {}
        for name in self.store.names("cells"):
            _, cell, *file = name.split("/")
            cells.setdefault(cell, set()).update(file)
        for cell in cells:
            (self.path / "cells" / cell).mkdir(parents=True, exist_ok=True)
        self.mirror.bring(
            name
            for cell, files in cells.items()
            for file in _needed(files, wanted)
            if not self.mirror.has(name := f"cells/{cell}/{file}")
        )
        for cell, files in cells.items():
            self._bring_live(cell, files)

    def _bring_live(self, cell: str, files: set[str]) -> None:
        self.mirror.bring_if_there(f"cells/{cell}/{file}" for file in _LIVE[:2] if file in files)
        if "running.json" in files:
            bring_sign(self.mirror, f"cells/{cell}/running.json")
        for file in _LIVE:
            if file not in files:
                self.mirror.forget(f"cells/{cell}/{file}")

    def refresh(self, cells: Iterable[CellFolder]) -> None:
        """Bring what was written elsewhere of these cells, but for weights."""
        for cell in cells:
            files = {posix.rpartition("/")[2] for posix in self.store.names(f"cells/{cell.hash}")}
            self.mirror.bring(f"cells/{cell.hash}/{file}" for file in _TO_RUN & files)
            self._bring_live(cell.hash, files)

    def bring_weights(self, cells: Iterable[CellFolder]) -> None:
        """Bring weights, which are needed where a training is taken over."""
        for cell in cells:
            weights = {name for name in self.store.names(f"cells/{cell.hash}") if name.endswith(".safetensors")}
            self.mirror.bring(name for name in weights if not self.mirror.has(name))

    def share(self, cells: Iterable[CellFolder]) -> None:
        """Send what was written here of these cells."""
        self.mirror.send(f"cells/{cell.hash}" for cell in cells)

    def bring_results(self) -> None:
        """Bring every result, of other runs too, and what else a report shows."""
        self.pull(_TO_REPORT)

    def publish(self) -> None:
        """Send the tables and the page."""
        self.mirror.send([""])

    def unclaim(self, cells: Iterable[CellFolder]) -> None:
        """Take away the signs of workers that have ended, however they did, so that nobody waits for them."""
        for cell in cells:
            name = f"cells/{cell.hash}/running.json"
            self.store.remove([name])
            self.mirror.forget(name)

    def write(self, plan: Plan, contents: Mapping[str, Contents], tell: Tell = silent) -> list[CellFolder]:
        """Describe the study and each of its cells, beside what the store has already."""
        self.pull(_TO_RUN)
        found = map(self.cell, contents)  # a damaged result is measured again, from weights that are whole
        self.bring_weights(cell for cell in found if (cell.path / "result.json").exists() and not cell.done)
        folders = super().write(plan, contents, lambda message: tell(self.words(message)))
        self.mirror.send(["", *(f"cells/{folder.hash}" for folder in folders)], make=True)
        return folders

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Let other runs see that one is at work here: by a sign that is young."""
        ended = threading.Event()
        self._say_at_work(make=True)
        beats = threading.Thread(target=self._beat, args=(ended,), daemon=True)
        beats.start()
        try:
            with super().at_work():
                yield
        finally:
            ended.set()
            beats.join()
            with contextlib.suppress(OSError):
                self.store.remove([self._sign])

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(LAST_BEAT):
            with contextlib.suppress(OSError):
                self._say_at_work()

    def _say_at_work(self, make: bool = False) -> None:
        sign = self.path / self._sign
        sign.parent.mkdir(parents=True, exist_ok=True)
        sign.write_text(json.dumps({"at": time.time()}))
        self.store.put([self._sign], self.path, make=make)

    def _others_at_work(self) -> bool:
        return any(name != self._sign for name in self._young_signs())

    def is_at_work(self) -> bool:
        """Whether a run is at work here."""
        return bool(self._young_signs())

    def _young_signs(self) -> list[str]:
        return [name for name in self.store.names("runs") if time.time() - self._said_at(name) < FRESH]

    def _said_at(self, name: str) -> float:
        try:
            return float(json.loads(self.store.read(name) or b"")["at"])
        except (ValueError, TypeError, KeyError):
            return 0.0


def _needed(files: set[str], wanted: frozenset[str]) -> set[str]:
    """Of the files of a cell those that are wanted; to go on with a cell without a result, also its weights."""
    if wanted == _TO_RUN and "result.json" not in files:
        return {file for file in files if file in wanted or file.endswith(".safetensors")}
    return files & wanted


def default_work_folder(url: str) -> Path:
    """Where a run keeps its copy of a study behind a URL."""
    return user_cache() / "studies" / hashlib.sha256(url.encode()).hexdigest()[:16]


def _clear(copies: Iterable[Path]) -> None:
    """Delete the copies of runs of this machine that were killed."""
    for copy in copies:
        if (copy / "running").exists() and not is_held(copy / "running"):
            shutil.rmtree(copy, ignore_errors=True)


@contextlib.contextmanager
def study_at(place: str, bring: frozenset[str] = frozenset(), work: Path | None = None) -> Iterator[StudyFolder]:
    """The study in a folder, or behind a URL with a copy of it for as long as it is looked at: in `work`, with files to `bring`."""
    if not is_url(place):
        yield StudyFolder(place)
        return
    prefix = f"study-{platform.node()}-"
    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
        _clear(work.glob(f"{prefix}*"))
    copy = Path(tempfile.mkdtemp(prefix=prefix, dir=work))
    try:
        study = RemoteStudy(place, copy)
        try:
            if bring:
                study.pull(bring)
            yield study
        except SpiritLevelError as error:
            if str(copy) not in str(error):
                raise
            raise SpiritLevelError(study.words(str(error))) from None
    finally:
        shutil.rmtree(copy, ignore_errors=True)
