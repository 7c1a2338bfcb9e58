"""The samples that a training is followed on: chosen once, by a seed, and kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from spiritlevel.measuring.sampling import random_subset
from spiritlevel.problem.batches import Data, join
from spiritlevel.problem.quiet import undisturbed


def choose_probe(model: nn.Module, data: Any, samples: int | None, seed: int, *, whole: bool) -> Data:
    """A random subset of the data in memory, copied, so that nothing that happens to the data later reaches it.

    A loader is not iterated where its dataset can be indexed: that would move its generator, and be slow. `whole` keeps
    batches as they come, for a loss that calls the model itself.
    """
    with undisturbed(model), _generators_kept(data):
        chosen = _chosen(data, samples, seed, whole)
        divide = not whole and chosen.first.targets is not None
        if samples is not None and chosen.samples > samples:
            chosen = random_subset(chosen, samples, divide, seed)[0]
        batches = [batch.map(Tensor.clone) for batch in chosen]
        joined = join(batches) if divide else None
        return Data(batches if joined is None else (joined.inputs, joined.targets))


def _chosen(data: Any, samples: int | None, seed: int, whole: bool) -> Data:
    if isinstance(data, Dataset):
        data = DataLoader(data, batch_size=256)
    if not isinstance(data, DataLoader) or samples is None:
        return Data(data, fix=True)
    if isinstance(data.dataset, IterableDataset) or data.batch_size is None:
        return Data(list(_first_batches(data, samples)))
    order = torch.randperm(len(data.dataset), generator=torch.Generator().manual_seed(seed))[:samples].tolist()  # type: ignore[arg-type]
    size = data.batch_size if whole else len(order)
    return Data([data.collate_fn([data.dataset[i] for i in group]) for group in _groups(sorted(order), max(1, size))])


def _groups(order: list[int], size: int) -> Iterator[list[int]]:
    return (order[start : start + size] for start in range(0, len(order), size))


def _first_batches(loader: DataLoader[Any], samples: int) -> Iterator[Any]:
    """As many batches as have so many samples; a stream says nothing about what comes later."""
    seen = 0
    for batch in loader:
        yield batch
        seen += Data([batch]).samples
        if seen >= samples:
            return


@contextlib.contextmanager
def _generators_kept(data: Any) -> Iterator[None]:
    """The generators that a loader draws from, put back: the training must see the same order with and without."""
    owners = (data, getattr(data, "sampler", None), getattr(data, "batch_sampler", None))
    found = [each for owner in owners if isinstance(each := getattr(owner, "generator", None), torch.Generator)]
    before = [each.get_state() for each in found]
    try:
        yield
    finally:
        for each, state in zip(found, before, strict=True):
            each.set_state(state)
