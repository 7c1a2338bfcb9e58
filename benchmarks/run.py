"""The whole benchmark: prepare every subject, alternate the libraries on it, and keep the results as JSON."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import environment
from benchmarks.clock import median
from benchmarks.peers import ASK, LIBRARIES
from benchmarks.reference import read
from benchmarks.subjects import RECIPES, Recipe, load, origin
from benchmarks.tasks import GROWING, GROWING_FITTED, TASKS
from benchmarks.worker import OURS
from spiritlevel.errors import SpiritLevelError
from spiritlevel.saved import write_whole

Say = Callable[[str], None]

# Train losses that the small networks are trained to. At the last, which targets are about, everything is asked.
LEVELS = (1.0, 0.1, 1e-2, 1e-3)
UNIT_SECONDS = 0.3
EIGENVALUES = ("lambda_1e-2", "lambda_1e-4", "riemannian", "layer_lambda")
STATISTICS = ("trace", "layer_traces", "diagonal", "rho", "normalized_sharpness", "sweep")


@dataclass(frozen=True)
class Contest:
    """One subject, what is asked on it, and how often.

    Attributes:
        recipe: The network and its data.
        level: The train loss it is trained to; None for the recipe's own training.
        ours, theirs: Tasks for this library and for those peers that can do them.
        rounds: How often every library is asked, in alternation.
        gradients, seconds: What one answer may cost: estimators stop at the first, everything else at the second.
        unit_seconds: How long the gradient is timed before and after every task.
    """

    recipe: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    rounds: int
    gradients: float
    seconds: float
    unit_seconds: float = UNIT_SECONDS
    level: float | None = None

    @property
    def key(self) -> str:
        """What its file of results is called."""
        return RECIPES[self.recipe].at(self.level).key


UNLIMITED = 1e5  # what this library may take: its costs are all shown
EVERY = (*STATISTICS, *EIGENVALUES, "operators", "everything")
# What is asked at the other train losses.
ALONG, THEIRS_ALONG = (
    ("layer_traces", "sweep", "lambda_1e-4", "operators", "everything"),
    ("layer_traces", "lambda_1e-4"),
)


def _at_all_levels(recipe: str, rounds: int, gradients: float, seconds: float) -> tuple[Contest, ...]:
    *others, last = LEVELS
    along = [
        Contest(recipe, ALONG, THEIRS_ALONG, rounds, gradients / 2, seconds, UNIT_SECONDS, level) for level in others
    ]
    return *along, Contest(recipe, EVERY, EVERY, rounds, gradients, seconds, UNIT_SECONDS, last)


CONTESTS = (
    *_at_all_levels("mlp", 1, 30, 20),
    *_at_all_levels("conv", 1, 20, 40),
    *_at_all_levels("lenet5", 1, 20, 60),
    Contest(
        "resnet20",
        ("layer_traces", "sweep", "lambda_1e-4", "operators", "everything"),
        ("layer_traces", "lambda_1e-4"),
        1,
        12,
        300,
    ),
    Contest("vgg16", ("layer_traces", "sweep", "lambda_1e-2"), ("layer_traces", "lambda_1e-2"), 1, 20, 120),
)
QUICK = Contest("tiny", EVERY, (), 1, 50, 20, 0.02)


class Growing(NamedTuple):
    """Ours alone, to see how costs grow with what is varied; `level` is the train loss, None for the recipe's own training."""

    recipe: str
    varied: str
    values: tuple[float, ...]
    level: float | None
    tasks: tuple[str, ...]

    @property
    def key(self) -> str:
        """What it is called in `--only`."""
        return f"growth-{self.recipe}"


