"""Feature robustness: the definition by hand, closed forms, what bounds it, and what is refused."""

import copy
import json
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spiritlevel as sl
from refusals import refused
from spiritlevel.guarantees.mixing import Mixing, gaussian, norm, orthogonal
from spiritlevel.guarantees.robustness import Point, _holds_until, feature_robustness
from spiritlevel.network.layers import Layer

GENERATOR = torch.Generator().manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    """A small convolutional network near a minimum, in float64, smooth so that second order means something."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 2, 5, 5, generator=generator, dtype=torch.float64)
    y = (x.mean((2, 3))[:, 0] > 0).long() + 2 * (x.std((1, 2, 3)) > 1).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 4)
        ).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters())
        value = F.cross_entropy(model(x), y) + 0.01 * penalty
        value.backward()
        return value

    optimizer.step(closure)
    return model, (x, y)


def by_hand(model: nn.Sequential, index: int, data: tuple[Tensor, Tensor], a: Tensor, delta: float) -> float:
    """F from its definition: the features themselves are changed."""
    x, y = data
    with torch.no_grad():
        phi = model[:index](x)
        mixed = torch.einsum("dc,nc...->nd...", a, phi)
        return float(F.cross_entropy(model[index:](phi + delta * mixed), y) - F.cross_entropy(model(x), y))


# --- the definition --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("index", "features"), [(0, 2), (5, 16)])
def test_it_is_the_rise_of_the_loss_when_features_move(trained, index: int, features: int) -> None:
    model, data = trained
    a = rand(features, features)
    found = feature_robustness(model, data, f"{index}.weight", 0.1, matrices=a, ascend=False)
    assert found.values == (pytest.approx(by_hand(model, index, data, a, 0.1), rel=1e-10),)
    assert found.mean == found.values[0]
    assert found.mean_error == 0


def test_groups_mix_their_own_channels(trained) -> None:
    model, data = trained
    blocks = rand(2, 2, 2)
    whole = torch.block_diag(*blocks)
    expected = by_hand(model, 2, data, whole, 0.1)
    for given in (blocks, whole):
        found = feature_robustness(model, data, "2", 0.1, matrices=[given], ascend=False)
        assert found.mean == pytest.approx(expected, rel=1e-10)
    with refused(
        "A carries features across the 2 groups of a grouped convolution, which no change of its weight does: pass one "
        "block a group, shape (2, 2, 2)"
    ):
        feature_robustness(model, data, "2", 0.1, matrices=torch.ones(4, 4))


def test_a_transposed_weight_mixes_its_inputs() -> None:
    """x @ W stores inputs first."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.arange(6.0).reshape(3, 2).double())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w

    model, x, y, a = Product(), rand(7, 3), rand(7, 2), rand(3, 3)
    found = feature_robustness(model, (x, y), "w", 0.2, "mse", matrices=a, ascend=False)
    expected = F.mse_loss(model(x + 0.2 * x @ a.T), y) - F.mse_loss(model(x), y)
    assert found.mean == pytest.approx(float(expected.detach()), rel=1e-10)


def test_the_second_order_value_is_the_limit_of_f(trained) -> None:
    model, data = trained
    found = feature_robustness(model, data, "5", 0.01, num_matrices=3, ascend=False)
    assert found.mean == pytest.approx(found.second_order, rel=1e-2)
    halves = feature_robustness(model, data, "5", 0.005, num_matrices=3, ascend=False)
    gaps = [abs(each.mean - each.second_order) for each in (found, halves)]
    assert gaps[0] / gaps[1] == pytest.approx(16, rel=0.2)  # both signs of A leave δ⁴


def test_noise_at_the_features_has_the_mean_of_random_matrices(trained) -> None:
    """Appendix D.1: drawing A once, or anew for every sample, is the same in expectation."""
    model, data = trained
    for layer, kind in (("5", "orthogonal"), ("5", "gaussian"), ("0", "orthogonal"), ("2", "gaussian")):
        found = feature_robustness(model, data, layer, 0.3, matrices=kind, num_matrices=60, ascend=False, deltas=[0.3])
        spread = math.hypot(found.mean_error, found.noise_error)
        assert abs(found.mean - found.noise) < 4 * spread
        assert spread < 0.3 * found.mean


