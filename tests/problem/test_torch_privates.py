"""What is patched or read of torch's own privates is still there and still does what is relied on.

A failure here after an upgrade of torch says which patch no longer takes effect; `problem/quiet.py` and `network/layers.py`
say what would be wrong without it.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from spiritlevel.network.layers import COMPOSITE, _opened, function_name
from spiritlevel.problem.quiet import _patches, undisturbed

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def test_every_name_that_is_patched_exists() -> None:
    assert [name for _, name, _ in _patches()] == [
        "_checkpoint_without_reentrant_generator",
        "CheckpointFunction",
        "__enter__",
    ]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_are_not_computed_again(reentrant) -> None:
    def times_computed() -> int:
        calls = []

        def block(x: torch.Tensor) -> torch.Tensor:
            calls.append(x)
            return x.sin()

        checkpoint(block, X.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()
        return len(calls)

    assert times_computed() == 2  # as torch does it
    with undisturbed(nn.Linear(3, 3)):
        assert times_computed() == 1
    assert times_computed() == 2


def test_autocast_has_no_effect() -> None:
    layer = nn.Linear(3, 3)

    def dtype() -> torch.dtype:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(X).dtype

    assert dtype() == torch.bfloat16
    with undisturbed(layer):
        assert dtype() == torch.float32
    assert dtype() == torch.bfloat16


class _Seen(TorchFunctionMode):
    """The names of the functions that are called, those inside composite ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function_name(function)
        self.names.append(name)
        if name in COMPOSITE:
            with self:
                return _opened(function)(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def test_the_calls_inside_attention_are_seen() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.ones(1, 3, 4)
    with _Seen() as seen:
        attention(x, x, x)
    assert "multi_head_attention_forward" in seen.names
    assert seen.names.count("linear") == 2  # into the heads and out of them


def test_an_exported_program_calls_overloads() -> None:
    program = torch.export.export(nn.Linear(3, 2), (X,)).module()
    with _Seen() as seen:
        program(X)
    assert "linear" in seen.names
    assert isinstance(torch.ops.aten.linear.default, torch._ops.OpOverload)


def test_views_share_the_address_of_their_storage() -> None:
    assert X.untyped_storage()._cdata == X[1:].untyped_storage()._cdata
    assert X.untyped_storage()._cdata != X.clone().untyped_storage()._cdata
