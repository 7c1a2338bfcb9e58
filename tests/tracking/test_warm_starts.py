"""Searches that start where the last one ended: fewer products, and no eigenvalue that another has overtaken since."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spiritlevel as sl
from small_training import Training


@pytest.mark.usefixtures("own_precision", "by_searches")
def test_warm_starts_save_products() -> None:
    """Of networks that are too large for their whole Hessian."""
    training = Training()
    tracker = sl.Tracker(
        training.model, training.data, measures=["hessian_spectral_norm", "kappa_sum"], every=5, samples=None
    )
    training.run(30, lambda step, loss: tracker.step(step))
    warm = tracker.history[-1].cost.products
    cold = sl.measure(training.model, training.data, measures=["hessian_spectral_norm", "kappa_sum"]).cost.products
    assert warm < cold


@pytest.mark.parametrize("seed", [10, 54])
@pytest.mark.parametrize("searched", [False, True])
def test_a_warm_start_does_not_certify_an_eigenvalue_that_was_overtaken(request, seed, searched) -> None:
    """Trainings in which the second eigenvalue overtakes the first between two points: their searches ended with the old one."""
    if searched:
        request.getfixturevalue("own_precision")
        request.getfixturevalue("by_searches")
    torch.manual_seed(seed)
    x, y = torch.randn(40, 4).double(), torch.randint(3, (40,))
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    names = ["riemannian_spectral_norm", "hessian_largest_eigenvalue", "riemannian_nodewise_spectral_norm"]
    tracker = sl.Tracker(model, (x, y), measures=names, every=10**9, samples=40, optimizer=optimizer)
    for step in range(21):
        chosen = torch.randperm(40)[:20]
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        if step in (0, 20):
            tracker.step(step, force=True)
    parameters = list(model.parameters())
    gradient = flat(torch.autograd.grad(F.cross_entropy(model(x), y), parameters, create_graph=True))
    hessian = torch.stack([flat(torch.autograd.grad(entry, parameters, retain_graph=True)) for entry in gradient])
    norms = flat([torch.full_like(each, float(each.detach().norm())) for each in parameters])
    for name, scale in zip(names, (norms, torch.ones_like(norms), flat(parameters).abs()), strict=True):
        expected = float(torch.linalg.eigvalsh(scale[:, None] * hessian * scale)[-1])
        found = tracker.history[-1][name]
        assert abs(found.value - expected) <= found.error + 1e-9 * expected


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) if tensor.is_leaf else tensor.reshape(-1) for tensor in tensors])
