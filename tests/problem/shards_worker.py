"""One process of two that hold a model in parts: `python shards_worker.py RANK SIZE FILE` writes what it saw to FILE.RANK."""

import json
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import spiritlevel as sl
from spiritlevel.curvature import krylov
from spiritlevel.curvature.lanczos import Lanczos
from spiritlevel.problem.problem import Problem

NAMES = [
    "hessian_trace",
    "hessian_spectral_norm",
    "riemannian_spectral_norm",
    "normalized_sharpness",
    "fisher_rao_norm",
]
NAMES += ["kappa_sum", "rho_sum", "rho_row_sum", "volume_flatness"]


def subject() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    return model, (torch.randn(11, 4).double(), torch.randint(0, 3, (11,)))


def numbers(report: sl.Report) -> dict[str, list[float]]:
    found = {name: [value.value, value.error] for name, value in report.values.items()}
    return found | {"loss": [report.loss, 0.0], "parameters": [report.problem["parameters"], 0.0]}


def batch_loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    decay = sum(parameter.square().sum() for parameter in model.parameters())
    return nn.functional.cross_entropy(model(batch[0]), batch[1]) + 0.01 * decay, len(batch[1])


def sharded() -> dict[str, object]:
    """`fully_shard`: the numbers, why one is missing, and a model that trains on as if nothing had been."""
    model, data = subject()
    fully_shard(model[0])
    fully_shard(model)
    before = [parameter.full_tensor() for parameter in model.parameters()]
    report = sl.measure(model, data, measures=NAMES, tolerance=1e-3, most_probes=16)
    found: dict[str, object] = {"sharded": numbers(report), "missing": report["volume_flatness"].notes}
    nn.functional.cross_entropy(model(data[0]), data[1]).backward()
    after = list(model.parameters())
    found["same"] = all(
        torch.equal(mine, parameter.full_tensor()) for mine, parameter in zip(before, after, strict=True)
    )
    found["slope"] = sum(float(parameter.grad.full_tensor().square().sum()) for parameter in after) ** 0.5
    found["reported slope"] = report.problem["gradient_norm"]
    found["notes"] = report.notes
    found["witness"] = report["hessian_spectral_norm"].witness is None
    loss = [[data[0][:6], data[1][:6]], [data[0][6:], data[1][6:]]]
    found["whole"] = numbers(sl.measure(model, loss, batch_loss, measures=NAMES[1:2]))
    return found


def tensors() -> dict[str, object]:
    """DTensors as parameters, divided in other ways; and products that know nothing of what autograd forgot."""
    model, data = subject()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ways = [[Shard(1)], [Replicate()], [Shard(0)], [Shard(0)]]
    for (name, parameter), placements in zip(list(model.named_parameters()), ways, strict=True):
        where, _, key = name.rpartition(".")
        divided = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
        setattr(model.get_submodule(where), key, divided)
    problem = Problem(model, "cross_entropy", data, distributed=True, shards=True)
    held = sum(part.numel() for part in problem.parameters.values())
    part = next(iter(problem.parameters.values()))
    gathered = problem.shards.whole("0.weight", part)
    return {
        "tensors": numbers(sl.measure(model, data, measures=NAMES[1:3])),
        "held": held,
        "gathered": torch.equal(gathered, model[0].weight.full_tensor()) and not isinstance(gathered, DTensor),
    }


class Recurrent(nn.Module):
    """Keeps its weights in a list beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(4, 2, batch_first=True), nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x.unsqueeze(1))[0][:, -1])


def recurrent() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    _, data = subject()
    return Recurrent().double(), data


def listed() -> dict[str, object]:
    model, data = recurrent()
    fully_shard(model)
    return {"recurrent": numbers(sl.measure(model, data, measures=NAMES[1:2]))}


def smallest() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """One sample for all processes, and a bias of one entry, of which the last ones hold nothing."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double(), (
        torch.randn(1, 4).double(),
        torch.randn(1, 1).double(),
    )


def few() -> dict[str, object]:
    model, data = smallest()
    fully_shard(model)
    empty = next(reversed(dict(Problem(model, "mse", data, distributed=True, shards=True).parameters).values()))
    return {
        "few": numbers(sl.measure(model, data, "mse", measures=NAMES[1:3])),
        "entries": empty.numel(),
    }


def plain() -> dict[str, object]:
    """Every process has the whole model, and a part of the Krylov vectors."""
    model, data = subject()
    sizes: list[int] = []

    class Seen(Lanczos):
        def __init__(self, start: torch.Tensor, **options: object) -> None:
            sizes.append(start.numel())
            super().__init__(start, **options)

    krylov.Lanczos = Seen
    report = sl.measure(model, data, measures=NAMES[1:2])
    krylov.Lanczos = Lanczos
    witness = report[NAMES[1]].witness
    return {"plain": numbers(report), "basis": sizes, "direction": sum(part.numel() for part in witness.values())}


def refused(call: object) -> str:
    try:
        call()  # type: ignore[operator]
    except sl.SpiritLevelError as error:
        return str(error)
    return "not refused"


def refusals() -> dict[str, str]:
    model, (x, y) = subject()
    fully_shard(model)
    part = slice(dist.get_rank(), None, 2)
    flat, _ = subject()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an old wrapper, and no accelerator
        flat = FullyShardedDataParallel(flat, device_id=torch.device("cpu"))
    names = ["hessian_spectral_norm"]
    with_nan, _ = subject()
    with torch.no_grad():
        with_nan[2].bias[2] = float("nan")  # an entry that process 1 holds
    fully_shard(with_nan)
    parallel, _ = subject()
    ways = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(parallel, init_device_mesh("cpu", (dist.get_world_size(),)), ways)
    return {
        "alone": refused(lambda: sl.measure(model, (x, y), measures=names, distributed=False)),
        "audit": refused(lambda: sl.audit(model, (x, y), measures=names)),
        "spectrum": refused(lambda: sl.spectrum(model, (x, y))),
        "data": refused(lambda: sl.measure(model, (x[part], y[part]), measures=names)),
        "flat": refused(lambda: sl.measure(flat, (x, y), measures=names)),
        "parallel": refused(lambda: sl.measure(parallel, (x, y), measures=names)),
        "nan": refused(lambda: sl.measure(with_nan, (x, y), measures=names)),
    }


if __name__ == "__main__":
    rank, size, place = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{place}.group", rank=rank, world_size=size)
    result = {**sharded(), **tensors(), **listed(), **few(), **plain(), **refusals()}
    with open(f"{place}.{rank}", "w", encoding="utf-8") as stream:
        json.dump(result, stream)
    dist.destroy_process_group()
