"""Taps: the places of a forward pass where the gradient of a parameter, sample by sample, can be read off.

The gradient of a linear map's weight is Σ over positions of δ φᵀ, of a scale Σ δ·x, of a shift Σ δ, with δ the
gradient at the map's result. While a chunk runs forward, a `Tap` keeps φ and the graph's edge at z for every such
use, without hooks on the caller's modules. Pulling a column back to all edges at once then gives every δ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from spiritlevel.network.layers import Function, LinearMap, ParameterMode
from spiritlevel.network.tracing import Trace

# A bias so many times as large as all that is added to it has taken its last digits away.
DROWNED = 16


@dataclass(frozen=True)
class SampleAxis:
    """Where the samples sit in a tensor: dimension `axis` counts samples × `repeat`, samples outermost or not."""

    axis: int
    repeat: int = 1
    outermost: bool = True

    def split(self, tensor: Tensor) -> Tensor:
        """(samples, repeat, all other dimensions in order)."""
        moved = tensor.movedim(self.axis, 0)
        if self.outermost:
            return moved.reshape(moved.shape[0] // self.repeat, self.repeat, *moved.shape[1:])
        return moved.reshape(self.repeat, moved.shape[0] // self.repeat, *moved.shape[1:]).transpose(0, 1)


@dataclass
class LinearUse:
    """One use of a weight: φ, z without bias, and the edges at which δ and Wᵀδ arrive."""

    linear: LinearMap
    axis: SampleAxis
    phi: Tensor
    result: Tensor
    version: int
    edge: GradientEdge
    phi_edge: GradientEdge | None
    bias: str | None

    def product(self) -> Tensor:
        """Wφ without the bias.

        It is made again where an operation in place has overwritten the result, and where it drowned in a bias.
        """
        if self.result._version == self.version:
            bias = self.linear.bias
            if bias is None:
                return self.result
            dims = self.phi.dim() - 2 if "convolution" in self.linear.kind else 0
            found = self.result - bias.detach().reshape(-1, *[1] * dims)
            others = [dim for dim in range(found.dim()) if dim != found.dim() - 1 - dims]
            if not found.numel() or not bool((bias.abs() > DROWNED * found.abs().amax(others)).any()):
                return found
        return self.linear.apply(self.phi, self.linear.weight).detach()


@dataclass
class VectorUse:
    """One use of a scale or shift: the parameter's gradient is the sum of δ·factor over the broadcast dimensions."""

    name: str
    axis: SampleAxis
    edge: GradientEdge
    factor: Tensor | None
    reduce: Callable[[Tensor], Tensor]


