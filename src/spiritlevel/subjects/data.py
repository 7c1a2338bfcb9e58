"""Data sets by name: tensors that stay resident, and a fingerprint of every byte of them.

Nothing here executes what a file says: idx and binary files are parsed, and `.npz` is read without pickles.
"""

import hashlib
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spiritlevel.errors import SpiritLevelError, suggest
from spiritlevel.subjects.archives import Npz
from spiritlevel.subjects.factory import import_factory
from spiritlevel.subjects.images import load_cifar10, load_idx
from spiritlevel.subjects.labels import LabelNoise
from spiritlevel.subjects.raw import Raw, Split, check_labels


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples x (first dimension N) with targets y, and what was done to them.

    `y` holds class labels 0 .. classes-1 (int64), or real targets of shape (N, classes). `fingerprint` is the sha256 of
    the dtype, shape and bytes of x and y; `normalisation` says how the stored numbers became x.
    """

    name: str
    split: str
    x: Tensor = field(repr=False)
    y: Tensor = field(repr=False)
    classes: int
    normalisation: str
    fingerprint: str

    def __len__(self) -> int:
        return len(self.x)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample, as `build_model` wants it."""
        return tuple(self.x.shape[1:])

    def standardized(self, mean: tuple[float, ...], std: tuple[float, ...]) -> "Dataset":
        """The same data with (x - mean) / std in each channel, as public checkpoints often expect."""
        channels = self.x.shape[1] if self.x.dim() > 1 else 0
        if len(mean) != channels or len(std) != channels or min(std, default=0.0) <= 0:
            raise SpiritLevelError(
                f"{self.name} has {channels} channels; `standardized` needs as many means and positive deviations, "
                f"got mean={mean}, std={std}"
            )
        shape = (1, channels) + (1,) * (self.x.dim() - 2)
        x = (self.x - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)
        said = f"{self.normalisation}, then (x - {mean}) / {std}"
        return Dataset(self.name, self.split, x, self.y, self.classes, said, fingerprint(x, self.y))


class _Source(NamedTuple):
    load: Callable[[str, Split], Raw]
    argument: str
    holds: str


def load_data(
    spec: str,
    *,
    split: Split = "train",
    samples: int | None = None,
    seed: int | None = None,
    labels: LabelNoise | None = None,
) -> Dataset:
    """The data set that `spec` names (see `list_data`), or the first `samples` of it; with a seed, as many chosen at random.

    Bytes become float32 in [0, 1], other real numbers float32; whole numbers wider than a byte (tokens) stay as they
    are. `labels` says which of all labels are drawn anew, before samples are chosen.

    >>> data = load_data("random:500,784,10,0", samples=100)
    >>> data.x.shape, data.classes, data.input_shape
    (torch.Size([100, 784]), 10, (784,))
    """
    if split not in ("train", "test"):
        raise SpiritLevelError(f"split must be 'train' or 'test', got {split!r}")
    raw = _load_raw(spec, split)
    if len(raw.x) != len(raw.y):
        raise SpiritLevelError(f"{spec} has {len(raw.x)} samples but {len(raw.y)} targets; their numbers must be equal")
    if len(raw.x) == 0:
        raise SpiritLevelError(f"{spec} has no samples in its {split} split; at least one is needed")
    y, classes = _targets(raw, spec)
    count = _checked_count(samples, len(raw.x), spec)
    chosen = slice(count) if seed is None or samples is None else _random_rows(len(raw.x), count, seed)
    x, said = _scaled(raw.x[chosen], raw.scale, spec)
    y = (y if labels is None else labels.applied(y, classes))[chosen].clone()
    return Dataset(spec, split, x, y, classes, said, fingerprint(x, y))


