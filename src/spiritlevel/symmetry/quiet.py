"""Running a caller's model without leaving a trace in it."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from spiritlevel.errors import SpiritLevelError


def as_call(example_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments `model` is called with: a tensor, a tuple of arguments, or a mapping of keywords."""
    if isinstance(example_input, Mapping):
        return (), dict(example_input)
    if isinstance(example_input, tuple | list):
        return tuple(example_input), {}
    if isinstance(example_input, Tensor):
        return (example_input,), {}
    raise SpiritLevelError(
        f"example_input must be what the model is called with: a tensor, a tuple of arguments or a dict of keywords; "
        f"got {type(example_input).__name__}"
    )


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients and plain attention kernels inside; mode, buffers and random state restored after."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (m, name, b, None if b is None else b.clone()) for m in model.modules() for name, b in m._buffers.items()
    ]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    for module, _ in modes:
        module.training = False
    try:
        with torch.random.fork_rng(devices=_cuda_devices(model)), sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, saved in buffers:
                module._buffers[name] = buffer
                if buffer is not None and saved is not None and not _same_bits(buffer, saved):
                    buffer.copy_(saved)


def outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the model returns in eval mode."""
    with undisturbed(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(*args, **kwargs)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)))


def _cuda_devices(model: nn.Module) -> list[int]:
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
