"""A stand-in for the caller's module: the same structure, into which other tensors can be put.

Swapping tensors inside the caller's own module would leave them there if Ctrl-C arrived before they are put back. The
stand-in has its own tables of parameters, buffers, submodules and hooks; tensors and everything else are shared.
"""

from __future__ import annotations

import functools
import operator
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from spiritlevel.errors import SpiritLevelError
from spiritlevel.network.modes import Mode
from spiritlevel.problem.shards import Shards, is_divided
from spiritlevel.problem.wrappers import in_shards, plain, refuse_shards, refuse_wrapper

# What a module looks up by name and may change while it runs: always tables of the stand-in's own.
TABLES = ("_parameters", "_buffers", "_modules")
# What cannot lead to a module; tables of words and numbers may be long.
SIMPLE = (Tensor, str, bytes, int, float, type(None))
# Operations that ask a tensor only for its shape, precision or device, wherever it stands among their arguments, …
ASK_NO_VALUES = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"}
ASK_NO_VALUES |= {"new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"}
# … and those whose first argument alone gives values.
FIRST_GIVES_VALUES = {"to", "type_as", "view_as", "reshape_as", "expand_as"}


def unwrapped(model: Any, notes: list[str], *, shards: bool = False) -> nn.Module:
    """The module beneath torch.compile, a data-parallel wrapper or an exported program: second derivatives and
    sums over processes pass through none of them. A model in shards is refused unless `shards` allows it."""
    while True:
        if isinstance(model, torch.export.ExportedProgram):
            model, wrapper = model.module(), "the exported program"
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model, wrapper = model._orig_mod, "torch.compile"
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model, wrapper = model.module, type(model).__name__
        elif isinstance(model, nn.Module):
            refuse_wrapper(model)
            if not shards:
                refuse_shards(model)
            return model
        else:
            raise SpiritLevelError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        notes.append(f"measured the module beneath {wrapper}")


def replica(module: nn.Module) -> nn.Module | None:
    """A module of the same structure; None where a part of it lives outside Python and cannot be copied."""
    if isinstance(module, torch.jit.ScriptModule):
        raise SpiritLevelError(
            "the model is compiled (torch.jit), so it cannot be computed with other weights: pass the module it was made from"
        )
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        return None
    copied: nn.Module = _Copying(module).of(module)
    return copied


def stand_in(model: nn.Module, shards: Shards, notes: list[str]) -> nn.Module:
    """What the network is computed in: a copy of the structure, or the caller's own module where that has no copy."""
    copied = replica(model)
    if not in_shards(model):
        return copied or model
    if copied is None:
        raise SpiritLevelError("a part of the model is compiled (torch.jit), so it cannot be measured in shards")
    if shards.divided:
        notes.append(
            f"the model is in shards over {shards.size} processes: each weight is gathered for the moment it is used, and "
            "curvature is known from products only"
        )
    return plain(copied)


class _Copying:
    """Copies whatever leads to a module of the tree, each thing once; what does not is shared."""

    def __init__(self, root: nn.Module) -> None:
        self._inside = {id(part) for part in root.modules()}
        self._made: dict[int, Any] = {}
        self._alive: list[Any] = []  # an id is valid only while its object is alive

    def of(self, thing: Any) -> Any:
        if isinstance(thing, SIMPLE):
            return thing
        if id(thing) not in self._made:
            self._alive.append(thing)
            self._made[id(thing)] = thing  # a cycle leads to the original, unless it goes through a module
            self._made[id(thing)] = self._copy(thing)
        return self._made[id(thing)]

    def _copy(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            return self._module(thing) if id(thing) in self._inside else thing
        if isinstance(thing, types.MethodType):
            owner = self.of(thing.__self__)
            return thing if owner is thing.__self__ else types.MethodType(thing.__func__, owner)
        if isinstance(thing, types.FunctionType):
            return self._function(thing)
        if type(thing) is functools.partial:
            return functools.partial(self.of(thing.func), *map(self.of, thing.args), **self.of(thing.keywords))
        if type(thing) in (list, tuple):
            parts = [self.of(entry) for entry in thing]
            return type(thing)(parts) if _differ(parts, thing) else thing
        if isinstance(thing, dict) and not isinstance(thing, nn.Module):
            parts = [self.of(entry) for entry in thing.values()]
            return _filled(thing, parts) if _differ(parts, thing.values()) else thing
        return thing

    def _module(self, module: nn.Module) -> nn.Module:
        copied: nn.Module = object.__new__(type(module))  # a class may build something else in its own __new__
        self._made[id(module)] = copied
        inside = vars(copied)
        for name, value in vars(module).items():
            inside[name] = dict(value) if name in TABLES else value
        for name, value in vars(module).items():
            if name not in TABLES[:2]:
                inside[name] = {key: self.of(part) for key, part in value.items()} if name in TABLES else self.of(value)
        return copied

    def _function(self, function: types.FunctionType) -> Any:
        """A closure over a module of the tree, such as `lambda x: self.inner(x)`, over its copy instead."""
        cells = function.__closure__ or ()
        contents = [_content(cell) for cell in cells]
        parts = [self.of(content) for content in contents]
        if not _differ(parts, contents):
            return function
        closure = tuple(types.CellType(part) for part in parts)
        copied = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
        )
        copied.__kwdefaults__ = function.__kwdefaults__
        copied.__dict__.update(function.__dict__)
        return copied


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return None


