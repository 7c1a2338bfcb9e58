"""Further trainings of Rangamani's fully connected network: far beyond the train loss that the paper names (`rangamani-onward.toml`), and by
the settings of the script that its authors published (`rangamani-script.toml`).

The tables of these studies lie in folders of their names, written like all others by `python docs/results/make.py FOLDER`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from telling import NAMES, Told

from spiritlevel.show.numbers import significant
from spiritlevel.study.levels import paths
from spiritlevel.study.results import Cell, Study
from spiritlevel.study.tables import read_tables

FOLDER, SCRIPT = "rangamani-onward", "rangamani-script"
NETWORK, NORM = "mnist-fc", "riemannian_spectral_norm"
PAPER = "0.096 ± 0.063"
# Batch, test accuracy and norm in the paper.
TABLE_4 = {
    "mnist-fc": (("256", "98.6 %", PAPER), ("5000", "96.8 %", "73805 ± 28984")),
    "lenet": (("256", "98.4 %", "6×10⁻⁵ ± 4×10⁻⁵"), ("5000", "97.8 %", "4.03 ± 1.95")),
}


def trained_on(told: Told, folder: str = FOLDER) -> Study | None:
    """The networks of that study, if this is the one beside which they stand and they were run."""
    place = told.folder.parent / folder
    if told.study.name != "rangamani-mnist" or not (place / "study.json").exists():
        return None
    study = read_tables(place)
    study = study.parts.get(told.model, study)
    return study if told.model == study.cells[0].factors.get("model.name", NETWORK) else None


def with_those_trained_on(told: Told) -> Study:
    """The study with them, and those by the authors' script, among its batches of their size, as their paths are drawn."""
    own = {int(cell.factors["training.batch_size"]): cell.factors for cell in told.study.cells}
    onward, script = trained_on(told), trained_on(told, SCRIPT)
    joined = [replace(cell, factors=own[min(own)]) for cell in (onward.cells if onward is not None else ())]
    joined += [
        replace(cell, factors=own[int(cell.factors["training.batch_size"])])
        for cell in (script.cells if script is not None else ())
    ]
    return replace(told.study, cells=(*told.study.cells, *joined)) if joined else told.study


def onward_table(told: Told) -> list[str]:
    """The norm at every train loss on the way, beside the paper's."""
    further = trained_on(told)
    if further is None:
        return []
    made = [
        f"One more network of the small batch, with the same settings, to a far smaller train loss (`{FOLDER}.toml`):",
        "",
        f"| train loss | epochs | test accuracy | {NAMES[NORM]} | {NAMES['hessian_spectral_norm']} |",
        "|---|---|---|---|---|",
    ]
    for cell in further.measured:
        made += [_row(passed) for passed in (*_at_marks(further, cell), cell)]
    return [*made, f"| the paper: “in the order of 10⁻⁴” | | 98.6 % | {PAPER} | |"]


def script_table(told: Told) -> list[str]:
    """Where the authors' script ends with either batch, and the norm on the way there, beside the paper's."""
    further = trained_on(told, SCRIPT)
    if further is None:
        return []
    made = [
        f"By the settings of the authors' script, one learning rate for both batches and 200 epochs (`{SCRIPT}.toml`):",
        "",
        f"| batch | train loss | epochs | test accuracy | {NAMES[NORM]} | {NAMES['hessian_spectral_norm']} |",
        "|---|---|---|---|---|---|",
    ]
    for cell in sorted(further.measured, key=lambda cell: (int(cell.factors["training.batch_size"]), cell.seed)):
        passed = [*_at_marks(further, cell, "epoch"), cell]
        made += [f"| {cell.factors['training.batch_size']} {_row(each)}" for each in passed]
    papers = TABLE_4.get(told.model, ())
    return [
        *made,
        *(f"| the paper, {batch} | “in the order of 10⁻⁴” | | {test} | {norm} | |" for batch, test, norm in papers),
    ]


@dataclass(frozen=True)
class ByScript:
    """Where the authors' script ends: how many times larger the norm of the large batch is, seed by seed, and geometric means of the train
    losses of both batches."""

    times: tuple[float, ...]
    losses: tuple[float, float]

    @property
    def mean(self) -> float:
        """The geometric mean of the factors."""
        return float(np.exp(np.log(self.times).mean()))

    @property
    def words(self) -> str:
        """The factors with two digits."""
        ends = [f"{float(f'{end:.2g}'):,.0f}" if end >= 1000 else significant(end, 2) for end in sorted(self.times)]
        return ends[0] if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"

    def __str__(self) -> str:
        small, large = (significant(loss, 2) for loss in self.losses)
        return f"{self.words} times where the authors' script ends, at train losses of {small} and {large}"


def by_script(told: Told) -> ByScript | None:
    """The ends of its small and large batches, of seeds that were trained with both."""
    further = trained_on(told, SCRIPT)
    found: dict[int, dict[int, tuple[float, float]]] = {}
    for cell in further.measured if further is not None else ():
        ended = cell.trained("train_loss"), cell.measures[NORM].value
        found.setdefault(cell.seed, {})[int(cell.factors["training.batch_size"])] = ended
    # A train loss, or a norm, may be zero to rounding: that is no end to divide by.
    whole = [of for of in found.values() if len(of) == 2 and all(min(ended) > 0 for ended in of.values())]
    pairs = [(of[min(of)], of[max(of)]) for of in whole]
    if not pairs:
        return None
    small, large = (float(np.exp(np.log([pair[side][0] for pair in pairs]).mean())) for side in (0, 1))
    return ByScript(tuple(large_end[1] / small_end[1] for small_end, large_end in pairs), (small, large))


def _at_marks(study: Study, cell: Cell, kind: str = "loss") -> Sequence[Cell]:
    there = (study.at(mark) for mark in study.marks if mark.kind == kind)
    return [own for each in there for own in each.measured if own.hash == cell.hash]


def _row(cell: Cell) -> str:
    entries = (
        significant(cell.trained("train_loss"), 2),
        f"{cell.trained('epochs'):.0f}",
        f"{cell.trained('test_accuracy'):.2%}",
        *(significant(cell.measures[name].value, 3) for name in (NORM, "hessian_spectral_norm")),
    )
    return f"| {' | '.join(entries)} |"


def said_of_those_trained_on(told: Told) -> str:
    """The end of the longest training, for the table of verdicts."""
    further = trained_on(told)
    found = [] if further is None else paths(further, NORM)
    if not found:
        return ""
    longest = min(found, key=lambda path: path.losses[-1])
    loss, norm = (significant(values[-1], 2) for values in (longest.losses, longest.values))
    return f"; trained to a train loss of {loss}, a small batch has a norm of {norm}, and the paper's is 0.096"
