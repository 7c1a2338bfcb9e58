"""The study `transformers` on docs/transformers.md: what each measure says of the gap, before and after a move along the orbit.

    spiritlevel study run transformers --folder FOLDER       # goes on where it was stopped
    python docs/results/orbits.py FOLDER                     # copies its tables to docs/results/transformers, writes the page

Without a folder the page is written anew from the tables that lie there.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from make import gather, told_of  # noqa: E402
from telling import Told  # noqa: E402

from spiritlevel.study.show.figures import interval_text  # noqa: E402
from spiritlevel.study.statistics import FEWEST, RESAMPLES  # noqa: E402

PAGE = HERE.parent / "transformers.md"
PART = re.compile(r"(<!-- study -->\n).*?(<!-- end study -->)", re.DOTALL)


def moved(told: Told, measure: str) -> float:
    """The factor by which a measure moves along the orbit, up or down: its median over networks."""
    before, after = (np.array(told.study.column(measure, rescaled), dtype=float) for rescaled in (False, True))
    factors = np.abs(np.log(after / before))
    return float(np.exp(np.median(factors[np.isfinite(factors)])))


def correlation(told: Told, measure: str, rescaled: bool) -> str:
    row = told.found.row(measure, told.study.gap, rescaled)
    return "–" if row is None else interval_text(row.kendall)


def table(told: Told) -> str:
    """Kendall's τ of every measure with the gap, best first, and what the move does to it, as a table in Markdown."""
    rows = {name: told.found.row(name, told.study.gap) for name in told.study.quantities(layers=False)}
    coefficients = {name: row.kendall.value for name, row in rows.items() if row is not None and row.kendall.known}
    names = sorted(rows, key=lambda name: -coefficients.get(name, -1.0))
    lines = ["| measure | τ before | τ after | moves by a factor of |", "| --- | --- | --- | --- |"]
    for name in names:
        sides = " | ".join(correlation(told, name, rescaled) for rescaled in (False, True))
        lines.append(f"| `{name}` | {sides} | {moved(told, name):.3g} |")
    return "\n".join(lines)


def sure(told: Told, rescaled: bool) -> list[str]:
    """The measures whose interval does not hold zero."""
    rows = {name: told.found.row(name, told.study.gap, rescaled) for name in told.study.quantities(layers=False)}
    known = {name: row.kendall for name, row in rows.items() if row is not None and row.kendall.known}
    return [f"`{name}`" for name, found in known.items() if found.low * found.high > 0]


def verdict(told: Told) -> str:
    """What the table says in words."""
    before, after = (", ".join(sure(told, rescaled)) or "none" for rescaled in (False, True))
    return f"Measures whose interval leaves zero out: before the move {before}, after it {after}."


def section(told: Told) -> str:
    count = len(told.study.measured)
    if count < FEWEST:
        return f"{count} of {len(told.study.cells)} networks are measured: too few for correlations."
    head = f"{count} of {len(told.study.cells)} networks, Kendall's τ with the gap of the loss, intervals of 95 % in brackets."
    files = f"[results.csv](results/{told.folder.name}/results.csv)"
    return f"{head}\n\n{table(told)}\n\n{verdict(told)} Every network is in {files}."


def write(results: Path = HERE, page: Path = PAGE, draws: int = RESAMPLES) -> None:
    told = told_of(results / "transformers", draws)
    text = page.read_text(encoding="utf-8")
    page.write_text(PART.sub(lambda found: f"{found[1]}\n{section(told)}\n\n{found[2]}", text), encoding="utf-8")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        gather(Path(argument))
    write()
