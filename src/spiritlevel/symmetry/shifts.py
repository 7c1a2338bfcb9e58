"""Shifts: numbers that may be added to a bias because nothing sees them, or because another bias takes them back.

A key's bias adds the same number to all scores of a query, and softmax does not see it. What is added to the bias in front
of a linear map with a bias of its own, or in front of a batch normalization, can be taken off behind it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spiritlevel.symmetry.frames import Frame, Member, slice_of
from spiritlevel.symmetry.linear_trace import LinearRecorder, Normalized
from spiritlevel.symmetry.noether import Witness


@dataclass(frozen=True, eq=False)
class Reader:
    """A linear map that reads what is shifted, and the bias behind it that takes the shift back."""

    member: Member
    bias: str

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors it reads."""
        return (self.member.name,)

    def response(self, state: Mapping[str, Tensor]) -> Tensor:
        """The matrix [entries of the bias, entries that are shifted]."""
        return self.member.vectors(state[self.member.name]).sum(1).T


@dataclass(frozen=True, eq=False)
class NormReader:
    """A batch normalization γ(x − μ)/√(ν + ε) + β that reads what is shifted; β takes it back."""

    norm: Normalized
    positions: Tensor

    @property
    def bias(self) -> str:
        """β."""
        return self.norm.shift

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors it reads."""
        return self.norm.gain, self.norm.variance

    def response(self, state: Mapping[str, Tensor]) -> Tensor:
        """As for a linear map: a diagonal matrix, with the columns that are shifted."""
        gain = state[self.norm.gain].detach().cpu().double()
        spread = (state[self.norm.variance].detach().cpu().double() + self.norm.epsilon).sqrt()
        return torch.diag(gain / spread)[:, self.positions]


@dataclass(frozen=True, eq=False)
class Shift:
    """Entries of a bias to which numbers may be added, and what takes them back."""

    name: str
    positions: Tensor
    readers: tuple[Reader | NormReader, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that move or are read."""
        return (*self.tensors, *(name for reader in self.readers for name in reader.names))

    @property
    def title(self) -> str:
        """The entries, written like a slice."""
        return f"{self.name}{slice_of(self.positions)}"

    @property
    def dimension(self) -> int:
        """How many numbers are free."""
        return len(self.positions)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The biases that move."""
        return tuple(dict.fromkeys((self.name, *(reader.bias for reader in self.readers))))

    def moved(self, state: Mapping[str, Tensor], amounts: Tensor) -> dict[str, Tensor]:
        """What is added to each bias for given amounts, in double precision."""
        added = {name: torch.zeros(state[name].shape, dtype=torch.float64) for name in self.tensors}
        added[self.name].view(-1)[self.positions] += amounts
        for reader in self.readers:
            added[reader.bias] -= (reader.response(state) @ amounts).view(added[reader.bias].shape)
        return added


@dataclass(frozen=True, eq=False)
class Centre:
    """A number added to all coordinates of a stream at once, which a layer normalization takes off again.

    What writes to the stream may add it, and what reads from a centred activation does not see it.
    """

    member: Member
    dimension: int

    @property
    def title(self) -> str:
        """The slice that moves as a whole."""
        return f"{self.member.name}{slice_of(self.member.positions, self.member.axis)} along 1"

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensor that moves."""
        return (self.member.name,)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that move or are read."""
        return (self.member.name, *(gain.name for gain in self.member.gains))

    def moved(self, state: Mapping[str, Tensor], amounts: Tensor) -> dict[str, Tensor]:
        """What is added for given amounts, in double precision."""
        zero = torch.zeros(state[self.member.name].shape, dtype=torch.float64)
        each = self.member.gain(state) * amounts.view(1, self.member.positions.shape[1], -1)
        return {self.member.name: self.member.written(zero, each)}


def find_shifts(frames: Sequence[Frame], recorder: LinearRecorder, seen: Witness) -> tuple[Shift | Centre, ...]:
    """All shifts whose derivative vanishes, each entry of a bias in one of them at most."""
    found: list[Shift] = []
    taken: dict[str, set[int]] = {}
    for shift in (*_unseen(frames, seen), *_exchanged(frames, recorder, seen), *_normalized(recorder, seen)):
        new = [k for k in shift.positions.tolist() if k not in taken.setdefault(shift.name, set())]
        if len(new) == shift.dimension:
            taken[shift.name].update(new)
            found.append(shift)
    return (*found, *_centres(frames, seen))


def _centres(frames: Sequence[Frame], seen: Witness) -> Iterator[Centre]:
    for frame in frames:
        for member in frame.members if frame.form == "centred" else ():
            g = member.vectors(seen.gradient[member.name]) * member.gain(seen.state)
            if bool((g.sum(0).abs() <= seen.tolerance * g.norm()).all()) and float(g.norm()) > 0:
                yield Centre(member, g[0].numel())


def _biases(frame: Frame) -> Iterator[Member]:
    return (m for m in frame.members if m.positions.shape[1] == 1)


def _is_vector(member: Member, seen: Witness) -> bool:
    shape = seen.state[member.name].shape
    return shape.numel() == shape[member.axis]


def _unseen(frames: Sequence[Frame], seen: Witness) -> Iterator[Shift]:
    """Biases within a verified frame that the outputs do not see at all."""
    for frame in frames:
        for member in _biases(frame):
            if _is_vector(member, seen):
                gradient = seen.gradient[member.name].flatten()[member.positions[:, 0]]
                if float(gradient.abs().max()) <= 1e-3 * seen.tolerance * seen.largest:
                    yield Shift(member.name, member.positions[:, 0])


def _exchanged(frames: Sequence[Frame], recorder: LinearRecorder, seen: Witness) -> Iterator[Shift]:
    """Biases in front of linear maps that all have a bias behind them."""
    for frame in frames:
        for member in _biases(frame):
            if member.sign > 0 and _is_vector(member, seen):
                readers = [m for m in frame.members if m.sign < 0 and _same_gains(m, member)]
                biases = [recorder.biases.get(m.name) for m in readers]
                made = tuple(Reader(m, bias) for m, bias in zip(readers, biases, strict=True) if bias)
                if made and len(made) == len(readers) and all(_fits(reader, seen) for reader in made):
                    yield from _confirmed(Shift(member.name, member.positions[:, 0], made), seen)


def _fits(reader: Reader, seen: Witness) -> bool:
    """Whether the map is a matrix with one entry of the bias for each of its results."""
    weight = seen.state[reader.member.name]
    return weight.dim() == 2 and weight.shape[1 - reader.member.axis] == seen.state[reader.bias].numel()


def _same_gains(reader: Member, bias: Member) -> bool:
    """Whether the reader sees the bias itself, and not what lies before or behind a gain."""
    return {(g.name, -g.exponent) for g in reader.gains} == {(g.name, g.exponent) for g in bias.gains}


def _normalized(recorder: LinearRecorder, seen: Witness) -> Iterator[Shift]:
    for bias, norm in recorder.normalized:
        every = torch.arange(seen.state[bias].numel())
        yield from _confirmed(Shift(bias, every, (NormReader(norm, every),)), seen)


def _confirmed(shift: Shift, seen: Witness) -> Iterator[Shift]:
    """The shift, if its derivative vanishes and that of the bias alone does not."""
    own = seen.gradient[shift.name].double().flatten()[shift.positions]
    back = [r.response(seen.state).T @ seen.gradient[r.bias].double().flatten() for r in shift.readers]
    left = (own - torch.stack(back).sum(0)).abs()
    size = own.abs() + torch.stack([part.abs() for part in back]).sum(0)
    floor = 1e-3 * seen.tolerance * seen.largest
    if bool((left <= seen.tolerance * size.max()).all()) and bool((own.abs() > floor).any()):
        yield shift
