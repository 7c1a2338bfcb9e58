"""Minima at which the network is certain of its answers: a loss of 1e-7 and less, in both precisions."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spiritlevel as sl
from dense_oracle import dense

pytestmark = pytest.mark.usefixtures("own_precision")

MEASURES = ["hessian_spectral_norm", "hessian_trace", "kappa_max", "riemannian_spectral_norm"]


def _softmax_laplacian(margin: float) -> torch.Tensor:
    """diag(p) − ppᵀ with logits (margin, 0, 0), from products p_i p_j alone: nothing is subtracted."""
    small = torch.tensor(-margin, dtype=torch.float64).exp()
    p = torch.stack([torch.ones_like(small), small, small]) / (1 + 2 * small)
    pairs = torch.outer(p, p) * (1 - torch.eye(3, dtype=torch.float64))
    return torch.diag(pairs.sum(1)) - pairs


def _handwritten(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -F.log_softmax(outputs, 1).gather(1, targets[:, None]).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", [3.0, 16.0, 20.0, 30.0, 60.0])
@pytest.mark.parametrize("loss", ["cross_entropy", nn.CrossEntropyLoss(), _handwritten])
def test_certain_network_in_closed_form(margin: float, dtype: torch.dtype, loss: object) -> None:
    """W = c·I on the identity: H is one softmax Laplacian a sample, divided by the number of samples."""
    model = nn.Linear(3, 3, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.copy_(margin * torch.eye(3))
    report = sl.measure(model, (torch.eye(3, dtype=dtype), torch.arange(3)), loss, measures=MEASURES)
    curvature = torch.linalg.eigvalsh(_softmax_laplacian(margin))
    expected = {
        "hessian_spectral_norm": curvature[-1] / 3,
        "hessian_trace": curvature.sum(),
        "kappa_max": margin**2 * curvature[-1],
        "riemannian_spectral_norm": margin**2 * curvature[-1],
    }
    for name, value in expected.items():
        rounding = 1e-5 if dtype == torch.float32 else 1e-12
        assert abs(report[name].value - float(value)) <= report[name].error + rounding * float(value), name
    assert report.loss == pytest.approx(float(torch.tensor(-margin).double().exp().mul(2).log1p()), rel=1e-6)


@pytest.mark.parametrize("size", [1e-4, 1e-6, 1e-8])
def test_trained_network_in_single_precision(size: float) -> None:
    """A small network, its outputs scaled until the loss is as small as asked, against the dense Hessian in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3))
    x = torch.randn(30, 4)
    y = model(x).argmax(1)
    low, high = 0.0, 30.0
    for _ in range(60):  # by bisection in the logarithm of the scale
        middle = (low + high) / 2
        loss = F.cross_entropy(torch.exp(torch.tensor(middle).double()) * model(x).detach().double(), y)
        low, high = (middle, high) if float(loss) > size else (low, middle)
    with torch.no_grad():
        for parameter in model[2].parameters():
            parameter.mul_(torch.exp(torch.tensor(low)))
    report = sl.measure(model, (x, y), measures=MEASURES)
    assert report.loss == pytest.approx(size, rel=0.1)
    hessian = dense(model.double(), F.cross_entropy, x.double(), y)
    truth = float(torch.linalg.eigvalsh(hessian)[-1])
    found = report["hessian_spectral_norm"]
    assert found.converged
    assert abs(found.value - truth) <= found.error
    trace = report["hessian_trace"]
    assert abs(trace.value - float(hessian.trace())) <= trace.error + 1e-5 * trace.value
