"""The path norm: against an enumeration of paths and a forward pass of ones written by hand, and where numbers overflow."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cases
import spiritlevel as sl


def path_norm(model, x, q=2.0):
    y = torch.zeros(len(x), dtype=torch.long)
    return sl.measure(model, (x, y), measures=[sl.get_measure("path_norm", q=q)])["path_norm"]


@pytest.mark.parametrize("q", [1.0, 2.0])
def test_it_is_the_sum_over_all_paths(q):
    model, x, _ = cases.by_name("mlp").make()
    (w1, b1, w2, b2, w3, b3) = (p.detach().abs() ** q for p in model.parameters())
    total = float(b3.sum())
    for k, j in itertools.product(range(3), range(5)):
        total += float(w3[k, j] * b2[j])
        for i in range(6):
            total += float(w3[k, j] * w2[j, i] * b1[i])
            total += sum(float(w3[k, j] * w2[j, i] * w1[i, n]) for n in range(4))
    value = path_norm(model, x, q)
    assert value.value == pytest.approx(total ** (1 / q), rel=1e-12)
    assert value.exact


class Residual(nn.Module):
    """Convolutions with a batch normalization, a skip connection, and both kinds of pooling."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm, self.last = nn.BatchNorm2d(3), nn.Linear(3, 2)
        nn.init.uniform_(self.norm.weight, 0.5, 2)
        nn.init.normal_(self.norm.bias)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        y = self.norm(self.second(x))
        y += x
        return self.last(F.adaptive_avg_pool2d(F.relu(y), 1).flatten(1))


def test_skip_connections_normalization_and_pooling_have_their_paths():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Residual().double().eval()
    q, ones = 2.0, torch.ones(1, 2, 6, 6, dtype=torch.float64)
    with torch.no_grad():
        x = F.conv2d(ones, model.first.weight**2, model.first.bias**2, padding=1)
        x = F.avg_pool2d(x, 2) * 4
        scale = model.norm.weight / (model.norm.running_var + model.norm.eps).sqrt()
        shift = model.norm.bias - model.norm.running_mean * scale
        y = (
            F.conv2d(x, model.second.weight**2, padding=1) * scale.square()[:, None, None]
            + shift.square()[:, None, None]
            + x
        )
        out = F.linear(y.sum((2, 3)) / 9**2, model.last.weight**2, model.last.bias**2)
    found = path_norm(model, torch.randn(3, 2, 6, 6, dtype=torch.float64), q)
    assert found.value == pytest.approx(float(out.sum()) ** 0.5, rel=1e-12)


def test_no_depth_overflows():
    layers = [nn.Linear(4, 4, bias=False) for _ in range(400)]
    model = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())]).double()
    for layer in layers:
        nn.init.constant_(layer.weight, 10.0)
    value = path_norm(model, -torch.rand(2, 4, dtype=torch.float64), q=1.0)  # silent, so that only paths grow
    assert math.isinf(value.value)
    assert value.details["log_path_norm"] == pytest.approx(400 * math.log(40) + math.log(4), rel=1e-12)


def test_attention_has_no_paths():
    model, x, y = cases.by_name("GELU").make()
    value = sl.measure(model, (x, y), measures=["path_norm"])["path_norm"]
    assert not value.available
    assert value.notes == ("paths have no weight through the operation 'gelu'",)
