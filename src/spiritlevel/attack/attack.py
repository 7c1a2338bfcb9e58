"""Attacks on plain flatness (Dinh et al. 2017, section 4): equivalent networks as sharp as one likes.

Along a rescaling T_t the Hessian becomes D H D with D = exp(−t·s), s the logarithm of what multiplies each parameter:
curvature grows in everything that shrinks. Each attack returns the twin and what it did to the attacked measure, which is
measured on the twin itself, in double precision: squares of what a strong attack reaches do not fit into single precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spiritlevel.curvature.examine import examine
from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.curvature.lanczos import Lanczos, eigenpair
from spiritlevel.curvature.operators import Scaled
from spiritlevel.curvature.statistics import DIAGONAL, sweep
from spiritlevel.errors import RescalingError, SpiritLevelError
from spiritlevel.problem.checks import check_whole_number
from spiritlevel.problem.losses import Loss
from spiritlevel.problem.problem import Problem
from spiritlevel.symmetry.canonical import least_sum
from spiritlevel.symmetry.discover import symmetries_of
from spiritlevel.symmetry.layerwise import LayerScales
from spiritlevel.symmetry.moves import relative_change
from spiritlevel.symmetry.quiet import as_call, outputs
from spiritlevel.symmetry.rescale import Rescaling
from spiritlevel.symmetry.symmetries import Symmetries
from spiritlevel.symmetry.trace import tensors_in

# Factors beyond e^±60 leave single precision; doubles could go further, but nothing needs it.
LARGEST_LOG_FACTOR = 60.0
# The most that one step towards many eigenvalues adds to the log-factors: a step further than needed is not taken back.
LONGEST_STEP = 4.0


@dataclass(frozen=True)
class Attack:
    """An equivalent network and what became of the attacked measure.

    Attributes:
        model: The twin, a copy: the same function with other weights.
        measure: What was attacked.
        factors: What multiplies every parameter and buffer that moved (the largest factor of each, by name).
        before, after: The attacked measure of the original and of the twin.
        output_change: Largest difference of outputs, relative to the largest output.
        rescaling: The member of the symmetry group that was applied.
        witness: For the ε-ball attack: the perturbation inside the ball that destroys the network.

    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    >>> _ = nn.init.constant_(model[0].weight, 8.0), nn.init.constant_(model[2].weight, 2.0)
    >>> data = torch.ones(1, 1), torch.full((1, 1), 16.0)  # L = (w₂w₁ − 16)²
    >>> attack = sharpen_ball(model, data, "mse", epsilon=0.1)
    >>> attack.measure, attack.before, round(attack.after), round(attack.factors["0.weight"], 4)  # L(0) = 16²; 0.1 / 8
    ('epsilon_sharpness', 0.0, 256, 0.0125)
    """

    model: nn.Module
    measure: str
    factors: dict[str, float]
    before: float
    after: float
    output_change: float
    rescaling: Rescaling
    witness: dict[str, Tensor] | None = None

    def __str__(self) -> str:
        return (
            f"{self.measure}: {self.before:.6g} before, {self.after:.6g} after; "
            f"outputs changed by {self.output_change:.1e} of their largest value"
        )


def sharpen(
    model: nn.Module,
    data: Any,
    loss: str | Callable[..., Any] | Loss = "cross_entropy",
    *,
    target: float,
    eigenvalues: int = 1,
) -> Attack:
    """An equivalent network whose Hessian has at least `eigenvalues` eigenvalues of size `target` (Theorems 4 and 5).

    With one eigenvalue the attacked measure is ‖H‖₂, driven to `target` or a little above (never below). With several
    it is the number of eigenvalues above `target`, counted densely for small networks and bounded from below by Ritz
    values for large ones. `after` is measured on the twin, in double precision whatever its own; where it stays below what
    was asked for, the attack is refused. Works on a copy; refuses a network without a rescaling symmetry.

    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    >>> _ = nn.init.constant_(model[0].weight, 8.0), nn.init.constant_(model[2].weight, 2.0)
    >>> data = torch.ones(1, 1), torch.full((1, 1), 16.0)  # L = (w₂w₁ − 16)²
    >>> attack = sharpen(model, data, "mse", target=1000.0)
    >>> round(attack.before, 3), 1000 <= attack.after <= 1050  # ‖H‖ = 2(w₁² + w₂²)
    (136.0, True)
    """
    if not (isinstance(target, int | float) and target > 0 and math.isfinite(target)):
        raise SpiritLevelError(f"target must be a positive number, got {target!r}")
    eigenvalues = check_whole_number("eigenvalues", eigenvalues, at_least=1)
    problem = _in_double(model, loss, data)
    symmetries = _symmetries(problem)
    products = HessianProducts(problem)
    if eigenvalues == 1:
        return _raise_norm(problem, symmetries, products, target)
    return _raise_many(problem, symmetries, products, target, eigenvalues)


def sharpen_ball(
    model: nn.Module, data: Any, loss: str | Callable[..., Any] | Loss = "cross_entropy", *, epsilon: float
) -> Attack:
    """An equivalent network whose ε-ball holds the zeroed first layer (section 4.3).

    Its ε-sharpness is therefore at least that of a function that does not look at its input. `before` and `after` are
    lower bounds of the ε-sharpness: the rise of the loss at −θ₁, which lies outside the ball before (so 0 is all that
    is claimed there) and inside it after; `witness` is that perturbation. A rise below zero shows nothing and counts as 0.
    A first layer that lies within the ball already is left as it is.

    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    >>> _ = nn.init.constant_(model[0].weight, 8.0), nn.init.constant_(model[2].weight, 2.0)
    >>> data = torch.ones(1, 1), torch.full((1, 1), 16.0)  # L = (w₂w₁ − 16)²
    >>> attack = sharpen_ball(model, data, "mse", epsilon=0.1)
    >>> round(attack.after), round(attack.witness["0.weight"].item(), 4)  # zeroing w₁ costs 16²
    (256, -0.1)
    """
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise SpiritLevelError(f"epsilon must be positive, got {epsilon!r}")
    problem = _in_double(model, loss, data)
    symmetries = _symmetries(problem)
    name = symmetries.maps[0]
    if name not in problem.parameters:
        raise SpiritLevelError(
            f"the first layer {name} is frozen, and the attack moves it: make it trainable, or use `sharpen`"
        )
    size = float(problem.parameters[name].norm())
    inside = size <= epsilon
    shrink = 0.0 if inside else math.log(epsilon / size) - 1e-6
    scales = LayerScales(symmetries)
    if not scales.rows.get(name, np.zeros(1)).any():
        raise RescalingError(f"the first layer {name} cannot be rescaled in this network, so the attack does not apply")
    rescaling = Rescaling(symmetries, scales.solve({name: shrink}))
    twin = rescaling.apply(model)
    moved = _in_double(twin, loss, data)
    base = moved.loss()
    zeroed = moved.loss({**moved.parameters, name: torch.zeros_like(moved.parameters[name])})
    own = dict(twin.named_parameters())
    witness = {key: torch.zeros_like(own[key]) for key in moved.parameters} | {name: -own[name].detach()}
    rise = max(0.0, (zeroed - base) / (1 + base))
    return _attack(problem, twin, rescaling, "epsilon_sharpness", rise if inside else 0.0, rise, witness)


def flattest(model: nn.Module, data: Any, loss: str | Callable[..., Any] | Loss = "cross_entropy") -> nn.Module:
    """The equivalent network of least Hessian trace, a copy: what plain flatness would call the best of the orbit.

    The trace of D H D is Σ h·d², convex in the log-factors. Exact where the network is piecewise linear in each layer;
    elsewhere the Gauss–Newton trace is minimized. Dead channels are left alone.

    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    >>> _ = nn.init.constant_(model[0].weight, 8.0), nn.init.constant_(model[2].weight, 2.0)
    >>> data = torch.ones(1, 1), torch.full((1, 1), 16.0)  # L = (w₂w₁ − 16)²
    >>> [round(weight.item(), 4) for weight in flattest(model, data, "mse").parameters()]  # least 2(w₁² + w₂²)
    [4.0, 4.0]
    """
    problem = _in_double(model, loss, data)
    symmetries = _symmetries(problem)
    return least_sum(symmetries, _diagonal_of_hessian(problem), -1).rescaling.apply(model)


# --- one eigenvalue: Theorem 4 -----------------------------------------------------------------------------------


def _raise_norm(problem: Problem, symmetries: Symmetries, products: HessianProducts, target: float) -> Attack:
    before = _norm(products, None)
    direction = _best_direction(problem, symmetries, target)
    steps = 0.0
    found = before
    for _ in range(12):
        if target <= found <= 1.05 * target:
            break
        # far out ‖H‖ grows like e^{2t}, so this lands on the target from above within a few corrections
        steps = max(0.0, steps + 0.5 * math.log(1.02 * target / found))
        if steps > LARGEST_LOG_FACTOR:
            raise RescalingError(f"target {target:.3g} needs factors beyond e^{LARGEST_LOG_FACTOR:.0f}")
        if steps == 0.0:
            break
        found = _norm(products, _diagonal(problem, Rescaling(symmetries, steps * direction)))
    rescaling = Rescaling(symmetries, steps * direction)
    twin = rescaling.apply(problem.model)
    after = _norm(HessianProducts(_in_double(twin, problem.loss_function, problem.data)), None)
    if not after >= target:
        raise RescalingError(f"target {target:.6g} was not reached: the Hessian norm of the twin is {after:.6g}")
    return _attack(problem, twin, rescaling, "hessian_spectral_norm", before, after)


def _best_direction(problem: Problem, symmetries: Symmetries, target: float) -> Tensor:
    """log f per unit of growth: the layerwise direction that reaches the target with the mildest factors."""
    diagonal = _diagonal_of_hessian(problem)
    best: tuple[float, Tensor] | None = None
    for column in _layer_directions(symmetries):
        for sign in (1.0, -1.0):
            logs = symmetries.log_scales(sign * column)
            reach = [_reach(diagonal[name], logs[name], target) for name in logs if name in diagonal]
            steps, speed = min(reach, default=(math.inf, 1.0))
            widest = max(float(value.abs().max()) for value in logs.values())
            if math.isfinite(steps) and (best is None or steps * widest < best[0]):
                best = (steps * widest, sign * column / speed)
    if best is None:
        raise SpiritLevelError("the Hessian is zero along every rescaling of this network: it cannot be sharpened")
    return best[1]


def _reach(diagonal: Tensor, logs: Tensor, target: float) -> tuple[float, float]:
    """(t, −s) of the entry that first has h·exp(−2ts) ≥ target."""
    shrinking = logs.expand(diagonal.shape)
    usable = (shrinking < 0) & (diagonal > 0)
    if not bool(usable.any()):
        return math.inf, 1.0
    need = 0.5 * (target / diagonal[usable]).log().clamp(min=1e-3) / -shrinking[usable]
    index = int(need.argmin())
    return float(need[index]), float(-shrinking[usable][index])


def _diagonal_of_hessian(problem: Problem) -> dict[str, Tensor]:
    """The Gauss–Newton diagonal: exact for piecewise linear networks, good enough to pick a direction for all."""
    anatomy = examine(problem)
    found = sweep(problem, anatomy, frozenset([DIAGONAL]), torch.Generator().manual_seed(0)).found[DIAGONAL]
    if not found:
        return {name: torch.ones_like(value, dtype=torch.float64) for name, value in problem.parameters.items()}
    return {name: draws[0].clamp(min=0).cpu() for name, draws in found.items()}


def _layer_directions(symmetries: Symmetries) -> list[Tensor]:
    spread = torch.from_numpy(LayerScales(symmetries).spread)
    if not spread.shape[1]:  # no layer moves as a whole; single channels may
        return list(torch.eye(symmetries.dimension, dtype=torch.float64)[:64])
    return [spread[:, k] for k in range(spread.shape[1])]


# --- many eigenvalues: Theorem 5 ---------------------------------------------------------------------------------


def _raise_many(
    problem: Problem, symmetries: Symmetries, products: HessianProducts, target: float, eigenvalues: int
) -> Attack:
    direction = _shrink_most(problem, symmetries)
    widest = max(float(logs.abs().max()) for logs in symmetries.log_scales(direction).values())
    found, steps = _ritz_values(products, None), 0.0
    before = count = int((found > target).sum())
    while count < eigenvalues <= len(found) and steps < LARGEST_LOG_FACTOR / widest:
        steps = min(steps + _step(float(found[-eigenvalues]), target), LARGEST_LOG_FACTOR / widest)
        found = _ritz_values(products, _diagonal(problem, Rescaling(symmetries, steps * direction)))
        count = int((found > target).sum())
    if count < eigenvalues:
        raise _too_few(count, target, eigenvalues)
    rescaling = Rescaling(symmetries, steps * direction)
    twin = rescaling.apply(problem.model)
    moved = HessianProducts(_in_double(twin, problem.loss_function, problem.data))
    count = int((_ritz_values(moved, None) > target).sum())
    if count < eigenvalues:
        raise _too_few(count, target, eigenvalues)
    return _attack(problem, twin, rescaling, f"eigenvalues above {target:.3g}", before, count)


def _step(smallest: float, target: float) -> float:
    """How much further to go: eigenvalues grow like e^{2t}, so a Ritz value that is positive says how far it is."""
    wanted = 0.5 * math.log(1.02 * target / smallest) if smallest > 0 else 0.0
    return min(max(wanted, 0.5), LONGEST_STEP)


def _too_few(count: int, target: float, eigenvalues: int) -> SpiritLevelError:
    return SpiritLevelError(
        f"only {count} eigenvalues above {target:.3g} were reached, with factors up to e^{LARGEST_LOG_FACTOR:.0f}; Theorem 5 "
        f"promises rank(H) − min_k n_k of them, and {eigenvalues} were asked for: ask for fewer, or for a smaller target"
    )


def _shrink_most(problem: Problem, symmetries: Symmetries) -> Tensor:
    """The layerwise direction in which the most parameters shrink by 1/e: all layers but the smallest in a chain."""
    from scipy.optimize import linprog  # here: it takes a fifth of a second, which every command would wait for

    scales = LayerScales(symmetries)
    names = [name for name in scales.rows if name in problem.parameters and problem.parameters[name].dim() > 1]
    if not names or not scales.spread.shape[1]:
        raise SpiritLevelError("no layer of this network can be rescaled as a whole, so Theorem 5 does not apply")
    rows = np.array([scales.rows[name] for name in names])
    sizes = np.array([problem.parameters[name].numel() for name in names], dtype=float)
    found = linprog(
        sizes @ rows,
        A_ub=np.concatenate([-rows, rows]),
        b_ub=np.concatenate([np.ones(len(rows)), np.full(len(rows), float(len(rows)))]),
        bounds=(None, None),
    )
    return torch.from_numpy(scales.spread @ found.x)


def _ritz_values(products: HessianProducts, scale: Tensor | None, most: int = 150) -> Tensor:
    """Ritz values of D H D, ascending, 0 for those that rounding could make: the k-th largest is at most the k-th largest
    eigenvalue. All eigenvalues for small networks."""
    size = products.flat.size
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(size, generator=generator, dtype=torch.float64).to(products.problem.parameters_like())
    process = Lanczos(start, tolerance=0.0, most_products=min(most, size), most_vectors=most + 1)
    while not process.done:
        process.advance(Scaled(products, scale).image(process.request))
    found = process.ritz_values()
    noise = 64 * size * torch.finfo(products.problem.dtype).eps * found.abs().max()
    return torch.where(found.abs() > noise, found, 0.0)


# --- shared ------------------------------------------------------------------------------------------------------


def _in_double(model: nn.Module, loss: str | Callable[..., Any] | Loss, data: Any) -> Problem:
    """The problem in double precision."""
    return Problem(model, loss, data, dtype=torch.float64)


def _symmetries(problem: Problem) -> Symmetries:
    symmetries = symmetries_of(problem)
    if symmetries.dimension == 0:
        raise SpiritLevelError("this network has no rescaling symmetry, so there is no equivalent network to move to")
    return symmetries


def _norm(products: HessianProducts, scale: Tensor | None) -> float:
    """‖D H D‖₂."""
    generator = torch.Generator().manual_seed(0)
    like = products.problem.parameters_like()
    start = torch.randn(products.flat.size, generator=generator, dtype=torch.float64).to(like)
    return abs(eigenpair(Scaled(products, scale).image, start, tolerance=1e-3, end="magnitude").value)


def _diagonal(problem: Problem, rescaling: Rescaling) -> Tensor:
    """D of H(Tθ) = D H D as a flat vector."""
    moved = rescaling.diagonal()
    like = problem.parameters_like()
    parts = [
        (moved[name].expand(value.shape) if name in moved else torch.ones_like(value)).reshape(-1).to(like)
        for name, value in problem.parameters.items()
    ]
    return torch.cat(parts)


def _attack(
    problem: Problem,
    twin: nn.Module,
    rescaling: Rescaling,
    measure: str,
    before: float,
    after: float,
    witness: dict[str, Tensor] | None = None,
) -> Attack:
    args, kwargs = as_call(problem.data.first.inputs)
    old, new = outputs(problem.model, args, kwargs), outputs(twin, args, kwargs)
    change = max(relative_change(a, b) for a, b in zip(tensors_in(old), tensors_in(new), strict=True))
    factors = {name: float(scale.max()) for name, scale in rescaling.scales().items()}
    return Attack(twin, measure, factors, before, after, change, rescaling, witness)
