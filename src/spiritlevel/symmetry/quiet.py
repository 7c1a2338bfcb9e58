"""Calling a model on an example, without leaving a trace in it."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from spiritlevel.errors import SpiritLevelError
from spiritlevel.network.rewrites import PlainDerivatives
from spiritlevel.problem.batches import Data
from spiritlevel.problem.quiet import undisturbed


def as_call(example_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `model` in a tensor, a tuple of arguments, a mapping of keywords, or a loader's first batch."""
    if isinstance(example_input, DataLoader):
        return as_call(Data([next(iter(example_input))]).first.inputs)
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
def untouched(model: nn.Module) -> Iterator[None]:
    """Undisturbed, without gradients, and with every buffer as it was on the way out."""
    buffers = [
        (m, name, b, None if b is None else b.clone()) for m in model.modules() for name, b in m._buffers.items()
    ]
    try:
        with undisturbed(model), torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, saved in buffers:
                module._buffers[name] = buffer
                if buffer is not None and saved is not None and not _same_bits(buffer, saved):
                    buffer.copy_(saved)


def outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the model returns in eval mode, without the casts to a lower precision that it may contain."""
    with untouched(model), PlainDerivatives(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(*args, **kwargs)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)))
