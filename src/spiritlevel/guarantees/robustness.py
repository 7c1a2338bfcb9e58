"""Feature robustness: how much the loss rises when a layer's features are perturbed (petzka2019, Appendix D)."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from spiritlevel.curvature.anatomy import Anatomy
from spiritlevel.curvature.ascent import maximize
from spiritlevel.curvature.examine import examine
from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.curvature.taps import SampleAxis
from spiritlevel.errors import SpiritLevelError, suggest
from spiritlevel.guarantees.injection import Injection, NoFeaturesError
from spiritlevel.guarantees.mixing import MOST_FEATURES, RANDOM, Mixing, SpectralBall, given, norm
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.needs import Needs
from spiritlevel.presenting import Shown, show
from spiritlevel.problem.losses import Loss
from spiritlevel.problem.problem import Problem
from spiritlevel.saved import Format, Saved, as_tensor, json_ready, numbers

if TYPE_CHECKING:
    from spiritlevel.show.drawing import Drawing

_NO_NUMBERS = ("layer", "settled", "matrices", "notes", "witness")
# How closely the second-order value has to agree to be said to hold.
AGREEMENT = 0.05


@dataclass(frozen=True)
class Point:
    """One δ of the curve.

    Attributes:
        delta: δ.
        mean, mean_error: The mean of F over the matrices and its standard error.
        second_order: δ²/2 times the mean of ⟨WA, H(WA)⟩.
        adversarial: F of the matrix that was worst at the δ asked for; nan where none was sought.
        bound: δ²/2·κ.
    """

    delta: float
    mean: float
    mean_error: float
    second_order: float
    adversarial: float
    bound: float


@dataclass(frozen=True)
class Robustness(Saved, Shown):
    """F(δ, S, A) = mean over the samples of ℓ(g(W(φ + δAφ)), y) − ℓ(f(x), y), for one layer.

    Attributes:
        layer, delta: The weight's name and δ.
        loss: L(θ), from which all rises are counted.
        values: F of every matrix; for random ones the means of the pairs A, −A.
        mean, mean_error: Their mean and its standard error (0 for given matrices, where the mean is over all of them).
        second_order: δ²/2 times the mean of ⟨WA, H(WA)⟩: what curvature says `mean` should be.
        first_order: δ times the largest |⟨∇L, WA⟩| of any matrix as large as those used (‖A‖ ≤ 1 or more): 0 at a critical
            point.
        largest: The largest F found by ascent over ‖A‖ ≤ 1, nan where it was not sought; `witness` is its A.
        settled: Whether the ascent was no longer gaining.
        noise, noise_error: The mean rise with noise of the matching distribution at the features, drawn anew for every
            sample, and its standard error; nan where the layer's inputs cannot be assigned to samples.
        kappa, kappa_error: κ^l = ‖W‖² λ_max(H_l) and the bound on its error.
        bound: δ²/2·κ^l·max(1, ‖A‖)²: at a critical point no F exceeds it by more than O(δ³).
        curve: The same over a range of δ.
        holds_until: The largest δ of the curve up to which the second-order value is within 5 % of the mean; 0 for none, nan
            where all rises are within the rounding of the loss.
        matrices: Which matrices: "orthogonal", "gaussian" or "given".
        notes: What a reader must know.

    >>> import tempfile
    >>> model, x = nn.Linear(2, 1, bias=False), torch.eye(2)
    >>> _ = nn.init.constant_(model.weight, 5.0)
    >>> found = feature_robustness(model, (x, torch.full((2, 1), 5.0)), "weight", 0.1, "mse", deltas=[0.1])
    >>> round(found.mean, 4), round(found.bound, 4)  # δ²/2·‖W‖²·λ_max(H), reached: H = I
    (0.25, 0.25)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found.save(f"{folder}/robustness.json")
    ...     Robustness.load(f"{folder}/robustness.json").bound == Robustness.from_dict(found.to_dict()).bound == found.bound
    True
    """

    _format: ClassVar = Format("spiritlevel-robustness-1", "feature robustness")

    layer: str
    delta: float
    loss: float
    values: tuple[float, ...]
    mean: float
    mean_error: float
    second_order: float
    first_order: float
    largest: float
    settled: bool
    witness: Tensor | None
    noise: float
    noise_error: float
    kappa: float
    kappa_error: float
    bound: float
    curve: tuple[Point, ...]
    holds_until: float
    matrices: str
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and strings: what `save` writes. A number that is not available becomes None."""
        return self._format.document({**json_ready(vars(self), null=True), "witness": self.witness})

    @classmethod
    def _from_parts(cls, parts: dict[str, Any]) -> Robustness:
        floats = numbers({key: entry for key, entry in parts.items() if key not in _NO_NUMBERS})
        lists = {key: tuple(entries) for key, entries in (("values", floats["values"]), ("notes", parts["notes"]))}
        curve = tuple(Point(**point) for point in floats["curve"])
        witness = None if parts["witness"] is None else as_tensor(parts["witness"])
        return cls(**{**parts, **floats, **lists, "curve": curve, "witness": witness})

    def drawing(self) -> Drawing:
        """F against δ with its bound; `.figure` is a matplotlib figure, `.svg()` an element for a page."""
        drawn: Drawing = show(self, "drawing")
        return drawn


