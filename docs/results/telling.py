"""Pieces of the page of results: a study with its answers, and tables, pictures and numbers as markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spiritlevel.show.drawing import Drawing
from spiritlevel.show.numbers import Numbers, significant
from spiritlevel.study.along import Mark
from spiritlevel.study.correlate import Answers, Contrast
from spiritlevel.study.plan import read_plan
from spiritlevel.study.results import Cell, Study
from spiritlevel.study.show.figures import gap_scatter, interval_text, ranking
from spiritlevel.study.show.labels import GAP_LABELS
from spiritlevel.study.show.page import made_section
from spiritlevel.study.statistics import Estimate

NORMALIZED = "normalized_sharpness(loss=normalized_cross_entropy)"
MATRIX = "matrix_normalized_sharpness(loss=normalized_cross_entropy)"
NAMES = {
    "kappa_trace_sum": "κ_τ, sum over layers",
    "kappa_trace_max": "κ_τ, largest layer",
    "kappa_sum": "κ, sum over layers",
    "kappa_max": "κ, largest layer",
    "rho_sum": "ρ, sum over neurons",
    "rho_max": "ρ, largest neuron",
    "rho_row_sum": "ρ of rows, sum over neurons",
    "hessian_trace": "plain trace of the Hessian",
    "hessian_spectral_norm": "plain spectral norm of the Hessian",
    "riemannian_spectral_norm": "Riemannian spectral norm",
    "riemannian_nodewise_spectral_norm": "Riemannian norm, weight by weight",
    "normalized_sharpness": "normalized sharpness, cross entropy",
    "matrix_normalized_sharpness": "matrix-normalized sharpness",
    "fisher_rao_norm": "Fisher–Rao norm",
    NORMALIZED: "normalized sharpness, the paper's loss (20)",
    MATRIX: "matrix-normalized sharpness, loss (20)",
}
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")
PARTS = ("measured", "excluded", "failed", "unfinished")


@dataclass(frozen=True)
class Told:
    """A study with its answers, and where its pictures go."""

    study: Study
    found: Answers
    folder: Path

    def picture(self, name: str, drawing: Drawing) -> str:
        """The drawing saved under that name, as markdown."""
        drawing.save(self.folder / f"{name}.png")
        return f"![{drawing.title}. {drawing.description}]({self.folder.parent.name}/{self.folder.name}/{name}.png)"

    def r(self, quantity: str, rescaled: bool = False) -> Estimate:
        """Pearson's correlation with the study's gap."""
        row = self.found.row(quantity, self.study.gap, rescaled)
        return Estimate() if row is None else row.pearson

    def tau(self, quantity: str, rescaled: bool = False) -> Estimate:
        row = self.found.row(quantity, self.study.gap, rescaled)
        return Estimate() if row is None else row.kendall

    def at(self, mark: Mark) -> Told:
        """The study at a mark of its trainings."""
        return Told(self.study.at(mark), self.found.along[mark], self.folder)

    def scatter(self, name: str, quantity: str, groups: Sequence[str], label: str = "") -> str:
        gaps = [cell.gap(self.study.gap) for cell in self.study.measured]
        said = f"r {interval_text(self.r(quantity))} · τ {interval_text(self.tau(quantity))}"
        drawing = gap_scatter(
            self.study.column(quantity), gaps, groups, title=label or NAMES[quantity], label=label or NAMES[quantity],
            gap=GAP_LABELS[self.study.gap], said=said, order=sorted(set(groups), key=_by_number),
        )  # fmt: skip
        return self.picture(name, drawing)

    def before_and_after(self, name: str, quantities: Mapping[str, str]) -> str:
        """Pearson's r of every quantity as trained and after the random rescaling."""
        series = {
            text: {label: self.r(quantity, rescaled) for quantity, label in quantities.items()}
            for text, rescaled in (("as trained", False), ("rescaled at random", True))
        }
        return self.picture(name, ranking(series, title="Before and after random rescaling", label="Pearson's r"))

    @property
    def parts(self) -> list[Told]:
        """Network by network; a study of one network is its own part."""
        found = [Told(part, self.found.part(name), self.folder) for name, part in self.study.parts.items()]
        return found or [self]

    @property
    def model(self) -> str:
        """The name of its network."""
        section = self.study.config.get("model")
        named = section.get("name") if isinstance(section, Mapping) else section
        return str(self.study.cells[0].factors.get("model.name") or named)


@dataclass(frozen=True)
class Verdict:
    """A line of the first table: what was found, on how many networks, and what follows."""

    here: str
    networks: str
    verdict: str


def progress(study: Study) -> str:
    """How many networks of the study at its paper's size are finished."""
    ended = sum(bool(cell.training) for cell in study.cells)
    planned = len(read_plan(study.name).cells)
    return f"{ended} of {planned}" + (" so far" if ended < planned else "")


def each_network(told: Told) -> list[str]:
    """Every measured network by itself, where they are too few for coefficients."""
    measured = told.study.measured
    if not measured:
        return ["No network is finished yet."]
    names = told.study.quantities(layers=False)
    head = ("network", "train loss", "train accuracy", GAP_LABELS[told.study.gap], *(NAMES.get(n, n) for n in names))
    rows = tuple(
        (
            _place_text(cell),
            significant(cell.trained("train_loss"), 2),
            f"{cell.trained('train_accuracy'):.2%}",
            f"{cell.gap(told.study.gap):.3g}",
            *(significant(cell.measures[name].value, 3) if name in cell.measures else "–" for name in names),
        )
        for cell in measured
    )
    return ["Too few networks for coefficients and figures; one by one:", "", *markdown(Numbers(head, rows))]


