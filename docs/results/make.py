"""The tables, figures and csv files of `docs/results.md`, from the folders of studies.

`python docs/results/make.py FOLDER…` writes into `docs/results/STUDY/` and replaces what stands on the page between
`<!-- begin STUDY -->` and `<!-- end STUDY -->`. A study that still runs is told as far as it has come.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spiritlevel.saved import write_whole
from spiritlevel.show.drawing import Drawing
from spiritlevel.show.numbers import Numbers, seconds_text, significant
from spiritlevel.study.correlate import Answers, Contrast, answers, contrasts, correlations_csv
from spiritlevel.study.csv_tables import results_csv
from spiritlevel.study.results import Cell, Study, read_study
from spiritlevel.study.show.figures import ByLevel, boxes, gap_scatter, interval_text, lines, ranking
from spiritlevel.study.show.labels import GAP_LABELS
from spiritlevel.study.show.page import made_section
from spiritlevel.study.statistics import FEWEST, Estimate

PAGE = Path(__file__).resolve().parents[1] / "results.md"
PARTS = ("measured", "excluded", "failed", "unfinished")
NORMALIZED = "normalized_sharpness(loss=normalized_cross_entropy)"
MATRIX = "matrix_normalized_sharpness(loss=normalized_cross_entropy)"
NAMES = {
    "kappa_trace_sum": "κ_τ, sum over layers",
    "kappa_trace_max": "κ_τ, largest layer",
    "kappa_sum": "κ, sum over layers",
    "kappa_max": "κ, largest layer",
    "rho_sum": "ρ, sum over neurons",
    "rho_max": "ρ, largest neuron",
    "hessian_trace": "plain trace of the Hessian",
    "hessian_spectral_norm": "plain spectral norm of the Hessian",
    "riemannian_spectral_norm": "Riemannian spectral norm",
    "normalized_sharpness": "normalized sharpness, cross entropy",
    NORMALIZED: "normalized sharpness, the paper's loss (20)",
    MATRIX: "matrix-normalized sharpness, loss (20)",
}


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
        found = [Told(part, self.found.parts[name], self.folder) for name, part in self.study.parts.items()]
        return found or [self]


# --- the studies ---------------------------------------------------------------------------------------------------


def petzka_mnist(told: Told) -> list[str]:
    hidden = _layers(told.study, "kappa_trace")[:-1]
    wide = ("kappa_trace_sum", "kappa_trace_max", "rho_sum", "rho_max")
    rows = [(f"κ_τ, hidden layer {i}", "≥ 0.7", f"kappa_trace[{name}]") for i, name in enumerate(hidden, 1)]
    rows += [(f"ρ_σ, hidden layer {i}", "“significant”", f"rho_sum[{name}]") for i, name in enumerate(hidden, 1)]
    rows += [(f"ρ, hidden layer {i}", "“significant”", f"rho_max[{name}]") for i, name in enumerate(hidden, 1)]
    rows += [(NAMES[name], "larger than any layer's", name) for name in wide]
    rows += [(NAMES[name], "not given", name) for name in ("kappa_sum", "kappa_max")]
    rows += [(NAMES[name], "not given", name) for name in ("hessian_trace", "hessian_spectral_norm")]
    shown = {f"kappa_trace[{name}]": f"κ_τ, layer {i}" for i, name in enumerate(hidden, 1)}
    shown |= {f"hessian_trace[{name}]": f"plain trace, layer {i}" for i, name in enumerate(hidden, 1)}
    shown |= {name: NAMES[name] for name in (*wide, "hessian_trace", "hessian_spectral_norm")}
    batches = [_batch(cell) for cell in told.study.measured]
    best = max(hidden, key=lambda name: told.r(f"kappa_trace[{name}]").value)
    return [
        *_correlations(told, rows),
        "",
        *_side_by_side(
            told.scatter("kappa-trace-sum", "kappa_trace_sum", batches),
            told.scatter(
                "kappa-trace-layer",
                f"kappa_trace[{best}]",
                batches,
                f"κ_τ of hidden layer {hidden.index(best) + 1} ({best.removesuffix('.weight')})",
            ),
            told.before_and_after("rescaling", shown),
            told.scatter("hessian-trace", "hessian_trace", batches),
        ),
    ]


def petzka_cifar10(told: Told) -> list[str]:
    last, output = _layers(told.study, "kappa_trace")[-2:]
    ends = ((last, "last hidden layer"), (output, "output layer"))
    rows = [(f"κ_τ, {words} (`{name}`)", "0.91", f"kappa_trace[{name}]") for name, words in ends]
    rows += [(f"κ, {words} (`{name}`)", "“significant”, weaker", f"kappa[{name}]") for name, words in ends]
    rows += [
        (f"plain trace, {words} (`{name}`)", "“very weak” after", f"hessian_trace[{name}]") for name, words in ends
    ]
    rows += [
        (NAMES[name], "not given", name)
        for name in (
            "kappa_trace_sum",
            "kappa_trace_max",
            "rho_sum",
            "rho_max",
            "hessian_trace",
            "hessian_spectral_norm",
        )
    ]
    shown = {f"kappa_trace[{name}]": f"κ_τ, {words}" for name, words in ends}
    shown |= {f"hessian_trace[{name}]": f"plain trace, {words}" for name, words in ends}
    shown |= {name: NAMES[name] for name in ("kappa_trace_sum", "rho_sum", "hessian_trace", "hessian_spectral_norm")}
    batches = [_batch(cell) for cell in told.study.measured]
    return [
        *_correlations(told, rows),
        "",
        *_side_by_side(
            told.scatter(
                "kappa-trace-layer", f"kappa_trace[{last}]", batches, f"κ_τ of the last hidden layer ({last})"
            ),
            told.before_and_after("rescaling", shown),
        ),
    ]


def tsuzuku(told: Told) -> list[str]:
    measures = (NORMALIZED, MATRIX, "normalized_sharpness", "hessian_trace")
    made: list[str] = []
    for part in told.parts:
        model = str(part.study.cells[0].factors["model.name"])
        kind = model.partition(":")[0]
        reached = [cell.trained("train_accuracy") for cell in part.study.measured]
        made += [
            f"**{model}**, {len(reached)} networks, lowest train accuracy {min(reached, default=float('nan')):.1%}:",
            "",
            "| measure | r with the gap | Kendall's τ | Spearman given the train loss |",
            "|---|---|---|---|",
        ]
        for name in measures:
            row = part.found.row(name, part.study.gap)
            given = Estimate() if row is None else row.partial_spearman
            made.append(f"| {NAMES[name]} | {_bold(part.r(name))} | {_text(part.tau(name))} | {_text(given)} |")
        noise = [_share(cell) for cell in part.study.measured]
        made += ["", *_side_by_side(
            part.scatter(f"{kind}-normalized-sharpness", NORMALIZED, noise),
            part.scatter(f"{kind}-hessian-trace", "hessian_trace", noise),
        ), ""]  # fmt: skip
    for name, quantity in (("labels-normalized-sharpness", NORMALIZED), ("labels-hessian-trace", "hessian_trace")):
        made.append(told.picture(name, _along_noise(told.study, quantity)))
    return [*made[:-2], *_side_by_side(*made[-2:])]


def rangamani(told: Told) -> list[str]:
    made = ["| network | batch | networks | test accuracy | train loss | Riemannian spectral norm | plain norm |",
            "|---|---|---|---|---|---|---|"]  # fmt: skip
    for part in told.parts:
        for batch in sorted({cell.factors["training.batch_size"] for cell in part.study.cells}):
            cells = [cell for cell in part.study.measured if cell.factors["training.batch_size"] == batch]
            names = ("riemannian_spectral_norm", "hessian_spectral_norm")
            norms = [[cell.measures[name].value for cell in cells] for name in names]
            entries = (
                str(part.study.cells[0].factors["model.name"]),
                str(batch),
                str(len(cells)),
                _mean([100 * cell.trained("test_accuracy") for cell in cells], 4) + (" %" if cells else ""),
                _mean([cell.trained("train_loss") for cell in cells], 2),
                *(_mean(values, 3) for values in norms),
            )
            made.append(f"| {' | '.join(entries)} |")
    found = [
        _contrast_row(str(part.study.cells[0].factors["model.name"]), each)
        for part in told.parts
        for axis in part.study.axes
        if "batch_size" in axis.label
        for each in contrasts(part.study, axis)
    ]
    if found:
        made += ["", "How many times larger at the large batch (ratio of geometric means):", "",
                 "| network | measure | times | at equal train loss |", "|---|---|---|---|", *found]  # fmt: skip
    pictures = [
        told.picture(name, _by_batch(told.study, quantity))
        for name, quantity in (("spectral-norm", "riemannian_spectral_norm"), ("plain-norm", "hessian_spectral_norm"))
    ]
    return [*made, "", *_side_by_side(*pictures)]


TELLERS: Mapping[str, Callable[[Told], list[str]]] = {
    "petzka-mnist": petzka_mnist,
    "petzka-cifar10": petzka_cifar10,
    "tsuzuku-mnist": tsuzuku,
    "rangamani-mnist": rangamani,
}


# --- pieces --------------------------------------------------------------------------------------------------------


def _correlations(told: Told, rows: Sequence[tuple[str, str, str]]) -> list[str]:
    columns = ("measure", "r in the paper", "r here", "after rescaling", "given the train loss", "Kendall's τ here")
    made = [f"| {' | '.join(columns)} |", "|---|---|---|---|---|---|"]
    for words, paper, quantity in rows:
        row = told.found.row(quantity, told.study.gap)
        given = Estimate() if row is None else row.partial_pearson
        after = told.r(quantity, rescaled=True)
        numbers = (_bold(told.r(quantity)), *map(_text, (after, given, told.tau(quantity))))
        made.append(f"| {words} | {paper} | {' | '.join(numbers)} |")
    return made


def _contrast_row(network: str, found: Contrast) -> str:
    equal = _times(found.at_equal_loss) + ("" if found.overlap or not found.at_equal_loss.known else ", extrapolated")
    return f"| {network} | {NAMES.get(found.measure, found.measure)} | **{_times(found.times)}** | {equal} |"


def _times(found: Estimate) -> str:
    if not found.known:
        return "–"
    ends = f" [{significant(found.low, 2)}, {significant(found.high, 2)}]" if found.bounded else ""
    return significant(found.value, 2) + ends


def _along_noise(study: Study, quantity: str) -> Drawing:
    shares = sorted({float(cell.factors["data.label_noise"]) for cell in study.cells})
    found = _levels(study, quantity, lambda cell: shares.index(float(cell.factors["data.label_noise"])))
    label = NAMES[quantity].partition(",")[0]
    texts = [f"{share:g}" for share in shares]
    return lines(ByLevel(texts, found), title=f"{label} and random labels", label=label,
                 factor="share of random labels", places=shares)  # fmt: skip


def _by_batch(study: Study, quantity: str) -> Drawing:
    batches = sorted({int(cell.factors["training.batch_size"]) for cell in study.cells})
    found = _levels(study, quantity, lambda cell: batches.index(int(cell.factors["training.batch_size"])))
    label = NAMES[quantity]
    return boxes(
        ByLevel(list(map(str, batches)), found), title=f"{label} by batch size", label=label, factor="batch size"
    )


def _levels(study: Study, quantity: str, level: Callable[[Cell], int]) -> dict[str, dict[int, list[float]]]:
    series: dict[str, dict[int, list[float]]] = {}
    for cell, value in zip(study.measured, study.column(quantity), strict=True):
        series.setdefault(str(cell.factors["model.name"]), {}).setdefault(level(cell), []).append(value)
    return series


def _layers(study: Study, base: str) -> list[str]:
    """The layers of a measure, from the input to the output."""
    return [name[len(base) + 1 : -1] for name in study.quantities(layers=True) if name.startswith(f"{base}[")]


def _share(cell: Cell) -> str:
    """Random labels in four steps: more markers cannot be told apart."""
    share = float(cell.factors["data.label_noise"])
    return (
        "no random labels"
        if share == 0
        else "0.1 to 0.3"
        if share < 0.35
        else "0.4 to 0.6"
        if share < 0.65
        else "0.7 to 1"
    )


def _batch(cell: Cell) -> str:
    return f"batch {cell.factors['training.batch_size']}"


def _by_number(text: str) -> float:
    found = re.search(r"[\d.]+", text)
    return float(found[0]) if found else -1.0


def _mean(values: Sequence[float], digits: int) -> str:
    if not values:
        return "–"
    spread = f" ± {significant(float(np.std(values, ddof=1)), 2)}" if len(values) > 1 else ""
    return significant(float(np.mean(values)), digits) + spread


def _text(found: Estimate) -> str:
    return interval_text(found) if found.known else "–"


def _bold(found: Estimate) -> str:
    value, bracket, ends = _text(found).partition(" ")
    return f"**{value}**{bracket}{ends}"


def _markdown(table: Numbers) -> list[str]:
    rows = [[cell.replace("|", "\\|") for cell in row] for row in ([*table.columns], ["---"] * len(table.columns), *table.texts())]  # fmt: skip
    return [f"| {' | '.join(row)} |" for row in rows]


def _side_by_side(*pictures: str) -> list[str]:
    pairs = [pictures[i : i + 2] for i in range(0, len(pictures), 2)]
    texts = [f"| {' | '.join(picture.replace('|', '∣') for picture in pair)} |" for pair in pairs]
    return [texts[0], "|---|---|", *texts[1:]] if len(pictures) > 1 else list(pictures)


def _made(told: Told) -> list[str]:
    """How many networks, on what, how long, and what differs from the study at its paper's size."""
    study = told.study
    count = Counter(cell.status for cell in study.cells)
    trained = [cell for cell in study.cells if cell.training]
    seconds = sum(cell.trained("seconds") for cell in trained)
    known = {key: trained[0].environment.get(key, "?") for key in ("torch", "python", "threads")} if trained else {}
    where = (
        f"; torch {known['torch']}, Python {known['python']}, threads for each network: {known['threads']}"
        if known
        else ""
    )
    states = ", ".join(f"{count[part]} {part}" for part in PARTS if count[part])
    tables = dict(made_section(study, told.found).tables)
    changed = tables.get("Different from the built-in study of this name")
    lines_ = [f"**{len(study.cells)} networks: {states}.** Training took {seconds_text(seconds)} altogether; "
              f"spiritlevel {study.version}{where}.", ""]  # fmt: skip
    if changed is not None:
        shown = Numbers(("setting", "here", "at the paper's size"), changed.rows)
        lines_ += [*_markdown(shown), ""]
    for status in ("excluded", "failed"):
        for reason, number in Counter(_why(cell) for cell in study.cells if cell.status == status).items():
            lines_.append(f"- {status}: {number} × {reason}")
    return [*lines_, ""] if count["excluded"] + count["failed"] else lines_


