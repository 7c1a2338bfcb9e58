"""Attacks on plain flatness: the twin computes the same function, and the attacked measure is where it was sent."""

import copy

import pytest
import torch
from torch import nn

import spiritlevel as sl
from refusals import refused
from spiritlevel.curvature.dense import dense_hessian
from spiritlevel.symmetry import Rescaling


def problem(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)).to(dtype)
    x, y = torch.randn(40, 6, dtype=dtype), torch.randint(0, 3, (40,))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, (x, y)


def eigenvalues(model, data):
    return torch.linalg.eigvalsh(dense_hessian(sl.Problem(model, "cross_entropy", data)))


@pytest.mark.parametrize("target", [50.0, 1e3, 1e6, 1e9])
def test_theorem_4_reaches_any_target_and_little_more(target):
    model, data = problem()
    attack = sl.sharpen(model, data, target=target)
    norm = float(eigenvalues(attack.model, data).abs().max())
    assert target <= norm <= 1.2 * target
    assert attack.after == pytest.approx(norm, rel=2e-3)
    assert attack.before == pytest.approx(float(eigenvalues(model, data).abs().max()), rel=2e-3)
    torch.testing.assert_close(attack.model(data[0]), model(data[0]), rtol=1e-9, atol=1e-9)
    assert attack.output_change < 1e-10


def test_theorem_4_in_single_precision_keeps_the_outputs():
    model, data = problem(torch.float32)
    attack = sl.sharpen(model, data, target=1e6)
    assert attack.after >= 1e6
    assert attack.output_change < 1e-4


def test_invariant_measures_do_not_notice():
    model, data = problem()
    twin = sl.sharpen(model, data, target=1e6).model
    names = ["riemannian_spectral_norm", "kappa_sum", "rho_sum", "normalized_sharpness", "fisher_rao_norm"]
    before = sl.measure(model, data, measures=names, tolerance=1e-9)
    after = sl.measure(twin, data, measures=names, tolerance=1e-9)
    for name in names:
        assert after[name].value == pytest.approx(before[name].value, rel=1e-7)


@pytest.mark.parametrize("wanted", [5, 20])
def test_theorem_5_raises_many_eigenvalues_at_once(wanted):
    model, data = problem()
    attack = sl.sharpen(model, data, target=1e4, eigenvalues=wanted)
    assert int((eigenvalues(attack.model, data) > 1e4).sum()) >= wanted
    assert attack.after >= wanted > attack.before


def test_theorem_5_says_what_it_cannot_do():
    model, data = problem()
    with pytest.raises(
        sl.SpiritLevelError, match=r"Theorem 5 promises rank\(H\) − min_k n_k of them, and 500 were asked"
    ):
        sl.sharpen(model, data, target=1e4, eigenvalues=500)


def test_the_epsilon_ball_holds_a_network_that_ignores_its_input():
    model, data = problem()
    attack = sl.sharpen_ball(model, data, epsilon=1e-2)
    length = sum(float(part.square().sum()) for part in attack.witness.values()) ** 0.5
    assert length <= 1e-2
    zeroed = {name: value + attack.witness[name] for name, value in attack.model.named_parameters()}
    outputs = torch.func.functional_call(attack.model, zeroed, (data[0],))
    assert float(outputs.detach().std(0).max()) < 1e-12
    found = sl.measure(attack.model, data, measures=[sl.get_measure("epsilon_sharpness", epsilon=1e-2)])
    assert found["epsilon_sharpness"].value >= attack.after * (1 - 1e-6) > attack.before


def test_hessians_follow_the_rescaling():
    """H(T θ) = D H D (Theorem 3), for a random member of the group."""
    model, data = problem()
    rescaling = sl.find_symmetries(model, data[0][:1]).sample(strength=1.0, seed=4)
    before = dense_hessian(sl.Problem(model, "cross_entropy", data))
    after = dense_hessian(sl.Problem(rescaling.apply(model), "cross_entropy", data))
    moved = rescaling.diagonal()
    parts = [
        moved[name].expand(p.shape) if name in moved else torch.ones_like(p) for name, p in model.named_parameters()
    ]
    d = torch.cat([part.reshape(-1) for part in parts]).detach()
    torch.testing.assert_close(after, d[:, None] * before * d, rtol=1e-8, atol=1e-10)


def test_a_network_without_symmetry_cannot_be_attacked():
    model = nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 3))
    data = torch.randn(8, 6), torch.randint(0, 3, (8,))
    with pytest.raises(sl.SpiritLevelError, match="this network has no rescaling symmetry"):
        sl.sharpen(model, data, target=1e6)


def test_wrong_targets_are_refused():
    model, data = problem()
    with pytest.raises(sl.SpiritLevelError, match="target must be a positive number, got -1"):
        sl.sharpen(model, data, target=-1)
    with pytest.raises(sl.SpiritLevelError, match="epsilon must be positive, got 0"):
        sl.sharpen_ball(model, data, epsilon=0)


