"""Lanczos and the power method on matrices whose spectra are known."""

import pytest
import torch

from spiritlevel.curvature import lanczos
from spiritlevel.curvature.lanczos import Lanczos, eigenpair
from spiritlevel.curvature.power import power_method


def matrix(eigenvalues, seed=0):
    """A symmetric matrix with these eigenvalues in random directions."""
    values = torch.as_tensor(eigenvalues, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))
    return Q @ torch.diag(values) @ Q.T


def start(size, seed=1, dtype=torch.float64):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


SPECTRA = {
    "spread": torch.linspace(0, 10, 60),
    "clustered at the top": torch.cat([torch.linspace(0, 1, 50), 10 + torch.linspace(0, 1e-5, 10)]),
    "double top": torch.cat([torch.linspace(0, 1, 50), torch.tensor([10.0, 10.0])]),
    "negative dominant": torch.cat([torch.linspace(-1, 3, 50), torch.tensor([-20.0])]),
    "all negative": -torch.linspace(1, 10, 40),
    "geometric": 0.5 ** torch.arange(40.0),
    "rank one": torch.cat([torch.zeros(50), torch.tensor([3.0])]),
    "tiny tail": torch.cat([1e-12 * torch.rand(50, generator=torch.Generator().manual_seed(0)), torch.tensor([1.0])]),
    "ends of nearly the same size": torch.cat([torch.linspace(-1, 1, 50), torch.tensor([5.0, -5.001])]),
}
WANTED = {"largest": lambda v: v.max(), "smallest": lambda v: v.min(), "magnitude": lambda v: v[v.abs().argmax()]}


@pytest.mark.parametrize("end", WANTED)
@pytest.mark.parametrize("name", [name for name in SPECTRA if "clustered" not in name])
def test_the_extreme_eigenvalue_is_found_to_the_tolerance(name, end):
    values = SPECTRA[name].double()
    A = matrix(values)
    found = eigenpair(lambda v: A @ v, start(len(values)), tolerance=1e-10, end=end)
    wanted = float(WANTED[end](values))
    scale = float(values.abs().max())
    assert found.value == pytest.approx(wanted, rel=1e-9, abs=1e-13 * scale)
    assert float(found.vector.norm()) == pytest.approx(1, rel=1e-12)
    assert float((A @ found.vector - found.value * found.vector).norm()) <= found.residual + 1e-11 * scale
    if abs(wanted) > 1e-9 * scale:
        assert found.converged
        assert found.error <= 1e-10 * abs(wanted) + 1e-14 * scale


@pytest.mark.parametrize("tolerance", [0.1, 1e-2, 1e-4])
@pytest.mark.parametrize("name", ["spread", "clustered at the top", "geometric", "negative dominant"])
def test_an_eigenvalue_lies_within_residual_and_error_whatever_the_start(name, tolerance):
    values = SPECTRA[name].double()
    A = matrix(values)
    for seed in range(2, 102):
        found = eigenpair(lambda v: A @ v, start(len(values), seed), tolerance=tolerance)
        away = float((values - found.value).abs().min())
        assert away <= found.residual + 1e-13 * float(values.abs().max()), seed
        assert away <= found.error * (1 + 1e-9), seed
        assert found.converged
        assert found.value <= float(values.max()) * (1 + 1e-12)


@pytest.mark.parametrize("tolerance", [0.1, 1e-2, 1e-4])
def test_the_largest_of_separated_eigenvalues_is_within_the_tolerance(tolerance):
    """A bulk with outliers, as networks have it."""
    values = torch.cat([torch.linspace(-0.1, 0.5, 190), torch.tensor([1.0, 1.5, 2.5, 4.0, 10.0])]).double()
    A = matrix(values)
    for seed in range(2, 102):
        found = eigenpair(lambda v: A @ v, start(len(values), seed), tolerance=tolerance)
        assert -1e-13 <= 10 - found.value <= tolerance * 10 + 1e-12, seed


def test_the_error_bound_holds_over_random_spectra():
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        size = int(torch.randint(1, 40, (), generator=generator))
        values = torch.randn(size, generator=generator, dtype=torch.float64) ** 3
        A = matrix(values, seed)
        found = eigenpair(lambda v, A=A: A @ v, start(size, seed + 1000), tolerance=1e-3, end="magnitude")
        assert float((values - found.value).abs().min()) <= found.error + 1e-13
        assert abs(abs(found.value) - float(values.abs().max())) <= 2e-3 * abs(found.value)


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e6, 1e12])
def test_a_scaled_matrix_takes_the_same_steps(scale):
    A = matrix(SPECTRA["spread"])
    plain = eigenpair(lambda v: A @ v, start(60), tolerance=1e-6)
    scaled = eigenpair(lambda v: scale * (A @ v), start(60), tolerance=1e-6)
    assert scaled.products == plain.products
    assert scaled.value == pytest.approx(scale * plain.value, rel=1e-12)
    assert scaled.error == pytest.approx(scale * plain.error, rel=1e-3)
    assert scaled.converged == plain.converged


