"""A training that was stopped goes on where it was, to the bits of one that was not."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from refusals import refused
from spiritlevel.study import evaluation, unfinished
from spiritlevel.study.plan import read_plan
from spiritlevel.study.run import prepare
from spiritlevel.study.samples import load_samples
from spiritlevel.study.settings import CellConfig
from spiritlevel.study.store import StudyFolder
from spiritlevel.study.train import Trained, train
from spiritlevel.study.unfinished import Unfinished
from spiritlevel.study.worker import DONE, compute

DROPPING = """
import torch
from torch import nn

class Dropping(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))

class Counting(Dropping):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls += 1
        return super().forward(x) / (1 + self.calls / 100)

class Odd(Dropping):
    def get_extra_state(self):
        return {"a": "text"}
"""


class Stop(Exception):
    """What ends a training in the middle."""


def cell(model: str = "mlp:8", seed: int = 0, start: str = "default", data: str = "random:150,6,3,0", **training: Any):
    settings = {"learning_rate": 0.05, "batch_size": 16, "epochs": 12, **training}
    measure = {"at_loss": [1.08, 0.9, 0.5], "at_epochs": [2, 5]}
    return CellConfig.model_validate(
        {
            "data": {"name": data},
            "model": {"name": model, "initialization": start},
            "training": settings,
            "measure": measure,
            "seed": seed,
        }
    )


@pytest.fixture(autouse=True)
def _written_after_every_epoch(monkeypatch):
    monkeypatch.setattr(unfinished, "EVERY", 0.0)
    for name, value in (("FEW", 100), ("HARDEST", 30), ("PROBED", 60)):  # so that there is a trail to go back
        monkeypatch.setattr(evaluation, name, value)


class Stopping(Unfinished):
    """Ends the training each time that it was written so often; remembers how far it was after every epoch."""

    def __init__(self, path: Path, times: int = 10**9, seen: dict[int, Any] | None = None) -> None:
        super().__init__(path, ["a"])
        self.times, self.seen = times, {} if seen is None else seen

    def write_if_due(self, state: Callable[[], Mapping[str, Any]]) -> None:
        super().write_if_due(state)
        self.seen[state()["epoch"]] = plain(state())
        self.times -= 1
        if not self.times:
            raise Stop


def plain(state: Any) -> Any:
    """Numbers and lists; without times, which differ."""
    if isinstance(state, Mapping):
        return {name: plain(entry) for name, entry in state.items() if name not in ("elapsed", "seconds")}
    if isinstance(state, list | tuple):
        return [plain(entry) for entry in state]
    return state.tolist() if isinstance(state, torch.Tensor) else state


def what_came_of(trained: list[Trained]) -> list[Any]:
    return [
        [
            {name: tensor.tolist() for name, tensor in each.model.state_dict().items()},
            *(each.curve, each.reached, each.stop_reason, each.steps, each.gradient_norm, each.ensemble),
            [
                (kept.mark, kept.step, kept.scores, {n: t.tolist() for n, t in kept.weights.items()})
                for kept in each.along
            ],
        ]
        for each in trained
    ]


ADAM = {"optimizer": "adam", "learning_rate": 0.01}
EARLY = {"stop": {"train_loss": 0.7}, "epochs": 40}


def images(start: str) -> CellConfig:
    return cell("lenet5", start=start, data="random:120,1x8x8,3,0", **EARLY, **{**ADAM, "learning_rate": 0.003})


@pytest.mark.long
@pytest.mark.parametrize(
    "cells",
    [
        pytest.param([cell(momentum=0.9, schedule="cosine")], id="alone"),
        pytest.param([cell(evaluate_every=50, epochs=50, batch_size=4)], id="seldom-evaluated"),
        pytest.param([cell("dropping_network:Dropping", **ADAM)], id="draws-and-buffers"),
        pytest.param([cell("dropping_network:Counting", **ADAM)], id="buffers-that-are-not-saved"),
        pytest.param([cell("mlp:64-64", seed, **EARLY, **ADAM) for seed in range(3)], id="seeds-together"),
        pytest.param([images(start) for start in ("default", "normal", "uniform")], id="starts-together"),
    ],
)
def test_a_training_that_was_stopped_again_and_again_ends_in_the_same_bits(cells, tmp_path, monkeypatch):
    (tmp_path / "dropping_network.py").write_text(DROPPING)
    monkeypatch.syspath_prepend(tmp_path)
    samples = load_samples(cells[0].data)
    whole, parts = Stopping(tmp_path / "whole.pt"), Stopping(tmp_path / "parts.pt")
    undisturbed, went_on = train(cells, samples, None, whole), None
    assert any(each.along for each in undisturbed)
    if len(cells) > 1:
        assert len({each.steps for each in undisturbed}) > 1  # some are stopped when others have ended
    stops = 0
    while went_on is None:
        torch.manual_seed(123)  # what else draws in the process has no say
        try:
            went_on = train(cells, samples, None, Stopping(parts.path, 2, parts.seen))
        except Stop:
            stops += 1
    assert stops > 2, "a training of a few epochs shows nothing"
    assert parts.seen == whole.seen
    assert what_came_of(went_on) == what_came_of(undisturbed)


def test_a_file_of_other_cells_or_a_damaged_one_is_not_used(tmp_path):
    samples, file = load_samples(cell().data), tmp_path / "unfinished.pt"
    with pytest.raises(Stop):
        train([cell()], samples, None, Stopping(file, 2))
    assert Unfinished(file, ["a"]).read()["epoch"] == 2
    said: list[str] = []
    assert Unfinished(file, ["a", "b"], said.append).read() is None
    assert "other company" in said.pop()
    written, expected = file.read_bytes(), what_came_of(train([cell()], samples))
    flipped = bytearray(written)
    flipped[len(written) // 2] ^= 1
    for damaged in (b"", b"\n", written[:100], written[:1000], written[: len(written) // 2], written[:-1], flipped):
        file.write_bytes(damaged)
        assert what_came_of(train([cell()], samples, None, Unfinished(file, ["a"], said.append))) == expected
        assert said.pop() == f"{file} is damaged: trained from the beginning"
    assert not said


def test_a_state_that_does_not_fit_is_told_and_not_used(tmp_path):
    """As one of a commit between two versions, half of which is loaded before that shows."""
    samples, file = load_samples(cell().data), tmp_path / "unfinished.pt"
    with pytest.raises(Stop):
        train([cell()], samples, None, Stopping(file, 2))
    state = Unfinished(file, ["a"]).read()
    del state["runs"][0]["trail"]["spacing"]
    Unfinished(file, ["a"]).write_if_due(lambda: state)
    said: list[str] = []
    went_on = train([cell()], samples, None, Unfinished(file, ["a"], said.append))
    assert what_came_of(went_on) == what_came_of(train([cell()], samples))
    assert said == [f"{file} does not fit (KeyError: 'spacing'): trained from the beginning"]


def test_a_state_of_another_learner_is_told_and_not_used(tmp_path):
    """Its optimizer may have the same numbers in another order: of kernels, by channels or by pixels."""
    one = cell("alexnet", data="random:30,1x8x8,3,0", momentum=0.9)
    samples, file = load_samples(one.data), tmp_path / "unfinished.pt"
    with pytest.raises(Stop):
        train([one], samples, None, Stopping(file, 2))
    state = Unfinished(file, ["a"]).read()
    state["computed_with"] = [state["computed_with"][0].partition(", convolutions")[0]]  # as by torch alone
    Unfinished(file, ["a"]).write_if_due(lambda: state)
    said: list[str] = []
    went_on = train([one], samples, None, Unfinished(file, ["a"], said.append))
    assert what_came_of(went_on) == what_came_of(train([one], samples))
    why = "(ValueError: the optimizer had its numbers in another order)"
    assert said == [f"{file} does not fit {why}: trained from the beginning"]


def test_a_training_that_goes_on_with_other_threads_says_so(tmp_path):
    samples, file = load_samples(cell().data), tmp_path / "unfinished.pt"
    with pytest.raises(Stop):
        train([cell()], samples, None, Stopping(file, 2))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        [trained] = train([cell()], samples, None, Unfinished(file, ["a"]))
    finally:
        torch.set_num_threads(before)
    assert [each.split()[0] for each in trained.computed_with] == [str(before), str(before + 1)]


def test_what_a_kill_left_of_a_writing_is_deleted(tmp_path):
    file = tmp_path / "unfinished.pt"
    half, other = tmp_path / ".unfinished.pt.0a1b2c3d.tmp", tmp_path / ".result.json.0a1b2c3d.tmp"
    half.write_bytes(b"half")
    other.write_bytes(b"of another file")
    assert Unfinished(file, ["a"]).read() is None
    assert not half.exists()
    assert other.exists()


def test_a_network_that_no_checkpoint_can_hold_is_refused_before_it_is_trained(tiny, tmp_path, monkeypatch):
    (tmp_path / "dropping_network.py").write_text(DROPPING)
    monkeypatch.syspath_prepend(tmp_path)
    plan = read_plan(tiny, overrides=("model.name=dropping_network:Odd", "data.name=random:150,6,3,0"))
    with refused("a checkpoint holds tensors only; _extra_state of Odd are none"):
        prepare(plan, StudyFolder(tmp_path / "study"))


def test_it_is_written_no_more_often_than_it_has_to_be(tmp_path, monkeypatch):
    monkeypatch.setattr(unfinished, "EVERY", 60.0)
    now = [0.0]
    monkeypatch.setattr(unfinished.time, "monotonic", lambda: now[0])
    kept = Unfinished(tmp_path / "unfinished.pt", ["a"])
    for seconds, epoch in ((30.0, 1), (61.0, 2), (100.0, 3)):
        now[0] = seconds
        kept.write_if_due(lambda epoch=epoch: {"epoch": epoch})
    assert kept.read() == {"epoch": 2}


def test_a_worker_that_died_goes_on_and_leaves_no_file(tiny, tmp_path, monkeypatch):
    def folder(name: str) -> Any:
        study = StudyFolder(tmp_path / name)
        prepare(read_plan(tiny, overrides=("training.epochs=6",)), study)
        return study.cells()[0]

    plain, disturbed = folder("plain"), folder("disturbed")
    assert compute([plain.cell]) == DONE
    written = Unfinished.write_if_due

    def killed(self: Unfinished, state: Any) -> None:
        written(self, state)
        if state()["epoch"] == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Unfinished, "write_if_due", killed)
        with pytest.raises(KeyboardInterrupt):
            compute([disturbed.cell])
    assert disturbed.unfinished.is_file()
    left = disturbed.unfinished.read_bytes()
    epochs: list[int] = []
    monkeypatch.setattr("spiritlevel.study.live.AtWork.after_epoch", lambda self, epoch, losses: epochs.append(epoch))
    assert compute([disturbed.cell]) == DONE
    assert epochs[0] == 4
    assert not disturbed.unfinished.exists()
    assert Path(plain.checkpoint).read_bytes() == Path(disturbed.checkpoint).read_bytes()
    assert plain.curve.read_text() == disturbed.curve.read_text()
    (disturbed.path / "result.json").unlink()  # killed after its training, before what was left of it was deleted
    disturbed.unfinished.write_bytes(left)
    assert compute([disturbed.cell]) == DONE
    assert not disturbed.unfinished.exists()
