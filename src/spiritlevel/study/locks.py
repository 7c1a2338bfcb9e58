"""Locks on files, which the system takes away from a process that ends in whatever way.

A file can be held by one process alone, or show the presence of any number of processes.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_LOOK_AGAIN = 0.05


class NoLocks:
    """For a system that cannot lock files, and has no second process to lock them against."""

    def __init__(self, module: Any = None) -> None:
        self.module = module

    def take(self, stream: IO[str], wait: bool) -> bool:
        """Hold the file alone if nobody else does; with `wait`, as soon as nobody else does. Closing it gives it up."""
        return True

    def sit(self, stream: IO[str]) -> int:
        """Take a seat in the file, beside the other processes that are present; returns its number."""
        return 0

    def is_alone(self, stream: IO[str], seat: int) -> bool:
        """Whether no process has a seat in the file but this one."""
        return True


class WholeFiles(NoLocks):
    """Unix, `fcntl`: those who are present share the lock of the file."""

    def take(self, stream: IO[str], wait: bool) -> bool:
        try:
            self.module.flock(stream, self.module.LOCK_EX | (0 if wait else self.module.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def sit(self, stream: IO[str]) -> int:
        self.module.flock(stream, self.module.LOCK_SH)
        return 0

    def is_alone(self, stream: IO[str], seat: int) -> bool:
        alone = self.take(stream, wait=False)
        self.sit(stream)  # asking for the lock of one alone gave the shared one up
        return alone


class Bytes(NoLocks):
    """Windows, `msvcrt`: every seat is a byte. They lie beyond the content, which others must be able to read."""

    FIRST, SEATS = 2**30, 2**10

    def take(self, stream: IO[str], wait: bool) -> bool:
        while not (held := self._lock(stream, 0)) and wait:
            time.sleep(_LOOK_AGAIN)
        return held

    def sit(self, stream: IO[str]) -> int:
        # None is free for the moment in which another one looks whether it is alone.
        while (seat := next((seat for seat in range(self.SEATS) if self._lock(stream, seat)), None)) is None:
            time.sleep(_LOOK_AGAIN)
        return seat

    def is_alone(self, stream: IO[str], seat: int) -> bool:
        free = [other for other in range(self.SEATS) if other != seat and self._lock(stream, other)]
        for other in free:
            self._change(stream, other, self.module.LK_UNLCK)
        return len(free) == self.SEATS - 1

    def _lock(self, stream: IO[str], seat: int) -> bool:
        try:
            self._change(stream, seat, self.module.LK_NBLCK)
        except PermissionError:
            return False
        return True

    def _change(self, stream: IO[str], seat: int, mode: int) -> None:
        os.lseek(stream.fileno(), self.FIRST + seat, os.SEEK_SET)
        self.module.locking(stream.fileno(), mode, 1)


def find_locks() -> NoLocks:
    """What this system has."""
    for name, kind in (("fcntl", WholeFiles), ("msvcrt", Bytes)):
        with contextlib.suppress(ImportError):
            return kind(importlib.import_module(name))
    return NoLocks()


locks = find_locks()


@contextlib.contextmanager
def holding(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold a file alone, with the name of this process in it; False where another one holds it, unless that is awaited."""
    with path.open("a+") as stream:
        held = locks.take(stream, wait)
        if held:
            stream.truncate(0)
            stream.write(f"{socket.gethostname()} {os.getpid()}\n")
            stream.flush()
        yield held


def is_held(path: Path) -> bool:
    """Whether another process holds a file, or is present at it; False where there is none."""
    try:
        with path.open("r+") as stream:
            return not locks.take(stream, wait=False)
    except OSError:
        return False


@dataclass(frozen=True)
class Presence:
    """That this process is present at a file, for others to see."""

    stream: IO[str]
    seat: int

    def is_alone(self) -> bool:
        """Whether no other process is present."""
        return locks.is_alone(self.stream, self.seat)


@contextlib.contextmanager
def present(path: Path) -> Iterator[Presence]:
    """Be present at a file."""
    with path.open("a+") as stream:
        yield Presence(stream, locks.sit(stream))
