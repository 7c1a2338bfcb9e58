"""The certificate: it holds, it can be small, its terms add up, and no rescaling moves it."""

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import spiritlevel as sl
from refusals import refused
from spiritlevel.guarantees.certificate import Certificate
from spiritlevel.guarantees.pac_bayes import pac_bayes
from spiritlevel.guarantees.posterior import FLOATS, OCTAVES, Scale, divergence, one_scale, row_and_column_scales
from spiritlevel.guarantees.zero_one import kl_upper, wrong_class
from spiritlevel.measures.tsuzuku2019 import balanced_scales
from spiritlevel.network.layers import Layer


def trained(model: nn.Module, x: Tensor, y: Tensor, steps: int = 100, rate: float = 0.02) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def mlp(*widths: int, seed: int = 0, bias: bool = True) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after, bias=bias), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


def population(noise: float) -> tuple[Tensor, Tensor]:
    """All of a finite world, each point equally likely: 20 places, and at each 1 in 1/noise carries the other label."""
    place = torch.arange(20)
    x = torch.stack([(place * 0.7).cos() + (place % 2), (place * 0.7).sin()], 1)
    copies = round(1 / noise) if noise else 1
    y = (place % 2).repeat_interleave(copies)
    y[::copies] = 1 - y[::copies] if noise else y[::copies]
    return x.repeat_interleave(copies, 0), y


def sample(world: tuple[Tensor, Tensor], count: int, seed: int) -> tuple[Tensor, Tensor]:
    chosen = torch.randint(len(world[1]), (count,), generator=torch.Generator().manual_seed(seed))
    return world[0][chosen], world[1][chosen]


@pytest.fixture(scope="module")
def easy() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(1500) % 2
    x = torch.randn(1500, 4, generator=generator) / 3 + (2 * y - 1).unsqueeze(1)
    return trained(mlp(4, 6, 2), x, y, steps=60), (x, y)


# --- it is a certificate ---------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_it_holds_in_at_least_one_minus_delta_of_repetitions(noise: float) -> None:
    """The world is finite, so that the population error of every drawn network is known exactly."""
    world, delta, held, seen = population(noise), 0.2, 0, 10
    for seed in range(seen):
        data = sample(world, 80, seed)
        model = trained(mlp(2, 12, 2, seed=seed), *data, steps=60)
        found = pac_bayes(model, data, test_data=world, delta=delta, draws=25, seed=seed)
        held += found.noisy_test_error <= found.bound and found.noisy_test_error <= found.kl_bound
    assert held >= (1 - delta) * seen


