"""Eigenvalues of small networks from their whole Hessian, against an oracle and against what searches find."""

import functools

import pytest
import torch
from torch import Tensor, nn

import spiritlevel as sl
from dense_oracle import dense
from spiritlevel.curvature import krylov
from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.curvature.whole import Columns, eigenpair_of, is_worth, scaled_eigenpair, whole_hessian
from spiritlevel.problem.problem import Problem

OPERATORS = {
    "hessian_spectral_norm": lambda flat, _: torch.ones_like(flat),
    "riemannian_spectral_norm": lambda _, norms: norms,
    "riemannian_nodewise_spectral_norm": lambda flat, _: flat.abs(),
}


def network(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4)).to(dtype)
    return model, (torch.randn(30, 5, dtype=dtype), torch.arange(30) % 4)


def test_all_operators_are_read_off_one_matrix() -> None:
    model, (x, y) = network()
    report = sl.measure(model, (x, y), measures=list(OPERATORS), tolerance=1e-9)
    hessian = dense(model, nn.functional.cross_entropy, x, y)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    norms = torch.cat([p.detach().norm().expand(p.numel()) for p in model.parameters()])
    for name, scale in OPERATORS.items():
        value, diagonal = report[name], scale(flat, norms)
        expected = float(torch.linalg.eigvalsh(diagonal[:, None] * hessian * diagonal)[-1])
        assert value.value == pytest.approx(expected, rel=1e-12)
        assert abs(value.value - expected) <= value.error <= 1e-10 * expected
        assert value.converged
        assert value.method == "whole Hessian, products by kept graph"
        assert value.products == len(flat)
        direction = torch.cat([value.witness[key].reshape(-1) for key, _ in model.named_parameters()])
        inside = direction / torch.where(diagonal > 0, diagonal, 1)
        assert float(direction @ hessian @ direction / inside.square().sum()) == pytest.approx(expected, rel=1e-9)
    assert report.cost.products <= len(flat) + 4  # and the preflight


def test_blocks_are_written_down_as_well() -> None:
    model, (x, y) = network()
    value = sl.measure(model, (x, y), measures=["kappa_sum"], tolerance=1e-9)["kappa_sum"]
    hessian = dense(model, nn.functional.cross_entropy, x, y)
    first, second = slice(0, 30), slice(36, 60)
    for name, part in (("0.weight", first), ("2.weight", second)):
        weight = dict(model.named_parameters())[name].detach()
        expected = float(weight.square().sum() * torch.linalg.eigvalsh(hessian[part, part])[-1])
        assert value.layers[name] == pytest.approx(expected, rel=1e-12)
    assert value.method.startswith("whole block of every layer")


def test_searches_find_the_same(request: pytest.FixtureRequest) -> None:
    (model, data), names = network(), [*OPERATORS, "kappa_sum"]
    whole = sl.measure(model, data, measures=names, tolerance=1e-8)
    request.getfixturevalue("by_searches")
    searched = sl.measure(model, data, measures=names, tolerance=1e-8)
    for name in names:
        assert "Lanczos" in searched[name].method
        assert whole[name].value == pytest.approx(searched[name].value, abs=whole[name].error + searched[name].error)


@pytest.mark.parametrize("power", [40, -40, 70])
def test_rescaling_does_not_leave_the_range_of_single_precision(power: int) -> None:
    """Entries of H down to 2⁻¹⁴⁰ and up to 2¹⁴⁰, of which single precision has neither, for the same entries of D H D."""
    model, data = network(torch.float32)
    nn.init.zeros_(model[2].bias)
    arguments = {"measures": ["riemannian_spectral_norm"], "dtype": torch.float32}
    expected = sl.measure(model, data, **arguments)["riemannian_spectral_norm"]
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.mul_(2.0**power)
        model[2].weight.mul_(2.0**-power)
    value = sl.measure(model, data, **arguments)["riemannian_spectral_norm"]
    assert value.method.startswith("whole Hessian")
    assert value.value == pytest.approx(expected.value, rel=1e-6)
    assert value.error < 1e-4 * value.value


def test_only_directions_that_are_scaled_count() -> None:
    """A negative eigenvalue of what is kept is the largest there, though the rest of S H S is zero."""
    hessian, scale = torch.diag(torch.tensor([-1.0, -2.0, 5.0]).double()), torch.tensor([1.0, 2.0, 0.0]).double()
    pair = scaled_eigenpair(hessian, scale, "largest", 1e-6, 3)
    assert pair.value == -1
    assert pair.vector.abs().tolist() == [1, 0, 0]
    assert pair.others.abs().tolist() == [[0, 1, 0]]
    nothing = scaled_eigenpair(hessian, torch.zeros(3).double(), "largest", 1e-6, 3)
    assert (nothing.value, nothing.error, nothing.converged, nothing.products) == (0, 0, True, 0)


@pytest.mark.parametrize(("end", "expected"), [("largest", 2.0), ("smallest", -5.0), ("magnitude", -5.0)])
def test_either_end(end, expected: float) -> None:
    matrix = torch.diag(torch.tensor([1.0, 2.0, -5.0]).double())
    process = Columns(torch.ones(3).double(), end=end, tolerance=1e-3)
    while not process.done:
        process.advance(matrix @ process.request)
    assert process.result is not None
    assert process.result.value == expected
    assert process.result.products == 3


def test_what_is_not_symmetric_is_in_the_error() -> None:
    matrix = torch.tensor([[1.0, 0.3], [-0.3, 1.0]]).double()
    pair = eigenpair_of(matrix, torch.ones(2).double(), "largest", 1e-3)
    assert pair.error == pytest.approx(0.3, rel=1e-6)
    assert not pair.converged


def test_a_matrix_that_overflows_leaves_it_to_a_search(monkeypatch) -> None:
    model, data = network()
    products = HessianProducts(Problem(model, "cross_entropy", data))
    start = torch.ones(products.flat.size).double()
    from_whole = functools.partial(krylov._from_whole, products, [(lambda: start, "largest")], start, 1e-3)
    assert len(from_whole()) == 1
    monkeypatch.setattr(HessianProducts, "__call__", lambda _, vectors: [vector / 0 for vector in vectors])
    assert whole_hessian(products) is None
    assert from_whole() == []


def test_it_is_worth_it_for_few_parameters_only() -> None:
    assert is_worth(100, 1)
    assert is_worth(300, 3)
    assert not is_worth(301, 3)
    assert not is_worth(0, 3)
