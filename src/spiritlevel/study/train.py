"""Training one cell: data resident as tensors, batches by index, one seed for everything random."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spiritlevel.study.along import Kept, Mark, Scores, Watch, kept_at, kept_from_dict, kept_to_dict
from spiritlevel.study.compiling import how
from spiritlevel.study.evaluation import Evaluation, gradient_norm
from spiritlevel.study.learners import Alone, Learner, Together
from spiritlevel.study.pooled_networks import PooledNetworks, is_pooled_network, outputs
from spiritlevel.study.samples import Samples
from spiritlevel.study.settings import CellConfig, TrainingSection
from spiritlevel.study.trail import Place, Trail, first_crossing
from spiritlevel.study.unfinished import Unfinished
from spiritlevel.subjects.data import Dataset
from spiritlevel.subjects.networks import build_model, is_own_model
from spiritlevel.subjects.networks.dense import FullyConnected
from spiritlevel.subjects.seeds import seed_for

# Measured: six to sixteen fully connected networks gain from training together while weights × batch size is below this.
LARGEST_SHARED_STEP = 6_000_000
FEWEST_SHARED, MOST_SHARED = 6, 16
# Measured on LeNets: networks that differ in their starting weights only gain from sharing their batches up to this size.
LARGEST_SHARED_BATCH = 128


@dataclass(frozen=True)
class Epoch:
    """One row of a training curve, measured over whole data sets after the epoch.

    Where data are many, not every epoch that a study asks for has a row: evaluations take a small share of a training. The
    test data decide nothing on the way, so where they are many they are not looked at for every row.
    """

    epoch: int
    train_loss: float
    train_accuracy: float
    test_loss: float | None
    test_accuracy: float | None
    learning_rate: float


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained network with how it got there.

    `reached` says whether it met what the study requires of it; `stop_reason` is "stop rule", "epochs" or "diverged".
    `computed_with` is with how many threads and which instructions: several where a training that was stopped went on with others.
    """

    model: nn.Module
    curve: tuple[Epoch, ...]
    reached: bool
    stop_reason: str
    steps: int
    seconds: float
    gradient_norm: float
    ensemble: int
    computed_with: tuple[str, ...]
    along: tuple[Kept, ...] = ()


def build(config: CellConfig, data: Dataset) -> nn.Module:
    """The network of a cell with its starting weights."""
    section = config.model
    return build_model(
        section.name,
        input_shape=data.input_shape,
        classes=data.classes,
        width=section.width,
        init=section.initialization,
        seed=config.seed,
    )


def ensemble_size(config: CellConfig, model: nn.Module, seeds: int) -> int:
    """How many of its seeds to train together: as the study says, else where it was measured to be faster.

    Seeds are then divided evenly, because few networks together are slower than alone.
    """
    if config.training.ensemble is not None:
        return config.training.ensemble
    weights = sum(parameter.numel() for parameter in model.parameters())
    small = isinstance(model, FullyConnected) and weights * config.training.batch_size <= LARGEST_SHARED_STEP
    if not small or seeds < FEWEST_SHARED:
        return 1
    return math.ceil(seeds / math.ceil(seeds / MOST_SHARED))


def shares_batches(config: CellConfig, model: nn.Module) -> bool:
    """Whether networks of other starting weights are trained with this one, on the same batches, because that is faster.

    Only of the built-in LeNets and AlexNets it is known what they compute.
    """
    small = config.training.batch_size <= LARGEST_SHARED_BATCH
    return small and _is_pooled_network(config, model) and config.training.ensemble is None


def _is_pooled_network(config: CellConfig, model: nn.Module) -> bool:
    return is_pooled_network(model) and not is_own_model(config.model.name)


# Told after an epoch that is evaluated: which, and the train losses of those still in training, by position.
AfterEpoch = Callable[[int, Mapping[int, float]], None]


