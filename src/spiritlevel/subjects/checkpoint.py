"""Weights to and from files: safetensors, or torch files read without running code."""

import contextlib
import os
import re
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from spiritlevel.errors import SpiritLevelError, listed
from spiritlevel.saved import write_whole
from spiritlevel.subjects.archives import check_unpacked, zip_sizes

# Where training scripts put the weights beside optimizer, epoch and the like.
WRAPPERS = ("state_dict", "model_state_dict", "model")
# What DataParallel and torch.compile put before every name.
PREFIXES = ("module.", "_orig_mod.")

# Files from before torch 0.4.1 have no such counter, and a network in eval mode does not look at it.
OPTIONAL = "num_batches_tracked"

CONVERSION = "torch.save(model.state_dict(), path)"

M = TypeVar("M", bound=nn.Module)


def load_checkpoint(model: M, path: str | os.PathLike[str], *, strict: bool = True) -> M:
    """Copies the weights and buffers in the file at `path` into `model`, and returns it.

    The file is safetensors (`.safetensors`) or a torch file read with `weights_only`. With `strict=False` entries that
    only one side has are left alone; shapes must fit in any case. A file that does not fit changes nothing.
    """
    path = Path(path)
    state = model.state_dict()
    loaded = _without_prefix(read_state_dict(path), state)
    given = _with_tied_names(loaded, state)
    missing = [name for name in state if name not in given and not name.endswith(OPTIONAL)]
    unexpected = [name for name in given if name not in state]
    shapes = [
        f"{name}: {tuple(given[name].shape)} in the file, {tuple(state[name].shape)} in the model"
        for name in state
        if name in given and given[name].shape != state[name].shape
    ]
    if shapes or (strict and (missing or unexpected)) or not any(name in state for name in given):
        lines = [_section("missing from the file", missing), _section("not in the model", unexpected)]
        raise SpiritLevelError(
            f"{path} does not fit {type(model).__name__}; build the model the file was saved from"
            + "".join([*lines, _section("other shapes", shapes)])
        )
    model.load_state_dict(given, strict=False)
    return model


def save_checkpoint(model: nn.Module, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
    """Writes the weights and buffers of `model` as safetensors: wholly or not at all, even if the machine dies.

    A weight that the model has under several names is written under each, so that the file fits models that tie it and
    models that do not. `metadata` is what the file says of itself, such as what the network was trained on.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise SpiritLevelError(
            f"checkpoints are written as safetensors; name the file '{path.stem}.safetensors', got {path}"
        )
    check_holds_tensors(model)
    save_state_dict(model.state_dict(), path, metadata)


def check_holds_tensors(model: nn.Module) -> None:
    """Refuse a model that a checkpoint cannot hold."""
    other = [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]
    if other:
        raise SpiritLevelError(
            f"a checkpoint holds tensors only; {', '.join(other)} of {type(model).__name__} are none"
        )


def save_state_dict(state: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Writes named tensors as safetensors, wholly or not at all."""
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    write_whole(path, safetensors.torch.save(tensors, metadata={"format": "pt", **(metadata or {})}))


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The named tensors in a checkpoint file, on the processor; nothing in the file is executed.

    In torch files they may be on the outside or under `state_dict`, `model_state_dict` or `model`.
    """
    path = Path(path)
    check_is_file(path)
    if path.suffix == ".safetensors":
        try:
            return safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise SpiritLevelError(f"{path} is not a whole safetensors file ({error})") from None
    return _unwrapped(read_torch_file(path), path)


def read_metadata(path: Path) -> dict[str, str]:
    """What a checkpoint says of itself; files of torch's own say nothing."""
    check_is_file(path)
    if path.suffix != ".safetensors":
        return {}
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise SpiritLevelError(f"{path} is not a whole safetensors file ({error})") from None


def check_is_file(path: Path) -> None:
    """Refuse a checkpoint that is not there."""
    if not path.is_file():
        raise SpiritLevelError(f"no checkpoint file {path}: pass the path of a safetensors file or of torch's own")


def read_torch_file(path: Path) -> Any:
    """What is in a file of torch's own, on the processor: plain values and tensors. Code in it is refused, not executed."""
    _check_size(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # about the protocol of foreign pickles, which are refused below
            return torch.load(path, map_location="cpu", weights_only=True)
    except (
        Exception
    ) as error:  # a damaged pickle can fail in any way, and one that was cut off as if reading had failed
        if isinstance(error, OSError) and error.filename is not None:
            raise
        said = f"{error}" or type(error).__name__
    code = re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)|(TorchScript)", said)
    if code:
        raise SpiritLevelError(
            f"{path} is refused: it holds {code[1] or code[2]}, which would have to run code to load. If you trust it, "
            f"load it once where it was made and write its weights only: {CONVERSION}"
        )
    reason = said.rpartition("WeightsUnpickler error:")[2].strip().splitlines()[0].partition(". ")[0]
    raise SpiritLevelError(f"{path} is not a whole file of torch tensors ({reason}); write it by {CONVERSION}")


def _check_size(path: Path) -> None:
    """Refuse an archive that unpacks to far more than it weighs: torch stores what it writes without compression."""
    if zipfile.is_zipfile(path):
        with contextlib.suppress(zipfile.BadZipFile):  # torch says what is wrong with it
            check_unpacked(path, *zip_sizes(path))


def _unwrapped(content: Any, path: Path) -> dict[str, Tensor]:
    """The mapping from names to tensors inside `content`."""
    if isinstance(content, Mapping):
        for candidate in (content, *(content.get(name) for name in WRAPPERS)):
            if isinstance(candidate, Mapping) and candidate and all(isinstance(v, Tensor) for v in candidate.values()):
                return {str(name): tensor for name, tensor in candidate.items()}
    found = f"a dictionary with {listed(list(map(str, content)), most=12)}" if isinstance(content, Mapping) else ""
    raise SpiritLevelError(
        f"{path} must hold named tensors, on the outside or under one of {', '.join(WRAPPERS)}; "
        f"found {found or type(content).__name__}"
    )


def _without_prefix(loaded: dict[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors without a prefix that all of them have and the model's own names do not."""
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in loaded) and not all(name.startswith(prefix) for name in state):
            return _without_prefix({name.removeprefix(prefix): tensor for name, tensor in loaded.items()}, state)
    return loaded


def _with_tied_names(loaded: dict[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The loaded tensors, and again under every name that the model gives to the same weight."""
    tied: dict[Hashable, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        if isinstance(tensor, Tensor) and tensor.numel():
            tied[tensor.data_ptr(), tensor.shape, tensor.stride()].append(name)
    given = dict(loaded)
    for names in tied.values():
        present = [name for name in names if name in loaded]
        given.update({name: loaded[present[0]] for name in names if present and name not in loaded})
    return given


def _section(title: str, entries: list[str]) -> str:
    return f"\n  {title}: {listed(entries, most=12)}" if entries else ""
