"""Frames: channels of an activation that may be written in another basis, and the parameters that would follow.

A frame has n coordinates. A member is an axis of a parameter along which those coordinates lie, once or several times
("copies": grouped-query attention). With sign +1 the member's vectors t become D A D⁻¹ t, with sign −1 they become
D⁻¹ A⁻ᵀ D t, where A is the change of basis and D the product of the gains between the activation and the member.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spiritlevel.symmetry.group import TensorScale
from spiritlevel.symmetry.scales import Leaf
from spiritlevel.symmetry.trace import Recorder
from spiritlevel.symmetry.variables import Solution, compact, squeezed

Ints = NDArray[np.int64]
Form = Literal["full", "complex", "orthogonal", "centred"]
"""Which matrices a frame allows: all invertible ones, pairs that act as complex numbers, rotations, rotations that fix 1."""


@dataclass(frozen=True, eq=False)
class Gain:
    """A vector parameter, raised to a power, that stands between a frame and a member: its entries [n, copies]."""

    name: str
    exponent: int
    positions: Tensor


@dataclass(frozen=True, eq=False)
class Member:
    """The positions [n, copies] along one axis of a parameter where a frame's coordinates lie."""

    name: str
    axis: int
    sign: int
    positions: Tensor
    gains: tuple[Gain, ...] = ()

    def vectors(self, tensor: Tensor) -> Tensor:
        """The entries of a tensor shaped like the parameter, as [n, copies, all other axes] in double precision."""
        return tensor.detach().double().movedim(self.axis, 0)[self.positions].reshape(*self.positions.shape, -1)

    def written(self, tensor: Tensor, vectors: Tensor) -> Tensor:
        """A copy of the tensor with other entries at the member's positions."""
        result = tensor.double().clone()
        moved = result.movedim(self.axis, 0)
        moved[self.positions] = vectors.reshape(*self.positions.shape, *moved.shape[1:])
        return result

    def gain(self, state: Mapping[str, Tensor]) -> Tensor:
        """The diagonal of D to the power of the sign, as [n, copies, 1]."""
        result = torch.ones(self.positions.shape, dtype=torch.float64)
        for gain in self.gains:
            values = state[gain.name].detach().cpu().double().flatten()[gain.positions]
            result = result * values**gain.exponent
        return result.unsqueeze(-1)

    def at(self, coordinates: Sequence[int]) -> "Member":
        """The same member with some of the coordinates."""
        index = torch.tensor(list(coordinates))
        gains = tuple(replace(gain, positions=gain.positions[index]) for gain in self.gains)
        return replace(self, positions=self.positions[index], gains=gains)


