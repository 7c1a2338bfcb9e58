"""Members of the whole group: rescalings, changes of basis and shifts, one after the other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spiritlevel.errors import RescalingError
from spiritlevel.symmetry.frames import Frame, Member, mixed
from spiritlevel.symmetry.group import ScaleGroup
from spiritlevel.symmetry.moves import Move
from spiritlevel.symmetry.rescale import Rescaling
from spiritlevel.symmetry.shifts import Centre, Shift

State = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class BasisChange:
    """A matrix A for each of some frames: [n, n], or [n, 2, 2] where pairs of copies act as complex numbers."""

    changes: tuple[tuple[Frame, Tensor], ...]

    @property
    def names(self) -> list[str]:
        """The tensors that move or are read."""
        members = [member for frame, _ in self.changes for member in frame.members]
        return [name for m in members for name in (m.name, *(gain.name for gain in m.gains))]

    def on(self, state: State) -> State:
        """The state with the tensors of the frames in the new basis."""
        state = dict(state)
        for frame, matrix in self.changes:
            inverse = _inverse(matrix).mT
            for member in frame.members:
                state[member.name] = _moved(member, matrix if member.sign > 0 else inverse, state)
        return state

    def inverse(self) -> "BasisChange":
        """The change back."""
        return BasisChange(tuple((frame, _inverse(matrix)) for frame, matrix in self.changes))

    def power(self, exponent: float) -> "BasisChange":
        """A^exponent, which is unique for matrices near one."""
        return BasisChange(tuple((frame, _power(matrix, exponent)) for frame, matrix in self.changes))


def _moved(member: Member, matrix: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    gain = member.gain(state)
    vectors = mixed(matrix, member.vectors(state[member.name]) / gain)
    return member.written(state[member.name], vectors * gain)


def _inverse(matrix: Tensor) -> Tensor:
    try:
        return torch.as_tensor(torch.linalg.inv(matrix))
    except RuntimeError:
        raise RescalingError(
            f"a change of basis in {matrix.shape[-1]} dimensions is too strong to be undone; use a smaller strength"
        ) from None


def _power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eig(matrix)
    powers = vectors @ torch.diag_embed(values**exponent) @ torch.linalg.inv(vectors)
    if float(powers.imag.abs().max()) > 1e-9 * float(powers.real.abs().max()):
        raise RescalingError(f"a change of basis in {matrix.shape[-1]} dimensions has no real power {exponent}")
    real: Tensor = powers.real.contiguous()
    return real


@dataclass(frozen=True, eq=False)
class BiasShift:
    """Numbers added to each of some biases, and taken back by others."""

    amounts: tuple[tuple[Shift | Centre, Tensor], ...]

    @property
    def names(self) -> list[str]:
        """The tensors that move or are read."""
        return [name for shift, _ in self.amounts for name in shift.names]

    def on(self, state: State) -> State:
        """The state with shifted biases."""
        state = dict(state)
        for shift, amount in self.amounts:
            for name, added in shift.moved(state, amount).items():
                state[name] = state[name].double() + added
        return state

    def inverse(self) -> "BiasShift":
        """The same numbers taken off."""
        return self.power(-1.0)

    def power(self, exponent: float) -> "BiasShift":
        """The numbers times `exponent`."""
        return BiasShift(tuple((shift, exponent * amount) for shift, amount in self.amounts))


@dataclass(frozen=True, eq=False)
class ScaleChange:
    """A rescaling as a step of a transformation."""

    rescaling: Rescaling

    @property
    def names(self) -> list[str]:
        """The tensors that move."""
        return list(self.rescaling.symmetries.tensors)

    def on(self, state: State) -> State:
        """The rescaled state."""
        return self.rescaling.transform(state)

    def inverse(self) -> "ScaleChange":
        """The rescaling back."""
        return ScaleChange(self.rescaling.inverse())

    def power(self, exponent: float) -> "ScaleChange":
        """The rescaling with log-factors times `exponent`."""
        return ScaleChange(self.rescaling**exponent)


Step = ScaleChange | BasisChange | BiasShift


@dataclass(frozen=True, eq=False, repr=False)
class Transformation(Move):
    """θ → Tθ, a member of all that leaves a network's function alone, as steps that follow each other.

    >>> import spiritlevel as sl
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)).double()
    >>> x = torch.eye(3, dtype=torch.float64)
    >>> mixed = sl.find_symmetries(model, x).sample(1.0, seed=0, kinds=["linear"])
    >>> twin = mixed.apply(model)  # A W₁ and W₂ A⁻¹
    >>> torch.allclose(twin(x), model(x)), torch.allclose(twin[0].weight, model[0].weight)
    (True, False)
    >>> back = mixed.then(mixed.inverse()).apply(model)
    >>> torch.allclose(back[0].weight, model[0].weight)
    True
    """

    symmetries: ScaleGroup
    steps: tuple[Step, ...] = ()

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """The tensors that move or are read, with their shapes."""
        names = dict.fromkeys(name for step in self.steps for name in step.names)
        return {name: self.symmetries.shapes[name] for name in names}

    def transform(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """T on a dictionary of tensors by name; entries that nothing touches are passed on as they are."""
        aliases = self.symmetries.aliases
        own = {aliases.get(name, name): tensor for name, tensor in state.items()}
        shapes = self.shapes
        moved = {name: tensor.detach().cpu().double() for name, tensor in own.items() if name in shapes}
        for step in self.steps:
            moved = step.on(moved)
        return {name: self._result(aliases.get(name, name), tensor, moved) for name, tensor in state.items()}

    def _result(self, name: str, tensor: Tensor, moved: Mapping[str, Tensor]) -> Tensor:
        if name not in moved:
            return tensor
        result = moved[name].to(tensor)
        if bool((tensor.isfinite() & ~result.isfinite()).any()):
            precision = str(tensor.dtype).removeprefix("torch.")
            remedy = "" if tensor.dtype == torch.float64 else " or convert the model to float64"
            raise RescalingError(
                f"the transformed {name} would overflow in {precision}; use a smaller strength{remedy}"
            )
        return result

    def then(self, other: "Rescaling | Transformation") -> "Transformation":
        """This transformation followed by another of the same network."""
        if other.symmetries is not self.symmetries:
            raise RescalingError(
                "transformations of different networks do not compose; make both from the same Symmetries"
            )
        more = other.steps if isinstance(other, Transformation) else (ScaleChange(other),)
        return Transformation(self.symmetries, self.steps + more)

    def __matmul__(self, other: "Rescaling | Transformation") -> "Transformation":
        first = other if isinstance(other, Transformation) else Transformation(self.symmetries, (ScaleChange(other),))
        return first.then(self)

    def inverse(self) -> "Transformation":
        """The transformation that undoes this one."""
        return Transformation(self.symmetries, tuple(step.inverse() for step in reversed(self.steps)))

    def __repr__(self) -> str:
        return f"Transformation(steps={[type(step).__name__ for step in self.steps]})"


# --- random members ------------------------------------------------------------------------------------------------


def random_change(frames: Sequence[Frame], strength: float, generator: torch.Generator) -> BasisChange:
    """A = exp(strength·G/√n) for each frame, G a random member of the frame's algebra with entries of size one."""
    return BasisChange(tuple((frame, _RANDOM[frame.form](frame.size, strength, generator)) for frame in frames))


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _exponential(matrix: Tensor) -> Tensor:
    return torch.as_tensor(torch.linalg.matrix_exp(matrix))


