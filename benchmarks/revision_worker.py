"""One revision of this library that measures when it is told to: lines of JSON in, lines of JSON out.

    python -m benchmarks.revision_worker FILE

It knows nothing of the library but the public names `measure` and `list_measures`, and of the benchmark its clock alone, so that
it runs with any revision. FILE holds a network made of torch's own modules, with its data in equal batches.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import spiritlevel as sl
from benchmarks.clock import Budget, median, unit_times


def main(path: str) -> None:
    """Say which measures there are, then measure what every line asks for."""
    torch.set_num_threads(1)
    content: dict[str, Any] = torch.load(path, weights_only=False)
    model, x, y = content["model"].eval(), content["x"], content["y"]
    batches = list(zip(torch.split(x, content["batch"]), torch.split(y, content["batch"]), strict=True))
    _say({"measures": [record.name for record in sl.list_measures()]})
    for line in sys.stdin:
        _say(_measured(model, batches, json.loads(line)))


def _measured(
    model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]], job: dict[str, Any]
) -> dict[str, Any]:
    """One call between two timings of the gradient, or on one batch alone to warm up."""
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    if job["warm_up"]:
        sl.measure(model, batches[0], measures=job["measures"], tolerance=job["tolerance"])
        return {}
    gc.collect()
    before = unit_times(lambda: _gradient(model, batches), job["unit_seconds"])
    budget = Budget(0.0)
    report = sl.measure(model, (x, y), measures=job["measures"], tolerance=job["tolerance"])
    spent = budget.spent()
    unit = median([*before, *unit_times(lambda: _gradient(model, batches), job["unit_seconds"])])
    return {"cost": spent / unit, "value": report[job["measures"][0]].value}


def _gradient(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for x, y in batches:
        for sum_, part in zip(total, torch.autograd.grad(F.cross_entropy(model(x), y), parameters), strict=True):
            sum_.add_(part, alpha=1 / len(batches))
    return total


def _say(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    assert os.environ.get("OMP_NUM_THREADS") == "1", "the benchmark runs with one thread: set OMP_NUM_THREADS=1"
    main(sys.argv[1])
