"""The result of discovery: independent scale factors and what each of them multiplies and divides."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import torch
from scipy import sparse
from torch import Tensor, nn

from spiritlevel.errors import RescalingError
from spiritlevel.presenting import show
from spiritlevel.symmetry.group import ScaleGroup
from spiritlevel.symmetry.layerwise import LayerGroup, layer_conditions
from spiritlevel.symmetry.linear import LinearGroups, find_linear_groups
from spiritlevel.symmetry.orbit import orbit_dimension
from spiritlevel.symmetry.rescale import Rescaling
from spiritlevel.symmetry.transformation import ScaleChange, Transformation, random_change, random_shift

OTHER_KINDS = ("rescaling", "linear", "rotation", "shift")
"""The kinds of groups; those of rescalings are named more closely by what they cross."""


@dataclass(frozen=True)
class Slice:
    """The part `tensor[index]` of a parameter or buffer that one factor f multiplies by f**exponent."""

    name: str
    exponent: float
    index: tuple[Any, ...]


@dataclass(frozen=True)
class SymmetryGroup:
    """One group of changes that leave a network's function alone.

    kind: "rescaling" (positive factors for channels), "linear" (invertible matrices between two linear maps), "rotation"
    (of a stream that is normalized wherever it is read) or "shift" (numbers added to biases). tensors: the parameters
    and buffers that move. dimension: how many numbers are free. Rescalings of the channels of a linear group are
    members of both.

    >>> SymmetryGroup("0.weight[0:2] · 1.weight[:, 0:2]", "linear", ("0.weight", "1.weight"), 4).dimension
    4
    """

    name: str
    kind: str
    tensors: tuple[str, ...]
    dimension: int


class Symmetries(ScaleGroup):
    """All that can be done to a network's parameters and leaves its function alone.

    The positive rescalings form a group with `dimension` independent factors f_1, …, f_d > 0. `groups` lists these and
    the groups of invertible matrices, of rotations and of shifts. Made by `find_symmetries`.

    >>> import spiritlevel as sl
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 2, bias=False), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    >>> symmetries = sl.find_symmetries(model, torch.ones(1, 1))
    >>> symmetries.dimension, symmetries.of_kind("neuron").tolist()
    (2, [True, True])
    >>> [(part.name, part.exponent) for part in symmetries.slices(0)]  # what the first factor multiplies and divides
    [('0.weight', 1.0), ('2.weight', -1.0)]
    >>> symmetries.rescaling([2.0, 4.0]).scales()["2.weight"].tolist()
    [[0.5, 0.25]]
    >>> symmetries.log_scales(torch.tensor([1.0, 3.0]))["2.weight"].tolist()
    [[-1.0, -3.0]]
    >>> symmetries.sample(strength=0.5, seed=0).apply(model) is model, symmetries.describe().splitlines()[0]
    (False, '2 independent scale factors in 1 groups')
    """

    def __init__(self, *args: Any, model: nn.Module, gains: Collection[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._network, self._gains = model, tuple(gains)
        self.shapes = {n: tensor.shape for n, tensor in (*model.named_parameters(), *model.named_buffers())}

    @cached_property
    def linear(self) -> LinearGroups:
        """The changes of basis and the shifts, looked for when they are first asked for."""
        return find_linear_groups(self._network, *self.example, self._gains)

    @cached_property
    def groups(self) -> tuple[SymmetryGroup, ...]:
        """Every group, rescalings first, in the order of the network."""
        scales = [SymmetryGroup(g.name, "rescaling", g.tensors, len(g.factors)) for g in self.scale_groups]
        frames = [SymmetryGroup(f.name, f.kind, f.tensors, f.dimension) for f in self.linear.frames]
        shifts = [SymmetryGroup(s.title, "shift", s.tensors, s.dimension) for s in self.linear.shifts]
        return (*scales, *frames, *shifts)

    @cached_property
    def orbit_dimension(self) -> int:
        """The number of independent directions in which all groups together can move the parameters found.

        Never more than the nullity of the Jacobian of the outputs. Rescalings inside a linear group count once.
        """
        network = self._network
        return orbit_dimension(self, self.linear, {**dict(network.named_parameters()), **dict(network.named_buffers())})

    @cached_property
    def layer_groups(self) -> tuple["LayerGroup", ...]:
        """The coarser symmetry with one factor λ per layer: the products of factors that must be one."""
        return layer_conditions(self)

    @cached_property
    def _columns(self) -> sparse.csc_matrix:
        return self.basis.tocsc()

    def slices(self, factor: int) -> tuple[Slice, ...]:
        """The slices of parameters and buffers that one factor multiplies (exponent > 0) or divides (< 0)."""
        column = torch.from_numpy(self._columns[:, [factor]].toarray().ravel())
        group = next(group for group in self.scale_groups if factor in group.factors)
        found = []
        for name in dict.fromkeys((*group.multiplies, *group.divides)):
            tensor = self.tensors[name]
            parts = [c * column[rows] for c, rows in tensor.terms]
            moving = [part for part in parts if bool(part.any())]
            total = sum(moving, start=torch.zeros((), dtype=torch.float64))
            exponents = sorted({e for e in torch.unique(total).tolist() if e != 0}, reverse=True)
            found += [Slice(name, e, _index(total == e, tensor.shape)) for e in exponents]
        return tuple(found)

    @overload
    def sample(self, strength: float, seed: int, kinds: None = None) -> Rescaling: ...

    @overload
    def sample(self, strength: float, seed: int, kinds: Sequence[str]) -> Rescaling | Transformation: ...

    def sample(self, strength: float, seed: int, kinds: Sequence[str] | None = None) -> Rescaling | Transformation:
        """A random member of the groups of the given kinds; by default a random rescaling.

        Log-factors are from N(0, strength²), "neuron" and "batch-norm" being those that cross no normalization or one.
        Matrices are exp(strength·G/√n) with normal entries in G, skew for "rotation"; shifts are from N(0, strength²).
        """
        generator = torch.Generator().manual_seed(seed)
        logs = strength * torch.randn(self.dimension, generator=generator, dtype=torch.float64)
        if kinds is None:
            return self._rescaling(logs)
        rest = [kind for kind in kinds if kind not in OTHER_KINDS]
        chosen = self.of_kind(*rest) if "rescaling" not in kinds else torch.ones(self.dimension, dtype=torch.bool)
        rescaling = self._rescaling(torch.where(chosen, logs, 0.0))
        if not set(kinds) & set(OTHER_KINDS[1:]):
            return rescaling
        frames = [frame for frame in self.linear.frames if frame.kind in kinds]
        shifts = self.linear.shifts if "shift" in kinds else ()
        steps = (ScaleChange(rescaling), random_change(frames, strength, generator))
        return Transformation(self, (*steps, random_shift(shifts, strength, generator)))

    def rescaling(self, factors: Tensor | Sequence[float] | Mapping[str, Any]) -> "Rescaling":
        """The rescaling with given positive factors: all of them, or by group name (one number or one per channel)."""
        if isinstance(factors, Mapping):
            return self._rescaling(self._by_group(factors).log())
        given = torch.as_tensor(factors, dtype=torch.float64)
        if given.shape != (self.dimension,) or not bool(((given > 0) & given.isfinite()).all()):
            raise RescalingError(
                f"factors must be {self.dimension} positive finite numbers, one per independent factor; "
                f"got {given.numel()} numbers of shape {tuple(given.shape)}, the least {_least(given)}"
            )
        return self._rescaling(given.log())

    def _by_group(self, factors: Mapping[str, Any]) -> Tensor:
        groups = {group.name: group for group in self.scale_groups}
        result = torch.ones(self.dimension, dtype=torch.float64)
        for name, value in factors.items():
            if name not in groups:
                raise RescalingError(f"no group of factors is named {name!r}; the groups are {sorted(groups)}")
            index, given = list(groups[name].factors), torch.as_tensor(value, dtype=torch.float64)
            if given.numel() not in (1, len(index)) or not bool(((given > 0) & given.isfinite()).all()):
                raise RescalingError(f"group {name!r} takes one positive number or {len(index)} of them; got {value!r}")
            result[index] = given.flatten().expand(len(index))
        return result

    def _rescaling(self, log_factors: Tensor) -> "Rescaling":
        return Rescaling(self, log_factors)

    def describe(self) -> str:
        """A table of the groups: how many factors, what each multiplies and what it divides."""
        return str(show(self, "text"))

    def __repr__(self) -> str:
        return f"Symmetries(dimension={self.dimension}, groups={len(self.scale_groups)})"

    def __str__(self) -> str:
        return self.describe()


def _least(values: Tensor) -> str:
    return f"{values.min().item():g}" if values.numel() else "of none"


def _index(mask: Tensor, shape: torch.Size) -> tuple[Any, ...]:
    """The index that selects a broadcastable mask: whole dimensions, and lists of positions along the others."""
    varying = [d for d, n in enumerate(mask.shape) if n > 1]
    marked = {d: mask.any(dim=[e for e in range(mask.dim()) if e != d]) if mask.dim() > 1 else mask for d in varying}
    partial = [d for d in varying if not bool(marked[d].all())]
    if len(partial) <= 1 and bool(mask.any()) and int(mask.sum()) == math.prod(int(m.sum()) for m in marked.values()):
        return tuple(marked[d].nonzero().flatten() if d in partial else slice(None) for d in range(len(shape)))
    return tuple(mask.expand(shape).nonzero(as_tuple=True))
