"""What a sweep over the data adds up, statistic by statistic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from spiritlevel.problem.running import RunningSums
from spiritlevel.problem.shards import Shards

# Of these statistics there is a number for every entry of a parameter, so that several processes may keep them in parts.
BY_ENTRY = ("diagonal", "fisher")

# What is kept of an array of this statistic and parameter: all or a part of it, or None where it is added up elsewhere.
Keep = Callable[[str, str, Tensor], Tensor | None]


class Total(Protocol):
    """Where sums are added up."""

    def add(self, kind: str, name: str, array: Tensor) -> None: ...


@dataclass
class Sums:
    """What a sweep accumulates, in float64.

    trace: parameter → one number, kept where it was asked for without the diagonal. diagonal, fisher: parameter →
    tensor of its shape, or this process's part of it. rows, columns: weight → one entry a neuron. whitened and so on:
    weight → one number. keep: What is kept of what is added; all of it where that is None.
    """

    keep: Keep | None = None
    trace: dict[str, Tensor] = field(default_factory=dict)
    diagonal: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)
    fisher: dict[str, Tensor] = field(default_factory=dict)
    whitened: dict[str, Tensor] = field(default_factory=dict)
    relative: dict[str, Tensor] = field(default_factory=dict)
    normalized: dict[str, Tensor] = field(default_factory=dict)

    def add(self, kind: str, name: str, array: Tensor) -> None:
        kept = array if self.keep is None else self.keep(kind, name, array)
        store: dict[str, Tensor] = getattr(self, kind)
        if kept is None:
            return
        if name in store:
            store[name].add_(kept)
        else:
            store[name] = kept.to(torch.float64, copy=True)


@dataclass(frozen=True)
class Renamed:
    """Sums into which one statistic goes as another, and nothing else does."""

    sums: Sums
    before: str
    after: str

    def add(self, kind: str, name: str, array: Tensor) -> None:
        if kind == self.before:
            self.sums.add(self.after, name, array)


def given(running: RunningSums, group: int) -> Keep:
    """Arrays that are divided while a pass runs are given to all processes, and what each keeps lies in `running`."""

    def keep(kind: str, name: str, array: Tensor) -> Tensor | None:
        if kind not in BY_ENTRY or not running.divides(name):
            return array
        running.give((group, kind), name, array)
        return None

    return keep


def own_parts(division: Shards) -> Keep:
    """Of arrays that every process has whole, its own part."""
    return lambda kind, name, array: division.part(name, array) if kind in BY_ENTRY else array


__all__ = ["BY_ENTRY", "Keep", "Renamed", "Sums", "Total", "given", "own_parts"]
