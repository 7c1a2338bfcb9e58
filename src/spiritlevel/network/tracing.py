"""What one forward pass shows of a network: its layers, and which parameters an operation bends.

Every tensor carries the set of parameters it depends on, and an operation that bends one of them (GELU, softmax, a
product of two activations) is recorded against them: what is left unbent is piecewise linear in that single parameter,
and its block of the Hessian equals its Gauss–Newton block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from spiritlevel.network.layers import Function, Layer, LinearMap, Origin, ParameterMode, bound_arguments
from spiritlevel.network.operations import (
    BIASED,
    CONSTANT,
    CONVOLUTIONS,
    NORMALIZATIONS,
    PRODUCTS,
    RECURRENT,
    STRAIGHT,
    TRANSPOSED,
    VECTOR_USES,
)
from spiritlevel.network.spellings import multiplied


@dataclass
class Trace:
    """What one forward pass showed.

    Attributes:
        layers: Weight's parameter name → layer, in the order of first use.
        bent: Parameter name → why the network is not piecewise linear in it; absent where it is.
        calls: For every use of a parameter in order: (parameter, shape of the result), to find the sample axis.
        mixed: Layers that are used in more than one form, such as an embedding that is also the last layer.
        path: The operations that ran, in order.
    """

    layers: dict[str, Layer] = field(default_factory=dict)
    bent: dict[str, str] = field(default_factory=dict)
    calls: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    mixed: set[str] = field(default_factory=set)
    path: tuple[str, ...] = ()


class Tracer(ParameterMode):
    """Follows which parameters every tensor depends on, and which of them an operation bends."""

    def __init__(
        self, parameters: Mapping[str, Tensor], origin: Origin | None = None, fixed: Iterable[Tensor] = ()
    ) -> None:
        super().__init__(parameters, origin)
        self.parameters = parameters
        self.trace = Trace()
        self._alive.extend(fixed := list(fixed))
        # Tensors that no sample has anything to do with: parameters, buffers and what is made of them alone.
        self._still = {id(tensor) for tensor in (*parameters.values(), *fixed)}
        self._stirred: set[int] = set()  # memory of such tensors that samples were written into
        self._seen: set[str] = set()
        self._kinds: dict[str, str] = {}
        self._depends: dict[int, frozenset[str]] = {id(t): frozenset([name]) for name, t in parameters.items()}

    def depends(self, tensor: Any) -> frozenset[str]:
        """The parameters a tensor depends on. A tensor whose origin was not traced counts as depending on all that
        were used before it."""
        if not isinstance(tensor, Tensor):
            return frozenset()
        named = self._named(tensor)
        held = None if self._origin is None else self._origin(tensor)
        found = self._depends.get(id(tensor)) if held is None else frozenset(held[:1])
        found = found if named is None else frozenset([named[0]])
        if found is None and tensor.requires_grad and tensor.grad_fn is not None:
            found = frozenset(self._seen)
            self.bend(found, "an operation that cannot be looked into")
        return found or frozenset()

    def bend(self, parameters: Iterable[str], reason: str) -> None:
        for name in parameters:
            self.trace.bent.setdefault(name, reason)

    def on_linear(self, linear: LinearMap) -> Any:
        result = linear.rebuild(linear.inputs)
        layer, before = linear.layer, self.depends(linear.inputs)
        known = self.trace.layers.setdefault(layer.name, layer)
        if known != layer or self._kinds.setdefault(layer.name, linear.kind) != linear.kind:
            self.trace.mixed.add(layer.name)
            self.bend([layer.name], "used in more than one form, such as a matrix and its transpose")
        if layer.name in before:
            self.bend([layer.name], "applied to what it already produced")
        used = {layer.name, self.name_of(linear.bias) or layer.name}
        self._record(result, before | self.depends(linear.bias) | {layer.name}, used)
        return result

    def on_other(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        still = all(map(self._is_still, operands))
        sets = [self.depends(operand) for operand in operands]
        union = frozenset().union(*sets) if sets else frozenset()
        bends = any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in tree_leaves(result))
        if union and (bends or name == "setitem"):
            self._bend_by(name, args, kwargs, sets)
            if not still:
                self._note_matrices(name, args, kwargs)
            used = {p for p in map(self.name_of, operands) if p is not None}
            if not isinstance(result, Tensor) or not (name in VECTOR_USES or used <= self._bias(name, args, kwargs)):
                self.bend(used, f"used by {name} in a way the exact sweep does not know")
                used = set()
            if name == "setitem":
                self._remember(args[0], union)
            self._record(result, frozenset() if name in CONSTANT else union, used)
        if still:
            self._note_still(result)
        else:
            self._note_written(name, args, kwargs, result)
        return result

    def on_transformed(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What comes out of the transform counts as depending on all that was used; which layers there are is seen inside."""
        linear = self._linear_map(name, function, args, kwargs)
        if linear is not None:
            self._note_unfollowed(replace(linear.layer, followed=False))
        used = {p for leaf in tree_leaves((args, kwargs)) if (p := self.name_of(leaf)) is not None}
        self.bend(used, "used inside a transform of torch.func")
        self._seen.update(used)
        return super().on_transformed(name, function, args, kwargs)

    def _is_still(self, tensor: Tensor) -> bool:
        if self._named(tensor) is not None:
            return True
        return id(tensor) in self._still and _memory(tensor) not in self._stirred

    def _note_written(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Samples have come into a tensor that had nothing to do with them, and into all that shares its memory."""
        changed = (
            [args[0]]
            if name == "setitem"
            else [leaf for leaf in tree_leaves(result) if leaf is args[0]]
            if args
            else []
        )
        for tensor in (*changed, *tree_leaves(kwargs.get("out"))):
            if isinstance(tensor, Tensor) and id(tensor) in self._still:
                self._stirred.add(_memory(tensor))

    def _note_still(self, result: Any) -> None:
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._alive.append(leaf)
                self._still.add(id(leaf))

    def _bias(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[str | None]:
        """The parameter that a linear map with a fixed matrix adds to its result."""
        return (
            {self.name_of(bound_arguments(("input", "weight", "bias"), args, kwargs)[2])} if name in BIASED else set()
        )

    def _record(self, result: Any, depends: frozenset[str], used: Iterable[str]) -> None:
        self._seen.update(depends)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self._remember(leaf, depends)
                self.trace.calls.extend((name, tuple(leaf.shape)) for name in sorted(used))

    def _remember(self, tensor: Tensor, depends: frozenset[str]) -> None:
        if self._origin is not None and self._origin(tensor) is not None:
            return  # recognized by its memory, so that it need not be kept alive
        self._alive.append(tensor)
        self._depends[id(tensor)] = depends

    def _note_matrices(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A matrix that meets activations in another way is a layer too, though not one the exact sweep knows, if it can be told
        which of its sides the activations are on."""
        if name not in PRODUCTS | RECURRENT or name in ("mul", "prelu"):
            return
        for tensor, inputs_first in multiplied(name, args, kwargs):
            found = self._named(tensor)
            if found is not None and tensor.dim() == 2 and inputs_first is not None:
                self._note_unfollowed(Layer(found[0], transposed=inputs_first != found[1], followed=False))
                self.bend([found[0]], f"used by {name} in a way the exact sweep does not know")

    def _note_unfollowed(self, layer: Layer) -> None:
        known = self.trace.layers.setdefault(layer.name, layer)
        if known != layer:
            self.trace.mixed.add(layer.name)
            self.trace.layers[layer.name] = replace(known, followed=False)

    def _bend_by(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        sets: list[frozenset[str]],
    ) -> None:
        union = frozenset().union(*sets)
        if name in STRAIGHT:
            return
        if name in PRODUCTS or name in CONVOLUTIONS or name in TRANSPOSED:
            self.bend(_twice(sets), f"a product ({name}) of two tensors that depend on it")
        elif name == "div":
            self.bend(self.depends(args[1] if len(args) > 1 else None), "a division by what it produced")
        elif name == "scaled_dot_product_attention":
            query, key = bound_arguments(("query", "key"), args, kwargs)
            self.bend(self.depends(query) | self.depends(key), "attention weights (softmax)")
        elif name in NORMALIZATIONS:
            self._bend_by_normalization(name, args, kwargs)
        elif name == "pow" and len(args) == 2 and args[1] == 1:
            return
        else:
            self.bend(union, name)

    def _bend_by_normalization(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        inputs = self.depends(args[0] if args else kwargs.get("input"))
        if not _uses_running_statistics(name, args, kwargs):
            self.bend(inputs, name)
        others = [self.depends(leaf) for leaf in tree_leaves((args[1:], dict(kwargs))) if isinstance(leaf, Tensor)]
        self.bend(_twice([inputs, *others]), name)


def _uses_running_statistics(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a normalization divides by numbers that were counted in training, which makes it linear."""
    flag = {"batch_norm": "training", "instance_norm": "use_input_stats"}.get(name)
    if flag is None:
        return False
    given = bound_arguments(("", "", "", "", "", flag), args, kwargs)[5]
    return not given and (given is not None or name == "batch_norm")


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _twice(sets: list[frozenset[str]]) -> frozenset[str]:
    """The parameters that more than one operand depends on."""
    once: set[str] = set()
    twice: set[str] = set()
    for each in sets:
        twice |= once & each
        once |= each
    return frozenset(twice)


def trace(
    run: Callable[[dict[str, Tensor]], Any], parameters: Mapping[str, Tensor], fixed: Iterable[Tensor] = ()
) -> Trace:
    """Follow one forward pass `run(parameters)`, which returns the outputs; `fixed` are tensors of the network beside these."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
    tracer = Tracer(leaves, fixed=fixed)
    traced(tracer, run)
    return tracer.trace


def traced(tracer: Tracer, run: Callable[[dict[str, Tensor]], Any]) -> Any:
    """The outputs of a forward pass that `tracer` has followed."""
    with torch.enable_grad(), tracer:
        outputs = run(dict(tracer.parameters))
    reached: frozenset[str] = frozenset()
    for leaf in tree_leaves(outputs):
        reached |= tracer.depends(leaf)
    for name in tracer.parameters:
        if name not in reached:
            tracer.bend([name], "its way to the outputs could not be followed")
    tracer.trace.path = tuple(tracer.path)
    return outputs
