"""Densities against matrices with a known spectrum and against the dense Hessian of small networks."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import spiritlevel as sl
from case_networks import mlp
from refusals import refused
from spiritlevel.curvature.dense import dense_hessian
from spiritlevel.curvature.density import extremes, moment, quadratures
from spiritlevel.problem.problem import Problem
from spiritlevel.spectrum.show import spectrum_page
from spiritlevel.spectrum.spectrum import Spectrum


@pytest.fixture(scope="module")
def network():
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = mlp(activation=nn.Tanh).double()
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    return model, (x, torch.randint(3, (30,), generator=generator))


@pytest.fixture
def by_probes(monkeypatch):
    """Small operators too are looked at by random probes, and are not written down."""
    monkeypatch.setattr(sys.modules[Spectrum.__module__], "BASIS_BUDGET", 0)


def operators(network):
    """Name → the dense matrix of the operator."""
    problem = Problem(network[0], "cross_entropy", network[1])
    H = dense_hessian(problem)
    values = list(problem.parameters.values())
    D = torch.cat([value.norm().expand(value.numel()) for value in values])
    theta = torch.cat([value.abs().reshape(-1) for value in values])
    first = values[0].numel()
    return {
        "hessian": H,
        "riemannian": D[:, None] * H * D,
        "nodewise": theta[:, None] * H * theta,
        "0.weight": H[:first, :first],
    }


def random_symmetric(size, seed=0):
    A = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (A + A.mT) / 2


def test_a_quadrature_has_the_first_moments_of_its_probe_exactly():
    A = random_symmetric(30)
    asked = []

    def products(vectors):
        asked.extend(vectors)
        return [A @ v for v in vectors]

    (found,) = quadratures(products, A, 30, probes=1, steps=6, generator=torch.Generator().manual_seed(1))
    v = asked[0]
    assert len(found.nodes) == 6
    assert float(found.weights.sum()) == pytest.approx(1.0, abs=1e-12)
    for order in range(12):
        assert moment(found, order) == pytest.approx(float(v @ torch.linalg.matrix_power(A, order) @ v), rel=1e-9)


def test_a_probe_that_sees_the_whole_space_finds_every_eigenvalue():
    A = random_symmetric(12)
    (found,) = quadratures(lambda vs: [A @ v for v in vs], A, 12, probes=1, steps=50, generator=torch.Generator())
    torch.testing.assert_close(found.nodes, torch.linalg.eigvalsh(A), rtol=1e-9, atol=1e-9)
    assert float(found.residuals.max()) < 1e-9


def test_probes_share_every_pass():
    A = random_symmetric(40)
    passes = []

    def products(vectors):
        passes.append(len(vectors))
        return [A @ v for v in vectors]

    quadratures(products, A, 40, probes=5, steps=7, generator=torch.Generator())
    assert passes == [5] * 7


def test_ends_err_to_one_side_and_within_their_residuals():
    A = random_symmetric(60)
    true = torch.linalg.eigvalsh(A)
    top, bottom = extremes(
        lambda vs: [A @ v for v in vs], A, 60, count=4, tolerance=1e-6, most_products=60, generator=torch.Generator()
    )
    rounding = 1e-12
    for k in range(4):
        assert top[k].value <= float(true[-1 - k]) + rounding
        assert bottom[k].value >= float(true[k]) - rounding
        assert float((true - top[k].value).abs().min()) <= top[k].residual + rounding
        assert abs(top[k].value - float(true[-1 - k])) < 1e-6
        assert top[k].converged


def test_ends_that_did_not_converge_say_so():
    A = random_symmetric(200)
    top, _ = extremes(
        lambda vs: [A @ v for v in vs], A, 200, count=5, tolerance=1e-10, most_products=12, generator=torch.Generator()
    )
    assert not top[-1].converged
    assert top[-1].residual > 1e-3


@pytest.mark.parametrize("operator", ["hessian", "riemannian", "nodewise", "0.weight"])
def test_a_spectrum_is_that_of_the_dense_matrix(by_probes, network, operator):
    A = operators(network)[operator]
    true = torch.linalg.eigvalsh(A)
    found = sl.spectrum(*network, operator=operator, probes=40, steps=30, ends=3, tolerance=1e-8, most_products=200)
    assert found.size == len(true)
    for k in range(3):
        assert found.top[k].value == pytest.approx(float(true[-1 - k]), rel=1e-7)
        assert found.bottom[k].value == pytest.approx(float(true[k]), rel=1e-7)
    for order in (1, 2):
        mean, error = found.moment(order)
        assert error > 0
        assert abs(mean - float((true**order).mean())) < 4 * error
    mean, error = found.density(found.points())
    assert float(torch.trapezoid(mean, found.points())) == pytest.approx(1.0, abs=1e-3)
    assert bool((error >= 0).all())


@pytest.mark.parametrize("operator", ["hessian", "riemannian", "nodewise", "0.weight"])
def test_a_small_operator_is_written_down(network, operator):
    """For fewer products than probes would take; nothing of its density is left to chance."""
    true = torch.linalg.eigvalsh(operators(network)[operator])
    found = sl.spectrum(*network, operator=operator, ends=3)
    assert found.exact
    assert found.cost.products == len(true) <= 8 * 60
    torch.testing.assert_close(found.probes[0].nodes, true, rtol=1e-9, atol=1e-12)
    for order in (1, 2, 3):
        assert found.moment(order) == (pytest.approx(float((true**order).mean()), rel=1e-9), 0.0)
    points = found.points(51)
    kernel = torch.exp(-0.5 * ((points[:, None] - true) / found.width) ** 2) / (found.width * math.sqrt(2 * math.pi))
    density, band = found.density(points)
    torch.testing.assert_close(density, kernel.mean(1), rtol=1e-6, atol=1e-9)
    assert not band.any()
    assert f"their sum is {float(true.sum()):.5g}, exact".replace("-", "−") in str(found)
    assert "two standard errors" not in spectrum_page(found)


def test_one_eigenvalue_more_than_products_of_probes_is_left_to_them(network):
    size = sum(parameter.numel() for parameter in network[0].parameters())
    assert sl.spectrum(*network, probes=size, steps=2).exact
    few = sl.spectrum(*network, probes=2, steps=(size - 1) // 2)
    assert not few.exact
    assert few.moment(1)[1] > 0
    assert "two standard errors" in spectrum_page(few)


def test_the_band_holds_the_density_of_all_eigenvalues(by_probes, network):
    true = torch.linalg.eigvalsh(operators(network)["hessian"])
    found = sl.spectrum(*network, probes=40, steps=40)
    points = found.points(101)
    kernel = torch.exp(-0.5 * ((points[:, None] - true) / found.width) ** 2) / (found.width * math.sqrt(2 * math.pi))
    mean, error = found.density(points)
    seen = kernel.mean(1) > 1e-3
    outside = (mean - kernel.mean(1)).abs() > 4 * error + 1e-9
    assert float((outside & seen).double().mean()) < 0.05


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_a_scaled_loss_has_a_scaled_spectrum(network, factor):
    loss = nn.functional.cross_entropy
    first = sl.spectrum(*network, loss=loss, steps=10, probes=2)
    scaled = sl.spectrum(*network, loss=lambda f, y: factor * loss(f, y), steps=10, probes=2)
    assert scaled.top[0].value == pytest.approx(factor * first.top[0].value, rel=1e-6)
    assert scaled.width == pytest.approx(factor * first.width, rel=1e-6)


def test_the_riemannian_spectrum_survives_a_rescaling_of_layers_and_the_plain_one_does_not():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = mlp().double(), torch.randn(20, 4, dtype=torch.float64)
    y = torch.arange(20) % 3
    twin = sl.rescale_layers(model, {"0.weight": 10.0, "2.weight": 0.1}, x)
    tops = {
        operator: [sl.spectrum(m, (x, y), operator=operator, steps=10, probes=2).top[0].value for m in (model, twin)]
        for operator in ("hessian", "riemannian")
    }
    assert tops["riemannian"][0] == pytest.approx(tops["riemannian"][1], rel=1e-6)
    assert tops["hessian"][1] > 5 * tops["hessian"][0]


def test_the_same_seed_gives_the_same_and_no_global_state_is_touched(network):
    before = torch.get_rng_state()
    first, second, other = (sl.spectrum(*network, steps=5, probes=2, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first.probes[0].weights, second.probes[0].weights)
    assert not torch.equal(first.probes[0].weights, other.probes[0].weights)


def test_a_spectrum_is_saved_and_loaded(network, tmp_path):
    found = sl.spectrum(*network, steps=5, probes=2)
    found.save(tmp_path / "spectrum.json")
    loaded = Spectrum.load(tmp_path / "spectrum.json")
    assert loaded.to_dict() == found.to_dict()
    assert "largest" in str(loaded)
    with pytest.raises(ValueError, match="not a saved spectrum"):
        Spectrum.from_dict({"format": "else"})


def test_wrong_arguments_are_refused_in_words(network):
    with pytest.raises(sl.SpiritLevelError, match="operator must be one of hessian, riemannian, nodewise"):
        sl.spectrum(*network, operator="9.weight")
    for name, least, bad in (("probes", 2, 1), ("steps", 2, 1), ("ends", 1, 0), ("most_products", 2, float("nan"))):
        with refused(f"{name} must be a whole number of at least {least}, got {bad!r}"):
            sl.spectrum(*network, **{name: bad})
    with refused("seed must be a whole number, got 0.5"):
        sl.spectrum(*network, seed=0.5)
    with refused("tolerance must be a number between 0 and 1, got nan"):
        sl.spectrum(*network, tolerance=float("nan"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ends_have_not_converged_beyond_rounding(network, dtype):
    for tolerance, possible in ((1e-300, False), (1e-17, False), (1e-4, True)):
        found = sl.spectrum(*network, probes=2, steps=5, tolerance=tolerance, dtype=dtype)
        assert all(not each.converged or possible for each in (*found.top, *found.bottom))


def test_the_bar_of_few_probes_is_as_wide_as_few_probes_make_it(network):
    """Two bars hold the truth in 95 of 100 cases: with two probes, one degree of freedom, that takes 6.97 of the plain ones."""
    few = sl.spectrum(*network, steps=5, probes=2)
    values = torch.tensor([moment(probe, 1) for probe in few.probes])
    assert few.moment(1)[1] == pytest.approx(6.97 * float(values.std()) / 2**0.5, rel=1e-2)


def test_ends_in_single_precision_carry_its_rounding(by_probes):
    """A process that has seen the whole space has no residual left, and an error of rounding all the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model, x = nn.Linear(4, 1), torch.randn(50, 4)
    y = torch.zeros(50, 1)
    inputs = torch.cat([x.double(), torch.ones(50, 1, dtype=torch.float64)], 1)
    true = torch.linalg.eigvalsh(2 * inputs.T @ inputs / 50)
    found = sl.spectrum(model, (x, y), "mse", dtype=torch.float32)
    for value, end in zip((*true.flip(0), *true), (*found.top, *found.bottom), strict=True):
        assert 0 < abs(end.value - float(value)) <= end.residual < 1e-5