def train(
    configs: Sequence[CellConfig],
    samples: Samples,
    after_epoch: AfterEpoch | None = None,
    unfinished: Unfinished | None = None,
) -> list[Trained]:
    """Train the cells, which may differ in their seed only, or LeNets and AlexNets in how they start only; more than one as an ensemble.

    Repeatable bit for bit with the same cells, machine and number of threads, also where a training that was stopped goes on from
    what is in `unfinished`. The global generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        course = _course(configs, samples, unfinished)
        while course.going:
            course.train_epoch(after_epoch)
            if unfinished is not None and course.going:
                unfinished.write_if_due(course.state_dict)
        return [run.result(len(configs), course.computed_with) for run in course.runs]


def _course(configs: Sequence[CellConfig], samples: Samples, unfinished: Unfinished | None) -> _Course:
    """The training where it was stopped, or at its beginning."""
    state = None if unfinished is None else unfinished.read()
    if unfinished is not None and state is not None:
        course = _Course(configs, samples)
        try:
            course.load_state_dict(state)
        except Exception as error:  # of a version between two others; begun anew it does no harm
            unfinished.refuse(f"does not fit ({type(error).__name__}: {error})")
        else:
            return course
    return _Course(configs, samples)


class _Course:
    """Networks that are trained as one: after how many epochs they are, and which of them are still going, by position."""

    def __init__(self, configs: Sequence[CellConfig], samples: Samples) -> None:
        torch.manual_seed(seed_for(configs[0].seed, "network"))  # for networks that draw, such as dropout
        self.training, self.at_epochs = configs[0].training, configs[0].measure.at_epochs
        self.runs = [_Run(config, samples) for config in configs]
        self.learner = _learner(configs, self.runs)
        self.going = list(range(len(self.runs)))
        self.epoch = 0
        self.computed_with = [_computing(self.learner)]

    def train_epoch(self, after_epoch: AfterEpoch | None) -> None:
        """One more epoch; networks that have arrived, or may not go on, end with it."""
        self.epoch += 1
        epoch, training = self.epoch, self.training
        runs = [self.runs[position] for position in self.going]
        rate = _learning_rate(training, epoch)
        self.learner.set_learning_rate(rate)
        _train_epoch(self.learner, runs, training.batch_size)
        if epoch % training.evaluate_every and epoch < training.epochs:
            if epoch in self.at_epochs:
                for run in runs:
                    run.look(epoch)
            return
        still = [position for position, run in enumerate(runs) if not run.ends_at(epoch, rate)]
        if after_epoch is not None:
            after_epoch(epoch, {place: run.train_loss(epoch) for place, run in zip(self.going, runs, strict=True)})
        self._keep(still)

    def _keep(self, still: list[int]) -> None:
        """Go on with these of the networks that are going."""
        if still and len(still) < len(self.going):
            self.learner.keep(still)
        self.going = [self.going[position] for position in still]

    def state_dict(self) -> dict[str, Any]:
        """How far the training is, as plain numbers and tensors."""
        return {
            "epoch": self.epoch,
            "going": self.going,
            "computed_with": self.computed_with,
            "drawing": torch.get_rng_state(),
            "optimizer": self.learner.optimizer.state_dict(),
            "runs": [run.state_dict() for run in self.runs],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another course of the same cells was."""
        if ("convolutions" in state["computed_with"][-1]) != isinstance(self.learner, PooledNetworks):
            raise ValueError("the optimizer had its numbers in another order")
        for run, entry in zip(self.runs, state["runs"], strict=True):
            run.load_state_dict(entry)
        self._keep(state["going"])
        self.learner.optimizer.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]
        self.computed_with = list(dict.fromkeys([*state["computed_with"], *self.computed_with]))
        torch.set_rng_state(state["drawing"])


def _computing(learner: Learner) -> str:
    """What the last places of a training depend on besides its settings."""
    plain = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    return f"{plain}, convolutions {how()}" if isinstance(learner, PooledNetworks) else plain


def _learner(configs: Sequence[CellConfig], runs: Sequence[_Run]) -> Learner:
    training = configs[0].training
    same_batches = len({config.seed for config in configs}) == 1
    if same_batches and _is_pooled_network(configs[0], runs[0].model):
        return PooledNetworks(runs, training)
    return Alone(runs[0], training) if len(runs) == 1 else Together(runs, training)


def _learning_rate(training: TrainingSection, epoch: int) -> float:
    if training.schedule == "constant":
        halvings = (epoch - 1) // training.halve_every if training.halve_every else 0
        return training.learning_rate * 0.5**halvings
    return training.learning_rate * (1 + math.cos(math.pi * (epoch - 1) / training.epochs)) / 2


