"""A model that no process holds whole: every process keeps a part of every weight, and gathers one at a time while it is used.

A weight is cut into as many runs of entries as there are processes. Vectors over the parameters (probes, Krylov vectors,
gradients, statistics) are cut in the same way, so that everything entry by entry is done on parts, and sums over entries are
sums over processes. The samples of a batch are divided among the processes and their outputs put together, so that each of
them sees the same loss. Gathering a weight and summing its gradient are each other's derivatives, to any order; what
autograd would keep of a gathered weight is forgotten and gathered again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from spiritlevel.errors import SpiritLevelError
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.contract import Checked
from spiritlevel.problem.ranks import Group
from spiritlevel.problem.shards import SavedBytes, Shards, whole_tensor

_Map = Callable[[Tensor], Tensor]

# Where every process has the whole model, statistics of parameters with so many entries are kept in parts. Those of smaller ones
# take little, and are read faster than they are gathered.
LARGE = 1 << 16


class Sharded(Shards):
    """Parameters in parts, each a flat run of entries, over the processes of a group.

    Args:
        group: The processes.
        shapes: Parameter's name → its whole shape.
    """

    def __init__(self, group: Group, shapes: Mapping[str, torch.Size]) -> None:
        self.rank, self.size = group.rank, group.size
        self.traffic = 0  # bytes that came from other processes
        self._group, self._shapes = group, dict(shapes)
        self._gathered: dict[int, tuple[StorageWeakRef, str, Tensor]] = {}
        self._saved: tuple[SavedBytes, set[int]] | None = None

    # --- sums over entries ---------------------------------------------------------------------------------------

    def total(self, number: float) -> float:
        return self._group.total(number)

    def totals(self, numbers: Tensor) -> Tensor:
        found = numbers.to(self._group.device, torch.float64, copy=True).contiguous()
        self._group.sum_([found])
        return found.to(numbers)

    def sums(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = super().sums(arrays)
        divided = [name for name in found if self.divides(name)]
        if divided:
            totals = self.totals(torch.stack([found[name] for name in divided]))
            found |= dict(zip(divided, totals.unbind(), strict=True))
        return found

    def norm(self, length: float) -> float:
        longest = self.largest(length)
        if not 0 < longest < math.inf:
            return longest
        return longest * math.sqrt(self.total((length / longest) ** 2))

    def any(self, found: bool) -> bool:
        return self.total(float(found)) > 0

    def largest(self, number: float) -> float:
        return self._group.largest(number)

    def agreed(self, numbers: Tensor) -> Tensor:
        return self.totals(numbers if self.rank == 0 else torch.zeros_like(numbers))

    def check_same(self, what: str, numbers: Sequence[float]) -> None:
        self._group.check_same(what, numbers)

    def own(self, generator: torch.Generator) -> torch.Generator:
        return torch.Generator().manual_seed((generator.initial_seed() * 1_000_003 + self.rank + 1) % 2**63)

    # --- parameters ----------------------------------------------------------------------------------------------

    def shape(self, name: str, part: Tensor) -> torch.Size:  # noqa: ARG002
        return self._shapes[name]

    def first(self, name: str) -> int:
        return self.rank * self._run(name)

    def _run(self, name: str) -> int:
        """Entries of a part; the last ones may have fewer, or none."""
        return -(-self._shapes[name].numel() // self.size)

    def _held(self, name: str) -> int:
        """Entries of this process's part."""
        return max(0, min(self._run(name), self._shapes[name].numel() - self.first(name)))

    def runs(self, name: str, most: int) -> Iterator[list[slice]]:
        """Where the parts of all processes lie among a parameter's entries, in pieces of at most `most` entries together (or
        one a process): in every piece, a run of each process's part."""
        run, count = self._run(name), self._shapes[name].numel()
        width = max(1, most // self.size)
        for start in range(0, run, width):
            ends = start, min(start + width, run)
            yield [slice(*(min(rank * run + end, count) for end in ends)) for rank in range(self.size)]

    def divides(self, name: str) -> bool:
        return name in self._shapes

    def zeros(self, name: str, like: Tensor) -> Tensor:
        if not self.divides(name):
            return super().zeros(name, like)
        return like.new_zeros(self._held(name), dtype=torch.float64)

    def part(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._shapes:
            return whole_tensor(tensor)
        run = self._run(name)
        return whole_tensor(tensor).reshape(-1)[self.rank * run : (self.rank + 1) * run].clone()

    def count(self, name: str, part: Tensor) -> int:  # noqa: ARG002
        return self._shapes[name].numel()

    def whole(self, name: str, part: Tensor) -> Tensor:
        if name not in self._shapes:
            return part
        shape = self._shapes[name]
        run, count = self._run(name), shape.numel()
        own = _filled(part.detach().reshape(-1), run)
        found = part.new_empty(run * self.size)
        self._group.all_gather(found, own)
        self.traffic += (self.size - 1) * own.numel() * own.element_size()
        return found[:count].view(shape)

    def summed(self, name: str, whole: Tensor) -> Tensor:
        """This process's part of the sum over all processes of a whole tensor."""
        run = self._run(name)
        found = whole.new_empty(run)
        self._group.reduce_scatter(found, _filled(whole.detach().reshape(-1), run * self.size))
        self.traffic += (self.size - 1) * found.numel() * found.element_size()
        return found[: self._held(name)].clone()

    def placed(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Any]:
        return {name: Waiting(self, name, part) if name in self._shapes else part for name, part in tensors.items()}

    def used(self, name: str, part: Tensor) -> Tensor:
        """A weight for the moment it is used, differentiable in its parts."""
        with torch._C.DisableTorchFunction():  # no operation of the network: nothing that follows those should see it
            # A weight comes from its parts; its derivative is the sum over processes, each of which may have used it.
            there, back = partial(self.whole, name), partial(self.summed, name)
            found: Tensor = _Exchange.apply(part, there, back)  # type: ignore[no-untyped-call]
            self._remember(found, name, part)
        return found

    def origin(self, tensor: Tensor) -> tuple[str, torch.Size] | None:
        found = self._known(tensor)
        return None if found is None else (found[0], self._shapes[found[0]])

    def _remember(self, tensor: Tensor, name: str, part: Tensor) -> None:
        """A weak reference keeps nothing but its own address from being used again."""
        self._gathered = {key: each for key, each in self._gathered.items() if not each[0].expired()}  # type: ignore[no-untyped-call]
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._gathered[storage._cdata] = reference, name, part.detach()

    def _known(self, tensor: Tensor) -> tuple[str, Tensor] | None:
        try:
            found = self._gathered.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # sparse tensors have no storage
            return None
        gone = found is None or found[0].expired()  # type: ignore[no-untyped-call]
        return None if found is None or gone else found[1:]

    # --- samples -------------------------------------------------------------------------------------------------

    def rows(self, batch: Batch) -> Batch:
        share, count = -(-len(batch) // self.size), len(batch)
        chosen = torch.arange(self.rank * share, (self.rank + 1) * share).clamp(max=count - 1)
        return batch.map(lambda leaf: leaf[chosen.to(leaf.device)])

    def joined(self, outputs: Any, samples: int) -> Any:
        if not isinstance(outputs, Tensor) or not outputs.dim() or len(outputs) != -(-samples // self.size):
            raise SpiritLevelError(
                "the model is in shards, and its outputs are not one tensor with a row for every sample: pass a loss of the form "
                "(model, batch) -> (mean, count), which every process then computes on whole batches"
            )
        with torch._C.DisableTorchFunction():
            # All processes go on with the same outputs, so that no slope is summed.
            there, back = partial(self.gather_rows, samples), self.own_rows
            found: Tensor = _Exchange.apply(outputs, there, back)  # type: ignore[no-untyped-call]
        return found

    def held(self, value: Tensor) -> Tensor:
        return value / self.size + (value - value / self.size).detach()

    # --- what autograd keeps -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def forgetting(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield

    @contextlib.contextmanager
    def counting(self, known: set[int]) -> Iterator[SavedBytes]:
        saved = SavedBytes()
        self._saved = saved, set(known)
        try:
            with self.forgetting():
                yield saved
        finally:
            self._saved = None

    def _pack(self, tensor: Tensor) -> Any:
        found = self._known(tensor)
        if found is not None:
            return _Forgotten(self, *found, tensor.shape, tensor.stride(), tensor.storage_offset())
        if self._saved is not None:
            self._saved[0].add(tensor, self._saved[1])
        return tensor.detach()  # a node that held its own result would never be freed

    def gather_rows(self, samples: int, own: Tensor) -> Tensor:
        """The rows of all samples, from those of every process."""
        found = own.new_empty(own.shape[0] * self.size, *own.shape[1:])
        self._group.all_gather(found, own.detach().contiguous())
        self.traffic += (self.size - 1) * own.numel() * own.element_size()
        return found[:samples].clone()

    def own_rows(self, whole: Tensor) -> Tensor:
        """This process's rows of a tensor that all of them have, zeros where there are none."""
        share = -(-len(whole) // self.size)
        own = whole[self.rank * share : (self.rank + 1) * share]
        return torch.cat([own, own.new_zeros(share - len(own), *own.shape[1:])])


def division_of(problem: Checked) -> Shards:
    """How arrays over the entries of the parameters are kept between passes.

    As the model is; where every process has it whole, those of large parameters are in parts nevertheless.
    """
    if not isinstance(problem.ranks, Group):
        return problem.shards
    large = {name: value.shape for name, value in problem.parameters.items() if value.numel() >= LARGE}
    return Sharded(problem.ranks, large)


def sum_over_data(problem: Checked, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """Arrays over the entries of parameters, each a sum over this process's data, as what it keeps of the sums over all data.

    A parameter that some process lacks counts as zero there. What is passed in is used up, one array after the other.
    """
    ranks, division = problem.ranks, division_of(problem)
    if not isinstance(ranks, Group):
        return arrays
    known = set().union(*ranks.gather(list(arrays)))
    names = [name for name in problem.parameters if name in known]
    for name in names:
        arrays.setdefault(name, torch.zeros_like(problem.parameters[name], dtype=torch.float64))
    ranks.sum_([arrays[name] for name in names if not division.divides(name)])
    return {name: _kept_of_sum(division, name, arrays.pop(name)) for name in names}


def _kept_of_sum(division: Shards, name: str, array: Tensor) -> Tensor:
    return division.summed(name, array) if isinstance(division, Sharded) and division.divides(name) else array


class Waiting:
    """A weight in parts, in the place of the whole one, until it is asked for."""

    def __init__(self, shards: Sharded, name: str, part: Tensor) -> None:
        self._shards, self._name, self._part = shards, name, part

    def gathered(self) -> Tensor:
        return self._shards.used(self._name, self._part)


class Gathering(dict[str, Any]):
    """A module's table of parameters, from which a weight in parts comes whole."""

    def __getitem__(self, key: str) -> Any:
        return _arrived(super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        return _arrived(super().get(key, default))

    def items(self) -> Any:
        return ((key, _arrived(entry)) for key, entry in super().items())

    def values(self) -> Any:
        return (_arrived(entry) for entry in super().values())


def _arrived(entry: Any) -> Any:
    return entry.gathered() if isinstance(entry, Waiting) else entry


class _Forgotten:
    """A gathered weight, or a view of one, that autograd would have kept."""

    def __init__(
        self, shards: Sharded, name: str, part: Tensor, shape: torch.Size, stride: tuple[int, ...], offset: Any
    ) -> None:
        self._shards, self._name, self._part = shards, name, part
        self._view = shape, stride, offset

    def again(self) -> Tensor:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            found = self._shards.whole(self._name, self._part)
            self._shards._remember(found, self._name, self._part)
            return found.as_strided(*self._view)


def _unpack(kept: Any) -> Tensor:
    return kept.again() if isinstance(kept, _Forgotten) else kept


class _Exchange(torch.autograd.Function):
    """A linear map between processes, with its adjoint as the derivative; that of the adjoint is the map itself."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: _Map, back: _Map) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        return _Exchange.apply(slopes[0], ctx.back, ctx.there), None, None  # type: ignore[no-untyped-call]


def _filled(flat: Tensor, length: int) -> Tensor:
    """A flat tensor with zeros at its end, up to a length."""
    if flat.numel() == length:
        return flat.contiguous()
    return torch.cat([flat, flat.new_zeros(length - flat.numel())])


__all__ = ["Gathering", "Sharded", "Waiting", "division_of", "sum_over_data"]
