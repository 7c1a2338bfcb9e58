"""Every measure by its definition, from an explicitly formed Hessian. Shares no code with the package.

Layers are described by hand: which row and which column of its matrix every entry of a weight belongs to.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor, nn


@dataclass(frozen=True)
class Matrix:
    """How a weight is stored. kind: "rows first" (linear, convolution) or "columns first" (x @ W, embedding, …)."""

    kind: str = "rows first"
    groups: int = 1

    def indices(self, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Row and column of every entry, entry by entry, of a tensor of this shape."""
        rows, columns = np.empty(shape, dtype=int), np.empty(shape, dtype=int)
        for place in np.ndindex(*shape):
            first, second = place[0], place[1]
            group = first // (shape[0] // self.groups)
            second += group * shape[1]
            rows[place], columns[place] = (first, second) if self.kind == "rows first" else (second, first)
        return rows.ravel(), columns.ravel()


@dataclass
class Expected:
    """What the definitions give: values by measure, the layers and neurons behind them, the Hessian itself."""

    hessian: Tensor
    loss: float
    values: dict[str, float] = field(default_factory=dict)
    layers: dict[str, dict[str, float]] = field(default_factory=dict)
    neurons: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def flat_loss(model: nn.Module, loss: Callable[..., Tensor], x: object, y: Tensor) -> Callable[[Tensor], Tensor]:
    """L as a function of one flat vector."""
    parameters = trainable(model)
    model.eval()

    def value(theta: Tensor) -> Tensor:
        parts = theta.split([p.numel() for p in parameters.values()])
        named = {name: part.view(p.shape) for (name, p), part in zip(parameters.items(), parts, strict=True)}
        return loss(torch.func.functional_call(model, named, x if isinstance(x, tuple) else (x,)), y)

    return value


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.reshape(-1) for p in trainable(model).values()])


def dense(model: nn.Module, loss: Callable[..., Tensor], x: object, y: Tensor) -> Tensor:
    """∇²L by the Jacobian of the gradient."""
    value, theta = flat_loss(model, loss, x, y), flat(model)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        hessian = torch.autograd.functional.hessian(value, theta)
    return (hessian + hessian.T) / 2


def expected(
    model: nn.Module, loss: Callable[..., Tensor], x: object, y: Tensor, layers: Mapping[str, Matrix]
) -> Expected:
    """Every measure of the table that needs no search."""
    result = Expected(dense(model, loss, x, y).double(), float(flat_loss(model, loss, x, y)(flat(model))))
    _fisher(result, model, loss, x, y)
    _from_hessian(result, model, layers)
    return result


def with_hessian(model: nn.Module, H: Tensor, layers: Mapping[str, Matrix]) -> Expected:
    """Every measure that a Hessian and the weights determine; of other data than a loss was computed on, say."""
    result = Expected(H, float("nan"))
    _from_hessian(result, model, layers)
    return result


def _places(parameters: Mapping[str, Tensor]) -> dict[str, slice]:
    ends = np.cumsum([p.numel() for p in parameters.values()])
    return {name: slice(int(e) - p.numel(), int(e)) for e, (name, p) in zip(ends, parameters.items(), strict=True)}


def _from_hessian(result: Expected, model: nn.Module, layers: Mapping[str, Matrix]) -> None:
    parameters, theta, H = trainable(model), flat(model).double(), result.hessian
    places = _places(parameters)
    _whole_network(result, H, theta, places)
    for name, matrix in layers.items():
        h = H[places[name], places[name]]
        w = theta[places[name]]
        _layer(result, name, h.numpy(), w.numpy(), *matrix.indices(tuple(parameters[name].shape)))
    _collect(result)


def _whole_network(result: Expected, H: Tensor, theta: Tensor, places: Mapping[str, slice]) -> None:
    D = torch.cat([theta[place].norm().expand(place.stop - place.start) for place in places.values()])
    eigenvalues = torch.linalg.eigvalsh(H)
    result.values["hessian_spectral_norm"] = float(eigenvalues.abs().max())
    result.values["hessian_trace"] = float(H.trace())
    result.layers["hessian_trace"] = {name: float(H.diagonal()[place].sum()) for name, place in places.items()}
    result.values["riemannian_spectral_norm"] = float(torch.linalg.eigvalsh(D[:, None] * H * D).max())
    nodewise = theta.abs()[:, None] * H * theta.abs()
    result.values["riemannian_nodewise_spectral_norm"] = float(torch.linalg.eigvalsh(nodewise).max())


def _fisher(result: Expected, model: nn.Module, loss: Callable[..., Tensor], x: object, y: Tensor) -> None:
    theta, places = flat(model).double(), _places(trainable(model))
    squares = torch.zeros_like(theta)
    for n in range(len(y)):
        part = tuple(each[n : n + 1] for each in x) if isinstance(x, tuple) else x[n : n + 1]
        leaf = flat(model).requires_grad_()
        (gradient,) = torch.autograd.grad(flat_loss(model, loss, part, y[n : n + 1])(leaf), leaf)
        squares += gradient.double().square() / len(y)
    terms = theta.square() * squares
    result.values["fisher_rao_norm"] = float(terms.sum())
    result.layers["fisher_rao_norm"] = {name: float(terms[place].sum()) for name, place in places.items()}


