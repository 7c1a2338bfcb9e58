"""Is the gradient that autograd gives the slope of the loss? One comparison with differences of losses, in double precision.

It is not where the network contains gradient reversal, a straight-through estimator or a hook that changes gradients,
nor where a parameter reaches the loss by a way that autograd does not record. The Hessian of such a "gradient" belongs
to no function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from spiritlevel.errors import SpiritLevelError
from spiritlevel.problem.batches import Batch, join
from spiritlevel.problem.contract import Checked
from spiritlevel.problem.tensors import is_about_precision

# Samples that take part, spread over the data.
SAMPLES = 8
# A gradient is refused only if it disagrees at so many random points, at each of them with every step. Among many ReLUs one
# may have its kink within a step, and where the loss is all but zero a short step drowns in rounding.
TRIALS = 3
# A disagreement of which half a step changes more than this part comes from the step: where a network is certain, its loss goes
# with the exponential of the outputs, and only long steps show more than rounding.
STEADY = 0.5
# Where autograd sees no way to the loss, there is nothing to agree with but zero: this part of the tolerance is enough, and a
# random direction along which the loss happens to be nearly level hides less.
UNCONNECTED = 1e-3
# Slopes that differ by less than this part of what separates them from autograd's are one and the same.
ONE_MIND = 0.1


@dataclass(frozen=True)
class _Precision:
    """Steps relative to the parameters, the agreement asked for, and a step so short that it shows rounding only."""

    dtype: torch.dtype
    steps: tuple[float, ...]
    tolerance: float
    tiny: float


# Short steps for networks that a rescaling has made steep, where longer ones cross many kinks.
DOUBLE = _Precision(torch.float64, (1e-5, 1e-4, 1e-3, 1e-6, 1e-7, 1e-8), 1e-3, 1e-11)
SINGLE = _Precision(torch.float32, (3e-3, 1e-2, 1e-3), 0.1, 1e-6)


def check_derivatives(problem: Checked) -> None:
    """Refuse where autograd's gradient is not the slope of the loss."""
    batch = problem.first_chunk() if problem.whole else _looked_at(problem)
    with problem.undisturbed():
        try:
            with problem.in_precision(torch.float64) as double:
                _check(problem, double(batch), DOUBLE)
        except RuntimeError as error:
            if not is_about_precision(error):
                raise
            _check(problem, batch, SINGLE)  # the network insists on its own precision


