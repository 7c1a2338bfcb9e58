"""Whitened flatness while a network learns x + y mod p, long after it knows its training data by heart: one picture.

    python docs/results/grokking.py                          # writes docs/images/grokking.png, a minute on one core
    python docs/results/grokking.py quick.png --quick        # p = 7 and 60 steps, to see that it runs

Both numbers are looked up in one embedding and read by one hidden layer of ReLU neurons, which AdamW trains on all of the
training pairs at once. Flatness is measured on the training pairs; it never sees the others. Under cross entropy it falls as the
network grows certain of its answers; under normalized cross entropy the size of the outputs plays no part.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import spiritlevel as sl
from spiritlevel.show.drawing import DASHES, series_colour, style

PICTURE = Path(__file__).parents[1] / "images" / "grokking.png"
MEASURE = "whitened_flatness"
LOSSES = {"cross_entropy": "cross entropy", "normalized_cross_entropy": "normalized cross entropy"}
SHOWN = (0, 100, 200, 400, 800, 1200, 2000)


@dataclass(frozen=True)
class Setting:
    """Which sums are learned, by how large a network, for how long."""

    p: int = 31
    width: int = 32
    hidden: int = 128
    steps: int = 2000
    every: int = 50


QUICK = Setting(p=7, width=4, hidden=12, steps=60, every=20)


@dataclass(frozen=True)
class Followed:
    """A training as it went: flatness under both losses, and at the same steps the share of right answers."""

    histories: dict[str, sl.History]
    trained: list[float]
    tested: list[float]


def sums(p: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """All pairs with their sums modulo p: three fifths to train on, the others to test."""
    pairs = torch.cartesian_prod(torch.arange(p), torch.arange(p))
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))
    known, new = order.split([3 * len(pairs) // 5, len(pairs) - 3 * len(pairs) // 5])
    answers = pairs.sum(1) % p
    return (pairs[known], answers[known]), (pairs[new], answers[new])


def network(setting: Setting) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Embedding(setting.p, setting.width),
            nn.Flatten(),
            nn.Linear(2 * setting.width, setting.hidden),
            nn.ReLU(),
            nn.Linear(setting.hidden, setting.p),
        ).double()


@torch.no_grad()
def right(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    return float((model(data[0]).argmax(1) == data[1]).double().mean())


def follow(setting: Setting) -> Followed:
    known, new = sums(setting.p)
    model = network(setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5, betas=(0.9, 0.98))
    trackers = {loss: sl.Tracker(model, known, loss, measures=[MEASURE], every=setting.every) for loss in LOSSES}
    trained, tested = [], []
    for step in range(setting.steps + 1):
        for tracker in trackers.values():
            tracker.step(step)
        if step % setting.every == 0:
            trained.append(right(model, known))
            tested.append(right(model, new))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(known[0]), known[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return Followed({loss: tracker.history for loss, tracker in trackers.items()}, trained, tested)


def draw(found: Followed, path: Path) -> None:
    shares = {"training pairs": found.trained, "test pairs": found.tested}
    with style():
        figure = Figure(figsize=(7.2, 5.4), layout="constrained")
        above, *below = figure.subplots(1 + len(LOSSES), 1, sharex=True)
        for number, (label, share) in enumerate(shares.items()):
            steps = [point.step for point in found.histories["cross_entropy"]]
            above.plot(steps, share, linestyle=DASHES[number], color=series_colour(number), label=label)
        above.set_ylabel("right answers")
        above.legend(loc="center right")
        for number, (axes, (loss, words)) in enumerate(zip(below, LOSSES.items(), strict=True), start=2):
            at, values, _ = found.histories[loss].series(MEASURE)
            axes.plot(at, values, color=series_colour(number))
            axes.set_title(f"whitened flatness under {words}", fontsize=9)
        below[0].set_yscale("log")
        below[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        below[-1].set_xlabel("step")
        figure.savefig(path, dpi=160, facecolor="white", metadata={"Software": None})


def table(found: Followed) -> str:
    """Some of the steps, as a table in Markdown."""
    flat = " | ".join(f"`{MEASURE}`, {words}" for words in LOSSES.values())
    lines = [f"| step | training pairs | test pairs | loss | {flat} |", "| --- " * 6 + "|"]
    for *points, trained, tested in zip(*found.histories.values(), found.trained, found.tested, strict=True):
        if points[0].step in SHOWN:
            shares = f"{100 * trained:.0f} % | {100 * tested:.0f} % | {points[0].loss:.2g}"
            values = " | ".join(f"{point[MEASURE].value:.3g}" for point in points)
            lines.append(f"| {points[0].step} | {shares} | {values} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", nargs="?", type=Path, default=PICTURE)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    found = follow(QUICK if options.quick else Setting())
    draw(found, options.picture)
    print(table(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
