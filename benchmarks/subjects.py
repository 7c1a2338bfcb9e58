"""What is measured: trained networks with their data, in equal batches, prepared once and read by every process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spiritlevel.errors import SpiritLevelError
from spiritlevel.subjects.checkpoint import load_checkpoint
from spiritlevel.subjects.data import load_data
from spiritlevel.subjects.networks import build_model

MOST_EPOCHS = 400  # of a training that ends at a train loss
# The loss over all data is looked at after so many steps, and then each time there are so many times as many, so many
# samples at a time. Where the mean of the last batches is within so many times the level, so often in an epoch at least: between two looks
# Adam may come from above a loss of 1e-3 to a hundredth of it. Of many data a few are looked at first.
FIRST_LOOK, NEXT_LOOK, LOOKED_AT = 5, 1.05, 250
NEAR, LATELY, LOOKS_AN_EPOCH = 20, 50, 20
FEW, SURELY = 1000, 1.5
# Samples in a step of training at least, and steps of an epoch at most: 60,000 samples in steps of 20 take half an hour.
SMALLEST_STEP, MOST_STEPS = 20, 250
# What public CIFAR-10 checkpoints are trained on.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Recipe:
    """A network, its data and how it is trained for a moment.

    Attributes:
        name: What the results call it.
        title: What a reader calls it.
        network: As `build_model` takes it, with its `width` and `init`.
        shape, classes, samples: Of the data; `samples` is a multiple of `batch`.
        batch: Samples of every batch: the unit's, the peers', near the fastest for a gradient of this network.
        epochs: Passes of Adam over the data, at most where there is a `level`.
        level: The train loss below which training stops; None to train for all epochs.
        source: Which real data it wants where a data folder is given: "mnist" or "cifar10".
    """

    name: str
    title: str
    network: str
    shape: tuple[int, ...]
    samples: int
    batch: int
    epochs: int
    source: str
    classes: int = 10
    width: float = 1.0
    init: str = "default"
    level: float | None = None

    @property
    def key(self) -> str:
        """What files call it: the name, and the train loss where it was trained to one."""
        return self.name if self.level is None else f"{self.name}-{self.level:g}"

    def at(self, level: float | None) -> Recipe:
        """The same network trained until its loss is below this."""
        return self if level is None else replace(self, level=level, epochs=MOST_EPOCHS)

    def varied(self, what: str, value: float) -> Recipe:
        """The same network with other "samples", "width" or "classes"; its data are synthetic where classes differ."""
        if what == "width":
            return replace(self, width=value)
        if what == "classes":
            return replace(self, classes=int(value), source="synthetic")
        return replace(self, samples=int(value))


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("mlp", "784-300-100-10", "rangamani-fc", (1, 28, 28), 5000, 250, 4, "mnist"),
        Recipe("conv", "conv5×10-conv5×20-320-120-84-10", "rangamani-conv", (1, 28, 28), 1000, 100, 6, "mnist"),
        Recipe("lenet5", "LeNet5 on 3×32×32", "lenet5", (3, 32, 32), 1000, 200, 20, "cifar10"),
        Recipe("resnet20", "ResNet-20, batch norm in eval mode", "resnet20", (3, 32, 32), 500, 50, 4, "cifar10"),
        Recipe(
            "vgg16",
            "VGG16-type at a quarter of its width, no normalization",
            "vgg16",
            (3, 32, 32),
            500,
            50,
            6,
            "cifar10",
            width=0.25,
            init="kaiming_normal",
        ),
        Recipe("tiny", "two 3×3 convolutions on 1×8×8", "convnet", (1, 8, 8), 64, 16, 4, "synthetic"),
    )
}


def named(key: str) -> Recipe:
    """The recipe of a network, or of one at a train loss: "conv", "conv-0.1".

    >>> named("conv-0.1").level
    0.1
    """
    name, _, level = key.partition("-")
    if name not in RECIPES:
        raise SpiritLevelError(f"unknown network {name!r}; known: {', '.join(RECIPES)}")
    return RECIPES[name].at(float(level) if level else None)


@dataclass(frozen=True)
class Subject:
    """A trained network in eval mode with its data."""

    recipe: Recipe
    model: nn.Module
    x: Tensor
    y: Tensor

    @property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Equal batches, so that a library that averages batch means averages over samples."""
        return list(zip(torch.split(self.x, self.recipe.batch), torch.split(self.y, self.recipe.batch), strict=True))

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def gradient(self) -> list[Tensor]:
        """∇L over all data: the unit of every cost."""
        parameters = list(self.model.parameters())
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for x, y in self.batches:
            loss = F.cross_entropy(self.model(x), y)
            for sum_, part in zip(total, torch.autograd.grad(loss, parameters), strict=True):
                sum_.add_(part, alpha=len(x) / len(self.x))
        return total


