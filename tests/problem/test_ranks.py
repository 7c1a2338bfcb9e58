"""Several processes give the numbers of one, and none is left waiting when another fails."""

import contextlib
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

sys.path.insert(0, str(Path(__file__).parent))
from ranks_worker import one_by_one, same

WORKER = Path(__file__).with_name("ranks_worker.py")


def run(scenes: list[str], place: Path) -> tuple[dict[str, list[dict]], list[int]]:
    """What each of two processes wrote in each scene (empty where it wrote nothing), and the exit codes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, str(WORKER), ",".join(scenes), str(rank), "2", str(place)], env=environment)
        for rank in range(2)
    ]
    codes = [process.wait(timeout=600) for process in processes]
    files = {scene: [place / f"{scene}.{rank}" for rank in range(2)] for scene in scenes}
    return {
        scene: [json.loads(file.read_text()) if file.exists() else {} for file in found]
        for scene, found in files.items()
    }, codes


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> tuple[dict[str, list[dict]], list[int]]:
    """Scene → what each process saw, and the exit codes; one pair of processes for all scenes, of which one dies in the last."""
    return run(
        ["same", "divided", "given", "one_by_one", "differing", "failing", "dying"], tmp_path_factory.mktemp("ranks")
    )


@pytest.fixture(scope="module")
def seen(ended) -> dict[str, list[dict]]:
    """Scene → what each process saw."""
    return ended[0]


@pytest.mark.long
def test_two_processes_give_the_numbers_of_one(seen) -> None:
    both = seen["same"]
    assert both[0] == both[1]
    for name, value in same().items():
        assert both[0][name] == pytest.approx(value, rel=1e-10, abs=1e-14), name


@pytest.mark.long
def test_statistics_of_large_parameters_are_divided_and_read_whole(seen) -> None:
    first, second = ({**each} for each in seen["divided"])
    sizes, others = ([each.pop("kept"), each.pop("added")] for each in (first, second))
    assert first == second == pytest.approx(seen["same"][0], rel=1e-10, abs=1e-14)
    for after, during in (sizes, others):
        assert (after["0.weight"], after["0.bias"]) == (12, 4)  # of 24, and of 4
        assert (during["0.weight"], during["2.weight"]) == (15, 10)  # of 30 and 20 entries of the other network


@pytest.mark.long
def test_running_sums_take_what_each_process_has_to_give(seen) -> None:
    parts = seen["given"]
    assert [each["divides"] for each in parts] == [[True, True, False]] * 2
    a = [float(part) for each in parts for part in each["a"]]
    b = [float(part) for each in parts for part in each["b"]]
    assert [len(each["a"]) for each in parts] == [18, 17]
    assert a == pytest.approx(
        [n * (1 + 1e-9) for n in range(1, 36)], rel=1e-12
    )  # in double precision, not that of the arrays
    assert b == [2.0 * n for n in range(1, 12)]
    assert [each["c"] for each in parts] == [[1.0] * 3] * 2


@pytest.mark.long
def test_batches_may_be_smaller_than_there_are_processes(seen) -> None:
    first, second = seen["one_by_one"]
    assert first == second == pytest.approx(one_by_one(), rel=1e-6)


@pytest.mark.long
def test_a_failure_reaches_every_process(seen) -> None:
    first, second = seen["failing"]
    assert first["type"] == "ProcessFailed"
    assert "process 1: ValueError: the disk is on fire" in first["error"]
    assert second == {"type": "ValueError", "error": "the disk is on fire"}


@pytest.mark.long
def test_a_process_that_dies_ends_the_others(ended) -> None:
    found, codes = ended
    first, second = found["dying"]
    assert codes == [0, 7]
    assert second == {}
    assert first["type"] == "ProcessFailed"
    assert "another process of this measurement has ended" in first["error"]


@pytest.mark.long
def test_processes_must_agree_on_model_and_data(seen) -> None:
    found = seen["differing"]
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


# Commands, one after the other: what each one prints goes into a file of its own.
COMMANDS = """
import contextlib, json, os, sys
from spiritlevel import cli
folder, rank = sys.argv[1], os.environ["RANK"]
for name, arguments, port in json.loads(sys.argv[2]):
    os.environ["MASTER_PORT"] = str(port)
    with open(f"{folder}/{name}.{rank}", "w") as out, contextlib.redirect_stdout(out):
        try:
            cli.main(arguments)
        except SystemExit as left:
            assert not left.code, name
"""


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def two_processes(commands: dict[str, list[str]], folder: Path) -> dict[str, list[str]]:
    """What each of two processes, started as torchrun does it, prints on standard output by each command."""
    listed = [
        (name, words, port) for (name, words), port in zip(commands.items(), free_ports(len(commands)), strict=True)
    ]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", COMMANDS, str(folder), json.dumps(listed)], env={**shared, "RANK": str(rank)}
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=600) for process in processes] == [0, 0]
    return {name: [(folder / f"{name}.{rank}").read_text() for rank in range(2)] for name in commands}


@pytest.mark.long
def test_commands_that_share_their_work_print_once(weights: Path, tmp_path: Path, capsys) -> None:
    network, both = ["mlp:4", "--checkpoint", str(weights)], [f"{name}=mlp:4@{weights}" for name in "ab"]
    data, measures = ["--data", "random:40,5,3,0", "--json", "-"], ["--measures", "hessian_trace"]
    commands = {
        "measure": ["measure", *network, *data, *measures],
        "audit": ["audit", *network, *data, *measures, "--strengths", "1"],
        "compare": ["compare", *both, *data, *measures],
        "spectrum": ["spectrum", *network, *data],
    }
    found = two_processes(commands, tmp_path)
    for name, (first, second) in found.items():
        assert json.loads(first)["format"].startswith("spiritlevel-"), name
        assert second == "", name
    with pytest.raises(SystemExit):
        cli.main(commands["measure"])
    alone, together = (json.loads(text)["values"] for text in (capsys.readouterr().out, found["measure"][0]))
    assert together["hessian_trace"]["value"] == pytest.approx(alone["hessian_trace"]["value"], rel=1e-5)


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
