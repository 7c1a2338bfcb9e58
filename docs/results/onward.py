"""What becomes of the norm where a training goes on far beyond the train loss that Rangamani et al. 2019 name: `rangamani-onward.toml`.

The tables of that study lie in `rangamani-onward/`, written like all others by `python docs/results/make.py FOLDER`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from telling import NAMES, Told

from spiritlevel.show.numbers import significant
from spiritlevel.study.levels import paths
from spiritlevel.study.results import Cell, Study
from spiritlevel.study.tables import read_tables

FOLDER, NETWORK, NORM = "rangamani-onward", "mnist-fc", "riemannian_spectral_norm"
PAPER = "0.096 ± 0.063"


def trained_on(told: Told) -> Study | None:
    """The networks of that study, if this is the one whose small batch they continue and they were run."""
    place = told.folder.parent / FOLDER
    if told.model != NETWORK or told.study.name != "rangamani-mnist" or not (place / "study.json").exists():
        return None
    return read_tables(place)


def with_those_trained_on(told: Told) -> Study:
    """The study with them among its small batches, as their paths are drawn."""
    further = trained_on(told)
    if further is None:
        return told.study
    small = min(told.study.cells, key=lambda cell: int(cell.factors["training.batch_size"]))
    joined = [replace(cell, factors=small.factors) for cell in further.cells]
    return replace(told.study, cells=(*told.study.cells, *joined))


def onward_table(told: Told) -> list[str]:
    """The norm at every train loss on the way, beside the paper's."""
    further = trained_on(told)
    if further is None:
        return []
    made = [
        f"Trained on, one network of the small batch (`{FOLDER}.toml`):",
        "",
        f"| train loss | epochs | test accuracy | {NAMES[NORM]} | {NAMES['hessian_spectral_norm']} |",
        "|---|---|---|---|---|",
    ]
    for cell in further.measured:
        made += [_row(passed) for passed in (*_at_marks(further, cell), cell)]
    return [*made, f"| the paper: “of the order of 10⁻⁴” | | 98.6 % | {PAPER} | |"]


def _at_marks(study: Study, cell: Cell) -> Sequence[Cell]:
    there = (study.at(mark) for mark in study.marks)
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
    return f"; trained on to a train loss of {loss}, the small batch has a norm of {norm}, and the paper's is 0.096"