def _train_epoch(learner: Learner, runs: Sequence[_Run], batch_size: int) -> None:
    """One pass over the training data in an order of each run's own; the last batch may be smaller."""
    orders = torch.stack([run.order() for run in runs])
    for run in runs:
        run.model.train()
    for batch in torch.split(orders, batch_size, dim=1):
        losses = learner.step(batch)
        for run, loss in zip(runs, losses.tolist(), strict=True):
            run.took_step(loss)


class _Run:
    """One network on its way: its data, its order of batches, its curve."""

    _PLAIN = ("tested_at", "seconds", "stop_reason", "gradient_norm")

    def __init__(self, config: CellConfig, samples: Samples) -> None:
        self.training, self.test = config.training, samples.test
        self.model = build(config, samples.train)
        self.x = samples.train.x
        self.y = samples.labels(config)
        self.generator = torch.Generator().manual_seed(seed_for(config.seed, "batches"))
        self.curve: list[Epoch] = []
        self.watch = Watch(config.measure, len(self.x), config.training.batch_size)
        known = _is_pooled_network(config, self.model)
        self.evaluation = Evaluation(self.x, self.y, outputs) if known else Evaluation(self.x, self.y)
        self.trail = Trail(self.model)
        self.along: list[Kept] = []
        self.tested_at = 0
        self.started = time.perf_counter()
        self.seconds = 0.0
        self.stop_reason = "epochs"
        self.gradient_norm: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """How far it is, as plain numbers and tensors."""
        weights = self.trail.present(self.watch.steps).weights
        return {
            "weights": weights,
            "buffers": {name: value for name, value in self.model.named_buffers() if name not in weights},
            "batches": self.generator.get_state(),
            "curve": [asdict(epoch) for epoch in self.curve],
            "watch": self.watch.state_dict(),
            "evaluation": self.evaluation.state_dict(),
            "trail": self.trail.state_dict(),
            "along": [kept_to_dict(kept) for kept in self.along],
            "elapsed": time.perf_counter() - self.started,
            **{name: getattr(self, name) for name in self._PLAIN},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run of the same cell was."""
        self.model.load_state_dict(state["weights"])
        for name, value in self.model.named_buffers():
            if name in state["buffers"]:
                value.copy_(state["buffers"][name])
        self.generator.set_state(state["batches"])
        self.curve = [Epoch(**epoch) for epoch in state["curve"]]
        self.watch.load_state_dict(state["watch"])
        self.evaluation.load_state_dict(state["evaluation"])
        self.trail.load_state_dict(state["trail"])
        self.along = [kept_from_dict(kept) for kept in state["along"]]
        for name in self._PLAIN:
            setattr(self, name, state[name])
        self.started = time.perf_counter() - state["elapsed"]

    def order(self) -> Tensor:
        """The samples in random order."""
        return torch.randperm(len(self.x), generator=self.generator)

    def took_step(self, batch_loss: float) -> None:
        """Notice that a step was made on a batch that had this loss before it."""
        suspected = self.watch.suspects(batch_loss)
        if self.evaluation.many and self.watch.levels:
            self.trail.follow(self.watch.steps)
        if self.watch.wants_a_look() if self.evaluation.many else suspected:
            self.model.eval()
            likely = not self.evaluation.many or self.watch.looked(self.evaluation.about(self.model))
            if likely and not (self._go_back() if self.evaluation.many else self.look()[0]):
                self.watch.missed()
            self.trail.forget(self.watch.steps)
            self.model.train()

    def _go_back(self) -> list[Mark]:
        """Keep the weights of the first of the last steps that came to the next level, and to those after it."""
        places = [*self.trail.places, self.trail.present(self.watch.steps)]
        found: list[Mark] = []
        while self.watch.levels and (not found or self._about(places[-1]) <= self.watch.levels[0]):
            crossing = first_crossing(places, self.watch.levels[0], self._about, self._whole)
            if crossing is None:
                break
            place, outcome = crossing
            marks = self.watch.passed(outcome[0])
            self._keep(marks, place, outcome)
            found += marks
            places = [later for later in places if later.step >= place.step]
        return found

    def _about(self, place: Place) -> float:
        with self.trail.at(place) as model:
            return self.evaluation.about(model)

    def _whole(self, place: Place) -> tuple[float, float]:
        with self.trail.at(place) as model:
            return self.evaluation.whole(model)

    def _keep(self, marks: list[Mark], place: Place, outcome: tuple[float, float]) -> None:
        with self.trail.at(place) as model:
            scores = Scores(*outcome, *self.evaluation.other(model, self.test.x, self.test.y))
        self.along += kept_at(marks, place, self.watch, scores)

    def look(self, epoch: int | None = None) -> tuple[list[Mark], tuple[float, float]]:
        """Evaluate the network as it is, and keep its weights if it has come to a mark; `epoch` if one has just ended."""
        self.model.eval()
        outcome = self.evaluation.whole(self.model)
        crossed = self.watch.levels and outcome[0] <= self.watch.levels[0]
        before = self._go_back() if crossed and self.trail.places else []
        marks = self.watch.passed(outcome[0], epoch)
        if marks:
            self._keep(marks, self.trail.present(self.watch.steps), outcome)
        return [*before, *marks], outcome

    def train_loss(self, epoch: int) -> float:
        """The train loss after this epoch, or about what it is where the epoch has no row in the curve."""
        known = self.curve and self.curve[-1].epoch == epoch
        return self.curve[-1].train_loss if known else self.watch.mean

    def _worth_a_pass(self, epoch: int) -> bool:
        """Whether to evaluate the network after an epoch: if that is cheap or affordable, or if it may decide something."""
        always = epoch == self.training.epochs or epoch in self.watch.epochs or not self.evaluation.many
        trained = self.watch.steps * self.training.batch_size
        if always or self.evaluation.affords(trained, len(self.test.x)):
            return True
        diverging, stop = not math.isfinite(self.watch.mean), self.training.stop
        if diverging or stop is None:
            return diverging
        self.model.eval()
        return self.evaluation.may_end(self.model, lambda loss, accuracy: stop.holds(loss, accuracy, 0.0))

    def ends_at(self, epoch: int, rate: float) -> bool:
        """Look at the network after an epoch if that is worth a pass; whether its training ends here."""
        if not self._worth_a_pass(epoch):
            return False
        _, (loss, accuracy) = self.look(epoch)
        stop = self.training.stop
        if stop is not None and stop.gradient_norm is not None:
            self.gradient_norm = gradient_norm(self.model, self.x, self.y)
        if not math.isfinite(loss):
            self.stop_reason = "diverged"
        elif stop is not None and stop.holds(loss, accuracy, self.gradient_norm):
            self.stop_reason = "stop rule"
        ends = self.stop_reason != "epochs" or epoch == self.training.epochs
        test_loss, test_accuracy = self._on_test_data(epoch, ends)
        self.curve.append(Epoch(epoch, loss, accuracy, test_loss, test_accuracy, rate))
        self.seconds = time.perf_counter() - self.started
        return ends

    def _on_test_data(self, epoch: int, ends: bool) -> tuple[float, float] | tuple[None, None]:
        """Loss and accuracy on the test data: at the end, and whenever training has seen as many samples as they are."""
        if not ends and (epoch - self.tested_at) * len(self.x) < len(self.test.x):
            return None, None
        self.tested_at = epoch
        return self.evaluation.other(self.model, self.test.x, self.test.y)

    def result(self, ensemble: int, computed_with: Sequence[str]) -> Trained:
        """The network as it ended, in eval mode."""
        self.model.eval()
        for parameter in self.model.parameters():
            parameter.grad = None
        norm = gradient_norm(self.model, self.x, self.y)
        last = self.curve[-1]
        reached = arrived(self.training, self.stop_reason, last.train_loss, last.train_accuracy, norm)
        return Trained(
            self.model,
            tuple(self.curve),
            reached,
            self.stop_reason,
            self.watch.steps,
            self.seconds,
            norm,
            ensemble,
            tuple(computed_with),
            tuple(self.along),
        )


def arrived(training: TrainingSection, stop_reason: str, loss: float, accuracy: float, gradient_norm: float) -> bool:
    """Whether a network that ended like this is what the study requires."""
    rule = training.require or training.stop
    return stop_reason != "diverged" and (rule is None or rule.holds(loss, accuracy, gradient_norm))
