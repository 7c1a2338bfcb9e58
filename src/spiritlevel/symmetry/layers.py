"""Rescaling by one factor a layer, as in the papers."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from spiritlevel.symmetry.discover import find_symmetries
from spiritlevel.symmetry.layerwise import layer_log_factors
from spiritlevel.symmetry.rescale import Rescaling


def rescale_layers(model: nn.Module, factors: Mapping[str, float], example_input: Any) -> nn.Module:
    """A copy of the model with each named layer's weight multiplied by its factor, computing the same function.

    factors: by the name of the weight; a linear layer that is not mentioned keeps its weight. Biases, running means
    and normalization factors follow by themselves: in a chain b_k is multiplied by α_1⋯α_k. Factors that are not a
    symmetry are refused with the product that is required (in a chain Π α_k = 1).

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    >>> _ = nn.init.constant_(model[0].weight, 8.0), nn.init.constant_(model[2].weight, 2.0)
    >>> twin = rescale_layers(model, {"0.weight": 0.25, "2.weight": 4.0}, torch.ones(1, 1))
    >>> [weight.item() for weight in twin.parameters()]
    [2.0, 8.0]
    """
    symmetries = find_symmetries(model, example_input)
    logs = layer_log_factors(symmetries, symmetries.maps, factors)
    return Rescaling(symmetries, logs).apply(model)
