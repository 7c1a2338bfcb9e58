"""The data of a cell: both parts of a data set, prepared as the study says, and random labels by a seed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.settings import DataSection
from spiritlevel.subjects.data import SOURCES, Dataset, load_data
from spiritlevel.subjects.preprocessing import Standardization, statistics_of


@dataclass(frozen=True, eq=False)
class Samples:
    """Training and test data of a cell, before label noise."""

    train: Dataset
    test: Dataset

    @property
    def fingerprint(self) -> str:
        """One fingerprint of both parts."""
        return hashlib.sha256(f"{self.train.fingerprint} {self.test.fingerprint}".encode()).hexdigest()


def load_samples(section: DataSection) -> Samples:
    """Both parts of the data set of a cell."""
    source = SOURCES.get(section.name)
    if source is not None and source.argument == "FOLDER" and section.folder is None:
        raise SpiritLevelError(
            f"{section.name} is read from a folder: say which, by --data-folder or by `folder` in [data]"
        )
    train = load_data(section.spec, split="train", samples=section.train_samples)
    test = load_data(section.spec, split="test", samples=section.test_samples)
    if train.y.is_floating_point():
        raise SpiritLevelError(f"studies train classifiers: {section.spec} has real targets where labels are needed")
    asked = _preprocessing(section, train)
    return Samples(train, test) if asked is None else Samples(asked.applied(train), asked.applied(test))


def _preprocessing(section: DataSection, train: Dataset) -> Standardization | None:
    if section.mean is not None and section.std is not None:
        return Standardization(section.mean, section.std)
    return statistics_of(train) if section.standardize else None


def seed_for(seed: int, purpose: str) -> int:
    """A seed of its own for each random part of a cell, so that none repeats the draws of another."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:7])


def noisy_labels(y: Tensor, classes: int, ratio: float, seed: int) -> Tensor:
    """Labels of which the share `ratio`, chosen at random, is drawn anew from all classes (tsuzuku2019)."""
    generator = torch.Generator().manual_seed(seed_for(seed, "labels"))
    chosen = torch.randperm(len(y), generator=generator)[: round(ratio * len(y))]
    noisy = y.clone()
    noisy[chosen] = torch.randint(classes, (len(chosen),), generator=generator)
    return noisy
