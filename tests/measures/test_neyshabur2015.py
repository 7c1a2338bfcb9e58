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


def overwritten(net, x):
    base = F.relu(net.a(x))
    h = base.clone()
    h[:, :2] = 5 * net.c(base)[:, :2]
    return net.b(h)


def added_to(net, x):
    base = F.relu(net.a(x))
    h = base.clone()
    h[:, 0] += 3 * net.c(base)[:, 0]
    return net.b(h)


def added_to_a_view(net, x):
    base = F.relu(net.a(x))
    h = base.clone()
    first = h[:, 0]
    first += 3 * net.c(base)[:, 0]
    return net.b(h)


def changed_behind_a_view(net, x):
    h = F.relu(net.a(x)).clone()
    first = h[:, :3]
    h.mul_(7)
    return net.b(first)


HALVES = torch.tensor([[0.5, 0.5, 0], [0, 0.5, 0.5]], dtype=torch.float64)
CEILED = torch.tensor([[0.5, 0.5, 0], [0, 0, 1]], dtype=torch.float64)
SPELLINGS = {
    "add with alpha": (lambda net, x: net.b(torch.add(F.relu(net.a(x)), x, alpha=0.1)), lambda a, b, c, h, one: b @ (a + 0.01 * one)),
    "sub with alpha": (lambda net, x: net.b(torch.sub(x, F.relu(net.a(x)), alpha=3)), lambda a, b, c, h, one: b @ (9 * a + one)),
    "adaptive windows that overlap": (
        lambda net, x: net.h(F.adaptive_avg_pool1d(F.relu(net.a(x)).unsqueeze(1), 2).squeeze(1)),
        lambda a, b, c, h, one: h @ HALVES**2 @ a,
    ),
    "adaptive maxima that overlap": (
        lambda net, x: net.h(F.adaptive_max_pool1d(F.relu(net.a(x)).unsqueeze(1), 2).squeeze(1)),
        lambda a, b, c, h, one: h @ (HALVES > 0).double() @ a,
    ),
    "a last window that is smaller": (
        lambda net, x: net.h(F.avg_pool1d(F.relu(net.a(x)).unsqueeze(1), 2, ceil_mode=True).squeeze(1)),
        lambda a, b, c, h, one: h @ CEILED**2 @ a,
    ),
    "a part is overwritten": (overwritten, lambda a, b, c, h, one: b @ torch.cat([25 * (c @ a)[:2], a[2:]])),
    "a part is added to": (added_to, lambda a, b, c, h, one: b @ torch.cat([a[:1] + 9 * (c @ a)[:1], a[1:]])),
    "a view is added to": (added_to_a_view, lambda a, b, c, h, one: b @ torch.cat([a[:1] + 9 * (c @ a)[:1], a[1:]])),
    "what a view shows is changed": (changed_behind_a_view, lambda a, b, c, h, one: b @ (49 * a)),
}  # fmt: skip


class Spelled(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.a, self.c = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.b, self.h, self.body = nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False), body

    def forward(self, x):
        return self.body(self, x)


@pytest.mark.parametrize(("body", "expected"), SPELLINGS.values(), ids=SPELLINGS)
def test_paths_have_their_weight_however_a_network_is_written(body, expected):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Spelled(body).double()
    squares = [layer.weight.detach().square() for layer in (net.a, net.b, net.c, net.h)]
    value = path_norm(net, torch.rand(5, 3, dtype=torch.float64))
    assert value.value == pytest.approx(
        float(expected(*squares, torch.eye(3, dtype=torch.float64)).sum()) ** 0.5, rel=1e-12
    )


def test_paths_into_a_tensor_of_constants_are_refused():
    def body(net, x):
        room = torch.zeros(len(x), 3, dtype=x.dtype)
        room[:, 1:] = net.a(x)[:, 1:]
        return net.b(room)

    value = path_norm(Spelled(body).double(), torch.rand(5, 3, dtype=torch.float64))
    assert not value.available
    assert "an assignment into a tensor that does not come from the inputs" in str(value.notes)


LONE = {  # pooling of inputs without channels, after which two or one entries are left
    "adaptive mean": (lambda h: F.adaptive_avg_pool1d(h, 2), 4, 0.5),
    "adaptive maximum": (lambda h: F.adaptive_max_pool1d(h, 2), 4, 1.0),
    "mean": (lambda h: F.avg_pool1d(h, 2), 4, 0.5),
    "maximum": (lambda h: F.max_pool1d(h, 2), 4, 1.0),
    "mean of an image": (lambda h: F.avg_pool2d(h.unflatten(1, (2, 2)), 2).flatten(1), 4, 0.25),
}


@pytest.mark.parametrize(("pool", "size", "weight"), LONE.values(), ids=LONE)
@pytest.mark.parametrize("q", [1.0, 2.0])
def test_pooling_without_channels_has_the_windows_of_its_own_dimensions(pool, size, weight, q):
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, size, bias=False)

        def forward(self, x):
            return pool(self.first(x))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Pooled().double()
    x = torch.rand(5, 3, dtype=torch.float64)
    value = sl.measure(net, (x, torch.zeros_like(net(x)).detach()), "mse", measures=[sl.get_measure("path_norm", q=q)])
    total = float((net.first.weight.detach().abs() ** q).sum()) * weight**q
    assert value["path_norm"].value == pytest.approx(total ** (1 / q), rel=1e-12)
