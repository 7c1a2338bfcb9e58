"""Hessians in other coordinates agree with dense derivatives of L∘g; input maps keep the outputs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacrev

from networks import LeNet, mlp, randomized
from spiritlevel.errors import RescalingError, SpiritLevelError
from spiritlevel.symmetry import (
    Bijection,
    affine,
    compose,
    power_family,
    radial,
    standardize,
    weight_normalization,
    whiten,
)
from spiritlevel.symmetry.reparametrize import radial_jacobian

N = 4
GENERATOR = torch.Generator().manual_seed(0)
CENTER = torch.randn(N, generator=GENERATOR, dtype=torch.float64)
MIX = torch.randn(N, N, generator=GENERATOR, dtype=torch.float64)


def loss(theta: Tensor) -> Tensor:
    return (MIX @ theta).tanh().square().sum() + (theta - CENTER).square().sum() ** 2 + theta.prod()


def product(theta: Tensor, vector: Tensor) -> Tensor:
    return jacrev(grad(loss))(theta) @ vector


BIJECTIONS: dict[str, Bijection] = {
    "radial, inside": radial(CENTER, delta=5.0, radius=4.0, image=1.0),
    "radial, middle": radial(CENTER, delta=3.0, radius=0.1, image=0.5),
    "radial, outside": radial(CENTER, delta=0.2, radius=0.1, image=0.05),
    "power family": power_family(CENTER, shift=0.3, exponent=0.7),
    "power family, flat": power_family(CENTER, shift=0.3, exponent=-0.3),
    "weight normalization": weight_normalization(2),
    "user": Bijection(lambda eta: eta.sinh(), lambda theta: theta.asinh()),
    "composed": compose(Bijection(torch.sinh, torch.asinh), power_family(CENTER, 0.5, 0.4)),
}
THETA = CENTER + 0.5 * torch.tensor([1.0, -1.0, 0.5, 0.25], dtype=torch.float64)


@pytest.mark.parametrize("name", BIJECTIONS)
def test_coordinates_and_back(name: str) -> None:
    g = BIJECTIONS[name]
    torch.testing.assert_close(g.to_parameters(g.from_parameters(THETA)), THETA, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", BIJECTIONS)
def test_gradient_and_hessian_are_those_of_the_composed_loss(name: str) -> None:
    g = BIJECTIONS[name]
    eta = g.from_parameters(THETA)

    def composed(coordinates: Tensor) -> Tensor:
        return loss(g.to_parameters(coordinates))

    torch.testing.assert_close(g.gradient(eta, grad(loss)), grad(composed)(eta), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(g.hessian(eta, product, grad(loss)), jacrev(grad(composed))(eta), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", BIJECTIONS)
def test_the_product_form_is_the_dense_formula(name: str) -> None:
    """∇gᵀ H ∇g + Σ_k ∂L/∂θ_k ∇²g_k."""
    g = BIJECTIONS[name]
    eta = g.from_parameters(THETA)
    j = jacrev(g.to_parameters)(eta)
    second = jacrev(jacrev(g.to_parameters))(eta)
    theta = g.to_parameters(eta)
    dense = j.T @ jacrev(grad(loss))(theta) @ j + torch.einsum("k,kij->ij", grad(loss)(theta), second)
    torch.testing.assert_close(g.hessian(eta, product, grad(loss)), dense, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(g.jacobian(eta), j)


def central_difference(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-5) -> Tensor:
    eye = step * torch.eye(len(at), dtype=at.dtype)
    return torch.stack([(function(at + e) - function(at - e)) / (2 * step) for e in eye], dim=1)


def test_the_inverse_of_the_power_family_has_right_derivatives() -> None:
    g = BIJECTIONS["power family"]
    eta = g.from_parameters(THETA)
    torch.testing.assert_close(
        jacrev(g.to_parameters)(eta), central_difference(g.to_parameters, eta), rtol=1e-8, atol=1e-8
    )
    first = jacrev(g.to_parameters)
    numeric = central_difference(lambda e: first(e).diagonal(), eta)
    torch.testing.assert_close(torch.einsum("iij->ij", jacrev(first)(eta)), numeric, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["radial, inside", "radial, middle", "radial, outside"])
def test_the_radial_jacobian_of_appendix_a(name: str) -> None:
    sizes = {"radial, inside": (5.0, 4.0, 1.0), "radial, middle": (3.0, 0.1, 0.5), "radial, outside": (0.2, 0.1, 0.05)}
    g = BIJECTIONS[name]
    closed = radial_jacobian(THETA, CENTER, *sizes[name])
    torch.testing.assert_close(closed, jacrev(g.from_parameters)(THETA))
    torch.testing.assert_close(torch.linalg.inv(closed), g.jacobian(g.from_parameters(THETA)))


def test_radial_maps_multiply_the_curvature_at_the_center() -> None:
    g = radial(CENTER, delta=1.0, radius=0.5, image=0.05)
    bowl = jacrev(grad(lambda t: (t - CENTER).square().sum()))
    h = g.hessian(CENTER, lambda t, v: bowl(t) @ v, grad(lambda t: (t - CENTER).square().sum()))
    torch.testing.assert_close(h, 2 * (0.5 / 0.05) ** 2 * torch.eye(N, dtype=torch.float64))


def test_the_ranking_of_two_minima_reverses() -> None:
    """Figure 5: the sharper of two minima in θ is the flatter one in η."""

    def wells(t: Tensor) -> Tensor:
        return ((t - 1).square() * (t + 1).square() * (2 + t)).sum()

    sharp, flat = torch.tensor([1.0], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64)
    second = jacrev(grad(wells))
    g = power_family(sharp, shift=5.0, exponent=0.5)
    h = {at: g.hessian(g.from_parameters(at), lambda t, v: second(t) @ v, grad(wells)).item() for at in (sharp, flat)}
    assert second(sharp).item() > second(flat).item()
    assert second(sharp).item() / 5.0 == pytest.approx(h[sharp])
    g = power_family(flat, shift=0.01, exponent=0.5)
    h = {at: g.hessian(g.from_parameters(at), lambda t, v: second(t) @ v, grad(wells)).item() for at in (sharp, flat)}
    assert h[sharp] < h[flat]


def test_weight_normalization_is_free_to_scale_v() -> None:
    g = weight_normalization(2)
    eta = g.from_parameters(THETA)
    scaled = torch.cat([eta[:2], 7.0 * eta[2:]])
    torch.testing.assert_close(g.to_parameters(scaled), THETA)
    ratio = g.hessian(eta, product, grad(loss))[2:, 2:] / g.hessian(scaled, product, grad(loss))[2:, 2:]
    torch.testing.assert_close(ratio, torch.full_like(ratio, 49.0))


def test_impossible_maps_are_refused() -> None:
    with pytest.raises(SpiritLevelError, match="needs 0 < radius < delta and 0 < image < delta; got radius 2"):
        radial(CENTER, delta=1.0, radius=2.0, image=0.5)
    with pytest.raises(SpiritLevelError, match="exponent a > -1/2; got b = 1"):
        power_family(CENTER, shift=1.0, exponent=-0.5)


def data(*shape: int) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return x * torch.linspace(0.5, 3, shape[1], dtype=torch.float64).view(-1, *[1] * (len(shape) - 2)) + 0.7


@pytest.mark.parametrize("kind", [standardize, whiten])
def test_input_maps_are_absorbed_by_the_first_layer(kind: Callable) -> None:
    model, x = randomized(mlp(5, 4, 3)), data(50, 5)
    mapped = kind(model, x)
    with torch.no_grad():
        torch.testing.assert_close(mapped.model(mapped.inputs), model(x), rtol=1e-10, atol=1e-10)
    covariance = torch.cov(mapped.inputs.T, correction=0)
    wanted = torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(covariance if kind is whiten else torch.diag(covariance.diagonal()), wanted)
    torch.testing.assert_close(mapped.inputs.mean(0), torch.zeros(5, dtype=torch.float64))
    assert not torch.allclose(mapped.model[0].weight, model[0].weight)


def test_channels_of_images_are_whitened() -> None:
    model = randomized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)))
    x = data(6, 3, 6, 6)
    mapped = whiten(model, x)
    with torch.no_grad():
        torch.testing.assert_close(mapped.model(mapped.inputs), model(x))


def test_the_size_of_the_input_gradient_changes() -> None:
    model, x = randomized(mlp(5, 4, 3)), data(1, 5)
    matrix = torch.diag(torch.tensor([10.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64))
    mapped = affine(model, x, matrix, torch.zeros(5, dtype=torch.float64))
    before, after = jacrev(model)(x[0]), jacrev(mapped.model)(mapped.inputs[0])
    torch.testing.assert_close(after @ matrix, before)


def test_maps_that_cannot_be_absorbed_are_refused() -> None:
    eye = torch.eye(1, dtype=torch.float64)
    padded = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(18, 2)).double()
    with pytest.raises(SpiritLevelError, match="cannot pass a convolution that pads with zeros"):
        affine(padded, torch.ones(1, 1, 3, 3, dtype=torch.float64), eye, torch.ones(1, dtype=torch.float64))
    with pytest.raises(SpiritLevelError, match="needs a first layer with bias"):
        standardize(mlp(3, 2, bias=False).double(), data(9, 3))
    with pytest.raises(SpiritLevelError, match="spans all 3 directions"):
        whiten(mlp(3, 2).double(), data(9, 1).repeat(1, 3))
    skip = nn.Sequential(nn.GELU(), nn.Linear(3, 2)).double()
    with pytest.raises(RescalingError, match="outputs on the example changed"):
        standardize(skip, data(9, 3))
    with pytest.raises(SpiritLevelError, match="this model has none first"):
        standardize(nn.Sequential(nn.ReLU()), data(9, 3))


def test_an_unpadded_lenet_takes_a_shift() -> None:
    model, x = randomized(LeNet()), data(2, 1, 28, 28)
    assert standardize(model, x).shift.item() != 0