def _differ(parts: Any, before: Any) -> bool:
    return any(a is not b for a, b in zip(parts, before, strict=True))


def _filled(table: dict[Any, Any], parts: list[Any]) -> dict[Any, Any]:
    """A table of the same kind with other entries."""
    copied: dict[Any, Any] = table.copy()
    copied.update(zip(table, parts, strict=True))
    return copied


def _as_stored(table: Mapping[Any, Any], key: Any) -> Any:
    """An entry as it is stored, also in the table of a model in shards, which would gather what is read from it."""
    return dict.__getitem__(table, key) if isinstance(table, dict) else table[key]


class Slots:
    """The places where a module and its parts keep their tensors, each once, however many names lead to it.

    `torch.func.functional_call` takes two names of one module for two places, and leaves its tensors in it.
    """

    def __init__(self, module: nn.Module) -> None:
        canonical = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        places = [
            (table, key, canonical[id(tensor)])
            for part in module.modules()
            for table in (part._parameters, part._buffers)
            for key, tensor in table.items()
            if tensor is not None
        ]
        self._tables, self._keys, self._names = [list(column) for column in zip(*places, strict=True)] or [[], [], []]

    def call(self, tensors: Mapping[str, Any], function: Callable[[], Any]) -> Any:
        """function(), while every place holds the tensor of its name. All are filled, and emptied, in one step each."""
        before = list(map(_as_stored, self._tables, self._keys))
        held = [tensors.get(name, original) for name, original in zip(self._names, before, strict=True)]
        try:
            deque(map(operator.setitem, self._tables, self._keys, held), maxlen=0)
            return function()
        finally:
            deque(map(operator.setitem, self._tables, self._keys, before), maxlen=0)


def remembered(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that the modules keep in plain attributes, such as what a forward pass left there."""
    return {
        f"{path}.{name}".lstrip("."): leaf
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in TABLES
        for leaf in (tree_leaves(value) if isinstance(value, list | tuple | dict) else [value])
        if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
    }


# --- does anything reach the caller's own tensors? -------------------------------------------------------------------


class Watch(Mode):
    """Records which of these tensors are read while it is active. Asking for a shape or a precision does not count."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.read: set[str] = set()
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        plain = {name: tensor for name, tensor in tensors.items() if tensor.numel() and not is_divided(tensor)}
        self._places = {tensor.untyped_storage().data_ptr(): name for name, tensor in plain.items()}

    def __torch_function__(
        self, function: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name not in ASK_NO_VALUES and any(map(_holds_values, tree_leaves(result))):
            asked = args[:1] if name in FIRST_GIVES_VALUES else (args, kwargs)
            self.read.update(found for leaf in tree_leaves(asked) if (found := self._name(leaf)) is not None)
        return result

    def _name(self, leaf: Any) -> str | None:
        if not isinstance(leaf, Tensor):
            return None
        if id(leaf) in self._names:
            return self._names[id(leaf)]
        try:
            return self._places.get(leaf.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError):  # sparse tensors and those inside transforms have no storage
            return None


def _holds_values(leaf: Any) -> bool:
    """Whether a result can carry numbers of a tensor: shapes, precisions, flags and counts cannot."""
    return isinstance(leaf, Tensor) or not isinstance(leaf, int | str | type(None) | torch.dtype | torch.device)


@contextmanager
def watching(tensors: Mapping[str, Tensor]) -> Iterator[set[str]]:
    """The names of the tensors that are read inside, as they are found."""
    watch = Watch(tensors)
    with watch:
        yield watch.read
