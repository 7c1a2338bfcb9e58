"""`benchmarks/README.md` from the results: every number in it comes from the JSON files beside it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tables import (
    Results,
    asked,
    by_samples,
    contest,
    described,
    earlier,
    in_full,
    losses,
    memory,
    read_results,
)
from benchmarks.targets import targets
from spiritlevel.saved import write_whole

START, END = "<!-- results: made by `python -m benchmarks table` -->", "<!-- end of results -->"


def write_readme(folder: Path) -> Path:
    """Put the tables between their marks in `folder`/README.md, and leave the rest as it is."""
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else f"# Benchmark\n\n{START}\n{END}\n"
    head, _, rest = text.partition(START)
    tail = rest.partition(END)[2]
    write_whole(path, f"{head}{START}\n\n{render(read_results(folder / 'results'))}\n{END}{tail}")
    return path


def render(results: Results) -> str:
    """All tables as Markdown."""
    parts = ["## Targets", "", *targets(results), ""]
    if along := losses(results):
        parts += ["## Cost and train loss", "", LOSSES, "", *along]
    if results.growth is not None and (counts := by_samples(results.growth["growth"])):
        parts += ["## Cost and number of samples", "", SAMPLES, "", *counts]
    parts += ["## Beside the others", "", COSTS, ""]
    for name in in_full(results):
        parts += [*contest(results, name), ""]
    if results.revisions:
        parts += ["## Beside earlier revisions", "", EARLIER, "", *earlier(results.revisions), ""]
    if results.growth is not None:
        parts += ["## Memory", "", *memory(results.growth["memory"]), ""]
    parts += ["## What each was asked to do", "", *asked(results), "", "## Environment", "", *described(results), ""]
    return "\n".join(parts)


COSTS = (
    "Costs in gradients, and in brackets the relative error against the high-precision value (± the standard error of an "
    "estimator). `>`: stopped at the limit, and left out of the factors. –: the library has no such function, or was not asked on this network."
)
LOSSES = (
    "Our cost in gradients, and in brackets the best peer's at the accuracy asked (≈: extrapolated). One training, "
    "interrupted where its loss over all data first lay below 1, 0.1, 0.01 and 0.001."
)
SAMPLES = (
    "Our cost in gradients over all N. Checks, the examination of layers and what is computed once more in double precision take "
    "the same time whatever N is, and of more samples a smaller share holds the mass."
)
EARLIER = "Costs in gradients on the same weights, the two revisions in turns; the ratio is the median over the rounds."
