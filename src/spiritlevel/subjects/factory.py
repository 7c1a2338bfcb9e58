"""A callable by the name `package.module:name`, found in the working directory too."""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from spiritlevel.errors import SpiritLevelError, suggest


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
