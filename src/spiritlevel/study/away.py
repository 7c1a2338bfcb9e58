"""Cells of a study behind a URL, on whatever machine computes them: brought into a scratch folder, computed there, sent as files come.

A cell's result is sent last, so that half of what a cell gives is never taken for a result. Who is at work on a cell says so in
the store every few seconds; another one who comes meanwhile leaves it alone. Two who come within the same second compute the
same and write the same.
"""

from __future__ import annotations

import contextlib
import platform
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from spiritlevel.saved import write_json
from spiritlevel.study.live import is_claimed
from spiritlevel.study.mirror import Mirror
from spiritlevel.study.objectstore import Store, StoreError
from spiritlevel.study.store import CellFolder

# Seconds between two looks at what was written.
EVERY = 0.5
_NOT_NEEDED = (".damaged", "log.txt", "running.json", ".part", "unfinished.pt")


class Away:
    """Some cells by the URLs of their `cell.json`, in a scratch folder."""

    def __init__(self, urls: Sequence[str], scratch: Path) -> None:
        study, hashes = "", []
        for url in urls:
            study, _, name = url.removesuffix("/cell.json").rpartition("/cells/")
            hashes.append(name)
        self.folders = [f"cells/{name}" for name in hashes]
        self.mirror = Mirror(Store(study), scratch)
        self.cells = [CellFolder(scratch / folder) for folder in self.folders]

    @property
    def paths(self) -> list[Path]:
        """The files that describe the cells, as a worker takes them."""
        return [cell.cell for cell in self.cells]

    def bring(self) -> None:
        """Everything that the store has of the cells."""
        for folder in self.folders:
            names = self.mirror.store.names(folder)
            if f"{folder}/cell.json" not in names:
                where = f"{self.mirror.store.url}/{folder}/cell.json"
                raise StoreError(
                    where, f"not seen from {platform.node()}: every node must reach the store of the study by its URL"
                )
            self.mirror.bring(name for name in names if not name.endswith(_NOT_NEEDED))

    def is_claimed(self) -> bool:
        """Whether somebody else is at work on one of the cells."""
        return any(is_claimed(self.mirror.store.read(f"{folder}/running.json")) for folder in self.folders)

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Send what is written inside as it comes, and the rest at the end."""
        ended = threading.Event()
        sender = threading.Thread(target=self._send_on, args=(ended,), daemon=True)
        sender.start()
        try:
            yield
        finally:
            ended.set()
            sender.join()
        self._name_files_by_url()
        self.mirror.send(self.folders)

    def _send_on(self, ended: threading.Event) -> None:
        while not ended.wait(EVERY):
            with contextlib.suppress(OSError):  # tried again at the next look
                self.mirror.send(self.folders)

    def _name_files_by_url(self) -> None:
        """The scratch folder will be gone when somebody reads what went wrong in it."""
        for cell in self.cells:
            failure = cell.failure()
            if failure is not None and str(self.mirror.path) in failure["error"]:
                told = failure["error"].replace(str(self.mirror.path), self.mirror.store.url)
                write_json(cell.path / "failed.json", {**failure, "error": told})


@contextlib.contextmanager
def scratch_folder(given: str | None) -> Iterator[Path]:
    """The folder that was given, or one for the time being."""
    if given is not None:
        yield Path(given)
        return
    with tempfile.TemporaryDirectory(prefix="spiritlevel-") as found:
        yield Path(found)
