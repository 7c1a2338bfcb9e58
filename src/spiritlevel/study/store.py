"""The folder of a study: one folder a cell, named by what the cell is; a file that exists is whole.

study.json                 the study and its cells
cells/HASH/cell.json       settings of the cell
cells/HASH/curve.csv, model.safetensors, training.json    once it is trained
cells/HASH/result.json     once it is measured; written last
cells/HASH/failed.json     what went wrong; gone after a success
cells/HASH/log.txt         what its process said
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import hashlib
import io
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

from spiritlevel._version import __version__
from spiritlevel.errors import SpiritLevelError
from spiritlevel.result import write_whole
from spiritlevel.study.config import Cell, CellConfig, Study
from spiritlevel.study.train import Epoch


def hash_of(config: CellConfig, fingerprint: str) -> str:
    """What a cell is, as 16 hexadecimal digits: its settings, the bytes of its data, the version that computes it.

    Where the data lie is no part of it, nor in which ensemble it is trained.
    """
    return _digest(config.model_dump(mode="json", exclude=_ELSEWHERE), fingerprint)


def training_hash_of(config: CellConfig, fingerprint: str) -> str:
    """The same for what is trained, whatever is required and measured of it."""
    apart = {**_ELSEWHERE, "training": {*_ELSEWHERE["training"], "require"}, "measure": True}
    return _digest(config.model_dump(mode="json", exclude=apart), fingerprint)


_ELSEWHERE: dict[str, Any] = {"data": {"folder"}, "training": {"ensemble"}}


def _digest(settings: dict[str, Any], fingerprint: str) -> str:
    whole = {"config": settings, "data": fingerprint, "version": __version__}
    canonical = json.dumps(whole, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    write_whole(path, json.dumps(content, indent=1, allow_nan=False))


def read_json(path: Path) -> Any:
    """What `write_json` wrote; None where there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise SpiritLevelError(f"{path} is damaged ({error}); remove it and run the study again") from None


def _copy_whole(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copyfile(source, temporary)
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class CellFolder:
    """The files of one cell."""

    path: Path

    @property
    def hash(self) -> str:
        """The cell's hash, which names its folder."""
        return self.path.name

    @property
    def cell(self) -> Path:
        """The settings: what the worker is given."""
        return self.path / "cell.json"

    @property
    def checkpoint(self) -> Path:
        """The trained weights."""
        return self.path / "model.safetensors"

    @property
    def curve(self) -> Path:
        """The training curve."""
        return self.path / "curve.csv"

    @property
    def log(self) -> Path:
        """What the cell's process said."""
        return self.path / "log.txt"

    @property
    def done(self) -> bool:
        """Whether there is a result."""
        return (self.path / "result.json").is_file()

    def settings(self) -> dict[str, Any]:
        """The content of `cell.json`."""
        found = read_json(self.cell)
        if found is None:
            raise SpiritLevelError(f"no file {self.cell}; `spiritlevel study run` writes it")
        return dict(found)

    def training(self) -> dict[str, Any] | None:
        """How training ended, if it did."""
        found = read_json(self.path / "training.json")
        return None if found is None else dict(found)

    def result(self) -> dict[str, Any] | None:
        """The result, if there is one."""
        found = read_json(self.path / "result.json")
        return None if found is None else dict(found)

    def failure(self) -> dict[str, Any] | None:
        """What went wrong, if something did and no result followed."""
        found = None if self.done else read_json(self.path / "failed.json")
        return None if found is None else dict(found)

    def adopt(self, other: CellFolder) -> None:
        """Take over a complete training of the same settings; what says that it is complete comes last."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.curve, other.curve.read_text(encoding="utf-8"))
        _copy_whole(other.checkpoint, self.checkpoint)
        self.write_training(other.training() or {})

    def write_curve(self, curve: Iterable[Epoch]) -> None:
        """The training curve as a table."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [field.name for field in fields(Epoch)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(epoch) for epoch in curve)
        write_whole(self.curve, text.getvalue())

    def write_training(self, training: Mapping[str, Any]) -> None:
        """How training ended; the checkpoint and the curve must be there before."""
        write_json(self.path / "training.json", training)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """The result, which takes an earlier failure away."""
        write_json(self.path / "result.json", result)
        (self.path / "failed.json").unlink(missing_ok=True)

    def write_failure(self, error: str, traceback: str, attempts: int) -> None:
        """What went wrong, and how often it was tried."""
        write_json(self.path / "failed.json", {"error": error, "traceback": traceback, "attempts": attempts})


class StudyFolder:
    """A study on disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def cell(self, name: str) -> CellFolder:
        """The folder of the cell with this hash."""
        return CellFolder(self.path / "cells" / name)

    def study(self) -> dict[str, Any]:
        """The content of `study.json`."""
        found = read_json(self.path / "study.json")
        if found is None:
            raise SpiritLevelError(f"{self.path} holds no study: no file study.json; `spiritlevel study run` makes one")
        return dict(found)

    def cells(self) -> list[CellFolder]:
        """The folders of the study's cells, in the order of the grid."""
        return [self.cell(entry["hash"]) for entry in self.study()["cells"]]

    def write(self, study: Study, fingerprints: Mapping[str, str]) -> list[CellFolder]:
        """Describe the study and each of its cells; `fingerprints` by hash of the cell, in the order of the grid."""
        before = read_json(self.path / "study.json")
        if before is not None and before["name"] != study.name:
            raise SpiritLevelError(
                f"{self.path} holds the study {before['name']!r}, not {study.name!r}; choose another folder"
            )
        folders = [self.cell(name) for name in fingerprints]
        trained = self._trainings()
        for folder, cell in zip(folders, study.cells(), strict=True):
            if folder.done:
                continue
            fingerprint = fingerprints[folder.hash]
            write_json(folder.cell, _described(folder.hash, cell, fingerprint))
            other = trained.get(training_hash_of(cell.config, fingerprint))
            if folder.training() is None and other is not None:
                folder.adopt(other)
        cells = [
            {"hash": folder.hash, "factors": cell.factors, "seed": cell.seed}
            for folder, cell in zip(folders, study.cells(), strict=True)
        ]
        write_json(self.path / "study.json", {**study.to_dict(), "version": __version__, "cells": cells})
        return folders

    def _trainings(self) -> dict[str, CellFolder]:
        """Complete trainings by what was trained: a study that requires or measures something else need not train again."""
        folders = (CellFolder(path.parent) for path in sorted(self.path.glob("cells/*/training.json")))
        return {_trained_in(folder): folder for folder in folders}


def _trained_in(folder: CellFolder) -> str:
    settings = folder.settings()
    return training_hash_of(CellConfig.model_validate(settings["config"]), settings["fingerprint"])


def _described(name: str, cell: Cell, fingerprint: str) -> dict[str, Any]:
    return {
        "hash": name,
        "factors": cell.factors,
        "seed": cell.seed,
        "config": cell.config.model_dump(mode="json"),
        "fingerprint": fingerprint,
    }


@contextlib.contextmanager
def locked(folders: Iterable[CellFolder]) -> Iterator[bool]:
    """Hold the cells for this process; False where another process, of this or another run, holds one of them.

    The lock belongs to the open file, so the system takes it away from a process that dies in whatever way.
    """
    with contextlib.ExitStack() as stack:
        yield all(_lock(stack.enter_context((folder.path / "lock").open("a+"))) for folder in folders)


def _lock(stream: IO[str]) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    stream.truncate(0)
    stream.write(f"{socket.gethostname()} {os.getpid()}\n")
    stream.flush()
    return True
