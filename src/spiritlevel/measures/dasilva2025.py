"""da Silva, Dangel, Oore 2025, "Hide & Seek: Transformer Symmetries Obscure Sharpness & Riemannian Geometry Finds It".

The largest rise of the loss at the end of geodesics of length ρ on the network modulo the invertible matrices in its heads of
attention (and in any other product of two linear maps): changes that only move along the orbit are left out, and lengths are
measured in a metric that does not see the matrices. All other weights have the metric of single entries, as in adaptive
sharpness. A gain of a normalization in front of a head is not part of the product, so the measure sees how the two share their scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from spiritlevel.curvature.ascent import Slopes
from spiritlevel.curvature.vectors import length, unit
from spiritlevel.errors import SpiritLevelError, TracingError
from spiritlevel.measuring.adaptive import largest_mean_rise, searched
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.needs import Needs
from spiritlevel.measuring.readings import unavailable
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.value import Value
from spiritlevel.problem.contract import Parameters
from spiritlevel.symmetry.discover import symmetries_of
from spiritlevel.symmetry.frames import Frame, Member
from spiritlevel.symmetry.geodesics import Change, Metric, Order, ProductSpace, moved_entries

METRICS, ORDERS = ("inv", "mix"), ("first", "second", "exact")


@dataclass(frozen=True)
class Pair:
    """The parameters behind one product GHᵀ: G from the members that A multiplies, H from those that its inverse does."""

    frame: Frame
    space: ProductSpace

    def members(self, sign: int) -> list[Member]:
        return [member for member in self.frame.members if member.sign == sign]

    @property
    def sizes(self) -> tuple[int, int]:
        return self.space.g.numel(), self.space.h.numel()


def _matrix(members: Sequence[Member], parameters: Mapping[str, Tensor]) -> Tensor:
    """What the members hold as rows, (entries, n)."""
    return torch.cat([member.vectors(parameters[member.name]).flatten(1) for member in members], 1).mT


def find_pairs(frames: Sequence[Frame], parameters: Parameters, metric: Metric) -> tuple[list[Pair], list[str]]:
    """The products that can be measured as such, and why others are not: their entries belong to another one, or A is bound."""
    taken = {name: torch.zeros(value.shape, dtype=torch.bool) for name, value in parameters.items()}
    pairs, left_out = [], []
    for frame in frames:
        if frame.kind != "linear":
            continue
        reason = _unfit(frame, parameters, taken)
        if not reason:
            sides = [_matrix([m for m in frame.members if m.sign == sign], parameters) for sign in (1, -1)]
            space = ProductSpace(sides[0], sides[1], metric)
            reason = "a singular Gram matrix" if space.singular else ""
        if reason:
            left_out.append(f"{frame.name}: measured entry by entry ({reason})")
            continue
        for member in frame.members:
            taken[member.name].movedim(member.axis, 0)[member.positions.flatten()] = True
        pairs.append(Pair(frame, space))
    return pairs, left_out


def _unfit(frame: Frame, parameters: Parameters, taken: Mapping[str, Tensor]) -> str:
    if frame.form != "full":
        return "its matrices are not free"
    if any(member.name not in parameters for member in frame.members):
        return "some of its parameters are not measured"
    if any(member.gains for member in frame.members):
        return "gains lie between its factors"
    overlaps = (taken[m.name].movedim(m.axis, 0)[m.positions.flatten()].any() for m in frame.members)
    return "it overlaps with another product" if any(map(bool, overlaps)) else ""


class GeodesicSpace:
    """Coordinates u of changes, of all products one after the other and then of all entries outside them."""

    def __init__(self, parameters: Parameters, pairs: Sequence[Pair], order: Order) -> None:
        self._parameters, self._pairs, self._order = parameters, pairs, order
        inside = {name: torch.zeros(value.shape, dtype=torch.bool) for name, value in parameters.items()}
        for pair in pairs:
            for member in pair.frame.members:
                inside[member.name].movedim(member.axis, 0)[member.positions.flatten()] = True
        self._outside = {name: ~mask.to(parameters[name].device) for name, mask in inside.items()}
        entries = sum(int(mask.sum()) for mask in self._outside.values())
        self._sizes = [size for pair in pairs for size in pair.sizes] + [entries]
        self.size = sum(self._sizes)

    def _changes(self, u: Tensor) -> tuple[list[Change], Tensor]:
        *parts, rest = torch.split(u.double(), self._sizes)
        pieces = iter(parts)
        changes = []
        for pair in self._pairs:
            coordinates = next(pieces).view_as(pair.space.g), next(pieces).view_as(pair.space.h)
            changes.append(pair.space.change(coordinates))
        return changes, rest

    def horizontal(self, u: Tensor) -> Tensor:
        """The nearest coordinates that move along no orbit; entries of weight zero stay where they are."""
        changes, rest = self._changes(u)
        found: list[Tensor] = []
        for pair, change in zip(self._pairs, changes, strict=True):
            found += [part.reshape(-1) for part in pair.space.coordinates(pair.space.horizontal(change))]
        still = torch.cat([value[self._outside[name]] != 0 for name, value in self._parameters.items()])
        return torch.cat([*found, rest * still]).to(u.dtype)

    def point(self, u: Tensor) -> Parameters:
        """The parameters at the end of the geodesic, differentiable in u."""
        changes, rest = self._changes(u)
        point = {name: value.double().clone() for name, value in self._parameters.items()}
        pieces = torch.split(rest, [int(mask.sum()) for mask in self._outside.values()])
        for (name, mask), piece in zip(self._outside.items(), pieces, strict=True):
            moved = moved_entries(self._parameters[name][mask].double(), piece, self._order)
            point[name] = point[name].masked_scatter(mask, moved)
        for pair, change in zip(self._pairs, changes, strict=True):
            for sign, matrix in zip((1, -1), pair.space.moved(change, self._order), strict=True):
                _write(point, pair.members(sign), matrix)
        return {name: value.to(self._parameters[name].dtype) for name, value in point.items()}


def _write(point: Parameters, members: Sequence[Member], matrix: Tensor) -> None:
    """Put the rows of a matrix (entries, n) back where the members have them."""
    first = 0
    for member in members:
        shape = point[member.name].movedim(member.axis, 0)[member.positions].shape  # (n, copies, rest)
        count = shape.numel() // shape[0]
        rows = matrix[first : first + count].mT.reshape(-1, *shape[2:])
        index = member.positions.flatten().to(matrix.device)
        moved = point[member.name].movedim(member.axis, 0)
        point[member.name] = moved.index_copy(0, index, rows).movedim(0, member.axis)
        first += count


@dataclass
class AlongGeodesics:
    """A loss as a function of coordinates u."""

    slopes: Slopes
    space: GeodesicSpace
    like: Tensor

    @property
    def parameters(self) -> Parameters:
        return {"u": self.like.new_zeros(self.space.size)}

    def loss(self, parameters: Mapping[str, Tensor] | None = None) -> float:
        with torch.no_grad():
            return self.slopes.loss(self.space.point((parameters or self.parameters)["u"]))

    def gradient(self, parameters: Mapping[str, Tensor] | None = None) -> tuple[float, Parameters]:
        u = (parameters or self.parameters)["u"].detach().requires_grad_()
        with torch.enable_grad():
            point = self.space.point(u)
        loss, gradient = self.slopes.gradient({name: value.detach() for name, value in point.items()})
        names = [name for name, value in point.items() if value.requires_grad]
        if not names:
            return loss, {"u": torch.zeros_like(u)}
        (found,) = torch.autograd.grad([point[name] for name in names], u, [gradient[name] for name in names])
        return loss, {"u": found}


@dataclass(frozen=True)
class HorizontalBall:
    """{u horizontal, ‖u‖ ≤ radius}."""

    space: GeodesicSpace
    radius: float

    def perturbation(self, coordinates: Tensor) -> Tensor:
        return coordinates

    def slope(self, gradient: Tensor) -> Tensor:
        return gradient

    def furthest(self, slope: Tensor) -> Tensor:
        flat = self.space.horizontal(slope)
        return unit(flat) * self.radius if length(flat) > 0 else torch.zeros_like(slope)

    def starts(self) -> list[Tensor]:
        return []

    def random_slope(self, generator: torch.Generator) -> Tensor:
        return torch.randn(self.space.size, generator=generator, dtype=torch.float64)


def _sharpness(measure: Measure, evidence: Evidence) -> Value:
    problem = evidence.problem
    metric, order = cast(Metric, measure.options["metric"]), cast(Order, measure.options["order"])
    try:
        frames = symmetries_of(problem).linear.frames
    except TracingError as error:
        return unavailable(measure, f"the network's graph cannot be followed: {error}")
    pairs, left_out = find_pairs(frames, problem.parameters, metric)
    space = GeodesicSpace(problem.parameters, pairs, order)
    region, like = HorizontalBall(space, float(measure.options["rho"])), problem.parameters_like()
    found = searched(measure, evidence, problem, region, lambda slopes: AlongGeodesics(slopes, space, like))
    if isinstance(found, str):
        return unavailable(measure, found)
    end = space.point(found.last.perturbation)
    witness = {name: end[name] - problem.parameters[name] for name in end}
    return largest_mean_rise(measure, evidence, found, witness, {"products": len(pairs)}, tuple(left_out))


def _needs(measure: Measure) -> Needs:
    for key, words in (("metric", METRICS), ("order", ORDERS)):
        if measure.options[key] not in words:
            known = " or ".join(f'"{word}"' for word in words)
            raise SpiritLevelError(f"{measure.name}: {key} must be {known}, got {measure.options[key]!r}")
    return Needs()


MEASURES = (
    Measure(
        "geodesic_sharpness",
        "dasilva2025",
        "largest rise of the loss along geodesics modulo the invertible matrices in attention",
        "max_{ξ horizontal, ‖ξ‖_g ≤ ρ} L(γ_ξ(1)) − L(θ),  γ_ξ'(0) = ξ",
        frozenset({"layer", "linear"}),
        _sharpness,
        _needs,
        options={"rho": 0.1, "metric": "inv", "order": "second", "m": 0},
        costly=True,
    ),
)
