"""Operations whose second derivative torch lacks or gets wrong, written with operations where it is right.

`_weight_norm` has a double backward that is silently wrong; hard sigmoid and embedding bags have none. (The fused
attention kernels, which have none either, are avoided by choosing the plain one.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class PlainDerivatives(TorchFunctionMode):
    """While a network runs, the operations in `REWRITES` are replaced. `used` collects the names of those that were."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[str] = set()

    def __torch_function__(
        self, function: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rewrite = REWRITES.get(getattr(function, "__name__", ""))
        if rewrite is None:
            return function(*args, **(kwargs or {}))
        self.used.add(function.__name__.strip("_"))
        return rewrite(*args, **(kwargs or {}))


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    result: Tensor = F.relu6(input + 3) / 6
    return result


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    others = [d for d in range(v.dim()) if dim == -1 or d != dim % v.dim()]
    return v * (g / v.square().sum(others, keepdim=dim != -1).sqrt())


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    if input.dim() == 1:
        assert offsets is not None, "a flat embedding bag needs offsets"
        ends = offsets[1:] if include_last_offset else torch.cat([offsets[1:], offsets.new_tensor([len(input)])])
        starts = offsets[: len(ends)]
        bags = [_embedding_bag(input[a:b].unsqueeze(0), weight, mode=mode, padding_idx=padding_idx,
                               per_sample_weights=None if per_sample_weights is None else per_sample_weights[a:b][None])
                for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]  # fmt: skip
        return torch.cat(bags)
    entries = F.embedding(input, weight)
    kept = torch.ones_like(input, dtype=torch.bool) if padding_idx is None else input != padding_idx
    if mode == "max":
        return entries.masked_fill(~kept.unsqueeze(2), -torch.inf).amax(1).masked_fill(~kept.any(1, keepdim=True), 0.0)
    weights = kept.to(entries.dtype) if per_sample_weights is None else per_sample_weights * kept
    total = (entries * weights.unsqueeze(2)).sum(1)
    return total if mode == "sum" else total / kept.sum(1, keepdim=True).clamp(min=1)


REWRITES: dict[str, Callable[..., Any]] = {
    "hardsigmoid": _hardsigmoid,
    "_weight_norm": _weight_norm,
    "embedding_bag": _embedding_bag,
}
