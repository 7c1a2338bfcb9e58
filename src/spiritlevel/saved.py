"""How results are written and read: whole files or none, a tag that says what they hold, and numbers that JSON lacks."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import json
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Format:
    """A kind of saved result: the tag that its files carry, what messages call it, and how its JSON is indented."""

    tag: str
    what: str
    indent: int | None = 1

    def document(self, result: Any, **further: str) -> dict[str, Any]:
        """A result, or a mapping of its parts, as plain numbers, lists and strings under the tag.

        >>> Format("report-1", "report").document({"loss": float("nan")}, kind="short")
        {'format': 'report-1', 'kind': 'short', 'loss': 'nan'}
        """
        return {"format": self.tag, **further, **json_ready(_parts(result))}

    def parts(self, document: Any) -> dict[str, Any]:
        """What a document holds besides the tag; a document of another format is refused.

        >>> Format("report-1", "report").parts({"format": "report-1", "loss": "nan"})
        {'loss': 'nan'}
        """
        found = document.get("format") if isinstance(document, Mapping) else None
        if found != self.tag:
            raise ValueError(f"not a saved {self.what}: its format is {found!r}, needed is {self.tag!r}")
        return {key: part for key, part in document.items() if key != "format"}

    def save(self, path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
        """Write a document as JSON; a file that exists at `path` afterwards is whole."""
        write_json(path, document, self.indent)

    def text(self, document: Mapping[str, Any]) -> str:
        """A document as the text that `save` writes."""
        return json.dumps(document, indent=self.indent, allow_nan=False)

    def load(self, path: str | os.PathLike[str]) -> Any:
        """The document in a file, for `parts` to check; a file that is not JSON is refused."""
        try:
            return json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a saved {self.what}: {path} is not JSON ({error})") from None


class Saved:
    """A result that is written to one JSON file and read from it. A subclass names its format and how parts become a result.

    >>> import tempfile
    >>> @dataclasses.dataclass(frozen=True)
    ... class Answer(Saved):
    ...     value: float
    ...     _format = Format("answer-1", "answer")
    ...     @classmethod
    ...     def _from_parts(cls, parts):
    ...         return cls(number(parts["value"]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Answer(math.inf).save(f"{folder}/answer.json")
    ...     Answer.load(f"{folder}/answer.json")
    Answer(value=inf)
    """

    _format: ClassVar[Format]

    @classmethod
    def _from_parts(cls, parts: dict[str, Any]) -> Self:
        """The result from what `to_dict` gives besides the tag of the format."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and strings: what `save` writes. A number that is not finite becomes a string."""
        return self._format.document(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The result that `to_dict` described."""
        return cls._from_parts(cls._format.parts(plain))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON; a file that exists at `path` afterwards is whole."""
        self._format.save(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote."""
        return cls.from_dict(cls._format.load(path))


# Where names stand for what a process has open.
STREAMS = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))

# --- files ---------------------------------------------------------------------------------------------------------


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any], indent: int | None = 1) -> None:
    """Write `content` as JSON, whole or not at all; a number that is not finite is refused (`json_ready` replaces it)."""
    write_whole(path, json.dumps(content, indent=indent, allow_nan=False))


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file that is never seen half written, not even after the machine died.

    Through a temporary file beside it, which is flushed to the disk and then renamed. A link is followed. A device or a
    pipe, such as /dev/stdout, is written into: a rename would put a file in its place.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if _is_stream(Path(path)):
            with Path(path).open("wb") as stream:
                stream.write(data)
        else:
            _replace(Path(os.path.realpath(path)), data)
    except OSError as error:  # that the disk is full does not say which
        if error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from error


def _is_stream(path: Path) -> bool:
    """A device, a pipe or a name for an open file."""
    if path.absolute().parent in STREAMS:
        return path.exists()
    return path.exists() and not path.is_file() and not path.is_dir()


def remove_halves(path: Path) -> None:
    """Delete what is left of writings of this file that were killed. Only who alone writes it may ask for that."""
    for half in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        half.unlink(missing_ok=True)


def _replace(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(target.parent)


def _flush_folder(folder: Path) -> None:
    """Make a new name last. The file is whole without it, and Windows cannot open folders, so that failing is no error."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def user_cache() -> Path:
    """Where to keep what can be made again: a folder in the user's cache, which nodes of a cluster often share."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spiritlevel"


def sha256_of(path: Path) -> str:
    """The sha256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# --- numbers -------------------------------------------------------------------------------------------------------


def json_ready(entry: Any, *, null: bool = False) -> Any:
    """The same in what JSON can hold: a number that is not finite becomes the string that `float` reads.

    With `null` it becomes null instead, which `numbers` reads as nan. Tensors become lists, dataclasses mappings, and a
    result inside another one is what its own `to_dict` gives.

    >>> json_ready({"a": (1.0, float("inf")), "b": "text"})
    {'a': [1.0, 'inf'], 'b': 'text'}
    >>> json_ready({"a": (1.0, float("inf")), "b": "text"}, null=True)
    {'a': [1.0, None], 'b': 'text'}
    """
    if isinstance(entry, float):
        return entry if math.isfinite(entry) else None if null else str(entry)
    if isinstance(entry, list | tuple):
        return [json_ready(item, null=null) for item in entry]
    if isinstance(entry, Mapping):
        return {str(key): json_ready(item, null=null) for key, item in entry.items()}
    if isinstance(entry, Tensor):
        listed = entry.detach().cpu().tolist()
        return listed if bool(entry.isfinite().all()) else json_ready(listed, null=null)
    if dataclasses.is_dataclass(entry):
        return entry.to_dict() if hasattr(entry, "to_dict") else json_ready(_parts(entry), null=null)
    return entry


def _parts(result: Any) -> Mapping[str, Any]:
    if isinstance(result, Mapping):
        return result
    return {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}


def from_json_ready(entry: Any) -> Any:
    """Numbers where `json_ready` put strings; all else stays, so that this is for entries of every kind.

    >>> from_json_ready({"a": [1.0, "inf"], "b": "text"})
    {'a': [1.0, inf], 'b': 'text'}
    """
    if isinstance(entry, Mapping):
        return {key: from_json_ready(item) for key, item in entry.items()}
    if isinstance(entry, list):
        return [from_json_ready(item) for item in entry]
    return float(entry) if isinstance(entry, str) and entry in ("inf", "-inf", "nan") else entry


def number(entry: float | str | None) -> float:
    """A number as `json_ready` wrote it; null stands for nan.

    >>> number(1), number("inf"), number(None)
    (1.0, inf, nan)
    """
    return math.nan if entry is None else float(entry)


def numbers(entry: Any) -> Any:
    """The same for lists and mappings of numbers.

    >>> numbers({"a": [1, "inf"], "b": None})
    {'a': [1.0, inf], 'b': nan}
    """
    if isinstance(entry, Mapping):
        return {key: numbers(item) for key, item in entry.items()}
    if isinstance(entry, list):
        return [numbers(item) for item in entry]
    return number(entry)


def as_tensor(entry: Any) -> Tensor:
    """Nested lists of numbers, as `json_ready` wrote them, as a tensor.

    >>> as_tensor([1.0, "inf"])
    tensor([1., inf], dtype=torch.float64)
    """
    return torch.tensor(numbers(entry), dtype=torch.float64)
