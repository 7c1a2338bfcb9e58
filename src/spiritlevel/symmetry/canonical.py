"""The balanced member of a network's orbit: every channel with equal norms coming in and going out.

Among all rescalings the balanced one has the least Σ θ². In the log-factors x this is the convex function
F(x) = Σ_j m_j exp(2 a_j·x), where m_j is a sum of squared parameters that share their exponents a_j.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csgraph
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor, nn

from spiritlevel.errors import RescalingError
from spiritlevel.problem.devices import with_double
from spiritlevel.symmetry.group import TensorScale
from spiritlevel.symmetry.rescale import Rescaling
from spiritlevel.symmetry.symmetries import Symmetries

Floats = NDArray[np.float64]
TOLERANCE = 1e-12
# In networks of up to this many layers, terms with the same exponents are looked for and added up.
MOST_COMPARED = 64
"""The largest |in − out| / (in + out) left in any channel, norms squared."""


@dataclass(frozen=True)
class Balance:
    """The rescaling that balances a network, the factors left alone because they would run away, and the residual.

    dead: positions of factors of channels that nothing alive feeds or reads, whose best factor is 0 or infinity.
    residual: the largest |in − out|/(in + out) of the squared norms of a channel.
    """

    rescaling: Rescaling
    dead: tuple[int, ...]
    residual: float
    iterations: int

    @property
    def dead_channels(self) -> tuple[str, ...]:
        """The dead channels, each as the name of its group and its number within the group."""
        place = {f: f"{g.name}[{k}]" for g in self.rescaling.symmetries.scale_groups for k, f in enumerate(g.factors)}
        return tuple(place[factor] for factor in self.dead)


def balance(model: nn.Module, symmetries: Symmetries) -> Balance:
    """The rescaling to the member of the orbit with the least Σ θ² over the parameters.

    For a factor that multiplies one slice and divides another, the two have equal norms at the minimum. Dead channels
    keep factor 1, and the parameters that only they touch take no part. Newton's method on a convex function.
    """
    return least_sum(
        symmetries, {name: with_double(p.detach()).double().square() for name, p in model.named_parameters()}, 1
    )


def least_sum(symmetries: Symmetries, masses: Mapping[str, Tensor], sign: Literal[1, -1]) -> Balance:
    """The rescaling that minimizes Σ m·s², s what multiplies each parameter (sign 1) or divides it (sign −1).

    m = θ² with sign 1 is the balanced network; m = diag H with sign −1 the one of least trace, because H becomes D H D.
    """
    m, exponents = _terms(symmetries, masses)
    kept, dead = _determined(sign * exponents)
    x, residual, iterations = _minimize(m[kept], sign * exponents[kept])
    return Balance(Rescaling(symmetries, torch.from_numpy(x)), tuple(dead.tolist()), residual, iterations)


def least_value(
    symmetries: Symmetries, masses: Mapping[str, Tensor], sign: Literal[1, -1], spread: Floats | None = None
) -> float:
    """The infimum of Σ m·s² over all parameters, s as in `least_sum`; terms that go to zero at infinity count as zero.

    spread: (factors, k): the logarithms of the factors are its combinations; any at all where it is None.
    """
    m, exponents = _terms(symmetries, masses)
    if spread is not None:
        exponents = sparse.csr_matrix(np.asarray(exponents @ spread).reshape(len(m), spread.shape[1]))
    still = sum(float(part.sum(dtype=torch.float64)) for part in masses.values()) - float(m.sum())
    m, exponents = _merged(m, exponents)
    moving = exponents.getnnz(axis=1) > 0
    still += float(m[~moving].sum())
    m, exponents = m[moving], sign * exponents[moving]
    if not len(m):
        return still
    kept, _ = _determined(exponents)
    m, exponents = m[kept], exponents[kept]
    x, *_ = _minimize(m, exponents)
    return still + float((m * np.exp(2 * (exponents @ x))).sum())


def _merged(m: Floats, exponents: sparse.csr_matrix) -> tuple[Floats, sparse.csr_matrix]:
    """Terms with the same exponents added up, where these are few enough to be compared."""
    if exponents.shape[1] > MOST_COMPARED or not len(m):
        return m, exponents
    rows, inverse = np.unique(exponents.toarray().round(12), axis=0, return_inverse=True)
    merged = sparse.csr_matrix(rows)
    merged.eliminate_zeros()
    sums = np.zeros(len(rows))
    np.add.at(sums, inverse.reshape(-1), m)
    return sums, merged


def _terms(symmetries: Symmetries, masses: Mapping[str, Tensor]) -> tuple[Floats, sparse.csr_matrix]:
    """m and the rows a_j of F: sums of masses with the exponents they share."""
    found, rows = [], []
    for name, tensor in symmetries.tensors.items():
        if tensor.is_buffer or name not in masses:
            continue
        combinations, sums = _sums(tensor, masses[name])
        exponents = sum(c * symmetries.basis[combinations[:, k].numpy()] for k, (c, _) in enumerate(tensor.terms))
        found.append(sums.numpy())
        rows.append(exponents)
    if not rows:
        return np.zeros(0), sparse.csr_matrix((0, symmetries.dimension))
    m, a = np.concatenate(found), sparse.csr_matrix(sparse.vstack(rows))
    a.eliminate_zeros()
    used = (m > 0) & (a.getnnz(axis=1) > 0)
    return m[used], a[used]


def _sums(tensor: TensorScale, masses: Tensor) -> tuple[Tensor, Tensor]:
    """The basis rows that scale the parts of a parameter, and the sum of masses of each part."""
    squares, keys = masses.cpu().double(), [rows for _, rows in tensor.terms]
    constant = [d for d in range(squares.dim()) if all(rows.shape[d] == 1 for rows in keys)]
    squares = squares.sum(dim=constant, keepdim=True) if constant else squares
    for d in range(squares.dim()):
        squares, keys = _merged_along(squares, keys, d)
    return torch.stack([rows.expand(squares.shape).flatten() for rows in keys], dim=1), squares.flatten()


def _merged_along(squares: Tensor, keys: list[Tensor], dim: int) -> tuple[Tensor, list[Tensor]]:
    """Add up entries along a dimension that no factor tells apart, such as the features of one flattened channel."""
    columns = [rows for rows in keys if rows.shape[dim] > 1]
    if squares.shape[dim] == 1 or any(rows.numel() != rows.shape[dim] for rows in columns):
        return squares, keys
    _, inverse = torch.unique(torch.stack([rows.flatten() for rows in columns]), dim=1, return_inverse=True)
    number = int(inverse.max()) + 1
    shape = [number if d == dim else n for d, n in enumerate(squares.shape)]
    merged = torch.zeros(shape, dtype=squares.dtype).index_add_(dim, inverse, squares)
    first = torch.zeros(number, dtype=torch.int64).scatter_(0, inverse, torch.arange(len(inverse)))
    return merged, [rows.index_select(dim, first) if rows.shape[dim] > 1 else rows for rows in keys]


def _determined(a: sparse.csr_matrix) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """The terms of F that no direction can drive to zero without raising another, and the factors they leave open.

    Where every term has at most one multiplying and one dividing factor, they are arrows of a graph, with a ground node
    for the fixed scales: a term can be driven to zero unless it lies on a closed path. Otherwise a linear program.
    """
    coo, number = a.tocoo(), a.shape[1]
    up, down = (np.full(a.shape[0], number, dtype=np.int64) for _ in range(2))
    up[coo.row[coo.data > 0]] = coo.col[coo.data > 0]
    down[coo.row[coo.data < 0]] = coo.col[coo.data < 0]
    if coo.nnz != int((up < number).sum() + (down < number).sum()):
        return _determined_by_program(a)
    graph = sparse.coo_matrix((np.ones(len(up)), (down, up)), shape=(number + 1, number + 1))
    _, component = csgraph.connected_components(graph, directed=True, connection="strong")
    return component[up] == component[down], np.flatnonzero(component[:number] != component[number])


def _determined_by_program(a: sparse.csr_matrix) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """The same for any exponents: the largest set of terms with a·d < 0 while no a·d > 0 is found by max Σ s, a·d ≤ −s."""
    from scipy.optimize import linprog  # here: it takes a fifth of a second, which every command would wait for

    rows, number = a.shape
    cost = np.concatenate([np.zeros(number), -np.ones(rows)])
    bounds = [(None, None)] * number + [(0.0, 1.0)] * rows
    found = linprog(cost, A_ub=sparse.hstack([a, sparse.identity(rows)]), b_ub=np.zeros(rows), bounds=bounds)
    kept = np.asarray(found.x[number:] < 0.5)
    span = np.linalg.pinv(a[kept].toarray()) @ a[kept].toarray()
    return kept, np.flatnonzero(np.abs(np.diag(span) - 1) > 1e-8)


def _minimize(m: Floats, a: sparse.csr_matrix) -> tuple[Floats, float, int]:
    """The minimum of F(x) = Σ m exp(2 a·x): damped balancing steps, then Newton steps solved by conjugate gradients."""
    x, size, at = np.zeros(a.shape[1]), abs(a), a.T.tocsr()
    size_t = size.T.tocsr()
    residual, iterations = 0.0, 0
    for iterations in range(400):  # noqa: B007
        w = m * np.exp(2 * (a @ x))
        gradient, total = at @ w, size_t @ w
        total = np.where(total > 0, total, 1.0)
        residual = float(np.max(np.abs(gradient) / total, initial=0.0))
        if residual <= TOLERANCE:
            break
        # a difference of logarithms: their quotient may leave the range of doubles
        rise, fall = (np.log(np.maximum(part, 1e-300)) for part in (total + gradient, total - gradient))
        trial = x - 0.25 * (rise - fall).clip(-8, 8)
        if residual > 0.5 and float((m * np.exp(2 * (a @ trial))).sum()) < 0.9 * float(w.sum()):
            x = trial
        else:
            x = x + _newton_step(m, a, at, x, w, gradient)
    if residual > 1e-9:
        raise RescalingError(
            f"balancing stopped with a residual of {residual:.1e} after {iterations + 1} steps; "
            "some parameters differ by too many orders of magnitude: sample a weaker rescaling first"
        )
    return x, residual, iterations


def _newton_step(
    m: Floats, a: sparse.csr_matrix, at: sparse.csr_matrix, x: Floats, w: Floats, gradient: Floats
) -> Floats:
    """−H⁻¹∇F with H = 4 aᵀ diag(w) a, shortened until F decreases."""
    diagonal = np.asarray(abs(a).power(2).T @ w).ravel()
    diagonal = np.where(diagonal > 0, diagonal, 1.0)
    hessian = LinearOperator(a.shape[1:] * 2, matvec=lambda v: at @ (w * (a @ v)), dtype=np.float64)
    inverse = LinearOperator(a.shape[1:] * 2, matvec=lambda v: v / diagonal, dtype=np.float64)
    step, _ = cg(hessian, -gradient / 2, rtol=1e-10, maxiter=2000, M=inverse)
    slope, start = float(step @ gradient), float(w.sum())
    for halving in range(40):
        length = 0.5**halving
        if float((m * np.exp(2 * (a @ (x + length * step)))).sum()) <= start + 1e-4 * length * slope + 1e-15 * start:
            return np.asarray(length * step)
    return np.asarray(step * 0.0)
