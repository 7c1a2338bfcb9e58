"""Operations whose derivatives torch lacks, gets wrong or rounds away, written with operations where they are right.

`_weight_norm` has a double backward that is silently wrong; hard sigmoid, embedding bags and margin losses have
none. Sparse gradients and those scaled by frequency cannot be differentiated again. The losses in `ACCURATE` have derivatives that
are rounded away where a network is certain. (The fused attention kernels, which have no second derivative either, are
avoided by choosing the plain one.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spiritlevel.errors import SpiritLevelError
from spiritlevel.network import accurate
from spiritlevel.network.layers import as_written, bound_arguments, function_name
from spiritlevel.network.modes import Mode

# Casts by name; any other operation may name a precision as an argument.
CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
LOOKUP = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


class PlainDerivatives(Mode):
    """While a network runs, the operations in `REWRITES`, lookups and casts to a lower precision are replaced.

    `used` collects the names of those that were; `needed` says whether anything was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used: set[str] = set()
        self._rounded = False  # whether an operation of `ACCURATE` was met
        self._padded: list[Tensor] = []  # weights looked up with a padding index, in the order of this pass
        self._lookups: list[tuple[Tensor, int | None]] = []  # weights and padding indices of all lookups of this pass
        self._shared: set[int] = set()  # the places in that order whose weight serves another operation too

    @property
    def needed(self) -> bool:
        return bool(self.used) or self._rounded

    def __enter__(self) -> PlainDerivatives:
        self._padded, self._lookups = [], []
        super().__enter__()
        return self

    def __torch_function__(
        self, function: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        function, args, kwargs = as_written(function, args, kwargs or {})
        name = function_name(function)
        if function is Tensor.__float__:  # a number for Python: `float(x)` is not a cast, `x.float()` is
            return function(*args)
        if name == "embedding":
            return self._lookup(function, args, kwargs)
        if name in ACCURATE:
            self._rounded = True
            return ACCURATE[name](*args, **kwargs)
        rewrite = REWRITES.get(name)
        if rewrite is not None:
            self.used.add(name)
            if name == "embedding_bag" and isinstance(function, torch._ops.OpOverload):
                return _exported_embedding_bag(*args, **kwargs)
            return rewrite(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            args, kwargs, casts = _in_full_precision(name, args, kwargs)
            if casts:
                self.used.add("casts to a lower precision")
            if name in CASTS and CASTS[name].itemsize < args[0].dtype.itemsize:
                return args[0]
        result = function(*args, **kwargs)
        if self._padded and isinstance(result, Tensor) and result.is_floating_point() and name != "detach":
            operands = (*args, *kwargs.values())
            self._shared.update(i for i, weight in enumerate(self._padded) if any(weight is each for each in operands))
        return result

    def _lookup(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """A lookup whose gradient is dense and is that of the loss.

        The row of a padding index is held fixed, as torch does, unless the matrix serves another operation as well
        (the last layer of a language model, a lookup with other padding): there the row moves, and a gradient that leaves
        out one of its uses is the gradient of no function.
        """
        indices, weight, padding, max_norm, _, by_frequency, sparse = bound_arguments(LOOKUP, args, kwargs)
        _refuse_renormalization(max_norm)
        if padding is not None:
            self._padded.append(weight)
        self._lookups.append((weight, None if padding is None else int(padding) % len(weight)))
        if len({held for other, held in self._lookups if other is weight}) > 1:
            self._shared.update(i for i, other in enumerate(self._padded) if other is weight)
        if padding is not None and len(self._padded) - 1 in self._shared:
            padding = None
            self.used.add("the padding of a tied embedding")
        if sparse or by_frequency:
            self.used.add("embedding")
        result: Tensor = function(indices, weight, padding)
        return result


def with_plain_derivatives(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, computed by operations whose second derivative is right."""

    @functools.wraps(function)
    def rewritten(*args: Any) -> Any:
        with PlainDerivatives():
            return function(*args)

    return rewritten


def _in_full_precision(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """The same call without a cast of its first operand to a lower precision, and whether it casts at all.

    Such casts are written for half precision (`logits.float()`); in double precision, in which every network is checked,
    they would round.
    """
    mine = args[0].dtype

    def cast(entry: Any) -> bool:
        return isinstance(entry, torch.dtype) and entry.is_floating_point and entry.itemsize < 8

    def kept(entry: Any) -> Any:
        return mine if cast(entry) and entry.itemsize < mine.itemsize else entry

    if not any(map(cast, (CASTS.get(name), *args, *kwargs.values()))):
        return args, kwargs, False
    return tuple(map(kept, args)), {key: kept(entry) for key, entry in kwargs.items()}, True


def _refuse_renormalization(max_norm: float | None) -> None:
    if max_norm is not None:
        raise SpiritLevelError(
            f"an embedding with max_norm={max_norm} writes into its own weight whenever it runs, so the loss is not a function "
            "of the parameters: run the model once over the data, then set max_norm=None on the module and measure"
        )


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
    _refuse_renormalization(max_norm)
    if input.dim() == 1:
        assert offsets is not None, "a flat embedding bag needs offsets"
        last = offsets[-1:] if include_last_offset else offsets.new_tensor([len(input)])
        starts = offsets[:-1] if include_last_offset else offsets
        lengths = torch.cat([starts[1:], last]) - starts
        input = input[: int(last)]
        bag = torch.repeat_interleave(torch.arange(len(starts), device=input.device), lengths)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights[: len(input)]
    else:
        bag = torch.arange(len(input), device=input.device).repeat_interleave(input.shape[1])
        lengths = torch.full((len(input),), input.shape[1], device=input.device)
    entries, tokens = F.embedding(input, weight).flatten(0, -2), input.flatten()
    kept = torch.ones_like(tokens, dtype=torch.bool) if padding_idx is None else tokens != padding_idx
    if mode == "max":
        bags = zip(torch.split(entries, lengths.tolist()), torch.split(kept, lengths.tolist()), strict=True)
        return torch.stack([e[k].amax(0) if bool(k.any()) else e.new_zeros(e.shape[1]) for e, k in bags])
    weights = kept.to(entries.dtype) if per_sample_weights is None else per_sample_weights.flatten() * kept
    total = entries.new_zeros(len(lengths), entries.shape[1]).index_add(0, bag, entries * weights.unsqueeze(1))
    if mode == "sum":
        return total
    counts = entries.new_zeros(len(lengths)).index_add(0, bag, kept.to(entries.dtype))
    return total / counts.clamp(min=1).unsqueeze(1)


def _exported_embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, None, None, None]:
    """As an exported program calls it: other arguments, and a tuple of which only the first entry is read."""
    bags = _embedding_bag(
        indices,
        weight,
        offsets,
        mode=("sum", "mean", "max")[mode],
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )
    return bags, None, None, None


def _multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Σ over the other classes j of w_y max(0, margin − x_y + x_j)^p, over the number of classes."""
    x, y = input.reshape(-1, input.shape[-1]), target.reshape(-1, 1)
    reduction = accurate.asked_reduction(size_average, reduce, reduction)
    rises = (margin - x.gather(1, y) + x).clamp(min=0) ** p
    rises = rises if weight is None else rises * weight[y]
    return _reduced(rises.scatter(1, y, 0.0).sum(1) / x.shape[1], reduction, input.dim() < 2)


def _multilabel_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Σ over the labels y before the first −1 and all other classes i of max(0, 1 − x_y + x_i), over the number of classes."""
    x, y = input.reshape(-1, input.shape[-1]), target.reshape(-1, target.shape[-1])
    reduction = accurate.asked_reduction(size_average, reduce, reduction)
    named = (y >= 0).long().cumprod(1).bool()
    among = torch.zeros_like(x, dtype=torch.long).scatter_add(1, y.clamp(min=0), named.long()) > 0
    rises = (1 - x.gather(1, y.clamp(min=0)).unsqueeze(2) + x.unsqueeze(1)).clamp(min=0)  # (N, labels, classes)
    counted = named.unsqueeze(2) & ~among.unsqueeze(1)
    return _reduced(rises.where(counted, 0.0).sum((1, 2)) / x.shape[1], reduction, input.dim() < 2)


def _reduced(values: Tensor, reduction: str, lone: bool) -> Tensor:
    if reduction == "none":
        return values[0] if lone else values
    return values.sum() if reduction == "sum" else values.mean()


def _complex_of_pairs(pairs: Tensor) -> Tensor:
    """What `view_as_complex` shows, as numbers of its own: torch's wants every pair at an even place of the memory that it is in."""
    return torch.complex(pairs.select(-1, 0), pairs.select(-1, 1))


REWRITES: dict[str, Callable[..., Any]] = {
    "hardsigmoid": _hardsigmoid,
    "weight_norm": _weight_norm,
    "embedding_bag": _embedding_bag,
    "multi_margin_loss": _multi_margin_loss,
    "multilabel_margin_loss": _multilabel_margin_loss,
}
# The same functions with derivatives that keep their digits, or that take vectors from anywhere in memory. A report does not mention them.
ACCURATE: dict[str, Callable[..., Any]] = {
    "view_as_complex": _complex_of_pairs,
    "log_softmax": accurate.log_softmax,
    "cross_entropy": accurate.cross_entropy,
    "logsigmoid": accurate.logsigmoid,
    "binary_cross_entropy_with_logits": accurate.binary_cross_entropy_with_logits,
}
