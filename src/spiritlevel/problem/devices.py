"""Devices without double precision, such as Apple's (MPS): what lies there is measured on the CPU."""

from __future__ import annotations

import copy
import functools
from typing import TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


@functools.cache
def has_double(device: torch.device) -> bool:
    """Whether a device computes in double precision, in which sums are taken.

    >>> has_double(torch.device("cpu"))
    True
    """
    if device.type in ("cpu", "meta"):
        return True
    try:
        return float(torch.ones(2, dtype=torch.float64, device=device).sum()) == 2.0
    except (RuntimeError, TypeError):
        return False


def with_double(tensor: Tensor) -> Tensor:
    """The tensor where it can be summed in double precision: as it is, or on the CPU."""
    return tensor if has_double(tensor.device) else tensor.cpu()


def doubled_copy(model: Module) -> Module:
    """A copy of the model in double precision, where there is such."""
    copied = copy.deepcopy(model)
    stays = all(has_double(tensor.device) for tensor in (*copied.parameters(), *copied.buffers()))
    return (copied if stays else copied.cpu()).double()


__all__ = ["doubled_copy", "has_double", "with_double"]
