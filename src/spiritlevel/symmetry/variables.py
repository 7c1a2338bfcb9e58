"""Scale variables of a traced network and the linear system that ties them together.

Every scale in a network is the exponential of a variable v. Following the network leaves two kinds of conditions on
the variables: equalities v_a = v_b (most of them), and relations Σ c·v = 0 (products of activations, weights used
twice). The solutions form a vector space; its dimension is the number of independent scale factors.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csgraph
from torch import Tensor

ANY = 0
"""The scale of a number that no factor changes (0, ±inf): it agrees with every scale."""
FIXED = 1
"""The variable that is zero: the scale of inputs, outputs and constants."""

Row = dict[int, Fraction]
Ints = NDArray[np.int64]


def broadcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors expanded to their common shape."""
    return tuple(torch.broadcast_tensors(*tensors))  # type: ignore[no-untyped-call]


def squeezed(ids: Tensor) -> Tensor:
    """`ids` with every expanded (stride 0) dimension cut to length one: the same content, broadcastable."""
    index = tuple(
        slice(0, 1) if n > 1 and s == 0 else slice(None) for n, s in zip(ids.shape, ids.stride(), strict=True)
    )
    return ids[index] if index else ids


def compact(ids: Tensor) -> Tensor:
    """`ids` with every dimension along which it is constant expanded from length one."""
    short = squeezed(ids)
    for dim, length in enumerate(short.shape):
        if length > 1 and bool((short == short.narrow(dim, 0, 1)).all()):
            short = short.narrow(dim, 0, 1)
    return short.expand(ids.shape)


@dataclass(frozen=True)
class Solution:
    """All values of the variables that satisfy the conditions: v = basis[classes] @ log_factors.

    classes: for each variable the row of `basis` it reads. basis: one column per independent factor.
    leaders: for each factor the first variable (in the order of the trace) it moves.
    """

    classes: Tensor
    basis: sparse.csr_matrix
    leaders: tuple[int, ...]

    @property
    def dimension(self) -> int:
        """The number of independent factors."""
        return len(self.leaders)


class Variables:
    """A growing set of scale variables with equalities and relations between them."""

    def __init__(self) -> None:
        self.count = 2
        self._labels: list[tuple[int, str]] = [(0, "")]
        self._left: list[Tensor] = []
        self._right: list[Tensor] = []
        self._relations: list[tuple[tuple[Fraction, ...], Ints]] = []

    def fresh(self, number: int, label: str) -> Tensor:
        """`number` new variables, free so far; `label` names what they scale."""
        start, self.count = self.count, self.count + number
        self._labels.append((start, label))
        return torch.arange(start, self.count)

    def label(self, variable: int) -> tuple[str, int]:
        """What a variable scales: the label of its block and its position within the block."""
        block = bisect_right(self._labels, variable, key=lambda entry: entry[0]) - 1
        start, name = self._labels[block]
        return name, variable - start

    def tie(self, a: Tensor, b: Tensor) -> None:
        """Make the variables of `a` and `b` equal, element by element with broadcasting; ANY ties nothing."""
        a, b = broadcast(squeezed(a), squeezed(b))
        differ = (a != b) & (a != ANY) & (b != ANY)
        if bool(differ.any()):
            self._left.append(a[differ])
            self._right.append(b[differ])

    def fix(self, ids: Tensor) -> None:
        """Set the variables of `ids` to zero."""
        self.tie(ids, torch.tensor(FIXED))

    def relate(self, coefficients: Sequence[Fraction | int], ids: Sequence[Tensor]) -> None:
        """Require Σ_k coefficients[k] · ids[k] = 0, element by element with broadcasting; no id may be ANY."""
        stacked = torch.stack([column.flatten() for column in broadcast(*map(squeezed, ids))], dim=1)
        if stacked.numel():
            rows = torch.unique(stacked, dim=0).numpy()
            self._relations.append((tuple(Fraction(c) for c in coefficients), rows))

    def solve(self) -> Solution:
        """The space of all values that satisfy every equality and relation."""
        left = torch.cat([*self._left, torch.tensor([ANY])]).numpy()
        right = torch.cat([*self._right, torch.tensor([FIXED])]).numpy()
        classes = _components(self.count, left, right)
        relations = self._relations
        while relations:
            rows = _reduced_rows(relations, classes)
            pairs = [_equality(row, int(classes[FIXED])) for row in rows]
            joined = [pair for pair in pairs if pair is not None]
            if not joined:
                return _eliminate(classes, rows)
            merge = np.array(joined, dtype=np.int64)
            classes = _components(int(classes.max()) + 1, merge[:, 0], merge[:, 1])[classes]
        return _eliminate(classes, [])


