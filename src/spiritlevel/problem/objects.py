"""Batches that are neither tensors nor tuples (graphs, records, named tuples), and the tensors in them.

A loss of the form (model, batch) may take any object. It is opened as far as its tensors are needed: to move them to a
device or a precision, to see that a second pass brings the same ones, and to count samples.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

Change = Callable[[Tensor], Tensor]


def tensors_of(tree: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists, dicts and objects, in a fixed order.

    >>> import torch, types
    >>> graph = types.SimpleNamespace(x=torch.ones(3, 2), edges=torch.zeros(2, 4), name="triangle")
    >>> [tuple(tensor.shape) for tensor in tensors_of([graph, torch.ones(1)])]
    [(3, 2), (2, 4), (1,)]
    """
    return [tensor for leaf in tree_leaves(tree) for tensor in _of_leaf(leaf)]


def _of_leaf(leaf: Any) -> Iterator[Tensor]:
    if isinstance(leaf, Tensor):
        yield leaf
    else:
        for _, part in _entries(leaf):
            yield from tensors_of(part)


def with_tensors(tree: Any, change: Change) -> Any:
    """The same with every tensor changed; objects that hold tensors are copied, all else is kept.

    >>> import torch, types
    >>> graph = types.SimpleNamespace(x=torch.ones(3, 2), name="triangle")
    >>> with_tensors(graph, lambda tensor: tensor[:1]).x.shape, graph.x.shape
    (torch.Size([1, 2]), torch.Size([3, 2]))
    """

    def each(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        return _changed(leaf, change) if any(True for _ in _of_leaf(leaf)) else leaf

    return tree_map(each, tree)


def _changed(holder: Any, change: Change) -> Any:
    made = copy.copy(holder)
    for name, part in list(_entries(holder)):
        if any(True for _ in tensors_of(part)):
            _put(made, name, with_tensors(part, change))
    return made


def _put(holder: Any, name: str, part: Any) -> None:
    if _has_keys(holder):
        holder[name] = part
    else:
        object.__setattr__(holder, name, part)  # a frozen record's copy is ours


def _entries(holder: Any) -> Iterator[tuple[str, Any]]:
    """Name and content of what an object holds: by its keys where it has some, else its attributes."""
    if isinstance(holder, type) or callable(holder):
        return
    if _has_keys(holder):
        names = holder.keys() if callable(holder.keys) else holder.keys
        yield from ((name, holder[name]) for name in names)
    elif dataclasses.is_dataclass(holder):
        yield from ((field.name, getattr(holder, field.name)) for field in dataclasses.fields(holder))
    elif type(holder).__module__ != "builtins" and hasattr(holder, "__dict__"):
        yield from vars(holder).items()


def _has_keys(holder: Any) -> bool:
    """Graphs of PyTorch Geometric and the like: entries by name, though they are no mappings."""
    return isinstance(holder, Mapping) or (hasattr(holder, "keys") and hasattr(type(holder), "__setitem__"))


def is_one_batch(source: Any) -> bool:
    """Whether data is a single batch by itself: a tensor, a dict of tensors, a graph."""
    if isinstance(source, Tensor):
        return True
    return _has_keys(source) and bool(tensors_of(source))
