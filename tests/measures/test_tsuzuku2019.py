"""The balance of rows and columns against an independent minimization."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import dense_oracle
from spiritlevel.measures import tsuzuku2019
from spiritlevel.measures.tsuzuku2019 import _held, balanced_scales


def by_scipy(h, w):
    rows, columns = h.shape

    def value(z):
        together = z[:rows, None] + z[None, rows:]
        up, down = h * np.exp(together), w * np.exp(-together)
        slope = up - down
        return up.sum() + down.sum(), np.concatenate([slope.sum(1), slope.sum(0)])

    return minimize(value, np.zeros(rows + columns), jac=True, method="BFGS", options={"gtol": 1e-11}).fun


def arrays(seed, rows, columns, spread=2.0):
    generator = np.random.default_rng(seed)
    return [np.exp(spread * generator.standard_normal((rows, columns))) for _ in range(2)]


def found(h, w):
    return float(balanced_scales(torch.from_numpy(h), torch.from_numpy(w))[0])


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (4, 3), (8, 10)], ids=str)
def test_the_minimum_is_that_of_scipy(shape):
    for seed in range(5):
        h, w = arrays(seed, *shape)
        assert found(h, w) == pytest.approx(by_scipy(h, w), rel=1e-8)
        assert found(h, w) == pytest.approx(dense_oracle.smallest_sum(h, w), rel=1e-12)


def test_the_minimum_is_attained_at_what_is_returned():
    h, w = map(torch.from_numpy, arrays(0, 6, 4))
    value, x, y = balanced_scales(h, w)
    together = x[:, None] + y[None, :]
    assert float((h * together.exp() + w * (-together).exp()).sum()) == pytest.approx(float(value), rel=1e-13)


def test_a_start_from_a_problem_nearby_takes_fewer_steps_to_the_same_minimum(monkeypatch):
    """In layers too large for Newton's method; a column that has lost its curvature since starts at zero."""
    h, w = map(torch.from_numpy, arrays(3, 150, 120))
    before, near = h.clone(), h * (1 + 1e-5 * torch.randn(h.shape, generator=torch.Generator().manual_seed(0)))
    before[:, 7] = 0
    steps = []
    half_step = tsuzuku2019._half_step
    monkeypatch.setattr(tsuzuku2019, "_half_step", lambda *sums: steps.append(1) or half_step(*sums))
    starts = [balanced_scales(each, w)[2] for each in (h, before)]
    taken = []
    for start in (None, *starts):
        steps.clear()
        taken.append((float(balanced_scales(near, w, start=start)[0]), len(steps)))
    (cold, needed), (warm, few), (other, some) = taken
    assert warm == pytest.approx(cold, rel=1e-14)
    assert other == pytest.approx(cold, rel=1e-14)
    assert few <= needed / 2
    assert some <= needed


def test_rows_and_columns_of_zeros_add_nothing():
    h, w = arrays(1, 6, 5)
    dead_h, dead_w = h.copy(), w.copy()
    dead_h[2] = 0
    dead_h[:, 3] = 0
    dead_w[4] = 0
    kept = np.ix_([0, 1, 3, 5], [0, 1, 2, 4])
    assert found(dead_h, dead_w) == pytest.approx(found(h[kept], w[kept]), rel=1e-12)
    assert found(np.zeros((3, 3)), np.ones((3, 3))) == 0.0
    assert found(np.ones((3, 3)), np.zeros((3, 3))) == 0.0


def test_wide_ranges_and_negative_entries():
    h, w = arrays(2, 5, 5, spread=10)
    assert found(h, w) == pytest.approx(dense_oracle.smallest_sum(h, w), rel=1e-10)
    negative = h.copy()
    negative[1, 2] = -5.0
    clipped = h.copy()
    clipped[1, 2] = 0.0
    assert found(negative, w) == pytest.approx(found(clipped, w), rel=1e-14)


@pytest.mark.parametrize("density", [0.2, 0.4, 0.7])
def test_scattered_zeros(density):
    """Entries that a direction to infinity removes, and entries that hold it back."""
    for seed in range(12):
        generator = np.random.default_rng(seed)
        h, w = arrays(seed, 6, 5)
        h, w = h * (generator.random(h.shape) < density), w * (generator.random(w.shape) < 0.9)
        wanted = dense_oracle.smallest_sum(h, w)
        assert found(h, w) == pytest.approx(wanted, rel=1e-8, abs=1e-8 * np.sqrt(h.sum() * w.sum())), seed


def test_batches_of_matrices_are_balanced_one_by_one():
    pairs = [arrays(seed, 4, 3) for seed in range(3)]
    h, w = (torch.from_numpy(np.stack(part)) for part in zip(*pairs, strict=True))
    together = balanced_scales(h, w)[0]
    assert together.tolist() == pytest.approx([found(*pair) for pair in pairs], rel=1e-12)


def test_rescaling_rows_and_columns_changes_nothing():
    h, w = arrays(3, 5, 4)
    factors = np.exp(np.random.default_rng(0).standard_normal((5, 1))) * np.exp(np.arange(4.0))
    assert found(h * factors**-2, w * factors**2) == pytest.approx(found(h, w), rel=1e-11)


def test_what_is_left_out_stands_at_infinity():
    h = torch.tensor([[1.0, 0.0], [0.0, 0.0], [2.0, 0.0]])
    w = torch.tensor([[3.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    value, x, y = balanced_scales(h, w)
    assert float(value) == pytest.approx(2 * 3**0.5, rel=1e-14)
    assert x.tolist()[1:] == [float("inf"), -float("inf")]
    assert y.tolist()[1] == float("inf")


def _on_a_common_cycle(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The same by reachability: row → column where h > 0, column → row where w > 0, closed by squaring."""
    rows, columns = h.shape
    reach = torch.eye(rows + columns)
    reach[:rows, rows:] += h > 0
    reach[rows:, :rows] += (w > 0).T
    for _ in range(rows + columns):
        reach = ((reach @ reach) > 0).float()
    both = (reach > 0) & (reach.T > 0)
    return both[:rows, rows:]


@pytest.mark.parametrize("full", ["weights", "curvature", "neither"])
def test_entries_that_are_held_lie_on_a_common_cycle(full):
    generator = torch.Generator().manual_seed(3)
    seen = set()
    for _ in range(40):
        h, w = torch.rand(2, 5, 4, generator=generator)
        if full != "curvature":
            h = h * (h > 0.75)
        if full != "weights":
            w = w * (w > 0.75)
        expected = _on_a_common_cycle(h, w)
        assert torch.equal(_held(h > 0, w > 0), expected)
        seen.add(int(expected.sum()))
    assert len(seen) > 3  # some, not all
