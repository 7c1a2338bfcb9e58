"""Changes of the input absorbed in the first layer (Dinh et al. 2017, section 5.2 and Appendix C).

With u = A(x − c) as the new data and W' = W A⁻¹, b' = b + W c as the new first layer, f'(u) = f(x) for every x.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spiritlevel.errors import SpiritLevelError
from spiritlevel.symmetry.moves import refuse_different_outputs
from spiritlevel.symmetry.quiet import outputs


@dataclass(frozen=True)
class MappedInput:
    """A model and data in new input coordinates u = matrix @ (x − shift), with the same outputs as before."""

    model: nn.Module
    inputs: Tensor
    matrix: Tensor
    shift: Tensor


def standardize(model: nn.Module, inputs: Tensor) -> MappedInput:
    """Each feature (or channel) of the data with mean 0 and standard deviation 1, absorbed in the first layer."""
    rows = _as_rows(inputs, _first_layer(model))
    spread, mean = rows.std(dim=0, correction=0), rows.mean(dim=0)
    return affine(model, inputs, torch.diag(1 / torch.where(spread > 0, spread, 1.0)), mean)


def whiten(model: nn.Module, inputs: Tensor) -> MappedInput:
    """Data with the identity as covariance over features (or channels), absorbed in the first layer."""
    rows = _as_rows(inputs, _first_layer(model))
    mean = rows.mean(dim=0)
    values, vectors = torch.linalg.eigh((rows - mean).T @ (rows - mean) / len(rows))
    if float(values[0]) <= 1e-10 * float(values[-1]):
        raise SpiritLevelError(
            f"whitening needs data that spans all {len(values)} directions; the covariance has eigenvalues from "
            f"{values[0]:.1e} to {values[-1]:.1e}: remove constant or dependent features, or use standardize"
        )
    return affine(model, inputs, vectors @ torch.diag(values.rsqrt()) @ vectors.T, mean)


def affine(model: nn.Module, inputs: Tensor, matrix: Tensor, shift: Tensor) -> MappedInput:
    """u = matrix @ (x − shift) for an invertible matrix over features (or channels), absorbed in the first layer.

    A first layer without bias needs shift = 0; a convolution that pads with zeros too, because padding is not shifted.
    Outputs before and after are compared and must agree up to rounding.
    """
    twin = copy.deepcopy(model)
    layer = _first_layer(twin)
    _refuse_shift(layer, shift)
    inverse = torch.linalg.inv(matrix.double())
    with torch.no_grad():
        weight = layer.weight.detach().double()
        if layer.bias is not None:
            kernel = weight.flatten(2).sum(-1) if weight.dim() > 2 else weight
            layer.bias.copy_((layer.bias.double() + kernel @ shift.double()).to(layer.bias.dtype))
        layer.weight.copy_(torch.einsum("oi...,ij->oj...", weight, inverse).to(layer.weight.dtype))
    mapped = _mapped(inputs, matrix.to(inputs.dtype), shift.to(inputs.dtype), layer)
    refuse_different_outputs(outputs(model, (inputs,), {}), outputs(twin, (mapped,), {}))
    return MappedInput(twin, mapped, matrix, shift)


def _first_layer(model: nn.Module) -> nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d:
    """The first linear or convolutional module; that the input goes there and nowhere else is checked on outputs."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            if isinstance(module, nn.Linear) or module.groups == 1:
                return module
            break
    raise SpiritLevelError(
        "an input map is absorbed by a linear layer or an ungrouped convolution that reads the input; this model has none first"
    )


def _refuse_shift(layer: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d, shift: Tensor) -> None:
    if not bool((shift != 0).any()):
        return
    if layer.bias is None:
        raise SpiritLevelError("a shift of the input needs a first layer with bias to absorb it; use shift = 0")
    if not isinstance(layer, nn.Linear) and (isinstance(layer.padding, str) or any(layer.padding)):
        raise SpiritLevelError(
            f"a shift of the input cannot pass a convolution that pads with zeros (padding {layer.padding}); use shift = 0"
        )


def _as_rows(inputs: Tensor, layer: nn.Module) -> Tensor:
    """The data as vectors of the features (or channels) the first layer mixes, in float64."""
    data = inputs.double()
    if isinstance(layer, nn.Linear):
        return data.reshape(-1, layer.in_features)
    return data.movedim(1, -1).reshape(-1, data.shape[1])


def _mapped(inputs: Tensor, matrix: Tensor, shift: Tensor, layer: nn.Module) -> Tensor:
    if isinstance(layer, nn.Linear):
        features = inputs.reshape(-1, layer.in_features)
        return ((features - shift) @ matrix.T).reshape(inputs.shape)
    mapped = ((inputs.movedim(1, -1) - shift) @ matrix.T).movedim(-1, 1)
    return mapped.clone(memory_format=torch.contiguous_format)
