"""Convolutions that are cheap to differentiate twice: torch's numbers, whatever the settings."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spiritlevel.curvature.cheap import CheapSecondDerivatives
from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.problem.problem import Problem
from twice import SETS, assert_second_derivatives_of_torch, kinds_of_nodes, products_like_torch

LAYERS = {
    "plain": (nn.Conv2d(3, 4, 3), (5, 3, 6, 6)),
    "every setting": (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2), (3, 4, 7, 6)),
    "without bias": (nn.Conv2d(3, 4, 3, bias=False), (5, 3, 6, 6)),
    "depthwise": (nn.Conv2d(4, 4, 3, padding=1, groups=4), (2, 4, 5, 5)),
    "padding by name": (nn.Conv2d(3, 4, 3, padding="same"), (5, 3, 6, 6)),
    "circular padding": (nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (5, 3, 6, 6)),
    "one dimension": (nn.Conv1d(2, 3, 3, stride=2, padding=1), (4, 2, 9)),
    "three dimensions": (nn.Conv3d(2, 3, 2, padding=1), (2, 2, 4, 3, 4)),
    "without a batch": (nn.Conv2d(3, 4, 3), (3, 6, 6)),
}


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        (name, chosen)
        for name, (layer, _) in LAYERS.items()
        for chosen in SETS
        if layer.bias is not None or 2 not in chosen
    ],
    ids=str,
)
def test_second_derivatives_are_those_of_torch(name: str, chosen: list[int]) -> None:
    layer, shape = LAYERS[name]
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_second_derivatives_of_torch(layer.double(), x, chosen)


def test_settings_may_be_named() -> None:
    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    weight = torch.randn(4, 2, 3, 3, requires_grad=True)
    with CheapSecondDerivatives():
        found = F.conv2d(x, weight=weight, stride=2, padding=(1, 0), groups=2)
    assert type(found.grad_fn).__name__ == "_AppliedBackward"
    torch.testing.assert_close(found, F.conv2d(x, weight=weight, stride=2, padding=(1, 0), groups=2))


def test_products_use_them() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)).double()
    data = (torch.randn(6, 1, 5, 5, dtype=torch.float64), torch.randint(0, 3, (6,)))
    products = HessianProducts(Problem(model, "cross_entropy", data))
    products([torch.ones(products.flat.size, dtype=torch.float64)])
    kinds = kinds_of_nodes(products)
    assert any("_Gradient" in kind for kind in kinds)
    assert "ConvolutionBackwardBackward0" not in kinds


@pytest.mark.parametrize("frozen", [["0.weight"], ["2.weight"], ["0.bias", "2.bias"], ["2.weight", "2.bias"]], ids=str)
def test_frozen_parts_dead_filters_and_ragged_batches(frozen: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    model = model.double()
    x, y = torch.randn(23, 1, 6, 6, dtype=torch.float64), torch.randint(0, 3, (23,))
    with torch.no_grad():
        model[0].weight[1] = 0
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    products_like_torch(model, x, y)
