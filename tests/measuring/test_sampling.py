"""Measuring on a random subset: the bars cover what all the data would say."""

import math

import pytest
import torch
from torch import nn

import spiritlevel as sl
from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.sampling import PARTS, random_subset
from spiritlevel.problem.batches import Data

NAMES = ["hessian_trace", "rho_sum", "normalized_sharpness", "hessian_spectral_norm"]


@pytest.fixture(scope="module")
def subject():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    return model, (torch.randn(400, 5).double(), torch.randint(0, 3, (400,)))


def test_two_bars_cover_the_value_on_all_data(subject) -> None:
    model, data = subject
    everything = sl.measure(model, data, measures=NAMES)
    covered = dict.fromkeys(NAMES, 0)
    repetitions = 40
    for seed in range(repetitions):
        report = sl.measure(model, data, measures=NAMES, samples=120, seed=seed)
        for name in NAMES:
            covered[name] += abs(report[name].value - everything[name].value) <= 2 * report[name].error
    # Each is binomial with about 95 %; four standard deviations below are 33.
    assert all(count >= 33 for count in covered.values()), covered
    # Bars that were far too wide would always cover.
    report = sl.measure(model, data, measures=NAMES, samples=120)
    assert all(report[name].error < 0.5 * report[name].value for name in NAMES)


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
    first, second = (sl.measure(model, data, measures=NAMES, samples=100, seed=3) for _ in range(2))
    other = sl.measure(model, data, measures=NAMES, samples=100, seed=4)
    assert "measured on 100 of 400 samples" in first.notes[0]
    assert first.problem["samples"] == 100
    assert first["rho_sum"].value == second["rho_sum"].value != other["rho_sum"].value
    assert set(first["rho_sum"].layer_errors) == set(first["rho_sum"].layers)


def test_as_many_samples_as_there_are_leave_no_sampling_error(subject) -> None:
    model, data = subject
    report = sl.measure(model, data, measures=["hessian_trace"], samples=1000)
    assert report["hessian_trace"] == sl.measure(model, data, measures=["hessian_trace"])["hessian_trace"]
    assert "covers all 400 samples" in report.notes[-1]


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
