"""The house: imports point one way, nothing goes in circles, no file is too long, every public name has an example.

All imports count: those at the top, in functions and under `if TYPE_CHECKING`, and strings that name a module.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import pytest

import spiritlevel as sl

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "spiritlevel"
LONGEST = 450

# The ground floor first. Every floor may import itself and the floors listed before it; rooms of one floor may import each
# other, but not in a circle.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("_version", "errors", "saved", "presenting"),
    ("network",),
    ("problem",),
    ("curvature",),
    ("symmetry",),
    ("measuring",),
    ("measures",),
    ("show",),
    ("audit", "attack", "landscape", "spectrum", "compare", "guarantees", "tracking"),
    ("plot",),
    ("subjects",),
    ("study",),
    ("integrations",),
    ("cli",),
    ("__init__", "__main__"),
)

# Tests of what is no room: of the house and its documents, of many rooms at once, and of what is not installed.
OTHER_TESTS = frozenset(
    {
        "site",
        "skips",
        "reached",
        "architecture",
        "docs",
        "results_joining",
        "results_page",
        "transformers_page",
        "zoo",
        "fuzz",
        "benchmarks",
    }
)


class Arrow(NamedTuple):
    """`source` names `target`, on this line."""

    source: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line} → {self.target}"


# --- reading -----------------------------------------------------------------------------------------------------------


@cache
def modules() -> Mapping[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted((ROOT / "src" / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room(module: str) -> str:
    """The room a module lies in: the folder below the package, or the file where it lies in the root.

    >>> room("spiritlevel.study.engines.ray"), room("spiritlevel.errors"), room("spiritlevel")
    ('study', 'errors', '__init__')
    """
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def floor(module: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room(module) in rooms)


def named(node: ast.AST, known: Iterable[str]) -> Iterator[str]:
    """The modules of the package that an import statement names, wherever it stands."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: write imports in full, `from {PACKAGE}.room.module import name`"
        if node.module and node.module.split(".")[0] == PACKAGE:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


def arrows_of(module: str, text: str, known: Iterable[str]) -> list[Arrow]:
    tree = ast.parse(text)
    return [Arrow(module, target, node.lineno) for node in ast.walk(tree) for target in named(node, known)]  # type: ignore[attr-defined]


@cache
def arrows() -> tuple[Arrow, ...]:
    known = modules()
    return tuple(arrow for module, path in known.items() for arrow in arrows_of(module, path.read_text("utf-8"), known))


def spoken() -> list[Arrow]:
    """Strings that are the name of a module: what would be imported by name is an arrow too."""
    known = modules()
    return [
        Arrow(module, node.value, node.lineno)
        for module, path in known.items()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in known and "." in node.value
    ]


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """The circles of a graph, each as a path that ends where it began.

    >>> circles([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")])
    [['a', 'b', 'c', 'a']]
    """
    after: dict[str, set[str]] = {}
    for source, target in edges:
        if source != target:
            after.setdefault(source, set()).add(target)
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> None:
        if node in path:
            found.append([*path[path.index(node) :], node])
        elif node not in done:
            for target in sorted(after.get(node, ())):
                walk(target, [*path, node])
            done.add(node)

    for node in sorted(after):
        walk(node, [])
    return found


# --- the house -------------------------------------------------------------------------------------------------------------


def test_every_module_has_a_room():
    rooms = {each for line in FLOORS for each in line}
    homeless = [
        f"{module} ({path.relative_to(ROOT)})" for module, path in modules().items() if room(module) not in rooms
    ]
    assert not homeless, "these lie in no room of FLOORS; the root holds only what is listed there:\n" + "\n".join(
        homeless
    )


def test_imports_point_one_way():
    wrong = [arrow for arrow in (*arrows(), *spoken()) if floor(arrow.target) > floor(arrow.source)]
    wrong = [arrow for arrow in wrong if arrow.source != PACKAGE]
    assert not wrong, (
        "these imports point up the house. Move what is needed down, or let what is above register itself "
        "(`presenting` for views, `measuring.registry` for measures):\n" + "\n".join(map(str, wrong))
    )


def test_the_house_is_drawn_as_it_is():
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    drawn = [line.split("|")[1:3] for line in text.splitlines() if re.match(r"\| \d", line)]
    found = [(each, int(number)) for number, rooms in drawn for each in re.findall(r"`(\w+)/?`", rooms)]
    built = {room(module) for module in modules()} - {"_version"}
    floors = [present for line in FLOORS if (present := [each for each in line if each in built])]
    assert found == [(each, number) for number, line in enumerate(floors) for each in line]
    named = re.findall(r"`([\w/]+\.py)`", text.partition("## The walk of one `measure`")[2])
    gone = [path for path in named if not (ROOT / "src" / PACKAGE / path).is_file()]
    assert not gone, f"docs/architecture.md walks through files that do not exist: {gone}"