def test_it_does_not_believe_a_network_that_memorized_random_labels() -> None:
    """Labels are independent of the inputs, so that every network is wrong half of the time."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(60, 20, generator=generator), torch.randint(2, (60,), generator=generator)
    model = trained(mlp(20, 30, 2), x, y)
    for method in ("matrix", "rows", "optimized"):
        found = pac_bayes(model, (x, y), method=method, draws=40, steps=20)
        assert found.training_error == 0
        assert min(found.bound, found.kl_bound) >= 0.5


def test_it_is_far_from_vacuous_on_an_easy_problem(easy) -> None:
    model, data = easy
    found = pac_bayes(model, data)
    assert found.bound < 0.4
    assert found.kl_bound < 0.35
    assert not found.vacuous


def test_a_prior_trained_on_other_samples_is_tighter_and_the_model_alone_costs_nothing(easy) -> None:
    model, data = easy
    same = pac_bayes(model, data, prior=model)
    assert same.terms["divergence"] == 0
    assert same.bound < pac_bayes(model, data).bound
    assert "rescaled twins differ" in same.notes[0]


# --- its terms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("deviation", "constant"), [("paper", 2), ("tight", 8)])
def test_the_terms_add_up_and_are_what_they_say(easy, deviation: str, constant: int) -> None:
    model, data = easy
    found = pac_bayes(model, data, test_data=data, draws=50, deviation=deviation)
    lam, m = found.lam, 1500
    assert sum(found.terms.values()) == pytest.approx(found.bound, abs=1e-12)
    assert found.terms["training error"] == found.training_error == found.test_error
    assert found.noisy_test_error == pytest.approx(found.noisy_training_error)  # the same networks, the same data
    assert found.terms["noise"] == pytest.approx(found.noisy_training_error - found.training_error)
    assert found.terms["divergence"] * lam == pytest.approx(sum(found.layers.values()))
    assert found.num_scales == 4  # two weights, two biases
    assert found.terms["scales"] * lam == pytest.approx(4 * math.log(121))
    assert found.terms["deviation"] == pytest.approx(lam / (constant * m))
    lambdas = math.ceil(math.log(4 * math.sqrt(m)) / math.log(1.1)) + 1
    assert found.terms["confidence"] * lam == pytest.approx(math.log(lambdas / (0.8 * 0.05)))
    upper = found.noisy_training_error + found.terms["Monte Carlo"]
    assert kl_upper(found.noisy_training_error, math.log(1 / 0.01) / 50) == pytest.approx(upper)
    assert found.divergence == pytest.approx(sum(found.layers.values()) + 4 * math.log(121))
    slack = (found.divergence + math.log(2 * math.sqrt(m) / 0.04)) / m
    assert found.kl_bound == pytest.approx(kl_upper(upper, slack))
    grid = [math.sqrt(m) * 1.1**k for k in range(lambdas)]
    best = min((found.divergence + math.log(lambdas / 0.04) + each**2 / (constant * m)) / each for each in grid)
    assert found.bound == pytest.approx(upper + best)


def test_one_scale_a_tensor_is_11() -> None:
    weight, diagonal = torch.tensor([3.0, 4.0]), torch.tensor([7.0, 9.0])
    scale = one_scale(weight, diagonal)
    assert float(scale.deviation(weight)[0]) ** 2 == pytest.approx(5 / 4)  # √(‖W‖²/(2λ Tr H)) at λ = 1/2
    assert divergence({"w": scale}, {"w": weight})["w"] == pytest.approx(25 / 2 / (5 / 4))


def test_what_has_no_noise_is_paid_by_the_bit(easy) -> None:
    model, data = easy
    for vectors, bits in (("float32", 32), ("bfloat16", 16)):
        found = pac_bayes(model, data, vectors=vectors, draws=5)
        assert found.terms["description"] * found.lam == pytest.approx(8 * bits * math.log(2))
        assert found.num_scales == 2
    assert pac_bayes(model, data, draws=5).terms["description"] == 0


def test_frozen_weights_and_statistics_are_paid_unless_they_were_known_before(easy) -> None:
    data = easy[1]
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    found = pac_bayes(model, data, draws=5)
    assert found.terms["description"] * found.lam == pytest.approx((30 + 12) * 32 * math.log(2))
    known = pac_bayes(model, data, draws=5, known=["0.*"])
    assert known.terms["description"] * known.lam == pytest.approx(12 * 32 * math.log(2))


def test_the_paper_s_deviation_a_smaller_delta_and_a_finer_hyperprior_cost_more(easy) -> None:
    model, data = easy
    bound = pac_bayes(model, data, draws=50).bound
    assert pac_bayes(model, data, draws=50, deviation="paper").bound > bound
    assert pac_bayes(model, data, draws=50, delta=0.001).bound > bound
    assert pac_bayes(model, data, draws=50, hyperprior="float32").bound > bound


def test_rows_and_columns_name_one_scale_less_than_there_are(easy) -> None:
    model, data = easy
    assert pac_bayes(model, data, method="rows", draws=5).num_scales == (6 + 4 - 1) + (2 + 6 - 1) + 2


def test_stochastic_gradient_improves_what_it_minimizes() -> None:
    """(62) with a loss that is quadratic in the weights has the solution of (17), up to the dropped half."""
    from spiritlevel.guarantees.noise import optimize_scales

    problem = sl.Problem(nn.Linear(3, 1, bias=False), "mse", (torch.eye(3).repeat(4, 1), torch.zeros(12, 1)))
    weight = {"weight": torch.tensor([[1.0, 2.0, 4.0]])}
    start = {
        "weight": Scale(torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64), Layer("weight"))
    }
    found = optimize_scales(problem, weight, weight, start, 5.0, steps=800, generator=torch.Generator().manual_seed(0))
    # E loss = Σ (w² + s²)/3 and Σ w²/(2λs²): s⁴ = 3w²/(2λ)
    expected = (3 * weight["weight"].double().square() / 10) ** 0.25
    assert torch.allclose(found["weight"].deviation(weight["weight"]), expected, rtol=0.1)


# --- rescaling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("matrix", torch.float32),
        ("matrix", torch.float64),
        ("rows", torch.float32),
        ("rows", torch.float64),
        ("optimized", torch.float64),
    ],
)
def test_layer_and_neuron_twins_get_the_same_certificate(method: str, dtype: torch.dtype) -> None:
    data = sample(population(0.1), 200, 0)
    data = data[0].to(dtype), data[1]
    model = trained(mlp(2, 8, 6, 2), data[0].float(), data[1], steps=40).to(dtype)
    symmetries = sl.find_symmetries(model, data[0][:2])
    twins = [symmetries.sample(1.5, seed=3).apply(copy.deepcopy(model))]
    twins.append(sl.rescale_layers(model, {"0.weight": 50.0, "2.weight": 0.1, "4.weight": 0.2}, data[0][:2]))
    first = pac_bayes(model, data, method=method, draws=20, steps=20)
    for twin in twins:
        second = pac_bayes(twin, data, method=method, draws=20, steps=20)
        tolerance = 1e-9 if dtype == torch.float64 else 1e-3
        assert second.bound == pytest.approx(first.bound, rel=tolerance)
        assert second.divergence == pytest.approx(first.divergence, rel=tolerance)


@pytest.mark.parametrize("method", ["matrix", "rows"])
def test_twins_of_convolutions_with_normalization_get_the_same_certificate(method: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (40,), generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.ReLU(), nn.Flatten(),
            nn.Linear(16, 3),
        ).double()  # fmt: skip
        model(x)  # running statistics that are not 0 and 1
    twin = sl.find_symmetries(model, x[:2]).sample(1.0, seed=1).apply(copy.deepcopy(model))
    assert not torch.allclose(twin[0].weight, model[0].weight)
    first, second = (pac_bayes(each, (x, y), method=method, draws=5) for each in (model, twin))
    assert second.bound == pytest.approx(first.bound, rel=1e-7)
    assert second.layers == pytest.approx(first.layers, rel=1e-6)


def test_the_model_comes_back_as_it_was(easy) -> None:
    model, data = easy
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    pac_bayes(model, data, method="optimized", draws=3, steps=3)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.requires_grad for parameter in model.parameters())


# --- the pieces ------------------------------------------------------------------------------------------------------


def test_the_deviations_of_rows_and_columns_solve_17() -> None:
    generator = torch.Generator().manual_seed(0)
    h, w = (torch.rand(3, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    s2 = row_and_column_scales(Layer("w"), w, h).deviation(w).square()
    assert float((h * s2 + w.square() / s2).sum()) == pytest.approx(float(balanced_scales(h, w.square())[0]), rel=1e-12)


@pytest.mark.parametrize("lam", [0.01, 0.5, 7.0, 1e6])
def test_17_scales_with_the_inverse_root_of_lambda(lam: float) -> None:
    generator = torch.Generator().manual_seed(1)
    h, w = (torch.rand(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    value, x, y = balanced_scales(h, w / (2 * lam))
    at_half, x_half, y_half = balanced_scales(h, w)
    assert float(value) == pytest.approx(float(at_half) * math.sqrt(0.5 / lam), rel=1e-12)
    logs = (x.unsqueeze(1) + y) - (x_half.unsqueeze(1) + y_half)
    assert torch.allclose(logs, torch.full_like(logs, -0.5 * math.log(2 * lam)), atol=1e-9)  # (11): σ² ∝ λ^(−1/2)


def test_scales_of_grouped_and_transposed_kernels_reach_the_right_entries() -> None:
    for layer, shape in ((Layer("w", groups=2), (4, 3, 2)), (Layer("w", groups=2, transposed=True), (6, 2, 2))):
        rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
        columns = torch.tensor([[0.0, 10.0, 20.0], [0.0, 30.0, 40.0]], dtype=torch.float64)
        logs = layer.matrix(Scale(rows, columns, layer).deviation(torch.zeros(shape)).log())
        assert torch.allclose(logs, (rows.unsqueeze(2) + columns.unsqueeze(1)).unsqueeze(3).expand(2, 2, 3, 2))


def test_dead_rows_get_finite_noise() -> None:
    w = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 1.0]])
    h = torch.tensor([[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]])
    scale = row_and_column_scales(Layer("w"), w, h).on(OCTAVES)
    assert bool(scale.deviation(w).isfinite().all())
    assert math.isfinite(divergence({"w": scale}, {"w": w})["w"])


def test_hyperpriors_round_to_their_own_numbers() -> None:
    logs = torch.tensor([-100.0, -0.1, 0.0, 0.2, 100.0], dtype=torch.float64)
    half = math.log(2) / 2
    assert OCTAVES.nearest(logs).tolist() == pytest.approx([-60 * half, 0.0, 0.0, half, 60 * half])
    floats = FLOATS.nearest(torch.tensor([0.1, -1000.0], dtype=torch.float64)).exp()
    assert bool((floats == floats.float()).all() | torch.isclose(floats, floats.float().double(), rtol=1e-15).all())


def test_kl_upper_is_an_inverse() -> None:
    for mean in (0.0, 0.03, 0.5, 1.0):
        for budget in (1e-4, 0.1, 3.0):
            q = kl_upper(mean, budget)
            assert mean <= q <= 1
            if mean > 0 and q < 1 - 1e-9:
                kl = mean * math.log(mean / q) + (1 - mean) * math.log((1 - mean) / (1 - q))
                assert kl == pytest.approx(budget, rel=1e-6)


def test_positions_of_a_sample_are_averaged() -> None:
    outputs = torch.tensor([[[2.0, 0.0], [1.0, 1.0]]])  # one sample, two classes, two positions
    assert wrong_class(outputs, torch.tensor([[0, 0]])).tolist() == [0.5]


def test_it_prints_saves_and_loads(easy, tmp_path) -> None:
    model, data = easy
    found = pac_bayes(model, data, draws=5, test_data=data)
    found.save(tmp_path / "c.json")
    assert Certificate.load(tmp_path / "c.json") == found
    text = str(found)
    for word in ("training error", "Monte Carlo", "divergence", "scales", "bound"):
        assert word in text
    with refused("not a saved certificate: its format is None, needed is 'spiritlevel-certificate-1'", ValueError):
        Certificate.from_dict({})


# --- bad input -------------------------------------------------------------------------------------------------------


def test_a_regression_is_told_what_to_pass() -> None:
    model, x, y = nn.Linear(2, 1), torch.ones(4, 2), torch.zeros(4, 1)
    with refused(
        "the bound is on the 0–1 loss, and with the loss 'mse' and targets of torch.float32 nothing says when an output is "
        "wrong: pass integer class labels with loss='cross_entropy', or zero_one=lambda outputs, targets: … with a number "
        "in [0, 1] for every sample, for example ((outputs - targets).abs() > 0.5).flatten(1).any(1)"
    ):
        pac_bayes(model, (x, y), "mse")
    found = pac_bayes(model, (x, y), "mse", zero_one=lambda f, t: ((f - t).abs() > 0.5).flatten(1).any(1), draws=3)
    assert found.bound > 0
    with refused("zero_one must return one number for each of the 4 samples, got (4, 1)"):
        pac_bayes(model, (x, y), "mse", zero_one=lambda f, t: (f - t).abs())
    with refused("zero_one must return numbers between 0 and 1: the bound holds for such losses only"):
        pac_bayes(model, (x, y), "mse", zero_one=lambda f, t: 2 + (f - t).abs().squeeze(1))


def test_wrong_choices_are_refused(easy) -> None:
    model, (x, y) = easy
    with refused("a bound needs at least two samples, got 1: m enters as 1/√m"):
        pac_bayes(model, (x[:1], y[:1]))
    with refused("delta is the probability of being wrong, a number between 0 and 1; got 0"):
        pac_bayes(model, (x, y), delta=0)
    with refused("draws must be a positive whole number, got 0"):
        pac_bayes(model, (x, y), draws=0)
    with refused("method must be one of 'matrix', 'rows', 'optimized', got 'columns'"):
        pac_bayes(model, (x, y), method="columns")
    with refused("prior must be a network of the same form: '0.weight' has shape (6, 4), in the prior (5, 4)"):
        pac_bayes(model, (x, y), prior=mlp(4, 5, 2))
    with refused(
        "the bound needs the outputs of every sample, and the loss 'whole' calls the model itself: pass data as "
        "(inputs, labels) and loss='cross_entropy'"
    ):
        pac_bayes(model, [(x, y)], _whole)


def _whole(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1]), len(batch[1])


_whole.__name__ = "whole"


def test_a_label_that_the_loss_ignores_does_not_count_as_an_error() -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 2)
    y = (x[:, 0] > 0).long()
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.tensor([[-5.0, 0.0], [5.0, 0.0]])  # right everywhere
    for ignored in (-100, 255):
        some = torch.where(torch.arange(200) % 2 == 0, ignored, y)
        found = pac_bayes(model, (x, some), nn.CrossEntropyLoss(ignore_index=ignored), draws=10)
        assert found.training_error == 0.0


def own_binary(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs.squeeze(1), targets.to(outputs))


def classes_last(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.movedim(-1, 1), targets)


@pytest.mark.parametrize("loss", [own_binary, classes_last])
def test_the_largest_output_is_no_prediction_under_a_loss_of_ones_own(loss) -> None:
    """A network of one logit has only one largest output; one that was wrong everywhere was certified."""
    binary = loss is own_binary
    x = torch.randn(30, 2).abs() if binary else torch.randint(3, (30, 3))
    y = torch.zeros(30, dtype=torch.long) if binary else x
    model = nn.Linear(2, 1, bias=False) if binary else nn.Sequential(nn.Embedding(3, 3), nn.Linear(3, 3))
    name = loss.__name__
    with refused(
        f"the bound is on the 0–1 loss, and with the loss '{name}' and targets of torch.int64 nothing says when an output is "
        "wrong: pass integer class labels with loss='cross_entropy', or zero_one=lambda outputs, targets: … with a number in "
        "[0, 1] for every sample, for example ((outputs - targets).abs() > 0.5).flatten(1).any(1)"
    ):
        pac_bayes(model, (x, y), loss, draws=5)