def list_data() -> dict[str, str]:
    """Every form of `spec` that `load_data` takes, with what it holds."""
    forms = {f"{name}:{source.argument}" if source.argument else name: source.holds for name, source in SOURCES.items()}
    forms["path/to/file.npz"] = "arrays x, y or x_train, y_train, x_test, y_test"
    forms["package.module:factory"] = "your own: (x, y), a data set, or a dictionary of these under 'train' and 'test'"
    return forms


def fingerprint(x: Tensor, y: Tensor) -> str:
    """sha256 over dtype, shape and bytes of x and y: equal exactly when the tensors are equal bit for bit."""
    digest = hashlib.sha256()
    for tensor in (x, y):
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# --- from a spec to raw tensors ---------------------------------------------------------------------------------------

_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def _load_raw(spec: str, split: Split) -> Raw:
    name, _, argument = spec.partition(":")
    source = SOURCES.get(name)
    if source is not None:
        if bool(argument) != bool(source.argument):
            form = f"{name}:{source.argument}" if source.argument else name
            raise SpiritLevelError(f"data set {name!r} must be written {form!r}, got {spec!r}")
        return source.load(argument, split)
    if spec.endswith(".npz"):
        return _load_npz(Path(spec), split)
    if _FACTORY.fullmatch(spec):
        return _load_factory(spec, split)
    raise SpiritLevelError(f"unknown data set {spec!r}{suggest(name, SOURCES) or '.'} Known: {', '.join(list_data())}")


def _random_rows(available: int, count: int, seed: int) -> Tensor:
    """`count` random row numbers, in the order of the data."""
    order = torch.randperm(available, generator=torch.Generator().manual_seed(seed))
    return order[:count].sort().values


def _checked_count(samples: int | None, available: int, spec: str) -> int:
    if samples is None:
        return available
    if isinstance(samples, bool) or not isinstance(samples, int) or not 1 <= samples <= available:
        raise SpiritLevelError(f"samples must be a whole number from 1 to {available}, all of {spec}, got {samples!r}")
    return samples


def _scaled(x: Tensor, scale: int, spec: str) -> tuple[Tensor, str]:
    """x as a network takes it, with the words for what was done."""
    if x.is_complex():
        raise SpiritLevelError(f"x of {spec} is complex ({x.dtype}); real numbers are needed")
    if x.dtype == torch.uint8:
        return x.to(torch.float32).div_(scale), f"x / {scale}"
    if not x.is_floating_point() and x.dtype != torch.bool:
        return x.to(torch.int64, copy=True), "none"
    x = x.to(torch.float32, copy=True)
    bad = ~torch.isfinite(x.reshape(len(x), -1)).all(1)
    if bad.any():
        first = int(bad.nonzero()[0])
        raise SpiritLevelError(
            f"x of {spec} is NaN or infinite in float32 in {int(bad.sum())} samples, first in sample {first}; "
            "remove or repair them"
        )
    return x, "none"


def _targets(raw: Raw, spec: str) -> tuple[Tensor, int]:
    """Targets as int64 labels or real rows, with the number of classes or of columns."""
    y = raw.y
    if y.is_floating_point():
        if y.dim() != 2:
            raise SpiritLevelError(
                f"y of {spec} has dtype {y.dtype} and shape {tuple(y.shape)}; labels must be integers of shape (N,), "
                "real targets need shape (N, outputs)"
            )
        if not torch.isfinite(y).all():
            raise SpiritLevelError(f"y of {spec} contains NaN or infinity; remove or repair those samples")
        return y.to(torch.float32), y.shape[1]
    if y.is_complex() or y.dim() != 1:
        raise SpiritLevelError(
            f"y of {spec} has dtype {y.dtype} and shape {tuple(y.shape)}; labels must be integers of shape (N,)"
        )
    y = y.to(torch.int64)
    classes = raw.classes if raw.classes is not None else int(y.max()) + 1
    check_labels(y, classes, spec)
    return y, classes


# --- embedded and synthetic -------------------------------------------------------------------------------------------


