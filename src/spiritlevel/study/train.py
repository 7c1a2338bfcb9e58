"""Training one cell: data resident as tensors, batches by index, one seed for everything random.

Several seeds of a cell can be trained as one vectorized network (`torch.func.stack_module_state`, `vmap`), which is
faster where a step is so small that its time is overhead.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.settings import CellConfig, DataSection, TrainingSection
from spiritlevel.subjects.data import SOURCES, Dataset, load_data
from spiritlevel.subjects.networks import build_model
from spiritlevel.subjects.networks.dense import FullyConnected

# Samples in one forward pass where nothing is learned: large enough for speed, small enough for any network.
CHUNK = 1000
# Measured: six to sixteen fully connected networks gain from training together while weights × batch size is below this.
LARGEST_SHARED_STEP = 6_000_000
FEWEST_SHARED, MOST_SHARED = 6, 16
# Channels of a convolution up to which it gains from kernels with channels last.
THIN = 32
# Of Adam, as torch and the papers have them.
BETAS, EPSILON = (0.9, 0.999), 1e-8


@dataclass(frozen=True, eq=False)
class Samples:
    """Training and test data of a cell, before label noise."""

    train: Dataset
    test: Dataset

    @property
    def fingerprint(self) -> str:
        """One fingerprint of both parts."""
        return hashlib.sha256(f"{self.train.fingerprint} {self.test.fingerprint}".encode()).hexdigest()


@dataclass(frozen=True)
class Epoch:
    """One row of a training curve, measured over whole data sets after the epoch.

    The test data decide nothing on the way, so where they are many they are not looked at after every epoch.
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
    """

    model: nn.Module
    curve: tuple[Epoch, ...]
    reached: bool
    stop_reason: str
    steps: int
    seconds: float
    gradient_norm: float
    ensemble: int


def load_samples(section: DataSection) -> Samples:
    """Both parts of the data set of a cell."""
    source = SOURCES.get(section.name)
    if source is not None and source.argument == "FOLDER" and section.folder is None:
        raise SpiritLevelError(
            f"{section.name} is read from a folder: say which, by --data-folder or by `folder` in [data]"
        )
    train = load_data(section.spec, split="train", samples=section.train_samples)
    test = load_data(section.spec, split="test", samples=section.test_samples)
    if train.y.is_floating_point():
        raise SpiritLevelError(f"studies train classifiers: {section.spec} has real targets where labels are needed")
    return Samples(train, test)


def seed_for(seed: int, purpose: str) -> int:
    """A seed of its own for each random part of a cell, so that none repeats the draws of another."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:7])


def noisy_labels(y: Tensor, classes: int, ratio: float, seed: int) -> Tensor:
    """Labels of which the share `ratio`, chosen at random, is drawn anew from all classes (tsuzuku2019)."""
    generator = torch.Generator().manual_seed(seed_for(seed, "labels"))
    chosen = torch.randperm(len(y), generator=generator)[: round(ratio * len(y))]
    noisy = y.clone()
    noisy[chosen] = torch.randint(classes, (len(chosen),), generator=generator)
    return noisy


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


def train(configs: Sequence[CellConfig], samples: Samples) -> list[Trained]:
    """Train the cells, which may differ in their seed only; more than one are trained as an ensemble.

    Repeatable bit for bit with the same cells, machine and number of threads. The global generator is left as it was.
    """
    training = configs[0].training
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(configs[0].seed, "network"))  # for networks that draw, such as dropout
        runs = [_Run(config, samples) for config in configs]
        learner: _Learner = _Alone(runs[0], training) if len(runs) == 1 else _Together(runs, training)
        going = list(runs)
        for epoch in range(1, training.epochs + 1):
            rate = _learning_rate(training, epoch)
            learner.set_learning_rate(rate)
            _train_epoch(learner, going, training.batch_size)
            if epoch % training.evaluate_every and epoch < training.epochs:
                continue
            still = [position for position, run in enumerate(going) if not run.ends_at(epoch, rate)]
            if not still:
                break
            if len(still) < len(going):
                learner.keep(still)
                going = [going[position] for position in still]
        return [run.result(len(configs)) for run in runs]


def _learning_rate(training: TrainingSection, epoch: int) -> float:
    if training.schedule == "constant":
        return training.learning_rate
    return training.learning_rate * (1 + math.cos(math.pi * (epoch - 1) / training.epochs)) / 2


