"""How far a study is: every cell by its state, from what lies in the study's folder."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from spiritlevel.saved import number
from spiritlevel.study.live import at_work, attempts_at
from spiritlevel.study.progress import in_words
from spiritlevel.study.results import read_study
from spiritlevel.study.store import StudyFolder


@dataclass(frozen=True)
class Summary:
    """What is in a study's folder: cells by state.

    Attributes:
        done: With a result; `excluded` are those of them that did not reach what the study requires.
        failed: What went wrong, where nobody is at work on the cell again.
        running: What the worker of a cell says: where, since when, which epoch, which loss.
        waiting: Neither of these.
        retried: How earlier attempts ended, of cells that were tried again and have not failed.
    """

    total: int
    done: tuple[str, ...]
    excluded: tuple[str, ...]
    failed: dict[str, str]
    running: dict[str, dict[str, Any]]
    waiting: tuple[str, ...]
    retried: dict[str, list[str]]

    @property
    def missing(self) -> int:
        """Cells without result or failure."""
        return self.total - len(self.done) - len(self.failed)

    def lines(self) -> list[str]:
        """For a terminal."""
        counts = f"{len(self.running)} running, {len(self.waiting)} waiting, {len(self.failed)} failed"
        lines = [f"{len(self.done)} of {self.total} cells done, {counts}"]
        if self.excluded:
            lines.append(f"{len(self.excluded)} excluded, short of what the study requires: {', '.join(self.excluded)}")
        lines += [f"{name} running {_at(said)}" for name, said in self.running.items()]
        lines += [f"{name} tried again: {'; '.join(ended)}" for name, ended in self.retried.items()]
        return lines + [f"{name} failed: {error}" for name, error in self.failed.items()]


def _at(said: dict[str, Any]) -> str:
    """Where a worker is, since when, and how far."""
    started = time.strftime("%H:%M", time.localtime(said["since"]))
    words = f"on {said['host']} since {started} ({in_words(time.time() - said['since'])})"
    if said.get("doing") != "training" or "epoch" not in said:
        return f"{words}, {said.get('doing', 'starting')}"
    loss = f", loss {number(said['train_loss']):.3g}" if "train_loss" in said else ""
    return f"{words}, epoch {said['epoch']}/{said.get('epochs', '?')}{loss}"


def summarize(folder: StudyFolder) -> Summary:
    """Look at every cell of the study in `folder`."""
    study = read_study(folder)
    done = [cell for cell in study.cells if cell.training]
    excluded = tuple(cell.hash for cell in done if not cell.training["reached"])
    opened = [cell for cell in study.cells if not cell.training]
    running = {cell.hash: said for cell in opened if (said := at_work(folder.cell(cell.hash))) is not None}
    failed = {cell.hash: cell.error for cell in study.with_status("failed") if cell.hash not in running}
    waiting = tuple(cell.hash for cell in opened if cell.hash not in running and cell.hash not in failed)
    retried = {cell.hash: ended for cell in study.cells if (ended := attempts_at(folder.cell(cell.hash)))}
    return Summary(
        len(study.cells),
        tuple(cell.hash for cell in done),
        excluded,
        failed,
        running,
        waiting,
        {name: ended for name, ended in retried.items() if name not in failed},
    )


def is_at_work(folder: StudyFolder) -> bool:
    """Whether a run is at work in the folder."""
    return folder.is_at_work()
