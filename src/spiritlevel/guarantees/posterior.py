"""The posterior of a PAC-Bayes bound: Gaussian noise on every tensor, and what its scales cost to describe.

Posterior N(θ, diag s²) and prior N(θ₀, diag s²) share their deviations s, so that the divergence is Σ (θ−θ₀)²/(2s²), with
θ₀ = 0 unless something better was known before the data. They are chosen after training, which is paid for: each free scale σ is one of a finite set of numbers fixed in advance, and
naming one of them costs the logarithm of their count (tsuzuku2019, sections 4.1 and 5.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spiritlevel.errors import SpiritLevelError
from spiritlevel.measures.tsuzuku2019 import balanced_scales
from spiritlevel.measuring.statistics import Statistics
from spiritlevel.network.layers import Layer

# The logarithm of the smallest scale anything is given: far below rounding, far above underflow of its square.
_LEAST = -20.0


@dataclass(frozen=True)
class Hyperprior:
    """A uniform distribution over a finite set of positive numbers, fixed before any data is seen.

    Attributes:
        name: What users call it.
        values: How many numbers the set has.
        step: The ratio of neighbours, as a logarithm; 0 for the floating-point numbers themselves.

    >>> round(OCTAVES.cost, 3), round(FLOATS.cost, 3)  # ln 121, ln 2139095039
    (4.796, 21.484)
    """

    name: str
    values: int
    step: float

    @property
    def cost(self) -> float:
        """What naming one of the numbers costs, in nats."""
        return math.log(self.values)

    def nearest(self, logs: Tensor) -> Tensor:
        """The logarithm of the nearest number of the set, for every entry of `logs`."""
        if self.step:
            most = (self.values - 1) // 2
            return (logs / self.step).round().clamp(-most, most) * self.step
        least, largest = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
        return logs.exp().clamp(least, largest).float().double().log()


# Half octaves from 2⁻³⁰ to 2³⁰, and every positive finite float32, as the paper has it.
OCTAVES = Hyperprior("octaves", 121, math.log(2) / 2)
FLOATS = Hyperprior("float32", 0x7F7FFFFF, 0.0)
HYPERPRIORS: Mapping[str, Hyperprior] = {each.name: each for each in (OCTAVES, FLOATS)}


@dataclass(frozen=True)
class Scale:
    """The noise of one tensor: s = σ for all its entries, or s_ij = σ_i σ'_j for the rows and columns of a layer.

    Attributes:
        rows: ln σ: a number, or (groups, rows).
        columns: ln σ' as (groups, columns), the first of every group 0; None where one σ serves the whole tensor.
        layer: How the tensor is a matrix; None where `columns` is.
    """

    rows: Tensor
    columns: Tensor | None = None
    layer: Layer | None = None

    @property
    def count(self) -> int:
        """How many scales have to be named. The first column's is 1: only products σ_i σ'_j matter."""
        return self.rows.numel() + (0 if self.columns is None else self.columns.numel() - len(self.columns))

    def deviation(self, like: Tensor) -> Tensor:
        """s for every entry of a tensor of this shape, in float64."""
        if self.columns is None or self.layer is None:
            return self.rows.exp().expand(like.shape)
        grid = (self.rows.unsqueeze(2) + self.columns.unsqueeze(1)).exp()
        kernel = self.layer.matrix(like).shape[3]
        return as_stored(self.layer, grid.unsqueeze(3).expand(-1, -1, -1, kernel), like.shape)

    def times(self, log_factor: float) -> Scale:
        """The same with all of its noise multiplied by e^log_factor."""
        return replace(self, rows=self.rows + log_factor)

    def on(self, hyperprior: Hyperprior) -> Scale:
        """The same with every σ moved to the nearest number of the hyperprior."""
        columns = None if self.columns is None else hyperprior.nearest(self.columns)
        return replace(self, rows=hyperprior.nearest(self.rows), columns=columns)


Scales = Mapping[str, Scale]


def as_stored(layer: Layer, blocks: Tensor, shape: torch.Size) -> Tensor:
    """(groups, rows, columns, kernel positions) as the weight is stored: the inverse of `layer.matrix`."""
    return (blocks.transpose(1, 2) if layer.transposed else blocks).reshape(shape)


def divergence(scales: Scales, offsets: Mapping[str, Tensor]) -> dict[str, float]:
    """KL of posterior and prior, Σ (θ−θ₀)²/(2s²), of every tensor that carries noise; `offsets` are θ − θ₀.

    >>> one = {"w": Scale(torch.tensor(0.0))}
    >>> divergence(one, {"w": torch.tensor([3.0, 4.0])})
    {'w': 12.5}
    """
    return {
        name: float((offsets[name].double() / scale.deviation(offsets[name])).square().sum()) / 2
        for name, scale in scales.items()
    }


def one_scale(weight: Tensor, diagonal: Tensor) -> Scale:
    """(11) at λ = 1/2: σ² = ‖W‖/√(Tr H), one for the whole tensor.

    >>> scale = one_scale(torch.tensor([3.0, 4.0]), torch.tensor([0.25, 1.0 / 16]))  # σ² = 5/√(5/16) = 4√5
    >>> round(float(scale.rows.exp()) ** 4, 6)
    80.0
    """
    size, trace = float(weight.double().square().sum()), float(diagonal.double().sum())
    if size == 0:
        return Scale(torch.tensor(_LEAST, dtype=torch.float64))  # a tensor of zeros costs nothing at any scale
    log = math.log(size / trace) / 4 if trace > 0 else math.log(size) / 2
    return Scale(torch.tensor(log, dtype=torch.float64))


def row_and_column_scales(layer: Layer, weight: Tensor, diagonal: Tensor) -> Scale:
    """The solution of (17) at λ = 1/2: e^{x_i} = σ_i², e^{y_j} = σ'_j²."""
    h = layer.matrix(diagonal.double().clamp(min=0)).sum(3)
    w = layer.matrix(weight.double().square()).sum(3)
    _, x, y = balanced_scales(h, w)
    x, y = _finite(x) / 2, _finite(y) / 2
    return Scale(x + y[:, :1], y - y[:, :1], layer)


def _finite(logs: Tensor) -> Tensor:
    """Rows without curvature get the largest scale of the others, rows without weight the smallest."""
    live = logs[logs.isfinite()]
    high, low = (float(live.max()), float(live.min())) if live.numel() else (0.0, 0.0)
    return logs.nan_to_num(nan=0.0, posinf=high, neginf=low)


def scales_of(statistics: Statistics, offsets: Mapping[str, Tensor], *, by_rows: bool) -> dict[str, Scale]:
    """The scales of every tensor of `offsets`: layers by rows and columns if asked for, everything else by one σ."""
    scales = {}
    for name, weight in offsets.items():
        diagonal = statistics.diagonal[name]
        layer = statistics.layers.get(name) if by_rows else None
        scales[name] = one_scale(weight, diagonal) if layer is None else row_and_column_scales(layer, weight, diagonal)
    if not scales:
        raise SpiritLevelError("no trainable tensor carries noise, so there is no posterior: unfreeze a weight")
    return scales
