"""Running a study: write down its cells, give the unfinished ones to an engine, keep count."""

from __future__ import annotations

import errno
import os
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.engines.engine import Engine, Outcome, Task
from spiritlevel.study.identity import Code, code_of
from spiritlevel.study.progress import Count, StudyProgress
from spiritlevel.study.results import read_study
from spiritlevel.study.settings import Plan, PlannedCell
from spiritlevel.study.store import CellFolder, Contents, StudyFolder, Tell, hash_of, silent
from spiritlevel.study.train import Samples, build, ensemble_size, load_samples
from spiritlevel.study.worker import DISK_FULL, HELD, REFUSED, is_disk_full

# A worker that was killed or crashed is tried once more.
MOST_ATTEMPTS = 2
# Seconds before looking again at a cell that another run holds.
HELD_PAUSE = 2.0


@dataclass(frozen=True)
class Summary:
    """What is in a study's folder: cells by state. `excluded` are done but did not reach what the study requires."""

    total: int
    done: tuple[str, ...]
    excluded: tuple[str, ...]
    failed: dict[str, str]

    @property
    def missing(self) -> int:
        """Cells without result or failure."""
        return self.total - len(self.done) - len(self.failed)


def summarize(folder: StudyFolder) -> Summary:
    """Look at every cell of the study in `folder`."""
    study = read_study(folder)
    done = [cell for cell in study.cells if cell.training]
    excluded = tuple(cell.hash for cell in done if not cell.training["reached"])
    failed = {cell.hash: cell.error for cell in study.with_status("failed")}
    return Summary(len(study.cells), tuple(cell.hash for cell in done), excluded, failed)


def run_study(plan: Plan, folder: StudyFolder, engine: Engine, progress: StudyProgress) -> Summary:
    """Compute every cell that has no result yet. Stops all workers however it ends."""
    try:
        with folder.at_work():
            groups = prepare(plan, folder, progress.tell)
            with progress:
                _Run(groups, engine, progress).to_the_end()
            return summarize(folder)
    except KeyboardInterrupt:
        progress.tell("interrupted; what is finished stays, and the same command goes on where it was")
        raise
    except Exception as error:
        if not is_disk_full(error) and not isinstance(error, OSError):
            raise
        raise SpiritLevelError(_stopped_by(error, folder)) from None
    finally:
        engine.stop()


def _stopped_by(error: Exception, folder: StudyFolder) -> str:
    """What the file system refused, and what to do."""
    if is_disk_full(error):
        return (
            f"no space left for {folder.path}: stopped. Results that exist are whole; free some space and run the same "
            "command again, it goes on where it was"
        )
    if not folder.path.is_dir():
        return (
            f"{folder.path} is gone, and with it what was computed: stopped. Run the same command again to start anew"
        )
    where, why = getattr(error, "filename", None) or folder.path, getattr(error, "strerror", None) or error
    return f"{where}: {why}: stopped. What is finished stays, and the same command goes on where it was"


Group = tuple[CellFolder, ...]


def prepare(plan: Plan, folder: StudyFolder, tell: Tell = silent) -> list[Group]:
    """Write the cells down, grouped by how they are trained: alone, or several seeds together.

    Loads the data and builds every kind of network once: what cannot work is refused before anything is computed.
    """
    samples: dict[str, Samples] = {}
    together: dict[str, int] = {}
    code: dict[str, Code] = {}
    contents: dict[str, Contents] = {}
    for cell in plan.cells:
        data = cell.config.data.model_copy(update={"label_noise": 0.0})
        key, point = data.model_dump_json(), _point(cell)
        if key not in samples:
            samples[key] = load_samples(data)
        if point not in together:
            network = build(cell.config, samples[key].train)
            together[point] = ensemble_size(cell.config, network, len(plan.seeds))
            code[point] = code_of(cell.config, samples[key].train)
        found = Contents(samples[key].fingerprint, code[point])
        contents[hash_of(cell.config, *found)] = found
    folders = folder.write(plan, contents, tell)
    groups = _groups(plan.cells, together)
    return [tuple(folders[position] for position in group) for group in groups]


