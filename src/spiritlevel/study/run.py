"""Running a study: write down its cells, give the unfinished ones to an engine, keep count."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from spiritlevel.errors import SpiritLevelError, listed
from spiritlevel.study.engines.endings import Outcome
from spiritlevel.study.engines.engine import Engine, Task
from spiritlevel.study.identity import Code, code_of
from spiritlevel.study.live import held, holder_of, note_attempt
from spiritlevel.study.naming import Contents, hash_of
from spiritlevel.study.progress import Count, StudyProgress
from spiritlevel.study.samples import Samples, load_samples
from spiritlevel.study.settings import Plan, PlannedCell
from spiritlevel.study.status import Summary, summarize
from spiritlevel.study.store import CellFolder, StudyFolder, Tell, silent
from spiritlevel.study.train import build, ensemble_size, shares_batches
from spiritlevel.study.worker import DISK_FULL, HELD, NO_STORE, REFUSED, is_disk_full
from spiritlevel.subjects.checkpoint import check_holds_tensors

# A worker that was killed or crashed is tried once more.
MOST_ATTEMPTS = 2
# A lost machine is not the cell's fault: the cell is tried elsewhere, up to this many times.
MOST_LOSSES = 5
# Seconds before looking again at a cell that another run holds; they grow up to the second number where its lock cannot
# be seen from here.
HELD_PAUSE, LONGEST_PAUSE = 2.0, 300.0
# Cells that end for the same reason within this many seconds are reported in one line.
GATHER = 1.0


def run_study(plan: Plan, folder: StudyFolder, engine: Engine, progress: StudyProgress) -> Summary:
    """Compute every cell that has no result yet. Stops all workers however it ends."""
    try:
        with folder.at_work():
            groups = prepare(plan, folder, progress.tell)
            with progress:
                _Run(groups, folder, engine, progress).to_the_end()
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
            f"no space left for {folder.path}{_on_nodes(folder)}: stopped. Results that exist are whole; free some space and run the same "
            "command again, it goes on where it was"
        )
    if not folder.path.is_dir() and os.path.lexists(folder.path):
        return f"{folder.path} is a file, or a link that leads nowhere, where a study needs a folder; choose another"
    if not folder.path.is_dir():
        return (
            f"{folder.path} is gone, and with it what was computed: stopped. Run the same command again to start anew"
        )
    where, why = getattr(error, "filename", None) or folder.path, getattr(error, "strerror", None) or error
    return f"{where}: {why}: stopped. What is finished stays, and the same command goes on where it was"


def _on_nodes(folder: StudyFolder) -> str:
    return ", or for the scratch folder of a node" if folder.url else ""


Group = tuple[CellFolder, ...]


def prepare(plan: Plan, folder: StudyFolder, tell: Tell = silent) -> list[Group]:
    """Write the cells down, grouped by how they are trained: alone, or several seeds or several starts together.

    Loads the data and builds every kind of network once: what cannot work is refused before anything is computed.
    """
    samples: dict[str, Samples] = {}
    together: dict[str, int] = {}
    sharing: set[str] = set()
    code: dict[str, Code] = {}
    contents: dict[str, Contents] = {}
    for cell in plan.cells:
        data = cell.config.data.model_copy(update={"label_noise": 0.0})
        key, point = data.model_dump_json(), _point(cell)
        if key not in samples:
            samples[key] = load_samples(data)
        if point not in together:
            check_holds_tensors(network := build(cell.config, samples[key].train))
            together[point] = ensemble_size(cell.config, network, len(plan.seeds))
            sharing |= {point} if shares_batches(cell.config, network) else set()
            code[point] = code_of(cell.config, samples[key].train)
        found = Contents(samples[key].fingerprint, code[point])
        contents[hash_of(cell.config, *found)] = found
    folders = folder.write(plan, contents, tell)
    groups = _groups(plan.cells, together, sharing)
    return [tuple(folders[position] for position in group) for group in groups]


def _point(cell: PlannedCell) -> str:
    """The cell without its seed: its place in the grid."""
    return cell.config.model_copy(update={"seed": 0}).model_dump_json()


def _groups(cells: Sequence[PlannedCell], together: Mapping[str, int], sharing: Set[str]) -> list[list[int]]:
    """Positions of cells that are trained together, those of the first seeds of every point first.

    So a study that is cut short has some of everything. Points in `sharing` are joined with those that start from other weights.
    """
    points: dict[str, list[int]] = defaultdict(list)
    for position, cell in enumerate(cells):
        points[_point(cell)].append(position)
    joined: dict[tuple[int, str], list[int]] = defaultdict(list)
    for point, positions in points.items():
        for start in range(0, len(positions), together[point]):
            chunk = positions[start : start + together[point]]
            key = _without_start(cells[chunk[0]]) if point in sharing else f"alone {point}"
            joined[start, key] += chunk
    return [positions for _, positions in sorted(joined.items(), key=lambda entry: entry[0][0])]


def _without_start(cell: PlannedCell) -> str:
    """The cell without what its weights start from: such cells see the same batches."""
    model = cell.config.model.model_copy(update={"initialization": ""})
    return cell.config.model_copy(update={"model": model}).model_dump_json()


class _Run:
    """A run on its way: what is queued, submitted, done and failed."""

    def __init__(self, groups: Sequence[Group], study: StudyFolder, engine: Engine, progress: StudyProgress) -> None:
        self.study, self.engine, self.progress = study, engine, progress
        self.cells = [cell for group in groups for cell in group]
        self.failed: set[CellFolder] = set()
        self.done = {cell for cell in self.cells if cell.done}
        self.found = len(self.done)
        tasks = (Task(tuple(cell.cell for cell in group), url=study.url) for group in groups)
        self.queue = deque(task for task in tasks if not self._ended(task))
        self.submitted: set[Task] = set()
        self.held = _Held(study, progress.tell)
        self.retries = _Retries(progress.tell)

    def _ended(self, task: Task) -> bool:
        return all(folder in self.done or folder in self.failed for folder in _folders(task))

    def to_the_end(self) -> None:
        try:
            self._compute_all()
        except BaseException:
            self.engine.stop()
            with contextlib.suppress(OSError):  # what stopped the run matters more
                self.study.unclaim([folder for task in self.submitted for folder in _folders(task)])
            raise

    def _compute_all(self) -> None:
        self._show()
        while self.queue or self.held.tasks or self.engine.running:
            self._return_held()
            self._submit()
            for task, outcome in self.engine.finished():
                self.submitted.remove(task)
                self._take(task, outcome)
            self.retries.announce()
            self._show()
        self.retries.announce(now=True)

    def _submit(self) -> None:
        """Hand over what the engine has room for; a job that would only find that another run has its cell is not made."""
        while self.queue and self.engine.free > 0:
            task = self.queue.popleft()
            if self.held.is_held(task):
                self.held.wait_for(task)
                continue
            self._look(task)
            if self._ended(task):  # by another run, meanwhile
                continue
            self.engine.submit(task)
            self.submitted.add(task)

    def _show(self) -> None:
        running = sum(folder not in self.done for task in self.submitted for folder in _folders(task))
        self.progress.show(Count(len(self.cells), len(self.done), self.found, running, len(self.failed)))

    def _return_held(self) -> None:
        """Cells of another run: done by now, or free to be computed here."""
        for task in list(self.held.tasks):
            self._look(task)
            if self._ended(task):
                self.held.tasks.pop(task)
        self.queue.extend(self.held.free())

    def _look(self, task: Task) -> None:
        self.done.update(folder for folder in _folders(task) if folder.done)

    def _take(self, task: Task, outcome: Outcome) -> None:
        if outcome.code != HELD:
            self.study.unclaim(_folders(task))
        self.study.refresh(_folders(task))
        self._look(task)
        if outcome.code == DISK_FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if outcome.code == HELD:
            self.held.wait_for(task)
            return
        open_cells = [folder for folder in _folders(task) if folder not in self.done]
        if not open_cells:
            return
        for folder in open_cells:
            if not folder.path.is_dir():  # do not make anew what was deleted on purpose
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder.path))
        if _was_last(task, outcome):
            for folder in open_cells:
                self._fail(folder, task, outcome)
        else:
            self._try_again(open_cells, task, outcome)
        self.study.share(open_cells)

    def _try_again(self, folders: Sequence[CellFolder], task: Task, outcome: Outcome) -> None:
        for folder in folders:
            how = _in_words(folder, outcome)
            note_attempt(folder, how)
            self.retries.add(folder, how)
        if outcome.lost:  # with those that are done: in the same company it goes on where it was
            self.queue.appendleft(replace(task, lost=task.lost + 1))
        else:  # each alone, so that a cell that crashes again costs no other one; what the company left is of no use to them
            if len(task.cells) > 1:
                _folders(task)[0].unfinished.unlink(missing_ok=True)
            alone = (replace(task, cells=(folder.cell,), attempt=task.attempt + 1) for folder in folders)
            self.queue.extendleft(alone)

    def _fail(self, folder: CellFolder, task: Task, outcome: Outcome) -> None:
        self.failed.add(folder)
        how = _in_words(folder, outcome)
        note_attempt(folder, how)
        failure = folder.failure()
        if failure is None or _is_outside(outcome):
            folder.write_failure(how, outcome.said, task.attempt + task.lost + 1)
        self.progress.tell(f"cell {folder.hash} failed: {how}")


def _folders(task: Task) -> list[CellFolder]:
    return [CellFolder(path.parent) for path in task.cells]


def _was_last(task: Task, outcome: Outcome) -> bool:
    """Whether the cells of a task are not tried again. What took too long alone has had its time in this run."""
    if outcome.lost:
        return task.lost + 1 >= MOST_LOSSES
    in_vain = outcome.code == REFUSED or (outcome.timed_out and len(task.cells) == 1)
    return in_vain or task.attempt + 1 >= MOST_ATTEMPTS


def _is_outside(outcome: Outcome) -> bool:
    """Whether something ended the worker that the worker itself could not write down."""
    return outcome.code < 0 or outcome.code == NO_STORE or bool(outcome.cause)


def _in_words(folder: CellFolder, outcome: Outcome) -> str:
    """How an attempt ended: as the worker wrote it down, or what ended the worker."""
    failure = folder.failure()
    return outcome.how if failure is None or _is_outside(outcome) else str(failure["error"])


class _Held:
    """Tasks whose cells another run has: looked at now and then, and submitted when they are free."""

    def __init__(self, study: StudyFolder, tell: Tell) -> None:
        self.study, self.tell = study, tell
        self.tasks: dict[Task, float] = {}  # and when to look at its locks again
        self.pauses: dict[Task, float] = defaultdict(lambda: HELD_PAUSE)
        self.told: set[CellFolder] = set()

    def is_held(self, task: Task) -> bool:
        """Whether a process holds one of the cells."""
        self.study.refresh(_folders(task))
        return any(held(_folders(task)))

    def wait_for(self, task: Task) -> None:
        """Look again later: after ever longer pauses, where locks of another machine are not seen from here."""
        self.tasks[task] = time.monotonic() + self.pauses[task]
        self.pauses[task] = min(2 * self.pauses[task], LONGEST_PAUSE)

    def free(self) -> list[Task]:
        """Tasks that nobody holds any more."""
        now, found = time.monotonic(), []
        for task in [task for task, ready in self.tasks.items() if now >= ready]:
            if self.is_held(task):
                self.tasks[task] = now + HELD_PAUSE
                self._tell_once(task)
            else:
                self.tasks.pop(task)
                found.append(task)
        return found

    def _tell_once(self, task: Task) -> None:
        """Say once that a cell is waited for; not at the first look, because a killed worker takes a moment to let go."""
        for folder in held(_folders(task)):
            if folder not in self.told:
                self.told.add(folder)
                self.tell(f"cell {folder.hash} is at work in another run ({holder_of(folder)}); waiting for it")


class _Retries:
    """Says which cells are tried again and why; all cells of a lost machine in one line."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.cells: dict[str, list[str]] = {}
        self.since = 0.0

    def add(self, folder: CellFolder, how: str) -> None:
        """A cell that is tried again."""
        if not self.cells:
            self.since = time.monotonic()
        self.cells.setdefault(how, []).append(folder.hash)

    def announce(self, now: bool = False) -> None:
        """Report them, as soon as no more are expected for the same reason."""
        if not now and time.monotonic() - self.since < GATHER:
            return
        for how, names in self.cells.items():
            who = f"cell {names[0]}" if len(names) == 1 else f"{len(names)} cells ({listed(names, 2)})"
            self.tell(f"{who}: {how}; tried again")
        self.cells = {}
