"""One worker process on this machine: started, waited for, and how it ended. Of a study, a cluster runs only this.

It is sent to the nodes as it stands here, so that they do not load everything twice; it needs the standard library only.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from spiritlevel.study.worker import UNTIL_STDIN_CLOSES

THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
LAST_WORDS = 2000

# What became of a process: it ended by itself or by a signal, it took too long, or this machine does not see its cells.
EXITED, TIMED_OUT, UNSEEN = "exited", "timed out", "unseen"


def start(cells: Sequence[str], threads: int, paths: str = "", folder: str | None = None) -> subprocess.Popen[bytes]:
    """A process for these cells; it ends with this one, because it notices when its standard input closes.

    It finds modules at `paths` too, and runs in `folder` where there is such a folder here.
    """
    found = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), paths)))
    further = {name: str(threads) for name in THREAD_SETTINGS} | ({"PYTHONPATH": found} if found else {})
    with open(log_of(cells), "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "spiritlevel.study.worker", UNTIL_STDIN_CLOSES, *cells],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, **further},
            cwd=folder if folder and os.path.isdir(folder) else None,
            start_new_session=True,  # an interruption reaches this process alone, which then ends the others
        )


def log_of(cells: Sequence[str]) -> str:
    """Where the process of these cells writes what it says."""
    return os.path.join(os.path.dirname(cells[0]), "log.txt")


def last_words(cells: Sequence[str]) -> str:
    """The end of what the process of these cells said."""
    try:
        with open(log_of(cells), "rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - LAST_WORDS))
            return log.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""


def launch(
    cells: Sequence[str], threads: int, seconds: float | None, surroundings: Mapping[str, Any]
) -> tuple[str, int, str]:
    """Start a process for these cells and wait until it ends: what became of it, its code, and its last words."""
    if unseen := [cell for cell in cells if not os.path.isfile(cell)]:
        return UNSEEN, 0, f"{platform.node()} does not see {unseen[0]}"
    process = start(cells, threads, **surroundings)
    try:
        return EXITED, process.wait(seconds), last_words(cells)
    except subprocess.TimeoutExpired:
        return TIMED_OUT, 0, last_words(cells)
    finally:  # also where this process is told to end
        process.kill()
        process.communicate()


def launch_job(cells: Sequence[str], threads: int, seconds: float | None) -> tuple[str, int, str]:
    """`launch` in a job of submitit, which raises an error where the time that the job was given is up."""
    from submitit.core.utils import UncompletedJobError

    try:
        return launch(cells, threads, seconds, {})
    except UncompletedJobError:
        return TIMED_OUT, 0, last_words(cells)
