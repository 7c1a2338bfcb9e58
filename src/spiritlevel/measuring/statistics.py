"""The arrays that measures read: of every layer and parameter, put together from what was swept and what was probed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spiritlevel.curvature.anatomy import Anatomy
from spiritlevel.curvature.estimate import Estimates, mean_of
from spiritlevel.curvature.metrics import Metrics
from spiritlevel.curvature.statistics import DIAGONAL, FISHER, STATISTICS, Sweep
from spiritlevel.network.layers import Layer
from spiritlevel.problem.shards import Shards

Arrays = Mapping[str, Tensor]


@dataclass(frozen=True)
class Statistics:
    """Layer statistics as measures read them.

    Attributes:
        layers: Weight's parameter name → layer.
        weights: Parameter name → values.
        trace: Parameter name → trace of its block of H.
        diagonal: Parameter name → diagonal of its block of H.
        rows, columns: Weight's name → w_jᵀ H_jj w_j of every row (column) j.
        fisher: Parameter name → (1/N) Σ_n (∂ℓ_n/∂θ_i)².
        whitened, relative, normalized: Weight's name → the trace of its block in that metric, one number.
        metrics: Those metrics.
        starts: Weight's name → where a reading's own search for a minimum ended, for readings of nearly the same statistics.
    """

    layers: Mapping[str, Layer]
    weights: Arrays
    trace: Arrays = field(default_factory=dict)
    diagonal: Arrays = field(default_factory=dict)
    rows: Arrays = field(default_factory=dict)
    columns: Arrays = field(default_factory=dict)
    fisher: Arrays = field(default_factory=dict)
    whitened: Arrays = field(default_factory=dict)
    relative: Arrays = field(default_factory=dict)
    normalized: Arrays = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    starts: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class NoisyStatistics(Statistics):
    """The same with what is known of the noise in diagonals, for readings that take off what it adds to them.

    Attributes:
        spread: Parameter name → the standard error of every entry of its diagonal, of estimated ones only.
        degrees: The degrees of freedom of those errors.
    """

    spread: Arrays = field(default_factory=dict)
    degrees: int = 0


class InDouble(Mapping[str, Tensor]):
    """Tensors in double precision, each converted when it is read: all at once would be twice the model."""

    def __init__(self, tensors: Arrays) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].double()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Whole(Mapping[str, Tensor]):
    """Tensors of which several processes hold parts, each put together when it is read: all at once would be the model."""

    def __init__(self, parts: Arrays, shards: Shards) -> None:
        self._parts, self._shards = parts, shards

    def __getitem__(self, name: str) -> Tensor:
        return self._shards.whole(name, self._parts[name])

    def plus(self, changes: Arrays) -> Whole:
        """The same with changes, in parts as well, to some of them."""
        return Whole(plus(self._parts, changes), self._shards)

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


@dataclass(frozen=True)
class Sources:
    """Where the statistics of every parameter come from, decided once.

    Attributes:
        swept: The parameters whose Gauss–Newton part is the sweep's.
        remainder: Those among them to which probes of H less its Gauss–Newton matrix are added.
        whole: The parameters whose blocks of H are probed whole; what the sweep has of them is not used.
    """

    swept: frozenset[str]
    remainder: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


def sources_of(names: Sequence[str], anatomy: Anatomy, separable: Callable[[], bool]) -> Sources:
    """The sources of the parameters in `names`; `separable` says whether products with the remainder can be had."""
    bent = [name for name in names if not anatomy.exact(name)]
    readable = tuple(name for name in bent if name in anatomy.axes)
    if readable and separable():
        whole = tuple(name for name in bent if name not in anatomy.axes)
        return Sources(frozenset(anatomy.axes), readable, whole)
    return Sources(frozenset(anatomy.axes).difference(bent), (), tuple(bent))


def combined(
    kinds: frozenset[str], sources: Sources, swept: Sweep | None, estimates: Estimates, groups: Sequence[int]
) -> dict[str, dict[str, Tensor]]:
    """Statistic → parameter → what its sources say, estimated parts as the mean of these groups."""
    arrays: dict[str, dict[str, Tensor]] = {kind: {} for kind in STATISTICS}
    for kind in kinds:
        for name, draws in swept.found[kind].items() if swept is not None else ():
            if name in sources.swept or kind == FISHER:
                arrays[kind][name] = mean_over(draws, groups)
        for name, probed in estimates.found.get(kind, {}).items():
            part = mean_over(tuple(probed.groups), groups)
            arrays[kind][name] = arrays[kind][name] + part if name in arrays[kind] else part
    return arrays


class Spread(Mapping[str, Tensor]):
    """The standard errors of the entries of estimated diagonals in the mean of these groups, each made when it is read."""

    def __init__(self, sources: Sources, swept: Sweep | None, estimates: Estimates, groups: Sequence[int]) -> None:
        sampled = {name: draws for name, draws in swept.found[DIAGONAL].items() if len(draws) > 1} if swept else {}
        self._sampled = {name: draws for name, draws in sampled.items() if name in sources.swept}
        probed = estimates.found.get(DIAGONAL, {})
        self._probed = {name: tuple(each.groups) for name, each in probed.items() if not each.exact}
        self._groups = groups

    def __getitem__(self, name: str) -> Tensor:
        parts = [draws[name] for draws in (self._sampled, self._probed) if name in draws]
        if not parts:
            raise KeyError(name)
        means = sum(mean_over(draws, self._groups) for draws in parts)
        assert isinstance(means, Tensor)
        squares = torch.zeros_like(means)
        for group in self._groups:
            squares += (sum(draws[group].double() for draws in parts) - means).square()
        return squares.div_(len(self._groups) * (len(self._groups) - 1)).sqrt_()

    def __contains__(self, name: object) -> bool:
        return name in self._sampled or name in self._probed

    def __iter__(self) -> Iterator[str]:
        return iter(self._sampled | self._probed)

    def __len__(self) -> int:
        return len(self._sampled | self._probed)


def plus(arrays: Arrays, changes: Arrays) -> dict[str, Tensor]:
    return {name: array + changes[name] if name in changes else array for name, array in arrays.items()}


def mean_over(draws: Sequence[Tensor], groups: Sequence[int]) -> Tensor:
    """The mean of these groups of draws, or the exact array where there is only one: the sweep's own, which nobody changes."""
    if len(draws) == 1 and draws[0].dtype == torch.float64 and draws[0].is_contiguous():
        return draws[0]
    return mean_of(draws if len(draws) == 1 else [draws[group] for group in groups])