GROWTH = (
    Growing("mlp", "samples", (500, 2000, 5000, 20000, 60000), LEVELS[-1], GROWING_FITTED),
    Growing("conv", "samples", (500, 1000, 2000, 5000, 20000), LEVELS[-1], GROWING_FITTED),
    Growing("lenet5", "samples", (500, 1000, 5000, 10000), LEVELS[-1], GROWING_FITTED),
    Growing("resnet20", "samples", (500, 2000, 5000), None, ("sweep", "lambda_1e-4", "operators", "everything")),
    Growing("mlp", "width", (0.25, 1.0, 4.0), None, GROWING),
    Growing("mlp", "classes", (2, 10, 50, 300), None, GROWING),
)
GROWTH_SAMPLES = 2000  # where something else is varied
# Peaks of memory: (subject, samples, train losses; None for the recipe's own training).
MEMORY = (("mlp", (500, 10000), (None,)), ("conv", (500, 2000), (None, LEVELS[-1])))
MEMORY_TASKS = ("sweep", "lambda_1e-4", "everything")


@dataclass(frozen=True)
class Settings:
    """Where to run and on what.

    Attributes:
        folder: Holds the environment of the peers and a cache; results and pictures go here.
        quick: This library alone on a tiny network, in the environment it runs in.
        data_folder: Real MNIST and CIFAR-10; synthetic data where None.
        checkpoint: Weights of ResNet-20; trained for a moment where None.
        subjects: Which contests, and "growth", "growth-NAME" and "memory" for how costs and memory grow; all where empty.
        rounds: How often every library is asked; each contest's own number where None.
        libraries: Who is asked; all where empty. What others answered before stays.
        say: Takes a line of progress.
    """

    folder: Path
    quick: bool = False
    data_folder: Path | None = None
    checkpoint: Path | None = None
    subjects: tuple[str, ...] = ()
    rounds: int | None = None
    libraries: tuple[str, ...] = ()
    say: Say = field(default=lambda line: print(line, file=sys.stderr))

    @property
    def results(self) -> Path:
        return self.folder / "results"


def run(settings: Settings) -> list[Path]:
    """Everything the settings ask for; returns the files with results."""
    chosen = [QUICK] if settings.quick else _chosen(settings.subjects)
    growing = [] if settings.quick else [each for each in GROWTH if _asked(settings, "growth", each.key)]
    for library in settings.libraries:
        if library not in (OURS, *LIBRARIES):
            raise SpiritLevelError(f"unknown library {library!r}; known: {', '.join((OURS, *LIBRARIES))}")
    python = Path(sys.executable) if settings.quick else _environment(settings)
    described = environment.describe(python)
    written = []
    for contest in chosen:
        path = settings.results / f"{contest.key}.json"
        found = {"environment": described, **_contest(settings, python, contest)}
        written.append(write_results(path, _with_others(found, path) if settings.libraries else found))
    path = settings.results / "growth.json"
    for each in growing:
        found = {"environment": described, "growth": _growth(settings, python, each)}
        written.append(write_results(path, with_earlier(found, path)))
    if not settings.quick and _asked(settings, "growth", "memory"):
        found = {"environment": described, "growth": [], "memory": _memory(settings, python)}
        written.append(write_results(path, with_earlier(found, path)))
    return list(dict.fromkeys(written))


def _asked(settings: Settings, *names: str) -> bool:
    """Whether all, or one of these, is asked for."""
    return not settings.subjects or bool(set(names) & set(settings.subjects))


