"""A folder behind a URL: of an object store, or of whatever else fsspec reaches. Files by their names in it, errors in words.

A file that can be read is whole: an object appears when all of it is there, and where there are folders a file is written under
another name and renamed.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from spiritlevel.errors import SpiritLevelError, suggest

# Seconds before a store that did not answer is asked again.
PAUSES = (0.5, 2.0, 8.0)
# What serves a protocol that fsspec knows and does not bring along.
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
             "oci": "ocifs", "oss": "ossfs", "sftp": "paramiko", "ssh": "paramiko", "hdfs": "pyarrow", "hf": "huggingface_hub",
             "http": "aiohttp", "https": "aiohttp"}  # fmt: skip
# Objects in buckets: there are no folders to be made, and a bucket of a mistyped name is not made.
_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "hf"})
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*://")
# Asked again, a store would answer the same.
_FINAL = (PermissionError, IsADirectoryError, FileExistsError, NotImplementedError, ImportError, ValueError, TypeError)
_ABSENT = (FileNotFoundError, NotADirectoryError)


class StoreError(OSError):
    """A store that does not do what it was asked for: where, and why in words."""

    def __init__(self, where: str, words: str) -> None:
        super().__init__(errno.EIO, words, where)


def is_url(place: str) -> bool:
    """Whether a folder is given by a URL.

    >>> is_url("s3://bucket/study"), is_url("out/study"), is_url("C:/study")
    (True, False, False)
    """
    return _URL.match(place) is not None


class Store:
    """The files below a URL, by their names relative to it."""

    def __init__(self, url: str) -> None:
        self.fs, self.root = _opened(url)
        self.protocol = url.partition("://")[0].lower()
        local = self.protocol in ("file", "local")  # where it is must not depend on the folder somebody stands in
        self.url = Path(os.path.abspath(self.root)).as_uri() if local else url.rstrip("/")

    def _path(self, name: str) -> str:
        return posixpath.join(self.root, name) if name else self.root

    def names(self, under: str = "") -> set[str]:
        """All files, or those below a folder."""
        self.fs.invalidate_cache()  # others write here, too
        try:
            found = self._ask("listed", under, self.fs.find, self._path(under))
        except _ABSENT:
            return set()
        root = self.root.rstrip("/") + "/"
        return {path.removeprefix(root) for path in found if path.startswith(root)}

    def read(self, name: str) -> bytes | None:
        """The content of a file; None where there is none."""
        try:
            return bytes(self._ask("read", name, self.fs.cat_file, self._path(name)))
        except _ABSENT:
            return None

    def get(self, names: Iterable[str], folder: Path) -> None:
        """Copy files that are there into a folder."""
        wanted = sorted(names)
        targets = [folder / name for name in wanted]
        for parent in {target.parent for target in targets}:
            parent.mkdir(parents=True, exist_ok=True)
        if wanted:
            self._do("read", wanted, self.fs.get, [*map(self._path, wanted)], [*map(str, targets)])

    def put(self, names: Iterable[str], folder: Path, *, make: bool = False) -> None:
        """Copy files out of a folder; with `make`, folders are made where the store has such and lacks them."""
        wanted = sorted(names)
        if self.protocol in _BUCKETS and wanted:
            sources = [str(folder / name) for name in wanted]
            self._do("written", wanted, self.fs.put, sources, [*map(self._path, wanted)])
            return
        for parent in sorted({posixpath.dirname(self._path(name)) for name in wanted}) if make else ():
            self._do("written", wanted, self.fs.makedirs, parent, exist_ok=True)
        for name in wanted:
            self._do("written", [name], self._replace, folder / name, self._path(name))

    def _replace(self, source: Path, path: str) -> None:
        head, tail = posixpath.split(path)
        part = posixpath.join(head, f".{tail}.{os.getpid()}.part")
        # Some of fsspec's file systems make missing folders by themselves: a folder that was deleted stays deleted.
        if not self.fs.isdir(head):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), head)
        self.fs.put_file(str(source), part)
        self.fs.mv(part, path)

    def remove(self, names: Iterable[str]) -> None:
        """Delete files; what is not there need not be deleted."""
        for name in names:
            try:
                self._ask("deleted", name, self.fs.rm_file, self._path(name))
            except _ABSENT:
                continue

    def _do(self, done: str, names: Sequence[str], function: Callable[..., Any], *given: Any, **named: Any) -> None:
        """Ask for something that has to succeed."""
        try:
            self._ask(done, names[0], function, *given, **named)
        except _ABSENT as error:
            raise StoreError(self._where(names[0]), f"cannot be {done}: {_in_words(error)}") from None

    def _ask(self, done: str, name: str, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """What the store answers; that something is not there is for the caller to judge, and so is a full disk."""
        for pause in (*PAUSES, None):
            try:
                return function(*given, **named)
            except _ABSENT:
                raise
            except Exception as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if pause is None or isinstance(error, _FINAL) or _lacks_credentials(error):
                    raise StoreError(self._where(name), f"cannot be {done}: {_in_words(error)}") from None
                time.sleep(pause)
        return None

    def _where(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url


def _lacks_credentials(error: Exception) -> bool:
    return "credential" in type(error).__name__.lower()


def _in_words(error: Exception) -> str:
    """What went wrong, in a line."""
    said = getattr(error, "strerror", None) or next((line for line in str(error).splitlines() if line.strip()), "")
    kinds = {
        "no permission": isinstance(error, PermissionError),
        "no credentials": _lacks_credentials(error),
        "it is not there": isinstance(error, _ABSENT),
        "this kind of store cannot do that": isinstance(error, NotImplementedError),
        "not reachable": isinstance(error, ConnectionError | TimeoutError) or "Connect" in type(error).__name__,
    }
    kind = next((words for words, applies in kinds.items() if applies), type(error).__name__)
    return f"{kind} ({said.strip()})" if said.strip() else kind


def _opened(url: str) -> tuple[Any, str]:
    """What fsspec has for a URL: the file system, and the folder in it."""
    try:
        import fsspec
    except ImportError:
        raise SpiritLevelError(
            f'{url} is reached through fsspec, which is not installed: pip install "spiritlevel[objectstore]"'
        ) from None
    protocol = url.partition("://")[0]
    if "::" in url:
        raise SpiritLevelError(f"{url} is a chain of file systems; give the URL of the store itself: s3://bucket/study")
    if protocol not in fsspec.available_protocols():
        near = suggest(protocol, fsspec.available_protocols())
        raise SpiritLevelError(
            f"{url}: fsspec knows no protocol {protocol!r}{near or '; s3, gs, az and file are some'}"
        )
    try:
        found, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        remedy = f"pip install {package}" if package else str(error)
        raise SpiritLevelError(f"{url}: {protocol}:// needs a package that is not installed: {remedy}") from None
    except Exception as error:
        raise StoreError(url, f"cannot be opened: {_in_words(error)}") from None
    return found, root
