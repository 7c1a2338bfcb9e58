"""Loss landscapes: the loss along lines and over planes through a minimum, in directions that mean something.

Loss and accuracy at every point of a grid, kept in a file while they are computed, so that nothing is computed twice.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from spiritlevel.errors import SpiritLevelError, listed
from spiritlevel.landscape.directions import NORMALIZATIONS, Finder, Normalization, Toward
from spiritlevel.problem.contract import Parameters
from spiritlevel.problem.losses import LossLike
from spiritlevel.problem.problem import Problem
from spiritlevel.saved import Format, Saved, as_tensor

Progress = Callable[[int, int], None]

FORMAT = Format("spiritlevel-landscape-1", "landscape", indent=None)
SAVE_EVERY = 5


class Landscape(Saved):
    """Lines and surfaces share one format, in which `kind` says which of the two a file holds."""

    _format = FORMAT

    def to_dict(self) -> dict[str, Any]:
        return FORMAT.document(self, kind=type(self).__name__.lower())

    @classmethod
    def _from_parts(cls, parts: dict[str, Any]) -> Self:
        kind = parts.pop("kind", "grid that is not finished")
        found = next(
            (each for each in (Line, Surface) if each.__name__.lower() == kind and issubclass(each, cls)), None
        )
        if found is None:
            raise ValueError(f"not a saved {cls.__name__.lower()}: the file holds a {kind}")
        for key in ("steps", "x", "y", "losses", "accuracies"):
            if parts.get(key) is not None:
                parts[key] = as_tensor(parts[key])
        parts["labels"], parts["notes"] = tuple(parts["labels"]), tuple(parts["notes"])
        return cast("Self", found(**parts))


@dataclass(frozen=True)
class Line(Landscape):
    """The loss along one or several directions d: L(θ + t·d).

    Attributes:
        steps: The t, (points,).
        losses: (directions, points).
        accuracies: The same of the share of right labels; None where targets are not labels.
        labels: What each direction is.
        normalization: What a step of length one is.
        notes: What a reader must know.
    """

    steps: Tensor
    losses: Tensor
    accuracies: Tensor | None
    labels: tuple[str, ...]
    normalization: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Surface(Landscape):
    """The loss over a plane: L(θ + x·d + y·e).

    Attributes:
        x, y: The steps along the first and the second direction.
        losses: (len(y), len(x)).
        accuracies: The same of the share of right labels; None where targets are not labels.
        labels: What the two directions are.
        normalization: What a step of length one is.
        notes: What a reader must know.
    """

    x: Tensor
    y: Tensor
    losses: Tensor
    accuracies: Tensor | None
    labels: tuple[str, ...]
    normalization: str
    notes: tuple[str, ...] = ()


def load(path: str | os.PathLike[str]) -> Line | Surface:
    """A line or a surface that was saved."""
    found = Landscape.load(path)
    assert isinstance(found, Line | Surface)
    return found


def line(
    model: nn.Module,
    data: Any,
    loss: LossLike = "cross_entropy",
    *,
    directions: Literal["random", "eigen"] | Toward = "random",
    normalization: Normalization | None = None,
    biases: bool | None = None,
    count: int = 5,
    seed: int = 0,
    span: tuple[float, float] | None = None,
    points: int = 41,
    parameters: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    fix_data: bool = False,
    file: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Line:
    """The loss along lines through a minimum: L(θ + t·d) (Rangamani et al. 2019, Figure 2).

    Args:
        model, data, loss, parameters, dtype, fix_data: As for `measure`.
        directions: "random" (Gaussian, one for each of `count` seeds), "eigen" (the `count` top eigenvectors of the
            Hessian in the normalization's scale), or a second model or state of the same architecture, to which
            t = 1 leads; then buffers such as running means go along between the two, and beyond stay what they are at the
            nearer one: a running variance continued in a straight line would fall below zero.
        normalization: One of `NORMALIZATIONS`; "layer" by default, "none" towards another model.
        biases: Whether biases and other parameters that are not a layer's weight move. By default they do, except with
            "filter", whose authors keep them; there a bias that moves counts as a filter of one entry.
        count, seed: How many directions, and from which seed on.
        span: The range of t; (−1, 1) by default, (−0.25, 1.25) towards another model.
        points: How many t.
        file: Where to keep what is done, point by point: a second call computes only what is missing.
        progress: A function of (points done, points in all).

    With "layer", "filter" or "quotient" the line is the same for networks that differ by the scale of their layers;
    with "neuron" or "quotient neuron" also for those that differ by the scale of their neurons.
    """
    problem = Problem(model, loss, data, parameters=parameters, dtype=dtype, fix_data=fix_data)
    toward = not isinstance(directions, str)
    chosen = _normalization(normalization, toward)
    low, high = span or ((-0.25, 1.25) if toward else (-1.0, 1.0))
    steps = _grid(low, high, points)
    finder = Finder(problem, chosen, biases, seed)
    origin = None if toward else f"{directions} {chosen} {biases} {seed}"
    labels, found = finder.find(directions, _at_least(count, 1, "count"))
    jobs = {f"{k}:{i}": {k: float(t)} for k in range(len(found)) for i, t in enumerate(steps)}
    values = _evaluate(problem, found, jobs, _Kept(file, origin), progress)
    losses, accuracies = _arrays(values, (len(found), points))
    notes = (*problem.notes, *finder.notes, *_held_notes(problem, found, steps))
    return Line(steps, losses, accuracies, tuple(labels), chosen, notes)


def surface(
    model: nn.Module,
    data: Any,
    loss: LossLike = "cross_entropy",
    *,
    directions: Literal["random", "eigen"] | tuple[Toward, Toward] = "random",
    normalization: Normalization | None = None,
    biases: bool | None = None,
    seed: int = 0,
    span: tuple[float, float] | None = None,
    points: int = 21,
    parameters: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    fix_data: bool = False,
    file: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Surface:
    """The loss over a plane through a minimum, on a square grid of `points` a side.

    Arguments as for `line`; `directions` may be two models of the same architecture, for the plane through all three:
    (0, 0) is `model`, (1, 0) the first and (0, 1) the second. Buffers are those of the nearest point of the triangle between
    the three.
    """
    problem = Problem(model, loss, data, parameters=parameters, dtype=dtype, fix_data=fix_data)
    toward = not isinstance(directions, str)
    chosen = _normalization(normalization, toward)
    low, high = span or ((-0.5, 1.5) if toward else (-1.0, 1.0))
    steps = _grid(low, high, points)
    finder = Finder(problem, chosen, biases, seed)
    origin = None if toward else f"{directions} {chosen} {biases} {seed}"
    labels, found = finder.find(directions, 2)
    jobs = {f"{j}:{i}": {0: float(x), 1: float(y)} for j, y in enumerate(steps) for i, x in enumerate(steps)}
    values = _evaluate(problem, found, jobs, _Kept(file, origin), progress)
    losses, accuracies = _arrays(values, (points, points))
    notes = (*problem.notes, *finder.notes, *_held_notes(problem, found, 2 * steps))
    return Surface(steps, steps.clone(), losses, accuracies, tuple(labels), chosen, notes)


def _normalization(name: str | None, toward: bool) -> str:
    chosen = name or ("none" if toward else "layer")
    if chosen not in NORMALIZATIONS:
        raise SpiritLevelError(f"normalization must be one of {', '.join(NORMALIZATIONS)}; got {name!r}")
    return chosen


def _grid(low: float, high: float, points: int) -> Tensor:
    """Evenly spaced steps, with zero exactly where it falls on the grid: there the network is as it was."""
    _at_least(points, 2, "points")
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise SpiritLevelError(f"span must be two finite numbers, the smaller first; got ({low}, {high})")
    steps = torch.linspace(low, high, points, dtype=torch.float64)
    return steps.masked_fill(steps.abs() < 1e-9 * (high - low), 0.0)


def _at_least(value: int, least: int, name: str) -> int:
    if value < least:
        raise SpiritLevelError(f"{name} must be at least {least}, got {value}")
    return value


# --- evaluation --------------------------------------------------------------------------------------------------

Values = dict[str, tuple[float, float]]


def _evaluate(
    problem: Problem,
    directions: Sequence[Parameters],
    jobs: Mapping[str, Mapping[int, float]],
    kept: _Kept,
    progress: Progress | None,
) -> Values:
    """Loss and accuracy at θ + Σ step·direction for every job; what is kept already is not computed again.

    What is done is written every few points and on the way out, whatever the reason.
    """
    store = None if kept.file is None else _Store(Path(kept.file), _fingerprint(problem, directions, jobs, kept.origin))
    values: Values = {} if store is None else store.read(jobs)
    origin = {**_buffers(problem, directions), **problem.parameters}
    try:
        for key in [key for key in jobs if key not in values]:
            if progress is not None:
                progress(len(values), len(jobs))
            values[key] = _loss_and_accuracy(problem, _moved(problem, origin, directions, jobs[key]))
            if store is not None and len(values) % SAVE_EVERY == 0:
                store.write(values)
    finally:
        if store is not None and values:
            store.write(values)
    if progress is not None:
        progress(len(values), len(jobs))
    return values


def _buffers(problem: Problem, directions: Sequence[Parameters]) -> Parameters:
    """The buffers and frozen parameters that the directions move, with the values they start from."""
    names = {name for direction in directions for name in direction} - set(problem.parameters)
    own = {**dict(problem.model.named_buffers()), **dict(problem.model.named_parameters())}
    return {name: own[name].detach().to(problem.parameters_like()) for name in names}


def _held_notes(problem: Problem, directions: Sequence[Parameters], steps: Tensor) -> list[str]:
    """The note that buffers do not change beyond the models, where there are buffers and steps that lead there."""
    moving = set(_buffers(problem, directions)) & set(dict(problem.model.named_buffers()))
    inside = float(steps.min()) >= 0 and float(steps.max()) <= 1
    if not moving or inside:
        return []
    return [f"beyond the models buffers stay what they are at the nearest mixture of them: {listed(sorted(moving))}"]


def _moved(
    problem: Problem, origin: Parameters, directions: Sequence[Parameters], steps: Mapping[int, float]
) -> Parameters:
    """θ + Σ step·direction; buffers go along no further than the models that they come from."""
    held = _within(steps)
    buffers = dict(problem.model.named_buffers())
    point = dict(origin)
    for index in steps:
        for name, direction in directions[index].items():
            step = held[index] if name in buffers else steps[index]
            point[name] = point[name] + step * direction if step else point[name]
    return point


def _within(steps: Mapping[int, float]) -> dict[int, float]:
    """The nearest steps that are at least 0 and add up to at most 1: shares of a mixture of models.

    >>> _within({0: 1.25}), _within({0: -0.25}), _within({0: 1.0, 1: 1.0})
    ({0: 1.0}, {0: 0.0}, {0: 0.5, 1: 0.5})
    """
    positive = {index: max(0.0, step) for index, step in steps.items()}
    if sum(positive.values()) <= 1:
        return positive
    # onto the face where the shares add up to 1: the same amount off each, as far as it lasts
    largest = sorted(steps.values(), reverse=True)
    offsets = [(sum(largest[: k + 1]) - 1) / (k + 1) for k in range(len(largest))]
    offset = max(offsets[k] for k in range(len(largest)) if largest[k] > offsets[k])
    return {index: max(0.0, step - offset) for index, step in steps.items()}


def _loss_and_accuracy(problem: Problem, point: Parameters) -> tuple[float, float]:
    """L and the share of right labels (NaN where targets are not labels), in one pass."""
    loss = right = 0.0
    whole = problem.loss_function.whole_batch
    with problem.undisturbed(), torch.no_grad():
        for chunk, weight in problem.chunks():
            if whole:
                loss, right = loss + weight * float(problem.chunk_loss(point, chunk)), math.nan
                continue
            outputs = problem.outputs(point, chunk)
            loss += weight * float(problem.loss_function.mean(outputs, chunk.targets))
            right += weight * _right(outputs, chunk.targets)
    problem.work.add(passes=1)
    return loss, right


def _right(outputs: Any, targets: Any) -> float:
    labels = isinstance(targets, Tensor) and targets.dim() == 1 and not targets.is_floating_point()
    if not labels or not isinstance(outputs, Tensor) or outputs.dim() != 2:
        return math.nan
    return float((outputs.argmax(1) == targets).double().mean())


def _arrays(values: Values, shape: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    keys = [f"{j}:{i}" for j in range(shape[0]) for i in range(shape[1])]
    losses, right = (torch.tensor([values[k][part] for k in keys], dtype=torch.float64).view(shape) for part in (0, 1))
    return losses, None if bool(right.isnan().all()) else right


# --- keeping -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kept:
    """Where points are kept, and what their directions come from; None where they are known by their entries only."""

    file: str | os.PathLike[str] | None
    origin: str | None


@dataclass(frozen=True)
class _Store:
    """Points that are done, in a file that belongs to one network, data set and grid."""

    path: Path
    fingerprint: str

    def read(self, jobs: Mapping[str, object]) -> Values:
        if not self.path.exists():
            return {}
        try:
            kept = FORMAT.parts(FORMAT.load(self.path))
            if kept["fingerprint"] != self.fingerprint:
                return {}
            return {key: (float(a), float(b)) for key, (a, b) in kept["values"].items() if key in jobs}
        except (ValueError, KeyError, TypeError):
            return {}  # of another kind, or not ours: computed anew

    def write(self, values: Values) -> None:
        FORMAT.save(self.path, FORMAT.document({"fingerprint": self.fingerprint, "values": values}))


def _fingerprint(
    problem: Problem, directions: Sequence[Parameters], jobs: Mapping[str, Mapping[int, float]], origin: str | None
) -> str:
    """A hash of everything that the values depend on: weights, data, loss, directions, grid.

    Two losses may share a name, so the loss is known by its value too. An eigenvector is known by where it comes from,
    because its last digits depend on how many threads found it.
    """
    loss = f"{problem.loss_function.name} {problem.loss():.6g}"
    held = " buffers held" if _buffers(problem, directions) else ""  # earlier grids moved them and are not continued
    digest = hashlib.sha256(f"{loss} {problem.dtype} {origin} {dict(jobs)!r}{held}".encode())
    for tensor in _tensors(problem, directions if origin is None else ()):
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tensors(problem: Problem, directions: Sequence[Parameters]) -> Iterator[Tensor]:
    yield from problem.parameters.values()
    yield from problem.model.buffers()
    for direction in directions:
        yield from direction.values()
    for batch in problem.data:
        yield from (leaf for leaf in tree_leaves((batch.inputs, batch.targets)) if isinstance(leaf, Tensor))