def with_earlier(found: dict[str, Any], path: Path) -> dict[str, Any]:
    """How costs grow, with what was found earlier of others, each with its date."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"growth": [], "memory": []}
    date = found["environment"]["date"]
    dated = [{**record, "date": date} for record in found["growth"]]
    anew = {(record["subject"], record["varied"]) for record in dated}
    kept = [record for record in before["growth"] if (record["subject"], record["varied"]) not in anew]
    memory = [{**record, "date": date} for record in found["memory"]] if "memory" in found else before["memory"]
    order = [(each.recipe, each.varied) for each in GROWTH]
    growth = sorted([*dated, *kept], key=lambda record: order.index((record["subject"], record["varied"])))
    return {"environment": found["environment"], "growth": growth, "memory": memory}


def _environment(settings: Settings) -> Path:
    settings.say("making the environment of the peers, if it is not there")
    return environment.build(settings.folder / ".venv")


def _chosen(names: Sequence[str]) -> list[Contest]:
    """The contests with these names: of a network at all its train losses, or at one."""
    known = list(dict.fromkeys(contest.recipe for contest in CONTESTS))
    growing = list(dict.fromkeys(["growth", *(each.key for each in GROWTH), "memory"]))
    for name in names:
        if name not in (*known, *(contest.key for contest in CONTESTS), *growing):
            example = f"{known[0]}-{LEVELS[-1]:g}"
            raise SpiritLevelError(
                f"unknown subject {name!r}; known: {', '.join((*known, *growing))}, and a network at one train loss: {example}"
            )
    return [contest for contest in CONTESTS if not names or {contest.recipe, contest.key} & set(names)]


def _with_others(found: dict[str, Any], path: Path) -> dict[str, Any]:
    """The results with what libraries that were not asked answered before, on the same weights."""
    if not path.is_file():
        return found
    before = json.loads(path.read_text(encoding="utf-8"))
    if any(found["subject"].get(key) != value for key, value in before["subject"].items()):
        raise SpiritLevelError(f"{path} is about other weights or data: ask all libraries again, without --libraries")
    asked = {record["library"] for record in found["measurements"]}
    kept = [record for record in before["measurements"] if record["library"] not in asked]
    return {**found, "measurements": [*found["measurements"], *kept], "kept_from": before["environment"]["date"]}


def write_results(path: Path, content: Any) -> Path:
    """Results as JSON, whole or not at all."""
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return path


# --- one contest ------------------------------------------------------------------------------------------------------


def _contest(settings: Settings, python: Path, contest: Contest) -> dict[str, Any]:
    recipe = RECIPES[contest.recipe].at(contest.level)
    subject, truth = prepared(settings, python, recipe, contest.ours)
    libraries = {OURS: contest.ours} if settings.quick else _libraries(contest, settings.libraries)
    records: list[dict[str, Any]] = []
    for number in range(settings.rounds or contest.rounds):
        order = list(libraries)[number % len(libraries) :] + list(libraries)[: number % len(libraries)]
        for library in order:
            settings.say(f"{recipe.key}: round {number + 1}, {library} (load {os.getloadavg()[0]:.1f})")
            job = {"kind": "measure", "library": library, "tasks": libraries[library], "seed": number}
            job |= {"subject": subject, "reference": truth, "gradients": contest.gradients, "seconds": contest.seconds}
            job["unit_seconds"] = contest.unit_seconds
            if library == OURS:
                job["seconds"] = job["gradients"] = UNLIMITED
            records += _worker(python, job)
    loaded = load(subject)
    return {
        "subject": {
            "name": recipe.name,
            "title": recipe.title,
            "parameters": loaded.parameters,
            "samples": recipe.samples,
            "batch": recipe.batch,
            "classes": recipe.classes,
            "level": recipe.level,
            **origin(subject),
        },
        "reference": read(truth)[1],
        "measurements": _merged(records),
    }


def _libraries(contest: Contest, chosen: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Who is asked what, this library first; only those that are chosen, all where none are."""
    theirs = {name: tuple(task for task in contest.theirs if task in ASK[name]) for name in LIBRARIES}
    everyone = {OURS: contest.ours, **{name: tasks for name, tasks in theirs.items() if tasks}}
    return {name: tasks for name, tasks in everyone.items() if not chosen or name in chosen}


