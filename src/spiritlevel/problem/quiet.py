"""Running a model without leaving a trace in it, or in anything else that outlives the run."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint

from spiritlevel.network.modes import depth, drop_above, drop_hooks_above, saved_tensor_hooks

# How long threads wait for one another to begin or end, in seconds: Ctrl-C may have left their lock taken.
PATIENCE = 1.0
# A module or class, a name in it, and what replaces it meanwhile.
Patch = tuple[Any, str, Any]


def _nothing_to_recompute(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


class _Direct:
    @staticmethod
    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        return function(*args)


_enter_autocast = torch.amp.autocast_mode.autocast.__enter__


def _enter_without_effect(self: Any) -> Any:
    """Enter an autocast block and switch it off at once. Leaving it puts back what was before, as always.

    Every form of autocast (as a block or a decorator, `torch.cuda.amp`) enters through this method and names its kind of
    device in `device`. If torch changes that, activations are rounded to half precision and curvature is wrong in its
    third digit; `tests/problem/test_torch_privates.py` notices.
    """
    entered = _enter_autocast(self)  # type: ignore[no-untyped-call]
    torch.set_autocast_enabled(self.device, False)
    return entered


def _patches() -> list[Patch]:
    """Gradient checkpointing and autocast without effect.

    Recomputing happens in the backward pass, when swapped parameters are gone; both forms of
    `torch.utils.checkpoint.checkpoint` look these names up when they are called. Autocast would round every activation.
    """
    # The first two are torch's own. If one is renamed, its patch is left out, blocks are recomputed with the caller's
    # parameters instead of those asked for, and products are wrong; `tests/problem/test_torch_privates.py` notices.
    wanted: list[Patch] = [
        (checkpoint, "_checkpoint_without_reentrant_generator", _nothing_to_recompute),
        (checkpoint, "CheckpointFunction", _Direct),
        (torch.amp.autocast_mode.autocast, "__enter__", _enter_without_effect),
    ]
    return [patch for patch in wanted if hasattr(patch[0], patch[1])]


class _Shared:
    """What all runs of the process change together: the first of them changes it, the last one puts it back.

    Runs of several threads overlap, and each would otherwise put back what it found, which is what another had changed.
    """

    def __init__(self) -> None:
        self.runs: list[_State] = []
        self._lock = threading.RLock()
        self._original: dict[tuple[Any, str], Any] = {}
        self._fast = True

    def add(self, run: _State) -> None:
        held = self._lock.acquire(timeout=PATIENCE)
        try:
            fast = torch.backends.mha.get_fastpath_enabled()
            self._fast = fast or (self._fast and bool(self.runs))
            self.runs.append(run)  # before anything is changed: Ctrl-C may strike here
            for owner, name, replacement in _patches():
                if getattr(owner, name) is not replacement:
                    self._original[owner, name] = getattr(owner, name)
                setattr(owner, name, replacement)
            torch.backends.mha.set_fastpath_enabled(False)
        finally:
            if held:
                self._lock.release()

    def remove(self, run: _State) -> None:
        """Remove a run and every run inside it; the last one puts back what all of them changed."""
        held = self._lock.acquire(timeout=PATIENCE)
        try:
            place = self.runs.index(run)
            left = [each for each in self.runs[place:] if each.thread != run.thread]
            if not self.runs[:place] and not left:
                for (owner, name), original in self._original.items():
                    setattr(owner, name, original)
                torch.backends.mha.set_fastpath_enabled(self._fast)
            self.runs[place:] = left
        finally:
            if held:
                self._lock.release()


_SHARED = _Shared()


class _State:
    """All that a run may change: modes and tables of the modules, random states.

    Ctrl-C may strike as a block is left, before the block can put anything back. Then the block around it does, and the
    one that was cut short must not do so later, when its traceback is forgotten and Python closes it: it would put back
    what was true inside the other.
    """

    def __init__(self, model: nn.Module) -> None:
        # Each is walked through once: every product passes here, and of a small network walking is what it costs.
        self.modules, self.devices = list(model.modules()), {p.device for p in model.parameters()}
        self._tables, self._entries = _tables(self.modules)
        self._compiled = [(part, part.training) for part in self.modules if isinstance(part, torch.jit.ScriptModule)]
        self._random, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        self._torch = torch.get_rng_state()
        devices = sorted({device.index or 0 for device in self.devices if device.type == "cuda"})
        self._cuda = [(device, torch.cuda.get_rng_state(device)) for device in devices]
        self.thread = threading.get_ident()

    def put_back(self) -> None:
        """Once; called again, it does what an interruption has cut short."""
        if self not in _SHARED.runs:
            return
        deque(map(dict.update, self._tables, self._entries), maxlen=0)  # one step, which Ctrl-C cannot divide
        for module, training in self._compiled:
            module.training = training
        random.setstate(self._random)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._torch)
        for device, state in self._cuda:
            torch.cuda.set_rng_state(state, device)
        _SHARED.remove(self)


def _tables(modules: list[nn.Module]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The tables of every module that has them in Python, and the entries that they hold now."""
    live: list[dict[str, Any]] = []
    entries: list[dict[str, Any]] = []
    for module in modules:
        if not isinstance(module, torch.jit.ScriptModule):
            live += [vars(module), module._parameters, module._buffers]
            entries += [{"training": module.training}, dict(module._parameters), dict(module._buffers)]
    return live, entries


def is_undisturbed(model: nn.Module) -> bool:
    """Whether this thread is inside an `undisturbed` block of this model."""
    mine = threading.get_ident()
    return any(run.thread == mine and run.modules[0] is model for run in _SHARED.runs)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode, full precision, plain attention kernels and no recomputing inside; modes, parameters and every random
    state back on the way out, also where Ctrl-C arrives on that way.

    The fused attention kernels and the fast path of transformers have no second derivative; autocast, which a caller may
    still have on from training or use in the network, would round every activation.
    """
    before, modes, hooks = _State(model), depth(), saved_tensor_hooks()
    try:
        try:
            _SHARED.add(before)
            with ExitStack() as quiet:
                quiet.enter_context(torch.inference_mode(False))
                quiet.enter_context(sdpa_kernel(SDPBackend.MATH))
                for kind in {"cpu", *(device.type for device in before.devices)}:
                    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                        quiet.enter_context(torch.autocast(kind, enabled=False))
                for module in before.modules:
                    if module.training:
                        module.training = False
                yield
        finally:
            drop_above(modes)
            drop_hooks_above(hooks)
            before.put_back()
    finally:
        before.put_back()  # an interruption may have cut the first short
