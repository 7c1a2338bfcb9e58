"""Losses of classification whose first and second derivatives keep their digits where the network is certain.

Where 1 − p of the right class falls below rounding, torch's ∂ℓ/∂f = p − y and its derivative are differences of numbers
that agree in all their digits: a minimum with a loss of 1e-8 has no curvature left in single precision. Here every
output is taken relative to the largest one, so that only small numbers are added and none are subtracted.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def log_softmax(
    input: Tensor, dim: int | None = None, *further: Any, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    """log p, with p of the likeliest class known by 1 − p, the sum of all others.

    >>> x = torch.tensor([[40.0, 0.0]], dtype=torch.float64, requires_grad=True)
    >>> (slope,) = torch.autograd.grad(-log_softmax(x, 1)[0, 0], x, create_graph=True)
    >>> f"{-slope[0, 0].item():.4e}", f"{torch.autograd.grad(slope[0, 0], x)[0][0, 0].item():.4e}"  # 1 − p, p(1 − p)
    ('4.2484e-18', '4.2484e-18')
    """
    dtype = next((each for each in (dtype, *further) if isinstance(each, torch.dtype)), input.dtype)
    x = input.to(torch.promote_types(input.dtype, dtype))
    if not x.dim() or not x.numel():
        return F.log_softmax(x, 0 if dim is None else dim)
    if dim is None:
        dim = 0 if x.dim() in (0, 1, 3) else 1  # as torch chooses
    likeliest = x.detach().argmax(dim, keepdim=True)
    largest = x.gather(dim, likeliest)
    relative = x - largest
    others = relative.scatter(dim, likeliest, -math.inf).exp().sum(dim, keepdim=True)
    others = others + 0 * largest.detach()  # infinite and missing outputs stay what they are
    return relative.scatter(dim, likeliest, 0.0) - others.log1p()


def softplus(x: Tensor) -> Tensor:
    """log(1 + eˣ) at any x; torch's is a straight line above 20."""
    return torch.where(x > 0, -x, x).exp().log1p() + torch.where(x > 0, x, 0)


def logsigmoid(input: Tensor) -> Tensor:
    """−log(1 + e⁻ˣ)."""
    return -softplus(-input)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy`."""
    reduction = asked_reduction(size_average, reduce, reduction)
    classes = 0 if input.dim() == 1 else 1
    log_p = log_softmax(input, classes)
    weight = None if weight is None else weight.to(log_p.dtype)
    if target.is_floating_point():
        return _soft_cross_entropy(log_p, target.to(log_p.dtype), weight, classes, reduction, label_smoothing)
    loss = F.nll_loss(log_p, target, weight, ignore_index=ignore_index, reduction=reduction)
    if not label_smoothing:
        return loss
    kept = target != ignore_index
    spread = -_weighted(log_p, weight, classes).sum(classes).where(kept, 0)
    if reduction == "mean":
        counts = kept.to(log_p) if weight is None else weight[target.where(kept, 0)].where(kept, 0)
        spread = spread.sum() / counts.sum()
    elif reduction == "sum":
        spread = spread.sum()
    return (1 - label_smoothing) * loss + label_smoothing / log_p.shape[classes] * spread


def _soft_cross_entropy(
    log_p: Tensor, target: Tensor, weight: Tensor | None, classes: int, reduction: str, smoothing: float
) -> Tensor:
    """The labels are probabilities; the mean is over samples and positions, whatever the probabilities add up to."""
    if smoothing:
        target = target * (1 - smoothing) + smoothing / target.shape[classes]
    loss = -(_weighted(log_p, weight, classes) * target).sum(classes)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / max(1, loss.numel())


def _weighted(log_p: Tensor, weight: Tensor | None, classes: int) -> Tensor:
    if weight is None:
        return log_p
    return log_p * weight.reshape([-1 if d == classes else 1 for d in range(log_p.dim())])


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """`torch.nn.functional.binary_cross_entropy_with_logits`."""
    if target.shape != input.shape:  # torch refuses to broadcast, in these words
        raise ValueError(f"Target size ({target.size()}) must be the same as input size ({input.size()})")
    reduction = asked_reduction(size_average, reduce, reduction)
    target = target.to(input.dtype)
    positive = softplus(-input) if pos_weight is None else pos_weight.to(input.dtype) * softplus(-input)
    loss = target * positive + (1 - target) * softplus(input)
    loss = loss if weight is None else loss * weight.to(input.dtype)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.mean()


def asked_reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """The reduction asked for: torch's deprecated `size_average` and `reduce` decide where they are passed."""
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "mean" if size_average is not False else "sum"