def _merged(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry a library and task: medians over the rounds, and all costs."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["library"], record["task"]), []).append(record)
    return [_merge(group) for group in groups.values()]


def _merge(group: list[dict[str, Any]]) -> dict[str, Any]:
    measured = [record for record in group if record["status"] == "measured"]
    if not measured:
        return group[0]
    merged = dict(measured[-1])
    for key in ("cost", "seconds", "unit", "error", "standard_error"):
        values = [record[key] for record in measured if record[key] is not None]
        merged[key] = float(f"{median(values):.4g}") if values else None
    merged["costs"] = [float(f"{record['cost']:.4g}") for record in measured]
    return merged


def prepared(settings: Settings, python: Path, recipe: Recipe, tasks: Sequence[str]) -> tuple[Path, Path]:
    """A trained subject and its reference, from the cache where the same was made before."""
    real = settings.data_folder is not None
    checkpoint = settings.checkpoint if recipe.name == "resnet20" else None
    said = f"{vars(recipe)} {real} {checkpoint is not None} {sorted(tasks)}"
    stem = f"{recipe.key}-{hashlib.sha256(said.encode()).hexdigest()[:12]}"
    subject, truth = (settings.folder / ".cache" / f"{stem}{end}" for end in (".pt", "-reference.pt"))
    if not (subject.is_file() and (truth.is_file() or not tasks)):
        settings.say(f"{recipe.key}: training and computing reference values")
        job = {"kind": "prepare", "recipe": vars(recipe), "subject": subject, "reference": truth if tasks else None}
        job |= {"tasks": list(tasks), "checkpoint": checkpoint, "data_folder": settings.data_folder}
        _worker(python, job)
    return subject, truth


# --- how costs grow ---------------------------------------------------------------------------------------------------


def _growth(settings: Settings, python: Path, growing: Growing) -> list[dict[str, Any]]:
    found = []
    name, varied = growing.recipe, growing.varied
    for value in growing.values:
        recipe = RECIPES[name].varied(varied, value).at(growing.level)
        if varied != "samples":
            recipe = recipe.varied("samples", GROWTH_SAMPLES)
        subject, _ = prepared(settings, python, recipe, ())
        settings.say(f"growth: {name}, {varied} {value:g} (load {os.getloadavg()[0]:.1f})")
        job: dict[str, Any] = {"kind": "measure", "library": OURS, "tasks": growing.tasks, "seed": 0}
        job |= {
            "subject": subject,
            "reference": None,
            "gradients": UNLIMITED,
            "seconds": UNLIMITED,
            "unit_seconds": UNIT_SECONDS,
        }
        described = {"subject": name, "varied": varied, "value": value, "level": growing.level}
        described |= {"parameters": load(subject).parameters, "loss": origin(subject)["loss"]}
        records = _merged(_worker(python, job))
        found += [{**described, **{key: record.get(key) for key in ("task", "status", "cost")}} for record in records]
    return found


def _memory(settings: Settings, python: Path) -> list[dict[str, Any]]:
    if not sys.platform.startswith("linux"):
        return []
    found = []
    for name, counts, levels in MEMORY:
        for count, level in itertools.product(counts, levels):
            subject, _ = prepared(settings, python, RECIPES[name].varied("samples", count).at(level), ())
            for task in MEMORY_TASKS:
                settings.say(f"memory: {name}, {count} samples, {task}")
                job = {"kind": "memory", "subject": subject, "tasks": [task]}
                found += [{"subject": name, "level": level, **record} for record in _worker(python, job)]
    return found


def _places() -> list[str]:
    """Where a process of the benchmark finds it: the clone, then what the caller says."""
    given = os.environ.get("PYTHONPATH")
    return [str(Path(__file__).parents[1]), *([given] if given else [])]


def _worker(python: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a job in a process of its own, with one thread."""
    for name in job.get("tasks", ()):
        assert name in TASKS
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job, default=str), encoding="utf-8")
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        done = subprocess.run(
            [str(python), "-m", "benchmarks.worker", str(path)],
            env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(_places())},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"a benchmark process failed:\n{done.stderr[-2000:]}")
        found: list[dict[str, Any]] = json.loads(path.with_suffix(".out").read_text(encoding="utf-8"))
        return found
