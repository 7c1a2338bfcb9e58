"""What a tracker adds to a training: wall-clock seconds in `tracker.step` over seconds of training, in one and the same run.

    python -m benchmarks.tracking_overhead --seconds 60 --out benchmarks/results/tracking.json

The loop takes its own times, around the step of the training and around the tracker, so that the figure does not rest on the
tracker's clock. Making the tracker counts as overhead. Networks: an MLP, LeNet5 and a small transformer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spiritlevel as sl

BATCH, SAMPLES = 128, 4096


class Transformer(nn.Module):
    """Two blocks of attention over 16 tokens, and a linear layer on their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, 48), nn.Parameter(0.02 * torch.randn(16, 48))
        block = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(self.tokens(x) + self.places).mean(1))
        return found


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def images() -> tuple[Tensor, Tensor]:
    """Ten blurred patterns with noise: hard enough to train on, and no file to read."""
    patterns = torch.nn.functional.interpolate(torch.randn(10, 1, 7, 7), size=28, mode="bilinear")
    labels = torch.randint(0, 10, (SAMPLES,))
    return patterns[labels] + 1.5 * torch.randn(SAMPLES, 1, 28, 28), labels


def sentences() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 64, (SAMPLES, 16))
    return tokens, (tokens[:, 0] + tokens[:, 5]) % 10


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "MLP": (mlp, images),
    "LeNet5": (lenet, images),
    "transformer": (Transformer, sentences),
}


def followed(name: str, seconds: float, overhead: float) -> dict[str, Any]:
    """A training of so many seconds, with a tracker: what it added, and how many points of every measure it made."""
    torch.manual_seed(0)
    make, draw = NETWORKS[name]
    model, (x, y) = make(), draw()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    started = time.perf_counter()
    tracker = sl.Tracker(model, (x, y), optimizer=optimizer, overhead=overhead)
    spent, trained, step = time.perf_counter() - started, 0.0, 0
    while trained < seconds:
        before = time.perf_counter()
        rows = torch.randint(0, len(x), (BATCH,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        between = time.perf_counter()
        tracker.step(step)
        spent, trained, step = spent + time.perf_counter() - between, trained + between - before, step + 1
    return {
        "network": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "overhead asked for": overhead,
        "overhead measured": spent / trained,
        "by the tracker's own clock": tracker.overhead,
        "steps": step,
        "seconds of training": trained,
        "points": {measure: len(tracker.history.series(measure)[0]) for measure in tracker.history.measures},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--overhead", type=float, default=0.05)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in NETWORKS:
        rows.append(followed(name, options.seconds, options.overhead))
        print(json.dumps(rows[-1]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
