"""Applying rescalings: copies with other weights and the same function."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spiritlevel.errors import RescalingError
from spiritlevel.symmetry.group import ScaleGroup
from spiritlevel.symmetry.quiet import outputs
from spiritlevel.symmetry.trace import tensors_in

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""The largest change of outputs, relative to their largest value, that rounding may cause."""


@dataclass(frozen=True, eq=False)
class Rescaling:
    """T: θ → s(f) ∘ θ, a member of a network's group of symmetries, given by the logarithms of its factors f.

    >>> import spiritlevel as sl
    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    >>> double = sl.find_symmetries(model, torch.ones(1, 1)).rescaling([2.0])
    >>> {name: scale.item() for name, scale in double.scales().items()}  # what multiplies the weights
    {'0.weight': 2.0, '2.weight': 0.5}
    >>> {name: scale.item() for name, scale in double.diagonal().items()}  # and what multiplies derivatives
    {'0.weight': 0.5, '2.weight': 2.0}
    >>> double.then(double).factors.item(), double.then(double.inverse()).factors.item()
    (4.0, 1.0)
    >>> double.transform({"0.weight": torch.ones(1, 1), "2.weight": torch.ones(1, 1)})["2.weight"].item()
    0.5
    >>> twin = double.apply(model)  # a copy
    >>> torch.equal(twin[0].weight, 2 * model[0].weight), double.inverse().apply_(twin) is twin  # in place
    (True, True)
    """

    symmetries: ScaleGroup
    log_factors: Tensor

    @property
    def factors(self) -> Tensor:
        """The independent factors f (float64)."""
        return self.log_factors.exp()

    def scales(self) -> dict[str, Tensor]:
        """What multiplies each parameter and buffer that moves, broadcastable to its shape (float64)."""
        return {name: logs.exp() for name, logs in self.symmetries.log_scales(self.log_factors).items()}

    def diagonal(self) -> dict[str, Tensor]:
        """The diagonal of D in H(Tθ) = D H(θ) D and ∇L(Tθ) = D ∇L(θ): the inverse of `scales`, parameters only."""
        tensors, logs = self.symmetries.tensors, self.symmetries.log_scales(self.log_factors)
        return {name: (-value).exp() for name, value in logs.items() if not tensors[name].is_buffer}

    def transform(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """T on a dictionary of tensors by name; entries that no factor touches are passed on as they are."""
        scales, aliases = self.scales(), self.symmetries.aliases
        result = {}
        for name, tensor in state.items():
            scale = scales.get(aliases.get(name, name))
            result[name] = tensor if scale is None else _scaled(name, tensor, scale)
        return result

    def then(self, other: "Rescaling") -> "Rescaling":
        """This rescaling followed by another of the same network; factors multiply."""
        if other.symmetries is not self.symmetries and other.log_factors.shape != self.log_factors.shape:
            raise RescalingError(
                f"rescalings of different networks do not compose: {len(self.log_factors)} and "
                f"{len(other.log_factors)} factors; make both from the same Symmetries"
            )
        return Rescaling(self.symmetries, self.log_factors + other.log_factors)

    def __matmul__(self, other: "Rescaling") -> "Rescaling":
        return other.then(self)

    def inverse(self) -> "Rescaling":
        """The rescaling that undoes this one."""
        return Rescaling(self.symmetries, -self.log_factors)

    def __pow__(self, exponent: float) -> "Rescaling":
        return Rescaling(self.symmetries, exponent * self.log_factors)

    def apply(self, model: nn.Module) -> nn.Module:
        """A rescaled copy of the model, checked on the example to compute the same function."""
        return self.apply_(copy.deepcopy(model))

    def apply_(self, model: nn.Module) -> nn.Module:
        """Rescale the model in place, checked on the example; a refusal leaves the model as it was."""
        state = _distinct_state(model)
        self._refuse_other_network(state)
        names = [name for name in state if self.symmetries.aliases.get(name, name) in self.symmetries.tensors]
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

    def _refuse_other_network(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.symmetries.tensors.items():
            if name not in state or state[name].shape != tensor.shape:
                got = "no such tensor" if name not in state else f"shape {tuple(state[name].shape)}"
                raise RescalingError(
                    f"this rescaling was made for a network with {name} of shape {tuple(tensor.shape)}, but this model "
                    f"has {got}; call find_symmetries on this model"
                )

    def __repr__(self) -> str:
        largest = self.log_factors.abs().max().item() if len(self.log_factors) else 0.0
        return f"Rescaling(dimension={len(self.log_factors)}, largest |log factor|={largest:.3g})"


def _scaled(name: str, tensor: Tensor, scale: Tensor) -> Tensor:
    """tensor · scale rounded once, refusing numbers that the dtype cannot hold."""
    result = (tensor.double() * scale.to(tensor.device)).to(tensor.dtype)
    if bool((tensor.isfinite() & ~result.isfinite()).any()):
        raise RescalingError(_range_message(name, tensor, "overflow"))
    if bool(((tensor != 0) & (result == 0)).any()):
        raise RescalingError(_range_message(name, tensor, "underflow to zero"))
    return result


def _range_message(name: str, tensor: Tensor, what: str) -> str:
    return (
        f"the rescaled {name} would {what} in {str(tensor.dtype).removeprefix('torch.')}; "
        "use smaller factors or convert the model to float64"
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
    old, new = before.double(), after.double()
    same = (old == new) | (old.isnan() & new.isnan())
    difference = torch.where(same, 0.0, (new - old).abs())
    largest = torch.where(old.isfinite(), old, 0.0).abs().max().item() if old.numel() else 0.0
    worst = difference.max().item() if old.numel() else 0.0
    if worst == 0.0:
        return 0.0
    return worst / largest if largest and worst == worst else float("inf")
