"""Which tests may be left out, and on which machines. A test that is skipped for any other reason fails.

A plugin of pytest, which `conftest.py` registers; the closing lines say how many tests were not run, and why.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

LINUX = sys.platform.startswith("linux")


@dataclass(frozen=True)
class Lack:
    """Something that a machine may lack: how a test says so, whether this machine may, and what the closing line says."""

    says: str
    here: bool
    closing: str


MAY_LACK = (
    # SPIRITLEVEL_REQUIRE_BROWSER=1 makes these tests fail instead.
    Lack(r"no browser: .*", True, "this machine has no browser (chromium and chromedriver)"),
    Lack(r"could not import '(fcntl|resource)': .*", not LINUX, "this system has no such module"),
    Lack(r"needs locks of ranges that belong to the open file, as Linux has", not LINUX, "only Linux has such locks"),
    Lack(r"ru_maxrss counts kilobytes on Linux only", not LINUX, "memory is counted so on Linux only"),
    Lack(r"a cluster of Ray with two nodes needs Linux", not LINUX, "Ray joins several nodes on Linux only"),
    Lack(r"a setting of Linux's C library", not LINUX, "only Linux's C library has such a setting"),
    Lack(r"there is no C\+\+ compiler here", shutil.which("c++") is None, "this machine has no C++ compiler"),
    Lack(r"submitit needs Unix", not LINUX, "submitit needs Unix"),
)


def lack_behind(reason: str) -> Lack | None:
    """The entry of the list that allows a skip with this reason on this machine."""
    said = reason.removeprefix("Skipped: ")
    return next((lack for lack in MAY_LACK if lack.here and re.fullmatch(lack.says, said, re.DOTALL)), None)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


def _judged(
    report: pytest.TestReport | pytest.CollectReport,
) -> pytest.TestReport | pytest.CollectReport:
    """The report of a skip as a failure, unless the skip is on the list; what is expected to fail is no skip."""
    if report.skipped and not hasattr(report, "wasxfail") and lack_behind(_reason(report)) is None:
        report.outcome = "failed"
        report.longrepr = f"skipped for a reason that is not on the list in tests/skips.py: {_reason(report)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    return _judged((yield))  # type: ignore[arg-type, return-value]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    return _judged((yield))  # type: ignore[arg-type, return-value]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats.get("skipped", [])
    found = Counter(lack.closing for report in reports if (lack := lack_behind(_reason(report))) is not None)
    for closing, count in found.items():
        terminalreporter.write_line(
            f"{count} {'test was' if count == 1 else 'tests were'} not run: {closing}", yellow=True
        )
