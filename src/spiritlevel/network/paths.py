"""The sum over all paths through a network of the product of the weights along them, in one forward pass.

A network of linear maps, rectifiers and pooling sends ones through |w|^q: every entry of the result is Σ over paths of Π|w|^q.
Rectifiers let everything pass, the largest of several is their sum. A hundred layers leave the range of floating-point numbers, so
every tensor is kept at largest entry one beside the logarithm of its scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from spiritlevel.errors import TracingError
from spiritlevel.network.layers import Function, LinearMap, ParameterMode, bound_arguments, repeated

# Operations that only move entries around, or that let every path pass.
_PASSING = frozenset(
    [
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
        "roll",
        "flip",
        "getitem",
        "select",
        "narrow",
        "index_select",
        "gather",
        "split",
        "chunk",
        "unbind",
        "tensor_split",
        "split_with_sizes",
        "pixel_shuffle",
        "pixel_unshuffle",
        "channel_shuffle",
        "native_channel_shuffle",
        "alias",
        "diagonal",
    ]
)
_UNCHANGED = frozenset(
    [
        "relu",
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "feature_dropout",
        "alpha_dropout",
        "feature_alpha_dropout",
        "to",
        "type",
        "float",
        "double",
        "type_as",
        "identity",
        "detach",
        "requires_grad",
        "neg",
    ]
)
_MAX_POOLS = {
    F.max_pool1d: 1,
    F.max_pool2d: 2,
    F.max_pool3d: 3,
    torch.max_pool1d: 1,
    torch.max_pool2d: 2,
    torch.max_pool3d: 3,
}
# `x += y` and the like: the tensor that is written into may be a view.
_ASSIGNMENTS = frozenset(["__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__"])
_LARGEST_LOG = 700.0
_ADAPTIVE_MAX = {F.adaptive_max_pool1d: 1, F.adaptive_max_pool2d: 2, F.adaptive_max_pool3d: 3}


def log_path_sum(
    run: Callable[[], Any], tensors: Mapping[str, Tensor], inputs: Sequence[Tensor], power: float
) -> float:
    """ln Σ over paths of Π|w|^q, over all results; `inputs` are the tensors of ones that the run starts from.

    Refuses networks with operations through which paths have no weight, such as a softmax.
    """
    mode = _Paths(tensors, inputs, power)
    try:
        with torch.no_grad(), mode:
            result = run()
    except TracingError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError) as error:  # code of the network that looks at numbers
        raise TracingError(f"the network cannot be computed on sums over paths: {error}") from error
    if not isinstance(result, Tensor) or not mode.known(result):
        raise TracingError("the outputs do not come from the inputs by linear maps, rectifiers and pooling")
    total = float(result.sum())
    return mode.log_of(result) + math.log(total) if total > 0 else -math.inf


class _Paths(ParameterMode):
    """Runs a network on sums over paths instead of activations."""

    def __init__(self, tensors: Mapping[str, Tensor], inputs: Sequence[Tensor], power: float) -> None:
        super().__init__(tensors)
        self._tensors, self._power = tensors, power
        self._logs = {id(tensor): 0.0 for tensor in inputs}
        self._kept: list[Any] = list(inputs)  # an id is valid only while its tensor is alive

    def known(self, tensor: Any) -> bool:
        return id(tensor) in self._logs

    def log_of(self, tensor: Tensor) -> float:
        return self._logs[id(tensor)]

    def _new(self, tensor: Tensor, log: float) -> Tensor:
        """A tensor brought to largest entry one."""
        largest = float(tensor.max()) if tensor.numel() else 0.0
        if largest > 0:
            tensor, log = tensor / largest, log + math.log(largest)
        return self._carry(tensor, log)

    def _carry(self, tensor: Tensor, log: float) -> Tensor:
        self._kept.append(tensor)
        self._logs[id(tensor)] = log
        return tensor

    def _weight(self, tensor: Any) -> Tensor:
        return torch.as_tensor(tensor).detach().double().abs() ** self._power

    def _operand(self, value: Any) -> tuple[Tensor, float]:
        return (value, self._logs[id(value)]) if self.known(value) else (self._weight(value), 0.0)

    def _sum(self, parts: Sequence[tuple[Tensor, float]]) -> Tensor:
        log = max(own for _, own in parts)
        total = sum(tensor * math.exp(own - log) for tensor, own in parts)
        assert isinstance(total, Tensor)
        return self._new(total, log)

    def on_linear(self, linear: LinearMap) -> Any:
        matrix = self._weight(self._tensors[linear.layer.name])
        if linear.kind == "lookup":
            return self._new(matrix.sum(0).expand(*linear.inputs.shape, matrix.shape[1]).clone(), 0.0)
        if not self.known(linear.inputs):
            raise TracingError(f"{linear.layer.name} is applied to something that does not come from the inputs")
        result, log = linear.apply(linear.inputs, matrix), self.log_of(linear.inputs)
        if linear.bias is None:
            return self._new(result, log)
        dims = result.dim() - 2 if "convolution" in linear.kind else 0
        return self._sum([(result, log), (self._weight(linear.bias).reshape(-1, *[1] * dims), 0.0)])

    def on_other(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tracked = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and self.known(leaf)]
        if not tracked:
            return function(*args, **kwargs)
        if name == "setitem":
            return self._write(args[0], args[2], lambda values: function(*args[:2], values))
        found = self._followed(name, function, args, kwargs, tracked)
        raw = getattr(function, "__name__", "")
        in_place = (
            raw in _ASSIGNMENTS or (raw.endswith("_") and not raw.endswith("__")) or kwargs.get("inplace") is True
        )
        if in_place and isinstance(found, Tensor):
            self._write(args[0], found, args[0].copy_)
            return args[0]
        return found

    def _write(self, target: Tensor, value: Any, write: Callable[[Tensor], Any]) -> None:
        """Write into a tensor or a part of it, in the scale that it has: other tensors may be views of it, or it of them."""
        if not self.known(target):
            raise TracingError(
                "paths have no weight through an assignment into a tensor that does not come from the inputs"
            )
        tensor, log = self._operand(value)
        written = tensor * math.exp(min(log - self.log_of(target), _LARGEST_LOG))
        if not bool(torch.isfinite(written).all()) or bool(((tensor > 0) & (written == 0)).any()):
            raise TracingError("the sums over paths leave the range of numbers where one is written into another")
        write(written)

    def _followed(
        self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: list[Tensor]
    ) -> Any:
        if name in _UNCHANGED or (name == "leaky_relu" and abs(_slope(args, kwargs)) <= 1):
            return self._carry(tracked[0].clone(), self.log_of(tracked[0]))
        if name in ("add", "sub"):
            first, second = (self._operand(value) for value in bound_arguments(("input", "other"), args, kwargs))
            factor = abs(kwargs.get("alpha", 1)) ** self._power
            return self._sum([first, (factor * second[0], second[1])])
        if name in ("mul", "div") and len(tracked) == 1:
            return self._scaled(name, args)
        if name in ("cat", "stack"):
            return self._joined(function, args, kwargs)
        if name == "batch_norm":
            return self._normalized(args, kwargs)
        if name in ("mean", "sum") or "avg_pool" in name:
            return self._averaged(name, function, args, kwargs)
        if function in _MAX_POOLS or function in _ADAPTIVE_MAX:
            return self._largest(function, args, kwargs)
        result = function(*args, **kwargs)
        if name in ("to", "type", "type_as") and isinstance(result, Tensor) and result.is_floating_point():
            return self._carry(tracked[0].clone(), self.log_of(tracked[0]))  # the sums stay in double precision
        if name in _PASSING and len(tracked) == 1:
            return self._passed(result, self.log_of(tracked[0]))
        if not any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in tree_leaves(result)):
            return result  # shapes, devices, comparisons
        raise TracingError(f"paths have no weight through the operation {name!r}")

    def _passed(self, result: Any, log: float) -> Any:
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._carry(leaf, log)
        return result

    def _scaled(self, name: str, args: tuple[Any, ...]) -> Tensor:
        (first, a), (second, b) = (self._operand(value) for value in args[:2])
        if name == "div" and self.known(args[1]):
            raise TracingError("paths have no weight through a division by what comes from the inputs")
        return self._new(first * second if name == "mul" else first / second, a + b)

    def _joined(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        parts = [self._operand(value) for value in args[0]]
        log = max(own for _, own in parts)
        level = [tensor * math.exp(own - log) for tensor, own in parts]
        return self._new(function(level, *args[1:], **kwargs), log)

    def _normalized(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """A batch normalization with its running statistics: a scale and a shift a channel."""
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        x, mean, variance, weight, bias, training, _, eps = bound_arguments(names, args, kwargs)
        if mean is None or training:
            raise TracingError("paths have no weight through a normalization by the statistics of a batch")
        scale = (variance.double() + (1e-5 if eps is None else eps)).rsqrt()
        scale = scale if weight is None else scale * weight.detach().double()
        shift = (0 if bias is None else bias.detach().double()) - mean.double() * scale
        dims = [1] * (x.dim() - 2)
        weights, shifts = (self._weight(each).reshape(-1, *dims) for each in (scale, shift))
        return self._sum([(x * weights, self.log_of(x)), (shifts, 0.0)])

    def _averaged(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """A mean of n entries has weights 1/n: Σ (1/n)^q x is n^(1−q) times the mean of x."""
        x = args[0]
        result = function(*args, **kwargs)
        if name == "sum":
            return self._new(result, self.log_of(x))
        if name == "mean":
            return self._new(result * (x.numel() / max(1, result.numel())) ** (1 - self._power), self.log_of(x))
        ones = function(torch.ones_like(x), *args[1:], **kwargs)
        if not bool((ones - 1).abs().max() < 1e-9):
            raise TracingError("paths have no single weight through an average that leaves out its padding")
        if "adaptive" in name:
            counts = _adaptive_counts(x, result, int(name[-2]))
        else:
            names = ("input", "kernel_size", "stride", "padding", "ceil_mode")
            counts = _window_sums(torch.ones_like(x), int(name[-2]), *bound_arguments(names, args, kwargs)[1:])
        return self._new(result * counts ** (1 - self._power), self.log_of(x))

    def _largest(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The largest of a window counts as the sum over it."""
        x = args[0]
        if function in _ADAPTIVE_MAX:
            size = bound_arguments(("input", "output_size"), args, kwargs)[1]
            dims = _ADAPTIVE_MAX[function]
            averaged = getattr(F, f"adaptive_avg_pool{dims}d")(x, size)
            return self._new(averaged * _adaptive_counts(x, averaged, dims), self.log_of(x))
        names = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
        _, kernel, stride, padding, dilation, ceil = bound_arguments(names, args, kwargs)
        if any(each != 1 for each in repeated(dilation or 1, _MAX_POOLS[function])):
            raise TracingError("paths have no weight through a pooling with a dilated window")
        return self._new(_window_sums(x, _MAX_POOLS[function], kernel, stride, padding, ceil), self.log_of(x))