@dataclass(frozen=True, eq=False)
class Frame:
    """Coordinates that may change basis together, and every parameter that follows."""

    members: tuple[Member, ...]
    form: Form = "full"

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return len(self.members[0].positions)

    @property
    def name(self) -> str:
        """The first slice of each sign."""
        first = [next((m for m in self.members if m.sign == sign), None) for sign in (1, -1)]
        return " · ".join(f"{m.name}{slice_of(m.positions, m.axis)}" for m in first if m is not None)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The parameters that move."""
        return tuple(dict.fromkeys(member.name for member in self.members))

    @property
    def kind(self) -> str:
        """The kind of group: "linear" or "rotation"."""
        return "linear" if self.form in ("full", "complex") else "rotation"

    @property
    def dimension(self) -> int:
        """The dimension of the group of matrices."""
        n = self.size
        sizes = {"full": n * n, "complex": 2 * n, "orthogonal": n * (n - 1) // 2, "centred": (n - 1) * (n - 2) // 2}
        return sizes[self.form]

    def at(self, coordinates: Sequence[int], form: Form = "full") -> "Frame":
        """The frame of some of the coordinates."""
        return Frame(tuple(member.at(coordinates) for member in self.members), form)


def in_pairs(vectors: Tensor) -> Tensor:
    """Vectors [n, copies, …] with their copies two by two, [n, pairs, 2, …]: rotary positions act on pairs."""
    return vectors.reshape(len(vectors), -1, 2, vectors.shape[-1])


def mixed(matrix: Tensor, vectors: Tensor) -> Tensor:
    """A matrix [n, n], or blocks [n, 2, 2] for pairs of copies, on vectors [n, copies, …]."""
    if matrix.dim() == 2:
        return torch.einsum("ab,bcr->acr", matrix, vectors)
    return torch.einsum("nij,npjr->npir", matrix, in_pairs(vectors)).reshape(vectors.shape)


def slice_of(positions: Tensor, axis: int = 0) -> str:
    """Positions along an axis, written like an index."""
    places = np.unique(positions.numpy())
    low, high = int(places[0]), int(places[-1]) + 1
    colons = ":, " * axis
    return f"[{colons}{low}:{high}]" if len(places) == high - low else f"[{colons}{len(places)} of {low}:{high}]"


def propose_frames(recorder: Recorder, solution: Solution) -> list[Frame]:
    """Sets of free scales of a linear recording that lie in the same places: what a change of basis might mix."""
    table = _Places(recorder, solution)
    alike: dict[tuple[tuple[str, int, int, int], ...], list[int]] = defaultdict(list)
    for factor, places in table.of_factor.items():
        if factor not in table.gains and factor not in table.refused:
            alike[tuple((*key, len(found)) for key, found in places.items())].append(factor)
    frames = (table.frame(factors, [key[:3] for key in keys]) for keys, factors in alike.items())
    return [frame for frame in frames if frame is not None and {m.sign for m in frame.members} == {1, -1}]


class _Places:
    """Where every free scale of a recording lies: (parameter, axis, sign) → positions."""

    def __init__(self, recorder: Recorder, solution: Solution) -> None:
        self._basis = solution.basis
        self.of_factor: dict[int, dict[tuple[str, int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
        self.refused: set[int] = set()
        self.gains: dict[int, tuple[str, int]] = {}
        self._rows: dict[tuple[str, int, int], dict[int, int]] = {}
        tensors = [t for leaf in recorder.leaves.values() if (t := _scaled(leaf, solution)) is not None]
        for tensor in sorted(tensors, key=lambda t: t.role != "factor"):
            for coefficient, rows in tensor.terms:
                self._read(tensor, coefficient, rows)

    def _row(self, row: int) -> tuple[list[int], list[float]]:
        span = slice(self._basis.indptr[row], self._basis.indptr[row + 1])
        return self._basis.indices[span].tolist(), self._basis.data[span].tolist()

    def _read(self, tensor: TensorScale, coefficient: float, rows: Tensor) -> None:
        axes = [d for d, n in enumerate(rows.shape) if n > 1]
        moving = np.unique(rows.numpy())
        if len(axes) != 1:  # one scale for all, or one for every entry: nothing that a matrix could act on
            for row in moving.tolist():
                self.refused.update(self._row(row)[0])
            return
        for position, row in enumerate(rows.flatten().tolist()):
            factors, values = self._row(row)
            self._place(tensor, axes[0], position, dict(zip(factors, (coefficient * v for v in values), strict=True)))
            for factor in factors:
                self._rows.setdefault((tensor.name, axes[0], position), {})[factor] = row

    def _place(self, tensor: TensorScale, axis: int, position: int, exponents: dict[int, float]) -> None:
        if tensor.role == "factor":
            if list(exponents.values()) == [1.0]:
                (factor,) = exponents
                if factor in self.gains:
                    self.refused.add(factor)
                self.gains[factor] = (tensor.name, position)
            else:
                self.refused.update(exponents)
            return
        mixed = [f for f in exponents if f not in self.gains]
        if len(mixed) > 1 or any(abs(value) != 1 for value in exponents.values()):
            self.refused.update(mixed)
        elif mixed:
            self.of_factor[mixed[0]][tensor.name, axis, int(exponents[mixed[0]])].append(position)
            if self.refused & exponents.keys():
                self.refused.update(mixed)

    def frame(self, factors: list[int], keys: Sequence[tuple[str, int, int]]) -> Frame | None:
        members = []
        for key in keys:
            positions = torch.tensor([self.of_factor[factor][key] for factor in factors])
            gains = self._gains(key, factors, positions)
            if gains is None:
                return None
            members.append(Member(*key, positions, gains))
        return Frame(tuple(members))

    def _gains(self, key: tuple[str, int, int], factors: list[int], positions: Tensor) -> tuple[Gain, ...] | None:
        """The gains of a member; None where coordinates pass different ones."""
        name, axis, sign = key
        entries = []
        for factor, places in zip(factors, positions.tolist(), strict=True):
            for place in places:
                row = self._rows[name, axis, place][factor]
                found, values = self._row(row)
                own = dict(zip(found, values, strict=True))
                turn = sign / own[factor]
                entries.append(
                    {self.gains[f][0]: (turn * v, self.gains[f][1]) for f, v in own.items() if f in self.gains}
                )
        shape = {tuple(sorted((gain, exponent) for gain, (exponent, _) in entry.items())) for entry in entries}
        if len(shape) != 1:
            return None
        return tuple(
            Gain(gain, round(exponent), torch.tensor([entry[gain][1] for entry in entries]).view(positions.shape))
            for gain, exponent in shape.pop()
        )


def _scaled(leaf: Leaf, solution: Solution) -> TensorScale | None:
    """How the free scales multiply one parameter, without axes along which nothing varies."""
    terms = []
    for coefficient, ids in leaf.terms or ():
        rows = squeezed(compact(solution.classes[squeezed(ids)].expand(ids.shape)))
        if solution.basis[np.unique(rows.numpy())].nnz:
            terms.append((float(coefficient), rows))
    return TensorScale(leaf.name, leaf.role, leaf.value.shape, tuple(terms)) if terms else None
