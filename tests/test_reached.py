"""The line about how much the tests reach counts what is entered, and nothing else."""

from __future__ import annotations

import pytest

import reached

SOURCE = '''"""A module."""
from __future__ import annotations

NUMBER = 3


class Thing:
    """Of a kind."""

    def sign(self, x):
        """Its sign."""
        global NUMBER
        if x > 0:
            return 1
        elif x < 0:
            NUMBER = 4
            return -1
        try:
            return 1 / x
        except ZeroDivisionError:
            return 0
        finally:
            NUMBER = 5
'''


def run(*values: float) -> tuple[int, int]:
    code, weights = reached.marked(SOURCE, "thing.py")
    marks = bytearray(len(weights))
    marks[0] = 1
    names: dict[str, object] = {reached.MARKS: marks}
    exec(code, names)
    for value in values:
        assert names["Thing"]().sign(value) == (value > 0) - (value < 0)  # type: ignore[operator]
    return sum(weight for weight, mark in zip(weights, marks, strict=True) if mark), sum(weights)


def test_a_block_counts_once_it_is_entered() -> None:
    # at import: the future, the number, the class, its method
    assert run() == (4, 14)
    assert run(2) == (4 + 3 + 1, 14)  # global, if, try and the return
    assert run(2, -3) == (4 + 3 + 1 + 1 + 2, 14)  # the elif is a block of its own
    assert run(2, -3, 0) == (14, 14)


def test_lines_of_an_error_are_those_of_the_source() -> None:
    code, _ = reached.marked("def f(x):\n    if x:\n        return 1 / 0\n", "lines.py")
    names: dict[str, object] = {reached.MARKS: bytearray(9)}
    exec(code, names)
    with pytest.raises(ZeroDivisionError) as found:
        names["f"](1)  # type: ignore[operator]
    assert found.traceback[-1].lineno == 2  # counted from 0


def test_what_several_processes_reach_is_joined(monkeypatch) -> None:
    monkeypatch.setattr(reached, "_weights", {})
    monkeypatch.setattr(reached, "_marks", {})
    reached.join({"spiritlevel.a": ([6, 2, 2], bytes([1, 1, 0])), "spiritlevel.b": ([10], bytes([0]))})
    reached.join({"spiritlevel.empty": ([0], bytes([1]))})
    reached.join({"spiritlevel.a": ([6, 2, 2], bytes([1, 0, 1]))})
    assert reached.told() == "the tests reach 50.0% of the library's 20 statements; least of b 0%, a 100%"
