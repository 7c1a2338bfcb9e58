"""Which proposed changes of basis leave the function alone, seen on derivatives.

A matrix X moves the parameters of a frame along X·θ. The outputs stay where they are for all X of a Lie algebra exactly if
⟨∇s, X·θ⟩ = Σ_ab X_ab N_ab = 0 for every scalar s made from the outputs, and N needs one gradient: with vectors t and
gradients g of each member, N = Σ g tᵀ over members of sign +1, minus Σ t gᵀ over those of sign −1. Taken at random
parameters and for a random s, an entry of N that should not vanish does not: the network is an analytic function of
what a frame moves, because `linear_trace.py` stops at every cut.
"""

import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy import sparse
from scipy.sparse import csgraph
from torch import Tensor, nn

from spiritlevel.network.modes import Mode
from spiritlevel.network.rewrites import PlainDerivatives
from spiritlevel.problem.quiet import undisturbed
from spiritlevel.symmetry.frames import Frame, Member, in_pairs
from spiritlevel.symmetry.trace import tensors_in

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""The largest derivative along a symmetry that rounding may leave, relative to its summands."""

NOISE = 65537
"""Random numbers drawn for a parameter, repeated in a larger one: drawing all would take longer than the gradient."""
ALWAYS_MOVED = 1 << 20
"""Larger matrices are random enough unless all entries are equal, as in an adapter that was never trained."""


@dataclass(frozen=True, eq=False)
class Witness:
    """Random parameters of a network, the gradient of a random combination of its outputs there, and its precision."""

    state: Mapping[str, Tensor]
    gradient: Mapping[str, Tensor]
    tolerance: float

    @cached_property
    def largest(self) -> float:
        """The largest entry of the gradient."""
        return max(float(g.abs().max()) for g in self.gradient.values() if g.numel())


def witness(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: Collection[str]) -> Witness | None:
    """The gradient in the named parameters at random ones near the model's, in double precision where the model can."""
    for dtype in (torch.float64, torch.float32):
        try:
            found = _gradient(model, args, kwargs, names, dtype)
        except RuntimeError:  # a network that makes tensors of its own precision inside
            continue
        return found
    return None