class Tap(ParameterMode):
    """Records every use of the parameters in `axes`, the sample axis of each use in order."""

    def __init__(
        self, parameters: Mapping[str, Tensor], axes: Mapping[str, list[SampleAxis | None]], *, inputs: bool
    ) -> None:
        super().__init__(parameters)
        self.linear: list[LinearUse] = []
        self.vectors: list[VectorUse] = []
        self._axes = {name: iter(found) for name, found in axes.items()}
        self._inputs = inputs  # whether Wᵀδ will be asked for
        self._parameters = parameters

    def edges(self) -> list[GradientEdge]:
        found = [use.edge for use in self.linear] + [use.edge for use in self.vectors]
        return found + [use.phi_edge for use in self.linear if use.phi_edge is not None]

    def on_linear(self, linear: LinearMap) -> Any:
        phi = linear.inputs
        bias = self.name_of(linear.bias)
        axis = self._next_axis(linear.layer.name)
        if bias is not None:
            self._next_axis(bias)
        if axis is None:
            return linear.rebuild(phi)
        alias = phi
        if self._inputs and linear.kind != "lookup":
            # An alias that only this layer consumes: its gradient is this layer's Wᵀδ, also where φ is used again.
            # The first layer's would be pulled back for this alone; with several positions g is cheaper.
            if phi.requires_grad:
                alias = phi.view_as(phi)
            elif linear.kind == "dense" and phi.dim() == 2:
                alias = phi.detach().requires_grad_()
        result: Tensor = linear.rebuild(alias)
        if not result.requires_grad:  # nothing is recorded here
            return result
        phi_edge = get_gradient_edge(alias) if alias.requires_grad and alias is not phi else None
        self.linear.append(
            LinearUse(
                linear,
                axis,
                phi.detach(),
                result.detach(),
                result._version,
                get_gradient_edge(result),
                phi_edge,
                bias if bias in self._axes else None,
            )
        )
        return result

    def on_other(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        used = [
            leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor) and self.name_of(leaf) is not None
        ]
        result = function(*args, **kwargs)
        if name not in VECTOR_RULES or not used or not isinstance(result, Tensor) or not result.requires_grad:
            return result
        axes = {str(self.name_of(leaf)): self._next_axis(str(self.name_of(leaf))) for leaf in used}
        for parameter, axis in axes.items():
            if axis is not None:
                self._record_vector(name, parameter, axis, result, args, kwargs)
        return result

    def _next_axis(self, name: str) -> SampleAxis | None:
        return next(self._axes[name], None) if name in self._axes else None

    def _record_vector(
        self, name: str, parameter: str, axis: SampleAxis, result: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        rule = VECTOR_RULES[name]
        tensor = self._parameters[parameter]
        factor, channel = rule(tensor, args, kwargs)
        shape = tensor.shape
        if channel is not None:  # one entry a channel, dimension `channel` of the result
            dims = result.dim()
            shape = torch.Size([shape[0] if d == channel % dims else 1 for d in range(dims)])
        self.vectors.append(
            VectorUse(parameter, axis, get_gradient_edge(result), factor, _reduction(axis, shape, result.shape, tensor))
        )


def _reduction(axis: SampleAxis, shape: torch.Size, result: torch.Size, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """Sum an array of the result's shape over every dimension that the parameter was broadcast along, but samples."""
    padded = (1,) * (len(result) - len(shape)) + tuple(shape)
    summed = [d for d in range(len(result)) if d != axis.axis and padded[d] == 1 and result[d] != 1]

    def reduce(array: Tensor) -> Tensor:
        kept = array.sum(summed, keepdim=True) if summed else array
        split = axis.split(kept)  # (samples, repeat, rest)
        return split.sum(1).reshape(split.shape[0], *tensor.shape)

    return reduce


# --- rules: operation → (what δ is multiplied by, the channel dimension of the parameter or None for broadcasting) ---

Rule = Callable[[Tensor, tuple[Any, ...], dict[str, Any]], tuple[Tensor | None, int | None]]


def _shift(*_call: Any) -> tuple[Tensor | None, int | None]:
    return None, None


def _channel_shift(*_call: Any) -> tuple[Tensor | None, int | None]:
    return None, 1


def _scale(parameter: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, int | None]:
    operands = (*args, *kwargs.values())
    other = next((operand for operand in operands if operand is not parameter), parameter)
    return (other.detach() if isinstance(other, Tensor) else torch.as_tensor(float(other))), None


def _channel(parameter: Tensor, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> tuple[Tensor | None, int | None]:
    """prelu(x, a): the derivative by a is min(x, 0)."""
    return args[0].detach().clamp(max=0), 1 if args[0].dim() > 1 and parameter.numel() > 1 else None


def _normalization(
    arguments: tuple[str, ...], channel: int | None, function: Callable[..., Tensor]
) -> Callable[[Tensor, tuple[Any, ...], dict[str, Any]], tuple[Tensor | None, int | None]]:
    def rule(parameter: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, int | None]:
        bound = dict(zip(arguments, args, strict=False)) | kwargs
        if bound.get("weight") is not parameter:
            return None, channel
        bare = {key: value for key, value in bound.items() if key not in ("weight", "bias")}
        with torch.no_grad():
            return function(**bare), channel

    return rule


VECTOR_RULES: dict[str, Rule] = {
    "add": _shift,
    "sub": _shift,
    "expand": _shift,
    "mul": _scale,
    "prelu": _channel,
    "linear": _shift,
    "conv1d": _channel_shift,
    "conv2d": _channel_shift,
    "conv3d": _channel_shift,
    "conv_transpose1d": _channel_shift,
    "conv_transpose2d": _channel_shift,
    "conv_transpose3d": _channel_shift,
    "batch_norm": _normalization(
        ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"), 1, F.batch_norm
    ),
    "group_norm": _normalization(("input", "num_groups", "weight", "bias", "eps"), 1, F.group_norm),
    "instance_norm": _normalization(
        ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"),
        1,
        F.instance_norm,
    ),
    "layer_norm": _normalization(("input", "normalized_shape", "weight", "bias", "eps"), None, F.layer_norm),
    "rms_norm": _normalization(("input", "normalized_shape", "weight", "eps"), None, F.rms_norm),
}


def sample_axes(small: Trace, large: Trace, sizes: tuple[int, int]) -> dict[str, list[SampleAxis | None]]:
    """Where the samples sit in the result of every use of a parameter, from traces with two numbers of samples.

    None where it cannot be told: no dimension or more than one changes with the number of samples.
    """
    axes: dict[str, list[SampleAxis | None]] = {}
    if [name for name, _ in small.calls] != [name for name, _ in large.calls]:
        return axes
    for (name, first), (_, second) in zip(small.calls, large.calls, strict=True):
        axes.setdefault(name, []).append(_sample_axis(first, second, sizes))
    return axes


def _sample_axis(first: tuple[int, ...], second: tuple[int, ...], sizes: tuple[int, int]) -> SampleAxis | None:
    if len(first) != len(second):
        return None
    changed = [d for d in range(len(first)) if first[d] != second[d]]
    if len(changed) != 1:
        return None
    d = changed[0]
    repeat, rest = divmod(first[d], sizes[0])
    if rest or second[d] != repeat * sizes[1]:
        return None
    return SampleAxis(d, repeat)
