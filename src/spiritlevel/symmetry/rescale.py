"""Applying rescalings: copies with other weights and the same function."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from spiritlevel.errors import RescalingError
from spiritlevel.problem.devices import with_double
from spiritlevel.symmetry.group import ScaleGroup
from spiritlevel.symmetry.moves import Move


@dataclass(frozen=True, eq=False, repr=False)
class Rescaling(Move):
    """T: θ → s(f) ∘ θ, a member of a network's group of symmetries, given by the logarithms of its factors f.

    >>> import spiritlevel as sl
    >>> from torch import nn
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
    def shapes(self) -> Mapping[str, torch.Size]:
        """The tensors that the factors move, with their shapes."""
        return {name: tensor.shape for name, tensor in self.symmetries.tensors.items()}

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

    def __repr__(self) -> str:
        largest = self.log_factors.abs().max().item() if len(self.log_factors) else 0.0
        return f"Rescaling(dimension={len(self.log_factors)}, largest |log factor|={largest:.3g})"


def _scaled(name: str, tensor: Tensor, scale: Tensor) -> Tensor:
    """tensor · scale rounded once, refusing numbers that the dtype cannot hold."""
    wide = with_double(tensor).double()
    result = (wide * scale.to(wide.device)).to(tensor)
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
