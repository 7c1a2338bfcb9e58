"""Data sets by name: tensors that stay resident, and a fingerprint of every byte of them.

Nothing here executes what a file says: idx and binary files are parsed, `.npz` is read without pickles, and the pickles
of CIFAR-10's python version go through a reader that knows arrays, numbers, text, lists and dictionaries only.
"""

import contextlib
import difflib
import gzip
import hashlib
import importlib
import math
import os
import pickle
import re
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.archives import DEFLATE_TIMES, HARMLESS, MOST_TIMES, Npz, check_unpacked, read_at_most

Split = Literal["train", "test"]


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


class _Raw(NamedTuple):
    """Samples and targets as they are stored; `scale` is the value of a white pixel where x holds bytes."""

    x: Tensor
    y: Tensor
    classes: int | None = None
    scale: int = 255


class _Source(NamedTuple):
    load: Callable[[str, Split], _Raw]
    argument: str
    holds: str


def load_data(spec: str, *, split: Split = "train", samples: int | None = None) -> Dataset:
    """The data set that `spec` names (see `list_data`), or the first `samples` of it.

    Bytes become float32 in [0, 1], other real numbers float32; whole numbers wider than a byte (tokens) stay as they
    are.

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
    x, said = _scaled(raw.x[:count], raw.scale, spec)
    y = y[:count].clone()
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


def import_factory(spec: str, known: Iterable[str] = ()) -> Callable[..., Any]:
    """The callable that `package.module:name` names; modules in the working directory are found too.

    `known` are names that might have been meant instead, for the error.
    """
    module_name, _, name = spec.partition(":")
    with _working_directory_importable():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise SpiritLevelError(
                f"no module named {error.name!r}, needed for {spec!r}; install it, or run from the folder that holds it"
                f"{suggest(module_name, known)}"
            ) from None
    factory = getattr(module, name, None)
    if not callable(factory):
        found = "is not callable" if hasattr(module, name) else "does not exist"
        hint = suggest(name, [n for n in dir(module) if callable(getattr(module, n))])
        raise SpiritLevelError(f"{spec!r} must name a function of {module_name!r}, but {name!r} {found}{hint}")
    return factory  # type: ignore[no-any-return]


def suggest(name: str, known: Iterable[str]) -> str:
    """'; did you mean …?' with the nearest of the `known` names, or nothing where none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


# --- from a spec to raw tensors ---------------------------------------------------------------------------------------

_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def _load_raw(spec: str, split: Split) -> _Raw:
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
    raise SpiritLevelError(f"unknown data set {spec!r}{suggest(name, SOURCES)}; known: {', '.join(list_data())}")


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


def _targets(raw: _Raw, spec: str) -> tuple[Tensor, int]:
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
    _check_labels(y, classes, spec)
    return y, classes


def _check_labels(y: Tensor, classes: int, where: object) -> None:
    bad = ((y < 0) | (y >= classes)).nonzero()
    if len(bad):
        first = int(bad[0])
        raise SpiritLevelError(
            f"{where}: labels must be 0 to {classes - 1}, found {int(y[first])} at sample {first} "
            f"({len(bad)} of {len(y)} out of range); the file is damaged or of another data set"
        )


# --- embedded and synthetic -------------------------------------------------------------------------------------------


def _load_digits(_argument: str, split: Split) -> _Raw:
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
    return _Raw(x, torch.from_numpy(labels[chosen]), classes=10, scale=16)


def _load_random(argument: str, split: Split) -> _Raw:
    """Gaussian x, labels that know nothing of them (rangamani2019, section 3.1); testing data are the next draws."""
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
    return _Raw(x, y, classes)


# --- idx files: MNIST and its relatives -------------------------------------------------------------------------------


def _load_idx(argument: str, split: Split, subfolders: tuple[str, ...]) -> _Raw:
    prefix = "train" if split == "train" else "t10k"
    images_path = _find_file(argument, subfolders, [f"{prefix}-images-idx3-ubyte", f"{prefix}-images.idx3-ubyte"])
    labels_path = _find_file(argument, subfolders, [f"{prefix}-labels-idx1-ubyte", f"{prefix}-labels.idx1-ubyte"])
    images, labels = _read_idx(images_path, 3), _read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise SpiritLevelError(
            f"{images_path} holds {len(images)} images but {labels_path} {len(labels)} labels; "
            "the two files do not belong together"
        )
    _check_labels(labels, 10, labels_path)
    return _Raw(images.unsqueeze(1), labels, classes=10)


def _find_file(folder: str, subfolders: tuple[str, ...], names: list[str]) -> Path:
    names = [name + ending for name in names for ending in ("", ".gz")]
    for place in (*subfolders, "."):
        for name in names:
            path = Path(folder).expanduser() / place / name
            if path.is_file():
                return path
    places = ", ".join(str(Path(folder) / place) for place in (*subfolders, "."))
    raise SpiritLevelError(f"no file {names[0]} (nor {', '.join(names[1:])}) in {places}; say where the data are")


