"""What trackers are for: sharpness rises to the line of the optimizer and stays there."""

import pytest

from benchmarks.edge_of_stability import ADAM, DESCENT, followed


@pytest.mark.long
def test_gradient_descent_settles_at_two_over_its_learning_rate() -> None:
    start = followed(DESCENT, 0.06, 1, degree=3, every=1)[0][DESCENT]
    plateau = followed(DESCENT, 0.06, 1751, degree=3, every=250, first=1000)
    line = plateau[-1].thresholds[DESCENT]
    assert line == pytest.approx(2 / 0.06)
    assert start.value < 0.6 * line
    values = [point[DESCENT].value for point in plateau]
    assert len(values) == 4
    assert all(abs(value / line - 1) < 0.1 for value in values)


@pytest.mark.long
def test_adam_settles_at_38_over_its_learning_rate() -> None:
    start = followed(ADAM, 1e-3, 100, degree=4, every=1, first=99)[0][ADAM]
    plateau = followed(ADAM, 1e-3, 2201, degree=4, every=200, first=1400)
    line = plateau[-1].thresholds[ADAM]
    assert line == pytest.approx(38 / 1e-3)
    assert start.value < 0.3 * line
    values = [point[ADAM].value for point in plateau]
    assert max(values) < 1.1 * line
    assert sum(values) / len(values) == pytest.approx(line, rel=0.1)
