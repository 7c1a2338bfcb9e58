"""What a network or a loss of the user's own is: the code behind its name, and what that code builds.

A name such as `package.module:factory` says nothing about the code, which can be edited between two runs. Settings of
this library need no such care: its version is part of a cell's name.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from torch import nn

from spiritlevel.study.settings import CellConfig
from spiritlevel.study.train import build
from spiritlevel.subjects.data import Dataset
from spiritlevel.subjects.factory import import_factory
from spiritlevel.subjects.networks import is_own_model

_INSTALLED = {"site-packages", "dist-packages"}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# The seed of the network that is looked at: what a network prints of itself must not depend on the cell's own.
_SEED = 0


class Code(NamedTuple):
    """Digests of the user's own code that a cell runs; empty where it runs none."""

    network: str = ""
    losses: str = ""


NO_CODE = Code()


def code_of(config: CellConfig, data: Dataset) -> Code:
    """The digests of a cell's network, as it is built for `data`, and of its losses."""
    losses = [under.loss for under in (config.measure, *config.measure.also) if ":" in under.loss]
    return Code(
        network_digest(config, data) if is_own_model(config.model.name) else "",
        _digest(source_of(loss) for loss in losses) if losses else "",
    )


def network_digest(config: CellConfig, data: Dataset) -> str:
    """A digest of the source of a network, of the names and shapes of its weights, and of what it prints of itself."""
    model = build(config.model_copy(update={"seed": _SEED}), data)
    classes = {type(module).__module__ for module in model.modules()}
    return _digest([source_of(config.model.name, classes), *_weights(model), *_printed(model)])


def source_of(spec: str, further: Iterable[str] = ()) -> str:
    """A digest of the code in the module of `package.module:name` and in the user's own modules that it imports.

    Comments and layout do not count. Installed packages are not followed.
    """
    import_factory(spec)
    first = spec.partition(":")[0]
    found: dict[str, str] = {}
    waiting = [first, *sorted(further)]
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if module is None or name in found or (name != first and not _is_own(module)):
            continue
        text = _source(module)
        found[name] = _without_comments(text)
        waiting += _imported(text, module)
    return _digest(f"{name}\n{text}" for name, text in sorted(found.items()))


def _is_own(module: ModuleType) -> bool:
    """Whether a module is neither part of Python, nor installed, nor of this library."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] == "spiritlevel":
        return False
    if not _INSTALLED.isdisjoint(Path(file).parts):
        return False
    return not any(Path(file).is_relative_to(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib"))


def _source(module: ModuleType) -> str:
    """The source text of a module; empty where there is none, as for a notebook's cells or compiled code."""
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py"):
        return ""
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _without_comments(text: str) -> str:
    try:
        return ast.unparse(ast.parse(text))
    except (SyntaxError, RecursionError):  # edited since it was imported, or deeper than Python follows
        return text


def _imported(text: str, module: ModuleType) -> Iterator[str]:
    """The names of modules that a text may import; who imports a name from a module imports that module too."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, RecursionError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (name for alias in node.names for name in _with_parents(alias.name))
        elif isinstance(node, ast.ImportFrom):
            base = _absolute("." * node.level + (node.module or ""), module)
            yield from _with_parents(base)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _absolute(name: str, module: ModuleType) -> str:
    try:
        return importlib.util.resolve_name(name, getattr(module, "__package__", None) or "")
    except ImportError:
        return name.lstrip(".")


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _weights(model: nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield f"{name} {tuple(buffer.shape)} {buffer.dtype}"


def _printed(model: nn.Module) -> Iterator[str]:
    """What the network prints of itself, without addresses and the order of sets, which differ between processes."""
    for line in _ADDRESS.sub("", repr(model)).splitlines():
        yield " ".join(sorted(re.findall(r"[^\s,{}()\[\]]+", line)))


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()
