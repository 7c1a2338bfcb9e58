"""Before any product is believed: one of them against a central difference of gradients, and a way that agrees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spiritlevel.curvature.ways import BACKWARD, FORWARD, Method, Ways
from spiritlevel.errors import SpiritLevelError
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.checks import refuse_nonfinite_loss
from spiritlevel.problem.contract import Parameters
from spiritlevel.problem.problem import Problem
from spiritlevel.problem.tensors import is_about_precision

# So many parameters at most, those with the largest shares in the slope, are held against one another in pairs.
MOST_PAIRED = 24
# A difference of gradients tells where rounding is this part of it at most; rounding is so many units of the last place.
TELLING, ROUNDED = 0.1, 4
# How far uᵀHv and vᵀHu may be apart, as a part of the terms that they are sums of: rounding leaves 1e-15 of them in double
# precision. What they are apart is one draw of something random, and counts so many times.
LEAST_SYMMETRY = {torch.float64: 1e-2, torch.float32: 0.1}
ASYMMETRY_MARGIN = 4


@dataclass(frozen=True)
class Chosen:
    """The way that products are made, and what a reader must know of it."""

    method: Method
    notes: tuple[str, ...] = ()
    relative_error: float = 0.0


@dataclass(frozen=True)
class _Failure:
    """A way that will not do: it raised, or its product differs from a difference of gradients."""

    method: Method
    raised: str | None = None

    def __str__(self) -> str:
        if self.raised is None:
            return f"{self.method} differs from a central difference of gradients"
        return f"{self.method} failed ({self.raised})"


def choose_method(ways: Ways) -> Chosen:
    """One product of a few samples, each way, against a central difference of gradients in double precision.

    It is taken at a slightly moved point, so that a ReLU that sits exactly at its kink proves nothing. Among a million
    of them one may still have its kink within the step, and where the loss is all but zero the gradient has few digits
    left: later trials take shorter and longer steps. What a way gives at the point itself must be symmetric.
    """
    problem = ways.problem
    few = problem.telling_samples(2)
    with problem.undisturbed():
        try:
            with problem.in_precision(torch.float64) as double:
                found = _choose(ways, double(few), torch.float64, 1e-3)
                if isinstance(found, Chosen):
                    found = _symmetric(ways, double(few), found, torch.float64)
        except RuntimeError as error:
            if not is_about_precision(error):
                raise
            found = _choose(ways, few, problem.dtype, 0.1)  # the network insists on its own precision
        if not isinstance(found, Chosen):
            return _only_differences(ways, found)
        # What is symmetric in double precision may be nothing but rounding in the precision that is measured in.
        return found if problem.dtype == torch.float64 else _symmetric(ways, few, found, problem.dtype)


def _choose(ways: Ways, batch: Batch, dtype: torch.dtype, tolerance: float) -> Chosen | list[_Failure]:
    """The first way whose product agrees, or why none does where gradients are all there is to go by.

    A difference that shows nothing but rounding decides nothing: other steps are tried, and a way is believed that no step
    contradicts.
    """
    failures: list[_Failure] = []
    uncontradicted: list[Method] = []
    products: dict[Method, Callable[[Parameters, Batch, list[Tensor]], list[Tensor]]] = {
        "kept graph": ways.by_graph,
        "jvp of the gradient": ways.forward_over_reverse,
    }
    generator = torch.Generator().manual_seed(0)
    for stretch in (1.0, 1e-1, 1e-2, 1e2, 3e2):
        point, direction = _trial(ways.problem, generator, dtype)
        gradient = ways.gradient(point, batch)
        # Without entries of zero gradient: autograd holds the row of an embedding's padding fixed.
        direction = [step * (part != 0) for step, part in zip(direction, gradient, strict=True)]
        expected = ways.by_difference(point, batch, direction, stretch)
        noise = _noise(ways, point, direction, gradient, dtype, stretch)
        for method, product in products.items():
            try:
                found = product(point, batch, direction)
            except (RuntimeError, NotImplementedError) as error:
                told = str(error).splitlines() or [type(error).__name__]
                failures.append(_Failure(method, told[0]))
                continue
            if not _agree(ways, found, expected, tolerance, noise):
                failures.append(_Failure(method))
            elif noise < TELLING * max(ways.distance(found), ways.distance(expected)):
                return _chosen(method, failures)
            else:
                uncontradicted.append(method)
                break
    for method in uncontradicted:
        if all(failure.method != method or failure.raised is not None for failure in failures):
            return _chosen(method, failures)
    if any(failure.raised is not None for failure in failures):
        _refuse_what_is_no_gradient(ways, batch, tolerance)
    return failures


def _chosen(method: Method, failures: list[_Failure]) -> Chosen:
    return Chosen(method, () if method == "kept graph" else (f"curvature products by {method}: {failures[0]}",))


def _noise(
    ways: Ways, point: Parameters, direction: list[Tensor], gradient: list[Tensor], dtype: torch.dtype, stretch: float
) -> float:
    """What rounding can leave in a difference of gradients: of their own digits, and of those of the moved parameters."""
    size = ways.distance(gradient)
    relative = ways.distance(direction) / max(ways.distance(list(point.values())), 1e-30)
    moved = float(torch.finfo(dtype).eps ** 0.5) * size * relative
    return max(moved, ROUNDED * ways.noise_of_difference(point, direction, size, stretch))


def _symmetric(ways: Ways, batch: Batch, chosen: Chosen, dtype: torch.dtype) -> Chosen:
    """The way with what it lacks in symmetry as its error; refused where uᵀHv and vᵀHu have too little in common.

    Where terms cancel that are far larger than what is left of them, such as in a softmax of scores of a million, the two are
    what rounding made of them. It is looked at where curvature is measured: at a moved point other terms are left.
    """
    generator = torch.Generator().manual_seed(3)
    point = {name: value.to(dtype) for name, value in ways.problem.parameters.items()}
    u, v = (_in_proportion(point, generator) for _ in range(2))
    if chosen.method == "kept graph":
        images = ways.images_by_graph(point, batch, [u, v])
    else:
        images = [ways.forward_over_reverse(point, batch, direction) for direction in (u, v)]
    (first, size), (second, other) = (_form(ways, *each) for each in zip((v, u), images, strict=True))
    size = max(size, other)
    apart = abs(first - second) / size if size > 0 else 0.0
    if apart > LEAST_SYMMETRY[dtype]:  # what is not finite has a refusal of its own
        raise SpiritLevelError(
            "the second derivative of this network cannot be trusted: at its weights, along two directions that must give the same "
            f"both ways round, it gives {first:.3g} and {second:.3g}. Rounding decides about it where large terms cancel, as in a "
            "softmax of scores that are far apart or in a normalization of numbers that are all but equal: scale the inputs or the "
            f"weights down, so that they are of the size that the network was made for{_or_in_double(dtype)}"
        )
    return replace(chosen, relative_error=chosen.relative_error + ASYMMETRY_MARGIN * apart)


def _or_in_double(dtype: torch.dtype) -> str:
    return "" if dtype == torch.float64 else ", or measure in double precision (dtype=torch.float64)"


def _form(ways: Ways, direction: list[Tensor], image: list[Tensor]) -> tuple[float, float]:
    """uᵀHv, and the sum of the absolute values of its terms."""
    total, shares = ways.problem.shards.total, [(a * b).double() for a, b in zip(direction, image, strict=True)]
    return total(sum(float(share.sum()) for share in shares)), total(sum(float(share.abs().sum()) for share in shares))


def _in_proportion(point: Parameters, generator: torch.Generator) -> list[Tensor]:
    """A random direction, in every parameter as large as that is: rescaling layers against one another does not change it."""
    return [
        value.square().mean().sqrt() * torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value.device)
        for value in point.values()
    ]


def _agree(ways: Ways, found: list[Tensor], expected: list[Tensor], tolerance: float, noise: float) -> bool:
    """Whether two products agree as a whole, and roughly in every tensor: what one operation lacks may be small in the sum."""
    size = ways.distance(expected)
    if not ways.distance(found, expected) <= tolerance * size + noise:
        return False
    floor = noise + 1e-2 * tolerance * size
    return all(
        ways.distance([mine], [other]) <= 20 * tolerance * ways.distance([other]) + floor
        for mine, other in zip(found, expected, strict=True)
    )


def _trial(problem: Problem, generator: torch.Generator, dtype: torch.dtype) -> tuple[Parameters, list[Tensor]]:
    point, direction = {}, []
    for name, value in problem.parameters.items():
        value = value.to(dtype)
        scale = value.square().mean().sqrt() + 1e-3
        shift, step = (torch.randn(value.shape, generator=generator, dtype=dtype).to(value.device) for _ in range(2))
        point[name] = value + 1e-3 * scale * shift
        direction.append(scale * step)
    return point, direction


def _only_differences(ways: Ways, failures: list[_Failure]) -> Chosen:
    refuse_nonfinite_loss(ways.problem)  # says where, if that is why
    told = "; ".join(dict.fromkeys(map(str, failures)))
    if all(failure.raised is None for failure in failures):
        raise SpiritLevelError(
            f"the second derivative of this network cannot be trusted: {told}. Some operation of the network has a "
            "wrong double backward, or its gradient jumps where it should be smooth. torch's old "
            "torch.nn.utils.weight_norm is a known case: fold it into the weight with remove_weight_norm. Or the loss is "
            "written so that rounding leaves nothing of its slope where it is small: use torch's cross_entropy, "
            "log_softmax or binary_cross_entropy_with_logits, whose digits are kept"
        )
    notes = (f"curvature products by central differences of gradients: {told}",)
    return Chosen("central differences", notes, _disagreement(ways))


def _refuse_what_is_no_gradient(ways: Ways, batch: Batch, tolerance: float) -> None:
    """uᵀHv and vᵀHu are equal where gradients are those of a function; a layer that reverses them makes them differ.

    For u in one parameter and v in another, each for itself: in the sum over all, the larger ones would hide it. Several
    steps are tried, because a kink within one makes them differ too.
    """
    generator, worst = torch.Generator().manual_seed(2), 0.0
    for stretch in (1.0, 1e-1, 1e-2, 1e1):
        asymmetry = _asymmetry(ways, batch, generator, stretch)
        if asymmetry <= 10 * tolerance:
            return
        worst = max(worst, asymmetry)
    raise SpiritLevelError(
        "the gradients of this network are not those of its loss, so they say nothing of its curvature: differences of "
        f"gradients along two directions, which must be the same both ways round, differ by {min(worst, 1):.0%}. An operation "
        "with a backward of its own, such as gradient reversal, does that: measure the network without it"
    )


def _asymmetry(ways: Ways, batch: Batch, generator: torch.Generator, stretch: float) -> float:
    """The largest difference between u_iᵀH_ij v_j and v_jᵀH_ji u_i, relative to the size of what they are sums of."""
    point, first = _trial(ways.problem, generator, ways.problem.dtype)
    second = _trial(ways.problem, generator, ways.problem.dtype)[1]
    gradient = ways.gradient(point, batch)
    looked_at = sorted(range(len(first)), key=lambda i: -ways.distance([gradient[i] * first[i]]))[:MOST_PAIRED]
    images = [[_moved_alone(ways, point, batch, way, i, stretch) for i in looked_at] for way in (first, second)]
    noise = torch.finfo(ways.problem.dtype).eps ** 0.5 * ways.distance(gradient)
    largest, shards = 0.0, ways.problem.shards
    for a, i in enumerate(looked_at):
        for b, j in enumerate(looked_at):
            shares = first[i] * images[1][b][i], second[j] * images[0][a][j]
            size = max(ways.distance([share]) for share in shares)
            rounding = (
                noise
                * ways.distance([first[i]])
                * ways.distance([second[j]])
                / max(ways.distance(list(point.values())), 1e-30)
            )
            difference = abs(shards.total(float(shares[0].double().sum() - shares[1].double().sum()))) - rounding
            largest = max(largest, difference / size if difference > 0 else 0.0)
    return largest


def _moved_alone(
    ways: Ways, point: Parameters, batch: Batch, direction: list[Tensor], index: int, stretch: float
) -> list[Tensor]:
    alone = [step if i == index else torch.zeros_like(step) for i, step in enumerate(direction)]
    return ways.by_difference(point, batch, alone, stretch)


def _disagreement(ways: Ways) -> float:
    """How much a difference of gradients differs from those over shorter steps and to one side only; refused where they have
    little in common. At a kink both sides differ however short a step is."""
    problem = ways.problem
    generator = torch.Generator().manual_seed(1)
    batch, largest = problem.telling_samples(2), 0.0
    for _ in range(2):
        direction = _trial(problem, generator, problem.dtype)[1]
        own = ways.by_difference(problem.parameters, batch, direction)
        for other in _other_differences(ways, batch, direction):
            size = max(ways.distance(own), ways.distance(other))
            largest = max(largest, ways.distance(own, other) / size if size > 0 else 0.0)
    if not largest <= 0.1:
        raise SpiritLevelError(
            "curvature can only be had here from differences of gradients, because the network has no second derivative in "
            f"torch, and differences over other steps disagree by {largest:.0%}: rewrite the operation so that torch can "
            f"differentiate it twice{_or_in_double(problem.dtype)}"
        )
    return largest


def _other_differences(ways: Ways, batch: Batch, direction: list[Tensor]) -> list[list[Tensor]]:
    """The same over shorter steps, and to one side only, in double precision where the network runs in it."""
    problem = ways.problem
    own = direction[0].dtype
    try:
        with problem.in_precision(torch.float64) as double:
            wide, point = [part.double() for part in direction], problem.parameters
            found = [ways.by_difference(point, double(batch), wide, stretch) for stretch in (1e-1, 1e-3)]
            found += [ways.by_difference(point, double(batch), wide, sides=side) for side in (FORWARD, BACKWARD)]
            return [[part.to(own) for part in each] for each in found]
    except RuntimeError as error:
        if not is_about_precision(error):
            raise
        return [ways.by_difference(problem.parameters, batch, direction, 0.3)]
