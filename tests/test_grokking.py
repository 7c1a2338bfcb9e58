"""The picture of a network that learns sums modulo p can be made again."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import spiritlevel as sl

GROKKING = runpy.run_path(str(Path(__file__).resolve().parents[1] / "docs" / "results" / "grokking.py"))


def test_the_quick_version_follows_a_training_and_draws_it(tmp_path: Path) -> None:
    setting = GROKKING["QUICK"]
    found = GROKKING["follow"](setting)
    steps = list(range(0, setting.steps + 1, setting.every))
    for history in found.histories.values():
        assert [point.step for point in history] == steps
        assert all(point["whitened_flatness"].exact for point in history)
    assert len(found.trained) == len(found.tested) == len(steps)
    assert found.trained[-1] > found.trained[0]
    GROKKING["draw"](found, tmp_path / "grokking.png")
    assert (tmp_path / "grokking.png").read_bytes().startswith(b"\x89PNG")
    first = GROKKING["table"](found).splitlines()[2].split(" | ")
    assert first[0] == "| 0"
    assert float(first[4]) == pytest.approx(found.histories["cross_entropy"][0]["whitened_flatness"].value, rel=1e-2)


def test_what_is_followed_is_the_flatness_of_the_training_pairs() -> None:
    setting = GROKKING["QUICK"]
    known, new = GROKKING["sums"](setting.p)
    assert {tuple(pair) for pair in torch.cat([known[0], new[0]]).tolist()} == {
        (a, b) for a in range(setting.p) for b in range(setting.p)
    }
    assert torch.equal(known[0].sum(1) % setting.p, known[1])
    start = sl.measure(GROKKING["network"](setting), known, measures=["whitened_flatness"])["whitened_flatness"]
    again = GROKKING["follow"](type(setting)(p=7, width=4, hidden=12, steps=0, every=1))
    assert again.histories["cross_entropy"][0]["whitened_flatness"].value == pytest.approx(start.value, rel=1e-9)
