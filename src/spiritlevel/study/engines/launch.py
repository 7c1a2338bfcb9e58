"""One worker process on this machine: started, waited for, and how it ended. Of a study, a cluster runs only this.

It is sent to the nodes as it stands here, so that they do not load everything twice; it needs the standard library only,
and fsspec where the study lies behind a URL.
"""

from __future__ import annotations

import contextlib
import os
import platform
import posixpath
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from spiritlevel.study.worker import SCRATCH, UNTIL_STDIN_CLOSES

THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# What a step of training frees is kept for the next one by the C library of Linux, not given back to the system and asked for again:
# four LeNets on CIFAR-10 took a fifth to a quarter less time with batches of 64 and 128, a twentieth with 32.
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
LAST_WORDS = 2000

# What became of a process: it ended by itself or by a signal, it took too long, or this machine does not see its cells.
EXITED, TIMED_OUT, UNSEEN = "exited", "timed out", "unseen"


class Worker:
    """A process for some cells; it ends with this one, because it notices when its standard input closes.

    It finds modules at `paths` too, and runs in `folder` where there is such a folder here. Cells behind a URL are computed in
    a scratch folder of this machine, which goes when the process has ended.
    """

    def __init__(self, cells: Sequence[str], threads: int, paths: str = "", folder: str | None = None) -> None:
        self.store = posixpath.dirname(cells[0]) if is_away(cells) else ""
        self.scratch = tempfile.mkdtemp(prefix="spiritlevel-") if self.store else ""
        self.log = os.path.join(self.scratch or os.path.dirname(cells[0]), "log.txt")
        found = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), paths)))
        further = {name: str(threads) for name in THREAD_SETTINGS} | ({"PYTHONPATH": found} if found else {})
        options = [UNTIL_STDIN_CLOSES, *([f"{SCRATCH}{self.scratch}"] if self.scratch else [])]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "spiritlevel.study.worker", *options, *cells],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**KEPT_MEMORY, **os.environ, **further},
                cwd=folder if folder and os.path.isdir(folder) else None,
                start_new_session=True,  # an interruption reaches this process alone, which then ends the others
            )

    def last_words(self) -> str:
        """The end of what the process said."""
        try:
            with open(self.log, "rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - LAST_WORDS))
                return log.read().decode(errors="replace").strip()
        except FileNotFoundError:
            return ""

    def end(self) -> None:
        """End the process, if it has not ended, and keep what it said."""
        self.process.kill()
        self.process.communicate()  # waits, and closes its standard input
        if self.store:
            with contextlib.suppress(Exception):  # a log that cannot be kept is no reason to lose its cell
                self._keep_log()
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _keep_log(self) -> None:
        """Add what the process said to the log of its first cell in the store."""
        import fsspec

        with open(self.log, "rb") as log:
            said = log.read()
        system, path = fsspec.core.url_to_fs(f"{self.store}/log.txt")
        before = system.cat_file(path) if system.exists(path) else b""
        system.pipe_file(path, before + said)


def is_away(cells: Sequence[str]) -> bool:
    """Whether cells are named by URLs."""
    return "://" in cells[0]


def launch(
    cells: Sequence[str],
    threads: int,
    seconds: float | None,
    surroundings: Mapping[str, Any],
    time_is_up: type[BaseException] = subprocess.TimeoutExpired,
) -> tuple[str, int, str]:
    """Start a process for these cells and wait until it ends: what became of it, its code, and its last words.

    The error `time_is_up` says so of what runs this.
    """
    if not is_away(cells) and (unseen := [cell for cell in cells if not os.path.isfile(cell)]):
        return UNSEEN, 0, f"{platform.node()} does not see {unseen[0]}"
    worker = Worker(cells, threads, **surroundings)
    try:
        return EXITED, worker.process.wait(seconds), worker.last_words()
    except (subprocess.TimeoutExpired, time_is_up):
        return TIMED_OUT, 0, worker.last_words()
    finally:  # also where this process is told to end
        worker.end()


def launch_job(cells: Sequence[str], threads: int, seconds: float | None) -> tuple[str, int, str]:
    """`launch` in a job of submitit, which raises an error where the time that the job was given is up."""
    from submitit.core.utils import UncompletedJobError

    return launch(cells, threads, seconds, {}, UncompletedJobError)