def _read_idx(path: Path, dimensions: int) -> Tensor:
    """The bytes of an idx file: two zeros, type 8, number of dimensions, big-endian sizes, then the values."""
    size, packed = 4 + 4 * dimensions, path.stat().st_size
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            header = read_at_most(stream, size)
            expected = bytes([0, 0, 8, dimensions])
            if header[:4] != expected:
                found = header[:4].hex(" ") or "nothing"
                raise SpiritLevelError(f"{path} must start with the idx magic {expected.hex(' ')}, found {found}")
            if len(header) < size:
                raise SpiritLevelError(f"{path} is truncated: its header has {len(header)} of {size} bytes")
            shape = struct.unpack(f">{dimensions}I", header[4:])
            count = math.prod(shape)
            if path.suffix == ".gz" and count <= DEFLATE_TIMES * packed:  # what promises more is found truncated
                check_unpacked(path, packed, count)
            content = read_at_most(stream, min(count + 1, max(HARMLESS, MOST_TIMES * packed)))
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise SpiritLevelError(f"{path} is not a whole gzip file ({error}); fetch it again") from None
    if len(content) != count:
        found = f"{len(content)} follow" if len(content) < count else "more follow"
        raise SpiritLevelError(
            f"{path} says {'×'.join(map(str, shape))} = {count} bytes in its header, but {found}; fetch it again"
        )
    return (
        torch.frombuffer(content, dtype=torch.uint8).reshape(shape) if count else torch.empty(shape, dtype=torch.uint8)
    )


# --- CIFAR-10 ---------------------------------------------------------------------------------------------------------

_RECORD = 1 + 3 * 32 * 32


def _load_cifar10(argument: str, split: Split) -> _Raw:
    """CIFAR-10 in its binary version where there is one, else in its python version."""
    folder = Path(argument).expanduser()
    names = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    for place, ending in (("cifar-10-batches-bin", ".bin"), (".", ".bin"), ("cifar-10-batches-py", ""), (".", "")):
        paths = [folder / place / (name + ending) for name in names]
        if not any(path.is_file() for path in paths):
            continue
        missing = [str(path) for path in paths if not path.is_file()]
        if missing:
            raise SpiritLevelError(f"CIFAR-10 needs {len(paths)} files for {split}; missing: {', '.join(missing)}")
        read = _read_cifar_binary if ending else _read_cifar_python
        images, labels = zip(*(read(path) for path in paths), strict=True)
        return _Raw(torch.cat(images).reshape(-1, 3, 32, 32), torch.cat(labels), classes=10)
    raise SpiritLevelError(
        f"no {names[0]}.bin (binary version) nor {names[0]} (python version) in {folder}, "
        f"{folder / 'cifar-10-batches-bin'} or {folder / 'cifar-10-batches-py'}; say where the data are"
    )


def _read_cifar_binary(path: Path) -> tuple[Tensor, Tensor]:
    size = path.stat().st_size
    if size == 0 or size % _RECORD:
        raise SpiritLevelError(
            f"{path} must hold records of {_RECORD} bytes (a label and 3×32×32 pixels), found {size} bytes = "
            f"{size // _RECORD} records and {size % _RECORD} bytes; fetch it again"
        )
    records = torch.from_numpy(np.fromfile(path, dtype=np.uint8)).reshape(-1, _RECORD)
    _check_labels(records[:, 0], 10, path)
    return records[:, 1:], records[:, 0]


def _read_cifar_python(path: Path) -> tuple[Tensor, Tensor]:
    batch = _read_data_pickle(path)
    entries = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in batch.items()}
    pixels, labels = entries.get("data"), entries.get("labels")
    if not isinstance(pixels, _Array) or not isinstance(labels, list):
        raise SpiritLevelError(
            f"{path} must hold an array 'data' and a list 'labels', found {sorted(map(str, entries)) or 'nothing'}"
        )
    x = pixels.bytes_of_shape(path)
    if x.ndim != 2 or x.shape[1] != _RECORD - 1 or len(x) != len(labels):
        raise SpiritLevelError(
            f"{path}: 'data' must have shape (N, {_RECORD - 1}) with N labels, found {x.shape} and {len(labels)} labels"
        )
    if not all(isinstance(label, int) and 0 <= label < 10 for label in labels):
        bad = next(i for i, label in enumerate(labels) if not (isinstance(label, int) and 0 <= label < 10))
        raise SpiritLevelError(f"{path}: labels must be 0 to 9, found {labels[bad]!r} at sample {bad}")
    return torch.from_numpy(x), torch.tensor(labels, dtype=torch.int64)


def _read_data_pickle(path: Path) -> dict[Any, Any]:
    """The dictionary in a pickle of plain data. Anything that names other code is refused before it is looked up."""
    try:
        with path.open("rb") as stream:
            batch = _DataUnpickler(stream, encoding="bytes").load()
    except SpiritLevelError as error:
        raise SpiritLevelError(f"{path} {error}") from None
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise SpiritLevelError(f"{path} is not a readable pickle ({error}); fetch it again") from None
    if not isinstance(batch, dict):
        raise SpiritLevelError(f"{path} must hold a dictionary, found {type(batch).__name__}")
    return batch


