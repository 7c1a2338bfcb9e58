"""Geodesics of products: against their definitions, closed forms, and between networks with the same function."""

import functools
import math

import pytest
import torch
from torch import nn

import cases
import spiritlevel as sl
from spiritlevel.symmetry import geodesics
from spiritlevel.symmetry.geodesics import ProductSpace

METRICS = ["inv", "mix"]


def spaces(metric):
    """A pair (G, H), the same pair in another basis, and a change of the first with its coordinates."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    g, h, a = draw(7, 3), draw(5, 3), draw(3, 3)
    space = ProductSpace(g, h, metric)
    change = space.horizontal((0.1 * draw(7, 3), 0.1 * draw(5, 3)))
    return space, ProductSpace(g @ torch.linalg.inv(a), h @ a.T, metric), change


def written_out(space, first, second):
    gg, hh = space.g.T @ space.g, space.h.T @ space.h
    left, right = (gg.inverse(), hh.inverse()) if space.metric == "inv" else (hh, gg)
    return float(torch.trace(left @ first[0].T @ second[0] + right @ first[1].T @ second[1]))


@pytest.mark.parametrize("metric", METRICS)
def test_coordinates_measure_the_metric_and_a_projection_is_orthogonal_to_the_orbit(metric):
    space, _, change = spaces(metric)
    assert float(space.inner(change, change)) == pytest.approx(written_out(space, change, change), rel=1e-12)
    torch.testing.assert_close(space.change(space.coordinates(change))[0], change[0])
    basis = torch.eye(9, dtype=torch.float64).view(9, 3, 3)
    for b in basis:
        assert written_out(space, change, (-space.g @ b, space.h @ b.T)) == pytest.approx(0, abs=1e-13)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("order", ["first", "second", "exact"])
def test_the_same_coordinates_move_the_product_alike_in_every_basis(metric, order):
    space, other, change = spaces(metric)
    g, h = space.moved(change, order)
    g2, h2 = other.moved(other.change(space.coordinates(change)), order)
    torch.testing.assert_close(g2 @ h2.T, g @ h.T, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("metric", METRICS)
def test_a_geodesic_keeps_its_speed_and_lower_orders_come_near_it(metric, monkeypatch):
    space, _, change = spaces(metric)
    exact = space.moved(change, "exact")
    before = float(space.inner(change, change))
    ends = {t: space.moved((t * change[0], t * change[1]), "exact") for t in (1 - 1e-4, 1 + 1e-4)}
    low, high = ends.values()
    speed = tuple((b - a) / 2e-4 for a, b in zip(low, high, strict=True))
    assert written_out(ProductSpace(*exact, metric), speed, speed) == pytest.approx(before, rel=1e-6)
    half, whole = (
        [float((space.moved((t * change[0], t * change[1]), order)[0] - space.moved((t * change[0], t * change[1]), "exact")[0]).norm())
         for order in ("first", "second")] for t in (0.5, 1.0)
    )  # fmt: skip
    assert whole[0] / half[0] == pytest.approx(4, rel=0.3)
    assert whole[1] / half[1] == pytest.approx(8, rel=0.3)
    monkeypatch.setattr(geodesics, "STEPS", 200)
    torch.testing.assert_close(space.moved(change, "exact")[0], exact[0], rtol=1e-8, atol=1e-8)


def scalars(order, rho, metric="inv"):
    """f(x) = w₂w₁x with w₁ = w₂ = 2, target 3: L = (w₂w₁ − 3)²."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    for layer in model:
        nn.init.constant_(layer.weight, 2.0)
    data = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), 3.0, dtype=torch.float64)
    chosen = sl.get_measure("geodesic_sharpness", rho=rho, order=order, metric=metric)
    return sl.measure(model, data, "mse", measures=[chosen], tolerance=1e-8)["geodesic_sharpness"]


def test_two_scalars_have_a_closed_form():
    """inv: the horizontal geodesic is w_i·e^{±ρ/√2}, so that the product is 4·e^{√2·ρ} at most."""
    found = scalars("exact", 0.2)
    assert found.value == pytest.approx((4 * math.exp(math.sqrt(2) * 0.2) - 3) ** 2 - 1, rel=1e-6)
    two = torch.full((1, 1), 2.0, dtype=torch.float64)
    space, u = ProductSpace(two, two, "inv"), torch.full((1, 1), 0.2 / math.sqrt(2), dtype=torch.float64)
    assert float(space.moved(space.change((u, u)), "exact")[0]) == pytest.approx(2 * math.exp(float(u)), rel=1e-9)
    assert scalars("first", 0.2).value == pytest.approx((4 * (1 + 0.2 / math.sqrt(2)) ** 2 - 3) ** 2 - 1, rel=1e-8)


def test_without_products_to_first_order_it_is_adaptive_sharpness():
    model, x, y = cases.by_name("mlp").make()
    chosen = [
        sl.get_measure("geodesic_sharpness", rho=0.05, order="first"),
        sl.get_measure("adaptive_sharpness", rho=0.05),
    ]
    report = sl.measure(model, (x, y), measures=chosen, tolerance=1e-6)
    assert report["geodesic_sharpness"].details["products"] == 0
    assert report["geodesic_sharpness"].value == pytest.approx(report["adaptive_sharpness"].value, rel=1e-4)


@pytest.mark.parametrize("metric", METRICS)
def test_a_change_of_basis_does_not_move_it(metric):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(20) % 3
    twin = sl.find_symmetries(model, x).sample(1.0, seed=0, kinds=["linear"]).apply(model)
    assert not torch.equal(twin[0].weight, model[0].weight)
    chosen = [
        sl.get_measure("geodesic_sharpness", metric=metric, m=10 if metric == "inv" else 20),
        sl.get_measure("adaptive_sharpness", rho=0.1),
    ]
    before, after = (sl.measure(each, (x, y), measures=chosen, tolerance=1e-2) for each in (model, twin))
    assert after["geodesic_sharpness"].value == pytest.approx(before["geodesic_sharpness"].value, rel=1e-6)
    assert before["geodesic_sharpness"].details["products"] == 1
    assert abs(after["adaptive_sharpness"].value / before["adaptive_sharpness"].value - 1) > 0.02