def test_the_flattest_member_of_the_orbit_has_the_least_trace():
    model, data = problem()
    flat = sl.flattest(model, data)
    torch.testing.assert_close(flat(data[0]), model(data[0]), rtol=1e-9, atol=1e-9)
    least = sl.measure(flat, data, measures=["hessian_trace"])["hessian_trace"].value
    assert least < sl.measure(model, data, measures=["hessian_trace"])["hessian_trace"].value
    for seed in range(5):
        other = sl.find_symmetries(flat, data[0][:1]).sample(strength=0.05, seed=seed).apply(flat)
        assert sl.measure(other, data, measures=["hessian_trace"])["hessian_trace"].value > least


def test_the_flattest_member_does_not_depend_on_where_one_starts():
    model, data = problem()
    twin = sl.find_symmetries(model, data[0][:1]).sample(strength=1.5, seed=1).apply(model)
    for a, b in zip(sl.flattest(model, data).parameters(), sl.flattest(twin, data).parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


# --- attacks whose squares do not fit into single precision -----------------------------------------------------------


def norm_in_double(model, data):
    name = "hessian_spectral_norm"
    return sl.measure(model, data, measures=[name], dtype=torch.float64)[name].value


@pytest.mark.parametrize("target", [1e20, 1e30, 1e45])
def test_a_twin_in_single_precision_reaches_what_is_reported(target):
    model, data = problem(torch.float32)
    attack = sl.sharpen(model, data, target=target)
    assert next(attack.model.parameters()).dtype == torch.float32
    norm = norm_in_double(attack.model, data)
    assert target <= norm <= 1.2 * target
    assert attack.after == pytest.approx(norm, rel=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_eigenvalues_reach_a_far_target(dtype):
    model, data = problem(dtype)
    attack = sl.sharpen(model, data, target=1e20, eigenvalues=3)
    doubled = copy.deepcopy(attack.model).double(), (data[0].double(), data[1])
    found = eigenvalues(*doubled)
    assert attack.after >= 3
    assert int((found > 1e20).sum()) >= 3


def test_a_target_out_of_reach_is_refused_with_the_reason():
    model, data = problem(torch.float32)
    with pytest.raises(sl.SpiritLevelError, match=r"target 1e\+60 needs factors beyond e\^60"):
        sl.sharpen(model, data, target=1e60)
    with pytest.raises(
        sl.SpiritLevelError, match=r"with factors up to e\^60; .* ask for fewer, or for a smaller target"
    ):
        sl.sharpen(model, data, target=1e60, eigenvalues=3)


def test_what_the_twin_does_not_reach_is_not_reported(monkeypatch):
    model, data = problem()
    monkeypatch.setattr(Rescaling, "apply", lambda self, model: copy.deepcopy(model))  # rescales nothing
    with pytest.raises(sl.SpiritLevelError, match=r"target 1000 was not reached: the Hessian norm of the twin is \d"):
        sl.sharpen(model, data, target=1e3)
    with pytest.raises(sl.SpiritLevelError, match="only 0 eigenvalues above"):
        sl.sharpen(model, data, target=1e3, eigenvalues=3)


def test_a_layer_within_the_ball_stays_and_a_loss_that_falls_shows_nothing():
    model, data = problem()
    attack = sl.sharpen_ball(model, data, epsilon=1e30)
    assert set(attack.factors.values()) == {1.0}
    assert attack.before == attack.after > 0
    wrong = data[0], model(data[0]).argmin(1)  # the network is at its worst: zeroing it lowers the loss
    assert sl.sharpen_ball(model, wrong, epsilon=1e-3).after == 0.0
    with pytest.raises(sl.SpiritLevelError, match="epsilon must be positive, got inf"):
        sl.sharpen_ball(model, data, epsilon=float("inf"))


def test_a_tiny_ball_in_single_precision_holds_its_witness():
    model, data = problem(torch.float32)
    attack = sl.sharpen_ball(model, data, epsilon=1e-25)
    length = sum(float(part.double().square().sum()) for part in attack.witness.values()) ** 0.5
    assert 0 < length <= 1e-25
    assert attack.after == pytest.approx(sl.sharpen_ball(model, data, epsilon=1e-2).after, rel=1e-4)


def test_the_flattest_member_is_found_from_far_away_in_single_precision():
    model, data = problem(torch.float32)
    far = sl.rescale_layers(model, {"0.weight": 1e25, "4.weight": 1e-25}, data[0][:2])
    least, found = (
        sl.measure(sl.flattest(each, data), data, measures=["hessian_trace"])["hessian_trace"].value
        for each in (model, far)
    )
    assert found == pytest.approx(least, rel=1e-4)


def test_the_ball_of_a_frozen_first_layer_is_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    with refused("the first layer 0.weight is frozen, and the attack moves it: make it trainable, or use `sharpen`"):
        sl.sharpen_ball(model, (torch.randn(9, 4), torch.randint(3, (9,))), epsilon=1e-2)
