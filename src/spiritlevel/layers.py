"""Layers, found by what a network does with its parameters: one traced forward pass, never a module's class or name.

A `TorchFunctionMode` sees every operation with its operands. A parameter that serves as the matrix or kernel of a
linear map of activations is a layer. On the way, every tensor carries the set of parameters it depends on, and an
operation that bends one of them (GELU, softmax, a product of two activations) is recorded against them: what is left
unbent is piecewise linear in that single parameter, and its block of the Hessian equals its Gauss–Newton block.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

Function = Callable[..., Any]


@dataclass(frozen=True)
class Layer:
    """A weight as a matrix: rows are output neurons, columns input neurons, however the tensor is stored.

    Attributes:
        name: The weight's parameter name.
        groups: Independent blocks of a grouped convolution; 1 otherwise.
        transposed: Stored with inputs first (`x @ W`, transposed convolution, embedding).
    """

    name: str
    groups: int = 1
    transposed: bool = False

    def matrix(self, tensor: Tensor) -> Tensor:
        """A tensor of the weight's shape as (groups, rows a group, columns a group, kernel positions)."""
        if self.transposed:
            blocks = tensor.reshape(self.groups, tensor.shape[0] // self.groups, tensor.shape[1], -1)
            return blocks.transpose(1, 2)
        return tensor.reshape(self.groups, tensor.shape[0] // self.groups, tensor.shape[1], -1)


@dataclass(frozen=True)
class LinearMap:
    """One use of a parameter as the matrix of a linear map, as a call that was intercepted.

    kind: "dense", "convolution", "transposed convolution" or "lookup".
    inputs, weight, bias: The activation φ (indices for a lookup), the matrix as stored, the bias if any.
    rebuild: Calls the same function with another φ.
    apply: (φ, matrix as stored) → z without the bias.
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


def function_name(function: Function) -> str:
    """`add` for torch.add, Tensor.add_, Tensor.__iadd__ alike; the attribute's name for a property."""
    name = getattr(function, "__name__", type(function).__name__)
    if name == "__get__":
        return str(getattr(getattr(function, "__self__", None), "__name__", ""))
    name = name.strip("_").partition(".")[0]  # an exported program calls `linear.default`
    return _SYNONYMS.get(name, name)


_SYNONYMS = {
    "iadd": "add",
    "radd": "add",
    "isub": "sub",
    "rsub": "sub",
    "subtract": "sub",
    "imul": "mul",
    "rmul": "mul",
    "multiply": "mul",
    "itruediv": "div",
    "truediv": "div",
    "divide": "div",
    "true_divide": "div",
    "rmatmul": "matmul",
    "mm": "matmul",
    "bmm": "matmul",
    "concat": "cat",
    "concatenate": "cat",
    "clip": "clamp",
    "absolute": "abs",
    "negative": "neg",
    "H": "T",
    "swapaxes": "transpose",
    "swapdims": "transpose",
}

# Linear in all tensor operands together, or a choice among them that does not change within a region.
_STRAIGHT = frozenset(
    [
        "add",
        "sub",
        "neg",
        "cat",
        "stack",
        "hstack",
        "vstack",
        "dstack",
        "flatten",
        "unflatten",
        "view",
        "view_as",
        "reshape",
        "reshape_as",
        "ravel",
        "squeeze",
        "unsqueeze",
        "permute",
        "transpose",
        "t",
        "T",
        "mT",
        "movedim",
        "moveaxis",
        "contiguous",
        "clone",
        "expand",
        "expand_as",
        "broadcast_to",
        "repeat",
        "repeat_interleave",
        "tile",
        "roll",
        "flip",
        "rot90",
        "getitem",
        "select",
        "narrow",
        "index_select",
        "gather",
        "take",
        "take_along_dim",
        "split",
        "chunk",
        "unbind",
        "tensor_split",
        "split_with_sizes",
        "unfold",
        "fold",
        "pad",
        "constant_pad_nd",
        "mean",
        "sum",
        "cumsum",
        "nansum",
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "adaptive_avg_pool1d",
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
        "upsample",
        "interpolate",
        "pixel_shuffle",
        "pixel_unshuffle",
        "channel_shuffle",
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_alpha_dropout",
        "feature_dropout",
        "to",
        "type",
        "float",
        "double",
        "type_as",
        "diagonal",
        "diag",
        "diag_embed",
        "tril",
        "triu",
        "trace",
        "identity",
        "zero",
        "data",
        "relu",
        "relu6",
        "leaky_relu",
        "rrelu",
        "threshold",
        "hardtanh",
        "hardsigmoid",
        "hardshrink",
        "softshrink",
        "clamp",
        "clamp_min",
        "clamp_max",
        "abs",
        "max",
        "min",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "amax",
        "amin",
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "boolean_dispatch",
        "max_pool1d_with_indices",
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
        "adaptive_max_pool1d",
        "adaptive_max_pool2d",
        "adaptive_max_pool3d",
        "adaptive_max_pool1d_with_indices",
        "adaptive_max_pool2d_with_indices",
        "adaptive_max_pool3d_with_indices",
        "max_unpool1d",
        "max_unpool2d",
        "max_unpool3d",
        "sort",
        "topk",
        "median",
        "where",
        "masked_fill",
        "masked_select",
        "sign",
        "floor",
        "ceil",
        "round",
        "trunc",
        "heaviside",
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
        "setitem",
        "copy",
        "requires_grad",
        "detach",
        "alias",
        "as_strided",
        "atleast_1d",
        "atleast_2d",
        "atleast_3d",
        "native_channel_shuffle",
        "block_diag",
        "meshgrid",
        "nan_to_num",
        "real",
    ]
)
_PRODUCTS = frozenset(
    [
        "mul",
        "prelu",  # its slope times the negative part
        "linear",
        "matmul",
        "einsum",
        "baddbmm",
        "addmm",
        "addbmm",
        "addmv",
        "mv",
        "dot",
        "inner",
        "outer",
        "ger",
        "bilinear",
        "tensordot",
        "kron",
    ]
)
_RECURRENT = frozenset(
    ["lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"]
)
_CONVOLUTIONS = frozenset(["conv1d", "conv2d", "conv3d"])
_TRANSPOSED = frozenset(["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"])
_NORMALIZATIONS = frozenset(["layer_norm", "group_norm", "instance_norm", "batch_norm", "rms_norm"])
# Operations that use a parameter as a scale or a shift, entry by entry or channel by channel.
VECTOR_USES = frozenset(
    ["add", "sub", "mul", "expand", "prelu", "batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"]
)
# Linear maps with a fixed matrix use their bias as a shift.
_BIASED = frozenset(["linear"]) | _CONVOLUTIONS | _TRANSPOSED
# Python functions of torch whose bodies hold linear maps of parameters; the trace walks into them.
_COMPOSITE = frozenset(["multi_head_attention_forward"])


class ParameterMode(TorchFunctionMode):
    """Knows which tensors are parameters (or their transposes) while a network runs."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names: dict[int, tuple[str, bool]] = {id(tensor): (name, False) for name, tensor in parameters.items()}
        self._alive: list[Any] = list(parameters.values())  # an id is only good while its tensor lives

    def name_of(self, tensor: Any) -> str | None:
        """The parameter this tensor is; None for activations, constants and transposes."""
        name, flipped = self._names.get(id(tensor), (None, False))
        return None if flipped else name

    def __torch_function__(
        self, function: Function, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function_name(function)
        if name in _COMPOSITE:
            with self:
                return _opened(function)(*args, **kwargs)
        if _transposes(name, args, kwargs) and id(args[0]) in self._names and args[0].dim() == 2:
            result = function(*args, **kwargs)
            parameter, flipped = self._names[id(args[0])]
            self._alive.append(result)
            self._names[id(result)] = (parameter, not flipped)
            return result
        linear = self._linear_map(name, function, args, kwargs)
        if linear is not None:
            return self.on_linear(linear, args, kwargs)
        return self.on_other(name, function, args, kwargs)

    def on_linear(self, linear: LinearMap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A parameter met its activation."""
        raise NotImplementedError

    def on_other(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Anything else that happened to a tensor."""
        raise NotImplementedError

    def _linear_map(
        self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LinearMap | None:
        if name == "linear":
            return self._dense(function, args, kwargs)
        if name in _CONVOLUTIONS or name in _TRANSPOSED:
            return self._convolution(name, function, args, kwargs)
        if name == "embedding":
            return self._lookup(function, args, kwargs)
        if name == "matmul" and len(args) == 2 and not kwargs:
            return self._product(function, args)
        if name == "addmm" and len(args) == 3 and not kwargs:
            return self._biased_product(function, args)
        if name == "tensordot" and _bound(("a", "b", "dims"), args, kwargs)[2] == 1:
            return self._product(torch.matmul, tuple(_bound(("a", "b"), args, kwargs)))
        if name == "einsum" and _is_dense(args):
            return self._contraction(args)
        return None

    def _matrix(self, tensor: Any) -> tuple[str, bool] | None:
        found = self._names.get(id(tensor))
        return found if found is not None and tensor.dim() == 2 else None

    def _dense(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LinearMap | None:
        inputs, weight, bias = _bound(("input", "weight", "bias"), args, kwargs)
        found = self._matrix(weight)
        if found is None:
            return None
        layer = Layer(found[0], transposed=found[1])
        return LinearMap(layer, "dense", inputs, weight, bias, lambda phi: function(phi, weight, bias), _dense(layer))

    def _product(self, function: Function, args: tuple[Any, ...]) -> LinearMap | None:
        """x @ W: the stored matrix has the inputs first, unless a transpose was multiplied."""
        inputs, weight = args
        found = self._matrix(weight)
        if found is None or self._matrix(inputs) is not None or inputs.dim() < 2:
            return None
        layer = Layer(found[0], transposed=not found[1])
        return LinearMap(layer, "dense", inputs, weight, None, lambda phi: function(phi, weight), _dense(layer))

    def _contraction(self, args: tuple[Any, ...]) -> LinearMap | None:
        """einsum("…i,io->…o", x, W) and einsum("…i,oi->…o", x, W)."""
        equation, inputs, weight = args
        found = self._matrix(weight)
        if found is None or self._matrix(inputs) is not None:
            return None
        inputs_first = _matrix_indices(equation)[0] == _terms(equation)[0][-1]
        layer = Layer(found[0], transposed=inputs_first != found[1])
        return LinearMap(
            layer, "dense", inputs, weight, None, lambda phi: torch.einsum(equation, phi, weight), _dense(layer)
        )

    def _biased_product(self, function: Function, args: tuple[Any, ...]) -> LinearMap | None:
        bias, inputs, weight = args
        found = self._matrix(weight)
        if found is None or self._matrix(inputs) is not None:
            return None
        layer = Layer(found[0], transposed=not found[1])
        return LinearMap(layer, "dense", inputs, weight, bias, lambda phi: function(bias, phi, weight), _dense(layer))

    def _convolution(
        self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LinearMap | None:
        transposed = name in _TRANSPOSED
        names = ("input", "weight", "bias", "stride", "padding", *_ORDER[transposed])
        inputs, weight, bias, *rest = _bound(names, args, kwargs)
        parameter = self.name_of(weight)
        dims = weight.dim() - 2
        if parameter is None or inputs.dim() != dims + 2:
            return None
        settings = {key: value for key, value in zip(names[3:], rest, strict=True) if value is not None}
        groups = int(settings.pop("groups", 1))
        sizes = {key: value if isinstance(value, str) else _tuple(value, dims) for key, value in settings.items()}
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
        indices, weight, padding, max_norm, *_ = _bound(names, args, kwargs)
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


def _dense(layer: Layer) -> Callable[[Tensor, Tensor], Tensor]:
    return torch.matmul if layer.transposed else torch.nn.functional.linear


_ORDER = {False: ("dilation", "groups"), True: ("output_padding", "groups", "dilation")}


def _bound(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    return (
        (int(value),) * dims if isinstance(value, int) else tuple(int(entry) for entry in value) * (dims // len(value))
    )


def _without_row(matrix: Tensor, row: int | None) -> Tensor:
    """The row of an embedding's padding is held fixed: a perturbation does not reach it."""
    return matrix if row is None else matrix.index_fill(0, torch.tensor([row], device=matrix.device), 0)


def _terms(equation: str) -> list[str]:
    """The subscripts of operands and result of an einsum."""
    return equation.replace(" ", "").replace("...", ".").replace("->", ",").split(",")


def _matrix_indices(equation: str) -> str:
    return _terms(equation)[1]


def _is_dense(args: tuple[Any, ...]) -> bool:
    """Whether an einsum is one matrix applied to the last dimension of the other operand, which comes first."""
    if len(args) != 3 or not isinstance(args[0], str) or "->" not in args[0] or args[0].count(",") != 1:
        return False
    inputs, matrix, result = _terms(args[0])
    if len(matrix) != 2 or len(inputs) < 2 or len(result) != len(inputs) or inputs[:-1] != result[:-1]:
        return False
    return set(matrix) == {inputs[-1], result[-1]} and not set(matrix) & set(inputs[:-1])


def _transposes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether this operation swaps the two dimensions of a matrix."""
    if name == "permute":
        dims = args[1:] if len(args) != 2 or isinstance(args[1], int) else args[1]
        return [d % 2 for d in (kwargs.get("dims") or dims)] == [1, 0]
    return name in ("t", "T", "mT", "transpose")


def _opened(function: Any) -> Function:
    """The same Python function, whose own dispatch is switched off, so that the mode sees the calls inside it."""
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


@dataclass
class Trace:
    """What one forward pass showed.

    Attributes:
        layers: Weight's parameter name → layer, in the order of first use.
        bent: Parameter name → why the network is not piecewise linear in it; absent where it is.
        calls: For every use of a parameter in order: (parameter, shape of the result), to find the sample axis.
        mixed: Layers that are used in more than one form, such as an embedding that is also the last layer.
    """

    layers: dict[str, Layer] = field(default_factory=dict)
    bent: dict[str, str] = field(default_factory=dict)
    calls: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    mixed: set[str] = field(default_factory=set)


class Tracer(ParameterMode):
    """Follows which parameters every tensor depends on, and which of them an operation bends."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters)
        self.trace = Trace()
        self._seen: set[str] = set()
        self._kinds: dict[str, str] = {}
        self._depends: dict[int, frozenset[str]] = {id(t): frozenset([name]) for name, t in parameters.items()}

    def depends(self, tensor: Any) -> frozenset[str]:
        """The parameters a tensor depends on. One that came out of nowhere hides all that were used before it."""
        if not isinstance(tensor, Tensor):
            return frozenset()
        found = self._depends.get(id(tensor))
        if found is None and tensor.requires_grad and tensor.grad_fn is not None:
            found = frozenset(self._seen)
            self.bend(found, "an operation that cannot be looked into")
        return found or frozenset()

    def bend(self, parameters: Iterable[str], reason: str) -> None:
        for name in parameters:
            self.trace.bent.setdefault(name, reason)

    def on_linear(self, linear: LinearMap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        sets = [self.depends(operand) for operand in operands]
        union = frozenset().union(*sets) if sets else frozenset()
        bends = any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in tree_leaves(result))
        if union and (bends or name == "setitem"):
            self._bend_by(name, args, kwargs, operands, sets)
            self._note_matrices(name, operands)
            used = {p for p in map(self.name_of, operands) if p is not None}
            if not isinstance(result, Tensor) or not (name in VECTOR_USES or used <= self._bias(name, args, kwargs)):
                self.bend(used, f"used by {name} in a way the exact sweep does not know")
                used = set()
            if name == "setitem":
                self._remember(args[0], union)
            self._record(result, frozenset() if name in ("detach", "data") else union, used)
        return result

    def _bias(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[str | None]:
        """The parameter that a linear map with a fixed matrix adds to its result."""
        return {self.name_of(_bound(("input", "weight", "bias"), args, kwargs)[2])} if name in _BIASED else set()

    def _record(self, result: Any, depends: frozenset[str], used: Iterable[str]) -> None:
        self._seen.update(depends)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self._remember(leaf, depends)
                self.trace.calls.extend((name, tuple(leaf.shape)) for name in sorted(used))

    def _remember(self, tensor: Tensor, depends: frozenset[str]) -> None:
        self._alive.append(tensor)
        self._depends[id(tensor)] = depends

    def _note_matrices(self, name: str, operands: list[Tensor]) -> None:
        """A matrix that meets activations in another way is a layer too, though not one the exact sweep knows."""
        if name not in _PRODUCTS | _RECURRENT or name in ("mul", "prelu"):
            return
        for operand in operands:
            found = self._names.get(id(operand))
            if found is not None and operand.dim() == 2:
                self.trace.layers.setdefault(found[0], Layer(found[0]))
                self.bend([found[0]], f"used by {name} in a way the exact sweep does not know")

    def _bend_by(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        operands: list[Tensor],
        sets: list[frozenset[str]],
    ) -> None:
        union = frozenset().union(*sets)
        if name in _STRAIGHT:
            return
        if name in _PRODUCTS or name in _CONVOLUTIONS or name in _TRANSPOSED:
            self.bend(_twice(sets), f"a product ({name}) of two tensors that depend on it")
        elif name == "div":
            self.bend(self.depends(args[1] if len(args) > 1 else None), "a division by what it produced")
        elif name == "scaled_dot_product_attention":
            query, key = _bound(("query", "key"), args, kwargs)
            self.bend(self.depends(query) | self.depends(key), "attention weights (softmax)")
        elif name in _NORMALIZATIONS:
            self._bend_by_normalization(name, args, kwargs)
        elif name == "pow" and len(args) == 2 and args[1] == 1:
            return
        else:
            self.bend(union, name)

    def _bend_by_normalization(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        inputs = self.depends(args[0] if args else kwargs.get("input"))
        running = name == "batch_norm" and not _bound(("", "", "", "", "", "training"), args, kwargs)[5]
        if not running:
            self.bend(inputs, name)
        others = [self.depends(leaf) for leaf in tree_leaves((args[1:], dict(kwargs))) if isinstance(leaf, Tensor)]
        self.bend(_twice([inputs, *others]), name)


def _twice(sets: list[frozenset[str]]) -> frozenset[str]:
    """The parameters that more than one operand depends on."""
    once: set[str] = set()
    twice: set[str] = set()
    for each in sets:
        twice |= once & each
        once |= each
    return frozenset(twice)


def trace(run: Callable[[dict[str, Tensor]], Any], parameters: Mapping[str, Tensor]) -> Trace:
    """Follow one forward pass `run(parameters)`, which returns the outputs."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
    tracer = Tracer(leaves)
    with torch.enable_grad(), tracer:
        outputs = run(leaves)
    reached: frozenset[str] = frozenset()
    for leaf in tree_leaves(outputs):
        reached |= tracer.depends(leaf)
    for name in leaves:
        if name not in reached:
            tracer.bend([name], "its way to the outputs could not be followed")
    return tracer.trace
