"""The balanced member of an orbit with linear groups: both sides of every change of basis with equal Gram matrices.

A frame's vectors U (members of sign +1) and V (sign −1) become A U and A⁻ᵀ V. Both have the same Gram matrix for
AᵀA = (UUᵀ)⁻¹ # VVᵀ, the geometric mean, which also has the least Σ θ². What is left, a rotation, turns the common Gram
matrix into a diagonal one with falling entries; signs make the sum of cubes of each row positive.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spiritlevel.errors import RescalingError
from spiritlevel.symmetry.canonical import TOLERANCE, Balance, least_sum
from spiritlevel.symmetry.discover import find_symmetries
from spiritlevel.symmetry.frames import Frame, in_pairs
from spiritlevel.symmetry.symmetries import Symmetries
from spiritlevel.symmetry.transformation import BasisChange, ScaleChange, Transformation

SINGULAR = 1e-12
"""A Gram matrix with a smaller quotient of eigenvalues has no balanced form."""
MOST_ROUNDS = 500


@dataclass(frozen=True, eq=False)
class GroupBalance:
    """What balances a network: its rescalings and its linear groups.

    transformation: to the balanced member. left_out: names of linear groups with a singular Gram matrix, as in an adapter
    that was never trained; they have no balanced form and stay. dead_channels: as in `Balance`. residual: the largest change
    that another round would make, as a logarithm.

    >>> import spiritlevel as sl
    >>> model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)).double()
    >>> found = balance_groups(model, sl.find_symmetries(model, torch.eye(3, dtype=torch.float64)))
    >>> flat = found.transformation.apply(model)
    >>> torch.allclose(flat[0].weight @ flat[0].weight.T, flat[1].weight.T @ flat[1].weight)
    True
    """

    transformation: Transformation
    left_out: tuple[str, ...]
    dead_channels: tuple[str, ...]
    residual: float


def canonicalize(model: nn.Module, example_input: Any) -> nn.Module:
    """The balanced copy of a model: the same for every member of its orbit where every channel is alive.

    Channels have equal norms coming in and going out, and both sides of a linear group equal Gram matrices. Rotations of
    a residual stream and shifts are not undone.

    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    >>> _ = nn.init.constant_(model[0].weight, 8.0), nn.init.constant_(model[2].weight, 2.0)
    >>> [weight.item() for weight in canonicalize(model, torch.ones(1, 1)).parameters()]  # 8·2 = 4·4
    [4.0, 4.0]
    """
    return balance_groups(model, find_symmetries(model, example_input)).transformation.apply(model)


def balance_groups(model: nn.Module, symmetries: Symmetries) -> GroupBalance:
    """The transformation to the member of the orbit with balanced channels and equal Gram matrices.

    Channels and Gram matrices are balanced in turn until neither changes the other any more: each step is the exact minimum
    of Σ θ² over its own group.
    """
    state = {name: t.detach().cpu().double() for name, t in (*model.named_parameters(), *model.named_buffers())}
    frames = [frame for frame in symmetries.linear.frames if frame.kind == "linear"]
    singular = [frame.name for frame in frames if frame.form == "full" and _is_singular(frame, state)]
    full = [frame for frame in frames if frame.form == "full" and frame.name not in singular]
    found, moved, residual = _rounds(symmetries, full, state)
    turn = BasisChange(tuple((frame, _turn(frame, moved)) for frame in frames if frame.name not in singular))
    transformation = Transformation(symmetries, (*found.steps, turn))
    return GroupBalance(transformation, tuple(singular), found.balance.dead_channels, residual)


@dataclass(frozen=True, eq=False)
class _Rounds:
    steps: tuple[ScaleChange | BasisChange, ...]
    balance: Balance


def _rounds(
    symmetries: Symmetries, frames: list[Frame], state: dict[str, Tensor]
) -> tuple[_Rounds, dict[str, Tensor], float]:
    steps: list[ScaleChange | BasisChange] = []
    for _ in range(MOST_ROUNDS):
        scales = least_sum(symmetries, {name: tensor.square() for name, tensor in state.items()}, 1)
        state = ScaleChange(scales.rescaling).on(state)
        roots = [(frame, _root(frame, state)) for frame in frames]
        state = BasisChange(tuple(roots)).on(state)
        steps += [ScaleChange(scales.rescaling), BasisChange(tuple(roots))]
        sizes = [float(torch.linalg.eigvalsh(A).log().abs().max()) for _, A in roots]
        residual = max(sizes, default=0.0)
        if residual <= 10 * TOLERANCE:
            return _Rounds(_merged(steps), scales), state, residual
    raise RescalingError(
        f"balancing channels and linear groups in turn left a change of {residual:.1e} after {MOST_ROUNDS} rounds; "
        "some parameters differ by too many orders of magnitude: sample a weaker transformation first"
    )


def _merged(steps: list[ScaleChange | BasisChange]) -> tuple[ScaleChange | BasisChange, ...]:
    """The steps that change something."""
    return tuple(
        step
        for step in steps
        if (isinstance(step, ScaleChange) and bool(step.rescaling.log_factors.any()))
        or (isinstance(step, BasisChange) and step.changes)
    )


def _stacked(frame: Frame, state: Mapping[str, Tensor], sign: int) -> Tensor:
    """All vectors of one sign in the coordinates of the frame, [n, …]."""
    members = [member for member in frame.members if member.sign == sign]
    return torch.cat([(m.vectors(state[m.name]) / m.gain(state)).flatten(1) for m in members], dim=1)


def _gram(frame: Frame, state: Mapping[str, Tensor], sign: int) -> Tensor:
    vectors = _stacked(frame, state, sign)
    return vectors @ vectors.T


def _is_singular(frame: Frame, state: Mapping[str, Tensor]) -> bool:
    for sign in (1, -1):
        values = torch.linalg.eigvalsh(_gram(frame, state, sign))
        if not float(values[0]) > SINGULAR * float(values[-1]):
            return True
    return False


def _root(frame: Frame, state: Mapping[str, Tensor]) -> Tensor:
    """The symmetric A with A²(UUᵀ)A² = VVᵀ: the square root of the geometric mean."""
    U, V = _gram(frame, state, 1), _gram(frame, state, -1)
    half, back = _power(U, 0.5), _power(U, -0.5)
    return _power(back @ _power(half @ V @ half, 0.5) @ back, 0.5)


def _power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    result: Tensor = (vectors * values.clamp(min=0) ** exponent) @ vectors.T
    return (result + result.T) / 2


def _turn(frame: Frame, state: Mapping[str, Tensor]) -> Tensor:
    """The rotation to a diagonal Gram matrix; for pairs of copies, one rotation for each pair."""
    if frame.form == "complex":
        return torch.stack([_turned_pair(frame.at([k]), state) for k in range(frame.size)])
    U = _stacked(frame, state, 1)
    _, vectors = torch.linalg.eigh(U @ U.T)
    rotation: Tensor = vectors.flip(1).T
    return torch.as_tensor(_signs(rotation @ U)[:, None] * rotation)


def _turned_pair(frame: Frame, state: Mapping[str, Tensor]) -> Tensor:
    members = [m for m in frame.members if m.sign > 0]
    pairs = [in_pairs(m.vectors(state[m.name]))[0].transpose(0, 1).flatten(1) for m in members]
    U = torch.cat(pairs, dim=1)
    _, vectors = torch.linalg.eigh(U @ U.T)
    first = vectors[:, 1]
    first = first * _signs((first @ U)[None])[0]
    return torch.stack([first, torch.stack([-first[1], first[0]])])


def _signs(rows: Tensor) -> Tensor:
    return torch.where(rows.pow(3).sum(1) < 0, -1.0, 1.0).to(rows)
