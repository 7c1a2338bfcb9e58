"""Rescalings form a group, act on models and dictionaries alike, and refuse what is not a symmetry."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, jacrev

from networks import LeNet, ResNet, TiedModules, built, mlp, randomized
from spiritlevel.errors import RescalingError
from spiritlevel.symmetry import find_symmetries, rescale_layers


@pytest.fixture
def chain() -> tuple[nn.Module, torch.Tensor]:
    return randomized(mlp(6, 7, 5, 3)), torch.randn(
        4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )


def close(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=0, msg=name)


def test_sampling_has_the_asked_spread_and_its_own_generator(chain) -> None:
    model, x = randomized(mlp(3, 4000, 1)), torch.ones(1, 3, dtype=torch.float64)
    symmetries = find_symmetries(model, x)
    state = torch.get_rng_state()
    logs = symmetries.sample(strength=0.7, seed=5).log_factors
    assert torch.equal(torch.get_rng_state(), state)
    assert abs(logs.std().item() - 0.7) < 0.03
    assert abs(logs.mean().item()) < 0.05
    assert torch.equal(logs, symmetries.sample(0.7, 5).log_factors)
    assert not torch.equal(logs, symmetries.sample(0.7, 6).log_factors)


def test_rescalings_form_a_group(chain) -> None:
    model, x = chain
    symmetries = find_symmetries(model, x)
    a, b = symmetries.sample(1.0, 0), symmetries.sample(1.0, 1)
    close(b.apply(a.apply(model)), a.then(b).apply(model))
    close((b @ a).apply(model), a.then(b).apply(model))
    close(a.inverse().apply(a.apply(model)), model)
    close((a**2.0).apply(model), a.then(a).apply(model))
    torch.testing.assert_close(a.then(b).factors, a.factors * b.factors)


def test_explicit_factors_by_position_and_by_group(chain) -> None:
    model, x = chain
    symmetries = find_symmetries(model, x)
    twin = symmetries.rescaling({"0.weight": 2.0, "2.weight": torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])}).apply(model)
    torch.testing.assert_close(twin[0].weight, 2 * model[0].weight)
    torch.testing.assert_close(twin[2].bias[3], 8 * model[2].bias[3])
    torch.testing.assert_close(twin[2].weight[3], 4 * model[2].weight[3])
    torch.testing.assert_close(twin[4].weight[:, 4], model[4].weight[:, 4] / 16)
    same = symmetries.rescaling(torch.tensor([2.0] * 7 + [1.0, 2.0, 4.0, 8.0, 16.0])).apply(model)
    close(same, twin)


def test_kinds_are_sampled_separately() -> None:
    model, x = built("vgg with batch norm")
    symmetries = find_symmetries(model, x)
    twin = symmetries.sample(1.0, 0, kinds=["batch-norm"]).apply(model)
    assert not torch.equal(twin[0].weight, model[0].weight)
    assert torch.equal(twin[-1].weight, model[-1].weight)
    torch.testing.assert_close(twin[1].running_mean / model[1].running_mean, model[1].weight / twin[1].weight)
    with pytest.raises(RescalingError, match="kinds of factors are"):
        symmetries.sample(1.0, 0, kinds=["layer"])


def test_transform_and_diagonal_agree_with_apply(chain) -> None:
    model, x = chain
    rescaling = find_symmetries(model, x).sample(1.0, 0)
    twin, state = rescaling.apply(model), rescaling.transform(model.state_dict())
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)
    for name, d in rescaling.diagonal().items():
        torch.testing.assert_close(d * twin.state_dict()[name], model.state_dict()[name])


@pytest.mark.parametrize("name", ["mlp", "leaky", "used twice", "tied autoencoder", "gated", "layer norm"])
def test_the_hessian_follows_theorem_3(name: str) -> None:
    """H(T_α θ) = D_α H(θ) D_α."""
    model, x = built(name)
    rescaling = find_symmetries(model, x).sample(0.7, 0)
    theta = {k: v.detach() for k, v in model.named_parameters()}
    twin = {k: v.detach() for k, v in rescaling.transform(theta).items()}
    target = torch.arange(x.shape[0]) % 2

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x,)), target)

    before, after, d = jacrev(jacrev(loss))(theta), jacrev(jacrev(loss))(twin), rescaling.diagonal()
    for a in theta:
        for b in theta:
            left = d.get(a, torch.ones(())).expand(theta[a].shape).reshape(theta[a].shape + (1,) * theta[b].dim())
            right = d.get(b, torch.ones(())).expand(theta[b].shape)
            torch.testing.assert_close(after[a][b], left * before[a][b] * right, rtol=1e-8, atol=1e-10)


def test_tied_parameters_stay_tied_and_both_names_are_transformed() -> None:
    model = randomized(TiedModules())
    rescaling = find_symmetries(model, torch.randn(2, 3, dtype=torch.float64)).sample(1.0, 0)
    twin = rescaling.apply(model)
    assert twin.one.weight is twin.two.weight
    state = rescaling.transform(model.state_dict())
    assert torch.equal(state["one.weight"], state["two.weight"])
    assert torch.equal(state["one.weight"], twin.one.weight)


def test_in_place_changes_the_model_and_keeps_its_parameters(chain) -> None:
    model, x = chain
    rescaling, same, old = find_symmetries(model, x).sample(1.0, 0), model[0].weight, model[0].weight.detach().clone()
    assert rescaling.apply_(model) is model
    assert model[0].weight is same
    assert not torch.equal(same, old)


@pytest.mark.parametrize("strength", [1.5])
def test_float32_twins_agree_to_1e_4(strength: float) -> None:
    for model, x in ((LeNet(), torch.randn(2, 1, 28, 28)), (ResNet("A"), torch.randn(2, 3, 8, 8))):
        symmetries = find_symmetries(model, x)
        for seed in range(5):
            symmetries.sample(strength, seed).apply(model)


def test_overflow_and_underflow_name_the_tensor_and_change_nothing() -> None:
    model = mlp(3, 4, 2)
    symmetries = find_symmetries(model, torch.ones(1, 3))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RescalingError, match=r"the rescaled 0.weight would overflow in float32; use smaller factors"):
        symmetries.rescaling([1e40] * 4).apply_(model)
    with pytest.raises(RescalingError, match=r"the rescaled 0.weight would underflow to zero in float32"):
        symmetries.rescaling([1e-60] * 4).apply_(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_changed_function_is_refused_and_undone(chain) -> None:
    model, x = chain
    rescaling = find_symmetries(model, x).sample(1.0, 0)
    other = nn.Sequential(*(nn.GELU() if isinstance(m, nn.ReLU) else m for m in copy.deepcopy(model)))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(RescalingError, match=r"outputs on the example changed by .* more than the 1e-10 that rounding"):
        rescaling.apply_(other)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    with pytest.raises(RescalingError, match=r"0.weight of shape \(7, 6\), but this model has shape \(2, 6\)"):
        rescaling.apply(mlp(6, 2, 3))


def test_wrong_factors_are_refused(chain) -> None:
    model, x = chain
    symmetries = find_symmetries(model, x)
    with pytest.raises(RescalingError, match="12 positive finite numbers"):
        symmetries.rescaling([1.0] * 11)
    with pytest.raises(RescalingError, match="the least -1"):
        symmetries.rescaling([-1.0] * 12)
    with pytest.raises(RescalingError, match=r"no group of factors is named '1.weight'"):
        symmetries.rescaling({"1.weight": 2.0})
    with pytest.raises(RescalingError, match="takes one positive number or 7 of them"):
        symmetries.rescaling({"0.weight": [1.0, 2.0]})


def test_layer_factors_of_a_chain_take_the_biases_along(chain) -> None:
    model, x = chain
    twin = rescale_layers(model, {"0.weight": 5.0, "2.weight": 4.0, "4.weight": 0.05}, x)
    for k, (weight, bias) in enumerate(((5.0, 5.0), (4.0, 20.0), (0.05, 1.0))):
        torch.testing.assert_close(twin[2 * k].weight, weight * model[2 * k].weight)
        torch.testing.assert_close(twin[2 * k].bias, bias * model[2 * k].bias)


def test_layer_factors_of_the_papers_lenet() -> None:
    model = randomized(LeNet())
    names = ["conv1", "conv2", "fc1", "fc2", "fc3"]
    factors = dict(zip((f"{n}.weight" for n in names), (5.0, 4.0, 3.0, 2.0, 1 / 120), strict=True))
    twin = rescale_layers(model, factors, torch.randn(2, 1, 28, 28, dtype=torch.float64))
    torch.testing.assert_close(twin.fc1.bias, 60 * model.fc1.bias)


def test_layer_factors_that_are_no_symmetry_are_refused_with_the_product(chain) -> None:
    model, x = chain
    with pytest.raises(RescalingError, match=r"0.weight · 2.weight · 4.weight = 1 is required .* is 20"):
        rescale_layers(model, {"0.weight": 5.0, "2.weight": 4.0}, x)
    with pytest.raises(RescalingError, match=r"got \['0.bias'\] \(biases follow by themselves\)"):
        rescale_layers(model, {"0.bias": 5.0}, x)
    with pytest.raises(RescalingError, match="positive and finite"):
        rescale_layers(model, {"0.weight": -5.0}, x)
    with pytest.raises(RescalingError, match=r"0.weight = 1 is required"):
        rescale_layers(nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2)), {"0.weight": 2.0}, torch.ones(1, 2))


def test_layer_factors_cross_a_batch_normalization() -> None:
    model, x = built("vgg with batch norm")
    twin = rescale_layers(model, {"0.weight": 3.0}, x)
    torch.testing.assert_close(twin[0].weight, 3 * model[0].weight)
    torch.testing.assert_close(twin[1].running_mean, 3 * model[1].running_mean)
    torch.testing.assert_close(twin[4].weight, model[4].weight)


def test_layer_groups_are_the_products_that_must_be_one() -> None:
    def conditions(name: str) -> list[str]:
        model, x = built(name)
        return [group.condition for group in find_symmetries(model, x).layer_groups]

    assert conditions("mlp without bias") == ["0.weight · 2.weight · 4.weight · 6.weight = 1"]
    residual = conditions("resnet without norm")
    assert "blocks.0.conv1.weight · blocks.0.conv2.weight = 1" in residual
    project = "blocks.2.conv1.weight · blocks.2.conv2.weight = blocks.2.project.weight"
    assert project in residual
    assert residual[-1] == "conv.weight · blocks.2.conv1.weight · blocks.2.conv2.weight · fc.weight = 1"
    assert conditions("unet")[-1].endswith("out.weight = 1")
    assert conditions("gelu") == []


def test_layer_conditions_are_complete() -> None:
    """Random layer factors that satisfy every condition are accepted."""
    model, x = built("resnet without norm")
    symmetries = find_symmetries(model, x)
    names, rng = symmetries.maps, torch.Generator().manual_seed(0)
    matrix = torch.tensor([[float(g.exponents.get(n, 0)) for n in names] for g in symmetries.layer_groups])
    logs = torch.randn(len(names), generator=rng).double()
    logs -= torch.linalg.pinv(matrix.double()) @ (matrix.double() @ logs)
    rescale_layers(model, dict(zip(names, logs.exp().tolist(), strict=True)), x)