def test_no_circle_between_rooms():
    found = circles((room(arrow.source), room(arrow.target)) for arrow in arrows())
    why = [
        f"{' → '.join(circle)}\n    " + "\n    ".join(
            str(arrow) for arrow in arrows() if (room(arrow.source), room(arrow.target)) in pairwise(circle)
        )
        for circle in found
    ]  # fmt: skip
    assert not found, "rooms that import each other in a circle:\n" + "\n".join(why)


def test_no_circle_between_modules():
    found = circles((arrow.source, arrow.target) for arrow in arrows())
    assert not found, (
        "modules that import each other in a circle; put what both need into a third one below them:\n"
        + "\n".join(" → ".join(circle) for circle in found)
    )


def test_tests_mirror_the_rooms():
    rooms = {each for line in FLOORS for each in line}
    folders = {path.parent.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/*.py")}
    assert folders <= rooms | OTHER_TESTS, f"folders of tests that are no room: {sorted(folders - rooms - OTHER_TESTS)}"
    homeless = {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("test_*.py")} - rooms - OTHER_TESTS
    assert not homeless, f"tests/ itself holds what belongs to no room; put these into one: {sorted(homeless)}"
    untested = {room(module) for module in modules() if module.count(".") > 1} - folders
    assert not untested, f"rooms without a folder of tests: {sorted(untested)}"


def test_no_file_is_too_long():
    files = (*modules().values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"))
    lengths = {path.relative_to(ROOT): len(path.read_text("utf-8").splitlines()) for path in files}
    long = [f"{path}: {lines} lines" for path, lines in lengths.items() if lines > LONGEST]
    assert not long, f"files of more than {LONGEST} lines; cut them where the subject changes:\n" + "\n".join(long)


def test_measures_are_papers_and_nothing_else():
    odd = [m for m in modules() if room(m) == "measures" and m != f"{PACKAGE}.measures" and not m[-4:].isdigit()]
    assert not odd, f"measures/ holds one file a paper (author2019.py); what they share is in measuring/: {odd}"


def test_the_package_does_not_know_the_benchmark():
    known = [
        f"{module}:{node.lineno}"
        for module, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "benchmarks")
        or (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "benchmarks" for alias in node.names))
    ]
    assert not known, f"the benchmark is not installed with the package and cannot be imported by it: {known}"


# --- the test can fail -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "from spiritlevel.show.page import report_page",
        "def page(self):\n    from spiritlevel.show.page import report_page\n    return report_page",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import spiritlevel.show.page",
        "def page(self):\n    from spiritlevel.show import page as drawn\n    return drawn",
    ],
)
def test_an_arrow_is_seen_wherever_it_stands(text):
    (arrow,) = arrows_of("spiritlevel.measuring.report", text, modules())
    assert arrow.target == "spiritlevel.show.page"
    assert floor(arrow.target) > floor(arrow.source)


# --- public names ----------------------------------------------------------------------------------------------------------


def public_names() -> Iterator[tuple[str, str]]:
    """Functions and classes of `sl.__all__` and of `sl.plot` with the public methods of the classes, and for each of them
    the examples that show it: its own, and for a method those of its class and of the room that call it."""
    for name in sl.__all__:
        thing = getattr(sl, name)
        if inspect.isclass(thing) and not issubclass(thing, BaseException):
            yield name, examples(thing)
            around = examples(thing) + examples(sys.modules[thing.__module__.rpartition(".")[0]])
            for key, member in methods(thing):
                yield f"{name}.{key}", examples(member) or "".join(re.findall(rf"\.{key}\(", around))
        elif inspect.isfunction(thing):
            yield name, examples(thing)
    yield from ((f"plot.{name}", examples(getattr(sl.plot, name))) for name in sl.plot.__all__)


def examples(thing: Any) -> str:
    """The lines of code in a docstring.

    >>> examples(examples)
    '>>> examples(examples)'
    """
    lines = (line.strip() for line in (inspect.getdoc(thing) or "").splitlines())
    return "\n".join(line for line in lines if line.startswith((">>> ", "... ")))


def methods(thing: type) -> Iterator[tuple[str, Any]]:
    """The public methods of a class and of what it is made of here; fields that hold a function are none."""
    seen = set(getattr(thing, "__dataclass_fields__", ()))
    for each in (each for each in thing.__mro__ if each.__module__.split(".")[0] == PACKAGE):
        for key, member in vars(each).items():
            if (
                not key.startswith("_")
                and key not in seen
                and isinstance(member, FunctionType | classmethod | staticmethod)
            ):
                seen.add(key)
                yield key, member


def test_every_public_name_has_an_example():
    missing = [name for name, found in public_names() if not found]
    assert not missing, (
        "public names that no docstring shows in an example (`>>>` and what it prints), neither their own nor, for a method, "
        "that of its class:\n" + "\n".join(missing)
    )


# --- importing --------------------------------------------------------------------------------------------------------------


def alone(code: str) -> str:
    """What the code prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


# A system without what only Unix has. Libraries are loaded before: they may use what they find.
WINDOWS = """
import os, signal, sys
import matplotlib.pyplot, numpy, pydantic, rich.progress, safetensors.torch, scipy.optimize, scipy.sparse, scipy.stats, torch, typer
unix = "resource", "fcntl", "pwd", "grp", "termios", "tty", "pty", "syslog", "posix"
sys.modules.update(dict.fromkeys(unix, None))
for name in ("sysconf", "sched_getaffinity", "getuid", "geteuid", "getgid", "fork", "statvfs", "killpg", "setsid"):
    delattr(os, name) if hasattr(os, name) else None
for name in ("SIGKILL", "SIGHUP", "SIGALRM", "SIGUSR1"):
    delattr(signal, name) if hasattr(signal, name) else None
"""


@pytest.mark.long
def test_without_what_only_unix_has_everything_imports_measures_and_takes_locks():
    optional = (
        "study.engines.ray",
        "study.engines.slurm",
        "integrations.lightning",
        "integrations.huggingface",
        "__main__",
    )
    every = [module for module in modules() if not module.endswith(optional)]
    assert f"{PACKAGE}.cli" in every
    said = alone(f"""{WINDOWS}
import importlib, pathlib, tempfile
for module in {every!r}:
    importlib.import_module(module)
import spiritlevel as sl
from spiritlevel import cli
from spiritlevel.study.store import StudyFolder

sl.measure(torch.nn.Linear(2, 1), (torch.eye(2), torch.zeros(2, 1)), "mse", measures=["hessian_spectral_norm"])
with StudyFolder(pathlib.Path(tempfile.mkdtemp())).at_work():
    print("at work")
cli.main(["--help"])
""")
    assert "at work" in said
    assert "Usage: spiritlevel" in said


DRAWING = {"matplotlib", "scipy.stats", "jinja2"}
# What is loaded after each of three steps, in one process.
STEPS = """
import contextlib, io, json, sys

def loaded():
    return [name for name, module in sys.modules.items() if module]

import spiritlevel as sl
after_import = loaded()
said = io.StringIO()
with contextlib.redirect_stderr(said):
    try:
        from spiritlevel import cli
        cli.main(["mesure"])
    except SystemExit as end:
        code = end.code
after_mistake = loaded()
sl.plot
print(json.dumps({"import": after_import, "mistake": after_mistake, "plot": loaded(), "code": code, "said": said.getvalue()}))
"""


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    """What a process of its own has loaded after `import spiritlevel`, a typing error on the command line and `sl.plot`."""
    return json.loads(alone(STEPS))


def test_importing_brings_along_nothing_that_measuring_does_without(steps):
    slow = {*DRAWING, "typer", "sklearn", "pandas", "pydantic"}
    loaded = set(steps["import"])
    assert slow & loaded == set()
    assert {m for m in loaded if m.startswith("spiritlevel.") and m.split(".")[1] in ("show", "study", "cli")} == set()


def test_every_public_method_says_what_it_does() -> None:
    for name in sl.__all__:
        public = getattr(sl, name)
        for kind in public.__mro__ if isinstance(public, type) else ():
            for attribute, entry in vars(kind).items() if kind.__module__.startswith("spiritlevel") else ():
                function = entry.fget if isinstance(entry, property) else getattr(entry, "__func__", entry)
                if not attribute.startswith("_") and inspect.isfunction(function):
                    assert function.__doc__ or function.__name__ == "<lambda>", (
                        f"sl.{name}.{attribute} has no docstring"
                    )


def test_a_typing_error_on_the_command_line_is_answered_without_them(steps) -> None:
    assert steps["code"] == 2
    assert not DRAWING & set(steps["mistake"])
    assert "No such command 'mesure'; did you mean 'measure'?" in steps["said"]


def test_pictures_load_matplotlib_when_they_are_asked_for(steps) -> None:
    assert "matplotlib" in steps["plot"]