def _components(number: int, left: Ints, right: Ints) -> Ints:
    """The class of each of `number` items under the equivalence that joins left[k] with right[k]."""
    graph = sparse.coo_matrix((np.ones(len(left), dtype=np.int8), (left, right)), shape=(number, number))
    _, labels = csgraph.connected_components(graph, directed=False)
    return np.asarray(labels, dtype=np.int64)


def _reduced_rows(relations: list[tuple[tuple[Fraction, ...], Ints]], classes: Ints) -> list[Row]:
    """The relations in terms of classes, without the class that is zero and without empty or repeated rows."""
    zero, rows = int(classes[FIXED]), {}
    for coefficients, ids in relations:
        for columns in np.unique(classes[ids], axis=0).tolist():
            row: Row = {}
            for coefficient, column in zip(coefficients, columns, strict=True):
                if column != zero:
                    row[column] = row.get(column, Fraction(0)) + coefficient
            row = {column: value for column, value in row.items() if value}
            if row:
                rows[tuple(sorted(row.items()))] = row
    return list(rows.values())


def _equality(row: Row, zero: int) -> tuple[int, int] | None:
    """The pair of classes that a row makes equal, if it says no more than that."""
    columns = list(row)
    if len(columns) == 1:
        return columns[0], zero
    if len(columns) == 2 and row[columns[0]] == -row[columns[1]]:
        return columns[0], columns[1]
    return None


def _eliminate(classes: Ints, rows: list[Row]) -> Solution:
    """Solve the remaining rows; the classes that stay free, in the order of the trace, are the factors."""
    number, zero = int(classes.max()) + 1, int(classes[FIXED])
    leaders = np.full(number, np.iinfo(np.int64).max)
    np.minimum.at(leaders, classes, np.arange(len(classes)))
    solved = _solved_form(rows, leaders)
    free = [k for k in np.argsort(leaders).tolist() if k != zero and k not in solved]
    position = {k: column for column, k in enumerate(free)}
    entries = [(k, column, 1.0) for k, column in position.items()]
    entries += [(k, position[j], float(value)) for k, row in solved.items() for j, value in row.items()]
    values, at = [value for *_, value in entries], ([row for row, *_ in entries], [column for _, column, _ in entries])
    basis = sparse.csr_matrix((values, at), shape=(number, len(free)))
    return Solution(torch.from_numpy(classes), basis, tuple(int(leaders[k]) for k in free))


def _solved_form(rows: list[Row], leaders: Ints) -> dict[int, Row]:
    """Gauss–Jordan elimination: some classes as combinations of the others, the latest in the trace first."""
    solved: dict[int, Row] = {}
    users: dict[int, set[int]] = {}
    for row in rows:
        reduced = _substituted(row, solved)
        if not reduced:
            continue
        pivot = max(reduced, key=lambda k: int(leaders[k]))
        value = reduced.pop(pivot)
        expression = {k: -c / value for k, c in reduced.items()}
        for user in users.pop(pivot, set()):
            solved[user] = _substituted(solved[user], {pivot: expression})
            for k in solved[user]:
                users.setdefault(k, set()).add(user)
        solved[pivot] = expression
        for k in expression:
            users.setdefault(k, set()).add(pivot)
    return solved


def _substituted(row: Row, solved: dict[int, Row]) -> Row:
    """`row` with every solved class replaced by its expression."""
    result: Row = {}
    for k, c in row.items():
        for j, value in solved.get(k, {k: Fraction(1)}).items():
            result[j] = result.get(j, Fraction(0)) + c * value
    return {k: c for k, c in result.items() if c}