def _load_digits(_argument: str, split: Split) -> Raw:
    """scikit-learn's 1797 handwritten digits; every fifth image of each class is for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SpiritLevelError(
            "data set 'digits' needs scikit-learn, which is not installed: pip install \"spiritlevel[digits]\""
        ) from None
    images, labels = load_digits(return_X_y=True)
    testing = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        testing[np.flatnonzero(labels == label)[4::5]] = True
    chosen = testing if split == "test" else ~testing
    x = torch.from_numpy(images[chosen].astype(np.uint8)).reshape(-1, 1, 8, 8)
    return Raw(x, torch.from_numpy(labels[chosen]), classes=10, scale=16)


def _load_random(argument: str, split: Split) -> Raw:
    """Gaussian x with labels independent of them (rangamani2019, section 3.1); the test split is the next draw."""
    match = re.fullmatch(r"(\d+),(\d+(?:x\d+)*),(\d+),(\d+)", argument)
    if match is None:
        raise SpiritLevelError(
            f"random data must be written 'random:N,SHAPE,CLASSES,SEED', for instance 'random:500,784,10,0' or "
            f"'random:500,1x28x28,10,0', got 'random:{argument}'"
        )
    count, classes, seed = (int(match[i]) for i in (1, 3, 4))
    shape = tuple(int(side) for side in match[2].split("x"))
    if count < 1 or classes < 1 or min(shape) < 1 or seed >= 2**63:
        raise SpiritLevelError(f"N, SHAPE and CLASSES must be positive and SEED below 2**63, got 'random:{argument}'")
    generator = torch.Generator().manual_seed(seed)
    for _ in range(1 if split == "train" else 2):
        x = torch.randn(count, *shape, generator=generator)
        y = torch.randint(classes, (count,), generator=generator)
    return Raw(x, y, classes)


# --- files and code of the user ---------------------------------------------------------------------------------------


def _load_npz(path: Path, split: Split) -> Raw:
    if not path.is_file():
        raise SpiritLevelError(f"no file {path}; a data set of your own is an .npz with arrays x and y")
    try:
        with path.open("rb") as stream:
            tensors = _read_npz(stream, path, split)
    except SpiritLevelError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, MemoryError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise SpiritLevelError(
            f"{path} cannot be read ({said}); it must be written by np.savez, without objects"
        ) from None
    suffix = f"_{split}" if f"x_{split}" in tensors else ""
    labels = [tensor for name, tensor in tensors.items() if name.startswith("y")]
    return Raw(tensors["x" + suffix], tensors["y" + suffix], _count_classes(labels))


def _read_npz(stream: BinaryIO, path: Path, split: Split) -> dict[str, Tensor]:
    archive = Npz(stream, path)
    arrays = archive.arrays(_wanted(list(archive.members), split, path))
    return {name: _tensor(array, path) for name, array in arrays.items()}


def _wanted(names: list[str], split: Split, path: Path) -> set[str]:
    """The arrays to read for `split`; both splits' labels, so that both agree on the number of classes."""
    if {f"x_{split}", f"y_{split}"} <= set(names):
        return {f"x_{split}", "y_train", "y_test"} & set(names)
    if split == "train" and {"x", "y"} <= set(names):
        return {"x", "y"}
    needed = "x_test and y_test" if split == "test" else "x and y, or x_train and y_train"
    raise SpiritLevelError(
        f"{path} must hold arrays {needed} for the {split} split, found {', '.join(names) or 'none'}"
    )


def _load_factory(spec: str, split: Split) -> Raw:
    made = import_factory(spec, SOURCES)()
    if not isinstance(made, Mapping):
        if split == "test":
            raise SpiritLevelError(f"{spec} returned one data set; for testing return {{'train': ..., 'test': ...}}")
        return Raw(*_pair(made, spec))
    if split not in made:
        raise SpiritLevelError(f"{spec} returned a dictionary without {split!r}, found {', '.join(map(str, made))}")
    pairs = {key: _pair(made[key], spec) for key in ("train", "test") if key in made}
    return Raw(*pairs[split], _count_classes([y for _, y in pairs.values()]))


