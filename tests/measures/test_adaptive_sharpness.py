"""Adaptive sharpness: against closed forms on quadratics, a grid in two dimensions, and limits of other measures."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cases
import spiritlevel as sl


def quadratic(weights=(1.0, 2.0), seed=0):
    """A linear regression at its minimum: L = mean (x·(w − w*))², H = 2 E xxᵀ."""
    model = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([weights]))
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return model, (x, x @ model.weight.detach().T), 2 * x.T @ x / 12


def value(model, data, loss="mse", name="adaptive_sharpness", tolerance=1e-6, **options):
    return sl.measure(model, data, loss, measures=[sl.get_measure(name, **options)], tolerance=tolerance)[name]


def test_on_a_quadratic_the_worst_case_is_the_largest_eigenvalue():
    model, data, h = quadratic()
    w = model.weight.detach()[0].abs()
    wanted = 0.25**2 / 2 * float(torch.linalg.eigvalsh(w[:, None] * h * w).max())
    found = value(model, data, rho=0.25)
    assert found.value == pytest.approx(wanted, rel=1e-6)
    assert found.lower_bound
    point = {"weight": model.weight.detach() + found.witness["weight"]}
    assert float(F.mse_loss(torch.func.functional_call(model, point, data[0]), data[1])) == pytest.approx(
        wanted, rel=1e-6
    )
    assert float((found.witness["weight"] / model.weight.detach()).norm()) <= 0.25 * (1 + 1e-9)


def test_in_the_maximum_norm_it_is_the_best_corner():
    model, data, h = quadratic()
    w = model.weight.detach()[0].abs()
    corners = [0.1 * w * torch.tensor(signs, dtype=torch.float64) for signs in ((1, 1), (1, -1))]
    wanted = max(float(c @ h @ c) / 2 for c in corners)
    assert value(model, data, rho=0.1, norm="linf").value == pytest.approx(wanted, rel=1e-6)


def test_filters_move_in_proportion_to_their_norm():
    model, data, h = quadratic()
    wanted = 0.25**2 / 2 * 5.0 * float(torch.linalg.eigvalsh(h).max())  # ‖w‖² = 5
    assert value(model, data, rho=0.25, scale="filter").value == pytest.approx(wanted, rel=1e-6)


def test_over_batches_it_is_the_mean_of_their_maxima():
    model, (x, y), _ = quadratic()
    w = model.weight.detach()[0].abs()
    parts = [2 * part.T @ part / len(part) for part in torch.split(x, 5)]
    tops = [float(torch.linalg.eigvalsh(w[:, None] * h * w).max()) for h in parts]
    wanted = 0.25**2 / 2 * sum(top * size for top, size in zip(tops, (5, 5, 2), strict=True)) / 12
    found = value(model, (x, y), rho=0.25, m=5)
    assert found.value == pytest.approx(wanted, rel=1e-6)
    assert found.details["batches"] == 3
    assert found.value > value(model, (x, y), rho=0.25).value


def test_a_grid_in_two_dimensions_has_nothing_higher():
    _, data, _ = quadratic()
    data = data[0], (data[0] @ torch.tensor([[0.3], [-1.0]], dtype=torch.float64)).sigmoid().round().long().squeeze(1)
    two = nn.Sequential(nn.Linear(2, 2, bias=False)).double()
    with torch.no_grad():
        two[0].weight.copy_(torch.tensor([[1.0, 2.0], [0.0, 0.0]]))  # entries of size zero cannot move
    best = 0.0
    base = F.cross_entropy(two(data[0]), data[1])
    for angle in torch.linspace(0, 2 * math.pi, 721, dtype=torch.float64):
        step = 0.5 * torch.stack([angle.cos(), 2 * angle.sin()])
        moved = two[0].weight.detach() + torch.stack([step, torch.zeros(2, dtype=torch.float64)])
        best = max(best, float((F.cross_entropy(data[0] @ moved.T, data[1]) - base).detach()))
    found = value(two, data, "cross_entropy", rho=0.5)
    assert found.value >= best * (1 - 1e-9)
    assert found.value == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize(("norm", "variance"), [("l2", 1.0), ("linf", 1 / 3)])
def test_on_a_quadratic_the_mean_is_the_weighted_trace(norm, variance):
    model, data, h = quadratic()
    w = model.weight.detach()[0]
    wanted = 0.1**2 * variance / 2 * float((w.square() * h.diagonal()).sum())
    name = "adaptive_sharpness_average"
    found = sl.measure(model, data, "mse", measures=[sl.get_measure(name, norm=norm)], tolerance=1e-9, most_probes=100)[
        name
    ]
    assert abs(found.value - wanted) <= 4 * found.error
    assert found.error < 0.2 * wanted
    assert not found.converged


def test_normalized_logits_take_out_the_scale_of_the_outputs():
    model, x, y = cases.by_name("mlp without biases").make()
    names = ("adaptive_sharpness", "adaptive_sharpness_average")
    chosen = [sl.get_measure(name, rho=0.05, logits="normalized") for name in names]
    before = sl.measure(model, (x, y), measures=[*chosen], tolerance=1e-6)
    with torch.no_grad():
        model[4].weight.mul_(10)
    after = sl.measure(model, (x, y), measures=[*chosen, sl.get_measure(names[1], rho=0.05)], tolerance=1e-6)
    for name in names:
        assert after[name].value == pytest.approx(before[name].value, rel=1e-5)
    assert not value(model, (x, model(x).detach()), logits="normalized").available


def test_words_that_are_none_are_refused():
    model, data, _ = quadratic()
    with pytest.raises(sl.SpiritLevelError, match='adaptive_sharpness: norm must be "l2" or "linf", got \'l1\''):
        value(model, data, norm="l1")
