"""Batch normalization that is cheap to differentiate twice: torch's numbers, and torch's own wherever statistics are the batch's."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spiritlevel.curvature import normalizations
from spiritlevel.curvature.cheap import CheapSecondDerivatives
from twice import SETS, assert_second_derivatives_of_torch, kinds_of_nodes, products_like_torch


@pytest.fixture(autouse=True)
def _few_entries_too(monkeypatch) -> None:
    monkeypatch.setattr(normalizations, "FEWEST", 0)


LAYERS = {
    "pictures": (nn.BatchNorm2d(4), (5, 4, 6, 3)),
    "vectors": (nn.BatchNorm1d(4), (7, 4)),
    "sequences": (nn.BatchNorm1d(4), (5, 4, 6)),
    "volumes": (nn.BatchNorm3d(4), (2, 4, 3, 2, 3)),
    "a large epsilon": (nn.BatchNorm2d(4, eps=0.7), (5, 4, 3, 3)),
    "without weight and bias": (nn.BatchNorm2d(4, affine=False), (5, 4, 3, 3)),
}


def made(layer: nn.Module) -> nn.Module:
    """In eval mode, double precision, with statistics and weights that are not those it starts with."""
    generator = torch.Generator().manual_seed(3)
    for tensor in layer.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.2)
    return layer.double().eval()


@pytest.mark.parametrize(
    ("name", "chosen"),
    [(name, chosen) for name, (layer, _) in LAYERS.items() for chosen in SETS if layer.affine or chosen == [0]],
    ids=str,
)
def test_second_derivatives_are_those_of_torch(name: str, chosen: list[int]) -> None:
    layer, shape = LAYERS[name]
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_second_derivatives_of_torch(made(layer), x, chosen)


def test_weight_without_bias() -> None:
    class WithoutBias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3).double() + 0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.batch_norm(x, torch.ones(3).double(), torch.full((3,), 2.0).double(), self.weight)

    x = torch.randn(5, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for chosen in ([0], [1], [0, 1]):
        assert_second_derivatives_of_torch(WithoutBias(), x, chosen)


def kind(call) -> str:
    with CheapSecondDerivatives():
        return type(call().grad_fn).__name__


def test_few_entries_are_left_to_torch(monkeypatch) -> None:
    monkeypatch.setattr(normalizations, "FEWEST", 24)
    mean, variance = torch.zeros(3), torch.ones(3)
    few, enough = (torch.randn(count, 3, 4, requires_grad=True) for count in (1, 2))
    assert kind(lambda: F.batch_norm(few, mean, variance)) == "NativeBatchNormBackward0"
    assert kind(lambda: F.batch_norm(enough, mean, variance)) == "_AppliedBackward"


def test_statistics_of_the_batch_and_mixed_precisions_are_left_to_torch() -> None:
    x = torch.randn(6, 3, 4, requires_grad=True)
    mean, variance = torch.zeros(3), torch.ones(3)
    assert kind(lambda: F.batch_norm(x, mean, variance)) == "_AppliedBackward"
    assert kind(lambda: F.batch_norm(x, None, None, training=True)) == "NativeBatchNormBackward0"
    assert kind(lambda: F.batch_norm(x, mean, variance, training=True)) == "NativeBatchNormBackward0"
    assert kind(lambda: F.batch_norm(x.bfloat16(), mean, variance)) == "NativeBatchNormBackward0"
    with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'running_mean'"):
        kind(lambda: F.batch_norm(x, mean.clone().requires_grad_(), variance))
    direct = lambda: torch.batch_norm(x, None, None, mean, variance, False, 0.1, 1e-5, False)  # noqa: E731
    assert kind(direct) == "NativeBatchNormBackward0"


@pytest.mark.parametrize("frozen", [[], ["1.weight"], ["1.bias"], ["0.weight", "1.weight"]], ids=str)
def test_products_use_it(frozen: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3))
    made(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    x, y = torch.randn(23, 1, 5, 5, dtype=torch.float64), torch.randint(0, 3, (23,))
    products = products_like_torch(model, x, y)
    assert "NativeBatchNormBackwardBackward0" not in kinds_of_nodes(products)
