"""Several processes give the numbers of one, and none is left waiting when another fails."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spiritlevel import cli
from spiritlevel.problem.ranks import Ranks, current_ranks
from spiritlevel.subjects.checkpoint import save_checkpoint
from spiritlevel.subjects.networks import build_model

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


# --- commands that torchrun starts -----------------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path) -> Path:
    save_checkpoint(build_model("mlp:4", input_shape=(5,), classes=3, seed=1), tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def two_processes(*arguments: object) -> list[str]:
    """What each of two processes of a command prints on standard output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "spiritlevel", *map(str, arguments)],
            env={**shared, "RANK": str(rank), "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("command", ["audit", "compare", "spectrum"])
def test_commands_that_share_their_work_print_once(command: str, weights: Path) -> None:
    networks = (
        [f"{name}=mlp:4@{weights}" for name in "ab"] if command == "compare" else ["mlp:4", "--checkpoint", weights]
    )
    options = ["--measures", "hessian_trace", *(["--strengths", "1"] if command == "audit" else [])]
    first, second = two_processes(
        command, *networks, "--data", "random:40,5,3,0", "--json", "-", *([] if command == "spectrum" else options)
    )
    assert json.loads(first)["format"].startswith("spiritlevel-")
    assert second == ""


@pytest.mark.parametrize("command", ["landscape", "sharpen", "bound", "robustness", "demo", "bench", "study"])
def test_of_any_other_command_one_process_does_it_all(command: str, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"] if command == "study" else [command])
    assert not left.value.code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_the_first_process_says_that_it_works_alone(monkeypatch, capsys, weights: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        cli.main(["sharpen", "mlp:4", "--checkpoint", str(weights), "--data", "random:40,5,3,0", "--target", "10"])
    captured = capsys.readouterr()
    assert captured.out.startswith("hessian_spectral_norm: ")
    assert captured.err.startswith("sharpen runs in one process: of the 2 that torchrun started, the others have ended")
