"""A loss whose ∇² at the outputs autograd gets wrong is refused; one with kinks, or one that ends somewhere, is not."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spiritlevel as sl
from cases import by_name

TOLD = r"^the second derivative of the loss '{}' by the outputs is not that of its gradient: along one direction autograd gives a "


class MadeInForward(torch.autograd.Function):
    """Cross entropy with its gradient made in `forward`, as fused losses do: value and gradient are right."""

    @staticmethod
    def forward(ctx, outputs, targets):
        gradient = outputs.softmax(1) - F.one_hot(targets, outputs.shape[1])
        ctx.save_for_backward(gradient / len(targets))
        return F.cross_entropy(outputs, targets)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


def fused(outputs, targets):
    return MadeInForward.apply(outputs, targets)


def with_its_own_past(outputs, targets):
    """Adds zero to the value and to the slope, and a multiple of the curvature to what autograd finds."""
    past = F.kl_div(outputs.log_softmax(1), outputs.detach().softmax(1), reduction="batchmean")
    return F.cross_entropy(outputs, targets) + 3 * past


@pytest.mark.parametrize("loss", [fused, with_its_own_past])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("certain", [1.0, 400.0])
def test_a_second_derivative_that_is_not_that_of_the_gradient_is_refused(loss, dtype, certain):
    model, x, y = by_name("mlp").make()
    model, x = model.to(dtype), x.to(dtype)
    with torch.no_grad():  # where every sample is certain, samples with other labels show it
        list(model.parameters())[-2].mul_(certain)
    for measures in (["hessian_trace"], ["hessian_spectral_norm"]):
        with pytest.raises(sl.SpiritLevelError, match=TOLD.format(loss.__name__)):
            sl.measure(model, (x, y), loss, measures=measures)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1e-12, 40.0])
def test_it_is_refused_where_the_outputs_of_one_sample_show_nothing(size, dtype):
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3, bias=False)).to(dtype)
    x = torch.ones(1, 2, dtype=dtype)
    with torch.no_grad():
        model[0].weight.fill_(1.0)  # no neuron is dead, whatever was drawn
        model[2].weight.mul_(size / model(x).abs().max())
    y = model(x).argmax(1)
    with pytest.raises(sl.SpiritLevelError, match=TOLD.format("fused")):
        sl.measure(model, (x, y), fused, measures=["hessian_trace"])


def test_as_a_loss_of_whole_batches_it_is_measured_by_differences_of_its_gradient():
    model, x, y = by_name("mlp").make()
    whole = sl.batch_loss(lambda model, batch: (fused(model(batch[0]), batch[1]), len(batch[1])))
    found = sl.measure(model, (x, y), whole, measures=["hessian_spectral_norm"])["hessian_spectral_norm"]
    expected = sl.measure(model, (x, y), "cross_entropy", measures=["hessian_spectral_norm"])["hessian_spectral_norm"]
    assert found.value == pytest.approx(expected.value, rel=1e-4)


def one_hot(outputs, targets):
    return F.one_hot(targets, outputs.shape[1]).to(outputs)


# Smooth losses, written with operations for which autograd has a convention at zero.
SMOOTH = {
    "squares of absolute values": lambda o, y: ((o - one_hot(o, y)).abs() ** 2).mean(),
    "a square beside cross entropy": lambda o, y: F.cross_entropy(o, y) + 0.01 * (o.abs() ** 2).mean(),
    "cross entropy of TensorFlow": lambda o, y: (
        torch.maximum(o, 0 * o) - o * one_hot(o, y) + torch.log1p(torch.exp(-o.abs()))
    ).mean(),
    "stable log sigmoid": lambda o, y: -(torch.minimum(o, 0 * o) - torch.log1p(torch.exp(-o.abs()))).mean(),
    "power of a spectrum": lambda o, y: ((torch.fft.rfft(o).abs() ** 2 - 1) ** 2).mean(),
    "guarded division": lambda o, y: torch.where(o.abs() < 1e-6, 1.0, torch.tanh(o) / o).mean(),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_conventions_of_autograd_at_zero_are_no_mistake_of_a_loss(name):
    model, x, y = by_name("mlp").make()
    weights = dict(model.named_parameters())

    def loss(changed):
        return SMOOTH[name](torch.func.functional_call(model, changed, (x,)), y)

    blocks = torch.func.hessian(loss)({key: value.detach() for key, value in weights.items()})
    expected = sum(float(blocks[key][key].reshape(value.numel(), -1).trace()) for key, value in weights.items())
    found = sl.measure(model, (x, y), SMOOTH[name], measures=["hessian_trace"])["hessian_trace"].value
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_loss_that_raises_at_outputs_of_no_sample_is_measured():
    def collapse(outputs, targets):
        if outputs.std() < 0.5:
            raise NotImplementedError("collapsed embedding")
        return F.cross_entropy(outputs, targets)

    model, x, y = by_name("mlp").make()
    with torch.no_grad():
        list(model.parameters())[-2].mul_(30)
    found = sl.measure(model, (x, y), collapse, measures=["hessian_trace"])["hessian_trace"].value
    assert found == pytest.approx(sl.measure(model, (x, y), measures=["hessian_trace"])["hessian_trace"].value)


def hinge(outputs, targets):
    return F.multi_margin_loss(outputs, targets)


def of_probabilities(outputs, targets):
    return F.nll_loss(outputs.softmax(1).log(), targets)


LOSSES = {
    "absolute": lambda outputs, targets: (outputs - F.one_hot(targets, 3)).abs().mean(),
    "huber": lambda outputs, targets: F.huber_loss(outputs, F.one_hot(targets, 3).to(outputs), delta=0.3),
    "hinge": hinge,
    "of probabilities": of_probabilities,
    "steep": lambda outputs, targets: F.cross_entropy(1e4 * outputs, targets),
    "in single precision": lambda outputs, targets: F.cross_entropy(outputs.float(), targets),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_losses_with_kinks_or_of_few_digits_are_measured(loss, dtype):
    model, x, y = by_name("mlp").make()
    found = sl.measure(model.to(dtype), (x.to(dtype), y), loss, measures=["hessian_trace"])["hessian_trace"]
    assert math.isfinite(found.value)


def fitted(outputs: torch.Tensor, apart: float) -> torch.Tensor:
    return outputs.detach() + apart * torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).reshape(outputs.shape)


def expectile(residuals):
    return torch.where(residuals > 0, 0.9, 0.1) * residuals.square()


RESIDUALS = {
    "root of a sum of squares": lambda r: (r.square().sum(1) + 1e-12).sqrt().mean(),
    "between one and two": lambda r: (r.square() + 1e-30).pow(0.75).mean(),
    "expectile": lambda r: expectile(r).mean(),
    "one-sided square": lambda r: r.relu().square().mean(),
}


@pytest.mark.parametrize("loss", RESIDUALS.values(), ids=RESIDUALS)
@pytest.mark.parametrize("apart", [0.0, 1e-8, 1e-6])
def test_gradients_that_bend_at_or_beside_the_outputs_prove_nothing(loss, apart):
    model = by_name("mlp").make()[0]
    x = by_name("mlp").make()[1]
    y = fitted(model(x), apart)
    found = sl.measure(model, (x, y), lambda outputs, targets: loss(outputs - targets), measures=["hessian_trace"])
    assert math.isfinite(found["hessian_trace"].value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("loss", ["floored", "clamped"])
def test_logarithms_of_probabilities_that_are_all_but_zero_are_measured(loss, dtype):
    model, x, y = by_name("mlp").make(dtype)
    with torch.no_grad():
        list(model.parameters())[-2].mul_(60)
    y = model(x).argmax(1)
    network = nn.Sequential(model, nn.Softmax(1))
    ways = {
        "floored": lambda p, t: -(p.gather(1, t.unsqueeze(1)) + 1e-9).log().mean(),
        "clamped": lambda p, t: -p.clamp(1e-7, 1).gather(1, t.unsqueeze(1)).log().mean(),
    }
    found = sl.measure(network, (x, y), ways[loss], measures=["hessian_trace"])["hessian_trace"]
    assert math.isfinite(found.value)


def test_outputs_that_sit_on_a_kink_prove_nothing():
    model = nn.Linear(2, 2, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
    x, y = torch.eye(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    found = sl.measure(model, (x, y), nn.L1Loss(), measures=["hessian_trace"])["hessian_trace"]
    assert found.value == 0.0


def test_a_loss_with_a_matrix_of_its_own_in_single_precision_is_measured_in_that():
    weights = torch.tensor([1.3, 2.1, 3.7])
    model, x, y = by_name("mlp").make(torch.float32)
    found = sl.measure(model, (x, y), lambda outputs, _: (outputs.square() @ weights).exp().mean())
    model, x, wide = model.double(), x.double(), weights.double()
    expected = sl.measure(model, (x, y), lambda outputs, _: (outputs.square() @ wide).exp().mean())
    for name in ("hessian_trace", "rho_sum", "kappa_sum", "hessian_spectral_norm"):
        assert abs(found[name].value - expected[name].value) <= found[name].error <= 1e-3 * expected[name].value
