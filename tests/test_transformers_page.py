"""The tables and the picture of docs/transformers.md can be made again."""

from __future__ import annotations

import csv
import json
import re
import runpy
from pathlib import Path

import pytest
import torch

import spiritlevel as sl
from study_samples import fabricate

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
GROKKING = runpy.run_path(str(RESULTS / "grokking.py"))
ORBITS = runpy.run_path(str(RESULTS / "orbits.py"))


def named(folder: Path, name: str) -> Path:
    """A study under another name."""
    path = folder / "study.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "name": name}))
    return folder


@pytest.mark.parametrize(("cells", "told"), [(24, 21), (5, 2)])
def test_a_study_fills_its_place_on_the_page(tmp_path: Path, cells: int, told: int) -> None:
    page = tmp_path / "transformers.md"
    page.write_text("before\n<!-- study -->\nold\n<!-- end study -->\nafter\n")
    study = named(fabricate(tmp_path / "study", cells=cells, measures=("rho_sum", "hessian_trace")), "transformers")
    ORBITS["gather"](study, tmp_path)
    ORBITS["write"](tmp_path, page, draws=100)
    text = page.read_text()
    assert text.startswith("before\n<!-- study -->\n")
    assert text.endswith("<!-- end study -->\nafter\n")
    assert f"{told} of {cells} networks" in text
    assert "old" not in text
    rows = re.findall(r"\| `(\w+)` \| (\S+) .*?\| ([\d.e+]+) \|", text)
    if told < 6:
        assert not rows
        return
    with (tmp_path / "transformers" / "correlations.csv").open() as file:
        of_networks = [row for row in csv.DictReader(file) if (row["gap"], row["layer"]) == ("gap_loss", "")]
        tables = {row["measure"]: row for row in of_networks if row["variant"] == "trained"}
    assert [name for name, *_ in rows] == ["rho_sum", "hessian_trace"]  # the best first
    for name, coefficient, factor in rows:
        assert float(coefficient.replace("−", "-")) == pytest.approx(float(tables[name]["kendall"]), abs=0.006)
        assert float(factor) >= 1
    assert float(rows[0][2]) < float(rows[1][2])  # the plain one is moved


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
