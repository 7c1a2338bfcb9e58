"""Gradients of weights that are left out where only their derivatives are asked for."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from spiritlevel.curvature import linear_maps
from spiritlevel.curvature.cheap import CheapSecondDerivatives
from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.curvature.twofold import Asked
from spiritlevel.problem.problem import Problem
from twice import SETS, assert_second_derivatives_of_torch, products_like_torch


@pytest.fixture(autouse=True)
def _few_multiplications_too(monkeypatch) -> None:
    monkeypatch.setattr(linear_maps, "FEWEST", 0)


def data(*shape: int, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(*shape, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, classes, shape[:1], generator=generator)


@pytest.mark.parametrize("chosen", SETS, ids=str)
@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4), (4,)], ids=str)
def test_second_derivatives_are_those_of_torch(shape: tuple[int, ...], chosen: list[int]) -> None:
    torch.manual_seed(0)
    assert_second_derivatives_of_torch(nn.Linear(4, 3).double(), data(*shape)[0], chosen)


@pytest.mark.parametrize("chosen", [[0], [1], [0, 1]], ids=str)
def test_second_derivatives_without_a_bias(chosen: list[int]) -> None:
    torch.manual_seed(0)
    assert_second_derivatives_of_torch(nn.Linear(4, 3, bias=False).double(), data(5, 4)[0], chosen)


class Tied(nn.Module):
    """One weight that is used twice, once as it is and once transposed, which torch multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.last = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(torch.tanh(F.linear(x, self.weight)) @ self.weight))


class Computed(nn.Module):
    """A weight that is computed: what arrives at it goes on, so that its value counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)
        self.kernel = nn.Parameter(torch.randn(1, 1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved = F.conv1d(F.pad(x.unsqueeze(1), (0, 1)), self.kernel.exp()).squeeze(1)
        return self.last(torch.tanh(F.linear(moved, self.first.weight.sin(), self.first.bias)))


class OneStep(nn.Module):
    """Outputs after one step of training: a network that takes gradients of its own weights, whose values count."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first, self.last = nn.Conv1d(1, 2, 2), nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("own_data", torch.randn(7, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [w if w.requires_grad else w.clone().requires_grad_() for w in (self.conv.weight, self.first.weight)]
        with torch.enable_grad():
            inner = self._outputs(self.own_data, *weights).square().mean()
            steps = torch.autograd.grad(inner, weights, create_graph=True)
        return self._outputs(x, *(weight - 0.3 * step for weight, step in zip(weights, steps, strict=True)))

    def _outputs(self, x: torch.Tensor, kernel: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        moved = torch.tanh(F.conv1d(x.unsqueeze(1), kernel, self.conv.bias)).flatten(1)
        return self.last(torch.tanh(F.linear(moved, weight, self.first.bias)))


@pytest.mark.parametrize("network", [Tied, Computed, OneStep], ids=lambda network: network.__name__)
def test_products_with_networks_whose_weights_are_not_just_multiplied_by(network: type[nn.Module]) -> None:
    torch.manual_seed(0)
    products_like_torch(network().double(), *data(23, 3))


@pytest.mark.parametrize("frozen", [[], ["0.weight"], ["2.weight"], ["0.bias", "2.bias"]], ids=str)
def test_products_with_frozen_parts(frozen: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    products_like_torch(model, *data(23, 3))


class _Kernels(TorchDispatchMode):
    """Counts matrix products, and what is asked of convolutions going back."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name == "convolution_backward":
            self.counts.update(each for each, asked in zip(("to x", "to W", "to b"), args[-1], strict=True) if asked)
        elif name in ("mm", "addmm"):
            self.counts["products"] += 1
        return function(*args, **(kwargs or {}))


def test_a_graph_that_is_built_anew_leaves_out_the_gradients_of_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 4), nn.Tanh(), nn.Linear(4, 3))
    products = HessianProducts(
        Problem(model.double(), "cross_entropy", data(6, 1, 4, 4)), budget=0, method="kept graph"
    )
    vector = torch.ones(products.flat.size, dtype=torch.float64)
    products([vector])  # finds out how large graphs are
    products.release()
    with _Kernels() as first:
        products([vector])
    with _Kernels() as again:
        products([vector])
    # One for each layer; a bias's gradient comes with its weight's, or is a sum.
    assert first.counts - again.counts == Counter({"products": 2, "to W": 1, "to b": 1})


def test_values_count_until_they_are_not_asked_for() -> None:
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    asked = Asked()
    with CheapSecondDerivatives(asked):
        loss = layer(x).square().sum()
        (before,) = torch.autograd.grad(loss, layer.weight, create_graph=True)
        asked.values = False
        (after,) = torch.autograd.grad(loss, layer.weight, create_graph=True)
    (plain,) = torch.autograd.grad(layer(x).square().sum(), layer.weight)
    torch.testing.assert_close(before, plain)
    assert not after.any()
    assert after.requires_grad
