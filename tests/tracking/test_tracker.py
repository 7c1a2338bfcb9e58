"""The tracker: the right numbers, when they were asked for, and a training that does not notice."""

import copy
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spiritlevel as sl
from dense_oracle import dense
from small_training import Training, mlp
from spiritlevel.tracking import schedule
from spiritlevel.tracking.quantities import resolve
from spiritlevel.tracking.schedule import Budget, Clock, Group


@pytest.fixture
def training() -> Training:
    return Training()


MEASURES = ["rho_sum", "hessian_largest_eigenvalue", "critical_sharpness_invariant"]


# --- the training is not changed -------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Dropout, batch norm, and a forward pass that draws from every generator there is."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            x = x + 1e-3 * (torch.rand(()) + random.random() + np.random.rand())  # noqa: NPY002
        return self.body(x)


def trained(track: bool, amp: bool, accumulate: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
    x = torch.randn(64, 6)
    y = x[:, :3].argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3))
    model = Noisy()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    names = [*MEASURES, "critical_sharpness", "preconditioned_largest_eigenvalue", "gradient_norm"]
    tracker = sl.Tracker(model, loader, optimizer=optimizer, measures=names, every=3, samples=40) if track else None
    step = 0
    for _ in range(2):
        for inputs, targets in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                (loss / accumulate).backward()
                if (step + 1) % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                if tracker is not None:
                    tracker.step(step, loss=loss)  # inside autocast, with half-accumulated gradients
            step += 1
    assert tracker is None or (len(tracker.history) == 3 and set(tracker.history[-1].values) == set(names))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.tensor([float(torch.rand(())), random.random(), float(np.random.rand())])  # noqa: NPY002
    return {**state, "random": drawn, "lr": torch.tensor(optimizer.param_groups[0]["lr"])}


@pytest.mark.parametrize(("amp", "accumulate"), [(False, 1), (True, 2)])
def test_the_same_weights_bit_for_bit_with_and_without(amp: bool, accumulate: int) -> None:
    without, with_tracker = (trained(track, amp, accumulate) for track in (False, True))
    for name, value in without.items():
        assert torch.equal(value, with_tracker[name]), name


def test_modes_and_gradients_stay(training) -> None:
    training.run(3)
    training.model.train()
    before = [parameter.grad.clone() for parameter in training.model.parameters()]
    sl.Tracker(training.model, training.data, measures=MEASURES).step(0, force=True)
    assert training.model.training
    assert all(torch.equal(a, b.grad) for a, b in zip(before, training.model.parameters(), strict=True))


# --- the right numbers -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_tracked_values_are_those_of_a_cold_measurement(activation) -> None:
    """At least 95 % within their printed errors; warm starts are why this may fail."""
    training = Training(lambda: mlp(activation))
    names = ["hessian_largest_eigenvalue", "riemannian_nodewise_spectral_norm"]
    names += ["kappa_sum", "rho_sum", "critical_sharpness_gradient", "riemannian_nodewise_gradient_norm"]
    tracker = sl.Tracker(training.model, training.data, measures=names, every=15, samples=60)
    inside: list[bool] = []

    def compare(step: int, loss: torch.Tensor) -> None:
        point = tracker.step(step)
        if point is None:
            return
        cold = sl.measure(training.model, tracker.probe, measures=resolve(names, None), tolerance=1e-4)
        for name in names:
            assert point[name].available
            width = 2 if point[name].error_kind == "standard error" else 1
            distance = abs(point[name].value - cold[name].value)
            inside.append(distance <= width * (point[name].error + cold[name].error) + 1e-6 * abs(cold[name].value))

    training.run(60, compare)
    assert len(inside) == 4 * len(names)
    assert sum(inside) >= 0.95 * len(inside)


def test_twins_along_the_same_functions() -> None:
    """Invariant curves agree to 1e-6, plain ones differ by what the rescaling does to their parts."""
    training = Training(dtype=torch.float64)
    twin = copy.deepcopy(training.model)
    invariant = ["rho_sum", "riemannian_nodewise_spectral_norm", "critical_sharpness_invariant",
                 "riemannian_nodewise_gradient_norm", "normalized_sharpness"]  # fmt: skip
    names = [*invariant, "hessian_trace", "gradient_norm"]
    trackers = [sl.Tracker(each, training.data, measures=names, every=5, samples=50) for each in (training.model, twin)]
    symmetries = sl.find_symmetries(training.model, training.x)
    factors = torch.linspace(-1.5, 1.5, symmetries.dimension).exp()

    def follow(step: int, loss: torch.Tensor) -> None:
        moved = symmetries.rescaling(factors).apply(training.model)
        twin.load_state_dict(moved.state_dict())
        for tracker in trackers:
            tracker.step(step)

    training.run(11, follow)
    plain, rescaled = (tracker.history for tracker in trackers)
    assert len(plain) == 3
    for mine, other in zip(plain, rescaled, strict=True):
        for name in invariant:
            assert other[name].value == pytest.approx(mine[name].value, rel=1e-6), name
        assert other["gradient_norm"].value != pytest.approx(mine["gradient_norm"].value, rel=0.1)
    expected = expected_trace(training.model, trackers[0].probe, symmetries.rescaling(factors).diagonal())
    assert rescaled[-1]["hessian_trace"].value == pytest.approx(expected, rel=1e-6)


