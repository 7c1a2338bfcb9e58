"""Locks on files, which the system takes away from a process that ends in whatever way.

A file can be held by one process alone, or show the presence of any number of processes. Unix locks whole files (`flock`),
Windows single bytes (`msvcrt`). A system that has neither has no second process either, so that nothing needs a lock.
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
from typing import IO, Any, Protocol

_LOOK_AGAIN = 0.05


class System(Protocol):
    """What locks open files. A seat is what one of several processes that are present holds."""

    def take(self, stream: IO[str], wait: bool) -> bool:
        """Hold the file alone, if nobody else does; with `wait`, when nobody else does any more."""

    def sit(self, stream: IO[str]) -> int:
        """Take a seat in the file; its number."""

    def alone(self, stream: IO[str], seat: int | None) -> bool:
        """Whether nobody has a seat but the one who asks, if that one has."""


class WholeFiles:
    """`flock`: the lock is shared by all that sit, and closing the file gives it up."""

    def __init__(self, fcntl: Any) -> None:
        self.fcntl = fcntl

    def take(self, stream: IO[str], wait: bool) -> bool:
        try:
            self.fcntl.flock(stream, self.fcntl.LOCK_EX | (0 if wait else self.fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def sit(self, stream: IO[str]) -> int:
        self.fcntl.flock(stream, self.fcntl.LOCK_SH)
        return 0

    def alone(self, stream: IO[str], seat: int | None) -> bool:
        alone = self.take(stream, wait=False)
        # Asking for a lock of another kind gave the shared one up.
        self.fcntl.flock(stream, self.fcntl.LOCK_UN if seat is None else self.fcntl.LOCK_SH)
        return alone


class Bytes:
    """`msvcrt.locking`: every seat is a byte of its own. They lie beyond the content, which others must be able to read."""

    FIRST, SEATS = 2**30, 2**10

    def __init__(self, msvcrt: Any) -> None:
        self.msvcrt = msvcrt

    def take(self, stream: IO[str], wait: bool) -> bool:
        while not self._lock(stream, 0):
            if not wait:
                return False
            time.sleep(_LOOK_AGAIN)
        return True

    def sit(self, stream: IO[str]) -> int:
        return next(seat for seat in range(self.SEATS) if self._lock(stream, seat))

    def alone(self, stream: IO[str], seat: int | None) -> bool:
        taken = [other for other in range(self.SEATS) if other != seat and not self._is_free(stream, other)]
        return not taken

    def _is_free(self, stream: IO[str], seat: int) -> bool:
        if not self._lock(stream, seat):
            return False
        self._locking(stream, seat, self.msvcrt.LK_UNLCK)
        return True

    def _lock(self, stream: IO[str], seat: int) -> bool:
        try:
            self._locking(stream, seat, self.msvcrt.LK_NBLCK)
        except PermissionError:
            return False
        return True

    def _locking(self, stream: IO[str], seat: int, mode: int) -> None:
        os.lseek(stream.fileno(), self.FIRST + seat, os.SEEK_SET)
        self.msvcrt.locking(stream.fileno(), mode, 1)


class Nothing:
    """Where there is a single process."""

    def take(self, stream: IO[str], wait: bool) -> bool:
        return True

    def sit(self, stream: IO[str]) -> int:
        return 0

    def alone(self, stream: IO[str], seat: int | None) -> bool:
        return True


def find_system() -> System:
    """What this machine has."""
    for name, system in (("fcntl", WholeFiles), ("msvcrt", Bytes)):
        with contextlib.suppress(ImportError):
            return system(importlib.import_module(name))
    return Nothing()


system = find_system()


@contextlib.contextmanager
def holding(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold a file alone, with the name of this process in it; False where another one holds it, unless that is awaited."""
    with path.open("a+") as stream:
        held = system.take(stream, wait)
        if held:
            stream.truncate(0)
            stream.write(f"{socket.gethostname()} {os.getpid()}\n")
            stream.flush()
        yield held


@dataclass(frozen=True)
class Presence:
    """That this process is present at a file."""

    stream: IO[str]
    seat: int

    def is_alone(self) -> bool:
        """Whether no other process is present."""
        return system.alone(self.stream, self.seat)


@contextlib.contextmanager
def present(path: Path) -> Iterator[Presence]:
    """Let others see that this process is present at a file."""
    with path.open("a+") as stream:
        yield Presence(stream, system.sit(stream))


def is_nobody_present(path: Path) -> bool:
    """Whether no process is present at a file."""
    with path.open("a+") as stream:
        return system.alone(stream, None)
