"""Modes that watch torch's functions and that an interruption cannot leave behind."""

from __future__ import annotations

from typing import Any

from torch import _C
from torch.overrides import TorchFunctionMode


def depth() -> int:
    """How many modes are active."""
    return int(_C._len_torch_function_stack())


def drop_above(before: int) -> None:
    """Remove modes until only `before` are left: Ctrl-C can arrive between a mode's start and its end."""
    while depth() > before:
        _C._pop_torch_function_stack()


def saved_tensor_hooks() -> Any:
    """What packs and unpacks the tensors that autograd saves, or None."""
    return _C._autograd._top_saved_tensors_default_hooks(True)


def drop_hooks_above(before: Any) -> None:
    """Remove hooks on saved tensors until those are left that were there before: left behind, they make torch.func refuse to work."""
    while (top := saved_tensor_hooks()) is not None:
        if before is not None and all(own is other for own, other in zip(top, before, strict=True)):
            return
        _C._autograd._pop_saved_tensors_default_hooks()


def is_transformed() -> bool:
    """Whether the network is inside a transform of its own, torch.func.grad or vmap: its tensors are wrapped then."""
    return _C._functorch.peek_interpreter_stack() is not None


class Mode(TorchFunctionMode):
    """A mode that on leaving removes itself and all modes above it, or nothing if an interruption removed it before.

    torch's own modes remove whatever is on top, and fail on an empty stack, which would hide the Ctrl-C. If torch
    renames the two functions of its stack used here, the tests of interruptions fail.
    """

    def __enter__(self) -> Any:
        self._before = depth()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        drop_above(self._before)
