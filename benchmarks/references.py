"""Reference values of well-known networks, the scale on which a page places a measurement.

    python -m benchmarks.references --data-folder FOLDER --checkpoint resnet20-12fca82f.th

trains the two networks of the demonstration and LeNet on MNIST, reads a public ResNet-20 for CIFAR-10, measures all of them
on random samples of their training data and writes `src/spiritlevel/show/references.json`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from spiritlevel.cli.demonstration import Settings, run_demo
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.run import measure
from spiritlevel.subjects.checkpoint import load_checkpoint
from spiritlevel.subjects.data import Dataset, load_data
from spiritlevel.subjects.networks import build_model
from spiritlevel.subjects.preprocessing import of_checkpoint

FILE = Path(__file__).parents[1] / "src/spiritlevel/show/references.json"
# What a headline may lead with, and what people know from elsewhere.
MEASURES = [
    "normalized_sharpness",
    "fisher_rao_norm",
    "kappa_trace_sum",
    "rho_sum",
    "rho_row_sum",
    "riemannian_spectral_norm",
    "hessian_spectral_norm",
    "hessian_trace",
]
SAMPLES = 1000


def entry(name: str, about: str, report: Report) -> dict[str, Any]:
    """What is kept of a report, to four digits."""
    values = {key: float(f"{report[key].value:.4g}") for key in MEASURES if key in report}
    return {"name": name, "about": about, "loss": float(f"{report.loss:.4g}"), "values": values}


def demonstration() -> list[dict[str, Any]]:
    """The networks that `spiritlevel demo` trains, without the twin."""
    reports = run_demo(Settings(), lambda *_: None).reports
    return [
        entry(f"demo, {name}", "two layers on 8×8 digits, trained by spiritlevel demo", report)
        for name, report in list(reports.items())[:2]
    ]


def lenet(folder: str) -> dict[str, Any]:
    """LeNet, five epochs of Adam on 20,000 images of MNIST."""
    data = load_data(f"mnist:{folder}", samples=20_000, seed=0)
    torch.manual_seed(0)
    model = build_model("lenet", input_shape=data.input_shape, classes=10)
    train(model, data, epochs=5)
    few = load_data(f"mnist:{folder}", samples=SAMPLES, seed=1)
    report = measure(model, (few.x, few.y), measures=MEASURES)
    return entry("LeNet", "on MNIST, five epochs of Adam on 20,000 images", report)


def train(model: nn.Module, data: Dataset, epochs: int) -> None:
    """Adam with batches of 128."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(data)).tensor_split(max(1, len(data) // 128)):
            optimizer.zero_grad()
            F.cross_entropy(model(data.x[rows]), data.y[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def resnet20(folder: str, checkpoint: Path) -> dict[str, Any]:
    """The public ResNet-20 for CIFAR-10 of Y. Idelbayev, on inputs preprocessed as in its training."""
    asked = of_checkpoint(checkpoint)
    data = load_data(f"cifar10:{folder}", samples=SAMPLES, seed=1)
    if asked is not None:
        data = asked.applied(data)
    model = load_checkpoint(build_model("resnet20", input_shape=data.input_shape, classes=10), checkpoint).eval()
    report = measure(model, (data.x, data.y), measures=MEASURES, tolerance=1e-2)
    return entry("ResNet-20", "on CIFAR-10, public weights of Y. Idelbayev", report)


def main() -> None:
    """Measure all and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data-folder", help="where MNIST and CIFAR-10 are; without it the demonstration's networks only"
    )
    parser.add_argument("--checkpoint", type=Path, help="the weights of ResNet-20")
    given = parser.parse_args()
    found = demonstration()
    write(found)  # at every step: an interruption keeps what is done
    if given.data_folder:
        write(found := [*found, lenet(given.data_folder)])
    if given.data_folder and given.checkpoint:
        write([*found, resnet20(given.data_folder, given.checkpoint)])


def write(found: list[dict[str, Any]]) -> None:
    """The table so far."""
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{FILE}: {', '.join(each['name'] for each in found)}")


if __name__ == "__main__":
    main()