def _why(cell: Cell) -> str:
    place = ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in cell.factors.items())
    return f"{place}: {re.sub(r'[0-9.]+(e-?[0-9]+)?', '…', cell.reason)}"


def short(text: str) -> str:
    """A csv file with six digits instead of seventeen: measures are good to three or four."""
    return re.sub(r"(?<=,)-?\d+\.\d{6,}(?:e[+-]?\d+)?(?=[,\n])", lambda number: f"{float(number[0]):.6g}", text)


def make(folder: Path, page: Path = PAGE) -> None:
    study = read_study(folder)
    found = answers(study)
    told = Told(study, found, page.with_suffix("") / study.name)
    write_whole(told.folder / "results.csv", short(results_csv(study)))
    write_whole(told.folder / "correlations.csv", short(correlations_csv(found, study)))
    # Correlations of fewer networks have no interval and say nothing.
    rest = TELLERS[study.name](told) if len(study.measured) >= FEWEST else ["Too few networks for tables and figures."]
    body = "\n".join([*_made(told), *rest])
    begin, end = f"<!-- begin {study.name} -->\n", f"\n<!-- end {study.name} -->"
    before, found_begin, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise SystemExit(f"{page} has no place for {study.name}: it needs {begin.strip()} and {end.strip()}")
    write_whole(page, f"{before}{begin}\n{body}\n{end}{after}")


if __name__ == "__main__":
    for each in sys.argv[1:]:
        make(Path(each))