def expected_trace(model: nn.Module, probe: Any, diagonal: dict[str, torch.Tensor]) -> float:
    """Σ d_i² H_ii of the model itself, from its dense Hessian."""
    batch = probe.resident
    hessian = dense(model, nn.functional.cross_entropy, batch.inputs, batch.targets).diagonal()
    ones = {name: torch.ones_like(value) for name, value in model.named_parameters()}
    scales = torch.cat([(diagonal.get(name, one) * one).reshape(-1) for name, one in ones.items()])
    return float((scales.square() * hessian).sum())


# --- when ------------------------------------------------------------------------------------------------------------


def steps_of(tracker: sl.Tracker) -> list[int]:
    return [point["step"] for point in tracker.history]


def test_every_so_many_steps_and_the_last_by_force(training) -> None:
    tracker = sl.Tracker(training.model, training.data, measures=["gradient_norm"], every=4)
    training.run(10, lambda step, loss: tracker.step(step, loss=loss, epoch=step / 5))
    assert tracker.step(9, force=True) is tracker.history[-1]
    assert steps_of(tracker) == [0, 4, 8, 9]
    assert [point.reason for point in tracker.history] == ["every"] * 3 + ["forced"]
    assert tracker.history[1]["epoch"] == 0.8
    assert tracker.history[1]["cost"].seconds > 0
    probe = tracker.probe.resident
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(training.model(probe.inputs), probe.targets))
    assert tracker.history[-1]["loss"] == pytest.approx(loss, rel=1e-5)


def test_a_forced_step_measures_only_what_is_missing(training) -> None:
    tracker = sl.Tracker(training.model, training.data, measures=["gradient_norm", "hessian_trace"])
    first = tracker._point(3, ["gradient_norm"], "every", (), None, 1.0)
    tracker._last_step = 3
    joined = tracker.step(3, force=True)
    assert len(tracker.history) == 1
    assert joined["gradient_norm"] is first["gradient_norm"]
    assert "hessian_trace" in joined
    assert joined["epoch"] == 1.0
    assert joined["cost"].passes > first["cost"].passes


def test_at_the_first_crossing_of_a_loss(training) -> None:
    tracker = sl.Tracker(training.model, training.data, measures=["gradient_norm"], at_loss=[0.1, 1, 0.5])
    for step, loss in enumerate([2.0, torch.tensor(0.9), 1.5, 0.04, 0.01, math.nan]):
        tracker.step(step, loss=loss)
    assert steps_of(tracker) == [1, 3]
    assert [point.levels for point in tracker.history] == [(1.0,), (0.5, 0.1)]
    assert tracker.history[0]["train_loss"] == pytest.approx(0.9)
    with pytest.raises(sl.SpiritLevelError, match="at_loss needs the training loss of every step"):
        tracker.step(9)


def test_a_budget_is_shared_and_kept() -> None:
    """Two groups, of which one costs ten times the other, in a training of a thousand seconds."""
    clock, budget = Clock(), Budget(0.1)
    groups = {"cheap": Group(["a"], 1.0, timed=True), "dear": Group(["b"], 10.0, timed=True)}
    times = {"cheap": 0, "dear": 0}
    for second in range(1000):
        clock.trained = float(second)
        for kind in budget.due(clock, groups):
            times[kind] += 1
            groups[kind].paid(groups[kind].cost)
            clock.spent += groups[kind].cost
        assert clock.spent <= 0.1 * clock.trained
    assert times == {"cheap": 50, "dear": 4}


def test_a_cheap_group_does_not_wait_for_the_share_of_a_costly_one() -> None:
    """It takes from the whole budget until it is the other's turn, which comes no later than with shares."""
    clock, budget = Clock(), Budget(0.1)
    groups = {"dear": Group(["b"], 10.0, timed=True), "cheap": Group(["a"], 1.0, timed=True)}
    first: dict[str, int] = {}
    for second in range(1000):
        clock.trained = float(second)
        for kind in budget.due(clock, groups):
            first.setdefault(kind, second)
            groups[kind].paid(groups[kind].cost)
            clock.spent += groups[kind].cost
    assert first == {"cheap": 10, "dear": 190}


