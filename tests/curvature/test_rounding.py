"""What rounding may have changed is in the error, in double precision too."""

import pytest
import torch
from torch import nn

import spiritlevel as sl
from fuzz.found import FOUND
from fuzz.subjects import build
from spiritlevel.curvature import rounding
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.problem import Problem
from spiritlevel.problem.shards import Shards
from spiritlevel.problem.survey import Heavy


def test_terms_that_cancel_in_double_precision_are_seen():
    """In single precision the same overflows, which says nothing of double precision."""
    built = build(FOUND["terms that cancel in double precision"])
    value = sl.measure(built.model, built.data, built.loss, **built.arguments)["kappa_sum"]
    assert value.error > 1e-3 * value.value


def test_digits_that_are_known_are_kept():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.LayerNorm(3), nn.Linear(3, 3)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    value = sl.measure(model, (x, torch.arange(6) % 3), "cross_entropy", measures=["kappa_sum"])["kappa_sum"]
    assert value.error < 1e-11 * value.value


def test_processes_take_as_many_shifts_whichever_of_them_lacks_digits(monkeypatch):
    """Each sees its part of the arrays only; another number of shifts in one of them would leave the others waiting."""

    class Asked(Shards):
        def any(self, found: bool) -> bool:
            return True  # another process has few digits, this one has not

    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    problem = Problem(model, "mse", (torch.randn(6, 4).double(), torch.randn(6, 3).double()))

    def compute(batch):
        return {"diagonal": {"weight": batch.inputs.double().square().sum(0)}}

    alone = rounding.array_shifts(problem, compute)
    monkeypatch.setattr(rounding, "division_of", lambda problem: Asked())
    assert len(rounding.array_shifts(problem, compute)) == 2 * len(alone) > 0


def test_rounding_that_came_out_small_by_chance_is_drawn_again(own_precision):
    """What single precision differs by is one draw: here a thousandth where parameters are moved, and by chance far less where not."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    problem = Problem(model, "mse", (torch.randn(6, 4), torch.randn(6, 3)))
    own = problem.parameters["weight"].clone()
    digits = {True: 1 + 5e-5, False: 1 + 1e-3}

    def compute(batch):
        now = problem.parameters["weight"]
        return [1.0 if now.dtype == torch.float64 else digits[torch.equal(now, own)]]

    [error] = rounding.rounding_errors(problem, compute)
    assert 3e-3 < error < 5e-3
    digits[True] = 1 + 1e-6  # as many digits as single precision has: one draw will do
    assert rounding.rounding_errors(problem, compute)[0] < 1e-5


def test_digits_that_outputs_lack_are_seen_whatever_one_draw_says(own_precision):
    """Weights of 10³ leave outputs known to 10⁻⁴ in single precision, and so is 1 − p, which one sample decides in most of these; computed
    once more for itself, it came out right by chance in several (27 times the error)."""
    names, outside = ["hessian_spectral_norm", "hessian_trace"], []
    for seed in (11, 14, 27, 36, 45, 68, 100, 104, 113):
        torch.manual_seed(seed)
        model, x = nn.Linear(10, 3), torch.randn(400, 10)
        with torch.no_grad():
            model.weight.mul_(4000)
        y = model(x).argmax(1)
        single = sl.measure(model, (x, y), measures=names)
        double = sl.measure(model.double(), (x.double(), y), measures=names, tolerance=1e-8)
        for name in names:
            assert single[name].error > 5e-5 * single[name].value
            off = abs(single[name].value - double[name].value)
            outside += [(seed, name, off / single[name].error)] * (off > single[name].error)
    assert outside == []


def test_outputs_have_their_digits_in_an_ordinary_network_and_under_a_loss_that_is_quadratic(own_precision):
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    labels = torch.arange(6) % 3
    assert not rounding._outputs_lack_digits(Problem(model, "cross_entropy", (x, labels)))
    assert not rounding._outputs_lack_digits(Problem(model, "mse", (1e4 * x, 1e4 * torch.randn(6, 3))))
    many = 4e3 * torch.randn(400, 4)
    assert rounding._outputs_lack_digits(Problem(model, "cross_entropy", (many, model(many).argmax(1))))


def test_of_a_large_network_the_samples_that_hold_most_of_the_mass_stand_for_all(own_precision):
    """A number that goes with the mass has the same error however few of the heaviest samples are computed twice."""
    torch.manual_seed(0)
    model, x = nn.Linear(1000, 10), torch.randn(2000, 1000)
    with torch.no_grad():
        y = model(x) + 1e-3 * torch.randn(2000, 10)
        y[:20] += 1  # nearly all mass is here
    problem = Problem(model, "mse", (x, y))
    assert not problem.small
    heavy = problem.survey.heavy
    masses = {float(row[0]): float(mass) for row, mass in zip(heavy.batch.inputs, heavy.masses, strict=True)}
    seen: list[int] = []

    def compute(batch):
        seen.append(len(batch))
        exact = sum(masses[float(row[0].float())] for row in batch.inputs) / len(batch)
        return [exact if batch.inputs.dtype == torch.float64 else (1 + 1e-6) * exact]

    [error] = rounding.rounding_errors(problem, compute)
    assert sum(seen) == 2 * 17 < 2 * len(heavy.masses)
    assert error == pytest.approx(rounding.MARGIN * 1e-6 * heavy.total / problem.samples, rel=1e-4)


def test_no_fewer_samples_are_compared_than_hold_their_share_of_the_mass():
    masses = torch.tensor([4.0, 2.0, 1.0, 1.0])
    heavy = Heavy(Batch(torch.arange(4.0), torch.arange(4)), masses, 10.0)
    asked = ((0.3, 1), (0.6, 1), (0.65, 1), (0.3, 3))
    assert [len(heavy.holding(share, fewest).masses) for share, fewest in asked] == [1, 2, 3, 3]
    assert heavy.holding(0.9, 1) is heavy  # they do not hold so much
    assert heavy.holding(0.6, 1).scale == 10 / 6
