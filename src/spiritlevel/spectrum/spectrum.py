"""The spectrum of a minimum: the density of eigenvalues of the Hessian with error bands, and its two ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spiritlevel.curvature.density import (
    Extreme,
    Quadrature,
    ends_of,
    extremes,
    mean_and_error,
    moment,
    quadratures,
    smoothed,
    whole,
)
from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.curvature.krylov import BASIS_BUDGET
from spiritlevel.curvature.operators import Block, Scaled, scaling
from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.value import Cost
from spiritlevel.presenting import Shown
from spiritlevel.problem.checks import check_tolerance, check_whole_number
from spiritlevel.problem.losses import Loss
from spiritlevel.problem.problem import Problem
from spiritlevel.problem.ranks import current_ranks
from spiritlevel.saved import Format, Saved, as_tensor, from_json_ready

OPERATORS = {
    "hessian": "H",
    "riemannian": "D H D, D = blockdiag(‖block‖ I)",
    "nodewise": "|θ| H |θ|",
}


@dataclass(frozen=True)
class Spectrum(Saved, Shown):
    """The eigenvalues of an operator as random probes see them, or all of them where they are few.

    Attributes:
        operator: "hessian", "riemannian", "nodewise", or the name of the weight whose block of H it is.
        size: The number of eigenvalues n.
        probes: One quadrature for every probe; where `exact`, a single one with every eigenvalue.
        top, bottom: The largest eigenvalues, falling, and the smallest, rising, each with its residual.
        loss: L(θ).
        cost: What it took.
        notes: What a reader must know.
        exact: Whether the matrix was written down, so that the density and its moments are those of all eigenvalues.

    >>> import tempfile
    >>> data = torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.zeros(2, 1)
    >>> found = spectrum(nn.Linear(2, 1, bias=False), data, "mse")  # H = 2·(1/2)·XᵀX = diag(4, 16)
    >>> round(found.moment(1)[0], 4), round(found.top[0].value, 4), round(found.bottom[0].value, 4)
    (10.0, 16.0, 4.0)
    >>> points = found.points()
    >>> round(float(torch.trapezoid(found.density(points)[0], points)), 3)
    1.0
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found.save(f"{folder}/spectrum.json")
    ...     found.to_html(f"{folder}/spectrum.html")
    ...     Spectrum.load(f"{folder}/spectrum.json").top == Spectrum.from_dict(found.to_dict()).top == found.top
    True
    """

    _format: ClassVar = Format("spiritlevel-spectrum-1", "spectrum", indent=None)

    operator: str
    size: int
    probes: tuple[Quadrature, ...]
    top: tuple[Extreme, ...]
    bottom: tuple[Extreme, ...]
    loss: float
    cost: Cost
    notes: tuple[str, ...] = ()
    exact: bool = False

    def moment(self, order: int) -> tuple[float, float]:
        """(1/n) Σ_i λ_i^order with its standard error over probes: the trace over n for 1, ‖A‖_F²/n for 2."""
        found = torch.tensor([moment(probe, order) for probe in self.probes], dtype=torch.float64)
        mean, error = self._over_probes(list(found))
        return float(mean), float(error)

    def density(self, points: Tensor, width: float | None = None) -> tuple[Tensor, Tensor]:
        """The density at `points`, smoothed by a Gaussian of that width, and its standard error over probes."""
        smooth = self.width if width is None else width
        return self._over_probes([smoothed(probe, points, smooth) for probe in self.probes])

    def _over_probes(self, seen: list[Tensor]) -> tuple[Tensor, Tensor]:
        return (seen[0], torch.zeros_like(seen[0])) if self.exact else mean_and_error(seen)

    def points(self, count: int = 401) -> Tensor:
        """Evenly spaced points over the whole spectrum, with room for the smoothing: the density integrates to one."""
        low = min(float(probe.nodes.min()) for probe in self.probes) - 6 * self.width
        high = max(float(probe.nodes.max()) for probe in self.probes) + 6 * self.width
        return torch.linspace(low, high, count, dtype=torch.float64)

    @property
    def width(self) -> float:
        """The default smoothing: a hundredth of the distance between the ends; of the size where there is none."""
        nodes = torch.cat([probe.nodes for probe in self.probes])
        spread, size = float(nodes.max() - nodes.min()), float(nodes.abs().max())
        return max(spread, 1e-3 * size) / 100 or 1e-300

    @classmethod
    def _from_parts(cls, parts: dict[str, Any]) -> Spectrum:
        parts = from_json_ready(parts)
        return cls(
            operator=parts["operator"],
            size=parts["size"],
            probes=tuple(
                Quadrature(**{key: as_tensor(part) for key, part in each.items()}) for each in parts["probes"]
            ),
            top=tuple(Extreme(**each) for each in parts["top"]),
            bottom=tuple(Extreme(**each) for each in parts["bottom"]),
            loss=parts["loss"],
            cost=Cost(**parts["cost"]),
            notes=tuple(parts["notes"]),
            exact=parts.get("exact", False),  # files of earlier versions have none
        )


def spectrum(
    model: nn.Module,
    data: Any,
    loss: str | Callable[..., Any] | Loss = "cross_entropy",
    *,
    operator: str = "hessian",
    probes: int = 8,
    steps: int = 60,
    ends: int = 5,
    tolerance: float = 1e-3,
    most_products: int = 200,
    seed: int = 0,
    parameters: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    fix_data: bool = False,
    progress: Callable[[str, float], None] | None = None,
    distributed: bool = True,
) -> Spectrum:
    """The density of the eigenvalues of the Hessian by stochastic Lanczos quadrature, and its two ends with residuals.

    Args:
        model, data, loss, parameters, dtype, fix_data, distributed: As for `measure`.
        operator: "hessian" for H, "riemannian" for DHD (unchanged by rescaling layers), "nodewise" for |θ|H|θ|
            (unchanged by rescaling neurons too), or a weight's name for its diagonal block of H.
        probes: Random vectors; the error band is over them, so at least 2.
        steps: Products for each: the quadrature gives 2·steps moments of its probe exactly. An operator of no more than
            probes·steps eigenvalues is written down as a matrix instead, which costs no more products and is `exact`.
        ends: How many eigenvalues to find at each end.
        tolerance: The residual asked of them, relative to the largest magnitude.
        most_products: Where the search for them gives up.
        seed: For everything random; no global random state is touched.
        progress: A function of (what, passes so far).

    Costs `steps` passes over the data, in each a product for every probe, and up to `most_products` for the ends.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> x, y = torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.zeros(2, 1)
    >>> [round(each.value, 4) for each in spectrum(model, (x, y), "mse").top]  # H = 2·(1/2)·XᵀX = diag(4, 16)
    [16.0, 4.0]
    """
    probes, steps = check_whole_number("probes", probes, at_least=2), check_whole_number("steps", steps, at_least=2)
    ends, most_products = (
        check_whole_number("ends", ends, at_least=1),
        check_whole_number("most_products", most_products, at_least=2),
    )
    tolerance, seed = check_tolerance(tolerance), check_whole_number("seed", seed)
    with current_ranks(distributed).together():
        problem = Problem(
            model, loss, data, parameters=parameters, dtype=dtype, fix_data=fix_data, distributed=distributed
        )
        return _spectrum(problem, operator, probes, steps, ends, tolerance, most_products, seed, progress)


def _spectrum(
    problem: Problem,
    operator: str,
    probes: int,
    steps: int,
    ends: int,
    tolerance: float,
    most_products: int,
    seed: int,
    progress: Callable[[str, float], None] | None,
) -> Spectrum:
    started = time.perf_counter()
    said = ["density"]
    if progress is not None:
        problem.work.on_change.append(lambda work: progress(said[0], work.passes))
    hessian = HessianProducts(problem)
    products = _operator(hessian, operator)
    size = products.size
    like, generator = problem.parameters_like(), torch.Generator().manual_seed(seed)
    exact = size <= probes * steps and size * size * like.element_size() <= BASIS_BUDGET
    if exact:
        found = [whole(products, like, size)]
        top, bottom = ends_of(found[0], like, ends, tolerance)
    else:
        found = quadratures(products, like, size, probes=probes, steps=steps, generator=generator)
        said[0] = "largest and smallest eigenvalues"
        top, bottom = extremes(
            products, like, size, count=ends, tolerance=tolerance, most_products=most_products, generator=generator
        )
    value = hessian.loss if hessian.loss is not None else problem.loss()
    cost = Cost(problem.work.passes, problem.work.products, problem.work.gradients, time.perf_counter() - started, 0)
    notes = (*problem.notes, *hessian.notes, *([] if exact else _shortened(found, steps, size)))
    return Spectrum(operator, size, tuple(found), tuple(top), tuple(bottom), value, cost, notes, exact)


def _operator(hessian: HessianProducts, operator: str) -> Scaled | Block:
    """The operator that a name stands for."""
    parameters = hessian.problem.parameters
    if operator in OPERATORS:
        named = {"riemannian": "block norms", "nodewise": "entries"}
        return Scaled(hessian, scaling(parameters, named[operator]) if operator in named else None)
    if operator in parameters:
        return Block(hessian, operator)
    names = ", ".join(parameters)
    raise SpiritLevelError(
        f"operator must be one of {', '.join(OPERATORS)} or a parameter's name; got {operator!r}. "
        f"Parameters: {names if len(names) <= 500 else names[:500] + '…'}"
    )


def _shortened(found: Sequence[Quadrature], steps: int, size: int) -> list[str]:
    """A note where memory allowed fewer products than asked for."""
    most = max(len(each.nodes) for each in found)
    if most >= min(steps, size) or math.isclose(sum(float(each.residuals.max()) for each in found), 0.0):
        return []
    return [f"{most} steps instead of {steps}: more basis vectors do not fit the memory budget"]
