"""Searches that start where others ended: the right eigenvalues, also where the start misleads."""

import pytest
import torch
from torch import nn

import spiritlevel as sl
from dense_oracle import dense
from small_training import Training
from spiritlevel.measuring.starts import Starts

pytestmark = pytest.mark.usefixtures("by_searches")

NAMES = ["hessian_spectral_norm", "riemannian_nodewise_spectral_norm", "kappa_sum"]


@pytest.mark.usefixtures("own_precision")
def test_a_second_call_at_the_same_weights_takes_fewer_products() -> None:
    """Of networks that are not so small that more products than needed are taken anyway."""
    training, starts = Training(dtype=torch.float64), Starts()
    cold, warm = (sl.measure(training.model, training.data, measures=NAMES, starts=starts) for _ in range(2))
    assert warm.cost.products < cold.cost.products
    for name in NAMES:
        assert warm[name].converged
        assert warm[name].value == pytest.approx(cold[name].value, abs=warm[name].error + cold[name].error)


def test_a_start_that_misleads_finds_the_largest_eigenvalue_all_the_same() -> None:
    """The search starts from the wrong eigenvectors: those of the next eigenvalues, with nothing of the first."""
    training, starts = Training(dtype=torch.float64), Starts()
    training.run(10)
    report = sl.measure(training.model, training.data, measures=NAMES[:1], starts=starts)
    values, vectors = torch.linalg.eigh(dense(training.model, nn.functional.cross_entropy, *training.data))
    (key,) = starts._vectors
    starts._vectors[key] = vectors[:, -5:-1].T.flip(0)
    again = sl.measure(training.model, training.data, measures=NAMES[:1], starts=starts)
    for found in (report, again):
        assert found[NAMES[0]].value == pytest.approx(float(values[-1]), rel=1e-3)
    assert abs(float(starts._vectors[key][0] @ vectors[:, -1])) > 0.99


def test_starts_of_another_network_or_of_nan_are_not_used() -> None:
    training, starts = Training(), Starts()
    sl.measure(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), training.data, measures=NAMES, starts=starts)
    (key, *_) = starts._vectors
    cold = sl.measure(training.model, training.data, measures=NAMES)
    other = sl.measure(training.model, training.data, measures=NAMES, starts=starts)
    assert {name: value.value for name, value in other.values.items()} == {n: v.value for n, v in cold.values.items()}
    starts._vectors[key].fill_(torch.nan)
    assert starts.of(key, starts._vectors[key].shape[1]) is None
    starts.forget()
    assert starts._vectors == {}


def test_a_subset_and_its_parts_do_not_share_a_start() -> None:
    training, starts = Training(), Starts()
    sl.measure(training.model, training.data, measures=NAMES[:1], starts=starts, samples=40)
    assert starts._vectors == {}
