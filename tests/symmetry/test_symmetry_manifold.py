"""The quotient manifold: an invariant metric, vertical vectors along the orbit, horizontal gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev

from networks import built, mlp, randomized
from spiritlevel.symmetry import (
    Symmetries,
    find_symmetries,
    inner,
    layer_directions,
    layer_metric,
    neuron_directions,
    node_metric,
    rescale_layers,
    riemannian_gradient,
)

NAMES = ["mlp", "mlp without bias", "lenet", "used twice", "tied modules", "attention", "gated"]


def setup(name: str) -> tuple[nn.Module, Tensor, Symmetries, dict[str, Tensor]]:
    model, x = built(name)
    return model, x, find_symmetries(model, x), {k: v.detach() for k, v in model.named_parameters()}


def noise(theta: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(v.shape, generator=generator, dtype=v.dtype) for k, v in theta.items()}


def loss_gradient(model: nn.Module, x: Tensor, theta: dict[str, Tensor]) -> dict[str, Tensor]:
    target = torch.arange(x.shape[0]) % 2
    return grad(lambda p: F.cross_entropy(functional_call(model, p, (x,)), target))(theta)


def dot(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return sum((a[k] * b[k]).sum().item() for k in a)


@pytest.mark.parametrize("name", NAMES)
def test_the_node_metric_is_invariant_under_every_rescaling(name: str) -> None:
    _, _, symmetries, theta = setup(name)
    rescaling = symmetries.sample(1.0, 0)
    a, b = noise(theta, 1), noise(theta, 2)
    before = inner(node_metric, theta, a, b)
    after = inner(node_metric, *(rescaling.transform(v) for v in (theta, a, b)))
    torch.testing.assert_close(after, before, rtol=1e-10, atol=0)


def test_the_layer_metric_is_invariant_under_layer_factors_and_not_under_neuron_factors() -> None:
    model, x, symmetries, theta = setup("mlp")
    twin = dict(rescale_layers(model, {"0.weight": 5.0, "2.weight": 4.0, "4.weight": 0.05}, x).named_parameters())
    scale = {k: (twin[k] / theta[k]).detach() for k in theta}
    a, b = noise(theta, 1), noise(theta, 2)
    moved = [{k: v[k] * scale[k] for k in theta} for v in (theta, a, b)]
    torch.testing.assert_close(inner(layer_metric, *moved), inner(layer_metric, theta, a, b), rtol=1e-10, atol=0)
    neuron = [symmetries.sample(1.0, 0).transform(v) for v in (theta, a, b)]
    assert abs(inner(layer_metric, *neuron) - inner(layer_metric, theta, a, b)) > 1e-3


def test_a_block_of_norm_zero_drops_out() -> None:
    theta = {"w": torch.zeros(3, dtype=torch.float64), "v": torch.ones(2, dtype=torch.float64)}
    a = {"w": torch.ones(3, dtype=torch.float64), "v": torch.ones(2, dtype=torch.float64)}
    assert inner(layer_metric, theta, a, a).item() == 1.0
    assert riemannian_gradient(layer_metric, theta, a)["w"].tolist() == [0.0] * 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [neuron_directions, layer_directions])
def test_vertical_vectors_are_tangent_to_the_orbit(name: str, make) -> None:
    model, x, symmetries, theta = setup(name)
    directions = make(symmetries)
    coefficients = torch.randn(directions.dimension, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vertical = directions.vertical(theta, coefficients)
    step = 1e-6
    moved = [
        functional_call(model, {k: theta[k] + s * step * vertical[k] for k in theta}, (x,)).detach() for s in (1, -1)
    ]
    assert (moved[0] - moved[1]).abs().max() / (2 * step) < 1e-7 * max(1.0, moved[0].abs().max().item())


def test_vertical_vectors_of_a_chain_are_those_of_lemmas_2_4_and_2_6() -> None:
    """(β_1 W_1, …, β_L W_L, γ_1 b_1, …, γ_L b_L) with Σ β = 0 and β_l = γ_l − γ_{l−1}."""
    _, _, symmetries, theta = setup("mlp")
    directions = layer_directions(symmetries)
    assert directions.dimension == 2
    vertical = directions.vertical(theta, torch.tensor([0.3, -1.1], dtype=torch.float64))
    ratio = {k: (vertical[k] / theta[k]).flatten() for k in theta}
    assert all(torch.allclose(r, r[0].expand_as(r)) for r in ratio.values())
    beta = [ratio[f"{k}.weight"][0].item() for k in (0, 2, 4)]
    gamma = [ratio[f"{k}.bias"][0].item() for k in (0, 2, 4)]
    assert sum(beta) == pytest.approx(0.0, abs=1e-12)
    assert gamma[0] == pytest.approx(beta[0])
    assert gamma[1] - gamma[0] == pytest.approx(beta[1])
    assert gamma[2] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [neuron_directions, layer_directions])
@pytest.mark.parametrize("metric", [layer_metric, node_metric])
def test_gradients_are_horizontal(name: str, make, metric) -> None:
    model, x, symmetries, theta = setup(name)
    directions = make(symmetries)
    gradient = riemannian_gradient(metric, theta, loss_gradient(model, x, theta))
    vertical = directions.project_vertical(metric, theta, gradient)
    size = inner(metric, theta, gradient, gradient).item()
    assert inner(metric, theta, vertical, vertical).item() < 1e-18 * size


@pytest.mark.parametrize("make", [neuron_directions, layer_directions])
@pytest.mark.parametrize("metric", [layer_metric, node_metric])
def test_projections_split_a_vector_at_a_right_angle(make, metric) -> None:
    _, _, symmetries, theta = setup("lenet")
    directions, vector = make(symmetries), noise(theta, 3)
    vertical = directions.project_vertical(metric, theta, vector)
    horizontal = directions.project_horizontal(metric, theta, vector)
    size = inner(metric, theta, vector, vector).item()
    assert inner(metric, theta, vertical, vertical).item() > 1e-6 * size
    assert abs(inner(metric, theta, vertical, horizontal).item()) < 1e-12 * size
    again = directions.project_vertical(metric, theta, vertical)
    for k in theta:
        torch.testing.assert_close(vertical[k] + horizontal[k], vector[k])
        torch.testing.assert_close(again[k], vertical[k], rtol=1e-8, atol=1e-10)


def test_hessian_products_of_any_vector_at_a_minimum_are_horizontal() -> None:
    """At a critical point H annihilates vertical vectors, so that G⁻¹Hξ is orthogonal to all of them."""
    model = randomized(mlp(3, 4, 2))
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theta = {k: v.detach() for k, v in model.named_parameters()}
    target = functional_call(model, theta, (x,)).detach()

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return (functional_call(model, parameters, (x,)) - target).square().mean()

    assert dot(grad(loss)(theta), grad(loss)(theta)) < 1e-28
    blocks, xi = jacrev(grad(loss))(theta), noise(theta, 4)
    product = {a: sum((blocks[a][b] * xi[b]).flatten(theta[a].dim()).sum(-1) for b in theta) for a in theta}
    directions = neuron_directions(find_symmetries(model, x))
    for metric in (layer_metric, node_metric):
        vector = riemannian_gradient(metric, theta, product)
        vertical = directions.project_vertical(metric, theta, vector)
        assert inner(metric, theta, vertical, vertical) < 1e-18 * inner(metric, theta, vector, vector)