def _gradient(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: Collection[str], dtype: torch.dtype
) -> Witness | None:
    generator = torch.Generator().manual_seed(0)
    moved = copy.deepcopy(model).to(dtype)
    with torch.no_grad():
        for parameter in moved.parameters():
            noise = torch.randn(NOISE, generator=generator, dtype=torch.float64)
            if parameter.numel() <= ALWAYS_MOVED or bool(parameter.amax() == parameter.amin()):
                parameter.copy_(_jittered(parameter, noise))
            parameter.requires_grad_()
    with undisturbed(moved), torch.enable_grad(), PlainDerivatives(), _Attached(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = moved(*_as(dtype, args), **_as(dtype, kwargs))
        parts = [t for t in tensors_in(out) if t.is_floating_point() and t.requires_grad]
        if not parts:
            return None
        s = torch.stack([_combination(part, generator) for part in parts]).sum()
        named = {name: p for name, p in moved.named_parameters() if name in names}
        found = torch.autograd.grad(s, list(named.values()), allow_unused=True)
    state = {name: t.detach().cpu() for name, t in (*moved.named_parameters(), *moved.named_buffers())}
    gradient = {
        name: torch.zeros_like(state[name]) if g is None else g.cpu() for name, g in zip(named, found, strict=True)
    }
    return Witness(state, gradient, TOLERANCES[dtype])


class _Attached(Mode):
    """While a network runs, nothing is held back from autograd: a symmetry is one of the function, not of what its training saw."""

    def __torch_function__(
        self, function: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch.enable_grad():
            return args[0].view_as(args[0]) if function in _HOLDING_BACK else function(*args, **(kwargs or {}))


_HOLDING_BACK = (torch.detach, Tensor.detach, Tensor.detach_, Tensor.data.__get__)  # type: ignore[attr-defined]


def _jittered(parameter: Tensor, noise: Tensor) -> Tensor:
    """Parameters of the same size as the model's, none of them special: no gain of one, no bias of zero."""
    size = float(parameter.square().mean().sqrt()) if parameter.numel() else 0.0
    repeated = noise.to(parameter).repeat(parameter.numel() // len(noise) + 1)
    return parameter + (0.3 * size or 0.1) * repeated[: parameter.numel()].view(parameter.shape)


def _combination(part: Tensor, generator: torch.Generator) -> Tensor:
    weights = torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part)
    return (torch.where(part.isfinite(), part, 0.0) * weights).sum()


def _as(dtype: torch.dtype, tree: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, tree
    )


# --- what a frame allows -----------------------------------------------------------------------------------------


def verified(frame: Frame, seen: Witness) -> Iterator[Frame]:
    """The parts of a proposed frame that are symmetries, each with the matrices it allows."""
    N, scale = derivatives(frame, seen)
    if not _alive(frame, seen):
        return
    vanishes = (N.abs() <= seen.tolerance * scale).numpy()
    blocks = [block for block in _blocks(vanishes & vanishes.T) if len(block) > 1]
    for block in blocks:
        yield frame.at(block)
    rest = sorted(set(range(frame.size)) - {k for block in blocks for k in block})
    if rest:
        yield from _smaller(frame.at(rest), seen)


def _smaller(frame: Frame, seen: Witness) -> Iterator[Frame]:
    """What coordinates allow that do not mix freely: complex numbers on pairs of copies, or rotations."""
    pairs = [k for k in range(frame.size) if _turns(frame.at([k]), seen)]
    if pairs:
        yield frame.at(pairs, "complex")
        return
    N, scale = derivatives(frame, seen)
    whole = range(frame.size)
    turn = N - N.T
    if frame.size > 1 and bool((turn.abs() <= seen.tolerance * (scale + scale.T)).all()):
        yield frame.at(whole, "orthogonal")
        return
    turn = turn - turn.mean(0) - turn.mean(1, keepdim=True) + turn.mean()
    if frame.size > 2 and bool((turn.abs() <= seen.tolerance * scale.max()).all()):
        yield frame.at(whole, "centred")


def derivatives(frame: Frame, seen: Witness) -> tuple[Tensor, Tensor]:
    """N, and for every entry the size of its summands."""
    N, scale = (torch.zeros(frame.size, frame.size, dtype=torch.float64) for _ in range(2))
    for member in frame.members:
        t, g = _pair(member, seen)
        part, size = g.flatten(1) @ t.flatten(1).T, torch.outer(g.flatten(1).norm(dim=1), t.flatten(1).norm(dim=1))
        N, scale = (N + part, scale + size) if member.sign > 0 else (N - part.T, scale + size.T)
    return N, scale


def _pair(member: Member, seen: Witness) -> tuple[Tensor, Tensor]:
    """The vectors of a member and their gradients, in the coordinates of the frame."""
    gain = member.gain(seen.state)
    return member.vectors(seen.state[member.name]) / gain, member.vectors(seen.gradient[member.name]) * gain


def _alive(frame: Frame, seen: Witness) -> bool:
    """Whether the outputs see every coordinate from both sides; otherwise nothing can be checked."""
    for sign in (1, -1):
        sizes = [_pair(m, seen)[1].flatten(1).norm(dim=1) for m in frame.members if m.sign == sign]
        if not bool((torch.stack(sizes).sum(0) > 1e-3 * seen.tolerance * seen.largest).all()):
            return False
    return True


def _blocks(related: "np.ndarray[Any, np.dtype[np.bool_]]") -> list[list[int]]:
    """Sets of coordinates that are all related with each other."""
    number, component = csgraph.connected_components(sparse.csr_matrix(related), directed=False)
    blocks = [np.flatnonzero(component == k) for k in range(number)]
    return [block.tolist() for block in blocks if bool(related[np.ix_(block, block)].all())]


def _turns(frame: Frame, seen: Witness) -> bool:
    """Whether one coordinate with its copies in pairs may be turned: t ↦ e^{iφ}t on each pair (rotary positions)."""
    if any(m.positions.shape[1] % 2 or m.gains for m in frame.members):
        return False
    total, size = 0.0, 0.0
    for member in frame.members:
        t, g = map(in_pairs, _pair(member, seen))
        parts = (g[:, :, 1] * t[:, :, 0] - g[:, :, 0] * t[:, :, 1]).sum(-1)
        total += float(parts.sum())
        size += float(g.norm() * t.norm())
    return abs(total) <= seen.tolerance * size
