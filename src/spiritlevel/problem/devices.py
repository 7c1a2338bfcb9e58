"""What devices have: memory, and double precision; what lies on one without, such as Apple's (MPS), is measured on the CPU."""

from __future__ import annotations

import copy
import functools
import os
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


def memory_of(device: torch.device, unknown: int) -> int:
    """Bytes of the machine, or of the accelerator; `unknown` where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if not hasattr(os, "sysconf"):  # Windows
        return unknown
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


__all__ = ["doubled_copy", "has_double", "memory_of", "with_double"]
