"""Every measure by its definition, in float64, from an explicitly formed Hessian; shares no code with the package.

Beside each number stands its scale: the size of the terms it is made of, of which rounding is a fraction.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from dense_oracle import Matrix, smallest_sum
from fuzz.networks import reached
from fuzz.subjects import Built


@dataclass(frozen=True)
class Truth:
    """A number by definition, and the sum of the absolute values of what it is made of.

    own: How far this evaluation of it may be off itself.
    """

    value: float
    scale: float
    own: float = 0.0


# What rounding leaves of a zero, in units of the largest entry of a block.
ROUNDED = 2.0**-50


@dataclass(frozen=True)
class Quantities:
    """What all definitions read: H, θ, the places of tensors in both, and (1/N) Σ g_n²."""

    hessian: np.ndarray
    theta: np.ndarray
    places: Mapping[str, slice]
    shapes: Mapping[str, tuple[int, ...]]
    squares: np.ndarray
    layers: Mapping[str, Matrix]
    loss: float


def quantities(built: Built, patterns: Iterable[str] | None) -> Quantities:
    names = built.free(None if patterns is None else list(patterns))
    parameters = {n: p.detach() for n, p in built.honest.named_parameters() if n in names and p.numel()}
    leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    weights = built.terms.weights(built.targets)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        terms = built.terms.terms(functional_call(built.honest, leaves, (built.inputs,)), built.targets)
        everything = functional_call_parameters(built, leaves)
        mean = (weights * terms).sum() / weights.sum() + built.terms.penalty * sum(
            p.square().sum() for p in everything.values()
        )
        gradient = _gradient(mean, leaves, create=True)
        rows = [_gradient(entry, leaves) if entry.requires_grad else torch.zeros_like(gradient) for entry in gradient]
        each = [_gradient(term, leaves) for term in terms]
    H = torch.stack(rows).detach()
    ends = np.cumsum([p.numel() for p in parameters.values()]).tolist()
    places = {name: slice(end - p.numel(), end) for end, (name, p) in zip(ends, parameters.items(), strict=True)}
    return Quantities(
        ((H + H.T) / 2).numpy(),
        torch.cat([p.reshape(-1) for p in parameters.values()]).numpy(),
        places,
        {name: tuple(p.shape) for name, p in parameters.items()},
        torch.stack(each).detach().square().mean(0).numpy(),
        {name: matrix for name, matrix in reached(built.honest, built.inputs).items() if name in parameters},
        float(mean.detach()),
    )


def functional_call_parameters(built: Built, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All parameters, the measured ones as leaves."""
    return {name: leaves.get(name, p.detach()) for name, p in built.honest.named_parameters()}


def _gradient(value: Tensor, leaves: Mapping[str, Tensor], *, create: bool = False) -> Tensor:
    if not value.requires_grad:
        return torch.cat([torch.zeros(leaf.numel(), dtype=torch.float64) for leaf in leaves.values()])
    found = torch.autograd.grad(value, list(leaves.values()), create_graph=create, retain_graph=True, allow_unused=True)
    parts = [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves.values(), strict=True)]
    return torch.cat([part.reshape(-1) for part in parts])


def truths(q: Quantities, wanted: Iterable[str]) -> dict[str, Truth]:
    """The measures asked for; layer measures are left out where there is no layer."""
    found = {}
    for name in wanted:
        if name in WHOLE:
            found[name] = WHOLE[name](q)
        elif q.layers:
            family, collect = LAYERED[name]
            parts = [family(q, layer) for layer in q.layers]
            together = max if collect == "max" else sum
            found[name] = Truth(
                *(together(getattr(part, field) for part in parts) for field in ("value", "scale", "own"))
            )
    return found


# --- the whole network ---------------------------------------------------------------------------------------------


def _extreme(matrix: np.ndarray, absolute: bool = False) -> Truth:
    """λ_max. The matrix is brought to size one first: squares inside the solver must not overflow."""
    size = float(np.abs(matrix).max(initial=0.0))
    if size == 0 or not np.isfinite(size):
        return Truth(size, size)
    eigenvalues = np.linalg.eigvalsh(matrix / size) * size
    radius = float(np.abs(eigenvalues).max())
    return Truth(radius if absolute else float(eigenvalues[-1]), radius)


def _scaled(q: Quantities, D: np.ndarray) -> Truth:
    return _extreme(D[:, None] * q.hessian * D)


