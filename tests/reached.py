"""How much of the library the tests reach, told in a line at the end of `make test`.

A plugin of pytest, which `conftest.py` registers where SPIRITLEVEL_COVERAGE is set. `coverage` watches every line and made the
tests a quarter slower on Python 3.11, which has no cheaper way; here every block of statements (the body of a function, a branch,
a loop) sets one mark when it is entered, put there as a module is loaded. A block that is left early counts as a whole, and
what runs in other processes than pytest's does not count.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

import pytest

VARIABLE = "SPIRITLEVEL_COVERAGE"
LIBRARY = "spiritlevel"
MARKS = "__reached__"
LEAST = 3  # modules that the closing line names

_weights: dict[str, list[int]] = {}  # module → statements of every block, those of the module itself first
_marks: dict[str, bytearray] = {}  # module → 1 for every block that was entered


def marked(source: str | bytes, path: str) -> tuple[CodeType, list[int]]:
    """The code of a module whose blocks set marks, and how many statements each block has."""
    tree = ast.parse(source, path)
    weights = [0]
    _mark(tree, weights, 0, inside=False)
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True), weights


def _mark(node: ast.AST, weights: list[int], block: int, *, inside: bool) -> None:
    """Count the statements of all blocks below a node; within functions, every block gets a mark of its own."""
    inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for statements in _blocks(node):
        own = block
        if inside:
            own = len(weights)
            weights.append(0)
        described = _has_docstring(node, statements)
        weights[own] += len(statements) - described
        for statement in statements:
            _mark(statement, weights, own, inside=inside)
        if inside:
            statements.insert(described, _mark_of(own, statements[0]))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ExceptHandler | ast.match_case):
            _mark(child, weights, block, inside=inside)


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        statements = getattr(node, field, None)
        if isinstance(statements, list) and statements and isinstance(statements[0], ast.stmt):
            yield statements


def _has_docstring(node: ast.AST, statements: Sequence[ast.stmt]) -> bool:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return isinstance(node, documented) and statements is node.body and ast.get_docstring(node, clean=False) is not None


def _mark_of(block: int, at: ast.stmt) -> ast.stmt:
    """`MARKS[block] = 1`; put together by hand, since parsing thousands of such lines takes seconds."""
    place = ast.Subscript(ast.Name(MARKS, ast.Load()), ast.Constant(block), ast.Store())
    statement = ast.Assign([place], ast.Constant(1))
    for each in (place.value, place.slice, place, statement.value, statement):
        ast.copy_location(each, at)
    return statement


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        code, _weights[fullname] = marked(self.get_data(self.path), self.path)
        return code

    def exec_module(self, module: ModuleType) -> None:
        code = self.get_code(module.__name__)
        marks = _marks[module.__name__] = bytearray(len(_weights[module.__name__]))
        marks[0] = 1
        setattr(module, MARKS, marks)
        exec(code, module.__dict__)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != LIBRARY:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def asked_for() -> bool:
    return bool(os.environ.get(VARIABLE))


def watch() -> None:
    """From now on, modules of the library are loaded with marks."""
    sys.meta_path.insert(0, _Finder())


def join(others: dict[str, tuple[list[int], bytes]]) -> None:
    """Add what another process has reached."""
    for name, (weights, marks) in others.items():
        _weights[name] = list(weights)
        mine = _marks.setdefault(name, bytearray(len(weights)))
        _marks[name] = bytearray(a | b for a, b in zip(mine, marks, strict=True))


def told() -> str:
    """The closing line."""
    shares = {name: _share([name]) for name, weights in _weights.items() if sum(weights)}
    least = sorted(shares, key=lambda name: shares[name][0] / shares[name][1])[:LEAST]
    reached, total = _share(_weights)
    parts = (f"{name.removeprefix(LIBRARY + '.')} {shares[name][0] / shares[name][1]:.0%}" for name in least)
    return f"the tests reach {reached / max(1, total):.1%} of the library's {total:,} statements; least of {', '.join(parts)}"


def _share(names: Sequence[str] | dict[str, Any]) -> tuple[int, int]:
    """Statements reached, and all."""
    pairs = [pair for name in names for pair in zip(_weights[name], _marks.get(name, b""), strict=False)]
    return sum(weight for weight, mark in pairs if mark), sum(sum(_weights[name]) for name in names)


# --- what pytest calls -----------------------------------------------------------------------------------------------


def pytest_sessionfinish(session: pytest.Session) -> None:
    found = getattr(session.config, "workeroutput", None)  # of a process of xdist
    if found is not None:
        found["reached"] = {name: (_weights[name], bytes(marks)) for name, marks in _marks.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    join(getattr(node, "workeroutput", {}).get("reached", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(told())
