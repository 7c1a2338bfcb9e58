"""Measuring on a random subset: the bars cover what all the data would say."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import cases
import dense_oracle
import spiritlevel as sl
from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.sampling import PARTS, random_subset, with_sampling_error
from spiritlevel.problem.batches import Data

NAMES = ["hessian_trace", "rho_sum", "normalized_sharpness", "hessian_spectral_norm"]


@pytest.fixture(scope="module")
def subject():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    return model, (torch.randn(400, 5).double(), torch.randint(0, 3, (400,)))


@pytest.fixture(scope="module")
def defined(subject):
    """The values of the measures on the samples of a list, by definition: the mean of the samples' Hessians is formed once."""
    model, (x, y) = subject

    def of_one(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = dense_oracle.flat_loss(model, nn.functional.cross_entropy, x.unsqueeze(0), y.unsqueeze(0))
        return torch.func.hessian(loss)(dense_oracle.flat(model))

    hessians = torch.func.vmap(of_one)(x, y)

    def on(samples: torch.Tensor) -> dense_oracle.Expected:
        return dense_oracle.with_hessian(model, hessians[samples].mean(0), cases.chain(0, 2))

    return on


def on_a_subset(defined, report: Report, seed: int) -> Report:
    """What `measure` says about 120 of 400 samples, from values by definition instead of the report's own."""
    subset, parts, share = random_subset(Data((torch.arange(400).unsqueeze(1), torch.zeros(400, 1))), 120, True, seed)

    def told(samples: Data) -> Report:
        expected = defined(samples.first.inputs.flatten())
        values = {
            name: replace(report[name], value=expected.values[name], error=0.0, layers={}, layer_errors={})
            for name in NAMES
        }
        return replace(report, values=values)

    return with_sampling_error(told(subset), [told(part) for part in parts], PARTS, share, 400)


def test_the_bar_is_the_spread_of_the_parts(subject, defined) -> None:
    report = sl.measure(*subject, measures=NAMES, samples=120, seed=5)
    wanted = on_a_subset(defined, report, 5)
    for name in NAMES:
        assert report[name].value == pytest.approx(wanted[name].value, rel=1e-6), name
        assert report[name].details["sampling_error"] == pytest.approx(wanted[name].error, rel=1e-6), name
        assert report[name].error < 0.5 * report[name].value  # a bar that was far too wide would always cover


@pytest.mark.long
def test_two_bars_cover_the_value_on_all_data(subject, defined) -> None:
    everything = sl.measure(*subject, measures=NAMES)
    repetitions = 100
    told = [on_a_subset(defined, everything, seed) for seed in range(repetitions)]
    for name in NAMES:
        truth = everything[name].value
        covered = sum(abs(report[name].value - truth) <= 2 * report[name].error for report in told)
        # Binomial with about 95 %: three standard deviations below are 88.
        assert covered >= 88, name
        # Bars twice as wide would always cover; where noise adds up, as in the largest eigenvalue, they are wide themselves.
        assert covered < repetitions or name not in ("hessian_trace", "rho_sum"), name


def test_the_sampling_error_vanishes_with_the_rest(subject) -> None:
    model, data = subject
    few, most = (sl.measure(model, data, measures=["hessian_trace"], samples=n)["hessian_trace"] for n in (40, 399))
    assert most.error < few.error / 5
    assert few.details["sampling_error"] == pytest.approx(few.error)
    assert not few.exact
    assert few.error_kind == "sampling"
    assert not few.certified


def test_it_is_said_and_repeatable(subject) -> None:
    model, data = subject
    names = ["hessian_trace", "rho_sum"]
    first, second = (sl.measure(model, data, measures=names, samples=100, seed=3) for _ in range(2))
    other = sl.measure(model, data, measures=names, samples=100, seed=4)
    assert "measured on 100 of 400 samples" in first.notes[0]
    assert first.problem["samples"] == 100
    assert first["rho_sum"].value == second["rho_sum"].value != other["rho_sum"].value
    assert set(first["rho_sum"].layer_errors) == set(first["rho_sum"].layers)


def test_as_many_samples_as_there_are_leave_no_sampling_error(subject) -> None:
    model, data = subject
    report = sl.measure(model, data, measures=["hessian_trace"], samples=1000)
    assert report["hessian_trace"] == sl.measure(model, data, measures=["hessian_trace"])["hessian_trace"]
    assert "covers all 400 samples" in report.notes[-1]


@pytest.mark.long
def test_loaders_and_whole_batches_are_sampled_too(subject) -> None:
    model, (x, y) = subject
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=32)
    pair = sl.measure(model, (x, y), measures=["hessian_trace"], samples=100)
    assert sl.measure(model, loader, measures=["hessian_trace"], samples=100)["hessian_trace"].value == pytest.approx(
        pair["hessian_trace"].value
    )

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"]), len(batch["y"])

    batches = [{"x": x[i : i + 10], "y": y[i : i + 10]} for i in range(0, 400, 10)]
    report = sl.measure(model, batches, loss, measures=["hessian_spectral_norm"], samples=100)
    assert report.problem["samples"] == 100
    assert report["hessian_spectral_norm"].details["sampling_error"] > 0
    with pytest.raises(SpiritLevelError, match="fewer than two of the 40 batches"):
        sl.measure(model, batches, loss, measures=["hessian_spectral_norm"], samples=12)


@pytest.mark.parametrize("samples", [1, 0, -3, 2.5, True])
def test_a_wrong_number_is_refused(subject, samples) -> None:
    with pytest.raises(SpiritLevelError, match="samples must be a whole number of at least 2"):
        sl.measure(*subject, samples=samples)


def test_parts_divide_the_subset() -> None:
    data = Data((torch.arange(100.0).unsqueeze(1), torch.zeros(100, 1)))
    subset, parts, share = random_subset(data, 37, True, 0)
    chosen = sorted(float(v) for part in parts for v in part.first.inputs.flatten())
    assert chosen == sorted(subset.first.inputs.flatten().tolist())
    assert len(set(chosen)) == 37
    assert len(parts) == PARTS
    assert math.isclose(share, 0.37)