def _block_norms(q: Quantities) -> np.ndarray:
    return np.concatenate([np.full(p.stop - p.start, np.linalg.norm(q.theta[p])) for p in q.places.values()])


def _trace(q: Quantities) -> Truth:
    diagonal = np.diag(q.hessian)
    return Truth(float(diagonal.sum()), float(np.abs(diagonal).sum()))


def _fisher(q: Quantities) -> Truth:
    value = float((q.theta**2 * q.squares).sum())
    return Truth(value, value)


WHOLE = {
    "hessian_trace": _trace,
    "hessian_spectral_norm": lambda q: _extreme(q.hessian, absolute=True),
    "riemannian_spectral_norm": lambda q: _scaled(q, _block_norms(q)),
    "riemannian_nodewise_spectral_norm": lambda q: _scaled(q, np.abs(q.theta)),
    "fisher_rao_norm": _fisher,
}


# --- layers --------------------------------------------------------------------------------------------------------


def _block(q: Quantities, name: str) -> tuple[np.ndarray, np.ndarray]:
    return q.hessian[q.places[name], q.places[name]], q.theta[q.places[name]]


def _kappa(q: Quantities, name: str) -> Truth:
    h, w = _block(q, name)
    return _extreme(h * float(w @ w))


def _kappa_trace(q: Quantities, name: str) -> Truth:
    h, w = _block(q, name)
    size = float(w @ w)
    return Truth(size * float(np.trace(h)), size * float(np.abs(np.diag(h)).sum()))


def _matrix_normalized(q: Quantities, name: str) -> Truth:
    trace = _kappa_trace(q, name)
    value = max(trace.value, 0.0) ** 0.5
    return Truth(value, trace.scale**0.5)


def _forms(q: Quantities, name: str, by_rows: bool) -> list[Truth]:
    h, w = _block(q, name)
    owner = q.layers[name].indices(q.shapes[name])[0 if by_rows else 1]
    whole, sizes = w[:, None] * h * w, np.abs(w[:, None] * h * w)
    groups = [owner == j for j in range(owner.max() + 1)]
    return [Truth(float(whole[np.ix_(g, g)].sum()), float(sizes[np.ix_(g, g)].sum())) for g in groups]


def _rho(by_rows: bool, collect: str):
    join = max if collect == "max" else sum

    def form(q: Quantities, name: str) -> Truth:
        parts = _forms(q, name, by_rows)
        return Truth(join(part.value for part in parts), join(part.scale for part in parts))

    return form


def _normalized(q: Quantities, name: str) -> Truth:
    h, w = _block(q, name)
    rows, columns = q.layers[name].indices(q.shapes[name])
    curvature, square = np.zeros((rows.max() + 1, columns.max() + 1)), np.zeros((rows.max() + 1, columns.max() + 1))
    np.add.at(curvature, (rows, columns), np.diag(h).clip(min=0))
    np.add.at(square, (rows, columns), w**2)
    try:
        value = smallest_sum(*_balanced(curvature, square))
    except np.linalg.LinAlgError:  # beyond the range of double precision
        return Truth(float("nan"), float("nan"))
    # Entries that should be zero come out as rounding, here or there, and add its square root.
    rounded = ROUNDED * curvature.max()
    zeros = np.sqrt(rounded * square[curvature <= rounded]).sum()
    return Truth(value, max(value, _matrix_normalized(q, name).scale), 2 * float(zeros))


def _balanced(h: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same problem with rows and columns scaled until numbers are of a size, where Newton's method is at home."""
    h, w = h.copy(), w.copy()
    for _ in range(30):
        for axis in (1, 0):
            up, down = h.sum(axis, keepdims=True), w.sum(axis, keepdims=True)
            factor = np.sqrt(np.where((up > 0) & (down > 0), down / np.where(up > 0, up, 1), 1.0))
            h, w = h * factor, w / factor
    return h, w


LAYERED = {
    "kappa_max": (_kappa, "max"),
    "kappa_sum": (_kappa, "sum"),
    "kappa_trace_max": (_kappa_trace, "max"),
    "kappa_trace_sum": (_kappa_trace, "sum"),
    "rho_max": (_rho(False, "max"), "max"),
    "rho_sum": (_rho(False, "sum"), "sum"),
    "rho_row_max": (_rho(True, "max"), "max"),
    "rho_row_sum": (_rho(True, "sum"), "sum"),
    "matrix_normalized_sharpness": (_matrix_normalized, "sum"),
    "normalized_sharpness": (_normalized, "sum"),
}