@pytest.mark.parametrize("seconds_of_a_loss", [0.001, 0.02])
def test_the_tracker_keeps_to_its_budget(training, monkeypatch, seconds_of_a_loss: float) -> None:
    """By a clock that gives a training step ten milliseconds, a loss of the probe set as said, and all else nothing.

    The first guess is nothing at all, so that what is begun has to be given up when its share is used, more than once.
    """
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    tracker = sl.Tracker(training.model, training.data, measures=["critical_sharpness_gradient"], overhead=0.05)
    original = sl.Problem.loss
    losses = [0]

    def slow(problem: sl.Problem, parameters: Any = None) -> float:
        now[0] += seconds_of_a_loss
        losses[0] += 1
        return original(problem, parameters)

    monkeypatch.setattr(sl.Problem, "loss", slow)
    given_up: list[float] = []
    give_up = Group.gave_up
    monkeypatch.setattr(Group, "gave_up", lambda group, seconds: (given_up.append(seconds), give_up(group, seconds)))
    steps = 120 if seconds_of_a_loss < 0.01 else 1500

    def follow(step: int) -> None:
        now[0] += 0.01
        before = losses[0]
        tracker.step(step)
        # one loss may end after the deadline
        assert tracker.clock.spent <= 0.05 * tracker.clock.trained + seconds_of_a_loss * (1 + (before < losses[0]))

    for step in range(steps):
        follow(step)
    assert len(tracker.history) >= 1
    assert all(point.reason == "budget" for point in tracker.history)
    assert tracker.overhead <= 0.06
    assert len(given_up) >= 2


def test_a_pause_is_no_training() -> None:
    clock, now = Clock(), 0.0
    for _ in range(10):
        clock.enter(now)
        clock.leave(now, now)
        now += 1.0
    clock.enter(now + 3600)
    assert clock.trained == pytest.approx(10.0)


def test_groups_are_measures_that_share_their_work() -> None:
    names = ["rho_sum", "hessian_trace", "hessian_largest_eigenvalue", "riemannian_spectral_norm", "epsilon_sharpness"]
    found = schedule.grouped(resolve([*names, "gradient_norm", "critical_sharpness_gradient"], None), 0.5)
    assert {kind: group.names for kind, group in found.items()} == {
        "statistics": ["rho_sum", "hessian_trace"],
        "operators": ["hessian_largest_eigenvalue", "riemannian_spectral_norm"],
        "epsilon_sharpness": ["epsilon_sharpness"],
        "gradient": ["gradient_norm"],
        "critical": ["critical_sharpness_gradient"],
    }
    assert found["operators"].cost == 45.0


# --- bad input -------------------------------------------------------------------------------------------------------


def test_a_step_counter_that_goes_back(training) -> None:
    tracker = sl.Tracker(training.model, training.data, measures=["gradient_norm"], every=1)
    tracker.step(5)
    for step in (5, 0):
        with pytest.raises(
            sl.SpiritLevelError, match=f"step must grow from call to call: {step} came after 5. Pass a counter"
        ):
            tracker.step(step)
    with pytest.raises(sl.SpiritLevelError, match="step must be a whole number"):
        tracker.step(6.5)  # type: ignore[arg-type]


def test_a_probe_set_that_changes(training) -> None:
    tracker = sl.Tracker(training.model, training.data, measures=["gradient_norm"], every=1, samples=None)
    training.x.zero_()  # the caller's own: the probe set is a copy
    tracker.step(0)
    tracker.probe.resident.inputs[-1, 0] += 1
    with pytest.raises(sl.SpiritLevelError, match="the probe set has changed since the tracker was made"):
        tracker.step(1)


def test_a_model_that_is_replaced(training) -> None:
    tracker = sl.Tracker(training.model, training.data, measures=["gradient_norm"], every=1)
    tracker.step(0)
    tracker.step(1)
    assert tracker.history[-1].notes == ("the weights are those of step 0: is this the model that is trained?",)
    torch.manual_seed(1)  # other weights than those that are replaced
    training.model[0] = nn.Linear(6, 8)
    tracker.step(2)
    assert tracker.history[-1].notes == ("parameters were replaced by others of the same shape: 0.weight, 0.bias",)
    training.model[0] = nn.Linear(6, 9)
    with pytest.raises(sl.SpiritLevelError, match="has another shape or is gone"):
        tracker.step(3)
    with pytest.raises(sl.SpiritLevelError, match="the optimizer holds no parameter of the model"):
        sl.Tracker(nn.Linear(6, 3), training.data, optimizer=training.optimizer)


