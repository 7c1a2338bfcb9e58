"""Results read back, and tables out of them: costs beside the others, against the train loss, and memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.clock import median
from benchmarks.peers import LIBRARIES
from benchmarks.tasks import TASKS, Task
from benchmarks.worker import OURS

ORDER = ("mlp", "conv", "lenet5", "resnet20", "vgg16", "tiny")
NAMES = {
    "conv": "small conv",
    "mlp": "784-300-100-10",
    "lenet5": "LeNet5",
    "resnet20": "ResNet-20",
    "vgg16": "VGG16-type",
}

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Results:
    """Everything in a folder of results.

    contests: key of a subject, its name and its train loss if it was trained to one → the content of its file. growth: the
    content of growth.json, or None. revisions: costs beside earlier revisions.
    """

    contests: Mapping[str, Record]
    growth: Record | None
    revisions: Sequence[Record] = ()

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
    growth, revisions = files.pop("growth", None), files.pop("revisions", ())
    keys = sorted(
        files, key=lambda key: (ORDER.index(key.partition("-")[0]), -(files[key]["subject"].get("level") or 0))
    )
    return Results({key: files[key] for key in keys}, growth, revisions)


def called(key: str) -> str:
    """A subject's name for readers, with its train loss if it was trained to one."""
    name, _, level = key.partition("-")
    return NAMES.get(name, name) + (f" at train loss {level}" if level else "")


def in_full(results: Results) -> list[str]:
    """The subjects that were asked everything: at the lowest train loss of each network."""
    return list({key.partition("-")[0]: key for key in results.contests}.values())


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
        + (f", train loss {subject['loss']:.2g}" if "loss" in subject else "")
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


# --- against the train loss -------------------------------------------------------------------------------------------


ALWAYS = "layer_traces"  # what is asked at every train loss


def losses(results: Results) -> list[str]:
    """For every small network our cost of each task at every train loss, and the best peer's at the accuracy asked."""
    lines: list[str] = []
    for name in ORDER:
        keys = [key for key in results.contests if key.startswith(f"{name}-") and results.record(key, OURS, ALWAYS)]
        shown = [task for task in TASKS.values() if all(results.record(key, OURS, task.name) for key in keys)]
        if len(keys) > 1:
            columns = ["task", *(f"loss {results.contests[key]['subject']['loss']:.2g}" for key in keys)]
            rows = [[task.title, *(_beside(results, key, task) for key in keys)] for task in shown]
            lines += [f"### {NAMES.get(name, name)}", "", *table(columns, rows), ""]
    return lines


def _beside(results: Results, key: str, task: Task) -> str:
    own, found = results.cost(key, task.name), factor(results, key, task)
    if own is None:
        return cell(results.record(key, OURS, task.name))
    if found is None:
        return digits(own)
    return f"{digits(own)} ({found[1]} {'≈ ' if found[2] else ''}{digits(found[0] * own)})"


def earlier(records: Sequence[Record]) -> list[str]:
    """Costs beside earlier revisions of this library."""
    rows = [
        [
            str(record["revision"]),
            f"{called(record['subject'])}, loss {record['loss']:.2g}",
            TASKS[record["task"]].title,
            *(digits(median(record[key])) for key in ("before", "now")),
            f"{record['ratio']:.2f}",
        ]
        for record in records
    ]
    return table(["revision", "network", "task", "before", "now", "ratio"], rows)


def by_samples(records: Sequence[Record]) -> list[str]:
    """Our costs of every network that was trained to a loss, against the number of samples."""
    lines: list[str] = []
    fitted = [record for record in records if record["varied"] == "samples"]
    for name in dict.fromkeys(record["subject"] for record in fitted):
        mine = {(record["task"], record["value"]): record["cost"] for record in fitted if record["subject"] == name}
        counts = sorted({count for _, count in mine})
        rows = [
            [
                TASKS[task].title,
                *("–" if (cost := mine.get((task, count))) is None else digits(cost) for count in counts),
            ]
            for task in dict.fromkeys(task for task, _ in mine)
        ]
        losses = {record["value"]: record.get("loss") for record in fitted if record["subject"] == name}
        rows.append(["train loss", *(f"{loss:.2g}" if (loss := losses[count]) else "–" for count in counts)])
        columns = ["task", *(f"N = {count:,}" for count in counts)]
        level = next(record.get("level") for record in fitted if record["subject"] == name)
        title = NAMES.get(name, name) + (f", train loss {level:g}" if level else "")
        lines += [f"### {title}", "", *table(columns, rows), ""]
    return lines


# --- memory -----------------------------------------------------------------------------------------------------------


def memory(records: Sequence[Record]) -> list[str]:
    """Peak memory of one call above what the process held before."""
    rows = [
        [
            called(record["subject"]) + (f" at train loss {record['level']:g}" if record.get("level") else ""),
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
                where = f"{record['library']} fails on {called(name)}"
                lines[where] = f"- {where}: {record['reason']}"
    return list(lines.values())


def described(results: Results) -> list[str]:
    """Machine and versions."""
    sources = [*results.contests.values(), *([results.growth] if results.growth else [])]
    seen = {json.dumps(source["environment"], sort_keys=True): source["environment"] for source in sources}
    lines = [f"- {', '.join(f'{key} {value}' for key, value in each.items())}" for each in seen.values()]
    kept = sorted({str(content["kept_from"]) for content in results.contests.values() if "kept_from" in content})
    return [*lines, *(f"- the peers' answers are from a run on {date}, on the same weights" for date in kept)]
