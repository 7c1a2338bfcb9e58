"""The benchmark of the tracker runs, and its own clock agrees with the tracker's."""

import time

import pytest

from benchmarks.tracking_overhead import followed


def test_a_short_training_is_followed_and_timed_twice(monkeypatch) -> None:
    monkeypatch.setattr(time, "perf_counter", time.process_time)  # for both clocks: other processes stop neither
    monkeypatch.setattr("benchmarks.tracking_overhead.SAMPLES", 300)
    row = followed("MLP", 1.0, 1.0)
    assert row["seconds of training"] >= 1.0
    assert row["steps"] > 1
    assert row["overhead measured"] == pytest.approx(row["by the tracker's own clock"], rel=0.3)
