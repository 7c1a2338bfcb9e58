"""The balanced network: equal norms in and out, the same from everywhere on the orbit, dead channels left alone."""

import pytest
import torch
from torch import nn

from networks import CASES, built, mlp, randomized
from spiritlevel.symmetry import balance, balance_groups, canonicalize, find_symmetries
from transformer_networks import GROUPS, made


def test_one_hidden_layer_in_closed_form() -> None:
    model = randomized(mlp(4, 5, 3))
    flat = canonicalize(model, torch.ones(1, 4, dtype=torch.float64))
    incoming = (model[0].weight.square().sum(1) + model[0].bias.square()).sqrt()
    outgoing = model[2].weight.square().sum(0).sqrt()
    factor = (outgoing / incoming).sqrt()
    torch.testing.assert_close(flat[0].weight, model[0].weight * factor[:, None], rtol=1e-10, atol=0)
    torch.testing.assert_close(flat[2].weight, model[2].weight / factor, rtol=1e-10, atol=0)


# Rows that are divided by their own length have no balanced one.
BOUNDED = sorted(set(CASES) - {"masked and normalized"})


@pytest.mark.parametrize("name", BOUNDED)
def test_every_channel_is_balanced_and_the_minimum_is_unique(name: str) -> None:
    model, x = built(name)
    symmetries = find_symmetries(model, x)
    twin = symmetries.sample(1.5, 4).apply(model)
    flat, same = balance(model, symmetries), balance(twin, symmetries)
    assert flat.residual < 1e-10
    assert flat.dead == ()
    left = flat.rescaling.transform(dict(model.named_parameters()))
    right = same.rescaling.transform(dict(twin.named_parameters()))
    for key, value in left.items():
        torch.testing.assert_close(value, right[key], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "vgg with batch norm", "unet", "resnet A"])
def test_in_and_out_norms_are_equal(name: str) -> None:
    model, x = built(name)
    symmetries = find_symmetries(model, x)
    flat = dict(balance(model, symmetries).rescaling.apply(model).named_parameters())
    for factor in range(symmetries.dimension):
        sides = {1.0: 0.0, -1.0: 0.0}
        for part in symmetries.slices(factor):
            if part.name in flat:
                sides[part.exponent] += flat[part.name][part.index].square().sum().item()
        assert sides[1.0] == pytest.approx(sides[-1.0], rel=1e-9)


def test_no_other_member_of_the_orbit_has_smaller_norm() -> None:
    model, x = built("lenet")
    symmetries = find_symmetries(model, x)
    flat = balance(model, symmetries).rescaling.apply(model)
    least = sum(p.square().sum() for p in flat.parameters())
    for seed in range(5):
        twin = symmetries.sample(0.1, seed).apply(flat)
        assert sum(p.square().sum() for p in twin.parameters()) > least


def test_dead_channels_are_listed_and_left_alone() -> None:
    model = randomized(mlp(4, 5, 6, 3))
    with torch.no_grad():
        model[4].weight[:, 2] = 0.0
        model[2].weight[:, 1] = 0.0
        model[2].weight[:2, 4] = 0.0
        model[2].weight[3:, 4] = 0.0
    symmetries = find_symmetries(model, torch.ones(1, 4, dtype=torch.float64))
    found = balance(model, symmetries)
    # Channel 2 of the second layer is read by nothing, 1 of the first neither, and 4 of the first only by channel 2.
    assert found.dead_channels == ("0.weight[1]", "0.weight[4]", "2.weight[2]")
    assert found.rescaling.factors[list(found.dead)].tolist() == [1.0, 1.0, 1.0]
    twin = symmetries.sample(1.0, 0).apply(model)
    flat, same = found.rescaling.apply(model), balance(twin, symmetries).rescaling.apply(twin)
    alive = [0, 1, 3, 4, 5]
    torch.testing.assert_close(flat[4].weight[:, alive], same[4].weight[:, alive])


def test_a_dead_channel_of_a_product_is_found_by_the_linear_program() -> None:
    model, x = built("gated")
    with torch.no_grad():
        model.down.weight[:, 3] = 0.0
    found = balance(model, find_symmetries(model, x))
    assert set(found.dead_channels) == {"up.weight[3]", "gate.weight[3]"}
    assert found.residual < 1e-10


def test_lengths_that_are_divided_out_are_left_alone() -> None:
    model, x = built("masked and normalized")
    found = balance(model, find_symmetries(model, x))
    assert found.dead_channels == ("middle.weight[0]", "middle.weight[1]", "middle.weight[2]")


@pytest.mark.parametrize("name", ["multihead", "grouped queries", "rotary", "bottleneck", "block"])
def test_every_member_of_an_orbit_has_the_same_canonical_form(name: str) -> None:
    build, shape, tokens, *_ = GROUPS[name]
    model, x = made(build, shape, tokens)
    twin = find_symmetries(model, x).sample(0.5, 3, kinds=["rescaling", "linear"]).apply(model)
    flat, same = canonicalize(model, x), canonicalize(twin, x)
    for a, b in zip(flat.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(flat(x), model(x), rtol=1e-10, atol=1e-10)


def test_both_sides_of_a_linear_group_have_equal_diagonal_gram_matrices() -> None:
    model, x = made(GROUPS["by hand"][0], (3, 4, 6))
    flat = canonicalize(model, x)
    for rows in (slice(0, 3), slice(3, 6)):
        gram = flat.q.weight[rows] @ flat.q.weight[rows].T
        torch.testing.assert_close(gram, flat.k.weight[rows] @ flat.k.weight[rows].T)
        torch.testing.assert_close(gram, torch.diag(gram.diag().sort(descending=True).values))
        torch.testing.assert_close(
            flat.v.weight[rows] @ flat.v.weight[rows].T, flat.o.weight[:, rows].T @ flat.o.weight[:, rows]
        )


def test_the_balanced_form_has_the_least_sum_of_squares() -> None:
    model, x = made(GROUPS["multihead"][0], (3, 4, 6))
    symmetries = find_symmetries(model, x)
    flat = balance_groups(model, symmetries).transformation.apply(model)

    def size(network: nn.Module) -> float:
        return sum(float(p.detach().square().sum()) for p in network.parameters())

    for seed in range(4):
        assert size(symmetries.sample(0.1, seed, kinds=["linear"]).apply(flat)) > size(flat) + 1e-4


def test_a_group_with_a_singular_gram_matrix_is_named_and_left_out() -> None:
    model, x = made(GROUPS["adapter"][0], (7, 4))
    with torch.no_grad():
        model.b.weight[:, 1] = 2 * model.b.weight[:, 0]
    found = balance_groups(model, find_symmetries(model, x))
    assert found.left_out == ("a.weight[0:2] · b.weight[:, 0:2]",)
    torch.testing.assert_close(found.transformation.apply(model)(x), model(x))
