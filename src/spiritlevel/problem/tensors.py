"""A model's tensors as a measurement uses them: which are free, and in which precision."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spiritlevel.errors import SpiritLevelError
from spiritlevel.problem import checks
from spiritlevel.problem.batches import normal
from spiritlevel.problem.contract import Parameters
from spiritlevel.problem.devices import has_double, with_double
from spiritlevel.problem.shards import WHOLE, Shards

# How far a nudge moves an entry, in units of its last place: in double precision, for which nothing else stands, about what a few
# operations leave in it; in single precision just so far that everything is rounded otherwise.
NUDGE = {torch.float64: 4, torch.float32: 1}
# Matrices with entries of this size, or as small, are measured in double precision.
EXTREME = 1e5


@dataclass(frozen=True)
class Collected:
    """The tensors of a model in the precision of the measurement.

    Attributes:
        parameters: Those to measure. They and buffers are copies, so that a network that writes into them writes into
            nothing of the caller's.
        fixed: Every other tensor the model needs.
        converted: Whether the precision is not the model's own, so that inputs must be converted too.
        notes: What a reader must know of it.
    """

    parameters: Parameters
    fixed: Parameters
    converted: bool
    notes: tuple[str, ...]


def collect(
    model: nn.Module, patterns: Sequence[str] | None, dtype: torch.dtype | None, shards: Shards = WHOLE
) -> Collected:
    """The parameters that match `patterns`, all trainable ones where None, in `dtype` or the precision that fits."""
    named, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    chosen = _matching(named, patterns) if patterns is not None else set(named)
    if not any(named[name].requires_grad for name in chosen):
        raise SpiritLevelError(
            "every parameter is frozen (requires_grad=False), so there is nothing to measure: "
            "call requires_grad_(True) on those that should count"
        )
    tensors = {**named, **buffers}
    for name, tensor in tensors.items():
        checks.check_kind(name, tensor)
    parts = {name: with_double(shards.part(name, tensor.detach())) for name, tensor in tensors.items()}
    sizes = (_size(shards, name, parts[name]) for name, tensor in named.items() if tensor.dim() > 1)
    precision, notes = _precision(tensors.values(), sizes, dtype)
    converted = dtype is not None or bool(notes)
    notes += _devices_left(tensors.values())
    moved = {name: as_precision(parts.pop(name), precision) for name in tensors}
    for name, tensor in moved.items():
        checks.check_finite(name, tensor, shards, masks=name not in named)
    callers = {name: None if shards.divided else tensor for name, tensor in named.items()}  # parts are copies
    free = {name: _own(moved[name], callers[name]) for name in named if name in chosen and named[name].requires_grad}
    frozen = {name: normal(moved[name]) for name in named if name not in free}
    fixed = {**frozen, **{name: moved[name].clone() for name in buffers}}
    return Collected(free, fixed, converted, notes)


def _precision(
    tensors: Iterable[Tensor], sizes: Iterable[float], asked: torch.dtype | None
) -> tuple[torch.dtype, tuple[str, ...]]:
    """The precision asked for, or the widest the model uses, at least single, double where single would not do; and why."""
    precision, half = asked or torch.float32, []
    for tensor in tensors:
        if tensor.dtype in (torch.float16, torch.bfloat16):  # half precision cannot carry second derivatives
            half.append(str(tensor.dtype).removeprefix("torch."))
        elif asked is None and tensor.is_floating_point() and tensor.requires_grad:
            precision = torch.promote_types(precision, tensor.dtype)
    upcast = str(precision).removeprefix("torch.")
    notes = [f"parameters in {name} were upcast to {upcast} for measuring" for name in half]
    extreme = _extreme_size(sizes) if asked is None and precision == torch.float32 else None
    if extreme is not None:
        precision = torch.float64
        notes.append(
            f"measured in double precision: a weight has entries of about {extreme:.1g}, and curvature, which goes with "
            "their square, would leave the range of single precision"
        )
    return precision, tuple(dict.fromkeys(notes))


def _devices_left(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    """That the measurement is not where the model is, and why."""
    found = dict.fromkeys(str(tensor.device) for tensor in tensors if not has_double(tensor.device))
    return tuple(
        f"measured on the CPU: sums are taken in double precision, which {name} does not have" for name in found
    )


def _size(shards: Shards, name: str, part: Tensor) -> float:
    """The root mean square of a parameter's entries."""
    square = float(part.double().square().sum())
    return math.sqrt(shards.total(square) / max(1, shards.count(name, part)))


def _extreme_size(sizes: Iterable[float]) -> float | None:
    """The size of a matrix so large or small that squares of what it is multiplied with leave the range; None if none is.

    A network and its rescaled twin have the same outputs, but the twin's gradients may be 1e20 or 1e-20.
    """
    return next((size for size in sizes if size > 0 and not 1 / EXTREME < size < EXTREME), None)


def _matching(named: Mapping[str, Tensor], patterns: Sequence[str]) -> set[str]:
    chosen: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = fnmatch.filter(named, pattern)
        if not found:
            raise SpiritLevelError(f"no parameter matches {pattern!r}; the model has {', '.join(list(named)[:8])}, …")
        chosen.update(found)
    return chosen


def _own(tensor: Tensor, callers: Tensor | None) -> Tensor:
    """A copy, unless the change of precision or device has made one, or it is none of the caller's."""
    if callers is None or (tensor.dtype, tensor.device) != (callers.dtype, callers.device):
        return tensor
    return tensor.clone()


def as_precision(tensor: Tensor, precision: torch.dtype) -> Tensor:
    """The tensor in this precision if it holds real numbers, else as it is."""
    return tensor.to(precision) if tensor.is_floating_point() else tensor


def in_last_places(tensors: Parameters, draw: int) -> Parameters:
    """The same tensors, each entry a few units of its last place larger or smaller, by signs that a draw has always the same."""
    generator = torch.Generator().manual_seed(draw)

    def nudged(tensor: Tensor) -> Tensor:
        signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor) * 2 - 1
        return tensor * (1 + NUDGE[tensor.dtype] * torch.finfo(tensor.dtype).eps * signs)

    return {name: nudged(tensor) for name, tensor in tensors.items()}


def is_about_precision(error: RuntimeError) -> bool:
    """Whether an operation refused operands of this precision, which torch says in words only ("dtype", "scalar type")."""
    return "type" in str(error)