def test_given_matrices_are_drawn_for_every_sample_too(trained) -> None:
    model, data = trained
    a = rand(16, 16) / 10
    found = feature_robustness(model, data, "5", 0.3, matrices=[a], ascend=False)
    assert found.noise == pytest.approx(found.mean, rel=1e-9)  # one matrix leaves nothing to chance
    assert found.noise_error == pytest.approx(0, abs=1e-12)


def test_an_embedding_has_matrices_but_no_features_to_add_noise_to() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(6, 3).double(), nn.Linear(3, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.words(x).mean(1))

    model, x, y, a = Words(), torch.arange(20).reshape(10, 2) % 6, torch.arange(10) % 2, rand(6, 6)
    found = feature_robustness(model, (x, y), "words", 0.1, matrices=a, ascend=False, deltas=[0.1])
    mixed = copy.deepcopy(model)
    with torch.no_grad():
        mixed.words.weight += 0.1 * a.T @ model.words.weight  # inputs are stored first
        expected = F.cross_entropy(mixed(x), y) - F.cross_entropy(model(x), y)
    assert found.mean == pytest.approx(float(expected), rel=1e-9)
    assert math.isnan(found.noise)
    assert (
        found.notes[-1] == "noise injection is not available: the layer's inputs are indices, or not one row a sample"
    )
    assert "–" in str(found)


# --- the bound -------------------------------------------------------------------------------------------------------


def test_the_largest_rise_is_found_and_can_be_evaluated_again(trained) -> None:
    model, data = trained
    found = feature_robustness(model, data, "5", 0.05, num_matrices=4)
    assert found.witness.shape == (1, 16, 16)
    assert norm(found.witness) <= 1 + 1e-9
    assert by_hand(model, 5, data, found.witness[0], 0.05) == pytest.approx(found.largest, rel=1e-9)
    assert found.largest >= max(abs(value) for value in found.values)
    rows = [point for point in found.curve if point.delta == 0.05]
    assert rows[0].adversarial == pytest.approx(found.largest, rel=1e-9)


def test_it_is_below_the_bound_at_a_minimum_and_linear_regression_reaches_it() -> None:
    """w one-dimensional in outputs: F = δ²·wA Σ Aᵀwᵀ with Σ = (1/N) Σ xxᵀ is largest where wA meets the top eigenvector."""
    x = rand(50, 4) * torch.tensor([3.0, 1.0, 1.0, 0.5])
    model = nn.Linear(4, 1, bias=False).double()
    y = model(x).detach()
    found = feature_robustness(model, (x, y), "weight", 0.1, "mse")
    w = model.weight.detach()
    top = float(torch.linalg.eigvalsh(x.T @ x / 50)[-1])
    assert found.kappa == pytest.approx(float(w.square().sum()) * 2 * top, rel=1e-6)
    assert found.largest == pytest.approx(0.01 * float(w.square().sum()) * top, rel=1e-6)
    assert found.bound == pytest.approx(found.largest, rel=1e-6)
    assert found.holds_until == found.curve[-1].delta  # quadratic: the second order is all there is
    assert found.first_order == pytest.approx(0, abs=1e-12)
    assert not found.notes


def test_away_from_a_critical_point_it_says_so() -> None:
    x, y = rand(30, 3), rand(30, 1) + 5
    found = feature_robustness(nn.Linear(3, 1, bias=False).double(), (x, y), "weight", 0.1, "mse")
    assert found.largest > found.bound
    assert found.notes[0].startswith("not at a critical point: the first-order change is up to")
    assert "terms beyond second order" in found.notes[1] or "exceeds" in found.notes[1]


