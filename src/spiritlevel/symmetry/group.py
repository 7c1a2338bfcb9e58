"""A group of rescalings as numbers; `Symmetries` adds what can be done with it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from spiritlevel.errors import RescalingError


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

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of all tensors that move."""
        return tuple(dict.fromkeys((*self.multiplies, *self.divides)))


class ScaleGroup:
    """The numbers of a group of rescalings: which tensors move, and how with each independent factor."""

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
        self.shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
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
    def scale_groups(self) -> tuple[Group, ...]:
        """The factors grouped by the activation whose channels they scale, in the order of the network."""
        signs = {name: self._factor_signs(tensor) for name, tensor in self.tensors.items()}
        shape = len(signs), self.dimension  # reshaped, because NumPy cannot tell the shape of an empty list
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

    def log_scales(self, log_factors: Tensor) -> dict[str, Tensor]:
        """For each tensor that moves, the logarithm of what multiplies it, broadcastable to its shape (float64)."""
        values = torch.from_numpy(self.basis @ log_factors.detach().cpu().double().numpy())
        zero = torch.zeros((), dtype=torch.float64)
        return {
            name: sum((c * values[rows] for c, rows in tensor.terms), start=zero)
            for name, tensor in self.tensors.items()
        }

    def of_kind(self, *kinds: str) -> Tensor:
        """Which factors belong to groups of the given kinds, as a boolean vector."""
        known = {group.kind for group in self.scale_groups} | {"neuron", "batch-norm"}
        if unknown := set(kinds) - known:
            raise RescalingError(f"kinds of factors are {sorted(known)}; got {sorted(unknown)}")
        mask = torch.zeros(self.dimension, dtype=torch.bool)
        for group in self.scale_groups:
            if group.kind in kinds:
                mask[list(group.factors)] = True
        return mask