def _looked_at(problem: Checked) -> Batch:
    """Samples spread over the data, and the heaviest: of a network that fits, the loss of most others has no slope to be seen."""
    spread = problem.spread_samples(SAMPLES)[0][: 2 * SAMPLES]
    return join([spread, problem.telling_samples(SAMPLES // 2)]) or spread


# What is differentiated, as a function of the parameters: the loss over a batch, or its outputs times fixed weights.
Objective = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass
class _Trial:
    """A random point near the parameters, and a direction in every parameter tensor, times a factor.

    Of the gradient there only what is asked of it is kept, its slope along every direction and where it is not zero: every
    copy of a large model counts.
    """

    problem: Checked
    objective: Objective
    precision: _Precision
    point: dict[str, Tensor]
    directions: dict[str, Tensor]
    slopes: dict[str, float]  # of this process's parts
    connected: frozenset[str]  # the parameters with a gradient
    still: float  # the loss at the point
    usual: float  # a loss of nearly zero is a difference of larger numbers, about as large as that of a network that knows nothing
    factors: dict[str, float]
    conclusive: bool = False  # whether a difference of losses was more than rounding
    roundings: dict[tuple[str, ...], float] = field(default_factory=dict)  # shared by all that are `turned` from it

    def loss(self, names: Sequence[str], step: float) -> float:
        moved = {name: self.point[name].add(self.directions[name], alpha=step * self.factors[name]) for name in names}
        with torch.no_grad():
            return float(self.objective({**self.point, **moved}))

    def turned(self, generator: torch.Generator) -> _Trial:
        """The same with every direction longer or shorter, forwards or backwards: what cancels in one sum does not in another."""
        drawn = torch.rand(len(self.directions), 2, generator=generator).tolist()
        factors = {
            name: (0.5 + length) * (1 if side < 0.5 else -1)
            for name, (length, side) in zip(self.directions, drawn, strict=True)
        }
        return replace(self, factors=factors, conclusive=False)

    def slope(self, names: Sequence[str]) -> float:
        return sum(map(self._share, names))

    def size(self, names: Sequence[str]) -> float:
        return math.hypot(*map(self._share, names))

    def _share(self, name: str) -> float:
        return self.problem.shards.total(self.factors[name] * self.slopes[name])  # each process draws its own factors

    def disagreement(self, names: Sequence[str], *, alone: bool = False) -> tuple[float, float] | None:
        """Autograd's slope and that of the loss along the sum of these directions, if they disagree for every step;
        else None.

        Steps that show rounding only do not count. How closely they agree is judged relative to the slopes along all
        directions; with `alone`, along these.
        """
        slope, size = self.slope(names), self.size(names if alone else list(self.point))
        tolerance = self.precision.tolerance * (UNCONNECTED if self.connected.isdisjoint(names) else 1)
        others: dict[float, float] = {}
        for step, difference, noise in self._telling(names, size):
            if not abs(difference - slope) > tolerance * size + noise:  # NaN is refused elsewhere
                self.conclusive = True
                found = list(others.values())
                return (slope, found[0]) if _of_one_mind(found, slope) else None
            others[step] = difference
        steady = [each for step, each in others.items() if self._is_steady(names, step, each, slope)]
        self.conclusive |= bool(steady)
        return (slope, steady[-1]) if steady else None

    def _is_steady(self, names: Sequence[str], step: float, difference: float, slope: float) -> bool:
        return abs(self._difference(names, step / 2) - difference) < STEADY * abs(difference - slope)

    def _telling(self, names: Sequence[str], size: float) -> Iterator[tuple[float, float, float]]:
        """Steps, and the slopes of the loss by differences with their noise, where that is small beside slopes of this size."""
        rounding = self._rounding(names, self.slope(names))
        for step in self.precision.steps:
            difference, noise = self._difference(names, step), 4 * rounding / step
            if noise < 0.1 * max(size, abs(difference)):
                yield step, difference, noise

    def _difference(self, names: Sequence[str], step: float) -> float:
        return (self.loss(names, step) - self.loss(names, -step)) / (2 * step)

    def _rounding(self, names: Sequence[str], slope: float) -> float:
        """What rounding does to the loss: seen in steps that change nothing else, and known from the loss's usual size."""
        if (key := tuple(names)) not in self.roundings:
            tiny = self.precision.tiny
            seen = max(abs(self.loss(names, h) - self.still - h * slope) for h in (tiny, -tiny, 2 * tiny))
            self.roundings[key] = max(seen, 64 * torch.finfo(self.precision.dtype).eps * self.usual)
        return self.roundings[key]


def _of_one_mind(differences: Sequence[float], slope: float) -> bool:
    """Whether the first steps, of three lengths, show one and the same slope, and that is not autograd's.

    Then shorter steps that agree with autograd say nothing: a number that the network reads off a parameter, and rounds to
    single precision, stands still for them. Kinks within the steps show in that their slopes differ.
    """
    if len(differences) < 3:
        return False
    first = differences[:3]
    return max(first) - min(first) < ONE_MIND * abs(first[0] - slope)


def _trial(problem: Checked, objective: Objective, precision: _Precision, generator: torch.Generator) -> _Trial:
    """The directions follow the gradient, so that entries it holds fixed (the row of an embedding's padding) stay where
    they are; where a whole tensor has none, any direction will do."""
    values = {name: value.to(precision.dtype) for name, value in problem.parameters.items()}
    sizes = {name: float(value.square().mean().sqrt()) if value.numel() else 0.0 for name, value in values.items()}
    smallest = min((size for size in sizes.values() if size > 0), default=1.0)

    def random(name: str) -> Tensor:
        drawn = torch.randn(values[name].shape, generator=generator, dtype=precision.dtype)
        return drawn.to(values[name].device) * (sizes[name] or smallest)

    point = {name: value + 1e-3 * random(name) for name, value in values.items()}
    leaves = problem.leaves(point)
    with torch.enable_grad():
        loss = objective(leaves)
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True) if loss.requires_grad else ()
    parts = dict(zip(leaves, found, strict=False))
    del loss, found  # the graph, and the gradients, which are let go of one by one
    directions, slopes, connected = dict[str, Tensor](), dict[str, float](), set[str]()
    for name, leaf in leaves.items():
        part = parts.pop(name, None)
        gradient = torch.zeros_like(leaf) if part is None else part.detach().to(precision.dtype)
        directions[name] = _along(gradient, random(name))
        slopes[name] = float((gradient * directions[name]).sum())
        if problem.shards.any(bool(gradient.any())):
            connected.add(name)
    with torch.no_grad():
        still = float(objective(point))
        others = [_value(objective, {name: by * v for name, v in point.items()}) for by in (0.0, -1.0)]
    usual = max((abs(value) for value in (still, *others) if math.isfinite(value)), default=0.0)
    ones = dict.fromkeys(leaves, 1.0)
    return _Trial(problem, objective, precision, point, directions, slopes, frozenset(connected), still, usual, ones)


def _value(objective: Objective, parameters: Mapping[str, Tensor]) -> float:
    """NaN where a network or a loss raises an error, as it may with parameters that nobody trained."""
    try:
        return float(objective(parameters))
    except Exception:
        return math.nan


def _along(gradient: Tensor, random: Tensor) -> Tensor:
    """As long as the random direction, along the gradient; the random one where there is no gradient."""
    norm = gradient.norm()
    return gradient * float(random.norm() / norm) if bool(norm > 0) else random


def _check(problem: Checked, batch: Batch, precision: _Precision) -> None:
    any(_checked(problem, objective, precision) for objective in _objectives(problem, batch, precision))
    _refuse_a_loss_without_a_way(problem, batch)


def _objectives(problem: Checked, batch: Batch, precision: _Precision) -> Iterator[Objective]:
    """What is looked at in turn until something shows more than rounding: the loss; the outputs, weighted by its slopes;
    and weighted at random, where the samples looked at have no slope, or no gradient."""
    yield lambda parameters: problem.chunk_loss(parameters, batch)
    weighted = _weighted_outputs(problem, batch, precision)
    if weighted is not None:
        yield weighted
        yield _outputs_at_random(problem, batch)


def _outputs_at_random(problem: Checked, batch: Batch) -> Objective:
    def objective(parameters: Mapping[str, Tensor]) -> Tensor:
        outputs = problem.chunk_outputs(parameters, batch)
        drawn = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        total: Tensor = (drawn.to(outputs) * outputs).sum()
        return total

    return objective


def _weighted_outputs(problem: Checked, batch: Batch, precision: _Precision) -> Objective | None:
    """The outputs times the slopes of the loss there, which are held fixed and rescaled sample by sample. A wrong
    gradient of the loss is wrong here too, and where the loss is nearly zero, these differences still exceed rounding.
    None where outputs are not seen, or have no slope."""
    if problem.whole:
        return None
    outputs = problem.chunk_outputs({name: v.to(precision.dtype) for name, v in problem.parameters.items()}, batch)
    if not isinstance(outputs, Tensor):
        return None
    slopes = problem.slopes(outputs, batch)[1].double()
    if not slopes.numel() or not bool(torch.isfinite(slopes).all()) or not bool(slopes.any()):
        return None
    largest = slopes.abs().flatten(1).amax(1) if slopes.dim() > 1 else slopes.abs()
    weights = slopes / largest.clamp_min(torch.finfo(torch.float64).tiny).view(-1, *[1] * (slopes.dim() - 1))
    return lambda parameters: (weights * problem.chunk_outputs(parameters, batch)).sum()


def _checked(problem: Checked, objective: Objective, precision: _Precision) -> bool:
    """Refuse where autograd's gradient of this objective is not its slope; False where rounding hides it."""
    generator = torch.Generator().manual_seed(0)
    wrong: tuple[float, float] | None = None
    cut: tuple[float, float] | None = None
    trial = None
    for _ in range(TRIALS):
        trial = _trial(problem, objective, precision, generator)
        connected = [name for name in trial.point if name in trial.connected]
        unconnected = [name for name in trial.point if name not in trial.connected]
        turns = [trial.turned(generator) for _ in range(2)]
        wrong = next(filter(None, (turn.disagreement(connected) for turn in turns)), None) if connected else None
        if wrong is None and problem.small:  # one by one: a layer may have little part in the slope of all
            wrong = next(filter(None, (trial.disagreement([name], alone=True) for name in connected)), None)
        cut = trial.disagreement(unconnected) if unconnected else None
        if wrong is None and cut is None:
            return any(each.conclusive for each in (trial, *turns))
    assert trial is not None
    if cut is not None:
        _refuse_cut(trial)
    _refuse_wrong(trial, wrong or (0.0, 0.0))
    return True


def _refuse_a_loss_without_a_way(problem: Checked, batch: Batch) -> None:
    """Refuse a loss that autograd connects to no parameter, or only past the network, as weight decay does; differences of losses
    may be too small to show that."""
    recorded: list[bool] = []

    def look(module: nn.Module, _inputs: Any, outputs: Any) -> None:
        if module is problem.module:
            leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            recorded.extend(leaf.requires_grad for leaf in leaves)

    hook = register_module_forward_hook(look)
    try:
        with torch.enable_grad():
            connected = problem.chunk_loss(problem.leaves(), batch).requires_grad
    finally:
        hook.remove()
    if connected and (any(recorded) or not recorded):
        return
    raise SpiritLevelError(
        "autograd records no way from the measured parameters "
        + (
            "through the network to the loss, so that derivatives would leave the network out. "
            if connected
            else "to the loss, so that every derivative would be zero. "
        )
        + "Likely cause: torch.no_grad() or inference_mode() around the network, or detach(), .data, item() or float() on the way"
    )


def _refuse_cut(trial: _Trial) -> None:
    name = next(iter(_alone(trial, connected=False)), "the parameters")
    raise SpiritLevelError(
        f"the loss depends on {name}, but autograd records no way from there to the loss, so that every derivative would be "
        "zero. Likely cause: torch.no_grad() or inference_mode() around the network, or detach(), .data, item() or float() "
        "on the way. Let autograd record it, or freeze what should not count with requires_grad_(False)"
    )


def _refuse_wrong(trial: _Trial, together: tuple[float, float]) -> None:
    name, (slope, found) = next(iter(_alone(trial, connected=True).items()), ("all parameters", together))
    raise SpiritLevelError(
        f"the gradient of this network is not that of its loss: along a direction in {name} autograd gives a slope of "
        f"{slope:.4g}, and the loss has {found:.4g}. Likely cause: gradient reversal, a straight-through estimator or a hook "
        "that changes gradients, or detach() on one of several ways to the loss. There is no function of which such "
        "derivatives are the curvature: take it out for measuring"
    )


def _alone(trial: _Trial, *, connected: bool) -> dict[str, tuple[float, float]]:
    """The first of at most a hundred parameters, with or without a gradient, that disagrees on its own."""
    for name in [name for name in trial.point if (name in trial.connected) == connected][:100]:
        found = trial.disagreement([name], alone=connected)
        if found is not None:
            return {repr(name): found}
    return {}
