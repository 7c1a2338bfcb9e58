"""The result of discovery: independent scale factors and what each of them multiplies and divides."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from scipy import sparse
from torch import Tensor

from spiritlevel.errors import RescalingError
from spiritlevel.presenting import show
from spiritlevel.symmetry.group import ScaleGroup
from spiritlevel.symmetry.layerwise import LayerGroup, layer_conditions
from spiritlevel.symmetry.rescale import Rescaling


@dataclass(frozen=True)
class Slice:
    """The part `tensor[index]` of a parameter or buffer that one factor f multiplies by f**exponent."""

    name: str
    exponent: float
    index: tuple[Any, ...]


class Symmetries(ScaleGroup):
    """All positive rescalings of a network's parameters that leave its function alone.

    They form a group with `dimension` independent factors f_1, …, f_d > 0. Made by `find_symmetries`.

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

    def sample(self, strength: float, seed: int, kinds: Sequence[str] | None = None) -> "Rescaling":
        """A random rescaling: log-factors from N(0, strength²), those of other kinds than `kinds` left at zero."""
        generator = torch.Generator().manual_seed(seed)
        logs = strength * torch.randn(self.dimension, generator=generator, dtype=torch.float64)
        return self._rescaling(logs if kinds is None else torch.where(self.of_kind(*kinds), logs, 0.0))

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
        return Rescaling(self, log_factors)

    def describe(self) -> str:
        """A table of the groups: how many factors, what each multiplies and what it divides."""
        return str(show(self, "text"))

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
