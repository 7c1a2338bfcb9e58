"""Tsuzuku, Sato, Sugiyama 2019, "Normalized Flat Minima": sharpness at the scale that a PAC-Bayes bound picks."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from spiritlevel.errors import listed
from spiritlevel.measuring.clipping import true_share
from spiritlevel.measuring.readings import DIAGONAL, TRACE, Reading, from_statistics
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.statistics import NoisyStatistics, Statistics

# Up to this many rows and columns Newton's method ends the search for the minimum, in at most this many steps.
MOST_POLISHED, NEWTON_STEPS = 200, 6


def balanced_scales(
    h: Tensor, w: Tensor, most_steps: int = 10_000, start: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """min over x, y of Σ_ij h_ij e^{x_i+y_j} + w_ij e^{−x_i−y_j} for h, w ≥ 0 of shape (…, rows, columns).

    Returns (minimum, x, y), the minimum one for each leading index. Each half step is the closed form
    x_i = ½ ln(Σ_j w_ij e^{−y_j} / Σ_j h_ij e^{y_j}). A row or column whose h (or w) is all zero adds exactly 0, its
    infimum being at infinity; its x or y is returned as +inf (−inf). So does any other entry that a direction to
    infinity takes away. `start` is the y of a problem that is nearly the same: from there it takes a step or two.

    >>> h = torch.tensor([[4.0]]); w = torch.tensor([[9.0]])
    >>> float(balanced_scales(h, w)[0])  # 2·√(4·9)
    12.0
    """
    h, w = h.double().clamp(min=0), w.double()
    curved = h > 0
    curved_rows, curved_columns = curved.any(-1), curved.any(-2)
    alive_rows, alive_columns = curved_rows, curved_columns
    if not (bool(curved_rows.all() & curved_columns.all()) and bool((w > 0).all())):  # else every entry is held
        held = _held(curved, w > 0)
        h, w = h.mul_(held), w * held
        alive_rows, alive_columns = (h > 0).any(-1), (h > 0).any(-2)
    y = torch.zeros(alive_columns.shape, dtype=torch.float64, device=h.device)
    if start is not None:
        y = torch.where(alive_columns & start.isfinite(), start, y)
    x = torch.zeros(alive_rows.shape, dtype=torch.float64, device=h.device)
    up, down = _sums(h, w, y)
    value = _minimum_over_rows(up, down)
    for _ in range(most_steps):
        x = _half_step(up, down)
        y = _half_step(*_sums(h.mT, w.mT, x))
        up, down = _sums(h, w, y)
        new = _minimum_over_rows(up, down)
        if bool((value - new <= 1e-15 * new).all()):
            value = torch.minimum(value, new)
            break
        value = new
    if sum(h.shape[-2:]) <= MOST_POLISHED:
        x, y, value = _polished(h, w, x, y, value)
    return value, _outside(x, alive_rows, curved_rows), _outside(y, alive_columns, curved_columns)


def _polished(h: Tensor, w: Tensor, x: Tensor, y: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A few steps of Newton's method: half steps can become so slow that they seem to have converged far from the minimum."""
    for _ in range(NEWTON_STEPS):
        up, down = h * (x.unsqueeze(-1) + y.unsqueeze(-2)).exp(), w * (-x.unsqueeze(-1) - y.unsqueeze(-2)).exp()
        slope, bend = up - down, up + down
        gradient = torch.cat([slope.sum(-1), slope.sum(-2)], -1)
        hessian = torch.diag_embed(torch.cat([bend.sum(-1), bend.sum(-2)], -1))
        rows = h.shape[-2]
        hessian[..., :rows, rows:], hessian[..., rows:, :rows] = bend, bend.mT
        diagonal = hessian.diagonal(
            dim1=-2, dim2=-1
        )  # x + c, y − c is the same point: a little more keeps it from drifting
        diagonal.mul_(1 + 1e-12).add_((diagonal == 0).to(diagonal))
        step = torch.linalg.solve(hessian, gradient.unsqueeze(-1)).squeeze(-1)
        moved = x - step[..., :rows], y - step[..., rows:]
        above, below = _sums(h, w, moved[1])
        new = _minimum_over_rows(above, below)
        better = (new < value) & torch.isfinite(new)
        if not bool(better.any()):
            break
        x, y = (torch.where(better.unsqueeze(-1), a, b) for a, b in zip(moved, (x, y), strict=True))
        value = torch.where(better, new, value)
    return x, y, value


