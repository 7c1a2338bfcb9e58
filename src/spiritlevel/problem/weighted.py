"""Cross entropy as torch's own modules and functions define it: classes with weights, labels that do not count.

Their mean over a batch is Σ w ℓ / Σ w, so the mean over all data is no mean of batch means. It is rewritten as a plain mean
over labels of (count / Σ w) w ℓ, with the sum taken once over all data: then batches may be cut anywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spiritlevel.errors import SpiritLevelError
from spiritlevel.problem.batches import Data
from spiritlevel.problem.factors import BlockFactor, OutputFactor
from spiritlevel.problem.losses import BUILT_IN, IGNORED, Loss

FUNCTIONS: dict[Any, Callable[..., Tensor]] = {nn.CrossEntropyLoss: F.cross_entropy, nn.NLLLoss: F.nll_loss}
OPTIONS = ("weight", "ignore_index", "label_smoothing")


@dataclass(frozen=True)
class Weighting:
    """What a cross entropy is made of: the function of torch and the options it is called with."""

    function: Callable[..., Tensor]
    weight: Tensor | None = None
    ignore_index: int = IGNORED
    label_smoothing: float = 0.0

    def options(self, outputs: Tensor) -> dict[str, Any]:
        weight = None if self.weight is None else self.weight.to(outputs)
        smoothing = {"label_smoothing": self.label_smoothing} if self.function is F.cross_entropy else {}
        return {"weight": weight, "ignore_index": self.ignore_index, **smoothing}

    def of(self, targets: Tensor) -> Tensor:
        """The weight of every label: that of its class, zero where it does not count."""
        counts = targets != self.ignore_index
        if self.weight is None:
            return counts.to(torch.float64)
        _check_range(targets, counts, len(self.weight))
        weight = self.weight.detach().to(targets.device, torch.float64)
        return torch.where(counts, weight[targets.where(counts, 0)], 0.0)

    def mean(self, outputs: Tensor, targets: Tensor, scale: float) -> Tensor:
        total = self.function(outputs, targets, reduction="sum", **self.options(outputs))
        return total * (scale / targets.numel())

    def curvature(self, outputs: Tensor, targets: Tensor, scale: float) -> OutputFactor:
        """That of cross entropy with class probabilities: only their sum, here the weight of the label, counts in it."""
        assert BUILT_IN["cross_entropy"].curvature is not None
        counts = targets != self.ignore_index
        weights = self.of(targets)
        if self.label_smoothing and self.weight is not None:
            spread = self.weight.detach().to(weights).mean()
            weights = torch.where(counts, (1 - self.label_smoothing) * weights + self.label_smoothing * spread, 0.0)
        spread_out = torch.zeros_like(outputs).scatter_(
            1, targets.where(counts, 0).unsqueeze(1), (scale * weights).to(outputs).unsqueeze(1)
        )
        return BUILT_IN["cross_entropy"].curvature(outputs, spread_out)

    def soft_curvature(self, outputs: Tensor, targets: Tensor) -> OutputFactor:
        """The same for class probabilities, smoothed and weighted as torch does it."""
        assert BUILT_IN["cross_entropy"].curvature is not None
        smoothed = targets * (1 - self.label_smoothing) + self.label_smoothing / targets.shape[1]
        if self.weight is not None:
            weight = self.weight.detach().to(smoothed)
            smoothed = smoothed * weight.reshape(-1, *[1] * (targets.dim() - 2))
        return BUILT_IN["cross_entropy"].curvature(outputs, smoothed)


def _positions(targets: Tensor) -> int:
    """How many class distributions there are."""
    return targets.numel() // targets.shape[1]


def _check_range(targets: Tensor, counts: Tensor, classes: int) -> None:
    wrong = counts & ((targets < 0) | (targets >= classes))
    if bool(wrong.any()):
        label = int(targets[wrong][0])
        raise SpiritLevelError(f"label {label} is out of range: the loss has weights for classes 0 to {classes - 1}")


def weighting_of(loss: Any) -> Weighting | None:
    """The weighting of a cross entropy of torch: a module, a function, or a function with options; None for others."""
    for kind, function in FUNCTIONS.items():
        if _is_plain(loss, kind) and loss.reduction == "mean":
            return Weighting(function, **{name: getattr(loss, name) for name in OPTIONS if hasattr(loss, name)})
        if loss is function:
            return Weighting(function)
        if isinstance(loss, functools.partial) and loss.func is function and _is_plain_mean(loss):
            return Weighting(function, **{key: loss.keywords[key] for key in OPTIONS if key in loss.keywords})
    return None


def _is_plain(loss: Any, kind: Any) -> bool:
    """Whether a module computes what its class says: no hook and no `forward` of its own stands between."""
    if type(loss) is not kind or "forward" in vars(loss):
        return False
    return not any(table for name, table in vars(loss).items() if name.endswith("_hooks"))


def _is_plain_mean(loss: functools.partial[Any]) -> bool:
    options = loss.keywords
    return not loss.args and options.get("reduction", "mean") == "mean" and set(options) <= {*OPTIONS, "reduction"}


def weighted_by(loss: Loss, data: Data) -> Loss:
    """The loss as a plain mean over the labels of this data, if it is a cross entropy of torch; else the loss itself.

    Losses of torch that are sums over outputs get their curvature in closed form: an image has too many outputs to form it.
    """
    weighting = weighting_of(loss.given)
    if weighting is None:
        curvature = None if loss.whole_batch else elementwise_curvature(loss.given)
        return loss if curvature is None else replace(loss, curvature=curvature)
    labels, total, alike = 0, 0.0, True
    for batch in data:
        if batch.targets is None:
            return loss
        if (
            batch.targets.is_floating_point()
        ):  # class probabilities: torch divides by their number, whatever the weights
            soft = weighting.soft_curvature if weighting.function is F.cross_entropy else None
            return replace(loss, curvature=soft, count=_positions)
        weights = weighting.of(batch.targets)
        labels, total = labels + weights.numel(), total + float(weights.sum())
        alike = alike and bool((weights * labels == total).all())
    if not total > 0:
        raise SpiritLevelError(f"no label has a weight in the loss {loss.name!r}, so there is no mean to measure")
    scale = labels / total
    curvature = functools.partial(weighting.curvature, scale=scale) if weighting.function is F.cross_entropy else None
    mean = loss.mean if alike else functools.partial(weighting.mean, scale=scale)
    return replace(loss, mean=mean, curvature=curvature, count=Tensor.numel)


# --- losses that are a mean over all outputs -----------------------------------------------------------------------


def elementwise_curvature(given: Any) -> Callable[[Tensor, Tensor], OutputFactor] | None:
    """∇²ℓ of torch's squared error and binary cross entropy: every output is a block of its own; None for other losses."""
    if _is_mean_of(given, nn.MSELoss, F.mse_loss):
        return BUILT_IN["mse"].curvature
    if _is_mean_of(given, nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits):
        options = given.keywords if isinstance(given, functools.partial) else vars(given).get("_buffers", {})
        return functools.partial(_binary_factor, weight=options.get("weight"), positive=options.get("pos_weight"))
    return None


def _is_mean_of(given: Any, kind: Any, function: Callable[..., Any]) -> bool:
    if _is_plain(given, kind):
        return bool(given.reduction == "mean")
    if isinstance(given, functools.partial) and given.func is function:
        known = {"weight", "pos_weight", "reduction"}
        return not given.args and given.keywords.get("reduction", "mean") == "mean" and set(given.keywords) <= known
    return given is function


def _binary_factor(outputs: Tensor, targets: Tensor, weight: Tensor | None, positive: Tensor | None) -> OutputFactor:
    """∇² of the mean over C outputs of w·(p y + 1 − y)-weighted binary cross entropies: w (p y + 1 − y) σ(1 − σ) / C."""
    f, y = outputs.double(), targets.double()
    bend = torch.sigmoid(f) * torch.sigmoid(-f)
    if positive is not None:
        bend = bend * (positive.detach().to(y) * y + 1 - y)
    if weight is not None:
        bend = bend * weight.detach().to(y)
    size = outputs[0].numel()
    blocks = (bend.reshape(len(outputs), size, 1, 1) / size).sqrt().to(outputs.dtype)
    return BlockFactor(blocks, None, lambda vector: vector.reshape(outputs.shape))
