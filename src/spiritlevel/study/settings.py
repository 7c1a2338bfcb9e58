"""The settings of a study and of its cells, checked field by field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from spiritlevel.errors import suggest
from spiritlevel.measuring.registry import read_measure
from spiritlevel.problem.losses import BUILT_IN
from spiritlevel.subjects.data import SOURCES
from spiritlevel.subjects.networks import list_initializations

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Fraction = Annotated[float, Field(ge=0, le=1, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]

# Networks that a study may have unless it says otherwise. Each has a folder of its own; a slip of the finger in `seeds`
# must not keep a machine busy for years.
MOST_CELLS = 10_000

# Where one cell differs from another: these sections hold settings that factors may cross.
CROSSED = ("data", "model", "training")


class Section(BaseModel):
    """A part of a study: keys that are not known are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _without(settings: dict[str, Any], unasked: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those that have the value of what is not asked for."""
    return {key: entry for key, entry in settings.items() if key not in unasked or entry != unasked[key]}


class DataSection(Section):
    """Which data: a name of `list_data` (with `folder` for those that are read from one), and how much of it."""

    name: str
    folder: str | None = None
    label_noise: Fraction = 0.0
    train_samples: Count | None = None
    test_samples: Count | None = None
    # What is done to the inputs, a number a channel or one for all; `standardize` takes both from the training split.
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    standardize: bool = False

    @model_validator(mode="after")
    def _one_preprocessing(self) -> DataSection:
        if (self.mean is None) != (self.std is None):
            raise ValueError("`mean` and `std` belong together: give both")
        if self.standardize and self.mean is not None:
            raise ValueError("`standardize` takes mean and deviation from the data: leave `mean` and `std` out")
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_not_asked(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Preprocessing that is not asked for is not part of a cell's settings, so that cells of earlier versions are found."""
        return _without(serialize(self), {"mean": None, "std": None, "standardize": False})

    @property
    def spec(self) -> str:
        """The data set as `load_data` takes it."""
        return self.name if self.folder is None else f"{self.name}:{self.folder}"

    @model_validator(mode="after")
    def _folder_where_needed(self) -> DataSection:
        source = SOURCES.get(self.name)
        if self.folder is not None and (source is None or source.argument != "FOLDER"):
            raise ValueError(f"data set {self.name!r} is not read from a folder; leave `folder` out")
        return self


class ModelSection(Section):
    """Which network: a name of `list_models` or package.module:factory, its width and its starting weights."""

    name: str
    width: Positive = 1.0
    initialization: str = "default"

    @field_validator("initialization")
    @classmethod
    def _known_initialization(cls, value: str) -> str:
        known = list_initializations()
        if value not in known:
            raise ValueError(f"unknown initialization{suggest(value, known) or '.'} Known: {', '.join(known)}")
        return value


class Rule(Section):
    """Conditions on the training set at the end of an epoch, all of which must hold."""

    train_accuracy: Fraction | None = None
    train_loss: Positive | None = None
    gradient_norm: Positive | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> Rule:
        if self.train_accuracy is None and self.train_loss is None and self.gradient_norm is None:
            raise ValueError("needs at least one of train_accuracy, train_loss, gradient_norm")
        return self

    def holds(self, loss: float, accuracy: float, gradient_norm: float | None) -> bool:
        """Accuracy at least, loss and gradient norm at most the given ones; NaN never holds."""
        return (
            (self.train_accuracy is None or accuracy >= self.train_accuracy)
            and (self.train_loss is None or loss <= self.train_loss)
            and (self.gradient_norm is None or (gradient_norm is not None and gradient_norm <= self.gradient_norm))
        )


class TrainingSection(Section):
    """How a network is trained: cross entropy, at most `epochs`, ended by `stop`; kept if `require` holds at the end.

    Without `stop` all epochs are trained. Without `require` a network counts as arrived if `stop` held. `ensemble` seeds
    of a cell are trained as one vectorized network; by default as many as is known to be faster, and LeNets or AlexNets that
    differ in their starting weights only. A constant learning rate may be halved after every `halve_every` epochs.
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: Positive
    momentum: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.0
    weight_decay: NotNegative = 0.0
    batch_size: Count
    epochs: Count
    schedule: Literal["constant", "cosine"] = "constant"
    halve_every: Annotated[int, Field(ge=0, strict=True)] = 0  # 0: never
    stop: Rule | None = None
    require: Rule | None = None
    evaluate_every: Count = 1
    ensemble: Count | None = None

    @model_validator(mode="after")
    def _momentum_of_sgd(self) -> TrainingSection:
        if self.optimizer == "adam" and self.momentum:
            raise ValueError("momentum belongs to optimizer = 'sgd'; leave it out for 'adam'")
        return self

    @model_validator(mode="after")
    def _one_schedule(self) -> TrainingSection:
        if self.halve_every and self.schedule != "constant":
            raise ValueError("`halve_every` belongs to schedule = 'constant'; leave one of the two out")
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_not_asked(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Rates that are not halved are not part of a cell's settings, so that cells of earlier versions are found."""
        return _without(serialize(self), {"halve_every": 0})


class Under(Section):
    """Measures under one loss."""

    loss: str = "cross_entropy"
    measures: tuple[str, ...] | None = None

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, value: str) -> str:
        if value not in BUILT_IN and ":" not in value:
            known = ", ".join(BUILT_IN)
            raise ValueError(f"unknown loss{suggest(value, BUILT_IN) or '.'} Known: {known}, package.module:function")
        return value

    @field_validator("measures")
    @classmethod
    def _known_measures(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and not value:
            raise ValueError("is empty; name measures, or leave it out for the default set")
        for text in value or ():
            read_measure(text)
        return value


class MeasureSection(Under):
    """What is measured at the minimum, on all training samples or on `samples` of them.

    `also` are measures under other losses; `rescale` = [low, high] measures everything again after every layer but the
    last of a chain was multiplied by a random factor from that range; `orbit` = strength after a random move along all
    symmetries that were found: rescalings, invertible matrices in attention, rotations; `attack_targets` after each of
    these attacks.

    Networks are also measured along their training: where the loss of the whole training set is first at or below each of
    `at_loss`, and after each of `at_epochs`; there `measures_along`, or all that is measured at the end.
    """

    also: tuple[Under, ...] = ()
    samples: Count | None = None
    tolerance: Annotated[float, Field(gt=0, lt=1, strict=True)] = 1e-3
    dtype: Literal["float32", "float64"] | None = None
    rescale: tuple[Positive, Positive] | None = None
    orbit: Positive | None = None
    attack_targets: tuple[Positive, ...] = ()
    measure_excluded: Annotated[bool, Field(strict=True)] = False
    at_loss: tuple[Positive, ...] = ()
    at_epochs: tuple[Count, ...] = ()
    measures_along: tuple[str, ...] | None = None

    _known_measures_along = field_validator("measures_along")(Under._known_measures.__func__)  # type: ignore[attr-defined]

    @field_validator("at_loss", "at_epochs")
    @classmethod
    def _distinct(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if len(set(value)) < len(value):
            raise ValueError("names a level twice; every level needs one entry")
        return value

    @model_validator(mode="after")
    def _something_along(self) -> MeasureSection:
        if self.measures_along is not None and not self.at_loss and not self.at_epochs:
            raise ValueError("measures_along is measured at the levels of at_loss and at_epochs; name one of them too")
        return self

    @field_validator("rescale")
    @classmethod
    def _range(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[0] > value[1]:
            raise ValueError("is a range [low, high] of factors; low must not exceed high")
        return value

    @field_validator("orbit")
    @classmethod
    def _one_twin(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("rescale") is not None:
            raise ValueError("every network has one twin: leave out orbit or rescale")
        return value


class CellConfig(Section):
    """All settings of one training and its measurement."""

    data: DataSection
    model: ModelSection
    training: TrainingSection
    measure: MeasureSection
    seed: Seed

    @model_validator(mode="after")
    def _epochs_that_happen(self) -> CellConfig:
        late = [epoch for epoch in self.measure.at_epochs if epoch > self.training.epochs]
        if late:
            raise ValueError(
                f"measure.at_epochs names epoch {late[0]}, but training.epochs is {self.training.epochs}; a network is "
                "measured after epochs that are trained"
            )
        return self


class Head(Section):
    """What a file says about the study as a whole."""

    name: str
    title: str = ""
    paper: str | None = None
    gap: Literal["accuracy", "loss"] = "accuracy"
    seeds: Annotated[int, Field(ge=1, strict=True)] | Annotated[tuple[Seed, ...], Field(min_length=1)] = 1
    most_cells: Count = MOST_CELLS


def flattened(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as dotted names with what they hold.

    >>> dict(flattened({"training": {"epochs": 3, "stop": {"train_loss": 0.1}}, "seeds": 2}))
    {'training.epochs': 3, 'training.stop.train_loss': 0.1, 'seeds': 2}
    """
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclass(frozen=True)
class Factor:
    """One direction of the grid: `values[i]` are the settings at its i-th position, several where they are tied."""

    names: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class PlannedCell:
    """One network that is to be trained: a point of the grid with one seed."""

    factors: dict[str, Any]
    config: CellConfig

    @property
    def seed(self) -> int:
        """The seed of its starting weights, its batches and its label noise."""
        return self.config.seed


@dataclass(frozen=True)
class Plan:
    """What a checked file asks for. Its cells are every combination of the factors with every seed, seeds fastest."""

    name: str
    title: str
    paper: str | None
    gap: str
    seeds: tuple[int, ...]
    factors: tuple[Factor, ...]
    settings: dict[str, Any]
    cells: tuple[PlannedCell, ...]
    quick: bool = False

    def __str__(self) -> str:
        """The study in a line: its name, what it is, on which data, and how many networks."""
        count = len(self.cells)
        return f"{self.name}: {self.title or 'trained on ' + self.data}; {count} network{'s' if count > 1 else ''}"

    @property
    def data(self) -> str:
        """The names of the data sets that it trains on."""
        return " and ".join(dict.fromkeys(cell.config.data.name for cell in self.cells))

    def to_dict(self) -> dict[str, Any]:
        """The study as `study.json` describes it, without its cells."""
        return {
            "name": self.name,
            "title": self.title,
            "paper": self.paper,
            "gap": self.gap,
            "factors": {
                name: [values[i] for values in factor.values]
                for factor in self.factors
                for i, name in enumerate(factor.names)
            },
            "tied": [list(factor.names) for factor in self.factors if len(factor.names) > 1],
            "config": {**self.settings, "seeds": list(self.seeds)},
            "quick": self.quick,
        }
