"""The default set of measures on models of the size people fine-tune, with the memory it takes.

python benchmarks/large_models.py gpt2 | resnet50 [--probes 8] [--measures A,B] [--out FILE.json]

Random weights and a handful of samples: what is shown is that it runs, within which memory and in what time. GPT-2 needs
`pip install spiritlevel[transformers]`.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spiritlevel as sl
from spiritlevel.saved import json_ready, write_json


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet50(classes: int = 1000) -> nn.Module:
    """ResNet-50 with 25.6 million parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, stride if block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def image_subject() -> tuple[nn.Module, Any, Any]:
    return resnet50(), (torch.randn(4, 3, 64, 64), torch.randint(0, 1000, (4,))), "cross_entropy"


def text_subject() -> tuple[nn.Module, Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config())
    tokens = torch.randint(0, model.config.vocab_size, (2, 8))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return model(**batch).loss, batch["labels"][:, 1:].numel()

    return model, [{"input_ids": tokens, "labels": tokens}], loss


def peak_gigabytes() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["gpt2", "resnet50"])
    parser.add_argument("--probes", type=int, default=8)
    parser.add_argument("--tolerance", type=float, default=1e-2)
    parser.add_argument("--measures", help="names separated by commas; the default set without")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.manual_seed(0)
    model, data, loss = text_subject() if asked.model == "gpt2" else image_subject()
    stages: dict[str, dict[str, float]] = {}
    started, before = time.process_time(), peak_gigabytes()

    def progress(stage: str, passes: float) -> None:
        name = stage.partition(",")[0]
        stages[name] = {"seconds": time.process_time() - started, "passes": passes, "gigabytes": peak_gigabytes()}
        print(
            f"{stages[name]['seconds']:8.0f} s  {peak_gigabytes():6.2f} GB  {passes:6.0f} passes  {stage}", flush=True
        )

    report = sl.measure(
        model,
        data,
        loss,
        measures=asked.measures.split(",") if asked.measures else None,
        most_probes=asked.probes,
        tolerance=asked.tolerance,
        progress=progress,
    )
    print(report)
    found = {
        "model": asked.model,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "probes": asked.probes,
        "tolerance": asked.tolerance,
        "cpu_seconds": time.process_time() - started,
        "peak_gigabytes": peak_gigabytes(),
        "gigabytes_before": before,
        "passes": report.cost.passes,
        "values": {name: report[name].value for name in report},
        "stages": stages,
    }
    print(f"peak {found['peak_gigabytes']:.2f} GB, {found['cpu_seconds']:.0f} s of processor time")
    if asked.out is not None:
        write_json(asked.out, json_ready(found))


if __name__ == "__main__":
    main()
