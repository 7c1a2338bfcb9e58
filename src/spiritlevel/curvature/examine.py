"""Which parameters the exact sweep covers: decided from the traced graph, confirmed on a few samples, never assumed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spiritlevel.curvature.anatomy import Anatomy, joined
from spiritlevel.curvature.rounding import GROUPS
from spiritlevel.curvature.statistics import DIAGONAL, TappedChunk
from spiritlevel.curvature.sums import Sums
from spiritlevel.curvature.taps import sample_axes
from spiritlevel.network.tracing import trace
from spiritlevel.problem.batches import Batch, join
from spiritlevel.problem.problem import Problem, gradients_of
from spiritlevel.problem.survey import Seen, seen_on

# So many samples at most are looked at for one that gives a parameter a gradient, of the heaviest and of those spread.
MOST_SHOWN = 48


def examine(problem: Problem) -> Anatomy:
    """Trace the network with two and three samples and on every chunk of the data, then confirm on a few what that says."""
    problem.check_derivatives()
    if problem.shards.divided:
        return _unswept(problem, "no process has it whole, so that it is known from products only")
    if problem.loss_function.whole_batch:
        return _unswept(problem, "the loss does not split into outputs and targets")
    with problem.undisturbed():
        two, three = problem.telling_samples(2), problem.telling_samples(3)
        small = trace(lambda leaves: problem.outputs(leaves, two), problem.parameters, problem.fixed.values())
        large = trace(lambda leaves: problem.outputs(leaves, three), problem.parameters, problem.fixed.values())
        with torch.no_grad():
            outputs = problem.outputs(problem.parameters, two)
        layers = {name: layer for name, layer in small.layers.items() if name in problem.parameters}
        if not isinstance(outputs, Tensor) or outputs.dim() == 0 or len(outputs) != 2:
            reason = "the outputs are not one tensor with a row for every sample"
            return joined(Anatomy(layers, {}, dict.fromkeys(problem.parameters, reason)), problem.survey.seen)
        axes = {
            name: found
            for name, found in sample_axes(small, large, (2, 3)).items()
            if name in problem.parameters and name not in small.mixed and found and None not in found
        }
        spread = sum(math.prod(shape) for name, shape in small.calls if name in layers and len(shape) > 2) // 2
        sizes = {name: layer.matrix(problem.parameters[name]).shape[2:].numel() for name, layer in layers.items()}
        work = sum(math.prod(shape) * sizes[name] for name, shape in small.calls if name in layers) // 2
        anatomy = Anatomy(layers, axes, dict(small.bent), outputs[0].numel(), spread, work)
        anatomy = joined(anatomy, [*problem.survey.seen, *_seen_together(problem)])
        shown = _shown(
            problem, set(anatomy.axes)
        )  # come together here, and nowhere else: an expert may get some of them
        return _confirmed(problem, joined(anatomy, [seen_on(problem, shown.batch)]), shown)


def _seen_together(problem: Problem) -> Iterator[Seen]:
    """What the heaviest samples show when they come together, as they will: an expert may get all of a chunk, and some of these."""
    for samples, groups in ((problem.survey.heavy, GROUPS), (problem.survey.near, 1)):
        for batch in samples.groups(groups, problem.chunk_size):
            yield seen_on(problem, batch)


def _unswept(problem: Problem, reason: str) -> Anatomy:
    """Where the loss calls the model itself, or the model is in shards: layers can be traced, but nothing is swept."""
    return joined(Anatomy({}, {}, dict.fromkeys(problem.parameters, reason)), problem.survey.seen)


@dataclass(frozen=True)
class _Shown:
    """A few samples, the random combination of outputs looked at for each, and Σ_n (its gradient)², by autograd."""

    batch: Batch
    column: Tensor
    squares: dict[str, Tensor]


def _shown(problem: Problem, names: set[str]) -> _Shown:
    """Two samples, and as many more as it takes for every parameter to have a gradient: what has none proves nothing.

    The heaviest samples are tried first, then some spread over all data. The outputs are combined at random for every
    sample: where samples are alike, their losses would not show that one is taken for another.
    """
    leaves, generator = problem.leaves(), torch.Generator().manual_seed(1)
    squares = {name: torch.zeros_like(tensor) for name, tensor in problem.parameters.items()}
    waiting = {name for name in names if squares[name].numel()}
    kept: list[Batch] = []
    columns: list[Tensor] = []
    for sample in _one_by_one(problem):
        if len(columns) >= 2 and not waiting:
            break
        with torch.enable_grad():
            outputs = problem.outputs(leaves, sample)
            column = torch.randn(outputs.shape, generator=generator).to(outputs.detach())
            parts = gradients_of((outputs * column).sum(), list(leaves.values()))
        found = {name for name, part in zip(leaves, parts, strict=True) if name in waiting and bool(part.any())}
        together = join([*kept, sample])
        if (len(columns) < 2 or found) and together is not None:
            waiting -= found
            kept, columns = [together], [*columns, column]
            for name, part in zip(leaves, parts, strict=True):
                squares[name] += part.square()
    return _Shown(kept[0], torch.cat(columns), squares)


def _one_by_one(problem: Problem) -> Iterator[Batch]:
    for batch in (problem.telling_samples(2), problem.survey.heavy.batch, *problem.spread_samples(8)):
        assert batch is not None
        yield from (batch[n : n + 1] for n in range(min(len(batch), MOST_SHOWN)))


def _confirmed(problem: Problem, anatomy: Anatomy, shown: _Shown) -> Anatomy:
    """Keep only what the numbers bear out."""
    wrong = _misread(problem, anatomy, shown)
    if wrong:  # samples may sit inside a merged dimension instead of outside
        flipped = {
            name: [replace(axis, outermost=False) if axis and axis.repeat > 1 else axis for axis in found]
            if name in wrong
            else found
            for name, found in anatomy.axes.items()
        }
        anatomy = replace(anatomy, axes=flipped)
        wrong = more = _misread(problem, anatomy, shown)
        while more:  # without these, taps may see less of others
            anatomy = replace(anatomy, axes={name: axis for name, axis in anatomy.axes.items() if name not in wrong})
            more = _misread(problem, anatomy, shown)
            wrong = wrong | more
    bent = dict.fromkeys(wrong, "the exact sweep does not reproduce its gradient sample by sample")
    bent |= anatomy.bent
    missing = {name: "the exact sweep does not know its use" for name in problem.parameters if name not in anatomy.axes}
    bent = missing | bent
    curved = _curved(problem, [name for name in problem.parameters if name not in bent], shown.batch)
    return replace(anatomy, bent=bent | curved)


def _misread(problem: Problem, anatomy: Anatomy, shown: _Shown) -> set[str]:
    """Parameters whose squared per-sample gradients, read off the taps, differ from those of autograd."""
    ours = _squared_gradients(problem, anatomy, shown.batch, shown.column)
    nothing = {name: torch.zeros_like(shown.squares[name]) for name in anatomy.axes}  # no tap saw it: autograd may have
    return {name for name, mine in (nothing | ours).items() if not _close(mine, shown.squares[name])}


def _squared_gradients(problem: Problem, anatomy: Anatomy, batch: Batch, column: Tensor) -> dict[str, Tensor]:
    """Σ_n (∂(s_n·f_n)/∂θ)² over one batch with s the column, read off the taps."""
    sums = Sums()
    tapped = TappedChunk(problem, anatomy, batch, inputs=False)
    tapped.accumulate([(column, None)], float(len(batch)), frozenset([DIAGONAL]), sums)
    return sums.diagonal


def _close(mine: Tensor, expected: Tensor) -> bool:
    if not expected.numel():  # a layer of width zero
        return True
    tolerance = 2e-3 if expected.dtype == torch.float32 else 1e-8
    difference = (mine.to(expected.dtype) - expected).abs().max()
    return bool(difference <= tolerance * expected.abs().max())


def _curved(problem: Problem, names: list[str], batch: Batch) -> dict[str, str]:
    """Parameters along which a random combination of the outputs has a second derivative, on a few samples."""
    if not names:
        return {}
    leaves = problem.leaves()
    generator = torch.Generator().manual_seed(0)
    found: dict[str, str] = {}
    with torch.enable_grad():
        outputs = problem.outputs(leaves, batch)
        mix = (outputs * torch.randn(outputs.shape, generator=generator).to(outputs)).sum()
        gradients = torch.autograd.grad(mix, [leaves[name] for name in names], create_graph=True, allow_unused=True)
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is None or not gradient.requires_grad or not gradient.numel():
                continue
            direction = torch.randn(gradient.shape, generator=generator).to(gradient)
            try:
                (second,) = torch.autograd.grad(gradient, leaves[name], direction, retain_graph=True, allow_unused=True)
            except RuntimeError:  # no double backward here: the trace alone speaks for linearity, so do not trust it
                found[name] = "its second derivative could not be confirmed to vanish"
                continue
            if second is not None and bool(second.abs().max() > 1e-5 * gradient.detach().abs().max()):
                found[name] = "a second derivative that the trace did not show"
    return found
