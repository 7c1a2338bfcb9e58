"""The pictures of Dinh et al. 2017, computed: `python docs/results/dinh.py` writes them into `dinh/` beside this file.

Figures 2 to 4 of the paper are sketches in a plane (θ₁, θ₂). Here the plane is that of a network with two weights,
f(x) = θ₂·relu(θ₁x), and what is drawn is its loss. Figure 5 is a loss of one parameter in four coordinates. The last
picture is the rescaling of Figure 4 on a network that was trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Circle, Polygon
from torch import nn

import spiritlevel as sl
from spiritlevel.landscape import landscape
from spiritlevel.show.drawing import INK, Drawing, series_colour, style
from spiritlevel.show.numbers import significant
from spiritlevel.subjects.data import load_data

HERE = Path(__file__).parent
SIZE, POINTS = 4.0, 61
X = torch.linspace(0.2, 1.4, 40, dtype=torch.float64)[:, None]  # inputs, and the outputs wanted
RADIUS, STRETCH = 0.18, 1.9  # of Figure 3's boxes: their half width, and the α that separates them


def network(first: float, second: float) -> nn.Module:
    """f(x) = θ₂·relu(θ₁x)."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)).double()
    with torch.no_grad():
        model[0].weight.fill_(first)
        model[2].weight.fill_(second)
    return model


@cache
def loss_over_weights() -> landscape.Surface:
    """The loss of the network over its two weights, from 0 to SIZE."""
    # From the origin towards (1, 0) and (0, 1): the steps are the weights themselves.
    axes = (network(1.0, 0.0), network(0.0, 1.0))
    found = landscape.surface(network(0.0, 0.0), (X, X), "mse", directions=axes, span=(0.0, SIZE), points=POINTS)
    # Far from the valley the loss says nothing more.
    return replace(found, losses=found.losses.clamp(max=2.0))


def plane(draw: Callable[[Axes], None], title: str, description: str) -> Drawing:
    """The loss over the two weights with more drawn on it."""
    drawing = sl.plot.surface(loss_over_weights(), title=title)
    axes = drawing.figure.axes[0]
    with style():
        # The cross at the origin, which is no minimum here, and the heights of the contours, which would cover what is drawn.
        for mark in [*axes.lines, *axes.texts]:
            mark.remove()
        draw(axes)
        axes.set(xlabel="θ₁", ylabel="θ₂", xlim=(0.02, SIZE), ylim=(0.02, SIZE))
    return replace(drawing, description=description)


def orbits(axes: Axes) -> None:
    """Figure 2: every line holds the networks that compute one function."""
    for index, product in enumerate((0.35, 1.0, 2.0)):
        theta = np.geomspace(product / SIZE, SIZE, 200)
        axes.plot(theta, product / theta, color="white", linewidth=3.4)
        axes.plot(theta, product / theta, color=series_colour(index), linewidth=1.8, linestyle=("-", "--", ":")[index],
                  label=f"θ₁θ₂ = {product:g}")  # fmt: skip
    axes.legend(loc="upper right", facecolor="white", framealpha=0.9, frameon=True)


def boxes(axes: Axes) -> None:
    """Figure 3: a box around a minimum and its images, disjoint, of one volume and one loss."""
    corners = np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * RADIUS + 1.0
    for power in range(-3, 4):
        alpha = STRETCH**power
        image = corners * (alpha, 1 / alpha)
        axes.add_patch(Polygon(image, facecolor=series_colour(0), edgecolor="white", alpha=0.75, linewidth=1.0))
        x, y = alpha, 1 / alpha
        if 0.2 < x < SIZE - 0.3 and y < SIZE:
            text = {0: "B", 1: "Tα B", 2: "Tα² B", -1: "Tα⁻¹ B", -2: "Tα⁻² B"}[power]
            axes.annotate(text, (min(x + 0.15, SIZE - 0.5), min(y + 0.3, SIZE - 0.3)), fontsize=8,
                          bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1})  # fmt: skip


def circles(axes: Axes) -> None:
    """Figure 4: two networks of one function, and the same ball around each."""
    radius, alpha = 0.3, 3.2
    theta = np.geomspace(1 / SIZE, SIZE, 200)
    axes.plot(theta, 1 / theta, color="white", linewidth=1.6, linestyle="--")
    for index, (factor, name) in enumerate(((1.0, "θ"), (alpha, "θ′ = Tα θ"))):
        x, y = factor, 1 / factor
        axes.add_patch(Circle((x, y), radius, facecolor="none", edgecolor="white", linewidth=3.2))
        axes.add_patch(Circle((x, y), radius, facecolor="none", edgecolor=series_colour(index), linewidth=1.8,
                              linestyle=("-", "--")[index]))  # fmt: skip
        axes.plot([x], [y], "os"[index], color=series_colour(index), markeredgecolor="white", markersize=6)
        report = sl.measure(network(x, y), (X, X), "mse", measures=["hessian_spectral_norm"])
        norm = report["hessian_spectral_norm"].value
        axes.annotate(f"{name}\n‖H‖ = {significant(norm, 2)}", (x, y + radius + 0.12), ha="center", fontsize=8,
                      bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": INK, "linewidth": 0.4, "pad": 2})  # fmt: skip


def attack() -> Drawing:
    """Measures of a network trained on the digits, along T_α."""
    data = load_data("digits")
    x, y = data.x.flatten(1).double(), data.y
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return sl.plot.attack(model, (x, y))


def main() -> None:
    valley = "The loss is zero along the hyperbola θ₁θ₂ = 1 and grows away from it."
    made = {
        "figure-2": plane(orbits, "Lines of one function", f"{valley} Three hyperbolas are drawn; along each the function is the same while the valley narrows and widens."),
        "figure-3": plane(boxes, "Boxes of one volume along a valley", f"{valley} A square around the minimum (1, 1) and its images under T_α lie along the valley without touching each other; all have the same area."),
        "figure-4": plane(circles, "Two equivalent networks, one sharper", f"{valley} Two circles of one radius: around (1, 1) the loss stays small, around its twin near θ₂ = 0 the circle reaches across the valley."),
        "figure-5": sl.plot.reparametrizations(),
        "attack": attack(),
    }  # fmt: skip
    for name, drawing in made.items():
        drawing.save(HERE / "dinh" / f"{name}.png")
        print(name, drawing.description)
        if name in ("figure-5", "attack"):
            print(drawing.table.columns, *drawing.table.texts(), sep="\n")


if __name__ == "__main__":
    main()