def _full(n: int, strength: float, generator: torch.Generator) -> Tensor:
    return _exponential(strength * n**-0.5 * _normal(generator, n, n))


def _complex(n: int, strength: float, generator: torch.Generator) -> Tensor:
    size, angle = strength * _normal(generator, 2, n)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=1).view(n, 2, 2)
    return torch.as_tensor(size.exp()[:, None, None] * turn)


def _orthogonal(n: int, strength: float, generator: torch.Generator) -> Tensor:
    G = _normal(generator, n, n)
    return _exponential(strength * (2 * n) ** -0.5 * (G - G.T))


def _centred(n: int, strength: float, generator: torch.Generator) -> Tensor:
    """A rotation that leaves the vector of ones alone, and with it the mean that a layer normalization takes off."""
    centre = torch.eye(n, dtype=torch.float64) - 1 / n
    G = _normal(generator, n, n)
    return _exponential(strength * (2 * n) ** -0.5 * centre @ (G - G.T) @ centre)


_RANDOM: dict[str, Callable[[int, float, torch.Generator], Tensor]] = {
    "full": _full,
    "complex": _complex,
    "orthogonal": _orthogonal,
    "centred": _centred,
}


def random_shift(shifts: Sequence[Shift | Centre], strength: float, generator: torch.Generator) -> BiasShift:
    """Amounts from N(0, strength²)."""
    return BiasShift(tuple((shift, strength * _normal(generator, shift.dimension)) for shift in shifts))