def test_the_words_say_what_the_ends_leave_open():
    """An end that has not converged may lie further out."""
    model, x = nn.Linear(3, 2, bias=False), torch.eye(3)
    found = sl.spectrum(model, (x, torch.zeros(3, 2)), "mse")  # one eigenvalue, six times
    assert str(found).count("0.33333") == 2 * 5  # at each end
    assert "The 6 eigenvalues of the hessian lie between 0.3333 and 0.3333" in spectrum_page(found)
    open_end = replace(found, top=(replace(found.top[0], converged=False),))
    assert "The 6 eigenvalues of the hessian reach from 0.3333 to 0.3333 at least" in spectrum_page(open_end)
    assert "The one eigenvalue of the hessian is 0.3333" in spectrum_page(replace(found, size=1))


@pytest.mark.parametrize("steps", [60, 2], ids=["written down", "probed"])
def test_a_curvature_that_is_not_finite_is_refused(steps):
    class Bent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

        def forward(self, x):
            return self.last(self.first(x).abs() ** 1.5)  # no second derivative at zero

    x = torch.cat([torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 4)]).double()
    with pytest.raises(FloatingPointError, match="a curvature product contains NaN or infinity"):
        sl.spectrum(Bent().double(), (x, torch.zeros(7, dtype=torch.long)), steps=steps, probes=2)


