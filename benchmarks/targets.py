"""The goals this library set itself, what was measured, and whether they are met."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.peers import LIBRARIES
from benchmarks.tables import NAMES, Record, Results, called, digits, factor, in_full, table
from benchmarks.tasks import TASKS

HUTCHINSON = ("curvlinops", "hessian-eigenthings", "PyHessian")
SUBJECTS = ("mlp-0.001", "conv-0.001", "lenet5-0.001", "resnet20")

# Task → the most gradients it may take on each of the subjects, all checks included.
CEILINGS = {
    "sweep": (2.2, 2.5, 3.0, 5.0),
    "lambda_1e-4": (6.0, 6.0, 7.0, 9.0),
    "operators": (13.0, 13.0, 15.0, 20.0),
    "everything": (18.0, 20.0, 22.0, 30.0),
}
# Before samples were weighed; at train losses from the second on nothing may be dearer than then by more than the third.
UNWEIGHED, STILL_LARGE, NO_DEARER = "a07d5b1", 0.3, 1.05
MEMORY_LIMIT = ("conv", 2000, "everything", 300)  # MiB


def targets(results: Results) -> list[str]:
    """All of them as a table."""
    rows = []
    growth = [] if results.growth is None else results.growth["growth"]
    for task, limits in CEILINGS.items():
        most = dict(zip(SUBJECTS, limits, strict=True))
        rows += _ceilings(results, task, most) + _at_largest(growth, task, most)
    rows += _factors(results, "against the best peer at equal accuracy", LIBRARIES, tuple(TASKS), 3.0)
    rows += _factors(results, "against Hutchinson-type estimators", HUTCHINSON, ("layer_traces", "diagonal"), 20.0)
    rows += _no_dearer(results.revisions)
    if results.growth is not None:
        rows += _memory_targets(results.growth["memory"])
    return table(["work", "on", "target", "measured", ""], rows)


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def _ceilings(results: Results, task: str, most: Mapping[str, float]) -> list[list[str]]:
    rows = []
    for key, limit in most.items():
        cost = results.cost(key, task)
        if cost is not None:
            where = f"{called(key)}, N = {results.contests[key]['subject']['samples']:,}"
            rows.append([TASKS[task].title, where, f"≤ {limit:g}", digits(cost), _verdict(cost <= limit)])
    return rows


def _at_largest(records: Sequence[Record], task: str, most: Mapping[str, float]) -> list[list[str]]:
    """Every subject once more with the most samples it was measured on: there, what does not grow with the data weighs least."""
    rows = []
    for key, limit in most.items():
        name, _, level = key.partition("-")
        chosen = (name, "samples", float(level) if level else None, task)
        mine = [r for r in records if (r["subject"], r["varied"], r.get("level"), r["task"]) == chosen and r["cost"]]
        if mine:
            largest = max(mine, key=lambda record: float(record["value"]))
            where = f"{called(key)}, N = {largest['value']:,}"
            cost = largest["cost"]
            rows.append([TASKS[task].title, where, f"≤ {limit:g}", digits(cost), _verdict(cost <= limit)])
    return rows


def _factors(results: Results, work: str, peers: Sequence[str], tasks: Sequence[str], least: float) -> list[list[str]]:
    """One row a subject: the smallest factor over the tasks that a peer can do."""
    rows = []
    for name in in_full(results):
        found = [(each[0], TASKS[task], each) for task in tasks if (each := factor(results, name, TASKS[task], peers))]
        if found:
            worst, task, (_, library, guessed) = min(found, key=lambda entry: entry[0])
            met = sum(value >= least for value, _, _ in found)
            said = f"{met} of {len(found)} tasks; least {'≈ ' if guessed else ''}{digits(worst)}× ({task.title}, {library})"
            rows.append([work, called(name), f"≥ {least:g}×", said, _verdict(worst >= least)])
    return rows


def _no_dearer(records: Sequence[Record]) -> list[list[str]]:
    """One row a network: what it costs where the loss is still large, over what it cost before samples were weighed."""
    rows = []
    mine = [record for record in records if record["revision"] == UNWEIGHED and record["loss"] >= STILL_LARGE]
    for name in dict.fromkeys(record["subject"] for record in mine):
        ratios = {record["ratio"]: record["task"] for record in mine if record["subject"] == name}
        worst = max(ratios)
        said = f"{min(ratios):.2f} to {worst:.2f} ({TASKS[ratios[worst]].title})"
        work = f"where the train loss is {STILL_LARGE:g} or more: cost / cost before samples were weighed"
        rows.append([work, NAMES.get(name, name), f"≤ {NO_DEARER:g}", said, _verdict(worst <= NO_DEARER)])
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
    return [*rows, *_memory_limit(records)]


def _memory_limit(records: Sequence[Record]) -> list[list[str]]:
    name, samples, task, limit = MEMORY_LIMIT
    rows = []
    for record in records:
        if (record["subject"], record["samples"], record["task"]) == (name, samples, task):
            where = called(name) + (
                f" at train loss {record['level']:g}" if record.get("level") else ", briefly trained"
            )
            work, peak = f"memory: {TASKS[task].title} at N = {samples:,}", record["peak"] / 2**20
            rows.append([work, where, f"< {limit} MiB", f"{peak:.0f}", _verdict(peak < limit)])
    return rows


def _growth_with_samples(records: Sequence[Record], task: str) -> Iterable[float]:
    for subject in dict.fromkeys(record["subject"] for record in records):
        mine = [r for r in records if r["subject"] == subject and r["task"] == task and not r.get("level")]
        mine.sort(key=lambda record: record["samples"])
        yield mine[-1]["peak"] / mine[0]["peak"]
