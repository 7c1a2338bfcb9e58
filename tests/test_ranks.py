"""Several processes give the numbers of one, and none is left waiting when another fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spiritlevel.ranks import Ranks, current_ranks

WORKER = Path(__file__).with_name("ranks_worker.py")


def run(scene: str, size: int, place: Path) -> tuple[list[dict], list[int]]:
    """What each process wrote (empty where it wrote nothing), and the exit codes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), scene, str(rank), str(size), str(place / scene)], env=environment
        )
        for rank in range(size)
    ]
    codes = [process.wait(timeout=120) for process in processes]
    files = [Path(f"{place / scene}.{rank}") for rank in range(size)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files], codes


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(tmp_path) -> None:
    (tmp_path / "one").mkdir()
    (alone,), _ = run("same", 1, tmp_path / "one")
    both, codes = run("same", 2, tmp_path)
    assert codes == [0, 0]
    assert both[0] == both[1]
    for name, value in alone.items():
        assert both[0][name] == pytest.approx(value, rel=1e-10, abs=1e-14), name


@pytest.mark.slow
def test_a_failure_reaches_every_process(tmp_path) -> None:
    (first, second), _ = run("failing", 2, tmp_path)
    assert first["type"] == "ProcessFailed"
    assert "process 1: ValueError: the disk is on fire" in first["error"]
    assert second == {"type": "ValueError", "error": "the disk is on fire"}


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others(tmp_path) -> None:
    (first, _), codes = run("dying", 2, tmp_path)
    assert codes[1] == 7
    assert first["type"] == "ProcessFailed"
    assert "another process of this measurement has ended" in first["error"]


@pytest.mark.slow
def test_processes_must_agree_on_model_and_data(tmp_path) -> None:
    found, _ = run("differing", 2, tmp_path)
    for each in found:
        assert "differ in the model's weights" in each["error"]
        assert "differ in the data" in each["data"]
        assert "1 samples cannot be divided among 2 processes" in each["few"]
    assert [each["alone"] for each in found] == ["21", "20"]


def test_one_process_exchanges_nothing() -> None:
    ranks = current_ranks()
    assert type(ranks) is Ranks
    assert (ranks.rank, ranks.size, ranks.total(2.5)) == (0, 1, 2.5)