def _pair(made: Any, spec: str) -> tuple[Tensor, Tensor]:
    """x and y of a pair of arrays or of a data set of (sample, target)."""
    if isinstance(made, Dataset):
        return made.x, made.y
    if isinstance(made, torch.utils.data.TensorDataset):
        made = made.tensors
    if isinstance(made, tuple | list) and len(made) == 2 and all(isinstance(m, Tensor | np.ndarray) for m in made):
        return _tensor(made[0], spec), _tensor(made[1], spec)
    try:
        rows = [made[i] for i in range(len(made))]
        x = torch.stack([torch.as_tensor(sample) for sample, _ in rows])
        return x, torch.stack([torch.as_tensor(target) for _, target in rows])
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        raise SpiritLevelError(
            f"{spec} returned {type(made).__name__}; needed are (x, y), a data set of (tensor, target) pairs of equal "
            f"shapes, or a dictionary of these under 'train' and 'test' ({error})"
        ) from error


def _tensor(values: Any, where: object) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu()
    if values.ndim == 0:
        raise SpiritLevelError(f"{where} holds a single number where an array of samples is needed")
    try:
        return torch.from_numpy(np.ascontiguousarray(values))
    except TypeError:
        raise SpiritLevelError(f"{where} holds an array of {values.dtype}; numbers are needed") from None


def _count_classes(targets: list[Tensor]) -> int | None:
    """The highest label of all splits plus one; None for real targets."""
    highest = [int(y.max()) for y in targets if len(y) and not (y.is_floating_point() or y.is_complex())]
    return max(highest) + 1 if highest else None


def _load_torchvision(argument: str, split: Split) -> Raw:
    """MNIST- and CIFAR-like data sets of torchvision, downloaded by it where they are missing."""
    name, _, folder = argument.partition(":")
    try:
        from torchvision import datasets
    except ImportError:
        raise SpiritLevelError(
            f"'torchvision:{argument}' needs torchvision, which is not installed: pip install torchvision"
        ) from None
    known = ("MNIST", "FashionMNIST", "KMNIST", "CIFAR10", "CIFAR100")
    if name not in known or not folder:
        raise SpiritLevelError(
            f"write 'torchvision:NAME:FOLDER' with NAME one of {', '.join(known)}, got 'torchvision:{argument}'"
            f"{suggest(name, known) if name not in known else ''}"
        )
    loaded = getattr(datasets, name)(folder, train=split == "train", download=True)
    x, y = torch.as_tensor(loaded.data), torch.as_tensor(loaded.targets)
    return Raw(x.permute(0, 3, 1, 2) if x.dim() == 4 else x.unsqueeze(1), y, len(loaded.classes))


SOURCES: dict[str, _Source] = {
    "digits": _Source(_load_digits, "", "1797 handwritten digits, 8×8, embedded in scikit-learn"),
    "mnist": _Source(
        lambda folder, split: load_idx(folder, split, ("mnist", "MNIST/raw")),
        "FOLDER",
        "70,000 handwritten digits, 28×28, from idx files, plain or .gz",
    ),
    "fashion-mnist": _Source(
        lambda folder, split: load_idx(folder, split, ("fashion-mnist", "FashionMNIST/raw")),
        "FOLDER",
        "70,000 articles of clothing, 28×28, from idx files, plain or .gz",
    ),
    "cifar10": _Source(load_cifar10, "FOLDER", "60,000 colour images, 32×32, from the binary version"),
    "random": _Source(_load_random, "N,SHAPE,CLASSES,SEED", "Gaussian samples with random labels"),
    "torchvision": _Source(_load_torchvision, "NAME:FOLDER", "torchvision's own copy, where torchvision is installed"),
}
