"""Tables 2 and 3 of Rangamani et al. 2019 at full size: how far the Riemannian spectral norm moves under a rescaling.

`python docs/results/rangamani_tables.py` writes `rangamani-tables/results.csv` beside this file and prints it. The paper's
samples are "synthetic" in 784 dimensions with random labels; here they are uniform on [0, 1]. Weights start as torch does.
"""

import csv
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import spiritlevel as sl
from spiritlevel.saved import write_whole

HERE = Path(__file__).parent
COLUMNS = (
    "table",
    "factors",
    "dtype",
    "before",
    "after",
    "relative_difference",
    "plain_norm_before",
    "plain_norm_after",
)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
        nn.Linear(320, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


TABLES = (
    (2, dense, (784,), "5, 4, 1/20"),
    (2, dense, (784,), "100, 30, 1/3000"),
    (3, convolutional, (1, 28, 28), "5, 4, 3, 2, 1/120"),
    (3, convolutional, (1, 28, 28), "50, 24, 30, 1/6, 1/6000"),
)


def rows(samples: int = 500) -> Iterator[tuple[str | int | float, ...]]:
    """One row for every table, transformation and precision: the norm by the paper's Algorithm 1, and the plain one."""
    chosen = [sl.get_measure("riemannian_spectral_norm", method="power"), "hessian_spectral_norm"]
    for table, build, shape, text in TABLES:
        factors = [float(a) / float(b or 1) for a, _, b in (each.partition("/") for each in text.split(", "))]
        for dtype in (torch.float32, torch.float64):
            generator = torch.Generator().manual_seed(0)
            x = torch.rand(samples, *shape, generator=generator, dtype=torch.float64).to(dtype)
            y = torch.randint(0, 10, (samples,), generator=generator)
            torch.manual_seed(0)
            model = build().to(dtype)
            weights = [name for name, parameter in model.named_parameters() if parameter.dim() > 1]
            twin = sl.rescale_layers(model, dict(zip(weights, factors, strict=True)), x[:8])
            reports = [sl.measure(each, (x, y), measures=chosen, tolerance=1e-3) for each in (model, twin)]
            before, after = (report["riemannian_spectral_norm"].value for report in reports)
            plain = (report["hessian_spectral_norm"].value for report in reports)
            yield table, text, str(dtype).removeprefix("torch."), before, after, abs(before - after) / before, *plain


def main() -> None:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows():
        writer.writerow([f"{entry:.9g}" if isinstance(entry, float) else entry for entry in row])
        print(stream.getvalue().splitlines()[-1], file=sys.stderr)
    write_whole(HERE / "rangamani-tables" / "results.csv", stream.getvalue())


if __name__ == "__main__":
    main()
