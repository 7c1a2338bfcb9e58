"""Second moments of what goes into every layer, Σ = Σ φφᵀ over samples and positions, by forward passes alone.

A weight is seen as blocks (groups, a, b): a inputs, b results. The inputs of a convolution are the patches that its kernel
sees, so that a counts channels and positions of the kernel; a transposed convolution takes one position's channels and gives a
patch. The inputs of an embedding are unit vectors, whose Σ is diagonal: how often every entry is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spiritlevel.curvature import kernels
from spiritlevel.network.layers import Function, Layer, LinearMap, ParameterMode
from spiritlevel.problem.problem import Problem
from spiritlevel.problem.ranks import Ranks

# Patches that are laid out at a time, in double precision.
PATCH_BYTES = 32 << 20


@dataclass
class Moment:
    """What the inputs φ of one layer are like, in double precision.

    Attributes:
        layer, kind: The layer, and what it does with φ ("dense", "convolution", "transposed convolution", "lookup").
        second: Σ φφᵀ, (groups, a, a), or its diagonal (groups, a) where only that was asked for or there is no more to it.
        first: Σ φ, (groups, a).
        count: Over how many φ.
        sketch: Σ φ sᵀ with random s, (groups, a, a): turns with φ as φ is turned; None where it was not asked for.
        also: Another thing that is done with the same weight, which the moments leave out; empty where there is none.
    """

    layer: Layer
    kind: str
    second: Tensor
    first: Tensor
    count: int = 0
    sketch: Tensor | None = None
    also: str = ""


def rows_first(layer: Layer, kind: str) -> bool:
    """Whether the weight is stored with its results first."""
    return kind == "convolution" or (kind == "dense" and not layer.transposed)


def as_blocks(layer: Layer, kind: str, tensor: Tensor) -> Tensor:
    """A tensor of the weight's shape as (groups, a, b)."""
    rest = tensor.shape[1:].numel()  # not −1: a layer of width zero has no entries to tell it from
    blocks = tensor.reshape(layer.groups, tensor.shape[0] // layer.groups, rest)
    return blocks.mT if rows_first(layer, kind) else blocks


def as_stored(layer: Layer, kind: str, blocks: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `as_blocks`."""
    return (blocks.mT if rows_first(layer, kind) else blocks).reshape(shape)


class _Collector(ParameterMode):
    """Adds up the moments of every layer while a network runs.

    through: Layer → (groups, a, r): the moments of throughᵀφ are taken instead of those of φ.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        layers: Mapping[str, Layer],
        found: dict[str, Moment],
        full: Callable[[str], bool],
        sketches: Mapping[str, torch.Generator],
        through: Mapping[str, Tensor],
    ) -> None:
        super().__init__(parameters)
        self._layers, self._found, self._full = layers, found, full
        self._sketches, self._through = sketches, through

    def on_other(self, _name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    def on_linear(self, linear: LinearMap) -> Any:
        name = linear.layer.name
        if self._layers.get(name) == linear.layer:
            moment = self._found.setdefault(name, self._empty(linear))
            if moment.kind != linear.kind:
                moment.also = linear.kind
            elif linear.kind == "lookup":
                _count(moment, linear)
            else:
                for phi in _patches(linear):
                    self._add(moment, phi)
        elif name in self._found:
            self._found[name].also = linear.kind
        return linear.rebuild(linear.inputs)

    def _empty(self, linear: LinearMap) -> Moment:
        groups, a, _ = as_blocks(linear.layer, linear.kind, linear.weight.detach()).shape
        name = linear.layer.name
        a = self._through[name].shape[2] if name in self._through else a
        full = linear.kind != "lookup" and self._full(name)
        zeros = linear.weight.new_zeros
        return Moment(
            linear.layer,
            linear.kind,
            zeros(groups, a, a, dtype=torch.float64) if full else zeros(groups, a, dtype=torch.float64),
            zeros(groups, a, dtype=torch.float64),
            sketch=zeros(groups, a, a, dtype=torch.float64) if full and name in self._sketches else None,
        )

    def _add(self, moment: Moment, phi: Tensor) -> None:
        """φ of shape (groups, a, positions)."""
        name = moment.layer.name
        if name in self._through:
            phi = self._through[name].mT @ phi
        moment.count += phi.shape[2]
        moment.first += phi.sum(2)
        if moment.second.dim() == 2:
            moment.second += phi.square().sum(2)
            return
        for total, rows in zip(moment.second, phi.mT, strict=True):
            total += kernels.gram(rows)
        if moment.sketch is not None:
            random = torch.randn(phi.shape[2], phi.shape[1], generator=self._sketches[name], dtype=torch.float64)
            moment.sketch += phi @ random.to(phi)


def _count(moment: Moment, linear: LinearMap) -> None:
    """How often every entry of a vocabulary is looked up; an entry that is held fixed does not count."""
    counts = torch.bincount(linear.inputs.reshape(-1), minlength=moment.first.shape[1]).to(moment.first)
    if "padding" in linear.settings:
        counts[linear.settings["padding"]] = 0
    moment.count += int(counts.sum())
    moment.first += counts
    moment.second += counts


def _patches(linear: LinearMap) -> Iterator[Tensor]:
    """φ as (groups, a, positions) in double precision, some samples at a time."""
    phi, groups = linear.inputs.detach(), linear.layer.groups
    if linear.kind == "dense":
        rows = phi.reshape(1, phi.shape[:-1].numel(), phi.shape[-1])
        for some in torch.split(rows, max(1, PATCH_BYTES // (8 * max(1, phi.shape[-1]))), dim=1):
            yield some.double().mT  # (1, a, positions), of which the transpose is contiguous
        return
    kernel = tuple(linear.weight.shape[2:]) if linear.kind == "convolution" else (1,) * (phi.dim() - 2)
    settings = linear.settings if linear.kind == "convolution" else {}
    entries = 8 * max(1, phi[:1].numel() * torch.Size(kernel).numel())
    for some in torch.split(phi, max(1, PATCH_BYTES // entries)):
        windows = kernels.unfold(some.double(), kernel, settings)  # (samples, channels, kernel, positions)
        parted = windows.reshape(len(some), groups, -1, windows.shape[3])
        yield parted.permute(1, 0, 3, 2).flatten(1, 2).mT


def moments(
    problem: Problem,
    layers: Mapping[str, Layer],
    *,
    full: Callable[[str], bool],
    sketches: Mapping[str, torch.Generator] | None = None,
    through: Mapping[str, Tensor] | None = None,
) -> dict[str, Moment]:
    """One pass over the data: the moments of these layers, every sample counted alike.

    full: Of which layers all of Σ is wanted, not its diagonal only.
    """
    found: dict[str, Moment] = {}
    parameters = problem.leaves()
    with problem.undisturbed(), torch.no_grad():
        for chunk, _ in problem.chunks():
            with _Collector(parameters, layers, found, full, sketches or {}, through or {}):
                problem.chunk_outputs(parameters, chunk)
    problem.work.add(passes=1)
    _over_ranks(problem.ranks, found)
    return {name: found[name] for name in layers if name in found}


def _over_ranks(ranks: Ranks, found: dict[str, Moment]) -> None:
    """Add up what every process has found; a layer may have been used by some of them only."""
    if ranks.size == 1:
        return
    for others in ranks.gather({name: (each.layer, each.kind, each.also) for name, each in found.items()}):
        for name, (layer, kind, also) in others.items():
            moment = found.setdefault(name, Moment(layer, kind, torch.empty(0), torch.empty(0)))
            moment.also = moment.also or also
    for part in ("second", "first", "sketch"):
        arrays = {name: getattr(each, part) for name, each in found.items() if getattr(each, part) is not None}
        arrays = {name: array for name, array in arrays.items() if array.numel()}
        ranks.sum_named(arrays)
        for name, array in arrays.items():
            setattr(found[name], part, array)
    for name in sorted(found):
        found[name].count = int(ranks.total(found[name].count))
