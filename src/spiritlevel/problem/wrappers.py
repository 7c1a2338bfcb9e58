"""Models that other libraries have put around a network or into parts: what they are, and what cannot be measured of them.

No library is imported here to recognize its classes: whoever has such a model has imported it already.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from spiritlevel.errors import SpiritLevelError
from spiritlevel.problem.ranks import Group
from spiritlevel.problem.sharded import Gathering, Sharded
from spiritlevel.problem.shards import WHOLE, Shards, is_divided

TABLES_OF_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class _Nothing:
    """Stands for a class whose library is not imported."""


def _kind(module: str, name: str) -> type:
    found = getattr(sys.modules.get(module), name, _Nothing)
    return found if isinstance(found, type) else _Nothing


def in_shards(model: nn.Module) -> bool:
    """Whether the model is in parts over several processes: by `fully_shard`, or with DTensors as parameters."""
    sharding = _kind("torch.distributed.fsdp", "FSDPModule")
    return any(isinstance(part, sharding) for part in model.modules()) or any(map(is_divided, model.parameters()))


def refuse_shards(model: nn.Module) -> None:
    """Refuse a model in parts, where all of it is needed."""
    if in_shards(model):
        raise SpiritLevelError(
            "the model is in shards over several processes (fully_shard, or DTensors as parameters), and only `measure` takes "
            "one: measure it, or load its full state dict into the plain module"
        )


def reshard(model: nn.Module) -> None:
    """Put `fully_shard`'s own parts back into their places; a forward pass leaves the last ones whole."""
    sharding = _kind("torch.distributed.fsdp", "FSDPModule")
    for part in model.modules():
        if isinstance(part, sharding):
            shard: Any = part
            shard.reshard()


def refuse_wrapper(model: nn.Module) -> None:
    """Refuse what hides its weights in a form that cannot be differentiated twice, and say what can."""
    flat = _kind("torch.distributed.fsdp", "FullyShardedDataParallel")
    for name, part in model.named_modules():
        if isinstance(part, flat):
            where = f" ({name!r})" if name else ""
            raise SpiritLevelError(
                f"the model is wrapped by FullyShardedDataParallel{where}, whose flat parameters cannot be differentiated twice: "
                "shard it with torch.distributed.fsdp.fully_shard instead, which is measured in its parts, or load its full "
                "state dict (StateDictType.FULL_STATE_DICT) into the plain module and measure that"
            )
    if type(model).__module__.startswith("deepspeed"):
        raise SpiritLevelError(
            f"the model is wrapped by DeepSpeed ({type(model).__name__}): pass its module (engine.module), and under ZeRO stage 3 "
            "load a consolidated checkpoint into the plain module first, or shard it with torch.distributed.fsdp.fully_shard"
        )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise SpiritLevelError(
                f"parameter {name!r} is divided by DeepSpeed's ZeRO stage 3: load a consolidated checkpoint into the plain module, "
                "or shard it with torch.distributed.fsdp.fully_shard, which is measured in its parts"
            )
        _refuse_hidden(name, parameter)


def _refuse_hidden(name: str, parameter: Tensor) -> None:
    """Refuse a tensor of a kind that has no memory of its own, such as a quantized one."""
    if is_divided(parameter) or is_lazy(parameter):
        return
    try:
        parameter.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError) as error:
        kind = type(parameter.data).__name__
        raise SpiritLevelError(
            f"parameter {name!r} is a {kind}, whose numbers cannot be read ({str(error).splitlines()[0]}): measure the model "
            "with plain tensors as parameters (dequantize it, or load its weights into the plain module)"
        ) from error


def shards_of(model: nn.Module, distributed: bool) -> Shards:
    """How the model is divided; refused where not all of its processes take part."""
    if not in_shards(model):
        return WHOLE
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return WHOLE
    if not distributed:
        raise SpiritLevelError(
            f"the model is in shards over {dist.get_world_size()} processes, and distributed=False asks for this one alone: call "
            "measure in every process, without distributed=False"
        )
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    group = Group()
    named = [sorted((name, tuple(shape)) for name, shape in shapes.items())]
    if any(other != named for other in group.gather(named)):
        raise SpiritLevelError(
            "the processes hold different parameters, as the stages of a pipeline do: every process must be given the same model, "
            "each with its own part of every parameter"
        )
    return Sharded(group, shapes)


def plain(stand_in: nn.Module) -> nn.Module:
    """A stand-in without what `fully_shard` has made of its classes and hooks, whose weights come whole when asked for."""
    sharding = _kind("torch.distributed.fsdp", "FSDPModule")
    for part in stand_in.modules():
        if isinstance(part, sharding):
            part.__class__ = type(part).__mro__[getattr(type(part), "_orig_cls_mro_index", 2)]
        for table in TABLES_OF_HOOKS:
            hooks = vars(part).get(table)
            if hooks:
                kept = [(key, hook) for key, hook in hooks.items() if not _is_torchs(hook)]
                vars(part)[table] = type(hooks)(kept)  # the caller's own table stays as it is
        vars(part)["_parameters"] = Gathering(vars(part)["_parameters"])
    return stand_in


def _is_torchs(hook: Any) -> bool:
    """Whether a hook is one of `fully_shard`, which gathers weights and lets them go."""
    owner = getattr(getattr(hook, "__wrapped__", hook), "__self__", None)
    return isinstance(owner, _kind("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState"))


__all__ = ["in_shards", "plain", "refuse_shards", "refuse_wrapper", "reshard", "shards_of"]
