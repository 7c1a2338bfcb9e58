"""What a measure asks of the engine, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from spiritlevel.curvature.lanczos import End
from spiritlevel.problem.problem import Problem


@dataclass(frozen=True)
class Operator:
    """S H S for a diagonal scaling S, and which end of its spectrum is asked for.

    scaling: "identity" (H), "block norms" (D H D with ‖block‖ on every parameter tensor), "entries" (|θ| H |θ|), or a
        name of your own for what `diagonal` gives.
    diagonal: The diagonal of S as a flat vector, where it is none of these.
    """

    scaling: str
    end: End
    diagonal: Callable[[Problem], Tensor] | None = None


@dataclass(frozen=True)
class Needs:
    """What a measure needs of the engine; the plan of a call is the union over its measures.

    statistics: Of the sweep: "trace", "diagonal", "rows", "columns", "fisher", and the traces in a metric: "whitened",
        "relative", "normalized".
    operators: Extreme eigenpairs of scaled Hessians.
    layer_eigenvalues: λ_max of every layer's block.
    metrics: Metrics whose roots are needed themselves.
    """

    statistics: frozenset[str] = frozenset()
    operators: tuple[Operator, ...] = ()
    layer_eigenvalues: bool = False
    metrics: frozenset[str] = frozenset()

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            self.statistics | other.statistics,
            tuple(dict.fromkeys((*self.operators, *other.operators))),
            self.layer_eigenvalues or other.layer_eigenvalues,
            self.metrics | other.metrics,
        )