Matrices = Literal["orthogonal", "gaussian"] | Tensor | Sequence[Tensor]


def feature_robustness(
    model: nn.Module,
    data: Any,
    layer: str,
    delta: float,
    loss: str | Callable[..., Any] | Loss = "cross_entropy",
    *,
    matrices: Matrices = "orthogonal",
    num_matrices: int = 8,
    ascend: bool = True,
    deltas: Sequence[float] | None = None,
    tolerance: float = 1e-3,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    fix_data: bool = False,
) -> Robustness:
    """How much the loss rises when the input features of a layer move by δAφ, and what curvature says about it.

    W(φ + δAφ) = (W + δWA)φ, so F is the rise of the loss from W to W + δWA. At a critical point F = δ²/2·⟨WA, H(WA)⟩ + O(δ³)
    ≤ δ²/2·‖W‖²‖A‖²λ_max(H_l) + O(δ³) = δ²/2·κ^l·‖A‖² + O(δ³). F is unchanged by a rescaling of layers, as κ^l is.
    Where F is so small that the rounding of a single-precision loss would show, losses are taken in double precision.

    Args:
        model, data, loss, tolerance, seed, dtype, fix_data: As for `measure`.
        layer: A weight's parameter name, or the name of its module.
        delta: δ > 0.
        matrices: "orthogonal": uniform rotations. "gaussian": Gaussian matrices divided by their norm. Or one matrix or
            several of your own, (features, features), of any norm. For a convolution features are input channels.
        num_matrices: How many random ones; each is used with both signs, which cancels the first order.
        ascend: Whether to look for the largest F over ‖A‖ ≤ 1.
        deltas: The δ of the curve; from δ/8 to 4δ by default.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> with torch.no_grad():
    ...     _ = model.weight.copy_(torch.tensor([[3.0, 4.0]]))
    >>> x = torch.eye(2)
    >>> found = feature_robustness(model, (x, x @ model.weight.T.detach()), "weight", 0.1, "mse")
    >>> round(found.bound, 6), round(found.largest, 6)  # κ = 25·2·λ_max(½I) = 25; the loss rises by δ²·|wA|²/2
    (0.125, 0.125)
    """
    for value in (delta, *(deltas or ())):
        if not (isinstance(value, int | float) and value > 0 and math.isfinite(value)):
            raise SpiritLevelError(f"delta must be a positive number, the size of the perturbation; got {value!r}")
    study = _Study.of(model, data, loss, layer, seed=seed, tolerance=tolerance, dtype=dtype, fix_data=fix_data)
    chosen = study.matrices(matrices, num_matrices)
    settled, witness = study.ascend(delta) if ascend else (True, None)
    places = sorted({float(delta), *(deltas if deltas is not None else (delta * 2 ** (k / 2) for k in range(-6, 5)))})
    curve = tuple(study.point(place, chosen, witness) for place in places)
    here = next(point for point in curve if point.delta == float(delta))
    noise, noise_error = study.inject(delta, chosen)
    first_order = study.steepest(delta, chosen)
    return Robustness(
        layer=study.name,
        delta=float(delta),
        loss=study.base,
        values=tuple(study.values(delta, chosen)),
        mean=here.mean,
        mean_error=here.mean_error,
        second_order=here.second_order,
        first_order=first_order,
        largest=here.adversarial,
        settled=settled,
        witness=witness,
        noise=noise,
        noise_error=noise_error,
        kappa=study.kappa,
        kappa_error=study.kappa_error,
        bound=here.bound,
        curve=curve,
        holds_until=_holds_until(curve, [study.at(place).rounding for place in places]),
        matrices=chosen.kind,
        notes=tuple(study.notes(here, first_order, noise)),
    )


@dataclass(frozen=True)
class _Chosen:
    """The matrices of one call: `curvatures` are ⟨WA, H(WA)⟩, `norm` the largest ‖A‖ or 1."""

    kind: str
    matrices: list[Tensor]
    curvatures: list[float]
    norm: float