def test_every_copy_of_an_eigenvalue_is_found(by_probes):
    """H of a linear map under squared error has every eigenvalue once for each output."""
    torch.manual_seed(0)
    model = nn.Linear(30, 10, bias=False).double()
    x, y = torch.randn(200, 30).double() * torch.linspace(1, 3, 30).double(), torch.randn(200, 10).double()
    single = torch.linalg.eigvalsh(2 * x.T @ x / 200 / 10)
    found = sl.spectrum(model, (x, y), "mse")
    assert [each.value for each in found.top] == pytest.approx([float(single[-1])] * 5, rel=1e-5)
    assert [each.value for each in found.bottom] == pytest.approx([float(single[0])] * 5, rel=1e-5)
    assert all(each.converged for each in (*found.top, *found.bottom))


@pytest.mark.parametrize("width", [5, 40], ids=["written down", "searched"])
def test_zeros_of_a_block_that_lacks_rank_are_found(by_probes, width):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3)).double()
    data = torch.randn(3, 4).double(), torch.tensor([0, 1, 2])
    found = sl.spectrum(model, data, operator="0.weight")
    assert [each.value for each in found.bottom] == pytest.approx([0.0] * 5, abs=1e-9 * found.top[0].value)


@pytest.mark.parametrize("size", [0.3, 1e-6, 1e6])
def test_moments_keep_the_digits_and_the_range_of_double_precision(by_probes, size):
    data = torch.full((2, 1), size, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    found = sl.spectrum(nn.Linear(1, 1, bias=False).double(), data, "mse")
    for order in (1, 4):
        mean, error = found.moment(order)
        assert mean == pytest.approx((2 * size**2) ** order, rel=1e-12)
        assert error <= 1e-12 * mean
