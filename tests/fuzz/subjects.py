"""One input of the fuzz suite: a network, its loss, data, precision and options, from a record that prints as code."""

import copy
import fnmatch
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fuzz import networks
from fuzz.losses import LOSSES, FuzzLoss
from fuzz.networks import FEATURES, LENGTH, SIDE, VOCABULARY, Network
from measure_names import DEFINED

CLASSES = 3
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Samples:
    """What the data are like. kind: how inputs are distributed; scale: a power of ten; shape: how they are passed."""

    kind: str = "gaussian"
    count: int = 6
    scale: int = 0
    by_class: bool = False
    shape: str = "pair"
    seed: int = 0


@dataclass(frozen=True)
class Options:
    """Arguments of `measure`. measures: none for the default set; samples: all of them, drawn at random; chunk: the most
    samples in a chunk, 0 for what the package chooses; searched: eigenvalues by a search, as larger networks have it."""

    measures: tuple[str, ...] = ("hessian_trace",)
    tolerance: float = 1e-3
    most_probes: int = 64
    parameters: tuple[str, ...] | None = None
    samples: bool = False
    dtype: str | None = None
    chunk: int = 0
    seed: int = 0
    searched: bool = False


@dataclass(frozen=True)
class Subject:
    """An input. trained: −log₁₀ of the loss, reached by scaling the last layer; stretch: the first layer is multiplied
    by e^stretch and the last divided by it, which for one layer of ReLU makes a twin."""

    network: Network = field(default_factory=Network)
    loss: str = "cross_entropy"
    samples: Samples = field(default_factory=Samples)
    trained: int | None = None
    stretch: float = 0.0
    precision: str = "float32"
    options: Options = field(default_factory=Options)


@dataclass
class Built:
    """The same, built: what `measure` gets, and what the definitions are evaluated on."""

    model: nn.Module
    data: Any
    loss: Any
    arguments: dict[str, Any]
    honest: nn.Module
    inputs: Tensor
    targets: Tensor
    terms: FuzzLoss

    def free(self, patterns: Sequence[str] | None) -> list[str]:
        """The parameters that are measured."""
        names = [name for name, _ in self.honest.named_parameters()]
        return names if patterns is None else [n for n in names if any(fnmatch.fnmatch(n, p) for p in patterns)]


def build(subject: Subject) -> Built:
    """Everything a subject stands for, the same at every call."""
    loss, dtype = LOSSES[subject.loss], DTYPES[subject.precision]
    generator = torch.Generator().manual_seed(subject.samples.seed)
    model = networks.build(subject.network, CLASSES)
    inputs = _inputs(subject.samples, type(model).inputs, generator)
    _stretch(model, subject.stretch)
    targets = _targets(subject, loss, model, inputs, generator)
    if subject.samples.by_class and not targets.is_floating_point():
        order = targets.argsort(stable=True)
        inputs, targets = inputs[order], targets[order]
    if subject.trained is not None and loss.certain:
        _train(model, loss, inputs, targets, 10.0**-subject.trained)
    model = model.to(dtype)
    inputs, targets = _to(inputs, dtype), _to(targets, dtype)
    honest = networks.set_honest(copy.deepcopy(model), loss.penalty).double()
    data = _passed(subject.samples, inputs, targets)
    doubled = _to(inputs, torch.float64), _to(targets, torch.float64)
    arguments = _arguments(subject.options, len(inputs))
    return Built(model, data, loss.given(model), arguments, honest, *doubled, loss)


def _arguments(options: Options, count: int) -> dict[str, Any]:
    given: dict[str, Any] = {
        "measures": list(options.measures) or None,
        "tolerance": options.tolerance,
        "most_probes": options.most_probes,
        "seed": options.seed,
    }
    if options.parameters is not None:
        given["parameters"] = list(options.parameters)
    if options.samples and count > 1:
        given["samples"] = count
    if options.dtype is not None:
        given["dtype"] = DTYPES[options.dtype]
    return given


