"""The coarser symmetry with one factor per layer, as in the papers: products of layer factors that must be one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spiritlevel.errors import RescalingError
from spiritlevel.symmetry.group import ScaleGroup
from spiritlevel.symmetry.variables import FIXED, Variables

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose factors λ must satisfy Π λ**exponent = 1; for a plain chain all exponents are one."""

    exponents: Mapping[str, int]

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers' parameters."""
        return tuple(self.exponents)

    @property
    def condition(self) -> str:
        """The condition in words, such as `0.weight · 2.weight = 1`."""
        up = [_power(name, e) for name, e in self.exponents.items() if e > 0]
        down = [_power(name, -e) for name, e in self.exponents.items() if e < 0]
        return " · ".join(up) + (" = " + " · ".join(down) if down else " = 1")

    def product(self, factors: Mapping[str, float]) -> float:
        """Π λ**exponent, which must be one; a layer not mentioned has λ = 1."""
        return float(np.exp(sum(e * np.log(factors.get(name, 1.0)) for name, e in self.exponents.items())))


def _power(name: str, exponent: int) -> str:
    return name if exponent == 1 else f"{name}^{exponent}"


class LayerScales:
    """The rescalings that multiply every tensor by one number: log λ = rows[name] @ x, log f = spread @ x."""

    def __init__(self, symmetries: ScaleGroup) -> None:
        variables = Variables()
        factor_ids = variables.fresh(symmetries.dimension, "")
        ids = _row_variables(symmetries, variables, factor_ids)
        for tensor in symmetries.tensors.values():
            for _, rows in tensor.terms:
                variables.tie(ids[rows].flatten(), ids[rows].flatten()[:1])
        solution = variables.solve()
        values = solution.basis.toarray()[solution.classes.numpy()]
        self.spread: Floats = values[factor_ids.numpy()]
        self.rows: dict[str, Floats] = {
            name: np.sum([c * values[int(ids[rows].flatten()[0])] for c, rows in tensor.terms], axis=0)
            for name, tensor in symmetries.tensors.items()
        }
        self.roles = {name: tensor.role for name, tensor in symmetries.tensors.items()}

    def conditions(self, names: Sequence[str]) -> tuple[LayerGroup, ...]:
        """The independent conditions on the factors of the named layers; a layer that cannot move must have λ = 1."""
        size = self.spread.shape[1]
        rows = {
            name: [Fraction(v).limit_denominator(64) for v in self.rows.get(name, np.zeros(size))] for name in names
        }
        return tuple(LayerGroup(circuit) for circuit in _circuits(rows))

    def solve(self, logs: Mapping[str, float]) -> Tensor:
        """log f with the given log λ, changing all other tensors as little as possible."""
        given = np.array([self.rows.get(name, np.zeros(self.spread.shape[1])) for name in logs])
        others = [row for name, row in self.rows.items() if name not in logs] or [np.zeros(self.spread.shape[1])]
        x, *_ = np.linalg.lstsq(given, np.array(list(logs.values())), rcond=None)
        _, sizes, directions = np.linalg.svd(given)
        free = directions[(sizes > 1e-9 * max(sizes, default=0.0)).sum() :].T
        if free.shape[1]:
            z, *_ = np.linalg.lstsq(np.array(others) @ free, -np.array(others) @ x, rcond=None)
            x = x + free @ z
        return torch.from_numpy(self.spread @ x)


def _row_variables(symmetries: ScaleGroup, variables: Variables, factor_ids: Tensor) -> Tensor:
    """A variable for each row of the basis: fixed, one of the factors, or a combination of several."""
    basis = symmetries.basis
    ids = torch.full((basis.shape[0],), FIXED)
    for row in np.flatnonzero(np.diff(basis.indptr)).tolist():
        columns = basis.indices[basis.indptr[row] : basis.indptr[row + 1]]
        values = basis.data[basis.indptr[row] : basis.indptr[row + 1]]
        if len(columns) == 1 and values[0] == 1:
            ids[row] = factor_ids[int(columns[0])]
        else:
            ids[row] = variables.fresh(1, "")[0]
            exact = [Fraction(float(v)).limit_denominator(64) for v in values]
            variables.relate([-1, *exact], [ids[row : row + 1], *(factor_ids[int(k)].view(1) for k in columns)])
    return ids


def _circuits(rows: Mapping[str, Sequence[Fraction]]) -> list[dict[str, int]]:
    """For each row that depends on those before it, the integer combination of rows that vanishes."""
    echelon: list[tuple[int, list[Fraction], dict[str, Fraction]]] = []
    found = []
    for name, row in rows.items():
        vector, combination = list(row), {name: Fraction(1)}
        for pivot, basis_row, made_of in echelon:
            if factor := vector[pivot]:
                vector = [a - factor * b for a, b in zip(vector, basis_row, strict=True)]
                for other, c in made_of.items():
                    combination[other] = combination.get(other, Fraction(0)) - factor * c
        pivot = next((k for k, value in enumerate(vector) if value), -1)
        if pivot < 0:
            found.append(_integers({other: c for other, c in combination.items() if c}, list(rows)))
        else:
            lead = vector[pivot]
            echelon.append((pivot, [v / lead for v in vector], {k: c / lead for k, c in combination.items()}))
    return found


def _integers(combination: Mapping[str, Fraction], order: Sequence[str]) -> dict[str, int]:
    scale = lcm(*(c.denominator for c in combination.values()))
    first = next(combination[name] for name in order if name in combination)
    sign = 1 if first > 0 else -1
    return {name: int(combination[name] * scale) * sign for name in order if name in combination}


def layer_conditions(symmetries: ScaleGroup) -> tuple[LayerGroup, ...]:
    """The conditions on one factor per layer, where layers are linear maps and elementwise factors."""
    scales = LayerScales(symmetries)
    moving = [name for name, role in scales.roles.items() if role in ("map", "factor") and scales.rows[name].any()]
    return scales.conditions(moving)


def layer_log_factors(symmetries: ScaleGroup, maps: Sequence[str], factors: Mapping[str, float]) -> Tensor:
    """log f for the papers' layer factors; layers of `maps` that are not mentioned keep λ = 1, the rest follows."""
    scales = LayerScales(symmetries)
    known = [*maps, *(name for name, role in scales.roles.items() if role == "factor" and name not in maps)]
    if unknown := [name for name in factors if name not in known]:
        raise RescalingError(
            f"factors belong to layers, which are {known}; got {unknown} (biases follow by themselves)"
        )
    if bad := {name: f for name, f in factors.items() if not (f > 0 and np.isfinite(f))}:
        raise RescalingError(f"layer factors must be positive and finite; got {bad}")
    wanted = {name: float(factors.get(name, 1.0)) for name in known if name in maps or name in factors}
    for group in scales.conditions(list(wanted)):
        product = group.product(wanted)
        if abs(np.log(product)) > 1e-6:
            raise RescalingError(
                f"these factors are not a symmetry of this network: {group.condition} is required "
                f"(a layer not mentioned has factor 1), but the left side over the right is {product:.6g}"
            )
    return scales.solve({name: float(np.log(value)) for name, value in wanted.items()})
