"""Networks with hundreds of outputs: all columns of ∇²ℓ where they are cheap, else a few drawn, with a standard error."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spiritlevel as sl
from dense_oracle import dense
from spiritlevel.curvature import statistics
from spiritlevel.curvature.examine import examine

CLASSES = 240
NAMES = ["hessian_trace", "kappa_trace_sum", "rho_sum", "rho_row_sum", "normalized_sharpness"]


def wide() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, CLASSES)).double()
    with torch.no_grad():
        model[2].weight *= 3  # some outputs are much likelier than others
    return model, (torch.randn(12, 5, dtype=torch.float64), torch.randint(0, CLASSES, (12,)))


def test_cheap_columns_are_all_taken() -> None:
    model, (x, y) = wide()
    report = sl.measure(model, (x, y), measures=NAMES)
    assert all(value.exact and value.method == "exact sweep" for value in report.values.values())
    hessian = dense(model, F.cross_entropy, x, y)
    assert report["hessian_trace"].value == pytest.approx(float(hessian.trace()), rel=1e-9)


@pytest.mark.long
def test_dear_columns_are_drawn_and_the_report_says_so(monkeypatch) -> None:
    model, data = wide()
    exact = sl.measure(model, data, measures=NAMES)
    monkeypatch.setattr(statistics, "CHEAP", 0)
    off: dict[str, list[float]] = {name: [] for name in NAMES}
    for seed in range(20):
        drawn = sl.measure(model, data, measures=NAMES, seed=seed, tolerance=1e-4)
        for name in NAMES:
            value = drawn[name]
            assert value.method == f"sampled output columns (16 draws of {CLASSES - 1})"
            assert not value.exact
            assert not value.converged
            assert value.error > 0
            off[name].append(abs(value.value - exact[name].value) / value.error)
    for name, ratios in off.items():
        ratios.sort()
        assert ratios[-1] < 4.5, name  # standard errors that are neither too small
        assert ratios[10] > 0.1, name  # nor far too large


def test_the_choice_is_made_by_counted_cost() -> None:
    model, (x, y) = wide()
    problem = sl.Problem(model, "cross_entropy", (x, y))
    anatomy = examine(problem)
    assert anatomy.work == 5 * 4 + 4 * CLASSES
    dear = statistics.CHEAP // (len(x) * anatomy.work) + 1
    assert [statistics.samples_columns(problem, anatomy, count) for count in (dear - 1, dear)] == [False, True]
    convolution = nn.Sequential(nn.Conv2d(2, 6, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 4, 3))
    problem = sl.Problem(convolution, "cross_entropy", (torch.randn(4, 2, 4, 4), torch.zeros(4, dtype=torch.long)))
    assert examine(problem).work == 6 * 4 * 9 + 24 * 3


def test_few_columns_are_all_taken_at_any_cost(monkeypatch) -> None:
    monkeypatch.setattr(statistics, "CHEAP", 0)
    torch.manual_seed(0)
    model = nn.Linear(3, statistics.MOST_COLUMNS)
    data = (torch.randn(5, 3), torch.randint(0, 9, (5,)))
    assert sl.measure(model, data, measures=["hessian_trace"])["hessian_trace"].exact
