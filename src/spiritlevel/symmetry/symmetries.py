"""The result of discovery: independent scale factors and what each of them multiplies and divides."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from spiritlevel.errors import RescalingError

if TYPE_CHECKING:
    from spiritlevel.symmetry.layerwise import LayerGroup
    from spiritlevel.symmetry.rescale import Rescaling


@dataclass(frozen=True, eq=False)
class TensorScale:
    """How the factors scale one parameter or buffer: log-scale = Σ over terms (c, rows) of c · (basis @ log f)[rows].

    rows has the tensor's number of dimensions, with length one where the scale does not vary.
    role: "map", "factor" or "shift" as in the network; "statistic" for a running mean.
    """

    name: str
    role: str
    shape: torch.Size
    terms: tuple[tuple[float, Tensor], ...]

    @property
    def is_buffer(self) -> bool:
        """Whether this is a buffer, not a parameter."""
        return self.role == "statistic"


@dataclass(frozen=True)
class Slice:
    """The part `tensor[index]` of a parameter or buffer that one factor f multiplies by f**exponent."""

    name: str
    exponent: float
    index: tuple[Any, ...]


@dataclass(frozen=True)
class Group:
    """Factors that belong together: one for each channel of one activation, which move the same tensors.

    kind: "batch-norm" where the factors also multiply running statistics (the side before a normalization),
    "neuron" where they multiply parameters only. factors: their positions. multiplies, divides: names of tensors.
    """

    name: str
    kind: str
    factors: tuple[int, ...]
    multiplies: tuple[str, ...]
    divides: tuple[str, ...]


class Symmetries:
    """All positive rescalings of a network's parameters that leave its function alone.

    They form a group with `dimension` independent factors f_1, …, f_d > 0. Made by `find_symmetries`.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorScale],
        basis: sparse.csr_matrix,
        labels: Sequence[str],
        aliases: Mapping[str, str],
        example: tuple[tuple[Any, ...], dict[str, Any]],
        barriers: Mapping[str, int],
        maps: Sequence[str],
    ) -> None:
        self.tensors = dict(tensors)
        self.basis = basis
        self.aliases = dict(aliases)
        self.example = example
        self.barriers = dict(barriers)
        self.maps = tuple(maps)
        self._labels = tuple(labels)

    @property
    def dimension(self) -> int:
        """The number of independent scale factors."""
        return int(self.basis.shape[1])

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The factors grouped by the activation whose channels they scale, in the order of the network."""
        signs = {name: self._factor_signs(tensor) for name, tensor in self.tensors.items()}
        shape = len(signs), self.dimension  # said outright: no tensor at all has entries where every one has width zero
        up = np.array([signs[name][0] for name in signs]).reshape(shape).T
        down = np.array([signs[name][1] for name in signs]).reshape(shape).T
        members: dict[tuple[str, bytes, bytes], list[int]] = {}
        for factor, label in enumerate(self._labels):
            members.setdefault((label, up[factor].tobytes(), down[factor].tobytes()), []).append(factor)
        met: Counter[str] = Counter()
        made = []
        for (label, *_), factors in members.items():
            met[label] += 1
            name = label if met[label] == 1 else f"{label} ({met[label]})"
            multiplies = tuple(n for n, moves in zip(signs, up[factors[0]], strict=True) if moves)
            divides = tuple(n for n, moves in zip(signs, down[factors[0]], strict=True) if moves)
            buffers = any(self.tensors[n].is_buffer for n in (*multiplies, *divides))
            made.append(Group(name, "batch-norm" if buffers else "neuron", tuple(factors), multiplies, divides))
        return tuple(made)

    def _factor_signs(self, tensor: TensorScale) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        up, down = np.zeros(self.dimension, dtype=bool), np.zeros(self.dimension, dtype=bool)
        for coefficient, rows in tensor.terms:
            entries = (coefficient * self.basis[np.unique(rows.numpy())]).tocoo()
            up[entries.col[entries.data > 0]] = True
            down[entries.col[entries.data < 0]] = True
        return up, down

    @cached_property
    def layer_groups(self) -> tuple["LayerGroup", ...]:
        """The coarser symmetry with one factor λ per layer: the products of factors that must be one."""
        from spiritlevel.symmetry.layerwise import layer_conditions

        return layer_conditions(self)

    @cached_property
    def _columns(self) -> sparse.csc_matrix:
        return self.basis.tocsc()

    def slices(self, factor: int) -> tuple[Slice, ...]:
        """The slices of parameters and buffers that one factor multiplies (exponent > 0) or divides (< 0)."""
        column = torch.from_numpy(self._columns[:, [factor]].toarray().ravel())
        group = next(group for group in self.groups if factor in group.factors)
        found = []
        for name in dict.fromkeys((*group.multiplies, *group.divides)):
            tensor = self.tensors[name]
            parts = [c * column[rows] for c, rows in tensor.terms]
            moving = [part for part in parts if bool(part.any())]
            total = sum(moving, start=torch.zeros((), dtype=torch.float64))
            exponents = sorted({e for e in torch.unique(total).tolist() if e != 0}, reverse=True)
            found += [Slice(name, e, _index(total == e, tensor.shape)) for e in exponents]
        return tuple(found)

    def log_scales(self, log_factors: Tensor) -> dict[str, Tensor]:
        """For each tensor that moves, the logarithm of what multiplies it, broadcastable to its shape (float64)."""
        values = torch.from_numpy(self.basis @ log_factors.detach().double().cpu().numpy())
        zero = torch.zeros((), dtype=torch.float64)
        return {
            name: sum((c * values[rows] for c, rows in tensor.terms), start=zero)
            for name, tensor in self.tensors.items()
        }

    def sample(self, strength: float, seed: int, kinds: Sequence[str] | None = None) -> "Rescaling":
        """A random rescaling: log-factors from N(0, strength²), those of other kinds than `kinds` left at zero."""
        generator = torch.Generator().manual_seed(seed)
        logs = strength * torch.randn(self.dimension, generator=generator, dtype=torch.float64)
        return self._rescaling(logs if kinds is None else torch.where(self.of_kind(*kinds), logs, 0.0))

    def of_kind(self, *kinds: str) -> Tensor:
        """Which factors belong to groups of the given kinds, as a boolean vector."""
        known = {group.kind for group in self.groups} | {"neuron", "batch-norm"}
        if unknown := set(kinds) - known:
            raise RescalingError(f"kinds of factors are {sorted(known)}; got {sorted(unknown)}")
        mask = torch.zeros(self.dimension, dtype=torch.bool)
        for group in self.groups:
            if group.kind in kinds:
                mask[list(group.factors)] = True
        return mask

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
        groups = {group.name: group for group in self.groups}
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
        from spiritlevel.symmetry.rescale import Rescaling

        return Rescaling(self, log_factors)

    def describe(self) -> str:
        """A table of the groups: how many factors, what each multiplies and what it divides."""
        from spiritlevel.symmetry.describe import describe

        return describe(self)

    def __repr__(self) -> str:
        return f"Symmetries(dimension={self.dimension}, groups={len(self.groups)})"

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