class _Standin:
    """What the pickle gets in place of numpy's own objects: it records what it is given and runs nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dtype(_Standin):
    pass


class _Array(_Standin):
    def parts(self) -> tuple[Any, Any, Any, Any]:
        """shape, dtype, whether in Fortran order, and the raw bytes."""
        _version, shape, dtype, fortran, content = self.state
        return shape, dtype, fortran, content

    def bytes_of_shape(self, path: Path) -> NDArray[np.uint8]:
        """The array, if it is one of bytes and whole."""
        try:
            shape, dtype, fortran, content = self.parts()
            code = dtype.arguments[0]
            if code not in ("u1", b"u1"):
                raise SpiritLevelError(f"{path}: 'data' must be an array of bytes (u1), found {code!r}")
            if not isinstance(content, bytes | bytearray):
                raise TypeError(f"its content is {type(content).__name__}")
            flat = np.frombuffer(bytearray(content), dtype=np.uint8)
            return np.ascontiguousarray(flat.reshape(shape, order="F" if fortran else "C"))
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            if isinstance(error, SpiritLevelError):
                raise
            raise SpiritLevelError(f"{path}: the array 'data' is damaged ({error}); fetch it again") from None


class _BufferArray(_Array):
    """An array as pickle protocol 5 writes it: _frombuffer(content, dtype, shape, order)."""

    def parts(self) -> tuple[Any, Any, Any, Any]:
        content, dtype, shape, order = self.arguments
        return shape, dtype, order == "F", content


class _Bytes(bytes):
    """What Python 3 writes for bytes in old protocols: text to be encoded in Latin-1."""

    def __new__(cls, text: str, encoding: Any = None) -> "_Bytes":
        if encoding not in ("latin1", b"latin1"):
            raise SpiritLevelError(f"is refused: it asks for the codec {encoding!r}, plain data need none")
        return super().__new__(cls, text.encode("latin1"))

    def __setstate__(self, _state: Any) -> NoReturn:
        raise SpiritLevelError("is refused: it tries to change a string")


class _DataUnpickler(pickle.Unpickler):
    ALLOWED: Mapping[tuple[str, str], type] = {
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): _Array,
        ("numpy.core.numeric", "_frombuffer"): _BufferArray,
        ("numpy._core.numeric", "_frombuffer"): _BufferArray,
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _Bytes,
    }

    def find_class(self, module: str, name: str) -> type:
        """The stand-in for `module.name`; the thing itself is never imported."""
        standin = self.ALLOWED.get((module, name))
        if standin is None:
            raise SpiritLevelError(
                f"is refused: it asks for {module}.{name}, which could run code; only arrays, numbers, text, lists and "
                "dictionaries are read. Fetch the data set again from its official source"
            )
        return standin


# --- files and code of the user ---------------------------------------------------------------------------------------


def _load_npz(path: Path, split: Split) -> _Raw:
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
    return _Raw(tensors["x" + suffix], tensors["y" + suffix], _count_classes(labels))


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


def _load_factory(spec: str, split: Split) -> _Raw:
    made = import_factory(spec, SOURCES)()
    if not isinstance(made, Mapping):
        if split == "test":
            raise SpiritLevelError(f"{spec} returned one data set; for testing return {{'train': ..., 'test': ...}}")
        return _Raw(*_pair(made, spec))
    if split not in made:
        raise SpiritLevelError(f"{spec} returned a dictionary without {split!r}, found {', '.join(map(str, made))}")
    pairs = {key: _pair(made[key], spec) for key in ("train", "test") if key in made}
    return _Raw(*pairs[split], _count_classes([y for _, y in pairs.values()]))


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


def _load_torchvision(argument: str, split: Split) -> _Raw:
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
    return _Raw(x.permute(0, 3, 1, 2) if x.dim() == 4 else x.unsqueeze(1), y, len(loaded.classes))


@contextlib.contextmanager
def _working_directory_importable() -> Iterator[None]:
    try:
        folder = os.getcwd()
    except FileNotFoundError:  # deleted since: nothing is found there, and no reason to fail
        folder = ""
    importlib.invalidate_caches()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


SOURCES: dict[str, _Source] = {
    "digits": _Source(_load_digits, "", "1797 handwritten digits, 8×8, embedded in scikit-learn"),
    "mnist": _Source(
        lambda folder, split: _load_idx(folder, split, ("mnist", "MNIST/raw")),
        "FOLDER",
        "70,000 handwritten digits, 28×28, from idx files, plain or .gz",
    ),
    "fashion-mnist": _Source(
        lambda folder, split: _load_idx(folder, split, ("fashion-mnist", "FashionMNIST/raw")),
        "FOLDER",
        "70,000 articles of clothing, 28×28, from idx files, plain or .gz",
    ),
    "cifar10": _Source(_load_cifar10, "FOLDER", "60,000 colour images, 32×32, from the binary or the python version"),
    "random": _Source(_load_random, "N,SHAPE,CLASSES,SEED", "Gaussian samples with random labels"),
    "torchvision": _Source(_load_torchvision, "NAME:FOLDER", "torchvision's own copy, where torchvision is installed"),
}
