"""Where a network is certain of its data, the loss goes with the exponential of the outputs: no step tells its slope."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spiritlevel as sl
from spiritlevel.problem.derivatives import check_derivatives


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class _Reversal(nn.Module):
    def forward(self, x):
        return _Reversed.apply(x.relu())


def certain(seed, activation):
    """A network with labels of its own, its last layer multiplied until the loss is 1e-10."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 10), activation, nn.Linear(10, 10)).double().requires_grad_(False)
    x = torch.rand(40, 16).double()
    y = model(x).argmax(1)
    low, high = 1.0, 1e7
    for _ in range(60):
        factor = (low * high) ** 0.5
        too_much = float(F.cross_entropy(factor * model(x), y)) > 1e-10
        low, high = (factor, high) if too_much else (low, factor)
    model[2].weight.mul_(high)
    model[2].bias.mul_(high)
    return model.requires_grad_(True), (x, y)


@pytest.mark.parametrize("seed", [2, 5, 6, 10, 11])
def test_no_step_is_blamed_on_the_gradient_of_a_certain_network(seed):
    model, data = certain(seed, nn.ReLU())
    check_derivatives(sl.Problem(model, "cross_entropy", data))


@pytest.mark.parametrize("seed", [2, 5, 6, 10, 11])
def test_a_reversed_gradient_is_noticed_there_too(seed):
    model, data = certain(seed, _Reversal())
    with pytest.raises(sl.SpiritLevelError, match="the gradient of this network is not that of its loss"):
        check_derivatives(sl.Problem(model, "cross_entropy", data))


class _Read(nn.Sequential):
    """Divides by the largest weight, which it reads as a number in single precision: short steps do not move it."""

    def forward(self, x):
        return super().forward(x) / torch.tensor(self[0].weight.abs().max().item(), dtype=torch.float32)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_parameter_that_is_read_as_a_rounded_number_is_noticed(seed):
    torch.manual_seed(seed)
    model = _Read(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    data = torch.randn(20, 4), torch.randint(3, (20,))
    with pytest.raises(sl.SpiritLevelError, match="the gradient of this network is not that of its loss"):
        check_derivatives(sl.Problem(model, "cross_entropy", data))


class _HalfRecorded(nn.Sequential):
    def forward(self, x):
        with torch.no_grad():
            hidden = self[1](self[0](x))
        return self[2](hidden)


def test_a_layer_that_is_not_recorded_is_noticed_along_a_nearly_level_direction():
    """The direction that is drawn here changes the loss by a thousandth of what the others do."""
    torch.manual_seed(0)
    model = _HalfRecorded(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    torch.manual_seed(1)
    data = torch.randn(20, 4), torch.randint(3, (20,))
    with pytest.raises(sl.SpiritLevelError, match="autograd records no way from there to the loss"):
        check_derivatives(sl.Problem(model, "cross_entropy", data))
