"""Arguments and options that several commands share, and what they stand for."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from spiritlevel.errors import SpiritLevelError, suggest
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.registry import read_measure
from spiritlevel.presenting import facts as known_facts
from spiritlevel.presenting import set_facts
from spiritlevel.problem.losses import BUILT_IN
from spiritlevel.saved import sha256_of
from spiritlevel.subjects.checkpoint import load_checkpoint
from spiritlevel.subjects.data import Dataset, load_data
from spiritlevel.subjects.factory import import_factory
from spiritlevel.subjects.labels import TRUE_LABELS, LabelNoise, labels_of_checkpoint
from spiritlevel.subjects.networks import build_model
from spiritlevel.subjects.preprocessing import Standardization, of_checkpoint, read_numbers, statistics_of

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
Samples = Annotated[int | None, typer.Option(metavar="N", help="Only N samples, chosen at random.")]
SampleSeed = Annotated[int, typer.Option("--sample-seed", metavar="N", help="Which N samples --samples chooses.")]
Mean = Annotated[
    str | None, typer.Option(metavar="A[,B,C]", help="Taken off the inputs, a number a channel, after x / 255.")
]
Std = Annotated[str | None, typer.Option(metavar="A[,B,C]", help="What the inputs are divided by then.")]
Standardize = Annotated[
    bool, typer.Option("--standardize", help="Mean and deviation of every channel of the training split.")
]
LabelShare = Annotated[
    float | None,
    typer.Option(
        "--label-noise",
        metavar="SHARE",
        help="The network was trained with this share of its labels drawn at random; 0 for none, whatever its checkpoint says.",
    ),
]
LabelSeed = Annotated[
    int | None,
    typer.Option("--label-seed", metavar="N", help="Which random labels: the seed of the study; 0 by default."),
]
Device = Annotated[str | None, typer.Option(metavar="cpu|cuda|mps|…", help="Where to compute; cpu by default.")]
Tolerance = Annotated[float, typer.Option(metavar="T", help="Relative accuracy of whatever is not exact.")]
OwnTolerance = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        metavar="T",
        help="Relative accuracy of whatever is not exact; 1e-3, and 5e-2 of estimates, by default.",
    ),
]
Budget = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="As accurate as so many seconds allow, instead of --tolerance.")
]
Seed = Annotated[int, typer.Option(metavar="N", help="For everything random.")]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="float32|float64", help="Precision of the measurement; the model's own by default."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no table.")]

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Subject:
    """What the arguments of a command name: a trained network, its data and its loss.

    `facts` says of it what a page repeats; `trained` whether its weights came from a file.
    """

    model: nn.Module
    data: Dataset
    loss: Any
    facts: Mapping[str, str] = field(default_factory=dict)
    trained: bool = False

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The data as `measure` takes them."""
        return self.data.x, self.data.y

    @property
    def parts(self) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], Any]:
        """Model, data and loss, in the order in which the library takes them."""
        return self.model, self.pair, self.loss

    def doubt(self, loss: float) -> str:
        """What to say of a loss that is worse than chance, which a checkpoint's seldom is; empty where it is not."""
        chance = math.log(self.data.classes) if self.loss == "cross_entropy" and self.data.classes > 1 else math.inf
        if (
            not self.trained or self.data.split != "train" or not loss > 1.1 * chance
        ):  # what is not trained is at chance
            return ""
        return (
            f"the loss on the training data, {loss:.4g}, is worse than chance (ln {self.data.classes} = {chance:.4g}): was the "
            f"network trained on inputs preprocessed like these ({self.data.normalisation}), and on these labels? See --mean, --std, "
            "--standardize and --label-noise"
        )

    def warn_of(self, loss: float) -> None:
        """Say so on standard error."""
        if self.doubt(loss):
            print(f"warning: {self.doubt(loss)}", file=sys.stderr)


@dataclass(frozen=True)
class PartOptions:
    """Which samples of the data."""

    samples: Samples = None
    split: Split = "train"
    sample_seed: SampleSeed = 0

    def __post_init__(self) -> None:
        if self.split not in ("train", "test"):
            raise SpiritLevelError(f"--split must be train or test, got {self.split!r}")