def _train_epoch(learner: _Learner, runs: Sequence[_Run], batch_size: int) -> None:
    """One pass over the training data in an order of each run's own; the last batch may be smaller."""
    orders = torch.stack([run.order() for run in runs])
    for run in runs:
        run.model.train()
    for batch in torch.split(orders, batch_size, dim=1):
        learner.step(batch)
    for run in runs:
        run.steps += -(-orders.shape[1] // batch_size)


class _Run:
    """One network on its way: its data, its order of batches, its curve."""

    def __init__(self, config: CellConfig, samples: Samples) -> None:
        self.training, self.test = config.training, samples.test
        self.model = build(config, samples.train)
        self.x = samples.train.x
        self.y = noisy_labels(samples.train.y, samples.train.classes, config.data.label_noise, config.seed)
        self.generator = torch.Generator().manual_seed(seed_for(config.seed, "batches"))
        self.curve: list[Epoch] = []
        self.steps = self.tested_at = 0
        self.started = time.perf_counter()
        self.seconds = 0.0
        self.stop_reason = "epochs"
        self.gradient_norm: float | None = None

    def order(self) -> Tensor:
        """The samples in random order."""
        return torch.randperm(len(self.x), generator=self.generator)

    def ends_at(self, epoch: int, rate: float) -> bool:
        """Measure the network after an epoch; whether its training ends here."""
        self.model.eval()
        loss, accuracy = evaluate(self.model, self.x, self.y)
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
        return evaluate(self.model, self.test.x, self.test.y)

    def result(self, ensemble: int) -> Trained:
        """The network as it ended, in eval mode."""
        self.model.eval()
        for parameter in self.model.parameters():
            parameter.grad = None
        norm = gradient_norm(self.model, self.x, self.y)
        last = self.curve[-1]
        reached = arrived(self.training, self.stop_reason, last.train_loss, last.train_accuracy, norm)
        return Trained(
            self.model, tuple(self.curve), reached, self.stop_reason, self.steps, self.seconds, norm, ensemble
        )


def arrived(training: TrainingSection, stop_reason: str, loss: float, accuracy: float, gradient_norm: float) -> bool:
    """Whether a network that ended like this is what the study requires."""
    rule = training.require or training.stop
    return stop_reason != "diverged" and (rule is None or rule.holds(loss, accuracy, gradient_norm))


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean cross entropy and accuracy over all samples."""
    loss, right = 0.0, 0
    for x_chunk, y_chunk in zip(torch.split(x, CHUNK), torch.split(y, CHUNK), strict=True):
        outputs = model(x_chunk)
        loss += F.cross_entropy(outputs, y_chunk, reduction="sum").item()
        right += int((outputs.argmax(1) == y_chunk).sum())
    return loss / len(x), right / len(x)


def gradient_norm(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The Euclidean norm of the gradient of the mean cross entropy over all samples."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
    for x_chunk, y_chunk in zip(torch.split(x, CHUNK), torch.split(y, CHUNK), strict=True):
        loss = F.cross_entropy(model(x_chunk), y_chunk, reduction="sum") / len(x)
        for entry, gradient in zip(total, torch.autograd.grad(loss, parameters), strict=True):
            entry += gradient
    return math.sqrt(sum(float(entry.square().sum()) for entry in total))


# --- one step, alone or together --------------------------------------------------------------------------------------


class _Learner(Protocol):
    def set_learning_rate(self, rate: float) -> None: ...

    def step(self, batch: Tensor) -> None:
        """One step on the samples of `batch`, a row of positions for each network."""

    def keep(self, positions: list[int]) -> None:
        """Go on with these networks only."""


class _Optimizer:
    """SGD and Adam as torch.optim has them, on all weights as one tensor: a handful of operations for any network.

    (Importing torch.optim's own takes longer than training many a cell.)
    """

    def __init__(self, weights: Tensor, training: TrainingSection) -> None:
        self.weights, self.training = weights, training
        self.rate = training.learning_rate
        self.steps = 0
        self.first = torch.zeros_like(weights) if training.momentum or training.optimizer == "adam" else None
        self.second = torch.zeros_like(weights) if training.optimizer == "adam" else None

    def step(self, gradient: Tensor) -> None:
        """One step; `gradient` may be overwritten."""
        self.steps += 1
        if self.training.weight_decay:
            gradient.add_(self.weights, alpha=self.training.weight_decay)
        if self.first is None:
            self.weights.add_(gradient, alpha=-self.rate)
        elif self.second is None:
            self.first.mul_(self.training.momentum).add_(gradient)
            self.weights.add_(self.first, alpha=-self.rate)
        else:
            beta, gamma = BETAS
            self.first.lerp_(gradient, 1 - beta)
            self.second.mul_(gamma).addcmul_(gradient, gradient, value=1 - gamma)
            size = self.second.sqrt().div_(math.sqrt(1 - gamma**self.steps)).add_(EPSILON)
            self.weights.addcdiv_(self.first, size, value=-self.rate / (1 - beta**self.steps))

    def kept(self, positions: list[int]) -> _Optimizer:
        """The optimizer of these rows of the weights only."""
        made = _Optimizer(self.weights[positions], self.training)
        made.rate, made.steps = self.rate, self.steps
        made.first = None if self.first is None else self.first[positions]
        made.second = None if self.second is None else self.second[positions]
        return made


class _Alone:
    """A single network: its parameters, and their gradients, are views of one vector."""

    def __init__(self, run: _Run, training: TrainingSection) -> None:
        self.run = run
        learned = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
        sizes = [parameter.numel() for parameter in learned]
        weights = torch.empty(sum(sizes))
        self.gradient = torch.zeros_like(weights)
        thin = _has_thin_convolutions(run.model)
        parts = zip(torch.split(weights, sizes), torch.split(self.gradient, sizes), strict=True)
        for parameter, (value, gradient) in zip(learned, parts, strict=True):
            before = parameter.detach()
            parameter.data, parameter.grad = (_shaped(part, before.shape, thin) for part in (value, gradient))
            parameter.data.copy_(before)
        self.optimizer = _Optimizer(weights, training)

    def set_learning_rate(self, rate: float) -> None:
        self.optimizer.rate = rate

    def step(self, batch: Tensor) -> None:
        chosen = batch[0]
        self.gradient.zero_()
        torch.autograd.backward(F.cross_entropy(self.run.model(self.run.x[chosen]), self.run.y[chosen]))
        self.optimizer.step(self.gradient)

    def keep(self, _positions: list[int]) -> None:
        raise AssertionError("a single network is kept or its training ends")


def _has_thin_convolutions(model: nn.Module) -> bool:
    """Whether kernels are better laid out with channels last: measured 1.3 to 1.5 times as fast for LeNet on MNIST."""
    channels = [module.out_channels for module in model.modules() if isinstance(module, nn.Conv2d)]
    return 0 < max(channels, default=0) <= THIN


def _shaped(part: Tensor, shape: torch.Size, channels_last: bool) -> Tensor:
    """A view of this shape, in which the entries of kernels follow each other channels last if asked for."""
    if len(shape) != 4 or not channels_last:
        return part.view(shape)
    outputs, inputs, height, width = shape
    return part.view(outputs, height, width, inputs).permute(0, 3, 1, 2)


class _Together:
    """Several networks of one kind as one: all weights in one matrix with one row per network, one product for all.

    The modules of the runs see their row: their parameters are views of it.
    """

    def __init__(self, runs: Sequence[_Run], training: TrainingSection) -> None:
        _refuse_unstackable(runs[0].model)
        self.runs = list(runs)
        self.labels = torch.stack([run.y for run in runs])
        stacked, _ = stack_module_state([run.model for run in runs])
        self.shapes = {name: tensor.shape[1:] for name, tensor in stacked.items()}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.loss_of_each = vmap(self._loss, randomness="different")
        rows = [tensor.detach().reshape(len(runs), -1) for tensor in stacked.values()]
        self._show(_Optimizer(torch.cat(rows, dim=1), training))

    def _show(self, optimizer: _Optimizer) -> None:
        """Let the modules of the runs see the rows of the weights."""
        self.optimizer = optimizer
        for row, run in zip(optimizer.weights, self.runs, strict=True):
            for name, part in self._parts(row).items():
                run.model.get_parameter(name).data = part

    def _parts(self, weights: Tensor) -> dict[str, Tensor]:
        """The parameters by name: views of a row, or of all rows at once."""
        parts = zip(self.shapes.items(), torch.split(weights, self.sizes, dim=-1), strict=True)
        return {name: part.view(*weights.shape[:-1], *shape) for (name, shape), part in parts}

    def _loss(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(self.runs[0].model, parameters, (x,)), y)

    def set_learning_rate(self, rate: float) -> None:
        self.optimizer.rate = rate

    def step(self, batch: Tensor) -> None:
        x, y = self.runs[0].x[batch], self.labels.gather(1, batch)
        weights = self.optimizer.weights.detach().requires_grad_()
        loss = self.loss_of_each(self._parts(weights), x, y).sum()
        (gradient,) = torch.autograd.grad(loss, weights)
        self.optimizer.step(gradient)

    def keep(self, positions: list[int]) -> None:
        for position, run in enumerate(self.runs):
            if position not in positions:  # its weights must outlive the matrix
                for parameter in run.model.parameters():
                    parameter.data = parameter.data.clone()
        self.runs = [self.runs[position] for position in positions]
        self.labels = self.labels[positions]
        self._show(self.optimizer.kept(positions))


def _refuse_unstackable(model: nn.Module) -> None:
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    buffers = [name for name, _ in model.named_buffers()]
    if frozen or buffers:
        raise SpiritLevelError(
            f"seeds of this network cannot be trained together, because it has buffers or frozen parameters "
            f"({', '.join((*buffers, *frozen)[:3])}); leave training.ensemble out"
        )