def test_the_zero_matrix_has_the_eigenvalue_zero():
    found = eigenpair(torch.zeros_like, start(7))
    assert (found.value, found.error, found.converged) == (0.0, 0.0, True)


def test_one_dimension_and_two():
    assert eigenpair(lambda v: -3 * v, start(1)).value == pytest.approx(-3, rel=1e-14)
    A = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    found = eigenpair(lambda v: A @ v, start(2), tolerance=1e-12)
    assert (found.value, found.products) == (pytest.approx(3, rel=1e-14), 2)


def test_no_direction_at_all():
    for vector in (torch.zeros(5), torch.zeros(0)):
        found = eigenpair(lambda v: v, vector)
        assert (found.value, found.products, found.converged) == (0.0, 0, True)


def test_a_start_that_is_an_eigenvector():
    A = torch.diag(torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64))
    found = eigenpair(lambda v: A @ v, torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64))
    assert (found.value, found.products) == (5.0, 1)


@pytest.mark.parametrize("most", [6, 8, 20])
@pytest.mark.parametrize("name", ["spread", "double top", "negative dominant"])
def test_restarts_with_few_vectors_reach_the_same_value(name, most, monkeypatch):
    monkeypatch.setattr(lanczos, "PART", 7)
    values = SPECTRA[name].double()
    A = matrix(values)
    process = Lanczos(start(len(values)), tolerance=1e-8, end="magnitude", most_products=3000, most_vectors=most)
    while not process.done:
        process.advance(A @ process.request)
        assert process._basis.shape[0] <= most
    assert process.result.converged
    assert process.result.value == pytest.approx(float(WANTED["magnitude"](values)), rel=1e-7)


def test_giving_up_says_so():
    A = matrix(torch.linspace(0, 1, 300))
    found = eigenpair(lambda v: A @ v, start(300), tolerance=1e-12, most_products=8)
    assert not found.converged
    assert found.products == 8
    assert found.error > 1e-12
    assert abs(found.value - 1) <= found.error * 50


def test_single_precision_does_not_claim_double():
    A = matrix(SPECTRA["spread"]).float()
    found = eigenpair(lambda v: A @ v, start(60, dtype=torch.float32), tolerance=1e-10)
    assert found.value == pytest.approx(10, rel=1e-5)
    assert found.error >= 1e-7
    assert not found.converged


def test_products_that_are_not_finite_are_refused():
    with pytest.raises(FloatingPointError, match=r"^a curvature product contains NaN or infinity$"):
        eigenpair(lambda v: v / 0, start(4))


# --- the power method ---------------------------------------------------------------------------------------------


def test_the_power_method_keeps_its_history():
    A = matrix(torch.tensor([1.0, 2.0, 4.0]))
    found = power_method(lambda v: A @ v, start(3), tolerance=1e-8)
    assert found.pair.converged
    assert found.pair.value == pytest.approx(4, rel=1e-10)
    assert len(found.values) == len(found.changes) == found.pair.products
    assert found.values[-1] == found.pair.value
    assert found.changes[-1] <= 1e-8 < found.changes[-2]
    assert all(later >= earlier - 1e-12 for earlier, later in zip(found.values, found.values[1:], strict=False))


def test_the_power_method_never_settles_on_a_negative_eigenvalue():
    A = matrix(torch.tensor([1.0, 2.0, -4.0]))
    found = power_method(lambda v: A @ v, start(3), tolerance=1e-3, most_products=200)
    assert not found.pair.converged
    assert found.pair.products == 200
    assert found.changes[-1] == pytest.approx(2, rel=1e-6)
    assert found.pair.value == pytest.approx(-4, rel=1e-6)
    assert eigenpair(lambda v: A @ v, start(3), tolerance=1e-8).value == pytest.approx(2, rel=1e-7)


def test_the_power_method_on_nothing():
    assert power_method(torch.zeros_like, start(3), tolerance=1e-3).pair.value == 0.0
    assert power_method(torch.zeros_like, torch.zeros(3), tolerance=1e-3).pair.converged
