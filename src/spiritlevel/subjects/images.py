"""MNIST and CIFAR-10 from their files, idx and binary."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spiritlevel.errors import SpiritLevelError
from spiritlevel.subjects.archives import DEFLATE_TIMES, HARMLESS, MOST_TIMES, check_unpacked, read_at_most
from spiritlevel.subjects.raw import Raw, Split, check_labels


def load_idx(argument: str, split: Split, subfolders: tuple[str, ...]) -> Raw:
    prefix = "train" if split == "train" else "t10k"
    images_path = _find_file(argument, subfolders, [f"{prefix}-images-idx3-ubyte", f"{prefix}-images.idx3-ubyte"])
    labels_path = _find_file(argument, subfolders, [f"{prefix}-labels-idx1-ubyte", f"{prefix}-labels.idx1-ubyte"])
    images, labels = _read_idx(images_path, 3), _read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise SpiritLevelError(
            f"{images_path} holds {len(images)} images but {labels_path} {len(labels)} labels; "
            "the two files do not belong together"
        )
    check_labels(labels, 10, labels_path)
    return Raw(images.unsqueeze(1), labels, classes=10)


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


_RECORD = 1 + 3 * 32 * 32


def load_cifar10(argument: str, split: Split) -> Raw:
    """CIFAR-10 in its binary version; the python version consists of pickles, which are not opened."""
    folder = Path(argument).expanduser()
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if split == "train" else ["test_batch.bin"]
    for place in (folder / "cifar-10-batches-bin", folder):
        paths = [place / name for name in names]
        missing = [str(path) for path in paths if not path.is_file()]
        if len(missing) == len(paths):
            continue
        if missing:
            raise SpiritLevelError(f"CIFAR-10 needs {len(paths)} files for {split}; missing: {', '.join(missing)}")
        images, labels = zip(*(_read_cifar_binary(path) for path in paths), strict=True)
        return Raw(torch.cat(images).reshape(-1, 3, 32, 32), torch.cat(labels), classes=10)
    raise SpiritLevelError(f"no {names[0]} in {folder / 'cifar-10-batches-bin'} or {folder}; {_what_to_do(folder)}")


def _what_to_do(folder: Path) -> str:
    """Where CIFAR-10 was not found: which of its downloads is needed, if the other one is there."""
    if not any((place / "test_batch").is_file() for place in (folder / "cifar-10-batches-py", folder)):
        return "say where the data are"
    return (
        "its python version is there, whose files are pickles and are not read: download the binary version, "
        "cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html, and unpack it in that folder"
    )


def _read_cifar_binary(path: Path) -> tuple[Tensor, Tensor]:
    size = path.stat().st_size
    if size == 0 or size % _RECORD:
        raise SpiritLevelError(
            f"{path} must hold records of {_RECORD} bytes (a label and 3×32×32 pixels), found {size} bytes = "
            f"{size // _RECORD} records and {size % _RECORD} bytes; fetch it again"
        )
    records = torch.from_numpy(np.fromfile(path, dtype=np.uint8)).reshape(-1, _RECORD)
    check_labels(records[:, 0], 10, path)
    return records[:, 1:], records[:, 0]
