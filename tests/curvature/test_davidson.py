"""Davidson's method against dense matrices: a known operator, and one that differs from it by a few percent."""

import pytest
import torch

from spiritlevel.curvature.davidson import MOST_PRODUCTS, Davidson, known_from
from spiritlevel.curvature.in_step import in_step
from spiritlevel.curvature.lanczos import Care, Lanczos

SIZE = 120


def symmetric(values, seed):
    """A matrix with these leading eigenvalues, in directions that the seed says."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64))[0]
    spectrum = torch.cat(
        [torch.tensor(values, dtype=torch.float64), torch.linspace(0.3, 0, SIZE - len(values)).double()]
    )
    return turn @ torch.diag(spectrum) @ turn.T


def searched(matrix, *, tolerance=1e-4, end="largest", seed=0):
    start = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    search = Lanczos(start, tolerance=tolerance, end=end)
    return driven(search, matrix), start


def driven(process, matrix):
    while not process.done:
        process.advance(matrix @ process.request)
    return process


def corrected(part, whole, *, tolerance=1e-4, end="largest"):
    """The eigenpair of `whole`, from a search on `part`."""
    search, start = searched(part, tolerance=tolerance, end=end)
    otherwise = lambda: Lanczos(start, tolerance=tolerance, end=end)  # noqa: E731
    process = Davidson(known_from(search), otherwise, tolerance=tolerance, end=end, care=Care(fewest=2))
    return driven(process, whole).result


def top(matrix):
    return float(torch.linalg.eigvalsh(matrix)[-1])


def semidefinite(strength, seed):
    """What is added to the known operator: as light samples do, in all directions, with this largest eigenvalue."""
    return symmetric([strength, 0.8 * strength, 0.5 * strength], seed) * (strength / max(strength, 0.3))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("gap", [0.3, 0.1, 0.04, 0.01])
def test_the_largest_eigenvalue_is_within_its_error(seed, gap):
    part = symmetric([1.0, 1 - gap, 0.8 * (1 - gap), 0.5], seed)
    whole = part + semidefinite(0.05, 100 + seed)
    found = corrected(part, whole)
    assert found.converged
    assert abs(found.value - top(whole)) <= found.error <= 1e-4 * found.value
    assert float((whole @ found.vector - found.value * found.vector).norm()) == pytest.approx(found.residual, abs=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_two_to_four_products_do_where_the_gap_is_clear(seed):
    part = symmetric([1.0, 0.8, 0.6, 0.5], seed)
    assert corrected(part, part + semidefinite(0.05, 100 + seed)).products <= 4


@pytest.mark.parametrize("seed", range(8))
def test_an_order_that_the_rest_changes_is_noticed(seed):
    """The second eigenvector of the part is the first of the whole."""
    part = symmetric([1.0, 0.98, 0.6], seed)
    second = torch.linalg.eigh(part).eigenvectors[:, -2]
    whole = part + 0.05 * torch.outer(second, second)
    found = corrected(part, whole)
    assert abs(found.value - top(whole)) <= found.error
    assert found.value > 1.02


def test_what_does_not_converge_goes_on_as_a_search_of_its_own():
    """The part says nothing of the whole."""
    part, whole = symmetric([1.0, 0.5], 0), symmetric([2.0, 1.9, 1.8, 1.7, 1.6], 1)
    found = corrected(part, whole)
    assert found.products > MOST_PRODUCTS
    assert abs(found.value - top(whole)) <= found.error <= 1e-4 * found.value


@pytest.mark.parametrize(("near", "started"), [(0.99, 2), (0.5, 1)])
def test_vectors_that_it_starts_from_are_asked_for_at_once(near, started):
    """So that one pass over all data serves them; the answer is the same as one by one."""
    part = symmetric([1.0, near, 0.3], 7)
    whole = part + semidefinite(0.05, 8)
    process = Davidson(known_from(searched(part)[0]), None, tolerance=1e-4, end="largest", care=Care(fewest=2))
    asked = []

    def passed(vectors):
        asked.append(len(vectors["one"]))
        return {"one": [whole @ vector for vector in vectors["one"]]}

    in_step({"one": process}, passed)
    assert asked[0] == started
    assert set(asked[1:]) == {1}
    assert process.result.value == corrected(part, whole).value


def test_the_largest_magnitude_may_be_negative():
    part = -symmetric([1.0, 0.7, 0.5], 3)
    whole = part - semidefinite(0.05, 4)
    found = corrected(part, whole, end="magnitude")
    assert found.value == pytest.approx(float(torch.linalg.eigvalsh(whole)[0]), rel=1e-4)
    assert found.converged


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_nothing_in_it_is_absolute(scale):
    part = symmetric([1.0, 0.8], 5)
    whole = part + semidefinite(0.05, 6)
    found, scaled = corrected(part, whole), corrected(scale * part, scale * whole)
    assert scaled.value == pytest.approx(scale * found.value, rel=1e-12)
    assert scaled.products == found.products


def test_a_product_that_is_not_finite_is_refused():
    search, start = searched(symmetric([1.0, 0.5], 0))
    process = Davidson(
        known_from(search), lambda: Lanczos(start, tolerance=1e-4), tolerance=1e-4, end="largest", care=Care(fewest=2)
    )
    with pytest.raises(FloatingPointError, match="a curvature product contains NaN or infinity"):
        process.advance(torch.full((SIZE,), float("nan"), dtype=torch.float64))
