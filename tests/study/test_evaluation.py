"""Evaluations take a small share of a training where data are many, and decide the same."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spiritlevel.study import evaluation
from spiritlevel.study.evaluation import FORWARD, Evaluation, evaluate
from spiritlevel.study.samples import load_samples
from spiritlevel.study.settings import CellConfig
from spiritlevel.study.train import Trained, build, train

SAMPLES = 600
STOP = {"train_accuracy": 1.0, "train_loss": 0.02}


def config(epochs: int, at_loss: tuple[float, ...] = (), **training: Any) -> CellConfig:
    settings = {"optimizer": "adam", "learning_rate": 0.003, "batch_size": 20, "epochs": epochs, **training}
    data = {"name": "digits", "train_samples": SAMPLES, "test_samples": 100}
    sections = {"data": data, "model": {"name": "mlp:24"}, "training": settings, "measure": {"at_loss": at_loss}}
    return CellConfig.model_validate({**sections, "seed": 0})


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six hundred samples count as many, and the same shares of them as of 60,000 are looked at."""
    for name, value in (("FEW", 100), ("HARDEST", 10), ("PROBED", 10)):
        monkeypatch.setattr(evaluation, name, value)


def counted(cell: CellConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Trained, Counter[int]]:
    """The network, and how often how many samples were looked at."""
    looked: Counter[int] = Counter()
    original = evaluation.each_loss

    def counting(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        looked[len(x)] += 1
        return original(model, x, y)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "each_loss", counting)
        (found,) = train([cell], load_samples(cell.data))
    return found, looked


def weights(found: Trained) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in found.model.parameters()])


def seen(looked: Counter[int]) -> int:
    return sum(size * times for size, times in looked.items())


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(("evaluate_every", "stop"), [(1, None), (5, None), (1, {"train_loss": 1e-9})])
def test_evaluations_cost_less_than_a_twentieth_of_a_training(
    evaluate_every: int, stop: dict[str, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = config(200, (1.0, 0.1, 0.03), batch_size=60, evaluate_every=evaluate_every, stop=stop)
    found, looked = counted(cell, monkeypatch)
    assert [kept.mark.level for kept in found.along] == [1.0, 0.1, 0.03]
    assert FORWARD * seen(looked) < 0.05 * 200 * SAMPLES
    assert len(found.curve) >= 2
    assert found.curve[-1].epoch == 200


@pytest.mark.usefixtures("many")
def test_training_ends_at_the_same_epoch_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = config(200, stop=STOP)
    found, looked = counted(cell, monkeypatch)
    monkeypatch.setattr(evaluation, "FEW", 10**9)
    always, passes = counted(cell, monkeypatch)
    assert found.stop_reason == always.stop_reason == "stop rule"
    assert 5 < found.steps == always.steps < 200 * 30
    assert torch.equal(weights(found), weights(always))
    assert found.curve[-1] == always.curve[-1]
    assert set(found.curve) <= set(always.curve)
    assert seen(looked) < seen(passes) / 3


@pytest.mark.usefixtures("many")
def test_a_training_that_diverges_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = counted(config(60, optimizer="sgd", learning_rate=1e30), monkeypatch)
    assert (found.stop_reason, found.curve[-1].epoch) == ("diverged", 1)


class Bounds:
    """A rule that holds up to a loss, and what it was asked."""

    def __init__(self, most: float = math.inf) -> None:
        self.most = most
        self.losses: list[float] = []
        self.accuracies: list[float] = []

    def __call__(self, loss: float, accuracy: float) -> bool:
        self.losses.append(loss)
        self.accuracies.append(accuracy)
        return loss <= self.most


@pytest.mark.usefixtures("many")
def test_hard_samples_are_looked_at_until_they_decide() -> None:
    """What may hold by the samples seen is asked portion by portion: bounds that come nearer to the loss and accuracy of all."""
    cell = config(1)
    samples = load_samples(cell.data)
    model = build(cell, samples.train)
    eye = Evaluation(samples.train.x, samples.train.y)
    assert eye.may_end(model, lambda *_: False)  # nothing is known before the first pass
    assert eye.whole(model) == evaluate(model, samples.train.x, samples.train.y)
    for _ in range(5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.3)
        loss, accuracy = evaluate(model, samples.train.x, samples.train.y)
        bounds, before = Bounds(), eye.samples
        assert eye.may_end(model, bounds)
        assert eye.samples - before == SAMPLES / 4
        assert len(bounds.losses) == SAMPLES / 4 / 10
        assert 0 < bounds.losses[0] < bounds.losses[-1] <= loss
        assert accuracy <= bounds.accuracies[-1] <= bounds.accuracies[0] < 1
        before = eye.samples
        assert not eye.may_end(model, Bounds(bounds.losses[2]))
        assert eye.samples - before == 40  # the fourth portion decides
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    assert eye.may_end(model, lambda *_: False)  # a look at all samples says that training diverged


@pytest.mark.usefixtures("many")
def test_a_stop_far_below_the_loss_takes_few_passes_over_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten samples of six hundred cannot rule out a mean of 0.3, however hard they are."""
    found, looked = counted(config(40, optimizer="sgd", learning_rate=0.001, stop={"train_loss": 0.3}), monkeypatch)
    assert (found.stop_reason, found.curve[-1].epoch) == ("epochs", 40)
    assert looked[SAMPLES] <= 4
    assert seen(looked) < 40 * SAMPLES / 3


@pytest.mark.usefixtures("many")
def test_few_samples_say_about_what_loss_all_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ninety samples, a third of them the hardest of a pass twenty steps ago, against all six hundred."""
    monkeypatch.setattr(evaluation, "HARDEST", 30)
    monkeypatch.setattr(evaluation, "PROBED", 60)
    samples = load_samples(config(1).data)
    model, x, y = build(config(1), samples.train), samples.train.x, samples.train.y
    optimizer, eye, ratios = torch.optim.Adam(model.parameters(), 3e-3), Evaluation(x, y), []
    for step in range(800):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[step % 10 :: 10]), y[step % 10 :: 10]).backward()
        optimizer.step()
        if step % 80 == 0:
            assert eye.whole(model) == evaluate(model, x, y)
            assert eye.about(model) == pytest.approx(evaluate(model, x, y)[0], rel=1e-5)
        if step % 80 == 20:
            ratios.append(eye.about(model) / evaluate(model, x, y)[0])
    assert evaluate(model, x, y)[0] < 0.05
    assert max(abs(ratio - 1) for ratio in ratios) < 0.25, ratios
    assert eye.samples == 10 * (SAMPLES + 2 * 90)


def test_few_data_are_looked_at_whenever_a_study_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    found, looked = counted(config(6), monkeypatch)
    assert [row.epoch for row in found.curve] == [1, 2, 3, 4, 5, 6]
    assert looked == {SAMPLES: 6, 100: 6}