def _place_text(cell: Cell) -> str:
    """Where a network stands in the grid, in words."""
    words = {key: key.rpartition(".")[2].replace("_", " ") + " " for key in cell.coordinates} | {"model.name": ""}
    return ", ".join(f"{words[key]}{value}" for key, value in cell.coordinates.items())


def measured_text(count: int) -> str:
    return f"{count} network{'' if count == 1 else 's'} measured"


def correlations(told: Told, rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """r of every quantity beside the paper's, after rescaling, given the train loss, and τ."""
    columns = ("measure", "r in the paper", "r here", "after rescaling", "given the train loss", "Kendall's τ here")
    made = [f"| {' | '.join(columns)} |", "|---|---|---|---|---|---|"]
    for words, paper, quantity in rows:
        row = told.found.row(quantity, told.study.gap)
        given = Estimate() if row is None else row.partial_pearson
        after = told.r(quantity, rescaled=True)
        numbers = (bold(told.r(quantity)), *map(text, (after, given, told.tau(quantity))))
        made.append(f"| {words} | {paper} | {' | '.join(numbers)} |")
    return made


def by_level(told: Told, rows: Sequence[tuple[str, str]]) -> list[str]:
    """r with the gap at every level of the train loss that enough networks came to, and at the end."""
    marks = [mark for mark in told.study.marks if len(told.at(mark).study.measured) >= 3]
    counts = [f"{mark} ({len(told.at(mark).study.measured)})" for mark in marks]
    columns = ("measure", *counts, f"the end ({len(told.study.measured)})")
    made = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for words, quantity in rows:
        found = [*(text(told.at(mark).r(quantity)) for mark in marks), text(told.r(quantity))]
        made.append(f"| {words} | {' | '.join(found)} |")
    return made


def ratio(found: Contrast | None) -> str:
    """A ratio of geometric means with its interval."""
    if found is None or not found.times.known:
        return "–"
    times = found.times
    ends = f" [{significant(times.low, 2)}, {significant(times.high, 2)}]" if times.bounded else ""
    return significant(times.value, 2) + ends


def layers(study: Study, base: str) -> list[str]:
    """The layers of a measure, from the input to the output."""
    return [name[len(base) + 1 : -1] for name in study.quantities(layers=True) if name.startswith(f"{base}[")]


def batch_text(cell: Cell) -> str:
    return f"batch {cell.factors['training.batch_size']}"


def _by_number(words: str) -> float:
    found = re.search(r"[\d.]+", words)
    return float(found[0]) if found else -1.0


def mean_text(values: Sequence[float], digits: int) -> str:
    if not values:
        return "–"
    spread = f" ± {significant(float(np.std(values, ddof=1)), 2)}" if len(values) > 1 else ""
    return significant(float(np.mean(values)), digits) + spread


def text(found: Estimate) -> str:
    return interval_text(found) if found.known else "–"


def bold(found: Estimate) -> str:
    value, bracket, ends = text(found).partition(" ")
    return f"**{value}**{bracket}{ends}"


def markdown(table: Numbers) -> list[str]:
    rows = [[cell.replace("|", "\\|") for cell in row] for row in ([*table.columns], ["---"] * len(table.columns), *table.texts())]  # fmt: skip
    return [f"| {' | '.join(row)} |" for row in rows]


def side_by_side(*pictures: str) -> list[str]:
    pairs = [pictures[i : i + 2] for i in range(0, len(pictures), 2)]
    texts = [f"| {' | '.join(picture.replace('|', '∣') for picture in pair)} |" for pair in pairs]
    return [texts[0], "|---|---|", *texts[1:]] if len(pictures) > 1 else list(pictures)


def made(told: Told) -> list[str]:
    """How many networks, on what, and what differs from the built-in study at its paper's size."""
    study = told.study
    count = Counter(cell.status for cell in study.cells)
    states = ", ".join(f"{count[part]} {part}" for part in PARTS if count[part])
    environment = study.config.get("environment") or {}
    where = ", ".join(f"{key} {value}" for key, value in environment.items())
    changed = dict(made_section(study, told.found).tables).get("Different from the built-in study of this name")
    lines = [
        f"**{len(study.cells)} networks: {states}.** spiritlevel {study.version}{f'; {where}' if where else ''}.",
        "",
    ]
    rows = [] if changed is None else [row for row in changed.rows if not str(row[0]).startswith("environment.")]
    if rows:
        lines += [*markdown(Numbers(("setting", "here", "the built-in study"), tuple(rows))), ""]
    for status in ("excluded", "failed"):
        lines += [f"- {status}: {line}" for line in reasons(cell for cell in study.cells if cell.status == status)]
    return [*lines, ""] if count["excluded"] + count["failed"] else lines


def reasons(cells: Iterable[Cell]) -> list[str]:
    """Why networks were not measured: those of one place in the grid and with one reason together, their numbers from least to largest."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    for cell in cells:
        place = ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in cell.factors.items())
        words = NUMBER.sub("{}", cell.reason.replace("{", "(").replace("}", ")"))
        found.setdefault((place, words), []).append([float(number) for number in NUMBER.findall(cell.reason)])
    return [
        f"{len(numbers)} × {place}: {words.format(*map(_span, zip(*numbers, strict=True)))}"
        for (place, words), numbers in found.items()
    ]


def _span(numbers: Sequence[float]) -> str:
    least, largest = (significant(number, 3) for number in (min(numbers), max(numbers)))
    return least if least == largest else f"{least} to {largest}"
