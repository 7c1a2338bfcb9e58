"""Two trainings at the edge of stability, drawn: full-batch gradient descent and Adam on 20 points of a polynomial.

    python -m benchmarks.edge_of_stability docs/images/edge-of-stability.png

The sharpness that an optimizer feels rises until its steps no longer shrink on a quadratic of that sharpness, and stays there:
λ_max(H) at 2/η for gradient descent, λ_max(P⁻¹H) at 38/η for Adam with β₁ = 0.9 (Cohen et al. 2021 and 2022).
"""

from __future__ import annotations

import sys

import torch
from matplotlib.figure import Figure
from torch import nn

import spiritlevel as sl
from spiritlevel.show.drawing import style

DESCENT, ADAM = "hessian_largest_eigenvalue", "preconditioned_largest_eigenvalue"


def followed(
    measure: str, rate: float, steps: int, *, degree: int, every: int, first: int = 0, width: int = 50
) -> sl.History:
    """A tanh network on a Chebyshev polynomial of that degree, trained on all 20 points at once; tracked from `first` on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        model = nn.Sequential(*layers).double()
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
    y = torch.cos(degree * torch.arccos(x))
    kind = torch.optim.SGD if measure == DESCENT else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=rate)
    tracker = sl.Tracker(model, (x, y), "mse", measures=[measure], optimizer=optimizer, every=every)
    for step in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step >= first:
            tracker.step(step, loss=loss)
    return tracker.history


def draw(path: str) -> None:
    with style():
        figure = Figure(figsize=(9.4, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        descents = {f"η = {rate}": followed(DESCENT, rate, 6000, degree=3, every=100) for rate in (0.06, 0.03)}
        sl.plot.history(descents, DESCENT, axes=left)
        sl.plot.history({"η = 0.0003": followed(ADAM, 3e-4, 10_000, degree=4, every=150)}, ADAM, axes=right)
        left.set_title("gradient descent: λ_max(H) and 2/η", fontsize=9)
        right.set_title("Adam: λ_max(P⁻¹H) and 38/η", fontsize=9)
        figure.savefig(path, dpi=160, facecolor="white", metadata={"Software": None})


if __name__ == "__main__":
    torch.set_num_threads(1)
    draw(sys.argv[1])