def _to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _inputs(samples: Samples, kind: str, generator: torch.Generator) -> Tensor:
    count = samples.count
    if kind == "tokens":
        x = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
        return x.sort(0).values if samples.kind == "late" else x * (samples.kind != "zeros")
    shape = {"vectors": (FEATURES,), "images": (1, SIDE, SIDE), "sequences": (LENGTH, FEATURES)}[kind]
    x = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    if samples.kind == "duplicates":
        x = x[:1].expand_as(x).clone()
    elif samples.kind == "zeros":
        x = torch.zeros_like(x)
    elif samples.kind == "blank first":
        x[: max(1, count // 2)] = 0
    elif samples.kind == "late":  # what makes a network branch comes last
        x = x[x.flatten(1).amax(1).argsort()]
        x[-1] *= 4
    elif samples.kind == "one hot":
        x = torch.eye(shape[-1], dtype=torch.float64)[torch.arange(count) % shape[-1]].expand(
            *shape[:-1], count, shape[-1]
        )
        x = x.movedim(-2, 0).contiguous()
    return x * 10.0**samples.scale


def _targets(subject: Subject, loss: FuzzLoss, model: nn.Module, x: Tensor, generator: torch.Generator) -> Tensor:
    count = len(x)
    with torch.no_grad():
        outputs = networks.set_honest(copy.deepcopy(model), loss.penalty)(x)
    if loss.labels == "numbers":
        return torch.randn(count, CLASSES, generator=generator, dtype=torch.float64) * 10.0**subject.samples.scale
    if loss.labels == "scalars":
        return torch.randn(count, generator=generator, dtype=torch.float64)
    if loss.labels == "probabilities":
        return torch.rand(count, CLASSES, generator=generator, dtype=torch.float64)
    if loss.labels == "binary":
        random = torch.rand(count, CLASSES, generator=generator) < 0.5
        return ((outputs > 0) if subject.trained is not None else random).double()
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    if loss.labels == "ignored" and count > 1:
        labels[count // 2 :: 3] = -100
    return outputs.argmax(1) if subject.trained is not None and loss.certain else labels


def _stretch(model: nn.Module, strength: float) -> None:
    if not strength:
        return
    first = next(
        m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.Embedding | networks.InputsFirst)
    )
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.mul_(torch.tensor(strength, dtype=torch.float64).exp())
        model.head.weight.mul_(torch.tensor(-strength, dtype=torch.float64).exp())


def _train(model: nn.Module, loss: FuzzLoss, x: Tensor, y: Tensor, wanted: float) -> None:
    """Scale the last layer until the mean loss is as wanted, as far as that goes."""
    with torch.no_grad():
        outputs = networks.set_honest(copy.deepcopy(model), loss.penalty)(x)
        weights = loss.weights(y)

        def mean(factor: float) -> float:
            return float((weights * loss.terms(outputs * factor, y)).sum() / weights.sum())

        low, high = -30.0, 60.0
        if not mean(2.0**high) < wanted < mean(2.0**low):
            return
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if mean(2.0**middle) > wanted else (low, middle)
        for parameter in model.head.parameters():
            parameter.mul_(2.0**middle)


def _passed(samples: Samples, x: Tensor, y: Tensor) -> Any:
    if samples.shape == "ragged":
        sizes = [size for size in (1, 4, 2, 7, 3, 8) for _ in range(9)]
        cut, batches = 0, []
        while cut < len(x):
            size = sizes[len(batches)]
            batches.append((x[cut : cut + size], y[cut : cut + size]))
            cut += size
        return batches
    if samples.shape == "loader":
        return DataLoader(TensorDataset(x, y), batch_size=4)
    return TensorDataset(x, y) if samples.shape == "dataset" else (x, y)


# --- strategies ----------------------------------------------------------------------------------------------------


def _often(common: Sequence[Any], rare: Sequence[Any]) -> st.SearchStrategy[Any]:
    """Ordinary things three times out of four.

    One flat choice, which no other entry of a subject makes in the same way: hypothesis spends most of its examples on
    copying choices between places that look alike.
    """
    times = -(-3 * len(rare) // len(common))
    return st.sampled_from((*common * times, *rare))


made_networks = st.builds(
    Network,
    family=_often(
        ("mlp", "residual", "convolution", "shared", "experts", "words", "attention", "gated", "spelled", "recurrent"),
        ("dead", "constant", "narrow", "blind", "clamping", "mixing"),
    ),
    activation=_often(("relu", "leaky", "gelu", "tanh"), ("softplus", "squares", "identity", "once", "reversal")),
    depth=st.sampled_from((1, 2)),
    width=st.sampled_from((3, 2, 4)),
    bias=st.sampled_from((True, False)),
    norm=_often(("none",), ("batch", "layer")),
    seed=st.sampled_from(range(500)),
)
made_samples = st.builds(
    Samples,
    kind=_often(("gaussian", "late", "blank first"), ("duplicates", "zeros", "one hot")),
    count=st.sampled_from((6, 1, 2, 5, 9, 17, 24)),
    scale=_often((0,), (-3, 3, -6, 6, -12, 12)),
    by_class=st.sampled_from((False, True)),
    shape=_often(("pair",), ("ragged", "loader", "dataset")),
    seed=st.sampled_from(range(600)),
)
made_options = st.builds(
    Options,
    measures=st.sampled_from((*itertools.combinations(DEFINED, 2), *[()] * 40)),
    tolerance=st.sampled_from((1e-3, 1e-1, 1e-6)),
    most_probes=st.sampled_from((64, 8, 256)),
    parameters=_often((None,), (("*weight",), ("head.*",))),
    samples=_often((False,), (True,)),
    dtype=st.sampled_from((None, None, None, "float32", "float64")),
    chunk=_often((0,), (0, 1, 3)),
    seed=st.sampled_from(range(10)),
    searched=st.booleans(),
)
subjects = st.builds(
    Subject,
    network=made_networks,
    loss=_often(("cross_entropy", "mse", "module"), tuple(LOSSES)),
    samples=made_samples,
    trained=st.sampled_from((*[None] * 12, *range(1, 13))),
    stretch=_often((0.0,), (1.0, -1.0, 5.0, -5.0, 12.0, -12.0, 25.0, -25.0)),
    precision=st.sampled_from(("float32", "float32", "float64", "bfloat16")),
    options=made_options,
)
