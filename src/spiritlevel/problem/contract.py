"""The view of a problem that checks work with, before the problem is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spiritlevel.problem.batches import Batch, Data
from spiritlevel.problem.losses import Loss
from spiritlevel.problem.shards import Shards

Parameters = dict[str, Tensor]


class Checked(Protocol):
    """The parts of a problem that checks use."""

    buffers_change: bool
    data: Data
    device: Any
    dtype: torch.dtype
    fixed: Parameters
    inputs_change: bool
    loss_function: Loss
    model: nn.Module
    module: nn.Module
    notes: list[str]
    parameters: Parameters
    ranks: Any
    shards: Shards
    work: Any

    def callers_parameters(self) -> Parameters: ...
    def chunk_loss(self, parameters: Mapping[str, Tensor], batch: Batch) -> Tensor: ...
    def chunk_outputs(self, parameters: Mapping[str, Tensor], batch: Batch) -> Any: ...
    def chunks(self, size: int | None = None) -> Iterator[tuple[Batch, float]]: ...
    def few_samples(self, count: int) -> Batch: ...
    def first_chunk(self) -> Batch: ...
    @contextlib.contextmanager
    def in_precision(self, dtype: torch.dtype, *, nudged: int = 0) -> Iterator[Callable[[Batch], Batch]]: ...
    def leaves(self, parameters: Mapping[str, Tensor] | None = None) -> Parameters: ...
    def outputs(self, parameters: Mapping[str, Tensor], batch: Batch) -> Any: ...
    @property
    def small(self) -> bool: ...
    def slopes(self, outputs: Tensor, batch: Batch) -> tuple[float, Tensor]: ...
    def spread_samples(self, count: int) -> list[Batch]: ...
    def telling_samples(self, count: int) -> Batch: ...
    def undisturbed(self) -> contextlib.AbstractContextManager[None]: ...
    @property
    def whole(self) -> bool: ...
    def whole_loss(self, parameters: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, float]: ...
