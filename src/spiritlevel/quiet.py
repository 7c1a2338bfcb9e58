"""Running a caller's model without leaving a trace in it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode and plain attention kernels inside; the caller's mode and every random state back on the way out.

    The fused attention kernels and the fast path of transformers have no second derivative.
    """
    modes = [(module, module.training) for module in model.modules()]
    state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    fast = torch.backends.mha.get_fastpath_enabled()
    with torch.inference_mode(False), torch.random.fork_rng(devices=devices), sdpa_kernel(SDPBackend.MATH):
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            for module, _ in modes:
                module.training = False
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for module, training in modes:
                module.training = training
            random.setstate(state)
            np.random.set_state(numpy_state)  # noqa: NPY002
