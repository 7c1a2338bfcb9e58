"""Which measure wins over all studies: coefficients beside the papers' numbers, and the sign test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from telling import MATRIX, NORMALIZED, Told, markdown, text

from spiritlevel.saved import write_whole
from spiritlevel.show.numbers import Numbers
from spiritlevel.study.levels import over_levels
from spiritlevel.study.show.winners import standings_drawing, standings_table, winner_sentences
from spiritlevel.study.signs import END, SignTest, environments_csv
from spiritlevel.study.statistics import FEWEST, Estimate

# r with the gap, where a paper gives one.
PAPERS: Mapping[tuple[str, str], str] = {
    ("petzka-mnist", "kappa_trace_sum"): "above every layer's",
    ("petzka-mnist", "kappa_trace_max"): "above every layer's",
    ("petzka-mnist", "rho_sum"): "above every layer's",
    ("petzka-mnist", "rho_max"): "above every layer's",
    ("petzka-cifar10", "kappa_trace_sum"): "0.91 (last hidden layer)",
    ("tsuzuku-mnist", NORMALIZED): "0.911 (WRN, CIFAR-10)",
    ("tsuzuku-mnist", MATRIX): "not given",
    ("tsuzuku-mnist", "hessian_trace"): "0.708 (WRN, CIFAR-10)",
    ("tsuzuku-cifar10", NORMALIZED): "0.911 (WRN)",
    ("tsuzuku-cifar10", MATRIX): "not given",
    ("tsuzuku-cifar10", "hessian_trace"): "0.708 (WRN)",
}


def winners(studies: Mapping[str, Told], results: Path, draws: int) -> list[str]:
    """The section over all studies that have networks to compare."""
    test = SignTest([told.study for told in studies.values()], draws=draws)
    lines = [" ".join(winner_sentences(test)), ""]
    if test.standings():
        write_whole(results / "measures" / "sign-errors.csv", environments_csv(test))
        drawing = standings_drawing(test)
        drawing.save(results / "measures" / "sign-errors.png")
        lines += [*markdown(standings_table(test)), ""]
        lines += [f"![{drawing.title}. {drawing.description}](results/measures/sign-errors.png)", ""]
        by_study = ", ".join(
            f"{name} {count} ({ends} at the end)" for name, (count, ends) in _environments(test).items()
        )
        lines += [f"Environments: {by_study}; all of them in [sign-errors.csv](results/measures/sign-errors.csv).", ""]
    for told in studies.values():
        for part in told.parts:
            lines += coefficients(part)
    return lines


def _environments(test: SignTest) -> dict[str, tuple[int, int]]:
    """Study → its environments, and how many of them are ends of trainings."""
    found: dict[str, tuple[int, int]] = {}
    for environment in test.environments:
        count, ends = found.get(environment.study, (0, 0))
        found[environment.study] = count + 1, ends + (environment.at == END)
    return found


def coefficients(told: Told) -> list[str]:
    """r of every measure in the paper and here, and Kendall's τ at the end, at every level and over levels."""
    study = told.study
    if len(study.measured) < FEWEST:
        return []
    marks = [mark for mark in study.marks if mark.kind == "loss" and len(study.at(mark).measured) >= FEWEST]
    over = over_levels(study, draws=told.found.draws)
    rows = tuple(
        (
            name,
            PAPERS.get((study.name, name), "–"),
            text(told.r(name)),
            text(told.tau(name)),
            text(told.tau(name, rescaled=True)),
            *(text(told.at(mark).tau(name)) for mark in marks),
            text(over.get(name, Estimate())),
        )
        for name in study.quantities(layers=False)
    )
    columns = (
        "measure",
        "r in the paper",
        "r at the end",
        "τ at the end",
        "τ, rescaled",
        *map(_tau, marks),
        "τ over levels",
    )
    return [
        f"**{study.name}**, {told.model}, {len(study.measured)} networks at the end:",
        "",
        *markdown(Numbers(columns, rows)),
        "",
    ]


def _tau(mark: object) -> str:
    return f"τ at {mark}"
