"""The demo: small batches against large ones on handwritten digits, and a twin that looks a million times sharper.

Two networks start from the same weights and are trained with the same learning rate to the same loss; only the size of
their batches differs. The flatter one is then rescaled, layer by layer, into a twin: no output changes, and the plain
Hessian norm is a million times larger.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from torch import Tensor, nn
from torch.nn import functional as F

from spiritlevel.attack.attack import Attack, sharpen
from spiritlevel.measuring.registry import known_records
from spiritlevel.measuring.report import Report
from spiritlevel.measuring.run import measure
from spiritlevel.saved import write_whole
from spiritlevel.show.answer import answer, difference, invariant_names, plain_names
from spiritlevel.show.drawing import DASHES, MARKERS, Drawing, series_colour, style
from spiritlevel.show.numbers import Numbers, power_of_ten, significant, times
from spiritlevel.show.page import report_page
from spiritlevel.show.sections import Section
from spiritlevel.subjects.checkpoint import save_checkpoint
from spiritlevel.subjects.data import Dataset, load_data
from spiritlevel.subjects.networks import build_model

Listen = Callable[[str, float], None]

NETWORK = "mlp:64-32"
SMALL, LARGE, TWIN = "small batch", "large batch", "twin"


@dataclass(frozen=True)
class Settings:
    """What the demo does, at its own size by default.

    Attributes:
        seed: For the starting weights and the order of the samples.
        batch: Samples a step of the small-batch network; the other one takes all of them.
        learning_rate: Of plain gradient descent, for both networks.
        target: Both are trained until the loss over all training data is below this.
        sharper: How many times larger the twin's plain Hessian norm is to be.
        tolerance: Relative accuracy of what is not exact.
        steps_along: How many rescaled networks the picture shows between the network and its twin.
    """

    seed: int = 0
    batch: int = 16
    learning_rate: float = 0.1
    target: float = 0.01
    sharper: float = 1e6
    tolerance: float = 1e-6
    steps_along: int = 5


@dataclass(frozen=True)
class Trained:
    """A network at the end of its training."""

    model: nn.Module
    batch: int
    steps: int
    loss: float
    train_accuracy: float
    test_accuracy: float


@dataclass(frozen=True)
class Demo:
    """What the demo found.

    Attributes:
        trained: The two networks by name.
        reports: Their measures and those of the twin.
        flatter: The name of the network with the twin.
        attack: How it was rescaled; `attack.model` is the twin, in float64.
        path: Largest factor → measures of the networks on the way from the flatter network to its twin.
        test_samples: How many images the test accuracy is taken over.
    """

    trained: Mapping[str, Trained]
    reports: Mapping[str, Report]
    flatter: str
    attack: Attack
    path: Mapping[float, Report]
    test_samples: int

    @property
    def changes(self) -> dict[str, float]:
        """Every invariant measure → the relative difference between the flatter network and its twin."""
        before, after = self.reports[self.flatter], self.reports[TWIN]
        names = invariant_names(self.reports, known_records())
        return {name: difference(before[name].value, after[name].value) for name in names}

    @property
    def growth(self) -> dict[str, float]:
        """Every plain measure → how many times larger it is on the twin."""
        before, after = self.reports[self.flatter], self.reports[TWIN]
        return {name: after[name].value / before[name].value for name in plain_names(self.reports, known_records())}


def run_demo(settings: Settings | None = None, listen: Listen = lambda _stage, _passes: None) -> Demo:
    """Train, measure, rescale, measure again. One thread: these networks are too small to share out."""
    settings = settings or Settings()
    with one_thread():
        data, test = load_data("digits"), load_data("digits", split="test")
        trained = {
            SMALL: train(
                data, test, settings.batch, settings, lambda loss: listen(f"training, {SMALL}: loss {loss}", 0)
            ),
            LARGE: train(data, test, len(data), settings, lambda loss: listen(f"training, {LARGE}: loss {loss}", 0)),
        }
        models = {name: copy.deepcopy(each.model).double() for name, each in trained.items()}
        meter = _Meter(data, settings.tolerance, listen)
        reports = {name: meter.report(model, f"measuring {name}") for name, model in models.items()}
        flatter = min(reports, key=lambda name: reports[name]["normalized_sharpness"].value)
        attack = meter.sharper_twin(models[flatter], reports[flatter], settings.sharper)
        reports[TWIN] = meter.report(attack.model, f"measuring the {TWIN}")
        path = meter.path(models[flatter], attack, reports[flatter], reports[TWIN], settings.steps_along)
    return Demo(trained, reports, flatter, attack, path, len(test))


def train(data: Dataset, test: Dataset, batch: int, settings: Settings, listen: Callable[[str], None]) -> Trained:
    """Plain gradient descent on batches of `batch` samples until the loss over all data is below the target."""
    model = build_model(NETWORK, input_shape=data.input_shape, classes=data.classes, seed=settings.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.learning_rate)
    steps, loss = 0, float("inf")
    for chosen in _batches(len(data), batch, settings.seed):
        optimizer.zero_grad()
        F.cross_entropy(model(data.x[chosen]), data.y[chosen]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        steps += 1
        if steps % 20 == 0:
            with torch.no_grad():
                loss = float(F.cross_entropy(model(data.x), data.y))
            listen(f"{loss:.4f}")
            if loss < settings.target:
                break
    return Trained(model, batch, steps, loss, accuracy(model, data), accuracy(model, test))


def _batches(count: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Without end: every sample once in random order, then again in another."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(count, generator=generator)
        yield from (order[start : start + batch] for start in range(0, count, batch))


def accuracy(model: nn.Module, data: Dataset) -> float:
    """The share of samples whose largest output is their label."""
    with torch.no_grad():
        return float((model(data.x).argmax(1) == data.y).double().mean())


class _Meter:
    """Measures networks on the training data, in double precision so that twins can agree to many digits."""

    def __init__(self, data: Dataset, tolerance: float, listen: Listen) -> None:
        self._x, self._y = data.x.double(), data.y
        self._tolerance, self._listen = tolerance, listen

    def report(self, model: nn.Module, stage: str, names: list[str] | None = None) -> Report:
        return measure(
            model,
            (self._x, self._y),
            "cross_entropy",
            measures=names,
            tolerance=self._tolerance,
            progress=lambda name, passes: self._listen(f"{stage}: {name}", passes),
        )

    def sharper_twin(self, model: nn.Module, report: Report, times: float) -> Attack:
        """The network rescaled until its plain Hessian norm is at least `times` as large."""
        self._listen(f"building the {TWIN}", 0)
        return sharpen(model, (self._x, self._y), "cross_entropy", target=times * report["hessian_spectral_norm"].value)

    def path(self, model: nn.Module, attack: Attack, first: Report, last: Report, between: int) -> dict[float, Report]:
        """Largest factor → report, for the network, some between it and its twin, and the twin."""
        found = {1.0: first}
        for i in range(1, between + 1):
            share = i / (between + 1)
            rescaled = (attack.rescaling**share).apply(model)
            found[_largest_factor(attack) ** share] = self.report(rescaled, f"measuring on the way, {i} of {between}")
        return {**found, _largest_factor(attack): last}


def _largest_factor(attack: Attack) -> float:
    return max(attack.factors.values())


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread inside, as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- what to say about it -----------------------------------------------------------------------------------------


def training_words(demo: Demo) -> str:
    """How the two networks came about, and how well they do."""
    small, large = demo.trained[SMALL], demo.trained[LARGE]
    images = round(abs(small.test_accuracy - large.test_accuracy) * demo.test_samples)
    apart = "the same" if images == 0 else f"{images} image{'' if images == 1 else 's'} of {demo.test_samples} apart"
    return (
        f"Two networks started from the same weights and took steps of the same learning rate until the loss on the "
        f"{large.batch:,} training images was down to {_both(f'{small.loss:.2g}', f'{large.loss:.2g}')}: “{SMALL}” with "
        f"{small.batch} images a step ({small.steps:,} steps), “{LARGE}” with all of them ({large.steps:,} steps). Right "
        f"on training images: {_both(_percent(small.train_accuracy), _percent(large.train_accuracy))}; on test images: "
        f"{_both(_percent(small.test_accuracy), _percent(large.test_accuracy))}, {apart}."
    )


def twin_words(demo: Demo) -> str:
    """What the twin is, and which measures noticed."""
    attack, changes = demo.attack, demo.changes
    weights = [name for name, tensor in attack.model.named_parameters() if tensor.dim() > 1]
    moved = {name: attack.factors[name] for name in weights if abs(attack.factors.get(name, 1.0) - 1) > 1e-9}
    layers = " and ".join(
        f"{name} {'multiplied' if factor > 1 else 'divided'} by {significant(max(factor, 1 / factor), 4)}"
        for name, factor in moved.items()
    )
    return (
        f"The twin is “{demo.flatter}” with {layers}. Its outputs differ by {significant(attack.output_change, 1)} of the "
        f"largest, which is rounding; its plain Hessian norm is {demo.growth['hessian_spectral_norm']:,.0f} times larger, "
        f"and none of the {len(changes)} invariant measures moved by more than {significant(max(changes.values()), 1)} "
        "relative."
    )


def verdict_words(demo: Demo) -> str:
    """Which network is flatter, by whom."""
    return answer({name: demo.reports[name] for name in (SMALL, LARGE)})[0]


def _both(small: str, large: str) -> str:
    return small if small == large else f"{small} (small) and {large} (large)"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def change_table(demo: Demo) -> Numbers:
    """Every measure on the network and on its twin, plain ones first, with what became of it."""
    before, after = demo.reports[demo.flatter], demo.reports[TWIN]
    grown = {name: f"{times(ratio)} larger" for name, ratio in demo.growth.items()}
    moved = {name: significant(change, 1) if change else "none" for name, change in demo.changes.items()}
    rows = tuple((name, before[name].value, after[name].value, text) for name, text in (grown | moved).items())
    return Numbers(("measure", demo.flatter, TWIN, "relative change"), rows)


def picture(demo: Demo) -> Drawing:
    """Measures along the rescaling, relative to where it starts: the plain ones climb, the invariant ones do not."""
    start, reports = demo.path[1.0], demo.path.values()
    lines = {name: [report[name].value / start[name].value for report in reports] for name in demo.growth}
    level = [max(report[name].value / start[name].value for name in demo.changes) for report in reports]
    other = LARGE if demo.flatter == SMALL else SMALL
    ratios = [demo.reports[other][name].value / start[name].value for name in demo.changes]
    with style():
        figure = Figure(figsize=(4.7, 3.0), layout="constrained")
        axes = figure.add_subplot()
        for i, (name, heights) in enumerate(lines.items(), start=1):
            axes.loglog(list(demo.path), heights, **_look(i), label=f"{name}, plain")
        between = f"invariant measures of “{other}”"
        axes.axhspan(min(ratios), max(ratios), color=series_colour(3), alpha=0.25, lw=0, label=between)
        axes.loglog(list(demo.path), level, **_look(0), lw=2.2, label=f"all {len(demo.changes)} invariant measures")
        axes.set_xlabel("α: one layer multiplied by it, another divided")
        axes.set_ylabel(f"relative to “{demo.flatter}”")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: _power_text(value)))
        axes.minorticks_off()
        axes.legend(loc="upper left")
    rows = tuple((place, *(lines[name][i] for name in lines), level[i]) for i, place in enumerate(demo.path))
    words = (
        f"From “{demo.flatter}” on the left to its twin on the right the plain measures climb to "
        f"{max(map(max, lines.values())):,.0f} times their value, while all invariant measures stay on one level line. "
        f"A band shows where the invariant measures of “{other}” lie. Every point of a line computes the same function."
    )
    table = Numbers(("α", *lines, "largest invariant"), rows)
    return Drawing(figure, table, "One function, many weights: what each measure makes of it", words)


def _look(index: int) -> dict[str, Any]:
    return {"color": series_colour(index), "marker": MARKERS[index], "ls": DASHES[index]}


def _power_text(value: float) -> str:
    return f"{value:g}" if 0.01 <= value <= 1000 else power_of_ten(round(math.log10(value)))


def demo_page(demo: Demo) -> str:
    """The page: the answer, every measure of the three networks, and the picture of the twin."""
    section = Section(
        "twin",
        "The same function, a million times sharper",
        (training_words(demo), twin_words(demo)),
        (picture(demo),),
        (("What the rescaling did to every measure", change_table(demo)),),
    )
    return report_page(demo.reports, title="Small batch, large batch and a twin", audit=section)


def write_demo(demo: Demo, folder: Path) -> Path:
    """The page, the picture and the weights of the three networks in `folder`; returns the page's path."""
    models = {**{name: each.model for name, each in demo.trained.items()}, TWIN: demo.attack.model}
    for name, model in models.items():
        save_checkpoint(model, folder / f"{name.replace(' ', '-')}.safetensors")
    with style():
        picture(demo).figure.savefig(folder / "picture.png", dpi=200, facecolor="white")
    page = folder / "report.html"
    write_whole(page, demo_page(demo))
    return page