@dataclass(frozen=True, kw_only=True)
class PreparationOptions:
    """What is done to the inputs, and where the work is."""

    mean: Mean = None
    std: Std = None
    standardize: Standardize = False
    label_noise: LabelShare = None
    label_seed: LabelSeed = None
    device: Device = None

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.std is None):
            raise SpiritLevelError("--mean and --std belong together: give both")
        if self.standardize and self.mean is not None:
            raise SpiritLevelError("--standardize takes mean and deviation from the data: leave --mean and --std out")
        if self.label_seed is not None and self.label_noise is None:
            raise SpiritLevelError(
                "--label-seed says which labels are drawn anew: say how many, by --label-noise SHARE"
            )
        if self.label_noise is not None:
            LabelNoise(self.label_noise)  # refuses a share that is none, also where none is drawn
        read_device(self.device)

    def standardization(self, spec: str, checkpoint: Path | None) -> Standardization | None:
        """What is done to the inputs: as asked for, or as the checkpoint says."""
        if self.mean is not None and self.std is not None:
            return Standardization(read_numbers("--mean", self.mean), read_numbers("--std", self.std))
        if self.standardize:
            return statistics_of(load_data(spec, split="train"))
        return None if checkpoint is None else of_checkpoint(checkpoint)

    def labels(self, split: str, checkpoint: Path | None) -> LabelNoise | None:
        """Which labels are drawn anew: as asked for, or as the checkpoint says; those of test data are true."""
        if split != "train":
            return None
        if self.label_noise == 0:
            return None
        said = None if checkpoint is None else labels_of_checkpoint(checkpoint)
        if self.label_noise is None or said is None:
            return said if self.label_noise is None else LabelNoise(self.label_noise, self.label_seed or 0)
        seed = said.seed if self.label_seed is None else self.label_seed
        if (self.label_noise, seed) == (said.share, said.seed):
            return said
        raise SpiritLevelError(
            f"{said}, and not {self.label_noise:.3g} of them (seed {seed}): on other "
            f"labels the network is not at a minimum. Leave --label-noise and --label-seed out; {TRUE_LABELS}"
        )


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(PreparationOptions):
    """Which network, data and loss."""

    model: ModelName
    data: DataName
    checkpoint: Checkpoint = None
    loss: LossName = "cross_entropy"

    def read(self, part: PartOptions) -> Subject:
        """Load what is named; the data first, because they say how many inputs and classes the network has."""
        loss = read_loss(self.loss)
        data, said = self.read_data(part)
        labels = self.labels(part.split, self.checkpoint)
        network = build_model(self.model, input_shape=data.input_shape, classes=data.classes)
        if self.checkpoint is not None:
            load_checkpoint(network, self.checkpoint)
        elif ":" not in self.model or self.model.startswith("mlp:"):
            raise SpiritLevelError(
                f"{self.model!r} is a built-in network, which starts with random weights; "
                "pass its trained ones by --checkpoint"
            )
        facts = {
            "network": self.model,
            **({} if self.checkpoint is None else {"checkpoint": _named_file(self.checkpoint)}),
            "data": f"{self.data}, {data.split} split, {len(data):,} samples"
            + (f" chosen at random (seed {part.sample_seed})" if part.samples is not None else ""),
            "preprocessing": said,
            **({} if labels is None else {"labels": str(labels)}),
            **known_facts(),
        }
        set_facts(facts)
        return Subject(network.to(read_device(self.device)), data, loss, facts, self.checkpoint is not None)

    def read_data(self, part: PartOptions) -> tuple[Dataset, str]:
        """The data as the network takes them, and what was done to them."""
        split: Any = part.split
        labels = self.labels(split, self.checkpoint)
        data = load_data(self.data, split=split, samples=part.samples, seed=part.sample_seed, labels=labels)
        if labels is not None:
            print(f"labels: {labels}", file=sys.stderr)
        asked = self.standardization(self.data, self.checkpoint)
        if asked is None:
            return data, data.normalisation
        data = asked.applied(data)
        said = data.normalisation + (f", as said by {asked.said_by}" if asked.said_by else "")
        print(f"preprocessing: {said}", file=sys.stderr)
        return data, said


def _named_file(path: Path) -> str:
    return f"{path.name} (sha256 {sha256_of(path)[:16]})"


@dataclass(frozen=True)
class AccuracyOptions:
    """How accurate the result is to be."""

    tolerance: Tolerance = 1e-3
    seed: Seed = 0
    dtype: Dtype = None

    def __post_init__(self) -> None:
        read_dtype(self.dtype)

    @property
    def arguments(self) -> dict[str, Any]:
        """The same as the library takes it."""
        return {"tolerance": self.tolerance, "seed": self.seed, "dtype": read_dtype(self.dtype)}


def read_loss(name: str) -> Any:
    """A loss by name, or the user's own function."""
    if name in BUILT_IN:
        return name
    if ":" not in name:
        known = ", ".join(BUILT_IN)
        raise SpiritLevelError(
            f"unknown loss {name!r}{suggest(name, BUILT_IN) or '.'} Known: {known}, package.module:function"
        )
    return import_factory(name, BUILT_IN)


def read_measures(names: str | None) -> list[Measure] | str | None:
    """`a,b:option=value` as configured measures; "all" and None (the default set) as they are."""
    if names is None or names.strip() == "all":
        return None if names is None else "all"
    chosen = [read_measure(name.strip()) for name in names.split(",") if name.strip()]
    if not chosen:
        raise SpiritLevelError("--measures is empty; give names separated by commas, all, or leave it out")
    return chosen


def read_dtype(name: str | None) -> torch.dtype | None:
    """float32 or float64; None for the model's own."""
    if name is None:
        return None
    if name not in DTYPES:
        raise SpiritLevelError(f"--dtype must be float32 or float64, got {name!r}")
    return DTYPES[name]


def read_device(name: str | None) -> torch.device:
    """The device that a name stands for; one that is not there is refused before any work is done."""
    try:
        device = torch.device(name or "cpu")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        said = (str(error).splitlines() or [""])[0]
        raise SpiritLevelError(f"--device {name} cannot be used here: {said}") from None
    return device


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
