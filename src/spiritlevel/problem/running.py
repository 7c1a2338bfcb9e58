"""Sums over the data while a pass runs, where several processes share it: of large parameters each keeps its part.

A process gives what a chunk adds to one parameter, takes its part of what the others give, and lets the rest go, so that none
has a sum whole. Processes may have different numbers of chunks, and a layer may run in some chunks only: every exchange begins
with what each process has to give, and one that has run out of data goes on taking until all have.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from spiritlevel.problem.contract import Checked
from spiritlevel.problem.ranks import Group
from spiritlevel.problem.sharded import Sharded, division_of

# Sums of fewer bytes than this are kept whole until the pass has ended: they take little, and one exchange is enough for them.
WORTH_DIVIDING = 32 << 20
# What a process sends at a time: a larger parameter goes in several pieces.
MESSAGE_BYTES = 16 << 20

# What a sum is of, and the parameter whose entries it has numbers for.
Place = tuple[Hashable, str]


class RunningSums:
    """Sums in double precision over what all processes give, of which this one keeps its part.

    Where there is one process, or the sums are small, nothing is divided, and nothing may be given.
    """

    def __init__(self, problem: Checked) -> None:
        division = division_of(problem)
        self._group = problem.ranks if isinstance(problem.ranks, Group) else None
        self._division = division if isinstance(division, Sharded) else None
        self._like = {name: value for name, value in problem.parameters.items() if division.divides(name)}
        self._names, self._parts = list(problem.parameters), dict[Place, Tensor]()
        if self._group is None or 8 * sum(value.numel() for value in self._like.values()) < WORTH_DIVIDING:
            self._like = {}

    def divides(self, name: str) -> bool:
        """Whether what is added to this parameter's sums is to be given."""
        return name in self._like

    def give(self, key: Hashable, name: str, array: Tensor) -> None:
        """Add an array of the parameter's shape to the sum with this key."""
        self._meet((key, name), array)

    def finish(self) -> None:
        """Take what the others still have to give. Every process calls this once, when it has run out of data."""
        while self._like and self._meet(None, None):
            pass

    def joined(self, key: Hashable, others: dict[str, Tensor]) -> dict[str, Tensor]:
        """Parameter → this process's part of the sum with this key, and what there is of other parameters."""
        parts = {name: self._parts.pop((key, name)) for name in self._like if (key, name) in self._parts}
        found = others | parts
        return {name: found[name] for name in self._names if name in found} if parts else others

    def _meet(self, place: Place | None, array: Tensor | None) -> bool:
        """Exchange what every process has at this time, if anything; False where none has."""
        assert self._group is not None
        mine = None if place is None or array is None else (place, array.dtype)
        told: list[tuple[Place, torch.dtype] | None] = self._group.gather(mine)
        for offer in dict.fromkeys(each for each in told if each is not None):
            givers = [rank for rank, each in enumerate(told) if each == offer]
            self._take(*offer, givers, array if offer == mine else None)
        return any(told)

    def _take(self, place: Place, dtype: torch.dtype, givers: Sequence[int], array: Tensor | None) -> None:
        assert self._group is not None
        assert self._division is not None
        name, rank = place[1], self._group.rank
        if place not in self._parts:
            self._parts[place] = self._division.zeros(name, self._like[name])
        part, flat = self._parts[place], None if array is None else array.detach().reshape(-1)
        for runs in self._division.runs(name, MESSAGE_BYTES // dtype.itemsize):
            wanted = runs[rank].stop - runs[rank].start
            sent = part.new_empty(0, dtype=dtype) if flat is None else torch.cat([flat[run] for run in runs])
            found = part.new_empty(len(givers) * wanted, dtype=dtype)
            self._group.exchange(
                found,
                sent,
                [wanted if each in givers else 0 for each in range(self._group.size)],
                [0 if flat is None else run.stop - run.start for run in runs],
            )
            start = runs[rank].start - self._division.first(name)
            for row in found.view(len(givers), wanted) if wanted else ():  # one after the other, in double precision
                part[start : start + wanted].add_(row)


__all__ = ["RunningSums"]