def test_the_first_order_note_covers_the_worst_matrix_too(trained) -> None:
    """max |⟨∇L, WA⟩| over ‖A‖ ≤ 1 is the sum of the singular values of WᵀG; random A see a fraction of it."""
    model, data = trained
    other = copy.deepcopy(model)
    other[5].weight.data += 0.3
    found = feature_robustness(other, data, "5.weight", 1e-4)
    (gradient,) = torch.autograd.grad(F.cross_entropy(other(data[0]), data[1]), other[5].weight)
    weight = other[5].weight.detach()
    assert found.first_order == pytest.approx(1e-4 * float(torch.linalg.svdvals(weight.T @ gradient).sum()))
    at_witness = 1e-4 * float((weight @ found.witness[0] * gradient).sum())
    assert 0.9 * found.first_order < at_witness <= found.first_order * (1 + 1e-9)
    assert found.largest == pytest.approx(at_witness, rel=0.05)
    assert f"the first-order change is up to {found.first_order:.2g}" in found.notes[0]


def test_in_single_precision_agreement_is_claimed_where_the_table_shows_it(trained) -> None:
    model, (x, y) = trained
    single = copy.deepcopy(model).float(), (x.float(), y)
    for delta in (1e-3, 1e-4, 1e-5):  # there the rises sink into the rounding of a single-precision loss
        found = feature_robustness(*single, "5.weight", delta, num_matrices=2, ascend=False)
        for point in found.curve:
            gap = abs(point.mean - point.second_order)
            assert (gap <= 0.05 * abs(point.mean)) == (point.delta <= found.holds_until), point
        assert found.holds_until == found.curve[-1].delta


def test_what_rounding_hides_is_not_called_agreement() -> None:
    def point(delta: float, mean: float, second: float) -> Point:
        return Point(delta, mean, 0.0, second, math.nan, 1.0)

    hidden, good, bad = point(0.1, 1e-9, 1.1e-9), point(0.2, 1.0, 1.04), point(0.3, 1.0, 1.1)
    assert _holds_until([hidden, good, bad], [1e-6] * 3) == 0.2
    assert _holds_until([hidden, bad, good], [1e-6] * 3) == 0.0
    assert _holds_until([bad, good], [0.09] * 2) == 0.0  # rounding no longer excuses a gap
    assert math.isnan(_holds_until([hidden], [1e-6]))


def test_two_neighbours_moved_apart_need_a_large_matrix() -> None:
    """Appendix D.2: (1, 0) towards (1, 0) and (1, ε) towards (0, 1) needs ‖A‖ ≥ √2/ε, and the bound grows as its square."""
    epsilon = 0.01
    x = torch.tensor([[1.0, 0.0], [1.0, epsilon]], dtype=torch.float64)
    a = torch.tensor([[1.0, -1 / epsilon], [0.0, 1 / epsilon]], dtype=torch.float64)
    assert torch.allclose(x @ a.T, torch.eye(2, dtype=torch.float64))
    assert norm(a) >= math.sqrt(2) / epsilon
    model = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, 3.0]]))
    data = (x, model(x).detach())
    unit = feature_robustness(model, data, "weight", 0.1, "mse")
    moved = feature_robustness(model, data, "weight", 0.1, "mse", matrices=a, ascend=False)
    assert moved.mean == pytest.approx(0.01 * (2**2 + 3**2) / 2, rel=1e-9)  # (w·(1,0))² and (w·(0,1))², halved
    assert moved.bound / unit.bound == pytest.approx(norm(a) ** 2, rel=1e-6)
    assert moved.bound / moved.mean > 1 / epsilon**2  # almost vacuous


def test_the_curve_marks_where_second_order_ends(trained) -> None:
    model, data = trained
    found = feature_robustness(model, data, "5", 0.1, num_matrices=4, ascend=False, deltas=[0.001, 0.01, 30.0])
    assert [point.delta for point in found.curve] == [0.001, 0.01, 0.1, 30.0]
    assert 0.01 <= found.holds_until < 30
    assert all(math.isnan(point.adversarial) for point in found.curve)
    for point in found.curve:
        assert point.bound == pytest.approx(point.delta**2 / 2 * found.kappa)


# --- rescaling, restoring, saving ------------------------------------------------------------------------------------


