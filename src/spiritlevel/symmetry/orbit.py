"""The dimension of a network's orbit: all that its groups can do to its parameters, each direction counted once.

The directions are tangents: θ∘e for the exponents e of a factor, X·θ for a matrix X of a frame, the numbers added by a
shift. In a small network they are written down and their rank is computed. In a large one a group counts
once it is shown to move some parameters in directions that only it has, after the groups that were shown before it.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from spiritlevel.symmetry.frames import Frame, Member, mixed
from spiritlevel.symmetry.group import ScaleGroup
from spiritlevel.symmetry.linear import LinearGroups
from spiritlevel.symmetry.shifts import Shift

LARGEST_TABLE = 1 << 24
"""Numbers in the largest table of tangents whose rank is computed."""
State = Mapping[str, Tensor]


def orbit_dimension(scales: ScaleGroup, linear: LinearGroups, state: State) -> int:
    """The number of independent directions that leave the function alone; state: all parameters and buffers."""
    parameters = {name: tensor.detach().cpu().double() for name, tensor in state.items()}
    number = scales.dimension + sum(g.dimension for g in (*linear.frames, *linear.shifts))
    moving = _moving(scales, linear, parameters)
    if number * sum(t.numel() for t in moving.values()) <= LARGEST_TABLE:
        return _rank(scales, linear, parameters, moving)
    return _Counted(scales, linear, parameters).total()


def _moving(scales: ScaleGroup, linear: LinearGroups, state: State) -> dict[str, Tensor]:
    names = {name for name, tensor in scales.tensors.items() if not tensor.is_buffer}
    names |= {name for group in (*linear.frames, *linear.shifts) for name in group.tensors}
    return {name: tensor for name, tensor in state.items() if name in names}


def _rank(scales: ScaleGroup, linear: LinearGroups, state: State, moving: State) -> int:
    rows = [
        torch.cat([direction.get(n, torch.zeros_like(t)).flatten() for n, t in moving.items()])
        for direction in tangents(scales, linear, state)
    ]
    if not rows:
        return 0
    table = torch.stack(rows)
    sizes = table.norm(dim=1)
    table = table[sizes > 0] / sizes[sizes > 0, None]
    return int(torch.linalg.matrix_rank(table, rtol=1e-10)) if len(table) else 0


def tangents(scales: ScaleGroup, linear: LinearGroups, state: State) -> Iterator[dict[str, Tensor]]:
    """One direction in the parameters for every free number of every group."""
    for factor in range(scales.dimension):
        logs = torch.zeros(scales.dimension, dtype=torch.float64)
        logs[factor] = 1.0
        exponents = scales.log_scales(logs)
        yield {name: state[name] * e for name, e in exponents.items() if name in state and bool((e != 0).any())}
    for frame in linear.frames:
        for X in algebra(frame):
            yield _along(frame, X, state)
    for shift in linear.shifts:
        for amounts in torch.eye(shift.dimension, dtype=torch.float64):
            yield shift.moved(state, amounts)


def algebra(frame: Frame) -> Iterator[Tensor]:
    """A basis of the matrices X along which a frame may move; for pairs of copies, of the blocks [n, 2, 2]."""
    n = frame.size
    if frame.form == "complex":
        for k in range(n):
            for block in ([[1.0, 0.0], [0.0, 1.0]], [[0.0, -1.0], [1.0, 0.0]]):
                X = torch.zeros(n, 2, 2, dtype=torch.float64)
                X[k] = torch.tensor(block)
                yield X
        return
    centre = torch.eye(n, dtype=torch.float64) - (1 / n if frame.form == "centred" else 0)
    for a in range(n):
        for b in range(n) if frame.form == "full" else range(a):
            X = torch.zeros(n, n, dtype=torch.float64)
            X[a, b] = 1.0
            yield X if frame.form == "full" else centre @ (X - X.T) @ centre


def _along(frame: Frame, X: Tensor, state: State) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for member in frame.members:
        gain = member.gain(state)
        t, M = member.vectors(state[member.name]) / gain, X if member.sign > 0 else -X.mT
        moved = mixed(M, t)
        part = member.written(torch.zeros_like(state[member.name]), moved * gain)
        found[member.name] = found.get(member.name, 0.0) + part
    return found


# --- large networks ------------------------------------------------------------------------------------------------


class _Counted:
    """Shows group after group to be independent of those not shown yet; what cannot be shown is not counted."""

    def __init__(self, scales: ScaleGroup, linear: LinearGroups, state: State) -> None:
        self._scales, self._linear, self._state = scales, linear, state
        self._frames, self._shifts = list(linear.frames), [s for s in linear.shifts if isinstance(s, Shift)]
        self._inside = sum(f.size for f in linear.frames if f.kind == "linear")

    def total(self) -> int:
        outside = self._independent_factors()
        shown = 0
        while True:
            done = [frame for frame in self._frames if self._is_free(frame)]
            if not done:
                break
            shown += sum(frame.dimension for frame in done)
            self._frames = [frame for frame in self._frames if frame not in done]
        return outside + shown + (self._shown_shifts() if not self._frames else 0)

    def _independent_factors(self) -> int:
        """Factors with a parameter of their own that no frame and no shift moves."""
        touched = {name for group in (*self._frames, *self._linear.shifts) for name in group.tensors}
        own: set[int] = set()
        for name, tensor in self._scales.tensors.items():
            if name in touched or tensor.is_buffer:
                continue
            for _, rows in tensor.terms:
                for row in np.unique(rows.numpy()).tolist():
                    columns = self._scales.basis[row].indices
                    own.update(columns.tolist() if len(columns) == 1 else [])
        return min(len(own), self._scales.dimension - self._inside)

    def _is_free(self, frame: Frame) -> bool:
        """Whether every matrix of the frame changes some parameter that no other open frame moves."""
        private = [m for m in frame.members if not self._shared(m, frame)]
        for sign in (1, -1):
            parts = [m.vectors(self._state[m.name]).flatten(1) for m in private if m.sign == sign]
            if parts and int(torch.linalg.matrix_rank(_gram(parts), rtol=1e-12, hermitian=True)) == frame.size:
                return True
        return False

    def _shared(self, member: Member, frame: Frame) -> bool:
        mine = set(member.positions.flatten().tolist())
        others = [m for f in self._frames if f is not frame for m in f.members if m.name == member.name]
        return any(m.axis != member.axis or mine & set(m.positions.flatten().tolist()) for m in others)

    def _shown_shifts(self) -> int:
        shown, open_shifts = 0, list(self._shifts)
        while True:
            done = [s for s in open_shifts if not any(s.name in other.tensors[1:] for other in open_shifts)]
            if not done:
                return shown
            shown += sum(s.dimension for s in done)
            open_shifts = [s for s in open_shifts if s not in done]


def _gram(parts: Sequence[Tensor]) -> Tensor:
    return sum(
        (part @ part.T / part.square().sum().clamp(min=1e-300) for part in parts), start=torch.zeros(()).double()
    )
