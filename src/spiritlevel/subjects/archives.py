"""Packed files, read without trusting what they say about their size.

A header can promise any number of bytes, and a packed file can hold a thousand times what it weighs. What a file would
unpack to is compared with its size before anything is unpacked, and nothing is allocated on the word of a header.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from spiritlevel.errors import SpiritLevelError

# Real data shrink to a third or a tenth. A file that unpacks to more than this many times its size is refused, unless
# it is small enough to do no harm.
MOST_TIMES = 100
HARMLESS = 256 * 2**20
# Bytes that one byte of a deflated file can become at most.
DEFLATE_TIMES = 1032

_NPY_MAGIC = b"\x93NUMPY"
_PIECE = 1 << 20


class Readable(Protocol):
    """Anything that gives bytes."""

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes."""


def check_unpacked(path: Path, packed: int, unpacked: int) -> None:
    """Refuse a file that unpacks to far more than it weighs."""
    if unpacked > max(HARMLESS, MOST_TIMES * packed):
        raise SpiritLevelError(
            f"{path} is refused: its {packed:,} bytes would unpack to {unpacked:,}, more than {MOST_TIMES} times as many, "
            "which no real data do. If it is yours, store it without compression"
        )


def read_at_most(stream: Readable, count: int) -> bytearray:
    """Up to `count` bytes in pieces, so that a header that lies about its size allocates nothing."""
    content = bytearray()
    while len(content) < count and (piece := stream.read(min(count - len(content), _PIECE))):
        content += piece
    return content


def zip_sizes(path: Path) -> tuple[int, int]:
    """How many bytes a zip file has, and how many it says that its members unpack to, all together."""
    with zipfile.ZipFile(path) as archive:
        return path.stat().st_size, sum(member.file_size for member in archive.infolist())


class Npz:
    """The arrays in an open `.npz` file, which is at `path`."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        start = stream.read(len(_NPY_MAGIC))
        stream.seek(0)
        if start == _NPY_MAGIC:
            raise SpiritLevelError(f"{path} is a single array; an archive is needed: np.savez({path.name!r}, x=x, y=y)")
        if not start:
            raise ValueError("No data left in file")
        if start[:2] != b"PK":
            raise ValueError("it is not an archive of arrays; objects are not read, as with allow_pickle=False")
        self.path, self.packed = path, path.stat().st_size
        self.archive = zipfile.ZipFile(stream)
        self.members = {
            member.filename.removesuffix(".npy"): member
            for member in self.archive.infolist()
            if member.filename.endswith(".npy")
        }

    def arrays(self, names: Iterable[str]) -> dict[str, NDArray[Any]]:
        """The arrays of these names; refused if together they unpack to far more than the file weighs."""
        wanted = {name: self.members[name] for name in names}
        check_unpacked(self.path, self.packed, sum(member.file_size for member in wanted.values()))
        return {name: self._array(name, member) for name, member in wanted.items()}

    def _array(self, name: str, member: zipfile.ZipInfo) -> NDArray[Any]:
        with self.archive.open(member) as stream:
            shape, fortran, dtype = _npy_header(stream)
            if dtype.hasobject:
                raise ValueError(f"Object arrays cannot be loaded: {name}")
            promised, present = math.prod(shape) * dtype.itemsize, member.file_size - stream.tell()
            if promised != present:
                raise SpiritLevelError(
                    f"{self.path}: the header of {name} promises {'×'.join(map(str, shape))} entries of {dtype}, "
                    f"{promised:,} bytes, but {present:,} follow; the file is damaged, write it again"
                )
            content = read_at_most(stream, present)
        if len(content) != present:
            raise ValueError(f"array {name} ends after {len(content):,} of {present:,} bytes")
        return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


def _npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran order, and dtype, as an array in an archive begins."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(stream)
    if version not in readers:  # the third is for records with named fields, which are not arrays of numbers
        raise ValueError(f"arrays of format {version} are not read")
    shape, fortran, dtype = readers[version](stream)
    if any(side < 0 for side in shape):
        raise ValueError(f"an array has the shape {shape}")
    return shape, fortran, dtype
