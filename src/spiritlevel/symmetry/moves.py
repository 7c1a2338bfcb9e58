"""Applying what leaves a function alone: copies with other weights, checked on the example."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from spiritlevel.errors import RescalingError
from spiritlevel.problem.devices import with_double
from spiritlevel.symmetry.group import ScaleGroup
from spiritlevel.symmetry.quiet import outputs
from spiritlevel.symmetry.trace import tensors_in

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""The largest change of outputs, relative to their largest value, that rounding may cause."""


class Move(ABC):
    """Something that can be done to a network's parameters and leaves its function alone."""

    symmetries: ScaleGroup

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, torch.Size]:
        """The tensors that must be there, with their shapes."""

    @abstractmethod
    def transform(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The move on a dictionary of tensors by name."""

    def apply(self, model: nn.Module) -> nn.Module:
        """A copy of the model with other parameters, checked on the example to compute the same function."""
        return self.apply_(copy.deepcopy(model))

    def apply_(self, model: nn.Module) -> nn.Module:
        """Change the model in place, checked on the example; a refusal leaves the model as it was."""
        state, shapes = _distinct_state(model), self.shapes
        self._refuse_other_network(state, shapes)
        names = [name for name in state if self.symmetries.aliases.get(name, name) in shapes]
        saved = {name: state[name].detach().clone() for name in names}
        changed = self.transform(saved)
        args, kwargs = self.symmetries.example
        before = outputs(model, args, kwargs)
        _assign(state, changed)
        try:
            refuse_different_outputs(before, outputs(model, args, kwargs))
        except Exception:
            _assign(state, saved)
            raise
        return model

    def _refuse_other_network(self, state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
        for name, shape in shapes.items():
            if name not in state or state[name].shape != shape:
                got = "no such tensor" if name not in state else f"shape {tuple(state[name].shape)}"
                raise RescalingError(
                    f"this {type(self).__name__.lower()} was made for a network with {name} of shape {tuple(shape)}, but "
                    f"this model has {got}; call find_symmetries on this model"
                )


def _distinct_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their first name, each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def _assign(state: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        state[name].copy_(value)


def refuse_different_outputs(before: Any, after: Any) -> None:
    """Refuse outputs that differ by more than rounding, relative to the largest output."""
    for old, new in zip(tensors_in(before), tensors_in(after), strict=True):
        if not old.is_floating_point():
            if not torch.equal(old, new):
                raise RescalingError("the rescaled model returned other integers than the original on the example")
            continue
        change, tolerance = relative_change(old, new), TOLERANCES.get(old.dtype, 1e-4)
        if not change <= tolerance:
            raise RescalingError(
                f"outputs on the example changed by {change:.2e} of their largest value, more than the {tolerance:.0e} "
                f"that rounding in {str(old.dtype).removeprefix('torch.')} explains; use smaller factors or float64"
            )


def relative_change(before: Tensor, after: Tensor) -> float:
    """max |after − before| / max |before|; infinite where one is not finite and the other is."""
    if before.shape != after.shape:
        return float("inf")
    old, new = with_double(before).double(), with_double(after).double()
    same = (old == new) | (old.isnan() & new.isnan())
    difference = torch.where(same, 0.0, (new - old).abs())
    largest = torch.where(old.isfinite(), old, 0.0).abs().max().item() if old.numel() else 0.0
    worst = difference.max().item() if old.numel() else 0.0
    if worst == 0.0:
        return 0.0
    return worst / largest if largest and worst == worst else float("inf")
