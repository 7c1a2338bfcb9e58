"""How a result is shown, found without the result knowing it: what is above registers its views here.

`spiritlevel/__init__.py` says which module shows which kind of result. That module is imported when one is first shown,
and registers its functions. So `print(report)` works, and nothing that computes names anything that draws.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from spiritlevel.saved import write_whole

_FACTS: ContextVar[Mapping[str, str]] = ContextVar("facts")
_MODULES: dict[type, str] = {}
_VIEWS: dict[tuple[type, str], Callable[..., Any]] = {}


def shown_by(kind: type, module: str) -> None:
    """`module` registers the views of `kind`; it is imported when one is first shown."""
    _MODULES[kind] = module


def register(kind: type, **views: Callable[..., Any]) -> None:
    """Functions of a result by what they make of it: `text`, `page`, `fragment`, `section`, `drawing`.

    >>> class Answer: ...
    >>> shown_by(Answer, "spiritlevel.presenting")
    >>> register(Answer, text=lambda answer: "42")
    >>> show(Answer(), "text")
    '42'
    """
    _VIEWS.update({(kind, view): function for view, function in views.items()})


def show(result: object, view: str, **options: Any) -> Any:
    """The result in one of its views."""
    kind = next((each for each in type(result).__mro__ if each in _MODULES), None)
    if kind is None:
        known = ", ".join(each.__name__ for each in _MODULES)
        raise TypeError(f"a {type(result).__name__} cannot be shown; what can is {known}")
    importlib.import_module(_MODULES[kind])
    if (kind, view) not in _VIEWS:
        known = ", ".join(name for owner, name in _VIEWS if owner is kind)
        raise TypeError(f"a {kind.__name__} has no view {view!r}; it has {known}")
    return _VIEWS[kind, view](result, **options)


class Shown:
    """A result that prints as a table and writes a page, by its views `text` and `page`."""

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page."""
        write_whole(path, show(self, "page"))

    def __str__(self) -> str:
        return str(show(self, "text"))


def set_facts(facts: Mapping[str, str]) -> None:
    """Say what is measured from now on: data, samples, preprocessing, checkpoint, command. Every page written says it."""
    _FACTS.set(dict(facts))


def facts() -> Mapping[str, str]:
    """What was last said to be measured.

    >>> set_facts({"data": "digits"}), facts(), set_facts({})
    (None, {'data': 'digits'}, None)
    """
    return _FACTS.get({})
