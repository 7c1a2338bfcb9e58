"""How much memory autograd keeps of a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spiritlevel.problem.shards import SavedBytes, Shards


def bytes_kept(shards: Shards, run: Callable[[], Any], known: set[int]) -> int:
    """What autograd keeps of what `run` returns, other than the storages in `known`.

    A network that calls torch.func.grad itself lets nobody watch what is saved: then it is what all operations make.
    """
    try:
        with shards.counting(known) as saved:
            kept = run()
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        with _Made(known) as made:
            kept = run()
        saved = made.saved
    del kept
    return saved.bytes


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what operations make."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved, self._seen = SavedBytes(), set(known)
        self._results: list[Tensor] = []  # as long as they live, no other has their place in memory

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for result in tree_leaves(found):
            if isinstance(result, Tensor):
                self.saved.add(result, self._seen)
                self._results.append(result)
        return found