def _window_sums(x: Tensor, dims: int, kernel: Any, stride: Any, padding: Any, ceil: Any) -> Tensor:
    """The sum over every window of a pooling of the last so many dimensions."""
    sizes, step = repeated(kernel, dims), repeated(kernel if stride in (None, []) else stride, dims)
    edge, lone = repeated(padding or 0, dims), dims == 1
    if lone:
        x, sizes, step, edge = x.unsqueeze(-2), (1, *sizes), (1, *step), (0, *edge)
    pool = F.avg_pool3d if dims == 3 else F.avg_pool2d
    result: Tensor = pool(x, sizes, step, edge, ceil_mode=bool(ceil), divisor_override=1)
    return result.squeeze(-2) if lone else result


def _adaptive_counts(x: Tensor, result: Tensor, dims: int) -> Tensor:
    """How many entries every window of an adaptive pooling has: windows overlap where sizes do not divide."""
    counts = torch.ones((), dtype=torch.float64, device=x.device)
    for size, windows in zip(x.shape[-dims:], result.shape[-dims:], strict=True):
        window = torch.arange(windows, device=x.device, dtype=torch.float64)
        ends, starts = ((window + 1) * size / windows).ceil(), (window * size / windows).floor()
        counts = counts.unsqueeze(-1) * (ends - starts)
    return counts


def _slope(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    return float(bound_arguments(("input", "negative_slope"), args, kwargs)[1] or 0.01)
