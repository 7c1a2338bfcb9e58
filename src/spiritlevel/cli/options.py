"""Arguments and options that several commands share, and what they stand for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from spiritlevel.errors import SpiritLevelError, suggest
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.registry import ALL
from spiritlevel.problem.losses import BUILT_IN
from spiritlevel.subjects.checkpoint import load_checkpoint
from spiritlevel.subjects.data import Dataset, load_data
from spiritlevel.subjects.factory import import_factory
from spiritlevel.subjects.networks import build_model

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A built-in network (convnet, lenet, mlp:300-100, …) or package.module:factory."
    ),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Its weights: .safetensors, or a torch file that holds tensors only."),
]
DataName = Annotated[
    str,
    typer.Option(metavar="DATA", help="digits, mnist:FOLDER, cifar10:FOLDER, file.npz, package.module:factory, …"),
]
LossName = Annotated[
    str,
    typer.Option(metavar="LOSS", help="cross_entropy, mse, normalized_cross_entropy, or package.module:function."),
]
Measures = Annotated[
    str | None,
    typer.Option(metavar="A,B,…|all", help="Names, each with options if any: epsilon_sharpness:epsilon=5e-4."),
]
Split = Annotated[str, typer.Option(metavar="train|test", help="Which part of the data to measure on.")]
Samples = Annotated[int | None, typer.Option(metavar="N", help="Only the first N samples.")]
Tolerance = Annotated[float, typer.Option(metavar="T", help="Relative accuracy of whatever is not exact.")]
Seed = Annotated[int, typer.Option(metavar="N", help="For everything random.")]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="float32|float64", help="Precision of the measurement; the model's own by default."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no table.")]

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Subject:
    """What the arguments of a command name: a trained network, its data and its loss."""

    model: nn.Module
    data: Dataset
    loss: Any

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The data as `measure` takes them."""
        return self.data.x, self.data.y


def read_subject(
    model: str, checkpoint: Path | None, data: str, loss: str, split: str = "train", samples: int | None = None
) -> Subject:
    """Load what the arguments name; the data first, because they say how many inputs and classes the network has."""
    if split not in ("train", "test"):
        raise SpiritLevelError(f"--split must be train or test, got {split!r}")
    chosen_loss = read_loss(loss)
    loaded = load_data(data, split="test" if split == "test" else "train", samples=samples)
    network = build_model(model, input_shape=loaded.input_shape, classes=loaded.classes)
    if checkpoint is not None:
        load_checkpoint(network, checkpoint)
    elif ":" not in model or model.startswith("mlp:"):
        raise SpiritLevelError(
            f"{model!r} is a built-in network, which starts with random weights; pass its trained ones by --checkpoint"
        )
    return Subject(network, loaded, chosen_loss)


def read_loss(name: str) -> Any:
    """A loss by name, or the user's own function."""
    if name in BUILT_IN:
        return name
    if ":" not in name:
        known = ", ".join(BUILT_IN)
        raise SpiritLevelError(
            f"unknown loss {name!r}{suggest(name, BUILT_IN)}; known: {known}, package.module:function"
        )
    return import_factory(name, BUILT_IN)


def read_measures(names: str | None) -> list[Measure] | str | None:
    """`a,b:option=value` as configured measures; "all" and None (the default set) as they are."""
    if names is None or names.strip() == "all":
        return None if names is None else "all"
    chosen = [_read_measure(name.strip()) for name in names.split(",") if name.strip()]
    if not chosen:
        raise SpiritLevelError("--measures is empty; give names separated by commas, all, or leave it out")
    return chosen


def _read_measure(text: str) -> Measure:
    name, *settings = text.split(":")
    options: dict[str, float | str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise SpiritLevelError(f"options of a measure are written name:option=value, got {text!r}")
        options[key] = _number_or_word(value)
    if name not in ALL:
        raise SpiritLevelError(f"unknown measure {name!r}{suggest(name, ALL)} `spiritlevel measures` lists them all")
    return ALL[name].configured(**options)


def _number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def read_dtype(name: str | None) -> torch.dtype | None:
    """float32 or float64; None for the model's own."""
    if name is None:
        return None
    if name not in DTYPES:
        raise SpiritLevelError(f"--dtype must be float32 or float64, got {name!r}")
    return DTYPES[name]


def check_writable(option: str, path: Path | None) -> None:
    """Refuse a place that cannot be written to before any work is done."""
    if path is None or str(path) == "-":
        return
    if path.is_dir():
        raise SpiritLevelError(f"{option} must name a file, but {path} is a folder")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise SpiritLevelError(f"{option}: {path} cannot be written, because {parent} is a file, not a folder")
    if not os.access(path if path.exists() else parent, os.W_OK):
        raise SpiritLevelError(f"{option}: {path} cannot be written; choose a place where you may write")


def check_folder(option: str, path: Path) -> None:
    """Refuse a folder that cannot be made before any work is done."""
    standing = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not standing.is_dir():
        raise SpiritLevelError(f"{option} must name a folder, but {standing} is a file")
    if not os.access(standing, os.W_OK):
        raise SpiritLevelError(f"{option}: {path} cannot be written to; choose a folder where you may write")


__all__ = [
    "Checkpoint",
    "DataName",
    "Dtype",
    "LossName",
    "Measures",
    "ModelName",
    "Quiet",
    "Samples",
    "Seed",
    "Split",
    "Subject",
    "Tolerance",
    "check_folder",
    "check_writable",
    "read_dtype",
    "read_loss",
    "read_measures",
    "read_subject",
]
