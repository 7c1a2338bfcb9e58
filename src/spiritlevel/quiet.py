"""Running a caller's model without leaving a trace in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint


@contextmanager
def _keeping_activations() -> Iterator[None]:
    """Gradient checkpointing switched off: recomputing happens in the backward pass, when swapped parameters are gone.

    Both forms of `torch.utils.checkpoint.checkpoint` look these names up when they are called.
    """

    def nothing_to_recompute(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    class Direct:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            return function(*args)

    replaced = {"_checkpoint_without_reentrant_generator": nothing_to_recompute, "CheckpointFunction": Direct}
    before = {name: getattr(checkpoint, name) for name in replaced if hasattr(checkpoint, name)}
    try:
        for name in before:
            setattr(checkpoint, name, replaced[name])
        yield
    finally:
        for name, original in before.items():
            setattr(checkpoint, name, original)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode, full precision, plain attention kernels and no recomputing inside; modes and every random state back on
    the way out.

    The fused attention kernels and the fast path of transformers have no second derivative; autocast, which a caller may
    still have on from training, would round every activation.
    """
    modes = [(module, module.training) for module in model.modules()]
    state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as quiet:
        quiet.enter_context(torch.inference_mode(False))
        quiet.enter_context(torch.random.fork_rng(devices=devices))
        quiet.enter_context(sdpa_kernel(SDPBackend.MATH))
        quiet.enter_context(_keeping_activations())
        for kind in {"cpu", *(p.device.type for p in model.parameters())}:
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                quiet.enter_context(torch.autocast(kind, enabled=False))
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
