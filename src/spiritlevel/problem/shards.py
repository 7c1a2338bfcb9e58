"""How vectors over the parameters are divided among processes: not at all, unless the model is in parts (sharded.py)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spiritlevel.problem.batches import Batch


def is_divided(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, of which every process holds a part. Whoever has one has imported its module."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def whole_tensor(tensor: Any) -> Tensor:
    """The tensor itself, or a DTensor put together from what all processes hold of it."""
    found: Tensor = tensor.full_tensor() if is_divided(tensor) else tensor
    return found


@dataclass
class SavedBytes:
    """How much autograd keeps for the backward pass: the distinct storages that it saves."""

    bytes: int = 0

    def add(self, tensor: Tensor, seen: set[int]) -> None:
        """Count a tensor whose storage was not seen before."""
        storage, size = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
        try:
            place = storage.data_ptr()
        except RuntimeError:  # inside a transform of torch.func, where there is none to look at
            self.bytes += size
            return
        if place not in seen:
            seen.add(place)
            self.bytes += min(storage.nbytes(), size)

    @contextlib.contextmanager
    def watching(self, known: set[int]) -> Iterator[None]:
        """Count what autograd saves inside, other than the storages in `known`."""
        seen = set(known)

        def pack(tensor: Tensor) -> Tensor:
            self.add(tensor, seen)
            return tensor.detach()  # a node that held its own result would never be freed

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


class Shards:
    """How vectors over the parameters are divided among processes. Not at all, the default: each is whole.

    >>> whole = Shards()
    >>> whole.total(2.5), whole.norm(3.0), whole.any(False), whole.largest(1.0)
    (2.5, 3.0, False, 1.0)
    """

    rank, size = 0, 1

    @property
    def divided(self) -> bool:
        return self.size > 1

    def total(self, number: float) -> float:
        """The sum over all parts of a number that belongs to this one."""
        return number

    def totals(self, numbers: Tensor) -> Tensor:
        """The same for several numbers."""
        return numbers

    def sums(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sum over all entries of every parameter's array, of which this process may hold a part."""
        return {name: array.sum(dtype=torch.float64) for name, array in arrays.items()}

    def norm(self, length: float) -> float:
        """The length of a vector from that of this part of it."""
        return length

    def any(self, found: bool) -> bool:
        """Whether something was found in any part."""
        return found

    def largest(self, number: float) -> float:
        """The largest of what all processes say: what they must agree on, such as whether something fits into memory."""
        return number

    def agreed(self, numbers: Tensor) -> Tensor:
        """Small numbers that every process computed and all go on with: rounding, or a sign, may differ between them."""
        return numbers

    def check_same(self, what: str, numbers: Sequence[float]) -> None:
        """Refuse where the processes do not agree on these numbers."""

    def own(self, generator: torch.Generator) -> torch.Generator:
        """Random numbers for this part, different from those of the other parts."""
        return generator

    def divides(self, name: str) -> bool:  # noqa: ARG002
        """Whether this process holds a part only of what belongs to the entries of a parameter."""
        return False

    def zeros(self, name: str, like: Tensor) -> Tensor:  # noqa: ARG002
        """Zeros in double precision for what this process holds of a parameter's entries."""
        return torch.zeros_like(like, dtype=torch.float64)

    def part(self, name: str, tensor: Tensor) -> Tensor:  # noqa: ARG002
        """This process's part of a tensor of the caller's model, in memory of its own where it is one of several."""
        return whole_tensor(tensor)

    def whole(self, name: str, part: Tensor) -> Tensor:  # noqa: ARG002
        """What belongs to every entry of a parameter, in its shape, from its parts."""
        return part

    def count(self, name: str, part: Tensor) -> int:  # noqa: ARG002
        """How many entries a parameter has."""
        return part.numel()

    def shape(self, name: str, part: Tensor) -> torch.Size:  # noqa: ARG002
        """The whole shape of a parameter."""
        return part.shape

    def first(self, name: str) -> int:  # noqa: ARG002
        """The place of the first entry of this part among all entries of a parameter."""
        return 0

    def rows(self, batch: Batch) -> Batch:
        """The samples of a batch that this process runs."""
        return batch

    def joined(self, outputs: Any, samples: int) -> Any:  # noqa: ARG002
        """The outputs of all samples, from those of every process's own."""
        return outputs

    def held(self, value: Tensor) -> Tensor:
        """A number that every process computed from the same samples, so that it counts once."""
        return value

    def placed(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """What stands in the places of a module's tensors."""
        return tensors

    def origin(self, tensor: Tensor) -> tuple[str, torch.Size] | None:  # noqa: ARG002
        """The parameter that a gathered tensor, or a view of one, holds, and its shape."""
        return None

    def forgetting(self) -> contextlib.AbstractContextManager[None]:
        """Autograd keeps no gathered weight inside."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def counting(self, known: set[int]) -> Iterator[SavedBytes]:
        """Count what autograd keeps inside, other than the storages in `known`."""
        saved = SavedBytes()
        with saved.watching(known):
            yield saved


WHOLE = Shards()


__all__ = ["WHOLE", "SavedBytes", "Shards", "is_divided", "whole_tensor"]
