"""The pickles of CIFAR-10's python version, read without executing what they say."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from spiritlevel.errors import SpiritLevelError


def read_data_pickle(path: Path) -> dict[Any, Any]:
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


class Array(_Standin):
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


class _BufferArray(Array):
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
        ("numpy.core.multiarray", "_reconstruct"): Array,
        ("numpy._core.multiarray", "_reconstruct"): Array,
        ("numpy", "ndarray"): Array,
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