def _point(cell: PlannedCell) -> str:
    """The cell without its seed: its place in the grid."""
    return cell.config.model_copy(update={"seed": 0}).model_dump_json()


def _groups(cells: Sequence[PlannedCell], together: Mapping[str, int]) -> list[list[int]]:
    """Positions of cells that are trained together, those of the first seeds of every point first.

    So a study that is cut short has some of everything.
    """
    points: dict[str, list[int]] = defaultdict(list)
    for position, cell in enumerate(cells):
        points[_point(cell)].append(position)
    chunks = [
        (start, positions[start : start + together[point]])
        for point, positions in points.items()
        for start in range(0, len(positions), together[point])
    ]
    return [chunk for _, chunk in sorted(chunks, key=lambda entry: entry[0])]


class _Run:
    """A run on its way: what is queued, submitted, done and failed."""

    def __init__(self, groups: Sequence[Group], engine: Engine, progress: StudyProgress) -> None:
        self.engine, self.progress = engine, progress
        self.cells = [cell for group in groups for cell in group]
        self.failed: set[CellFolder] = set()
        self.done = {cell for cell in self.cells if cell.done}
        self.found = len(self.done)
        tasks = (Task(tuple(cell.cell for cell in group)) for group in groups)
        self.queue = deque(task for task in tasks if not self._ended(task))
        self.submitted: set[Task] = set()
        self.later: list[tuple[float, Task]] = []

    def _folders(self, task: Task) -> list[CellFolder]:
        return [CellFolder(path.parent) for path in task.cells]

    def _ended(self, task: Task) -> bool:
        return all(folder in self.done or folder in self.failed for folder in self._folders(task))

    def to_the_end(self) -> None:
        self._show()
        while self.queue or self.later or self.engine.running:
            self._return_held()
            while self.queue and self.engine.free > 0:
                task = self.queue.popleft()
                self.engine.submit(task)
                self.submitted.add(task)
            for task, outcome in self.engine.finished():
                self.submitted.remove(task)
                self._take(task, outcome)
            self._show()

    def _show(self) -> None:
        running = sum(folder not in self.done for task in self.submitted for folder in self._folders(task))
        self.progress.show(Count(len(self.cells), len(self.done), self.found, running, len(self.failed)))

    def _return_held(self) -> None:
        """Cells of another run: done by now, or looked at again."""
        now = time.monotonic()
        waiting, self.later = self.later, []
        for ready, task in waiting:
            self._look(task)
            if self._ended(task):
                continue
            if now >= ready:
                self.queue.append(task)
            else:
                self.later.append((ready, task))

    def _look(self, task: Task) -> None:
        self.done.update(folder for folder in self._folders(task) if folder.done)

    def _take(self, task: Task, outcome: Outcome) -> None:
        self._look(task)
        if outcome.code == DISK_FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if outcome.code == HELD:
            self.later.append((time.monotonic() + HELD_PAUSE, task))
            return
        open_cells = [folder for folder in self._folders(task) if folder not in self.done]
        if not open_cells:
            return
        if outcome.code == REFUSED or task.attempt + 1 >= MOST_ATTEMPTS:
            for folder in open_cells:
                self._fail(folder, task, outcome)
            return
        # Each alone, so that a cell that crashes again costs no other one.
        self.queue.extendleft(replace(task, cells=(folder.cell,), attempt=task.attempt + 1) for folder in open_cells)

    def _fail(self, folder: CellFolder, task: Task, outcome: Outcome) -> None:
        if not folder.path.is_dir():  # do not make anew what was deleted on purpose
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder.path))
        self.failed.add(folder)
        failure = folder.failure()
        if failure is None or outcome.code < 0:
            ended = f"was killed by signal {-outcome.code}" if outcome.code < 0 else f"ended with code {outcome.code}"
            folder.write_failure(f"the worker {ended}", outcome.said, task.attempt + 1)
            failure = folder.failure()
        assert failure is not None
        self.progress.tell(f"cell {folder.hash} failed: {failure['error']}")
