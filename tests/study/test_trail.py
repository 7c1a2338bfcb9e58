"""Going back to the step where a training came to a level."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spiritlevel.study import along, evaluation, trail
from spiritlevel.study.samples import load_samples
from spiritlevel.study.settings import CellConfig
from spiritlevel.study.trail import BELOW, PASSES, Place, Trail, first_crossing
from spiritlevel.study.train import build, train

LEVELS = (1.0, 0.3)


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def weights(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_network_is_what_it_was_inside_and_what_it_is_afterwards() -> None:
    network, before = model(), model(1)
    now, then = weights(network), weights(before)
    path = Trail(network)
    with path.at(Place(1, then)) as there:
        assert same(weights(there), then)
    assert same(weights(network), now)
    with contextlib.suppress(KeyboardInterrupt), path.at(Place(1, then)):
        raise KeyboardInterrupt
    assert same(weights(network), now)


def test_copies_are_a_hundredth_of_the_way_apart_and_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Trail(model())
    for step in range(1, 1001):
        path.follow(step)
    steps = [place.step for place in path.places]
    assert steps[:100] == list(range(1, 101))
    assert 990 < steps[-1] <= 1000
    assert len(steps) < 100 + 100 * 2.4
    path.forget(500)
    assert min(place.step for place in path.places) > 500
    monkeypatch.setattr(trail, "MOST_BYTES", 1200)  # ten copies of the thirty numbers
    path.forget(1000)
    for step in range(1001, 5001):
        path.follow(step)
        assert len(path.places) <= 10
    assert path.places[-1].step > 3500


@pytest.mark.parametrize("factor", [0.7, 0.98, 1.0, 1.3])
def test_the_first_place_across_a_level_is_found_with_few_passes_though_few_samples_are_off(factor: float) -> None:
    places = [Place(step, {}) for step in range(100, 151)]
    passes: list[int] = []

    def loss(place: Place) -> float:
        return 0.99**place.step

    def whole(place: Place) -> tuple[float, float]:
        passes.append(place.step)
        return loss(place), 1.0

    level = loss(places[20])
    found = first_crossing(places, level, lambda place: factor * loss(place), whole)
    assert len(passes) <= PASSES
    if factor == 0.7:  # so far off that the level seems crossed from the beginning
        assert found is None
    else:
        assert found is not None
        place, outcome = found
        assert outcome == (loss(place), 1.0)
        assert 0 <= place.step - 120 <= 1 + math.log(BELOW / factor, 0.99)


def test_a_level_that_is_crossed_at_the_end_alone_is_found_there() -> None:
    places = [Place(step, {}) for step in range(5)]
    found = first_crossing(places, 0.5, lambda _: 1.0, lambda place: (0.4 if place.step == 4 else 1.0, 0.0))
    assert found is not None
    assert found[0].step == 4


def config(at_loss: tuple[float, ...], **training: Any) -> CellConfig:
    settings = {"optimizer": "adam", "learning_rate": 0.01, "batch_size": 20, "epochs": 5, **training}
    data = {"name": "digits", "train_samples": 600, "test_samples": 100}
    sections = {"data": data, "model": {"name": "mlp:24"}, "training": settings, "measure": {"at_loss": at_loss}}
    return CellConfig.model_validate({**sections, "seed": 0})


@pytest.mark.parametrize("seeds", [1, 3])
def test_levels_of_many_samples_are_kept_near_their_crossing(seeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look sees a step in nine: without going back 0.84 is kept for 1 and 0.243 for 0.3."""
    monkeypatch.setattr(along, "PAUSE", 0.3)
    for name, value in (("FEW", 100), ("HARDEST", 30), ("PROBED", 60)):
        monkeypatch.setattr(evaluation, name, value)
    cells = [config(LEVELS).model_copy(update={"seed": seed}) for seed in range(seeds)]
    plain = train([config(()).model_copy(update={"seed": seed}) for seed in range(seeds)], load_samples(cells[0].data))
    samples = load_samples(cells[0].data)
    for cell, found, alone in zip(cells, train(cells, samples), plain, strict=True):
        assert same(weights(found.model), weights(alone.model))
        assert [kept.mark.level for kept in found.along] == list(LEVELS)
        for kept in found.along:
            assert 0.85 * kept.mark.level < kept.scores.train_loss <= kept.mark.level, kept.mark
            network = build(cell, samples.train).eval()
            network.load_state_dict(dict(kept.weights))
            loss, accuracy = evaluation.evaluate(network, samples.train.x, samples.train.y)
            assert (loss, accuracy) == pytest.approx((kept.scores.train_loss, kept.scores.train_accuracy), rel=1e-5)
