"""Data as the engine reads it: a re-iterable stream of batches, checked once, cut into chunks of any size."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, RandomSampler

from spiritlevel.errors import NondeterministicError, SpiritLevelError
from spiritlevel.problem.devices import with_double
from spiritlevel.problem.objects import is_one_batch, tensors_of, with_tensors

# The entry of a dict batch that holds the targets, as Hugging Face's libraries name it.
LABELS = "labels"

# Up to this many parameters times samples a network counts as small: most of its time is overhead, not arithmetic.
SMALL = 10_000_000


@dataclass(frozen=True)
class Batch:
    """Some samples: what the model is called with, and what the loss compares with.

    `inputs` is a tensor, a tuple of positional or a dict of keyword arguments. For a loss of the form (model, batch), a
    batch of any kind is kept whole in `inputs`, and `targets` is None. `form` makes of inputs and targets what the
    caller's batch was: the dict that `labels` stood in, or a named tuple.
    """

    inputs: Any
    targets: Tensor | None
    form: Callable[[Any, Any], Any] | None = None

    @property
    def content(self) -> Any:
        """The batch as the caller made it."""
        if self.targets is None:
            return self.inputs
        return (self.inputs, self.targets) if self.form is None else self.form(self.inputs, self.targets)

    @property
    def count_example(self) -> str:
        """How a loss of the form (model, batch) could count the samples of a batch like this one."""
        if isinstance(self.content, Mapping):
            return f"len(batch[{next(iter(self.content))!r}])"
        return "len(batch[0])" if isinstance(self.content, Sequence) else "len(batch)"

    @property
    def labelled(self) -> bool:
        """Whether the batch is a dict with labels among its entries."""
        return self.form is _with_labels

    @property
    def divisible(self) -> bool:
        """Whether every tensor has as many entries as there are samples."""
        return all(leaf.dim() and len(leaf) == len(self) for leaf in tensors_of((self.inputs, self.targets)))

    def __len__(self) -> int:
        if self.targets is not None:
            return len(self.targets)
        return next((len(leaf) for leaf in tensors_of(self.inputs) if leaf.dim()), 1)

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        targets = None if self.targets is None else change(self.targets)
        return replace(self, inputs=with_tensors(self.inputs, change), targets=targets)

    def __getitem__(self, index: slice | Tensor) -> Batch:
        return self.map(lambda leaf: leaf[index.to(leaf.device) if isinstance(index, Tensor) else index])


class Data:
    """A re-iterable stream of batches.

    Built from a pair of tensors, a dataset, a loader, or any re-iterable of batches. `samples` is what one pass
    counted; passes after the first are compared with it, batch by batch.
    """

    def __init__(self, source: Any, *, fix: bool = False) -> None:
        self.resident: Batch | None = None  # a pair of tensors: sliced, never copied
        self._source: Iterable[Any] = ()
        self._fingerprints: list[tuple[float, ...]] | None = None
        self._spread: dict[int, list[Batch]] = {}
        self._change: Callable[[Batch], Batch] | None = None
        self.unequal = ""  # where inputs and targets differ in length, which only a loss of whole batches accepts
        pair = _as_pair(source)
        if pair is not None:
            self.resident = pair
            self._source = (pair,)
        elif isinstance(source, Dataset):
            self._source = DataLoader(source, batch_size=256)
        else:
            self._source = _re_iterable(source)
        self.shuffles = isinstance(source, DataLoader) and isinstance(source.sampler, RandomSampler)
        if fix and pair is None:
            self._source = [_as_batch(entry) for entry in self._source]
            self.shuffles = False
        self.samples, self.first = self._inspect()

    def __iter__(self) -> Iterator[Batch]:
        """One pass. A stream that differs from the first pass is refused as soon as it does."""
        change = self._change
        return self._read() if change is None else map(change, self._read())

    def _read(self) -> Iterator[Batch]:
        if self.resident is not None:
            yield self.resident
            return
        known = self._fingerprints
        index = -1
        full = (batch for batch in map(_as_batch, self._source) if len(batch))  # an empty one adds nothing to a mean
        for index, batch in enumerate(full):
            if known is not None and (index >= len(known) or not _same(_fingerprint(batch), known[index])):
                raise NondeterministicError(self._changed(f"batch {index} differs from the pass before"))
            yield batch
        if known is not None and index + 1 != len(known):
            raise NondeterministicError(self._changed(f"{index + 1} batches came where {len(known)} came before"))

    def _inspect(self) -> tuple[int, Batch]:
        """Count the samples, refuse what cannot be measured, and see that a second pass brings the same."""
        samples, first, fingerprints = 0, None, []
        for index, batch in enumerate(self):
            self.unequal = self.unequal or _unequal_lengths(batch, index)
            _check_batch(batch, index, samples)
            first = batch if first is None else first
            samples += len(batch)
            if self.resident is None:
                fingerprints.append(_fingerprint(batch))
        if first is None or samples == 0:
            raise SpiritLevelError("the data is empty: no batch with at least one sample came out of it")
        if self.resident is None:
            self._fingerprints = fingerprints
            for _ in self:
                pass
        return samples, first

    def changed(self, change: Callable[[Batch], Batch]) -> Data:
        """The same stream with every batch changed by a function of it alone."""
        other = copy.copy(self)
        other._spread, other.first, other._change = {}, change(self.first), change
        if self._change is not None:
            before = self._change
            other._change = lambda batch: change(before(batch))
        return other

    def fingerprint(self) -> tuple[float, ...]:
        """A few numbers that other data would hardly share: the size, and sums over the first samples."""
        head = self.first[:256] if self.first.targets is not None else self.first
        return (float(self.samples), *_fingerprint(head))

    def fingerprints(self) -> list[tuple[float, ...]]:
        """A few numbers of every batch, all of its samples included."""
        return [_fingerprint(batch) for batch in self]

    def pieces(self, *, divide: bool = True) -> int:
        """How many pieces the data can be divided into: its samples, or its batches where these must stay whole."""
        return self.samples if divide else sum(1 for _ in self)

    def select(self, pieces: Tensor, *, divide: bool = True) -> Data:
        """Some of the pieces, in memory. `pieces` are their numbers in the order of a pass."""
        wanted = torch.zeros(self.pieces(divide=divide), dtype=torch.bool)
        wanted[pieces] = True
        if not divide:
            return Data([batch for batch, chosen in zip(self, wanted.tolist(), strict=True) if chosen])
        chosen: list[Batch] = []
        start = 0
        for batch in self:
            rows = wanted[start : start + len(batch)].nonzero().squeeze(1)
            start += len(batch)
            if len(rows):
                chosen.append(batch.map(lambda leaf, rows=rows: leaf[rows.to(leaf.device)]))  # type: ignore[misc]
        whole = join(chosen)
        return Data(chosen if whole is None else whole)

    def spread(self, count: int) -> list[Batch]:
        """About `count` samples, evenly spaced over a pass, and one of every label that comes up, up to `count` more.

        In the order of a pass, as one batch where the shapes allow it.
        """
        if count not in self._spread:  # a pass over a loader may be slow
            self._spread[count] = self._chosen(count)
        return self._spread[count]

    def _chosen(self, count: int) -> list[Batch]:
        places = {(2 * i + 1) * self.samples // (2 * count) for i in range(count)}
        seen: set[tuple[int, ...]] = set()
        chosen: list[Batch] = []
        start = 0
        for batch in self:
            rows = {place - start for place in places if start <= place < start + len(batch)}
            rows |= _new_labels(batch.targets, seen, count)
            start += len(batch)
            if rows:
                index = torch.tensor(sorted(rows))
                chosen.append(batch.map(lambda leaf, index=index: leaf[index.to(leaf.device)]))  # type: ignore[misc]
        whole = join(chosen)
        return chosen if whole is None else [whole]

    def _changed(self, what: str) -> str:
        cause = "the loader shuffles (shuffle=True)" if self.shuffles else "shuffling or random augmentation"
        return (
            f"the data changes from pass to pass: {what}. Likely cause: {cause}. A second derivative needs the same data "
            "at every pass: build the loader with shuffle=False and without random transforms, or pass fix_data=True to "
            "keep the first pass in memory"
        )

    def chunks(self, size: int, *, divide: bool = True, part: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """One pass in chunks of at most `size` samples; with `divide=False` the batches as they come.

        part: (i, k) for the i-th of k parts: of every batch, or with `divide=False` every k-th batch.
        """
        if not divide:
            yield from itertools.islice(self, part[0], None, part[1])
            return
        waiting: Batch | None = None
        for batch in self._parts(*part):
            if waiting is not None:
                joined = join([waiting, batch])
                if joined is None:
                    yield waiting
                batch = batch if joined is None else joined
            start = 0
            while len(batch) - start >= size:
                yield batch[start : start + size]
                start += size
            waiting = batch[start:] if start < len(batch) else None
        if waiting is not None:
            yield waiting

    def _parts(self, index: int, count: int) -> Iterator[Batch]:
        """The samples of every batch that belong to one of several processes. Those that cannot be divided evenly go to one
        process after the other, over batches too, so that all have as many: batches may be smaller than there are processes."""
        handed = 0
        for batch in self:
            each, left = divmod(len(batch), count)
            more = {(-1 - handed - place) % count for place in range(left)}
            handed += left
            start = index * each + sum(other < index for other in more)
            size = each + (index in more)
            if count == 1:
                yield batch
            elif size:
                yield batch[start : start + size]


def _as_pair(source: Any) -> Batch | None:
    """`(x, y)` of whole tensors or arrays, or a single batch of another kind, as one batch; None for anything else."""
    if isinstance(source, Batch):
        return source
    if is_one_batch(source):
        return _as_batch(source)
    if not isinstance(source, tuple | list) or len(source) != 2:
        return None
    x, y = (torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in source)
    if not isinstance(y, Tensor):
        return None
    leaves = tree_leaves(x)
    if (
        not leaves
        or not all(isinstance(leaf, Tensor) for leaf in leaves)
        or (isinstance(source, list) and y.dim() == 0)
    ):
        return None
    return Batch(x, y).map(normal)


def normal(tensor: Tensor) -> Tensor:
    """A tensor that autograd can save, which one made in inference mode is not, where there is double precision."""
    placed = with_double(tensor)
    return placed.clone() if placed.is_inference() else placed


def _re_iterable(source: Any) -> Iterable[Any]:
    if isinstance(source, Iterator):
        raise SpiritLevelError(
            f"data is a {type(source).__name__}, which can be read only once, but several passes are needed: "
            "pass list(data), a DataLoader, or a pair of tensors (x, y)"
        )
    if not isinstance(source, Iterable):
        raise SpiritLevelError(
            f"data must be a pair of tensors (x, y), a DataLoader or a re-iterable of batches, got {type(source).__name__}"
        )
    return source


def _as_batch(entry: Any) -> Batch:
    if isinstance(entry, Batch):
        return entry
    if isinstance(entry, Mapping):
        return _of_dict(dict(entry)).map(normal)
    if isinstance(entry, Sequence) and len(entry) >= 2 and isinstance(entry[-1], Tensor) and entry[-1].dim():
        inputs = entry[0] if len(entry) == 2 else tuple(entry[:-1])
        named = isinstance(entry, tuple) and hasattr(entry, "_fields")
        return Batch(inputs, entry[-1], functools.partial(_as_record, type(entry)) if named else None).map(normal)
    if not tensors_of(entry):
        raise SpiritLevelError(not_a_pair(entry))
    return Batch(entry, None).map(normal)


def not_a_pair(entry: Any) -> str:
    """The message for a batch in which inputs and targets cannot be distinguished."""
    length = f" of length {len(entry)}" if isinstance(entry, Sequence) else ""
    return (
        f"a batch must be a pair (inputs, targets) or a dict, got {type(entry).__name__}{length}; for batches of any other kind "
        "pass a loss of the form (model, batch) -> (mean loss, count), see spiritlevel.batch_loss"
    )


def _of_dict(entry: dict[str, Any]) -> Batch:
    """A dict batch; its labels become the targets if there is one for each sample of every other entry."""
    labels = entry.get(LABELS)
    others = {key: part for key, part in entry.items() if key != LABELS}
    leaves = tree_leaves(others)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    plain = all(isinstance(leaf, Tensor | bool | int | float | str | None) for leaf in leaves)
    if not isinstance(labels, Tensor) or not labels.dim() or not tensors or not plain:
        return Batch(entry, None)
    fits = all(leaf.dim() and len(leaf) == len(labels) for leaf in tensors)
    return Batch(others, labels, _with_labels) if fits else Batch(entry, None)


def _with_labels(inputs: Any, targets: Any) -> Any:
    return {**inputs, LABELS: targets}


def _as_record(kind: Any, inputs: Any, targets: Any) -> Any:
    parts = inputs if len(kind._fields) > 2 else (inputs,)
    return kind(*parts, targets)


def _unequal_lengths(batch: Batch, index: int) -> str:
    """Where the inputs of a batch are not as many as its targets; empty where they are."""
    if batch.targets is None:
        return ""
    count = len(batch.targets) if batch.targets.dim() else 0
    for leaf in tensors_of(batch.inputs):
        if leaf.dim() == 0 or len(leaf) != count:
            return (
                f"inputs and targets of batch {index} have different lengths: "
                f"{len(leaf) if leaf.dim() else 'a scalar'} and {count}"
            )
    return ""


def _check_batch(batch: Batch, index: int, before: int) -> None:
    """Refuse tensors without data, NaN and infinity, and say where they are."""
    leaves = tensors_of((batch.inputs, batch.targets))
    if any(leaf.is_meta for leaf in leaves):
        raise SpiritLevelError(f"batch {index} is on the meta device, which holds no numbers: pass tensors with data")
    for leaf in leaves:
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf.sum())):
            _point_out(leaf, before, "targets" if leaf is batch.targets else "inputs")


def _point_out(leaf: Tensor, before: int, what: str) -> None:
    wrong = ~torch.isfinite(leaf)
    if bool(wrong.any()):
        place = wrong.reshape(len(leaf), -1).any(1).nonzero() if leaf.dim() else torch.zeros(1, 1)
        count = len(place)
        raise SpiritLevelError(
            f"the {what} contain NaN or infinity: first at sample {before + int(place[0])} ({count} such in this batch)"
        )


def _fingerprint(batch: Batch) -> tuple[float, ...]:
    """A few sums that change when samples, their order or the place of any number changes.

    Order matters: a flipped image has the same sum, and parts of a batch are read at different passes.
    """
    sums: list[float] = []
    for leaf in tensors_of((batch.inputs, batch.targets)):
        numbers = leaf.detach().to(torch.float64).reshape(len(leaf) if leaf.dim() else 1, leaf.shape[1:].numel())
        weighted = _weights(numbers.shape[0], numbers.device) @ (numbers @ _weights(numbers.shape[1], numbers.device))
        sums += [*map(float, leaf.shape), float(weighted), float(numbers.square().sum())]
    return tuple(sums)


def _weights(size: int, device: torch.device) -> Tensor:
    """Numbers of order one, all different."""
    return torch.arange(1, size + 1, dtype=torch.float64, device=device).mul_(2**0.5).cos_()


def _new_labels(targets: Tensor | None, seen: set[tuple[int, ...]], most: int) -> set[int]:
    """The first sample of every label not `seen` before; one with several labels counts by its least and largest."""
    if targets is None or targets.is_floating_point() or targets.dim() == 0 or len(seen) >= most or not targets.numel():
        return set()
    labels = targets.reshape(len(targets), -1)
    # As one number each: rows are compared forty times as slowly as numbers.
    (least, low), (largest, high) = (
        each.unique(return_inverse=True) for each in torch.stack([labels.amin(1), labels.amax(1)]).cpu()
    )
    codes, inverse = (low * len(largest) + high).unique(return_inverse=True)
    pairs = torch.stack([least[codes // len(largest)], largest[codes % len(largest)]], 1)
    first = torch.full((len(pairs),), len(targets)).scatter_reduce_(0, inverse, torch.arange(len(targets)), "amin")
    rows: set[int] = set()
    for pair, row in zip(map(tuple, pairs.tolist()), first.tolist(), strict=True):
        if pair not in seen and len(seen) < most:
            seen.add(pair)
            rows.add(row)
    return rows


def _same(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    """Equal up to the rounding of sums taken in another order."""
    return len(first) == len(second) and all(
        math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9) for a, b in zip(first, second, strict=True)
    )


def join(batches: Sequence[Batch]) -> Batch | None:
    """All batches joined into one, or None where their shapes do not allow it."""
    columns = [tree_leaves((batch.inputs, batch.targets)) for batch in batches]
    first = columns[0]
    fits = all(
        len(leaves) == len(first)
        and all(
            isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape[1:] == b.shape[1:] and a.dtype == b.dtype
            for a, b in zip(first, leaves, strict=True)
        )
        for leaves in columns
    )
    if not fits:
        return None
    parts = iter(torch.cat(leaves) for leaves in zip(*columns, strict=True))
    return replace(batches[0], inputs=tree_map(lambda _: next(parts), batches[0].inputs), targets=next(parts))


def is_small(parameters: int, samples: int) -> bool:
    """Whether computing so many parameters on so many samples costs next to nothing."""
    return parameters * samples <= SMALL
