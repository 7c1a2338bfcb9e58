"""Whether the samples of a batch know of one another: their outputs must be what they are alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from spiritlevel.errors import NondeterministicError, SpiritLevelError
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.contract import Checked

# So many samples of a chunk, or half of it, pass through the network once more by themselves.
MOST_ALONE = 64
# Kernels for batches of other sizes round otherwise.
TOLERANCE = 1e-3


def check_chunk_apart(problem: Checked, outputs: Any, chunk: Batch) -> None:
    """Some samples of a whole chunk in another order: what they do to one another may take many, as places that run out do."""
    if problem.whole or problem.shards.divided or len(chunk) < 2:
        return
    order = torch.randperm(len(chunk), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        check_apart(problem, outputs, chunk, order[: min(MOST_ALONE, len(chunk) // 2)])


def check_apart(problem: Checked, outputs: Any, batch: Batch, rows: Tensor) -> None:
    """Refuse a network that gives these samples of a batch other outputs than they had among all of them."""
    rows = rows.to(problem.device)
    if agree(_taken(outputs, rows, len(batch)), problem.outputs(problem.parameters, batch[rows]), TOLERANCE):
        return
    _check_rows(outputs, len(batch))
    raise NondeterministicError(
        "a sample's output depends on the other samples of its batch, so the loss is not a mean over samples. "
        f"Likely cause: {_likely_cause(problem)}, or pass a loss of the form (model, batch) -> (mean, count), which keeps your "
        "batches as they are"
    )


def _check_rows(outputs: Any, samples: int) -> None:
    if isinstance(outputs, Tensor) and (not outputs.dim() or len(outputs) != samples):
        raise SpiritLevelError(
            f"the network returns outputs of shape {tuple(outputs.shape)} for {samples} samples, and one row a sample is needed: "
            "let it return (samples, …), or pass a loss of the form (model, batch) -> (mean, count)"
        )


def _likely_cause(problem: Checked) -> str:
    """What mixes samples, with what to do about it."""
    modules = dict(problem.model.named_modules())
    along = [name for name, module in modules.items() if getattr(module, "batch_first", True) is False]
    if along:
        return (
            f"layers that take the first dimension for time ({', '.join(along[:3])}). Make them with batch_first=True"
        )
    normalizing = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None
    ]
    where = f" ({', '.join(normalizing[:3])})" if normalizing else ""
    return (
        f"batch normalization with the statistics of the batch, as in train mode{where}. Use running statistics "
        "(track_running_stats=True) in eval mode"
    )


def leaves_of(outputs: Any) -> list[Any]:
    """Everything inside what a network returned, dataclasses opened."""

    def opened(leaf: Any) -> list[Any]:
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            return leaves_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        return [leaf]

    return [part for leaf in tree_leaves(outputs) for part in opened(leaf)]


def agree(first: Any, second: Any, tolerance: float = 1e-5) -> bool:
    pairs = zip(leaves_of(first), leaves_of(second), strict=False)
    return all(
        a.shape == b.shape
        and torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(a.abs().max() if a.numel() else 0))
        for a, b in pairs
        if isinstance(a, Tensor) and a.is_floating_point()
    )


def _taken(outputs: Any, rows: Tensor, of: int) -> list[Any]:
    return [
        leaf[rows] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == of else leaf
        for leaf in leaves_of(outputs)
    ]
