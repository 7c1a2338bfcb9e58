"""`benchmarks/README.md` from the results: every number in it comes from the JSON files beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import LIBRARIES
from benchmarks.tasks import TASKS, Task
from benchmarks.worker import OURS
from spiritlevel.saved import write_whole

START, END = "<!-- results: made by `python -m benchmarks table` -->", "<!-- end of results -->"
ORDER = ("mlp", "conv", "lenet5", "resnet20", "vgg16", "tiny")
NAMES = {
    "conv": "small conv",
    "mlp": "784-300-100-10",
    "lenet5": "LeNet5",
    "resnet20": "ResNet-20",
    "vgg16": "VGG16-type",
}
HUTCHINSON = ("curvlinops", "hessian-eigenthings", "PyHessian")

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Results:
    """Everything in a folder of results.

    contests: subject's name → the content of its file. growth: the content of growth.json, or None.
    """

    contests: Mapping[str, Record]
    growth: Record | None

    def record(self, subject: str, library: str, task: str) -> Record | None:
        found = self.contests.get(subject, {}).get("measurements", ())
        return next((r for r in found if r["library"] == library and r["task"] == task), None)

    def cost(self, subject: str, task: str, library: str = OURS) -> float | None:
        """The measured cost in gradients; None where there is none."""
        record = self.record(subject, library, task)
        return float(record["cost"]) if record is not None and record["status"] == "measured" else None


def read_results(folder: Path) -> Results:
    """The results in `folder`, subjects in their usual order."""
    files = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    return Results({name: files[name] for name in ORDER if name in files}, files.get("growth"))


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
    parts = ["## Targets", "", *targets(results), "", "## Beside the others", ""]
    parts += [COSTS, ""]
    for name in results.contests:
        parts += [*contest(results, name), ""]
    if results.growth is not None:
        parts += ["## Memory", "", *memory(results.growth["memory"]), ""]
    parts += ["## What each was asked to do", "", *asked(results), "", "## Environment", "", *described(results), ""]
    return "\n".join(parts)


COSTS = (
    "Costs in gradients, and in brackets the relative error against the high-precision value (± the standard error of an "
    "estimator). `>`: stopped at the limit, and left out of the factors. –: the library has no such function, or was not asked on this network."
)


# --- cells ------------------------------------------------------------------------------------------------------------


def digits(value: float) -> str:
    """Two or three significant digits without exponents."""
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}" if value >= 9.95 else f"{value:.2g}"


def cell(record: Record | None) -> str:
    """One library's answer to one task."""
    if record is None:
        return "–"
    if record["status"] == "over budget":
        return f"> {digits(record['cost'])}"
    if record["status"] == "failed":
        return "fails"
    if record.get("standard_error") is not None:
        return f"{digits(record['cost'])} (±{100 * record['standard_error']:.2g} %)"
    error = record.get("error")
    return digits(record["cost"]) + (f" ({error:.0e})" if error is not None else "")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [[text.replace("|", "\\|") for text in line] for line in (columns, ["---"] * len(columns), *rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


# --- comparisons ------------------------------------------------------------------------------------------------------


def contest(results: Results, name: str) -> list[str]:
    """One subject: every task, every library, and the factor to the best peer at the accuracy asked."""
    subject = results.contests[name]["subject"]
    said = (
        f"{subject['title']}: {subject['parameters']:,} parameters, N = {subject['samples']:,} ({subject['data']} data)"
    )
    shown = [library for library in LIBRARIES if any(results.record(name, library, task) for task in TASKS)]
    rows: list[list[str]] = []
    for task in TASKS.values():
        records = [results.record(name, library, task.name) for library in (OURS, *shown)]
        if any(records):
            rows.append([task.title, *map(cell, records), *([factor_text(results, name, task)] if shown else [])])
    factor = ["best peer / ours"] if shown else []
    return [f"### {said}", "", *table(["task", OURS, *shown, *factor], rows)]


def at_accuracy(task: Task, record: Record | None) -> tuple[float, bool] | None:
    """A peer's cost at the accuracy asked, and whether it is extrapolated; None where it never gets there.

    A mean over probes needs (standard error / accuracy)² times as many, Hutch++ is taken to need only the first power of
    it. What an answer that was stopped would have cost is not known.
    """
    if record is None or record["status"] != "measured":
        return None
    error, spread = record.get("error"), record.get("standard_error")
    if spread is not None and spread > task.accuracy:
        return float(record["cost"] * (spread / task.accuracy) ** (1 / record.get("rate", 0.5))), True
    if spread is None and error is not None and error > 2 * task.accuracy:
        return None
    return float(record["cost"]), False


def factor(results: Results, name: str, task: Task, peers: Sequence[str] = LIBRARIES) -> tuple[float, str, bool] | None:
    """(best peer's cost / ours, its name, whether extrapolated)."""
    own = results.cost(name, _own_task(results, name, task))
    found = [(library, at_accuracy(task, results.record(name, library, task.name))) for library in peers]
    costs = [(cost[0], library, cost[1]) for library, cost in found if cost is not None]
    if own is None or not costs:
        return None
    best = min(costs)
    return best[0] / own, best[1], best[2]


def _own_task(results: Results, name: str, task: Task) -> str:
    """Where we were asked only for everything of a sweep at once, that is what stands against a part of it."""
    return task.name if results.record(name, OURS, task.name) is not None else "sweep"


def factor_text(results: Results, name: str, task: Task) -> str:
    found = factor(results, name, task)
    return "" if found is None else f"{'≈ ' if found[2] else ''}{digits(found[0])}× ({found[1]})"


# --- targets ----------------------------------------------------------------------------------------------------------


def targets(results: Results) -> list[str]:
    """The goals this library set itself, what was measured, and whether they are met."""
    rows = [
        *_ceilings(
            results, "all layers' trace, diagonal, both ρ, normalized sharpness, checks included", "sweep", SWEEPS
        ),
        *_ceilings(results, "λ_max(H) to 1e-4, with certificate", "lambda_1e-4", dict.fromkeys(ORDER[:4], 15.0)),
        *_further(results),
        *_ceilings(
            results, "λ_max of every layer's block, all together", "layer_lambda", dict.fromkeys(ORDER[:3], 25.0)
        ),
        *_ceilings(results, "the default set of `measure`", "everything", {"conv": 60.0}),
        *_factors(results, "against the best peer at equal accuracy", LIBRARIES, tuple(TASKS), 3.0),
        *_factors(results, "against Hutchinson-type estimators", HUTCHINSON, ("layer_traces", "diagonal"), 20.0),
    ]
    if results.growth is not None:
        rows += _memory_targets(results.growth["memory"])
    return table(["work", "on", "target", "measured", ""], rows)


SWEEPS = {"mlp": 2.5, "conv": 6.5, "resnet20": 12.0}


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def _ceilings(results: Results, work: str, task: str, most: Mapping[str, float]) -> list[list[str]]:
    rows = []
    for name, limit in most.items():
        cost = results.cost(name, task)
        if cost is not None:
            rows.append([work, NAMES.get(name, name), f"≤ {limit:g}", digits(cost), _verdict(cost <= limit)])
    return rows


def _further(results: Results) -> list[list[str]]:
    rows = []
    for name in results.contests:
        first, three = results.cost(name, "lambda_1e-4"), results.cost(name, "operators")
        if first is not None and three is not None:
            share = (three - first) / 2 / first
            work = "each further operator in the same call, of the first"
            rows.append([work, NAMES.get(name, name), "≤ 0.5", f"{share:.2f}", _verdict(share <= 0.5)])
    return rows


def _factors(results: Results, work: str, peers: Sequence[str], tasks: Sequence[str], least: float) -> list[list[str]]:
    """One row a subject: the smallest factor over the tasks that a peer can do."""
    rows = []
    for name in results.contests:
        found = [(each[0], TASKS[task], each) for task in tasks if (each := factor(results, name, TASKS[task], peers))]
        if found:
            worst, task, (_, library, guessed) = min(found, key=lambda entry: entry[0])
            met = sum(value >= least for value, _, _ in found)
            said = f"{met} of {len(found)} tasks; least {'≈ ' if guessed else ''}{digits(worst)}× ({task.title}, {library})"
            rows.append([work, NAMES.get(name, name), f"≥ {least:g}×", said, _verdict(worst >= least)])
    return rows


# --- memory -----------------------------------------------------------------------------------------------------------


def _memory_targets(records: Sequence[Record]) -> list[list[str]]:
    rows = []
    for task in dict.fromkeys(record["task"] for record in records):
        ratios = [r["peak"] / (r["parameters"] + r["chunk"] + r["krylov"]) for r in records if r["task"] == task]
        said = f"{digits(min(ratios))} to {digits(max(ratios))}"
        work = "memory: peak / (parameters + one chunk's activations + Krylov basis)"
        rows.append([work, TASKS[task].title, "≤ 3", said, _verdict(max(ratios) <= 3)])
    for task in dict.fromkeys(record["task"] for record in records):
        growth = max(_growth_with_samples(records, task))
        work = "memory: constant in N (growth of the peak from the smallest to the largest N)"
        rows.append([work, TASKS[task].title, "≤ 1.5×", f"{digits(growth)}×", _verdict(growth <= 1.5)])
    return rows


def _growth_with_samples(records: Sequence[Record], task: str) -> Iterable[float]:
    for subject in dict.fromkeys(record["subject"] for record in records):
        mine = [record for record in records if record["subject"] == subject and record["task"] == task]
        mine.sort(key=lambda record: record["samples"])
        yield mine[-1]["peak"] / max(mine[0]["peak"], 1 << 20)


def memory(records: Sequence[Record]) -> list[str]:
    """Peak memory of one call above what the process held before."""
    rows = [
        [
            str(NAMES.get(record["subject"], record["subject"])),
            f"{record['samples']:,}",
            TASKS[record["task"]].title,
            *(f"{record[key] / 2**20:.0f}" for key in ("peak", "parameters", "chunk", "krylov")),
        ]
        for record in records
    ]
    return table(["network", "N", "task", "peak, MiB", "parameters", "one chunk", "Krylov basis"], rows)


# --- the small print --------------------------------------------------------------------------------------------------


def asked(results: Results) -> list[str]:
    """What every library was called with, from the first subject where it answered."""
    lines = []
    for library in (OURS, *LIBRARIES):
        for task in TASKS.values():
            found = [results.record(name, library, task.name) for name in results.contests]
            said = next((record["asked"] for record in found if record and record["status"] == "measured"), None)
            if said is not None:
                lines.append(f"- {library}, {task.title}: {said}")
    return [*lines, *_failures(results)]


def _failures(results: Results) -> list[str]:
    lines = {}
    for name, content in results.contests.items():
        for record in content["measurements"]:
            if record["status"] == "failed":
                where = f"{record['library']} fails on {NAMES.get(name, name)}"
                lines[where] = f"- {where}: {record['reason']}"
    return list(lines.values())


def described(results: Results) -> list[str]:
    """Machine and versions."""
    sources = [*results.contests.values(), *([results.growth] if results.growth else [])]
    seen = {json.dumps(source["environment"], sort_keys=True): source["environment"] for source in sources}
    return [f"- {', '.join(f'{key} {value}' for key, value in each.items())}" for each in seen.values()]
