"""What clipping a noisy diagonal adds is told from what is negative in truth."""

import pytest
import torch

from spiritlevel.curvature.estimate import Estimates, Probed
from spiritlevel.curvature.statistics import GROUPS
from spiritlevel.measuring import clipping
from spiritlevel.measuring.statistics import Sources, Spread

ENTRIES, SEEDS = 400, 30
EVEN = torch.linspace(0, 1, ENTRIES, dtype=torch.float64)
TRUTHS = {
    "positive, most of it below its noise": 0.3 + EVEN,
    "half of it zero": (4 * EVEN - 2).clamp(min=0),
    "all of it zero but a few": torch.where(EVEN > 0.95, 8.0, 0.0),
    "a part is clearly negative": torch.where(EVEN > 0.9, -8.0, 2.0),
    "far above its noise": 20 + EVEN,
}


def drawn(truth, noise, seed):
    """The mean of noisy groups and its standard errors, where `noise` is the true one."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(GROUPS, len(truth), generator=generator, dtype=torch.float64)
    groups = truth + noise * GROUPS**0.5 * draws
    return groups.mean(0), groups.std(0) / GROUPS**0.5


def found(truth, scales, seed, noise=1.0):
    """Σ u h⁺ as estimated, and as it is when the mean is clipped."""
    h, spread = drawn(truth, noise, seed)
    clipped = float((scales * h).clamp(min=0).sum())
    return clipping.true_share(h, spread, scales, GROUPS - 1) * clipped, clipped


@pytest.mark.parametrize("name", TRUTHS)
def test_the_sum_of_the_positive_part_has_hardly_a_bias(name):
    truth, scales = TRUTHS[name], 0.5 + EVEN.flip(0)
    wanted = float((scales * truth).clamp(min=0).sum())
    values = torch.tensor([found(truth, scales, seed) for seed in range(SEEDS)], dtype=torch.float64)
    noise = float((scales.square().sum()).sqrt())  # of Σ u ĥ
    bias, of_clipping = (float(each) - wanted for each in values.mean(0))
    assert abs(bias) < 0.6 * noise
    assert float((values[:, 0] - wanted).std()) < 1.5 * noise
    if name == "half of it zero":  # what this is for
        assert of_clipping > 2 * noise


def test_noise_that_differs_from_entry_to_entry_is_told_by_its_own_spread():
    truth = torch.where(EVEN > 0.5, 1.0, 0.05)
    noise = torch.where(EVEN > 0.5, 1.0, 0.05)  # small entries with small noise, as those of a matrix of rank one have
    scales, wanted = torch.ones_like(truth), float(truth.sum())
    values = torch.tensor([found(truth, scales, seed, noise) for seed in range(SEEDS)], dtype=torch.float64)
    clearly = 5 * float(noise.square().sum().sqrt()) / SEEDS**0.5
    assert abs(float(values[:, 0].mean()) - wanted) < clearly < float(values[:, 1].mean()) - wanted


def test_nothing_but_noise_may_come_out_negative():
    shares = [found(torch.zeros(ENTRIES, dtype=torch.float64), torch.ones(ENTRIES), seed)[0] for seed in range(SEEDS)]
    assert min(shares) < 0
    assert abs(sum(shares) / SEEDS) < ENTRIES**0.5


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_no_scale_is_preferred(scale):
    h, spread = drawn(TRUTHS["half of it zero"], 1.0, 0)
    one = clipping.true_share(h, spread, EVEN, GROUPS - 1)
    assert clipping.true_share(scale * h, scale * spread, EVEN, GROUPS - 1) == pytest.approx(one, rel=1e-9)
    assert clipping.true_share(h, spread, scale * EVEN, GROUPS - 1) == pytest.approx(one, rel=1e-9)


def test_an_entry_scaled_against_its_unit_is_the_same_entry():
    """As in twins: h and its error divided by what its unit is multiplied by."""
    h, spread = drawn(TRUTHS["half of it zero"], 1.0, 0)
    factor = torch.exp(3 * EVEN)
    one, other = (
        clipping.true_share(*each, GROUPS - 1)
        for each in ((h, spread, EVEN), (h / factor, spread / factor, EVEN * factor))
    )
    assert other == pytest.approx(one, rel=1e-9)


def test_in_parts_as_at_once(monkeypatch):
    h, spread = drawn(TRUTHS["a part is clearly negative"], 1.0, 0)
    whole = clipping.true_share(h, spread, EVEN, GROUPS - 1)
    monkeypatch.setattr(clipping, "TOGETHER", 7)
    assert clipping.true_share(h, spread, EVEN, GROUPS - 1) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("h", [[], [0.0, 0.0], [1.0, 2.0], [-1.0, -2.0]])
def test_where_there_is_no_noise_nothing_is_taken_off(h):
    h = torch.tensor(h, dtype=torch.float64)
    assert clipping.true_share(h, torch.zeros_like(h), torch.ones_like(h), GROUPS - 1) == 1.0


def test_spread_is_the_standard_error_of_the_mean_of_the_groups():
    groups = torch.randn(GROUPS, 2, 3, generator=torch.Generator().manual_seed(0))
    estimates = Estimates({"diagonal": {"bent": Probed(groups), "formed": Probed(groups[:1])}})
    spread = Spread(Sources(frozenset()), None, estimates, (1, 4, 5))
    assert list(spread) == ["bent"]
    assert len(spread) == 1
    torch.testing.assert_close(spread["bent"], groups[[1, 4, 5]].double().std(0) / 3**0.5)