def prepare(recipe: Recipe, path: Path, data_folder: Path | None, checkpoint: Path | None) -> None:
    """Build, train or load the network, and write it to `path` with its data."""
    real = data_folder is not None and recipe.source != "synthetic"
    x, y = _real(recipe, data_folder) if real and data_folder else synthetic(recipe)
    model = _build(recipe)
    if checkpoint is not None:
        load_checkpoint(model, checkpoint)
    else:
        epochs = train(model, x, y, recipe.epochs, recipe.level)
    data = recipe.source if real else "synthetic"
    weights = "checkpoint" if checkpoint is not None else f"{epochs:.3g} epochs of Adam"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"recipe": vars(recipe), "weights": model.state_dict(), "x": x, "y": y, "data": data, "trained": weights}
    torch.save({**content, "loss": loss_of(model.eval(), x, y)}, path)


def load(path: Path) -> Subject:
    """The subject that `prepare` wrote."""
    content = torch.load(path, weights_only=True)
    recipe = Recipe(**content["recipe"])
    model = _build(recipe)
    model.load_state_dict(content["weights"])
    return Subject(recipe, model.eval(), content["x"], content["y"])


def origin(path: Path) -> dict[str, str | float]:
    """Where the data and weights of a prepared subject come from, and the train loss it is at."""
    content = torch.load(path, weights_only=True)
    return {"data": content["data"], "weights": content["trained"], "loss": float(f"{content['loss']:.4g}")}


def synthetic(recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Noisy copies of one smooth picture a class."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(recipe.samples) % recipe.classes
    coarse = torch.randn(recipe.classes, recipe.shape[0], 4, 4, generator=generator)
    pictures = F.interpolate(coarse, recipe.shape[1:], mode="bilinear", align_corners=False)
    noise = torch.randn(recipe.samples, *recipe.shape, generator=generator)
    return pictures[y] + 0.5 * noise, y


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, level: float | None = None) -> float:
    """Adam for so many epochs, or until the loss over all data is below the level; returns the epochs it took."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    look, seen, lately = FIRST_LOOK, 0, 0.0
    model.train()
    for step, chosen in enumerate(_shuffled(len(x), epochs), 1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[chosen]), y[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seen += len(chosen)
        if level is None:
            continue
        lately += (float(loss.detach()) - lately) / min(step, LATELY)
        if step >= look:
            pause = len(x) / len(chosen) / LOOKS_AN_EPOCH if lately < NEAR * level else (NEXT_LOOK - 1) * step
            look = step + max(1, int(min(pause, (NEXT_LOOK - 1) * step)))
            if _is_below(model, x, y, level):
                return seen / len(x)
    if level is not None:
        raise SpiritLevelError(
            f"the train loss is still {loss_of(model, x, y):.2g} after {epochs} epochs, not {level:g}"
        )
    return seen / len(x)


def _is_below(model: nn.Module, x: Tensor, y: Tensor, level: float) -> bool:
    """Whether the loss over all data is below the level; many data are looked at only where a few of them are about there."""
    every = max(1, len(x) // FEW)
    likely = every == 1 or loss_of(model, x[::every], y[::every]) < SURELY * level
    return likely and loss_of(model, x, y) < level


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The mean loss over the data in eval mode."""
    mode = model.training
    model.eval()
    with torch.no_grad():
        parts = zip(torch.split(x, LOOKED_AT), torch.split(y, LOOKED_AT), strict=True)
        total = sum(float(F.cross_entropy(model(a), b, reduction="sum")) for a, b in parts)
    model.train(mode)
    return total / len(x)


def _shuffled(count: int, epochs: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        yield from torch.split(torch.randperm(count, generator=generator), max(SMALLEST_STEP, count // MOST_STEPS))


def _build(recipe: Recipe) -> nn.Module:
    return build_model(
        recipe.network, input_shape=recipe.shape, classes=recipe.classes, width=recipe.width, init=recipe.init
    )


def _real(recipe: Recipe, folder: Path) -> tuple[Tensor, Tensor]:
    data = load_data(f"{recipe.source}:{folder}", samples=recipe.samples)
    if recipe.source == "cifar10":
        data = data.standardized(MEAN, DEVIATION)
    return data.x, data.y
