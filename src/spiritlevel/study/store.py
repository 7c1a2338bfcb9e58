"""The folder of a study: one folder a cell, named by what the cell is; a file that exists is whole.

study.json                 the study and its cells; written by whoever holds `lock`
running                    held by every run that is at work here
cells/HASH/cell.json       settings of the cell
cells/HASH/curve.csv, model.safetensors, training.json    once it is trained
cells/HASH/loss-0.1.safetensors, epoch-50.safetensors     its weights on the way, where the study measures along
cells/HASH/unfinished.pt   while it is trained, from time to time: to go on if it is stopped; gone when it is trained
cells/HASH/result.json     once it is measured; written last
cells/HASH/failed.json     what went wrong; gone after a success
cells/HASH/log.txt         what its process said
*.damaged                  what could not be read and was made anew
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from spiritlevel._version import __version__
from spiritlevel.errors import SpiritLevelError
from spiritlevel.saved import sha256_of, write_json, write_whole
from spiritlevel.study import files
from spiritlevel.study.files import DamagedFileError, read_object, set_aside
from spiritlevel.study.identity import Code
from spiritlevel.study.locks import Presence, holding, is_held, present
from spiritlevel.study.merge import comparable, merged
from spiritlevel.study.naming import Contents, training_hash_of
from spiritlevel.study.settings import CellConfig, Plan, PlannedCell
from spiritlevel.study.train import Epoch
from spiritlevel.subjects.checkpoint import read_state_dict
from spiritlevel.subjects.networks import is_own_model

Tell = Callable[[str], None]


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
    def unfinished(self) -> Path:
        """How far the training is of this cell and those that are trained with it, where it was stopped."""
        return self.path / "unfinished.pt"

    @property
    def log(self) -> Path:
        """What the cell's process said."""
        return self.path / "log.txt"

    @property
    def done(self) -> bool:
        """Whether there is a result, and it can be read."""
        try:
            return self.result() is not None
        except DamagedFileError:
            return False

    def settings(self) -> dict[str, Any]:
        """The content of `cell.json`."""
        found = read_object(self.cell, files.cell_damage, "run the study again, which writes it anew")
        if found is None:
            raise SpiritLevelError(f"no file {self.cell}; `spiritlevel study run` writes it")
        return found

    def config(self) -> CellConfig:
        """The settings in `cell.json`, checked."""
        try:
            return CellConfig.model_validate(self.settings()["config"])
        except ValidationError as error:
            told = f"its config is not one of a cell: {error.errors()[0]['msg']}"
            raise DamagedFileError(self.cell, told, "run the study again, which writes it anew") from None

    def contents(self) -> Contents:
        """What the settings in `cell.json` stood for when it was written."""
        settings = self.settings()
        code = settings.get("code") or {}
        return Contents(settings["fingerprint"], Code(str(code.get("network", "")), str(code.get("losses", ""))))

    def training(self) -> dict[str, Any] | None:
        """How training ended, if it did and its weights are whole."""
        return None if self.training_damage() else self._ended()

    def training_damage(self) -> str:
        """What is wrong with the files of a training, its weights included; empty if all is well or training has not ended."""
        try:
            ended = self._ended()
        except DamagedFileError as error:
            return f"training.json is damaged ({error.damage})"
        return "" if ended is None else self._weights_damage(ended)

    def _ended(self) -> dict[str, Any] | None:
        remedy = "run the study again, which trains the network again"
        return read_object(self.path / "training.json", files.training_damage, remedy)

    def _weights_damage(self, ended: Mapping[str, Any]) -> str:
        if not self.checkpoint.is_file():
            return f"its weights, {self.checkpoint.name}, are missing"
        if "weights" in ended:
            digests = {
                self.checkpoint.name: ended["weights"],
                **{e["file"]: e["weights"] for e in ended.get("along", [])},
            }
            return next((damage for name, digest in digests.items() if (damage := self._damage_of(name, digest))), "")
        try:  # trained by a version that wrote no digest
            read_state_dict(self.checkpoint)
        except SpiritLevelError:
            return f"{self.checkpoint.name} is damaged"
        return ""

    def _damage_of(self, name: str, digest: str) -> str:
        path = self.path / name
        if not path.is_file():
            return f"weights on the way, {name}, are missing"
        return "" if sha256_of(path) == digest else f"{name} is damaged"

    def result(self) -> dict[str, Any] | None:
        """The result, if there is one."""
        remedy = "run the study again, which measures the network again"
        return read_object(self.path / "result.json", files.result_damage_of(self.hash), remedy)

    def failure(self) -> dict[str, Any] | None:
        """What went wrong, if something did and no result followed."""
        try:
            return None if self.done else read_object(self.path / "failed.json", files.failure_damage, "")
        except DamagedFileError as error:
            told = f"failed.json is damaged ({error.damage}); run the study again, which computes it again"
            return {"error": told, "traceback": "", "attempts": 0}

    def mend(self, tell: Tell) -> None:
        """Set damaged files aside, so that they are made again, and say so. Not in a cell at work: its worker does that."""
        if not self._damages():
            return
        with locked([self]) as held:
            for path, damage, remedy in self._damages() if held else []:
                if path.exists():
                    set_aside(path)
                tell(f"cell {self.hash}: {damage}; it is {remedy}")

    def _damages(self) -> list[tuple[Path, str, str]]:
        """Every damaged file, what is wrong with it and how it will be replaced."""
        found = []
        for name, read, remedy in (
            ("cell.json", self.config, "written anew"),
            ("result.json", self.result, "measured again"),
        ):
            try:
                if (self.path / name).exists():
                    read()
            except DamagedFileError as error:
                found.append((self.path / name, f"{name} is damaged ({error.damage})", remedy))
        if not self.done and (damage := self.training_damage()):
            found.append((self.path / "training.json", damage, "trained again"))
        return found

    def adopt(self, other: CellFolder) -> None:
        """Take over a complete training of the same settings; what says that it is complete comes last."""
        self.path.mkdir(parents=True, exist_ok=True)
        if other.curve.is_file():
            write_whole(self.curve, other.curve.read_bytes())
        write_whole(self.checkpoint, other.checkpoint.read_bytes())
        training = other.training() or {}
        for entry in training.get("along", []):
            write_whole(self.path / entry["file"], (other.path / entry["file"]).read_bytes())
        self.write_training(training)

    def write_curve(self, curve: Iterable[Epoch]) -> None:
        """The training curve as a table."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [field.name for field in fields(Epoch)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(epoch) for epoch in curve)
        write_whole(self.curve, text.getvalue())

    def write_training(self, training: Mapping[str, Any]) -> None:
        """How training ended; the checkpoint and the curve must be there before."""
        write_json(self.path / "training.json", {"weights": sha256_of(self.checkpoint), **training})

    def write_result(self, result: Mapping[str, Any]) -> None:
        """The result, which takes an earlier failure away, and what a run left that was killed just after its training."""
        write_json(self.path / "result.json", result)
        self.unfinished.unlink(missing_ok=True)
        (self.path / "failed.json").unlink(missing_ok=True)

    def write_failure(self, error: str, traceback: str, attempts: int) -> None:
        """What went wrong, and how often it was tried."""
        write_json(self.path / "failed.json", {"error": error, "traceback": traceback, "attempts": attempts})


def silent(_message: str) -> None:
    """Ignores what it is told."""


class StudyFolder:
    """A study on disk.

    One behind a URL has a copy on disk (`remote.py`): what others write is brought there, and what is written there is sent.
    """

    url = ""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._presence: Presence | None = None

    def cell(self, name: str) -> CellFolder:
        """The folder of the cell with this hash."""
        return CellFolder(self.path / "cells" / name)

    def study(self) -> dict[str, Any]:
        """The content of `study.json`."""
        found = self._described()
        if found is None:
            raise SpiritLevelError(f"{self.path} holds no study: no file study.json; `spiritlevel study run` makes one")
        return found

    def _described(self) -> dict[str, Any] | None:
        return read_object(self.path / "study.json", files.study_damage, "run the study again, which writes it anew")

    def cells(self) -> list[CellFolder]:
        """The folders of the study's cells, in the order of the grid."""
        return [self.cell(entry["hash"]) for entry in self.study()["cells"]]

    def words(self, text: str) -> str:
        """A message about the study's files as the user knows them."""
        return text

    def refresh(self, cells: Iterable[CellFolder]) -> None:
        """Bring what was written elsewhere of these cells: in a folder that all share, it is there."""

    def bring_weights(self, cells: Iterable[CellFolder]) -> None:
        """Bring the weights of these cells."""

    def share(self, cells: Iterable[CellFolder]) -> None:
        """Send what was written here of these cells."""

    def bring_results(self) -> None:
        """Bring every result, of other runs too."""

    def publish(self) -> None:
        """Send the tables and the page."""

    def unclaim(self, cells: Iterable[CellFolder]) -> None:
        """Let go of cells whose worker has ended: here the system does so."""

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Let other runs see that one is at work here; the system takes the sign away from a process that dies."""
        self.path.mkdir(parents=True, exist_ok=True)
        with present(self.path / "running") as self._presence:
            try:
                yield
            finally:
                self._presence = None

    def is_at_work(self) -> bool:
        """Whether a run is at work here."""
        return is_held(self.path / "running")

    def _others_at_work(self) -> bool:
        """Whether another run is at work here; to be asked by the holder of the folder's lock only."""
        if self._presence is not None:
            return not self._presence.is_alone()
        with present(self.path / "running") as presence:
            return not presence.is_alone()

    def write(self, plan: Plan, contents: Mapping[str, Contents], tell: Tell = silent) -> list[CellFolder]:
        """Describe the study and each of its cells; `contents` by hash of the cell, in the order of the grid.

        Cells that other runs of the same study have added stay; one run writes at a time.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with holding(self.path / "lock", wait=True):
            return self._write(plan, contents, tell)

    def _write(self, plan: Plan, contents: Mapping[str, Contents], tell: Tell) -> list[CellFolder]:
        before = self._before(plan, tell)
        folders = [self.cell(name) for name in contents]
        cells = list(zip(folders, plan.cells, contents.values(), strict=True))
        described = self._with_others(before, _entry_of(plan, cells), cells, tell)
        for folder, cell, content in cells:
            folder.mend(tell)
            if not folder.cell.exists() or not folder.done:
                write_json(folder.cell, _described(folder.hash, cell, content))
        self._adopt_trainings(cells, tell)
        write_json(self.path / "study.json", described)
        return folders

    def _before(self, plan: Plan, tell: Tell) -> dict[str, Any] | None:
        """What `study.json` says so far, if it is of the same study."""
        try:
            before = self._described()
        except DamagedFileError as error:
            tell(f"{error.path} is damaged ({error.damage}); it is written anew, and finished cells are found again")
            set_aside(error.path)
            return None
        if before is not None and before["name"] != plan.name:
            raise SpiritLevelError(
                f"{self.path} holds the study {before['name']!r}, not {plan.name!r}; choose another folder"
            )
        return before

    def _with_others(
        self, before: dict[str, Any] | None, now: dict[str, Any], cells: Iterable[_Described], tell: Tell
    ) -> dict[str, Any]:
        """The description of the study together with the cells that other runs of it have added."""
        hashes = {entry["hash"] for entry in now["cells"]}
        others = [] if before is None else [entry for entry in before["cells"] if entry["hash"] not in hashes]
        if before is None or not others:
            return now
        standing = {_subject(cell.config): content for _, cell, content in cells}
        kept = [entry for entry in others if comparable(before, now) and self._fits(entry["hash"], standing)]
        if len(kept) < len(others) and self._others_at_work():
            raise SpiritLevelError(
                f"another run is at work in {self.path} with other settings, data or code; wait until it has ended, or "
                "choose another folder"
            )
        if kept:
            tell(f"{self.path / 'study.json'} also lists {_cells(len(kept))} of other runs, which it keeps")
        if len(kept) < len(others):
            tell(f"{_cells(len(others) - len(kept))} of other settings, data or code no longer listed in "
                 f"{self.path / 'study.json'}; the files stay in cells/")  # fmt: skip
        return merged(before, now, kept) if kept else now

    def _fits(self, name: str, standing: Mapping[str, Contents]) -> bool:
        """Whether a cell of another run has the data and the code that this one has under the same names."""
        try:
            folder = self.cell(name)
            contents = folder.contents()
            return standing.get(_subject(folder.config()), contents) == contents
        except SpiritLevelError:
            return False

    def _adopt_trainings(self, cells: Iterable[_Described], tell: Tell) -> None:
        """Take over complete trainings of the same settings; report those that cannot be taken over."""
        trained, by_other_code = self._trainings()
        changed: dict[str, int] = defaultdict(int)
        for folder, cell, content in cells:
            if folder.done or folder.training() is not None:
                continue
            found = trained.get(training_hash_of(cell.config, *content), [])
            self.bring_weights(found)
            damages = {other: other.training_damage() for other in found}
            whole = next((other for other, damage in damages.items() if not damage), None)
            if whole is not None:
                folder.adopt(whole)
            elif damages:
                other, damage = next(iter(damages.items()))
                tell(f"cell {folder.hash}: its training cannot be taken over from cell {other.hash}, because {damage}; "
                     "it is trained again")  # fmt: skip
            elif training_hash_of(cell.config, content.data) in by_other_code:
                changed[cell.config.model.name] += 1
        for name, count in changed.items():
            tell(
                f"the code behind {name} has changed since it was trained here: {_cells(count)} trained again; the old "
                "ones stay in cells/ and are no longer read"
            )

    def _trainings(self) -> tuple[dict[str, list[CellFolder]], set[str]]:
        """Trainings by what was trained: a study that requires or measures something else need not train again.

        And those of code of the user's own, by what was trained apart from the code.
        """
        trained: dict[str, list[CellFolder]] = defaultdict(list)
        by_code: set[str] = set()
        for path in sorted(self.path.glob("cells/*/training.json")):
            folder = CellFolder(path.parent)
            # A training that cannot be read cannot be taken over; if it belongs to this study, it was set aside before.
            with contextlib.suppress(SpiritLevelError):
                config, contents = folder.config(), folder.contents()
                trained[training_hash_of(config, *contents)].append(folder)
                if is_own_model(config.model.name):
                    by_code.add(training_hash_of(config, contents.data))
        return trained, by_code


_Described = tuple[CellFolder, PlannedCell, Contents]


def _cells(count: int) -> str:
    return "1 cell" if count == 1 else f"{count} cells"


def _entry_of(plan: Plan, cells: Iterable[_Described]) -> dict[str, Any]:
    entries = [{"hash": folder.hash, "factors": cell.factors, "seed": cell.seed} for folder, cell, _ in cells]
    return {**plan.to_dict(), "version": __version__, "cells": entries}


def _subject(config: CellConfig) -> str:
    """Which network on which data: what names the contents of a cell."""
    return config.model_copy(
        update={"data": config.data.model_copy(update={"folder": None, "label_noise": 0.0})}
    ).model_dump_json(include={"data", "model"})


def _described(name: str, cell: PlannedCell, contents: Contents) -> dict[str, Any]:
    return {
        "hash": name,
        "factors": cell.factors,
        "seed": cell.seed,
        "config": cell.config.model_dump(mode="json"),
        "fingerprint": contents.data,
        "code": contents.code._asdict(),
    }


@contextlib.contextmanager
def locked(folders: Iterable[CellFolder]) -> Iterator[bool]:
    """Hold the cells for this process; False where another process, of this or another run, holds one of them."""
    with contextlib.ExitStack() as stack:
        yield all(stack.enter_context(holding(folder.path / "lock")) for folder in folders)
