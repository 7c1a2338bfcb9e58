"""The default set on a device that is not the CPU: a backend in Python that computes on the CPU and refuses to mix.

`python device_worker.py FILE` writes the values on the CPU, those on the device, and every wrong mixture to FILE. Then the
device has no double precision any more, as Apple's has none.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import spiritlevel as sl
from spiritlevel.curvature import whole
from spiritlevel.problem.devices import has_double

NAMES = ["riemannian_spectral_norm", "rho_sum", "normalized_sharpness", "hessian_trace"]
# Operations that move tensors between devices, as they may.
MOVES = {"aten::_to_copy", "aten::copy_", "aten::_copy_from"}
mixed: list[str] = []
lacking: list[torch.dtype] = []  # precisions that the device does not have
counted: list[str] = []
copied: dict[str, int] = {}  # tensors of more than one number that came to the CPU, by the file that asked for them


class There(torch.Tensor):
    """A tensor of the device, with its numbers in one of the CPU."""

    @staticmethod
    def __new__(cls, numbers):
        if numbers.dtype in lacking:
            raise TypeError(f"the device has no {numbers.dtype}")
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            numbers.stride(),
            numbers.storage_offset(),
            dtype=numbers.dtype,
            device=torch.device("elsewhere", 0),
        )
        made.numbers = numbers
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __deepcopy__(self, memo):
        copied = There(self.numbers.clone())
        return nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied

    def untyped_storage(self):
        return self.numbers.untyped_storage()

    def tolist(self):
        return self.numbers.tolist()

    def data_ptr(self):
        return self.numbers.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, function, kinds, args=(), kwargs=None):
        return computed(function, *args, **(kwargs or {}))


def _is_stranger(leaf):
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, There) and leaf.dim() > 0


def _note_copies(function, args, device):
    """A copy to the CPU waits for the device: none belongs into a loop, unless it is of a few numbers."""
    name = function._schema.name
    source, target = (args[1], args[0]) if name == "aten::copy_" else (args[0], args[1] if len(args) > 1 else None)
    leaves = device.type == "cpu" if device is not None else _is_stranger(target)
    if leaves and isinstance(source, There) and source.numel() > 1:
        frame = sys._getframe()
        while "spiritlevel" not in frame.f_code.co_filename:
            frame = frame.f_back
        file = Path(frame.f_code.co_filename).name
        copied[file] = copied.get(file, 0) + 1


def computed(function, *args, **kwargs):
    """An operation on the device: what is not on it must be a number."""
    counted.append(function._schema.name)
    device = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    here = device is not None and device.type == "cpu"
    if function._schema.name in MOVES:
        _note_copies(function, args, device)
    strangers = (
        [] if function._schema.name in MOVES else [leaf for leaf in tree_leaves((args, kwargs)) if _is_stranger(leaf)]
    )
    mixed.extend(f"{function._schema.name} of a tensor of shape {tuple(leaf.shape)} on the CPU" for leaf in strangers)
    inside = tree_map(lambda leaf: leaf.numbers if isinstance(leaf, There) else leaf, (args, kwargs))
    if device is not None:
        inside[1]["device"] = torch.device("cpu")
    found = function(*inside[0], **inside[1])
    if here:
        return found
    first = args[0] if args else None
    if isinstance(first, There) and found is first.numbers:  # in place
        return first
    if not isinstance(first, There) and isinstance(first, torch.Tensor) and found is first:  # a copy from the device
        return first
    return tree_map(lambda leaf: There(leaf) if isinstance(leaf, torch.Tensor) else leaf, found)


def register() -> torch.library.Library:
    """Make torch know the device, for the rest of the process; the fallback lives as long as what is returned."""
    _setup_privateuseone_for_python_backend("elsewhere")
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda function, *args, **kwargs: computed(function, *args, **kwargs), "PrivateUse1")
    return library


def subject(device: torch.device) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y = torch.randn(9, 4), torch.randint(0, 3, (9,))
    if device.type != "cpu":
        for part in model.modules():
            for name, parameter in list(part._parameters.items()):
                part._parameters[name] = nn.Parameter(There(parameter.detach()))
        x, y = There(x), There(y)
    return model, (x, y)


def measured(device: torch.device) -> dict[str, float]:
    """The default set, and its eigenvalues once more by searches, as larger networks have them."""
    report = sl.measure(*subject(device))
    worth, whole.WORTH = whole.WORTH, 0
    searched = sl.measure(*subject(device), measures=["hessian_spectral_norm", "kappa_sum"])
    whole.WORTH = worth
    values = {name: value.value for name, value in report.values.items()} | {"loss": report.loss}
    return values | {f"{name} by a search": value.value for name, value in searched.values.items()}


def without_double(device: torch.device) -> dict[str, object]:
    """What can be had of a device that has single precision only."""
    has_double.cache_clear()
    lacking.append(torch.float64)
    model, data = subject(device)
    report = sl.measure(model, data, measures=NAMES)
    (elsewhere, example), (here, inputs) = (
        (each, pair[0]) for each, pair in ((model, data), subject(torch.device("cpu")))
    )
    moved, plain = sl.canonicalize(elsewhere, example), sl.canonicalize(here, inputs)
    return {
        "single": {name: report[name].value for name in NAMES},
        "notes": report.notes,
        "at": str(next(model.parameters()).device),
        "balanced at": str(next(moved.parameters()).device),
        "balanced": [part.numbers.tolist() for part in moved.parameters()]
        == [part.tolist() for part in plain.parameters()],
        "audit": sl.audit(model, data, measures=["rho_sum"], kinds=["layer"], strengths=[1.0], seeds=[0])
        .findings[0]
        .verdict,
    }


if __name__ == "__main__":
    registered = register()
    result = {"here": measured(torch.device("cpu")), "there": measured(torch.device("elsewhere", 0))}
    result |= {"mixed": sorted(set(mixed)), "operations": len(counted), "copied": dict(copied)}
    result |= without_double(torch.device("elsewhere", 0))
    with open(sys.argv[1], "w", encoding="utf-8") as stream:
        json.dump(result, stream)
