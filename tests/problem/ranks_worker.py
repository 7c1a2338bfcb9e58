"""One process of a distributed measurement: `python ranks_worker.py SCENES RANK SIZE FOLDER` writes what it saw in each
scene of the list, whose names commas divide, to FOLDER/SCENE.RANK."""

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import spiritlevel as sl
from spiritlevel.curvature import columns, statistics
from spiritlevel.curvature.sums import BY_ENTRY, Sums
from spiritlevel.measuring import evidence
from spiritlevel.measuring.statistics import Whole
from spiritlevel.problem import problem, running, sharded
from spiritlevel.problem.ranks import Group
from spiritlevel.problem.shards import Shards

NAMES = [
    "hessian_trace",
    "hessian_spectral_norm",
    "riemannian_spectral_norm",
    "kappa_sum",
    "rho_sum",
    "normalized_sharpness",
    "fisher_rao_norm",
]


def subject() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    return model, (torch.randn(41, 6).double(), torch.randint(0, 3, (41,)))


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def numbers(report: sl.Report) -> dict[str, float]:
    found = {"loss": report.loss}
    for name in report:
        found[name] = report[name].value
        found |= {f"{name}[{layer}]": value for layer, value in report[name].layers.items()}
    return found


def same() -> dict[str, float]:
    """Everything that must not depend on how many processes there are."""
    model, (x, y) = subject()
    found = numbers(sl.measure(model, (x, y), measures=NAMES, tolerance=1e-9))
    loader = [(x[:17], y[:17]), (x[17:18], y[17:18]), (x[18:], y[18:])]
    found |= {f"loader {k}": v for k, v in numbers(sl.measure(model, loader, measures=NAMES, tolerance=1e-9)).items()}
    torch.manual_seed(0)
    bent = smooth()
    probed = sl.measure(bent, (x, y), measures=["hessian_trace", "rho_sum", "kappa_sum"], most_probes=8, tolerance=1e-6)
    found |= {f"probed {k}": v for k, v in numbers(probed).items()}

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"]), len(batch["y"])

    batches = [{"x": x[i : i + 9], "y": y[i : i + 9]} for i in range(0, 41, 9)]
    whole = sl.measure(model, batches, loss, measures=["hessian_spectral_norm", "keskar_sharpness"], tolerance=1e-8)
    found |= {f"whole {k}": v for k, v in numbers(whole).items()}
    spread = sl.spectrum(model, (x, y), probes=2, steps=8)
    found["spectrum"] = float(spread.top[0].value)
    return found


def divided() -> dict[str, object]:
    """The same where matrices count as large and data come in many chunks, and what each process keeps of their statistics,
    while a sweep runs and after it."""
    kept: dict[str, int] = {}
    added: dict[str, int] = {}

    class Seen(Whole):
        def __init__(self, parts: Mapping[str, torch.Tensor], shards: Shards) -> None:
            super().__init__(parts, shards)
            if isinstance(parts, dict):  # not the weights, which every process has
                kept.update({name: part.numel() for name, part in parts.items()})

    class Watched(Sums):
        def add(self, kind: str, name: str, array: torch.Tensor) -> None:
            super().add(kind, name, array)
            stored = getattr(self, kind)
            if kind in BY_ENTRY and name in stored:
                added[name] = max(added.get(name, 0), stored[name].numel())

    with (
        mock.patch.object(sharded, "LARGE", 10),
        mock.patch.object(running, "WORTH_DIVIDING", 0),
        mock.patch.object(running, "MESSAGE_BYTES", 64),  # a matrix goes in several pieces
        mock.patch.object(problem, "LARGEST_CHUNK", 20),  # of 41 samples one process has one chunk, the other two
        mock.patch.object(evidence, "Whole", Seen),
        mock.patch.object(statistics, "Sums", Watched),
        mock.patch.object(columns, "Sums", Watched),
    ):
        return {**same(), "kept": kept, "added": added}


def given() -> dict[str, object]:
    """Sums of which one process has more to give than the other, and to another parameter first."""
    like = {"a": torch.zeros(7, 5), "b": torch.zeros(11), "c": torch.zeros(3)}
    few = SimpleNamespace(parameters=like, ranks=Group())
    with mock.patch.multiple(running, WORTH_DIVIDING=0, MESSAGE_BYTES=16), mock.patch.object(sharded, "LARGE", 10):
        sums = running.RunningSums(few)
        giving = (("a", "b", "a") if dist.get_rank() == 0 else ("b",)) if dist.get_rank() < 2 else ()
        for turn, name in enumerate(giving):
            array = torch.arange(like[name].numel(), dtype=torch.float32).view(like[name].shape) + 1
            sums.give("key", name, array * (1e-9 if turn == 2 else 1.0))
        sums.finish()
        parts = sums.joined("key", {"c": torch.ones(3)})
    return {"divides": [sums.divides(name) for name in like], **{name: part.tolist() for name, part in parts.items()}}


def one_by_one() -> dict[str, float]:
    """A loader with one sample at a time, fewer than there are processes."""
    model, (x, y) = subject()
    batches = [(x[i : i + 1], y[i : i + 1]) for i in range(5)]
    return numbers(sl.measure(model, batches, measures=["rho_sum", "hessian_spectral_norm", "fisher_rao_norm"]))


def failing() -> dict[str, str]:
    """Process 1 fails in the middle of the measurement."""
    model, (x, y) = subject()

    def broken(stage: str, passes: float) -> None:
        if dist.get_rank() == 1 and passes > 3:
            raise ValueError("the disk is on fire")

    return refused(lambda: sl.measure(model, (x, y), measures=["hessian_spectral_norm"], progress=broken))


def dying() -> dict[str, str]:
    """Process 1 is gone without a word."""
    model, (x, y) = subject()

    def deadly(stage: str, passes: float) -> None:
        if dist.get_rank() == 1 and passes > 3:
            os._exit(7)

    return refused(lambda: sl.measure(model, (x, y), measures=["hessian_spectral_norm"], progress=deadly))


def differing() -> dict[str, str]:
    """The processes were given different weights, then different data, then too little of it."""
    model, (x, y) = subject()
    with torch.no_grad():
        model[0].weight[0, 0] += dist.get_rank()
    found = refused(lambda: sl.measure(model, (x, y), measures=["hessian_spectral_norm"]))
    model, _ = subject()
    part = slice(dist.get_rank(), None, 2)
    found |= {
        "data": refused(lambda: sl.measure(model, (x[part], y[part]), measures=["hessian_spectral_norm"]))["error"]
    }
    found |= {"few": refused(lambda: sl.measure(model, (x[:1], y[:1]), measures=["hessian_spectral_norm"]))["error"]}
    alone = sl.measure(model, (x[part], y[part]), measures=["hessian_spectral_norm"], distributed=False)
    return found | {"alone": str(alone.problem["samples"])}


def refused(call: object) -> dict[str, str]:
    try:
        call()  # type: ignore[operator]
    except Exception as error:
        return {"type": type(error).__name__, "error": str(error)}
    return {"type": "", "error": ""}


if __name__ == "__main__":
    warnings.simplefilter("error")
    scenes, rank, size, folder = sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{folder / scenes[0]}.group", rank=rank, world_size=size)
    for scene in scenes:
        (folder / f"{scene}.{rank}").write_text(json.dumps(globals()[scene]()), encoding="utf-8")
    if "dying" in scenes:
        os._exit(0)  # a group whose other end is gone cannot be taken down: gloo at times aborts the process over it
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
