"""κ: what its number cost, and nothing that it does not need."""

import math

import pytest
import torch
from torch import nn

import spiritlevel as sl
from spiritlevel.curvature import hessian
from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.curvature.ways import Ways

DATA = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 3


def network(activation: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, 3))


@pytest.fixture
def no_preflight(monkeypatch) -> None:
    def refuse(ways: Ways) -> str:
        raise AssertionError("a preflight that nothing needs")

    monkeypatch.setattr(hessian, "choose_method", refuse)


@pytest.mark.usefixtures("no_preflight")
@pytest.mark.parametrize("name", ["kappa_sum", "kappa_max"])
def test_kappa_of_exact_layers_runs_no_preflight_and_counts_its_products(name: str) -> None:
    report = sl.measure(network(nn.ReLU), DATA, measures=[name])
    value = report[name]
    assert value.products == math.ceil(report.cost.products) > 0  # one product serves the blocks of all layers
    assert value.method == "whole block of every layer, products from kept derivatives of the layers' outputs"


@pytest.mark.usefixtures("no_preflight")
def test_a_box_of_a_subspace_needs_no_product_either() -> None:
    report = sl.measure(network(nn.ReLU), DATA, measures=["keskar_subspace_sharpness"])
    assert report.cost.products == 0


def test_kappa_counts_the_products_of_layers_that_are_not_exact() -> None:
    model = network(nn.Tanh)  # its first layer is bent, its second exact
    report = sl.measure(model, DATA, measures=["kappa_sum"])
    preflight = HessianProducts(sl.Problem(model, "cross_entropy", DATA)).problem.work.products
    assert report["kappa_sum"].products == math.ceil(report.cost.products - preflight)
    assert "outputs and by kept graph" in report["kappa_sum"].method


class Curved(nn.Module):
    """Layers that are exact beside a parameter that is not: it enters squared."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.shift = network(nn.ReLU), nn.Parameter(torch.tensor([0.5, -0.3, 0.2]))

    def forward(self, x):
        return self.layers(x) + self.shift.square()


def test_an_exact_value_reports_no_products_that_others_used(only_probes) -> None:
    report = sl.measure(Curved(), DATA, measures=["hessian_trace", "rho_sum"])
    assert not report["hessian_trace"].exact
    assert report["hessian_trace"].products > 0
    assert report["rho_sum"].exact
    assert report["rho_sum"].products == 0
