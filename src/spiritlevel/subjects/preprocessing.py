"""What is done to inputs before a network sees them, which must be what was done in training.

Built-in images are x / 255. A network that was trained on standardized images would see other inputs, and would be
measured at a loss that it never had. So the mean and the deviation of every channel can be given, taken from the data,
or come with a checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from spiritlevel.errors import SpiritLevelError
from spiritlevel.saved import sha256_of
from spiritlevel.subjects.checkpoint import read_metadata
from spiritlevel.subjects.data import Dataset

_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Public checkpoints by the first digits of the sha256 that their file names carry, with the preprocessing of their training:
# the residual networks for CIFAR-10 of Y. Idelbayev's pytorch_resnet_cifar10, with 20, 32, 44, 56, 110 and 1202 layers.
KNOWN = dict.fromkeys(("12fca82f", "d509ac18", "014dd654", "4bfd9763", "1d1ed7c2", "f3b1deed"), _IMAGENET)


@dataclass(frozen=True)
class Standardization:
    """(x − mean) / std in every channel, and where that comes from."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    said_by: str = ""

    def applied(self, data: Dataset) -> Dataset:
        """The data as the network takes them; a single number stands for every channel.

        >>> from spiritlevel.subjects.data import load_data
        >>> data = load_data("random:100,3,2,0")
        >>> moved = Standardization((1.0,), (2.0,)).applied(data)
        >>> bool(torch.allclose(moved.x, (data.x - 1) / 2)), moved.normalisation
        (True, 'none, then (x - (1.0, 1.0, 1.0)) / (2.0, 2.0, 2.0)')
        """
        channels = data.x.shape[1] if data.x.dim() > 1 else 0
        mean, std = (part * channels if len(part) == 1 else part for part in (self.mean, self.std))
        return data.standardized(mean, std)

    @property
    def metadata(self) -> Mapping[str, str]:
        """What a checkpoint says of it."""
        return {"mean": json.dumps(self.mean), "std": json.dumps(self.std)}


def read_numbers(option: str, text: str) -> tuple[float, ...]:
    """`0.1307` or `0.49,0.48,0.45` as numbers, one a channel.

    >>> read_numbers("--mean", "0.5, 0.25")
    (0.5, 0.25)
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise SpiritLevelError(
            f"{option} must be numbers separated by commas, one for each channel, got {text!r}"
        ) from None


def statistics_of(data: Dataset) -> Standardization:
    """Mean and deviation of every channel over all samples and positions, six digits of each."""
    if not data.x.is_floating_point() or data.x.dim() < 2:
        raise SpiritLevelError(f"{data.name} holds no real numbers in channels, so there is nothing to standardize")
    axes = [axis for axis in range(data.x.dim()) if axis != 1]
    x = data.x.double()
    mean, std = x.mean(axes), x.std(axes, correction=0)
    if (
        data.x.dim() == 2
    ):  # features, not channels of an image: one deviation for all keeps constant ones apart from zero
        std = torch.full_like(std, float(x.std(correction=0)))
    return Standardization(_digits(mean), _digits(std), "the training split")


def _digits(numbers: torch.Tensor) -> tuple[float, ...]:
    return tuple(float(f"{number:.6g}") for number in numbers.tolist())


def _written(path: Path, key: str, text: str) -> tuple[float, ...]:
    """Numbers in JSON, one or a list of them."""
    try:
        found = json.loads(text)
        numbers = tuple(float(number) for number in (found if isinstance(found, list) else [found]))
    except (ValueError, TypeError):
        numbers = ()
    if not numbers or not all(map(math.isfinite, numbers)):
        raise SpiritLevelError(
            f"{path} says {key}={text!r} in its metadata, which should be a list of numbers in JSON, one for each channel; --mean and "
            "--std are taken in its place"
        )
    return numbers


def of_checkpoint(path: Path) -> Standardization | None:
    """What a checkpoint brings: in its safetensors metadata (`mean` and `std`, lists in JSON), or because it is a known file."""
    metadata = read_metadata(path)
    if "mean" in metadata and "std" in metadata:
        mean, std = (_written(path, key, metadata[key]) for key in ("mean", "std"))
        return Standardization(mean, std, f"{path.name} itself")
    known = KNOWN.get(sha256_of(path)[:8])
    return None if known is None else Standardization(*known, f"{path.name}, a known checkpoint")
