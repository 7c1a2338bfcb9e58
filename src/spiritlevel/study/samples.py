"""The data of a cell: both parts of a data set, prepared as the study says, and the labels that a network is trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.settings import CellConfig, DataSection
from spiritlevel.subjects.data import SOURCES, Dataset, load_data
from spiritlevel.subjects.labels import LabelNoise
from spiritlevel.subjects.preprocessing import Standardization, statistics_of


@dataclass(frozen=True, eq=False)
class Samples:
    """Training and test data of a cell, before label noise, and what was done to their inputs."""

    train: Dataset
    test: Dataset
    preparation: Standardization | None = None

    @property
    def fingerprint(self) -> str:
        """One fingerprint of both parts."""
        return hashlib.sha256(f"{self.train.fingerprint} {self.test.fingerprint}".encode()).hexdigest()

    def labels(self, config: CellConfig) -> Tensor:
        """The training labels of a cell."""
        return self._noise(config).applied(self.train.y, self.train.classes)

    def metadata(self, config: CellConfig) -> Mapping[str, str]:
        """What a checkpoint of a cell says of the inputs and labels that its network was trained on."""
        return {**(self.preparation.metadata if self.preparation else {}), **self._noise(config).metadata}

    def _noise(self, config: CellConfig) -> LabelNoise:
        return LabelNoise(config.data.label_noise, config.seed, len(self.train), self.train.classes)


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
    if train.input_shape != test.input_shape:
        raise SpiritLevelError(
            f"samples of {section.spec} to train on have the shape {tuple(train.input_shape)}, those to test {tuple(test.input_shape)}"
        )
    asked = _preprocessing(section, train)
    return Samples(train, test) if asked is None else Samples(asked.applied(train), asked.applied(test), asked)


def _preprocessing(section: DataSection, train: Dataset) -> Standardization | None:
    if section.mean is not None and section.std is not None:
        return Standardization(section.mean, section.std)
    return statistics_of(train) if section.standardize else None
