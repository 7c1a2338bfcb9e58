"""Layers, found by what a network does with its parameters while it runs, never by a module's class or name.

A `TorchFunctionMode` sees every operation with its operands. A parameter that serves as the matrix or kernel of a
linear map of activations is a layer; functional code, transposed storage and weights used twice included.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spiritlevel.network.modes import Mode, is_transformed
from spiritlevel.network.operations import COMPOSITE, CONVOLUTIONS, SYNONYMS, TRANSPOSED
from spiritlevel.network.spellings import SPELLINGS, Product, looked_up, product_of

Function = Callable[..., Any]
# Tensor → name and shape of the parameter whose numbers it holds, for parameters that are gathered anew at every use.
Origin = Callable[[Tensor], tuple[str, torch.Size] | None]


@dataclass(frozen=True)
class Layer:
    """A weight as a matrix: rows are output neurons, columns input neurons, however the tensor is stored.

    Attributes:
        name: The weight's parameter name.
        groups: Independent blocks of a grouped convolution; 1 otherwise.
        transposed: Stored with inputs first (`x @ W`, transposed convolution, embedding).
        followed: Whether what goes into it is seen; not inside an LSTM, for example.
    """

    name: str
    groups: int = 1
    transposed: bool = False
    followed: bool = True

    def matrix(self, tensor: Tensor) -> Tensor:
        """A tensor of the weight's shape as (groups, rows a group, columns a group, kernel positions)."""
        kernel = tensor.shape[2:].numel()  # not −1, which torch cannot resolve for a layer of width zero
        blocks = tensor.reshape(self.groups, tensor.shape[0] // self.groups, tensor.shape[1], kernel)
        return blocks.transpose(1, 2) if self.transposed else blocks


@dataclass(frozen=True)
class LinearMap:
    """One use of a parameter as the matrix of a linear map, as a call that was intercepted.

    kind: "dense", "convolution", "transposed convolution" or "lookup".
    inputs, weight, bias: The activation φ (indices for a lookup), the matrix as stored, the bias if any.
    rebuild: Calls the same function with another φ.
    apply: (φ, matrix as stored) → z without the bias.
    finish: From z to the result as the network wrote it: `W @ x` has its dimensions the other way round.
    settings: Stride, padding, dilation of a convolution; the index of a lookup whose row is held fixed.
    """

    layer: Layer
    kind: str
    inputs: Tensor
    weight: Tensor
    bias: Tensor | None
    rebuild: Callable[[Tensor], Any]
    apply: Callable[[Tensor, Tensor], Tensor]
    settings: Mapping[str, Any] = field(default_factory=dict)
    finish: Callable[[Tensor], Tensor] | None = None


def function_name(function: Function) -> str:
    """`add` for torch.add, Tensor.add_, Tensor.__iadd__ alike; the attribute's name for a property."""
    name = getattr(function, "__name__", type(function).__name__)
    if name == "__get__":
        return str(getattr(getattr(function, "__self__", None), "__name__", ""))
    name = name.strip("_").partition(".")[0]  # an exported program calls `linear.default`
    return SYNONYMS.get(name, name)


def as_written(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Function, tuple[Any, ...], dict[str, Any]]:
    """The call as a network would write it: an exported program passes the arguments of some operations in another order."""
    if not isinstance(function, torch._ops.OpOverload):
        return function, args, kwargs
    name = function_name(function)
    if name == "embedding":
        weight, indices, padding, by_frequency, sparse = bound_arguments(
            ("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse"), args, kwargs
        )
        padding = None if padding is None or padding < 0 else padding
        return (
            torch.nn.functional.embedding,
            (indices, weight, padding, None, 2.0, bool(by_frequency), bool(sparse)),
            {},
        )
    if name in ("batch_norm", "instance_norm"):
        x, weight, bias, mean, variance, *rest = args
        written = getattr(torch.nn.functional, name)
        return written, (x, mean, variance, weight, bias, *rest[:3]), kwargs
    return function, args, kwargs


class ParameterMode(Mode, ABC):
    """Knows which tensors are parameters (or their transposes) while a network runs.

    `path` is the sequence of operations that ran; it differs where a network takes another branch for other samples.
    """

    def __init__(self, parameters: Mapping[str, Tensor], origin: Origin | None = None) -> None:
        super().__init__()
        self._origin = origin
        self._names: dict[int, tuple[str, bool]] = {id(tensor): (name, False) for name, tensor in parameters.items()}
        self._alive: list[Any] = list(parameters.values())  # an id is valid only while its tensor is alive
        self.path: list[str] = []

    def name_of(self, tensor: Any) -> str | None:
        """The parameter this tensor is; None for activations, constants and transposes."""
        name, flipped = self._named(tensor) or (None, False)
        return None if flipped else name

    def _named(self, tensor: Any) -> tuple[str, bool] | None:
        """The parameter that this tensor is, and whether it is the transpose of it.

        A parameter divided among processes is a new tensor at every use; its memory and strides show which one it is.
        """
        found = self._names.get(id(tensor))
        if found is not None or self._origin is None or not isinstance(tensor, Tensor):
            return found
        held = self._origin(tensor)
        if held is None:
            return None
        name, shape = held
        if tensor.shape == shape and tensor.is_contiguous():
            return name, False
        return (name, True) if tensor.dim() == 2 and tensor.shape == shape[::-1] and tensor.mT.is_contiguous() else None

    def __torch_function__(
        self, function: Function, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        function, args, kwargs = as_written(function, args, kwargs or {})
        name = function_name(function)
        self.path.append(name)
        if is_transformed():
            return self.on_transformed(name, function, args, kwargs)
        if name in COMPOSITE:
            with self:
                return _opened(function)(*args, **kwargs)
        known = self._named(args[0]) if args and isinstance(args[0], Tensor) and args[0].dim() == 2 else None
        turns = _transposes(name, args, kwargs)
        if known is not None and (turns or name == "contiguous"):
            result = function(*args, **kwargs)
            if self._origin is None:
                self._alive.append(result)
                self._names[id(result)] = (known[0], known[1] != turns)
            return result
        linear = self._linear_map(name, function, args, kwargs)
        if linear is None:
            return self.on_other(name, function, args, kwargs)
        self.path.append(linear.layer.name)
        result = self.on_linear(linear)
        if linear.finish is None:
            return result
        with self:  # what is done with the result is an operation like any other
            return linear.finish(result)

    @abstractmethod
    def on_linear(self, linear: LinearMap) -> Any:
        """Called for every linear map of an activation by a parameter."""

    def on_other(self, _name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called for every other operation; runs it."""
        return function(*args, **kwargs)

    def on_transformed(self, _name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called for every operation inside a transform of the network's own (torch.func.grad, vmap); runs it."""
        return function(*args, **kwargs)

    def _linear_map(
        self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LinearMap | None:
        if name == "linear":
            return self._dense(function, args, kwargs)
        if name in CONVOLUTIONS or name in TRANSPOSED:
            return self._convolution(name, function, args, kwargs)
        if name == "embedding":
            return self._lookup(function, args, kwargs)
        if name in (
            "getitem",
            "index",
        ):  # the second in an exported program, and where a tensor is an index in Python, which has no key
            return self._indexed(*bound_arguments(("self", "indices"), args, kwargs))
        if name == "addmm" and len(args) == 3 and not kwargs:
            return self._biased_product(function, args)
        if name not in SPELLINGS:
            return None
        with self:  # what brings φ into shape is an operation like any other
            product = product_of(name, args, kwargs, lambda tensor: self._matrix(tensor) is not None)
        return None if product is None else self._product(product)

    def _matrix(self, tensor: Any) -> tuple[str, bool] | None:
        found = self._named(tensor)
        return found if found is not None and tensor.dim() == 2 else None

    def _layer_of(self, matrix: Tensor, *, inputs_first: bool) -> tuple[Layer, Tensor]:
        """The layer whose weight, or the transpose of it, this matrix is, and the weight as it is stored."""
        found = self._matrix(matrix)
        assert found is not None
        name, flipped = found
        return Layer(name, transposed=inputs_first != flipped), matrix.mT if flipped else matrix

    def _dense(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LinearMap | None:
        inputs, matrix, bias = bound_arguments(("input", "weight", "bias"), args, kwargs)
        if self._matrix(matrix) is None:
            return None
        layer, weight = self._layer_of(matrix, inputs_first=False)
        return LinearMap(layer, "dense", inputs, weight, bias, lambda phi: function(phi, matrix, bias), _dense(layer))

    def _product(self, product: Product) -> LinearMap:
        matrix = product.matrix
        layer, weight = self._layer_of(matrix, inputs_first=product.inputs_first)
        written = torch.matmul if product.inputs_first else torch.nn.functional.linear
        return LinearMap(
            layer,
            "dense",
            product.inputs,
            weight,
            None,
            lambda phi: written(phi, matrix),
            _dense(layer),
            finish=product.finish,
        )

    def _biased_product(self, function: Function, args: tuple[Any, ...]) -> LinearMap | None:
        bias, inputs, matrix = args
        if self._matrix(matrix) is None or self._matrix(inputs) is not None:
            return None
        if bias.dim() > 1:  # a residual, not a bias
            return self._product(Product(inputs, matrix, True, lambda result: bias + result))
        layer, weight = self._layer_of(matrix, inputs_first=True)
        return LinearMap(layer, "dense", inputs, weight, bias, lambda phi: function(bias, phi, matrix), _dense(layer))

    def _convolution(
        self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LinearMap | None:
        transposed = name in TRANSPOSED
        names = ("input", "weight", "bias", "stride", "padding", *_ORDER[transposed])
        inputs, weight, bias, *rest = bound_arguments(names, args, kwargs)
        parameter = self.name_of(weight)
        dims = weight.dim() - 2
        if parameter is None or inputs.dim() != dims + 2:
            return None
        settings = {key: value for key, value in zip(names[3:], rest, strict=True) if value is not None}
        groups = int(settings.pop("groups", 1))
        sizes = {key: value if isinstance(value, str) else repeated(value, dims) for key, value in settings.items()}
        kind = "transposed convolution" if transposed else "convolution"
        layer = Layer(parameter, groups=groups, transposed=transposed)
        return LinearMap(
            layer,
            kind,
            inputs,
            weight,
            bias,
            lambda phi: function(phi, weight, bias, groups=groups, **settings),
            lambda phi, matrix: function(phi, matrix, None, groups=groups, **settings),
            sizes,
        )

    def _lookup(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LinearMap | None:
        names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
        indices, weight, padding, max_norm, *_ = bound_arguments(names, args, kwargs)
        parameter = self.name_of(weight)
        if parameter is None or max_norm is not None:
            return None
        layer = Layer(parameter, transposed=True)
        # A dense gradient, whatever the module asked for: sparse ones have no second derivative.
        return LinearMap(
            layer,
            "lookup",
            indices,
            weight,
            None,
            lambda phi: function(phi, weight, padding),
            lambda phi, matrix: function(phi, _without_row(matrix, padding), padding),
            {} if padding is None else {"padding": int(padding) % weight.shape[0]},
        )

    def _indexed(self, matrix: Any, key: Any) -> LinearMap | None:
        """`W[tokens]`, where −1 is the last row."""
        indices = looked_up(key) if self.name_of(matrix) is not None and matrix.dim() == 2 else None
        if indices is None:
            return None
        rows = torch.where(indices < 0, indices + len(matrix), indices)
        return self._lookup(torch.nn.functional.embedding, (rows, matrix), {})


def _dense(layer: Layer) -> Callable[[Tensor, Tensor], Tensor]:
    return torch.matmul if layer.transposed else torch.nn.functional.linear


_ORDER = {False: ("dilation", "groups"), True: ("output_padding", "groups", "dilation")}


def bound_arguments(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]


def repeated(value: Any, dims: int) -> tuple[int, ...]:
    """A setting for each of the dimensions, given once or for each."""
    return (
        (int(value),) * dims if isinstance(value, int) else tuple(int(entry) for entry in value) * (dims // len(value))
    )


def _without_row(matrix: Tensor, row: int | None) -> Tensor:
    """The row of an embedding's padding is held fixed: a perturbation does not reach it."""
    return matrix if row is None else matrix.index_fill(0, torch.tensor([row], device=matrix.device), 0)


def _transposes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether this operation swaps the two dimensions of a matrix."""
    if name == "permute":
        dims = args[1:] if len(args) != 2 or isinstance(args[1], int) else args[1]
        return [d % 2 for d in (kwargs.get("dims") or dims)] == [1, 0]
    return name in ("t", "T", "mT", "transpose")


def _opened(function: Any) -> Function:
    """The same Python function, whose own dispatch is switched off, so that the mode sees the calls inside it.

    torch's composite functions ask `has_torch_function`, a name of their module, whether to hand the call to the mode as a
    whole. If torch asks otherwise, layers inside attention are not found and their measures are missing;
    `tests/problem/test_torch_privates.py` notices.
    """
    quiet = {**function.__globals__, "has_torch_function": lambda _: False}
    opened = types.FunctionType(
        function.__code__,
        quiet,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened
