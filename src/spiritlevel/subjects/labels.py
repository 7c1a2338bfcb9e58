"""Labels drawn at random, as networks are trained on to see how they learn by heart (tsuzuku2019).

Such a network must be measured on the labels that it was trained on: with the true ones it is not at a minimum. A checkpoint of a study
says which those were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spiritlevel.errors import SpiritLevelError
from spiritlevel.subjects.checkpoint import read_metadata
from spiritlevel.subjects.seeds import seed_for

# What a checkpoint says of its labels, in its metadata.
SHARE, SEED, AMONG, CLASSES = "label_noise", "label_seed", "label_samples", "label_classes"
TRUE_LABELS = "--label-noise 0 takes the labels as the data have them"


@dataclass(frozen=True)
class LabelNoise:
    """The share of the training labels that is drawn anew from all classes, by which seed, among how many samples, from how many classes,
    and where that comes from."""

    share: float
    seed: int = 0
    among: int | None = None  # whatever their number is, if it is not said
    classes: int | None = None
    said_by: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise SpiritLevelError(f"the share of labels drawn anew must be from 0 to 1, got {self.share}")

    def applied(self, y: Tensor, classes: int) -> Tensor:
        """The labels of the whole training set; those that are drawn anew are chosen at random.

        >>> y = torch.zeros(1000, dtype=torch.long)
        >>> int((LabelNoise(0.5, seed=1).applied(y, classes=10) != y).sum())
        459
        """
        if y.is_floating_point():
            raise SpiritLevelError("targets are real numbers: labels can be drawn anew of classes only")
        if not self.share:
            return y
        for said, here, what in ((self.among, len(y), "samples"), (self.classes, classes, "classes")):
            if said not in (None, here):
                raise SpiritLevelError(
                    f"{self} among {said:,} {what}, and here are {here:,}: which labels they were cannot be told. Give the data with the "
                    f"labels that were trained, as file.npz or package.module:factory; {TRUE_LABELS}"
                )
        generator = torch.Generator().manual_seed(seed_for(self.seed, "labels"))
        chosen = torch.randperm(len(y), generator=generator)[: round(self.share * len(y))]
        noisy = y.clone()
        noisy[chosen] = torch.randint(classes, (len(chosen),), generator=generator)
        return noisy

    def __str__(self) -> str:
        by = f", as said by {self.said_by}" if self.said_by else ""
        return f"{self.share:.3g} of the training labels drawn anew (seed {self.seed}){by}"

    @property
    def metadata(self) -> Mapping[str, str]:
        """What a checkpoint says of it."""
        counts = {key: str(count) for key, count in ((AMONG, self.among), (CLASSES, self.classes)) if count is not None}
        return {SHARE: repr(self.share), SEED: str(self.seed), **counts} if self.share else {}


def labels_of_checkpoint(path: Path) -> LabelNoise | None:
    """The labels that a network was trained on, where its checkpoint says that some were drawn anew."""
    metadata = read_metadata(path)
    if SHARE not in metadata:
        return None
    said = {key: metadata[key] for key in (SHARE, SEED, AMONG, CLASSES) if key in metadata}
    try:
        among, classes = (int(said[key]) if key in said else None for key in (AMONG, CLASSES))
        return LabelNoise(float(said[SHARE]), int(said.get(SEED, "0")), among, classes, f"{path.name} itself")
    except ValueError:
        raise SpiritLevelError(f"{path} says {said} in its metadata, which should be numbers; {TRUE_LABELS}") from None
