"""Whether the samples of a batch know of one another: their outputs must be what they are alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

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
    alone = problem.outputs(problem.parameters, batch[rows])
    if not _is_finite(outputs) or not _is_finite(alone):  # where that is, and why, is looked for elsewhere
        return
    if agree(_taken(outputs, alone, rows, len(batch)), alone, TOLERANCE):
        return
    _check_rows(outputs, len(batch))
    raise NondeterministicError(
        "a sample's output depends on the other samples of its batch, so the loss is not a mean over samples. "
        f"Likely cause: {_likely_cause(problem)}, or pass a loss of the form (model, batch) -> (mean, count), which keeps your "
        "batches as they are"
    )


def _is_finite(outputs: Any) -> bool:
    leaves = (leaf for leaf in leaves_of(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return all(bool(torch.isfinite(leaf).all()) for leaf in leaves)


def _check_rows(outputs: Any, samples: int) -> None:
    if isinstance(outputs, Tensor) and (not outputs.dim() or len(outputs) != samples):
        raise SpiritLevelError(
            f"the network returns outputs of shape {tuple(outputs.shape)} for {samples} samples, and one row a sample is needed: "
            "let it return (samples, …), or pass a loss of the form (model, batch) -> (mean, count)"
        )


def _likely_cause(problem: Checked) -> str:
    """What mixes samples, with what to do about it."""
    modules = dict(problem.model.named_modules())
    kind = nn.modules.batchnorm._BatchNorm
    normalizing = [name for name, each in modules.items() if isinstance(each, kind) and each.running_mean is None]
    along = [name for name, each in modules.items() if getattr(each, "batch_first", True) is False]
    if along and not normalizing:
        return (
            f"layers that take the first dimension for time ({', '.join(along[:3])}). Make them with batch_first=True"
        )
    what = f" ({', '.join(normalizing[:3])})" if normalizing else ", or another operation along the first dimension"
    return (
        f"batch normalization with the statistics of the batch, as in train mode{what}. Use running statistics "
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


def _taken(outputs: Any, alone: Any, rows: Tensor, of: int) -> list[Any]:
    """Of everything that has a row a sample the rows of these samples, whose outputs alone are at hand; the rest as it is."""
    return [
        leaf[rows] if _has_rows(leaf, of) and _has_rows(other, len(rows)) else leaf
        for leaf, other in zip(leaves_of(outputs), leaves_of(alone), strict=False)
    ]


def shapes_of(batch: Batch) -> tuple[torch.Size, ...]:
    """The shapes of a batch's inputs."""
    return tuple(leaf.shape for leaf in tree_leaves(batch.inputs) if isinstance(leaf, Tensor))


def _has_rows(leaf: Any, count: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == count


def rows_among(problem: Checked, outputs: Any, batch: Batch) -> set[int]:
    """The identities of the tensors that have a row a sample: of several outputs one may be as long by chance."""
    count = len(batch)
    if isinstance(outputs, Tensor):
        return {id(outputs)} if _has_rows(outputs, count) else set()
    one = problem.outputs(problem.parameters, batch[:1])
    pairs = zip(leaves_of(outputs), leaves_of(one), strict=False)
    return {id(leaf) for leaf, other in pairs if _has_rows(leaf, count) and _has_rows(other, 1)}


def picked(outputs: Any, rows: Tensor, among: set[int]) -> Any:
    """The outputs with these rows of the tensors that have rows."""

    def pick(leaf: Any) -> Any:
        if id(leaf) in among:
            return leaf[rows]
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = {field.name: tree_map(pick, getattr(leaf, field.name)) for field in dataclasses.fields(leaf)}
            return dataclasses.replace(leaf, **fields)
        return leaf

    return tree_map(pick, outputs)