def _sums(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_j h_ij e^{y_j} and Σ_j w_ij e^{−y_j}."""
    return (h @ y.exp().unsqueeze(-1)).squeeze(-1), (w @ (-y).exp().unsqueeze(-1)).squeeze(-1)


def _minimum_over_rows(up: Tensor, down: Tensor) -> Tensor:
    """The minimum over x for the sums that y gives."""
    return 2 * (up * down).sqrt().sum(-1)


def _half_step(up: Tensor, down: Tensor) -> Tensor:
    """The best x for the sums that y gives."""
    return torch.where(up > 0, (down / torch.where(up > 0, up, 1.0)).log() / 2, 0.0)


def _held(curved: Tensor, weighted: Tensor) -> Tensor:
    """The entries that no direction sends to zero, of those with h > 0 and with w > 0; all others vanish together in the limit.

    A direction (a, b) along which nothing grows has a_i ≤ −b_j where h_ij > 0 and −b_j ≤ a_i where w_ij > 0. Read these
    as edges of a graph on rows and columns: an entry is held where its row and its column lie on a common cycle.
    """
    for full, other in ((weighted, curved), (curved, weighted)):
        if bool(full.all()):  # every row and column with an edge of the other kind then lies on one cycle
            return other.any(-1, keepdim=True) & other.any(-2, keepdim=True)
    rows, columns = curved.shape[-2:]
    size = curved.shape[:-2].numel() * (rows + columns)
    upward, downward = (_nodes(present, rows, columns) for present in (curved, weighted))
    sources, targets = torch.cat([upward[0], downward[1]]), torch.cat([upward[1], downward[0]])
    graph = coo_matrix((np.ones(len(sources)), (sources.numpy(), targets.numpy())), shape=(size, size))
    _, component = connected_components(graph, connection="strong")
    component = torch.from_numpy(component).to(curved.device).reshape(*curved.shape[:-2], rows + columns)
    return component[..., :rows].unsqueeze(-1) == component[..., rows:].unsqueeze(-2)


def _nodes(present: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """The nodes of the row and the column of every entry that is present."""
    block, row, column = present.reshape(-1, rows, columns).nonzero().cpu().unbind(1)
    first = block * (rows + columns)
    return first + row, first + rows + column


def _outside(x: Tensor, alive: Tensor, curved: Tensor) -> Tensor:
    """Where a row was left out: +inf if it has no curvature, −inf if it has no weight."""
    return torch.where(alive, x, torch.where(curved, -torch.inf, torch.inf))


def _normalized(statistics: Statistics) -> Reading:
    """Σ_l min over x, y of (17) at λ = 1/2, kernels summed over their positions first.

    The square of the minimum is 4 Σ h e^{x+y} · Σ W² e^{−x−y}, in proportion to h. So where h is noisy it is multiplied by
    the share of Σ h e^{x+y} that is not noise; where that is negative, so is the root.
    """
    layers = {}
    for name, layer in statistics.layers.items():
        h = layer.matrix(statistics.diagonal[name].clamp(min=0))
        w = layer.matrix(statistics.weights[name].square())
        minimum, x, y = balanced_scales(_over_kernel(h), _over_kernel(w), start=statistics.starts.get(name))
        statistics.starts.setdefault(name, y)
        layers[name] = float(minimum.sum())
        if isinstance(statistics, NoisyStatistics) and name in statistics.spread:
            diagonal, spread = (layer.matrix(each[name]) for each in (statistics.diagonal, statistics.spread))
            share = true_share(diagonal, spread, _scales(x, y).unsqueeze(-1).expand_as(diagonal), statistics.degrees)
            layers[name] *= math.copysign(math.sqrt(abs(share)), share)
    return Reading(sum(layers.values()), layers, notes=_negative(statistics, by_entry=True))


def _scales(x: Tensor, y: Tensor) -> Tensor:
    """e^{x+y}; 0 for what was left out."""
    together = x.unsqueeze(-1) + y.unsqueeze(-2)
    return torch.where(torch.isfinite(together), together, -torch.inf).exp()


def _over_kernel(matrix: Tensor) -> Tensor:
    """Summed over the positions of a kernel; a dense layer, which may be large, has one and is not copied."""
    return matrix.squeeze(3) if matrix.shape[3] == 1 else matrix.sum(3)


def _matrix_normalized(statistics: Statistics) -> Reading:
    """Σ_l √(‖W_l‖² Tr H_l)."""
    layers = {
        name: float((statistics.weights[name].square().sum() * statistics.trace[name].clamp(min=0)).sqrt())
        for name in statistics.layers
    }
    return Reading(sum(layers.values()), layers, notes=_negative(statistics, by_entry=False))


def _negative(statistics: Statistics, by_entry: bool) -> tuple[str, ...]:
    if by_entry:
        names = [name for name in statistics.layers if bool((statistics.diagonal[name] < 0).any())]
        return (f"negative diagonal entries clipped to 0 in {listed(names)}",) if names else ()
    names = [name for name in statistics.layers if float(statistics.trace[name]) < 0]
    return (f"negative traces clipped to 0: {listed(names)}",) if names else ()


_matrix_compute, _matrix_needs = from_statistics(_matrix_normalized, frozenset([TRACE]), shape="sum of roots")
_compute, _needs = from_statistics(_normalized, frozenset([DIAGONAL]), shape="sum of roots", smooth=True)

MEASURES = (
    Measure(
        "matrix_normalized_sharpness",
        "tsuzuku2019",
        "sharpness with one noise scale a weight matrix",
        "Σ_l √(‖W_l‖² Tr H_l)",
        frozenset({"layer"}),
        _matrix_compute,
        _matrix_needs,
        in_shards=True,
    ),
    Measure(
        "normalized_sharpness",
        "tsuzuku2019",
        "sharpness with noise scales for rows and columns",
        "Σ_l min_{x,y} Σ_ij h_ij e^{x_i+y_j} + W_ij² e^{−x_i−y_j},  h = diag H_l",
        frozenset({"layer", "neuron"}),
        _compute,
        _needs,
        in_shards=True,
    ),
)
