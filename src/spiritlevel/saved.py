"""How results are written and read: whole files or none, and the numbers that JSON lacks as strings."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` through a temporary file and a rename, so that a reader never sees half of it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def as_plain(entry: Any) -> Any:
    """Tensors to nested lists, non-finite floats to strings, mappings and sequences entry by entry."""
    if isinstance(entry, Tensor):
        return as_plain(entry.detach().cpu().tolist())
    if isinstance(entry, float):
        return entry if math.isfinite(entry) else str(entry)
    if isinstance(entry, Mapping):
        return {str(key): as_plain(item) for key, item in entry.items()}
    if isinstance(entry, list | tuple):
        return [as_plain(item) for item in entry]
    return entry


def json_ready(entry: Any) -> Any:
    """The same in what JSON can hold: a number that is not finite becomes the string that `float` reads.

    >>> json_ready({"a": (1.0, float("inf")), "b": "text"})
    {'a': [1.0, 'inf'], 'b': 'text'}
    """
    return as_plain(entry)


def from_json_ready(entry: Any) -> Any:
    """Numbers where `json_ready` put strings.

    >>> from_json_ready({"a": [1.0, "inf"], "b": "text"})
    {'a': [1.0, inf], 'b': 'text'}
    """
    if isinstance(entry, Mapping):
        return {key: from_json_ready(item) for key, item in entry.items()}
    if isinstance(entry, list):
        return [from_json_ready(item) for item in entry]
    return float(entry) if isinstance(entry, str) and entry in ("inf", "-inf", "nan") else entry


def as_number(plain: float | str) -> float:
    return float(plain)


def as_tensor(plain: Any) -> Tensor:
    def numbers(entry: Any) -> Any:
        return [numbers(item) for item in entry] if isinstance(entry, list) else float(entry)

    return torch.tensor(numbers(plain), dtype=torch.float64)
