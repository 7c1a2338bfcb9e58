"""The bias that noise gives a reading is taken off, and what remains of it is in the bar."""

import math

import pytest
import torch
from scipy import stats

from spiritlevel.curvature.statistics import GROUPS
from spiritlevel.measuring import extrapolation as ex

SEEDS = 60
ENTRIES = 200


def readings(truth, noise, read, seed):
    """What `read` says of every subset of groups, whose means have `noise` where all groups are taken together."""
    generator = torch.Generator().manual_seed(seed)
    shape = (GROUPS, *truth.shape)
    groups = truth + noise * math.sqrt(GROUPS) * torch.randn(shape, generator=generator, dtype=torch.float64)
    return [read(groups[list(subset)].mean(0)) for subset in ex.SUBSETS]


def clipped(h):
    return float(h.clamp(min=0).sum())


def largest(h):
    return float(h.max())


ZERO = torch.zeros(ENTRIES, dtype=torch.float64)
SPREAD = torch.linspace(-3, 6, ENTRIES, dtype=torch.float64)
CASES = {
    "all noise, clipped": (ZERO, clipped),
    "around the kink, clipped": (SPREAD, clipped),
    "mostly noise, clipped": (torch.cat([ZERO, SPREAD]), clipped),
    "the largest of many alike": (ZERO[:8], largest),
    "the largest of many spread": (SPREAD, largest),
    "a clear winner": (torch.tensor([1.0, 2.0, 30.0], dtype=torch.float64), largest),
}


@pytest.mark.parametrize("name", CASES)
def test_neither_high_nor_low_and_within_two_bars(name):
    truth, read = CASES[name]
    wanted = read(truth)
    found = [ex.extrapolated(readings(truth, 1.0, read, seed)) for seed in range(SEEDS)]
    z = torch.tensor([(each.value - wanted) / each.error for each in found])
    assert abs(float(z.mean())) < 0.7
    assert float((z.abs() <= 2).double().mean()) >= 0.9


@pytest.mark.parametrize("name", ["all noise, clipped", "mostly noise, clipped", "the largest of many alike"])
def test_before_they_were_far_off(name):
    truth, read = CASES[name]
    wanted = read(truth)
    plain = [ex._straight(readings(truth, 1.0, read, seed)[: 1 + GROUPS]) for seed in range(SEEDS)]
    z = torch.tensor([(each.value - wanted) / each.error for each in plain])
    assert float(z.mean()) > 1


@pytest.mark.parametrize("curvature", [0.0, 1.0, 20.0, 400.0])
def test_roots_of_noisy_squares(curvature):
    """Σ_l √q_l over layers of clipped entries: nothing but noise, about as much as noise, and far more."""
    truth = torch.zeros(6, 40, dtype=torch.float64)
    truth[:, :2] = curvature
    noisy = [str(layer) for layer in range(6)]

    def read(h):
        return h.clamp(min=0).sum(1).sqrt()

    wanted, z, bars, values = float(read(truth).sum()), [], [], []
    for seed in range(SEEDS):
        roots = readings(truth, 1.0, read, seed)
        numbers = [(float(each.sum()), dict(zip(noisy, each.tolist(), strict=True))) for each in roots]
        found = ex.estimated("sum of roots", numbers, noisy)
        z.append((found.value - wanted) / found.error)
        bars.append(found.error)
        values.append(found.value)
    off = torch.tensor(values) - wanted
    assert abs(float(torch.tensor(z).mean())) < 0.6
    assert float((torch.tensor(z).abs() <= 2).double().mean()) >= 0.9
    assert float(torch.tensor(bars).median()) < 3 * float(off.square().mean().sqrt())  # a bar, not an excuse


def test_what_is_linear_is_left_alone():
    truth = torch.arange(5, dtype=torch.float64)
    numbers = [(value, {}) for value in readings(truth, 1.0, lambda h: float(h.sum()), 0)[: 1 + GROUPS]]
    found = ex.estimated("linear", numbers, [])
    assert (found.value, found.bias) == (numbers[0][0], 0.0)
    left_out = torch.tensor([value for value, _ in numbers[1:]], dtype=torch.float64)
    jackknife = math.sqrt((GROUPS - 1) / GROUPS * float((left_out - left_out.mean()).square().sum()))
    assert found.error == pytest.approx(1.21 * jackknife, rel=1e-2)


def test_any_two_groups_meet_equally_often_in_the_halves():
    meetings = {(a, b): sum(a in half and b in half for half in ex.HALVES) for a in range(GROUPS) for b in range(a)}
    assert set(meetings.values()) == {3}


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_no_scale_is_preferred(scale):
    truth, read = CASES["mostly noise, clipped"]
    plain = readings(truth, 1.0, read, 0)
    one, other = ex.extrapolated(plain), ex.extrapolated([scale * value for value in plain])
    assert other.value == pytest.approx(scale * one.value, rel=1e-9)
    assert other.error == pytest.approx(scale * one.error, rel=1e-9)


def test_a_maximum_knows_of_a_noisy_layer_below_an_exact_one():
    """The exact layer is the largest wherever one group is left out, the noisy one may be larger in truth."""
    noise = torch.randn(GROUPS, generator=torch.Generator().manual_seed(0)).tolist()
    readings = []
    for groups in ex.subsets_for("any"):
        layers = {"exact": 70.0, "noisy": 69.65 + 0.5 * sum(noise[group] for group in groups) / len(groups)}
        readings.append((max(layers.values()), layers))
    found = ex.estimated("any", readings, ["noisy"])
    noisy, error = found.layers["noisy"], found.layer_errors["noisy"]
    assert noisy < found.value < noisy + 2 * error
    assert found.error >= min(error, noisy + 2 * error - found.value)
    assert ex.estimated("any", readings, []).error < found.error


def maximum_of_exact_and_noisy(groups):
    """An exact layer of 0 beside a noisy one, whose groups of probes these are."""
    readings = []
    for subset in ex.subsets_for("any"):
        noisy = sum(groups[group] for group in subset) / len(subset)
        readings.append((max(0.0, noisy), {"exact": 0.0, "noisy": noisy}))
    return ex.estimated("any", readings, ["noisy"])


@pytest.mark.parametrize("distance", [0.5, 1.9, 2.1, 3.0, 6.0, 50.0])
def test_a_noisy_layer_below_an_exact_one_never_leaves_a_bar_of_nothing(distance):
    """The bar is no less than the root mean square of what Student's distribution has beyond the exact layer."""
    noise = torch.randn(GROUPS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise -= noise.mean()
    error = ex.standard_error(noise)
    student = stats.t(GROUPS - 1, loc=-distance * error, scale=error / 1.2136)
    beyond = math.sqrt(student.expect(lambda x: x**2, lb=0))
    found = maximum_of_exact_and_noisy((noise - distance * error).tolist())
    assert found.error >= 0.99 * min(beyond, error)
    if distance > 2.5:
        assert found.error == pytest.approx(beyond, rel=1e-2)