def _layer(result: Expected, name: str, h: np.ndarray, w: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> None:
    size, trace = float(w @ w), float(np.trace(h))

    def put(measure: str, value: float) -> None:
        result.layers.setdefault(measure, {})[name] = value

    put("kappa", size * float(np.linalg.eigvalsh(h)[-1]))
    put("kappa_trace", size * trace)
    put("matrix_normalized_sharpness", (size * max(trace, 0.0)) ** 0.5)
    shape = rows.max() + 1, columns.max() + 1
    curvature, square = np.zeros(shape), np.zeros(shape)
    np.add.at(curvature, (rows, columns), np.diag(h).clip(min=0))
    np.add.at(square, (rows, columns), w**2)
    put("normalized_sharpness", smallest_sum(curvature, square))
    for measure, owner in (("rho_row", rows), ("rho", columns)):
        forms = np.array([_form(h, w, owner == j) for j in range(owner.max() + 1)])
        result.neurons.setdefault(measure, {})[name] = forms


def _form(h: np.ndarray, w: np.ndarray, mine: np.ndarray) -> float:
    return float(w[mine] @ h[np.ix_(mine, mine)] @ w[mine])


def _collect(result: Expected) -> None:
    for family in ("kappa", "kappa_trace"):
        entries = result.layers.pop(family)
        for suffix, collect in (("max", max), ("sum", sum)):
            result.layers[f"{family}_{suffix}"] = entries
            result.values[f"{family}_{suffix}"] = collect(entries.values())
    for measure in ("matrix_normalized_sharpness", "normalized_sharpness"):
        result.values[measure] = sum(result.layers[measure].values())
    for family in ("rho", "rho_row"):
        neurons = result.neurons.pop(family)
        for suffix, collect in (("max", max), ("sum", sum)):
            name = f"{family}_{suffix}"
            result.neurons[name] = neurons
            result.layers[name] = {layer: collect(forms) for layer, forms in neurons.items()}
            result.values[name] = collect(result.layers[name].values())


def smallest_sum(h: np.ndarray, w: np.ndarray) -> float:
    """inf over x, y of Σ h_ij e^{x_i+y_j} + w_ij e^{−x_i−y_j}: Newton on the entries that cannot be sent to zero.

    An entry can be sent to zero where some direction (a, b) with a_i+b_j ≤ 0 wherever h_ij > 0 and ≥ 0 wherever
    w_ij > 0 is not zero on it; a linear program finds the direction that sends all such entries away at once.
    """
    held = _held(h, w)
    h, w = h * held, w * held
    if not h.any():
        return 0.0
    z = np.zeros(sum(h.shape))
    value = _sum(h, w, z)
    for _ in range(500):
        up, down = _exponentials(h, w, z)
        gradient = np.concatenate([(up - down).sum(1), (up - down).sum(0)])
        A = up + down
        hessian = np.block([[np.diag(A.sum(1)), A], [A.T, np.diag(A.sum(0))]])
        step = -np.linalg.lstsq(hessian, gradient, rcond=1e-13)[0]
        size = 1.0
        while size > 1e-12 and _sum(h, w, z + size * step) > value + 1e-4 * size * (gradient @ step):
            size /= 2
        new = _sum(h, w, z + size * step)
        if not new < value:
            break
        z, value = z + size * step, new
    return value


def _exponentials(h: np.ndarray, w: np.ndarray, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    together = z[: len(h), None] + z[None, len(h) :]
    return h * np.exp(together), w * np.exp(-together)


def _sum(h: np.ndarray, w: np.ndarray, z: np.ndarray) -> float:
    up, down = _exponentials(h, w, z)
    return float(up.sum() + down.sum())


def _held(h: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The entries on which every such direction is zero."""
    rows, columns = h.shape
    only_h, only_w, both = (h > 0) & (w == 0), (h == 0) & (w > 0), (h > 0) & (w > 0)
    entries = np.argwhere((h > 0) | (w > 0))
    if not (only_h | only_w).any():
        return both
    # maximize Σ t_ij subject to 0 ≤ t ≤ 1, t ≤ −(a_i+b_j) where only h, t ≤ a_i+b_j where only w, a_i+b_j = 0 on both
    loose = [tuple(e) for e in entries if not both[tuple(e)]]
    size = rows + columns
    cost = np.concatenate([np.zeros(size), -np.ones(len(loose))])
    upper = np.zeros((len(loose), size + len(loose)))
    for k, (i, j) in enumerate(loose):
        sign = 1 if only_h[i, j] else -1
        upper[k, i], upper[k, rows + j], upper[k, size + k] = sign, sign, 1
    equal = np.zeros((int(both.sum()), size + len(loose)))
    for k, (i, j) in enumerate(np.argwhere(both)):
        equal[k, i] = equal[k, rows + j] = 1
    bounds = [(None, None)] * size + [(0, 1)] * len(loose)
    found = linprog(
        cost,
        upper,
        np.zeros(len(loose)),
        equal if len(equal) else None,
        np.zeros(len(equal)) if len(equal) else None,
        bounds,
    )
    held = both.copy()
    for k, place in enumerate(loose):
        held[place] = found.x[size + k] < 0.5
    return held