def test_weights_that_are_nan_in_the_middle_of_a_training(training) -> None:
    tracker = sl.Tracker(training.model, training.data, measures=MEASURES, every=1)
    tracker.step(0)
    good = training.model[0].weight.detach().clone()
    with torch.no_grad():
        training.model[0].weight[0, 0] = math.nan
    point = tracker.step(1)
    assert point.values == {}
    assert "step 1 could not be measured" in point.notes[0]
    assert "0.weight" in point.notes[0]
    with torch.no_grad():
        training.model[0].weight.copy_(good)
    assert set(tracker.step(2).values) == set(MEASURES)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overhead": 0}, "overhead must be a number above 0, at most 1"),
        ({"overhead": 0.05, "every": 3}, "by overhead or by every, not by both"),
        ({"every": 0}, "every must be a whole number of at least 1"),
        ({"at_loss": []}, "at_loss must be finite numbers"),
        ({"at_loss": ["low"]}, "at_loss must be finite numbers"),
        ({"samples": 1}, "samples must be a whole number of at least 2"),
        ({"measures": ["rho_sums"]}, "unknown measure 'rho_sums'; did you mean 'rho_sum'"),
        ({"measures": ["rho_sum", "rho_sum"]}, "each once"),
        ({"measures": []}, "a tracker needs measures"),
        ({"measures": ["critical_sharpness"]}, "critical_sharpness belongs to an optimizer: pass optimizer="),
        ({"optimizer": 3}, "optimizer must be a torch.optim.Optimizer, got int"),
    ],
)
def test_options_that_make_no_sense(training, options: dict[str, Any], words: str) -> None:
    with pytest.raises(sl.SpiritLevelError, match=words):
        sl.Tracker(training.model, training.data, **options)


def test_an_interruption_reaches_the_training(training, monkeypatch) -> None:
    """Ctrl-C in a measurement keeps what is finished, and ends the training as it would anywhere else."""
    tracker = sl.Tracker(training.model, training.data, measures=["gradient_norm", "hessian_trace"], every=1)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("spiritlevel.measuring.evidence.sweep_within", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tracker.step(0)
    assert list(tracker.history[-1].values) == ["gradient_norm"]


# --- probe sets ------------------------------------------------------------------------------------------------------


def test_a_probe_set_is_chosen_by_its_seed_from_anything(training) -> None:
    dataset = TensorDataset(*training.data)
    loader = DataLoader(dataset, batch_size=7, shuffle=True)
    probes = [
        sl.Tracker(training.model, data, measures=["gradient_norm"], samples=20, seed=seed).probe
        for data, seed in ((loader, 0), (dataset, 0), (loader, 1))
    ]
    assert [probe.samples for probe in probes] == [20, 20, 20]
    assert torch.equal(probes[0].resident.inputs, probes[1].resident.inputs)
    assert not torch.equal(probes[0].resident.inputs, probes[2].resident.inputs)
    everything = sl.Tracker(training.model, [training.data], measures=["gradient_norm"], samples=None).probe
    assert everything.samples == 120


def test_reading_a_loader_does_not_move_its_generator(training) -> None:
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(TensorDataset(*training.data), batch_size=7, shuffle=True, generator=generator)
    before, ours = generator.get_state(), torch.get_rng_state()
    assert sl.Tracker(training.model, loader, measures=["gradient_norm"], samples=None).probe.samples == 120
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), ours)


def test_a_wrapper_around_the_model_is_seen_through(training) -> None:
    wrapped = nn.DataParallel(training.model)
    tracker = sl.Tracker(wrapped, training.data, measures=["gradient_norm"], optimizer=training.optimizer, every=1)
    training.run(2, lambda step, loss: tracker.step(step))
    assert [point.notes for point in tracker.history] == [("measured the module beneath DataParallel",)] * 2
    assert tracker.history[0]["gradient_norm"].value != tracker.history[1]["gradient_norm"].value


def test_a_stream_gives_its_first_batches(training) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from zip(*training.data, strict=True)

    probe = sl.Tracker(
        training.model, DataLoader(Stream(), batch_size=10), measures=["gradient_norm"], samples=30
    ).probe
    assert probe.samples == 30
    assert torch.equal(probe.resident.inputs, training.x[:30])


def test_a_loss_that_calls_the_model_keeps_whole_batches(training) -> None:
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"]), len(batch["y"])

    rows = [{"x": x, "y": y} for x, y in zip(*training.data, strict=True)]
    loader = DataLoader(rows, batch_size=8, shuffle=True)  # type: ignore[arg-type]
    tracker = sl.Tracker(training.model, loader, loss, measures=["hessian_largest_eigenvalue"], samples=32)
    point = tracker.step(0, force=True)
    assert tracker.probe.samples == 32
    whole = {key: torch.cat([batch.inputs[key] for batch in tracker.probe]) for key in ("x", "y")}
    hessian = dense(training.model, nn.functional.cross_entropy, whole["x"], whole["y"])
    assert point["hessian_largest_eigenvalue"].value == pytest.approx(
        float(torch.linalg.eigvalsh(hessian)[-1]), rel=1e-3
    )
