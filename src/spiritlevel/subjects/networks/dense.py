"""Fully connected networks with ReLU between their layers."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn


class FullyConnected(nn.Sequential):
    """Linear maps fc1, fc2, … of the given `sizes` (input first, output last) with ReLU between them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        for i in range(1, len(sizes)):
            layers[f"fc{i}"] = nn.Linear(sizes[i - 1], sizes[i])
            if i < len(sizes) - 1:
                layers[f"relu{i}"] = nn.ReLU()
        super().__init__(layers)
