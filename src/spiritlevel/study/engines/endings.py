"""How a worker ends, in words that are the same with every engine."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from spiritlevel.study.engines.launch import TIMED_OUT, UNSEEN
from spiritlevel.study.worker import CRASHED, NO_STORE, REFUSED

NODE_LOST = "node lost"
PREEMPTED = "preempted"
NO_MEMORY = "killed for want of memory"
CANCELLED = "cancelled"
VANISHED = "killed by a signal (out of memory?)"  # which one, nobody was there to see
# What usually sends these signals.
_SENDERS = {9: "out of memory?", 15: "terminated", 11: "segmentation fault", 6: "aborted", 7: "bus error"}


@dataclass(frozen=True)
class Outcome:
    """How a worker ended: its exit code (see `worker`; negative for a signal), its last words, and what ended it.

    >>> Outcome(-9).how, Outcome(3).how, Outcome(1, cause=NODE_LOST).how
    ('killed by signal 9 (out of memory?)', 'ended with code 3', 'node lost')
    """

    code: int
    said: str = ""
    cause: str = ""

    @property
    def how(self) -> str:
        """In words, for whoever runs the study."""
        if self.cause:
            return self.cause
        if self.code == NO_STORE and self.said:
            return self.said.splitlines()[-1]
        if self.code >= 0:
            return f"ended with code {self.code}"
        sender = _SENDERS.get(-self.code) or _name_of(-self.code)
        return f"killed by signal {-self.code}" + (f" ({sender})" if sender else "")

    @property
    def lost(self) -> bool:
        """Whether the machine was taken away: no fault of the cell's."""
        return self.cause.startswith((NODE_LOST, PREEMPTED))

    @property
    def timed_out(self) -> bool:
        """Whether it took longer than it was given."""
        return self.cause.startswith(TIMED_OUT)


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def outcome_of(seconds: float | None, event: str, code: int, said: str) -> Outcome:
    """The outcome of what `launch` tells of a process that was given so many seconds."""
    if event == TIMED_OUT:
        return timed_out(seconds, said)
    if event == UNSEEN:
        return Outcome(
            REFUSED,
            said,
            f"{said}: every node must see the folder of the study under the same path; give --folder a folder that "
            "they share, or the URL of an object store",
        )
    return Outcome(code, said)


def timed_out(seconds: float | None, said: str = "") -> Outcome:
    """It took longer than it was given.

    >>> timed_out(90 * 60).how, timed_out(6).how
    ('timed out after 90 min', 'timed out after 0.1 min')
    """
    return Outcome(CRASHED, said, TIMED_OUT + (f" after {seconds / 60:g} min" if seconds else ""))


def taken(cause: str, said: str = "", node: str = "") -> Outcome:
    """It did not end by itself: `cause` is one of the words above.

    >>> taken(NODE_LOST, node="10.0.0.7").how
    'node lost (10.0.0.7)'
    """
    return Outcome(CRASHED, said, f"{cause} ({node})" if node else cause)
