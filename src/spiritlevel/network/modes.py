"""Modes that watch torch's functions and that an interruption cannot leave behind."""

from __future__ import annotations

from typing import Any

from torch import _C
from torch.overrides import TorchFunctionMode


def depth() -> int:
    """How many modes are at work."""
    return int(_C._len_torch_function_stack())


def drop_above(before: int) -> None:
    """Take off what was put on since there were `before` modes: Ctrl-C may strike between a mode's start and its end."""
    while depth() > before:
        _C._pop_torch_function_stack()


class Mode(TorchFunctionMode):
    """A mode whose end takes off what is on top of it and itself, and nothing where torch lost it to an interruption.

    torch's own takes off whatever is on top, and fails where there is nothing: it would hide the Ctrl-C. If torch renames the
    two functions of its stack used here, the tests of interruptions fail.
    """

    def __enter__(self) -> Any:
        self._before = depth()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        drop_above(self._before)