@dataclass(frozen=True)
class _Losses:
    """Losses of the network with another weight in one layer, in one precision."""

    problem: Problem
    mixing: Mixing
    base: float

    @property
    def rounding(self) -> float:
        return 16 * torch.finfo(self.problem.dtype).eps * (1 + abs(self.base))

    def rise(self, name: str, delta: float, a: Tensor) -> float:
        return self.problem.loss({name: self.mixing.weight + delta * self.mixing.product(a)}) - self.base


class _Study:
    """One layer of one problem, everything else held fixed."""

    def __init__(self, problem: Problem, anatomy: Anatomy, name: str, *, seed: int, tolerance: float) -> None:
        self.problem, self.name, self._seed, self._tolerance = problem, name, seed, tolerance
        self._anatomy, self.weight = anatomy, problem.parameters[name]
        self.mixing = Mixing(anatomy.layers[name], self.weight)
        evidence = Evidence(problem, Needs(layer_eigenvalues=True), tolerance=tolerance, seed=seed, most_probes=64)
        self._pair = evidence.layer_eigenpairs[name]
        size = float(self.weight.double().square().sum())
        self.kappa, self.kappa_error = size * self._pair.value, size * self._pair.error
        self._products = HessianProducts(problem)
        self.base, gradient = problem.gradient()
        self._gradient = gradient[name].double()
        self._own = _Losses(problem, self.mixing, self.base)
        self._precise: _Losses | None = None
        self._curvature = 0.0  # ⟨WA, H(WA)⟩ of the matrices, about

    @classmethod
    def of(
        cls,
        model: nn.Module,
        data: Any,
        loss: str | Callable[..., Any] | Loss,
        layer: str,
        *,
        seed: int,
        tolerance: float,
        dtype: torch.dtype | None,
        fix_data: bool,
    ) -> _Study:
        whole = Problem(model, loss, data, dtype=dtype, fix_data=fix_data)
        if whole.samples < 2:
            raise SpiritLevelError(f"feature robustness is a mean over samples: pass at least two, got {whole.samples}")
        name = _named(layer, examine(whole).layers)
        problem = Problem(model, loss, whole.data, parameters=[glob.escape(name)], dtype=dtype)
        features = whole.parameters[name].shape
        if max(features[:2]) > MOST_FEATURES:
            raise SpiritLevelError(
                f"{name!r} has the shape {tuple(features)}, and a matrix that mixes more than {MOST_FEATURES} features does "
                "not fit: choose another layer"
            )
        return cls(problem, examine(problem), name, seed=seed, tolerance=tolerance)

    def generator(self, purpose: int) -> torch.Generator:
        return torch.Generator().manual_seed((int(self._seed) * 1_000_003 + 7919 * purpose) % (1 << 63))

    def matrices(self, wanted: Matrices, count: int) -> _Chosen:
        if isinstance(wanted, str):
            if wanted not in RANDOM:
                raise SpiritLevelError(f"matrices must be 'orthogonal', 'gaussian' or your own, got {wanted!r}")
            if count < 1:
                raise SpiritLevelError(f"num_matrices must be a positive whole number, got {count!r}")
            generator, kind = self.generator(1), str(wanted)
            found = [RANDOM[kind](self.mixing.shape, generator) for _ in range(count)]
        else:
            kind, found = "given", given(wanted, self.mixing.shape)
        directions = [self.mixing.product(a).reshape(-1) for a in found]
        images = self._products(directions)
        curvatures = [float(v.double() @ image.double()) for v, image in zip(directions, images, strict=True)]
        self._curvature = abs(sum(curvatures)) / len(curvatures)
        return _Chosen(kind, found, curvatures, max(1.0, *map(norm, found)))

    def at(self, delta: float) -> _Losses:
        """Losses precise enough for the rises at this δ: in double precision where rounding would show."""
        exact_enough = self._own.rounding <= 0.1 * AGREEMENT * delta**2 / 2 * self._curvature
        if exact_enough or self.problem.dtype == torch.float64:
            return self._own
        if self._precise is None:
            own = self.problem
            names = [glob.escape(self.name)]
            doubled = Problem(own.model, own.loss_function, own.data, parameters=names, dtype=torch.float64)
            mixing = Mixing(self._anatomy.layers[self.name], doubled.parameters[self.name])
            self._precise = _Losses(doubled, mixing, doubled.loss())
        return self._precise

    def steepest(self, delta: float, chosen: _Chosen) -> float:
        """δ·max |⟨∇L, WA⟩| over all A as large as the chosen ones: the sum of the singular values of WᵀG."""
        slope = self.mixing.slope(self._gradient.to(self.weight)).double()
        return delta * chosen.norm * float(torch.linalg.svdvals(slope).sum())

    def rise(self, delta: float, a: Tensor) -> float:
        """F(δ, S, A)."""
        return self.at(abs(delta)).rise(self.name, delta, a)

    def values(self, delta: float, chosen: _Chosen) -> list[float]:
        if chosen.kind == "given":
            return [self.rise(delta, a) for a in chosen.matrices]
        return [(self.rise(delta, a) + self.rise(-delta, a)) / 2 for a in chosen.matrices]

    def point(self, delta: float, chosen: _Chosen, witness: Tensor | None) -> Point:
        values = self.values(delta, chosen)
        half = delta**2 / 2
        return Point(
            delta,
            sum(values) / len(values),
            0.0 if chosen.kind == "given" else _standard_error(values),
            half * sum(chosen.curvatures) / len(chosen.curvatures),
            math.nan if witness is None else self.rise(delta, witness),
            half * self.kappa * chosen.norm**2,
        )

    def ascend(self, delta: float) -> tuple[bool, Tensor]:
        axes = [self._pair.vector.reshape(-1).to(self.weight), *self._pair.others[:1].to(self.weight)]
        region = SpectralBall(self.mixing, delta, axes)
        found = maximize(self.problem, region, tolerance=self._tolerance, generator=self.generator(2), most_steps=30)
        return found.settled, region.last.detach().clone()

    def inject(self, delta: float, chosen: _Chosen, repeats: int = 6) -> tuple[float, float]:
        """The mean rise with noise of the matching distribution, drawn anew for every sample."""
        axes = self._anatomy.axes.get(self.name, [None])
        if any(axis != SampleAxis(0) for axis in axes):
            return math.nan, math.nan
        single = chosen.kind == "orthogonal" and len(axes) == 1
        losses = self.at(delta)
        injection = Injection(losses.problem, self.name, self.mixing.shape, self._drawing(chosen), single)
        signs = (1.0,) if chosen.kind == "given" else (1.0, -1.0)
        rises = []
        for repeat in range(repeats):
            try:
                found = [injection.rise(sign * delta, self.generator(100 + repeat)) for sign in signs]
            except NoFeaturesError:
                return math.nan, math.nan
            rises.append(sum(found) / len(found) - losses.base)
        return sum(rises) / len(rises), _standard_error(rises)

    def _drawing(self, chosen: _Chosen) -> Callable[[int, torch.Generator], Tensor]:
        if chosen.kind != "given":
            return lambda count, generator: RANDOM[chosen.kind]((count, *self.mixing.shape), generator)
        stack = torch.stack([a.double() for a in chosen.matrices])
        return lambda count, generator: stack[torch.randint(len(stack), (count,), generator=generator)]

    def notes(self, here: Point, first_order: float, noise: float) -> list[str]:
        notes = list(self.problem.notes)
        if first_order > AGREEMENT * abs(here.bound):
            notes.append(
                f"not at a critical point: the first-order change is up to {first_order:.2g}, and the bound {here.bound:.2g} "
                "does not cover it"
            )
        if here.adversarial > here.bound + self.at(here.delta).rounding:
            notes.append(
                "the largest rise found exceeds δ²/2·κ, which bounds it at a critical point up to O(δ³): "
                f"{here.adversarial:.3g}"
            )
        if math.isnan(noise):
            notes.append("noise injection is not available: the layer's inputs are indices, or not one row a sample")
        return notes


def _named(layer: str, layers: Any) -> str:
    """The weight meant by a parameter's or a module's name."""
    for name in (layer, f"{layer}.weight"):
        if name in layers:
            return name
    hint = suggest(layer, layers) or "."
    known = ", ".join(list(layers)[:8]) + (", …" if len(layers) > 8 else "")
    raise SpiritLevelError(f"the network has no layer {layer!r}{hint} Its layers: {known or 'none'}")


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    return float(torch.tensor(values, dtype=torch.float64).std()) / math.sqrt(len(values))


def _holds_until(curve: Sequence[Point], roundings: Sequence[float]) -> float:
    """The largest δ up to which mean and second-order value agree to 5 %; nan where rounding hides both everywhere.

    A point at which both are within the rounding of the loss says nothing and is passed over.
    """
    reached, told = 0.0, False
    for point, rounding in zip(curve, roundings, strict=True):
        if max(abs(point.mean), abs(point.second_order)) <= rounding:
            continue
        told = True
        if not abs(point.mean - point.second_order) <= AGREEMENT * abs(point.mean):
            break
        reached = point.delta
    return reached if told else math.nan


__all__ = ["Point", "Robustness", "feature_robustness"]
