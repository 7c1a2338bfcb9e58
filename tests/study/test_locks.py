"""Locks: of one process alone, of several that are present, by what Unix has, by what Windows has, and without either."""

import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import types

import pytest

from spiritlevel.study import locks
from spiritlevel.study.plan import read_plan
from spiritlevel.study.run import prepare
from spiritlevel.study.store import StudyFolder, locked

fcntl = pytest.importorskip("fcntl")


def msvcrt_from_fcntl() -> types.SimpleNamespace:
    """Windows's module by what Linux has: locks of ranges of bytes that belong to the open file."""

    def locking(handle: int, mode: int, count: int) -> None:
        first = os.lseek(handle, 0, os.SEEK_CUR)
        asked = struct.pack("hhqqi0q", mode, os.SEEK_SET, first, count, 0)
        try:
            fcntl.fcntl(handle, fcntl.F_OFD_SETLK, asked)
        except OSError:
            raise PermissionError(13, "Permission denied") from None

    return types.SimpleNamespace(locking=locking, LK_NBLCK=fcntl.F_WRLCK, LK_UNLCK=fcntl.F_UNLCK)


SYSTEMS = {"unix": lambda: locks.WholeFiles(fcntl), "windows": lambda: locks.Bytes(msvcrt_from_fcntl())}


@pytest.fixture(params=SYSTEMS, autouse=True)
def system(request, monkeypatch):
    if request.param == "windows" and not hasattr(fcntl, "F_OFD_SETLK"):
        pytest.skip("needs locks of ranges that belong to the open file, as Linux has")
    monkeypatch.setattr(locks, "locks", SYSTEMS[request.param]())


def in_another_process(function, *arguments) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join(60)
    return process.exitcode


def leave_with_whether_held(path):
    with locks.holding(path) as held:
        os._exit(int(held))


def test_a_file_is_held_by_one_process_alone(tmp_path):
    with locks.holding(tmp_path / "lock") as held:
        assert held
        assert in_another_process(leave_with_whether_held, tmp_path / "lock") == 0
        # Whoever holds it can be read, also on Windows, where locked bytes cannot.
        assert str(os.getpid()) in (tmp_path / "lock").read_text()
    assert in_another_process(leave_with_whether_held, tmp_path / "lock") == 1


def test_a_file_can_be_waited_for(tmp_path):
    order = []

    def wait():
        with locks.holding(tmp_path / "lock", wait=True) as held:
            order.append(held)

    with locks.holding(tmp_path / "lock"):
        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.2)
        order.append("released")
    waiting.join(60)
    assert order == ["released", True]


def test_several_are_present_and_see_each_other(tmp_path):
    path = tmp_path / "running"
    with locks.present(path) as first:
        assert first.is_alone()
        with locks.present(path) as second:
            assert not first.is_alone()
            assert not second.is_alone()
            assert not first.is_alone()  # having asked, both are still present
        assert first.is_alone()


def be_present_and_die(path):
    with locks.present(path), locks.holding(path.with_name("lock")):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_neither_present_nor_holds_anything(tmp_path):
    assert in_another_process(be_present_and_die, tmp_path / "running") == -signal.SIGKILL
    with locks.present(tmp_path / "running") as presence, locks.holding(tmp_path / "lock") as held:
        assert held
        assert presence.is_alone()


def test_a_study_is_written_and_its_cells_are_held(tiny, tmp_path):
    folder = StudyFolder(tmp_path / "out")
    with folder.at_work():
        prepare(read_plan(tiny), folder)
        with locked(folder.cells()) as held:
            assert held
            with locked(folder.cells()[1:]) as also_held:
                assert not also_held


def test_without_locks_there_is_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "locks", locks.NoLocks())
    with locks.holding(tmp_path / "lock", wait=True) as held, locks.present(tmp_path / "running") as presence:
        assert held
        assert presence.is_alone()


def test_the_system_is_found_by_what_can_be_imported(monkeypatch):
    for hidden, kind in (((), locks.WholeFiles), (("fcntl",), locks.Bytes), (("fcntl", "msvcrt"), locks.NoLocks)):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "msvcrt", types.ModuleType("msvcrt"))
            for name in hidden:
                patch.setitem(sys.modules, name, None)
            assert type(locks.find_locks()) is kind


@pytest.mark.long
def test_a_study_runs_where_fcntl_is_missing(tiny, tmp_path):
    code = f"""
        import torch, numpy, scipy.optimize, rich.progress  # theirs, not ours: they may use what they find
        import sys
        sys.modules.update(dict.fromkeys(("fcntl", "resource", "pwd", "grp", "termios"), None))
        from spiritlevel import cli
        from spiritlevel.study import worker
        from spiritlevel.study.plan import read_plan
        from spiritlevel.study.run import prepare
        from spiritlevel.study.store import StudyFolder
        [[cell]] = prepare(read_plan({tiny!r}, overrides=["seeds=1", "training.batch_size=16"]), StudyFolder("out"))
        assert worker.compute([cell.cell]) == worker.DONE
        cli.main(["study", "status", "out"])
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "1 of 1" in done.stdout