def test_rescaled_layers_give_the_same_robustness() -> None:
    x, y = rand(30, 3), torch.arange(30) % 2
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    twin = sl.rescale_layers(model, {"0.weight": 20.0, "2.weight": 0.05}, x[:2])
    first, second = (feature_robustness(each, (x, y), "2.weight", 0.1, num_matrices=3) for each in (model, twin))
    for name in ("mean", "second_order", "largest", "bound", "noise"):
        assert getattr(second, name) == pytest.approx(getattr(first, name), rel=1e-5)


def test_kappa_is_that_of_the_measure(trained) -> None:
    model, data = trained
    report = sl.measure(model, data, measures=["kappa_sum"], tolerance=1e-6)
    found = feature_robustness(model, data, "0.weight", 0.1, ascend=False, tolerance=1e-6)
    assert found.kappa == pytest.approx(report["kappa_sum"].layers["0.weight"], rel=1e-5)


def test_the_model_comes_back_as_it_was(trained) -> None:
    model, data = trained
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    feature_robustness(model, data, "2", 0.1, num_matrices=2, deltas=[0.1])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_it_prints_and_saves(trained, tmp_path) -> None:
    model, data = trained
    found = feature_robustness(model, data, "5", 0.1, num_matrices=2, ascend=False, deltas=[0.05])
    found.save(tmp_path / "r.json")
    plain = json.loads((tmp_path / "r.json").read_text())
    assert plain["format"] == "spiritlevel-robustness-1"
    assert plain["largest"] is None
    assert plain["curve"][0]["delta"] == 0.05
    for words in ("mean of F over 2 A (orthogonal)", "bound, δ²/2·κ", "noise at the features", "5.weight, δ = 0.1"):
        assert words in str(found)


# --- the pieces ------------------------------------------------------------------------------------------------------


def test_random_matrices_have_norm_one_in_every_group() -> None:
    generator = torch.Generator().manual_seed(3)
    for draw in (orthogonal, gaussian):
        norms = torch.linalg.matrix_norm(draw((5, 2, 3, 3), generator), 2)
        assert torch.allclose(norms, torch.ones(5, 2, dtype=torch.float64))


def test_the_slope_is_the_gradient_of_the_product() -> None:
    mixing = Mixing(Layer("w", groups=2, transposed=True), rand(6, 2, 3))
    a, g = rand(2, 3, 3).requires_grad_(), rand(6, 2, 3)
    (mixing.product(a) * g).sum().backward()
    assert torch.allclose(a.grad, mixing.slope(g))


# --- bad input -------------------------------------------------------------------------------------------------------


def test_wrong_input_is_refused(trained) -> None:
    model, (x, y) = trained
    with refused(
        "the network has no layer '6.weight'; did you mean '5.weight'? Its layers: 0.weight, 2.weight, 5.weight"
    ):
        feature_robustness(model, (x, y), "6.weight", 0.1)
    with refused("the network has no layer 'nothing'. Its layers: 0.weight, 2.weight, 5.weight"):
        feature_robustness(model, (x, y), "nothing", 0.1)
    for delta in (0, -1.0, math.inf):
        with refused(f"delta must be a positive number, the size of the perturbation; got {delta!r}"):
            feature_robustness(model, (x, y), "0", delta)
    with refused("feature robustness is a mean over samples: pass at least two, got 1"):
        feature_robustness(model, (x[:1], y[:1]), "0", 0.1)
    with refused("A mixes the 2 input features of the layer, so it must have shape (2, 2); got (3, 3)"):
        feature_robustness(model, (x, y), "0", 0.1, matrices=torch.eye(3))
    with refused("matrices must be 'orthogonal', 'gaussian' or your own, got 'unitary'"):
        feature_robustness(model, (x, y), "0", 0.1, matrices="unitary")
    with refused("num_matrices must be a positive whole number, got 0"):
        feature_robustness(model, (x, y), "0", 0.1, num_matrices=0)
    with refused("no matrices were given: pass one, or 'orthogonal' or 'gaussian' for random ones"):
        feature_robustness(model, (x, y), "0", 0.1, matrices=[])
