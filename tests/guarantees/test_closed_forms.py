"""The examples of the papers, with their numbers corrected."""

import math

import pytest
import torch
from torch import Tensor, nn

import spiritlevel as sl


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_kappa_of_linear_regression_is_the_ridge_penalty() -> None:
    """petzka2019, section 2: κ = c‖w‖² with c = 2 λ_max((1/N) Σ xxᵀ), whatever w is."""
    x = torch.randn(30, 4, generator=generator(), dtype=torch.float64)
    y = torch.randn(30, 1, generator=generator(), dtype=torch.float64)
    c = 2 * float(torch.linalg.eigvalsh(x.T @ x / 30)[-1])
    for size in (1e-3, 1.0, 50.0):
        model = nn.Linear(4, 1, bias=False).double()
        with torch.no_grad():
            model.weight.mul_(size)
        report = sl.measure(model, (x, y), "mse", measures=["kappa_sum"], tolerance=1e-8)
        assert report["kappa_sum"].value == pytest.approx(c * float(model.weight.detach().square().sum()), rel=1e-7)


class Running(nn.Module):
    """(31): W² ReLU(W¹ x)."""

    def __init__(self, first: list[list[float]], second: list[list[float]]) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor(first, dtype=torch.float64))
        self.second = nn.Parameter(torch.tensor(second, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.relu(nn.functional.linear(x, self.first)), self.second)


def norms(weight: Tensor) -> tuple[float, float]:
    weight = weight.detach()
    return float(weight.norm()), float(torch.linalg.matrix_norm(weight, 2))


def test_the_running_example_of_row_and_column_scaling() -> None:
    """tsuzuku2019, A.1: all four norms blow up, the function and normalized sharpness do not move."""
    before = Running([[1, 2], [3, 4]], [[5, 6], [7, 8]])
    after = Running([[0.1, 0.2], [30, 40]], [[50, 0.6], [70, 0.8]])
    assert norms(before.first) == pytest.approx((math.sqrt(30), 5.465), abs=5e-4)
    assert norms(before.second) == pytest.approx((math.sqrt(174), 13.19), abs=5e-3)
    assert norms(after.first) == pytest.approx((math.sqrt(2500.05), 50.00), abs=5e-3)
    assert norms(after.second) == pytest.approx((math.sqrt(7401), 86.029), abs=5e-4)
    x = torch.randn(20, 2, generator=generator(), dtype=torch.float64)
    y = torch.arange(20) % 2
    assert torch.allclose(before(x), after(x), rtol=1e-14)
    names = ["normalized_sharpness", "matrix_normalized_sharpness", "hessian_trace"]
    first, second = (sl.measure(model, (x, y), measures=names) for model in (before, after))
    assert second["normalized_sharpness"].value == pytest.approx(first["normalized_sharpness"].value, rel=1e-10)
    assert second["matrix_normalized_sharpness"].value > 1.5 * first["matrix_normalized_sharpness"].value
    assert second["hessian_trace"].value > 1.5 * first["hessian_trace"].value


class Branches(nn.Module):
    """(26): ReLU(W¹ x) + ReLU(W² x)."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(first.clone()), nn.Parameter(second.clone())

    def forward(self, x: Tensor) -> Tensor:
        linear = nn.functional.linear
        return torch.relu(linear(x, self.first)) + torch.relu(linear(x, self.second))


def test_two_branches_merged_into_one_double_the_fisher_rao_norm_and_keep_normalized_sharpness() -> None:
    """tsuzuku2019 (26)–(30), from (W/2, W/2) to (W, 0); positive data keep every unit active."""
    x = torch.rand(15, 3, generator=generator(), dtype=torch.float64) + 0.1
    w = torch.rand(4, 3, generator=generator(), dtype=torch.float64) + 0.1
    y = torch.rand(15, 4, generator=generator(), dtype=torch.float64)
    names = ["fisher_rao_norm", "normalized_sharpness", "matrix_normalized_sharpness"]
    split, merged = Branches(w / 2, w / 2), Branches(w, torch.zeros_like(w))
    assert torch.allclose(split(x), merged(x))
    before, after = (sl.measure(model, (x, y), "mse", measures=names) for model in (split, merged))
    assert after["fisher_rao_norm"].value == pytest.approx(2 * before["fisher_rao_norm"].value, rel=1e-10)
    for name in names[1:]:
        assert after[name].value == pytest.approx(before[name].value, rel=1e-10)
        assert before[name].value > 0
