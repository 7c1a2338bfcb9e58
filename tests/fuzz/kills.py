"""Signals from outside: a study that is killed goes on where it was, a measurement leaves whole files or none."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from fuzz import victim
from spiritlevel import cli
from tiny_study import TINY

STUDY = (
    TINY.replace('"tiny"', '"killed"')
    .replace("seeds = 2", "seeds = 1")
    .replace("epochs = 3", "epochs = 25\nensemble = 1")
)
PATIENCE = 600.0
MEASURES = ("hessian_spectral_norm", "fisher_rao_norm", "hessian_trace")


def spiritlevel(*arguments: str, **environment: str) -> "subprocess.Popen[bytes]":
    """The command line in a process group of its own, as a terminal would have it."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "spiritlevel", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
    )


def _study(file: Path, folder: Path) -> "subprocess.Popen[bytes]":
    return spiritlevel("study", "run", str(file), "--folder", str(folder), "--workers", "1", "--quiet")


def results(folder: Path) -> dict[str, Any]:
    """The measured numbers of every cell that has a result; a file that is not whole is an error."""
    found = {}
    for path in sorted(folder.glob("cells/*/result.json")):
        values = json.loads(path.read_text())["measures"]["values"]
        found[path.parent.name] = {name: value["value"] for name, value in values.items()}
    return found


def finished(process: "subprocess.Popen[bytes]") -> str:
    """Wait for the end, and what was said on the way; nothing outlives its trial."""
    try:
        return process.communicate(timeout=PATIENCE)[1].decode()
    finally:
        process.kill()


def reference(folder: Path) -> dict[str, Any]:
    """The study's numbers when nothing disturbs it."""
    file = folder / "killed.toml"
    file.write_text(STUDY)
    process = _study(file, folder / "whole")
    said = finished(process)
    assert process.returncode == 0, said
    return results(folder / "whole")


def kill_study(folder: Path, name: str, number: signal.Signals, wait: float, expected: dict[str, Any]) -> str:
    """Send a signal to a running study, run it again, and compare: "survived", "ended before", or what is wrong."""
    out = folder / name
    process = _study(folder / "killed.toml", out)
    _until(lambda: bool(list(out.glob("cells/*/cell.json"))) or process.poll() is not None)
    ended = not interrupted(process, number, wait)
    finished(process)
    before = results(out)
    if any(before[cell] != expected[cell] for cell in before):
        return f"wrong: after signal {number.name} a result differs"
    again = _study(folder / "killed.toml", out)
    said = finished(again)
    if again.returncode != 0:
        return f"wrong: the study does not go on after {number.name}: {said[-300:]}"
    if results(out) != expected:
        return f"wrong: after {number.name} and going on, results differ"
    return "ended before" if ended else "survived"


def interrupted(process: "subprocess.Popen[bytes]", number: signal.Signals, wait: float) -> bool:
    """Send the signal after so many seconds; False where the process has ended by then."""
    time.sleep(wait)
    if process.poll() is not None:
        return False
    process.send_signal(number)
    return True


def _command(measures: Sequence[str], out: Path) -> list[str]:
    asked = ["measure", "fuzz.victim:network", "--data", "random:40,6,3,0", "--measures", ",".join(measures)]
    return [*asked, "--quiet", "--json", str(out)]


def measured(
    folder: Path, name: str, passes: int = 0, number: signal.Signals | None = None, measures: Sequence[str] = MEASURES
) -> tuple[int, str, Any]:
    """`spiritlevel measure` of a network that sends itself the signal at this pass: exit code, words, what was written."""
    out = folder / f"{name}.json"
    process = spiritlevel(
        *_command(measures, out),
        **{
            victim.PASS: str(passes),
            victim.SIGNAL: number.name if number else "",
            victim.COUNT: str(folder / "passes"),
        },
    )
    said = finished(process)
    return process.returncode, said, json.loads(out.read_text()) if out.exists() else None


@dataclass(frozen=True)
class Undisturbed:
    """How many passes a measurement takes, how many its first measure takes alone, and what comes out."""

    passes: int
    first: int
    values: dict[str, float]


def undisturbed_measurement(folder: Path) -> Undisturbed:
    """Of this process: a process of its own would spend seconds on importing."""
    counts = []
    with mock.patch.dict(os.environ, {victim.COUNT: str(folder / "passes")}):
        for measures in (MEASURES[:1], MEASURES):
            victim.Victim.passes = 0
            with contextlib.suppress(SystemExit):  # a failure leaves nothing to read below
                cli.main(_command(measures, folder / "undisturbed.json"))
            counts.append(victim.Victim.passes)
    return Undisturbed(counts[1], counts[0], _values(json.loads((folder / "undisturbed.json").read_text())))


def _values(report: Any) -> dict[str, float]:
    return {name: value["value"] for name, value in report["values"].items()}


def kill_measurement(folder: Path, name: str, number: signal.Signals, fraction: float, undisturbed: Undisturbed) -> str:
    """A signal after this fraction of the passes: what is written is whole and right, and what was finished is written."""
    passes, expected = max(1, round(fraction * undisturbed.passes)), undisturbed.values
    code, said, report = measured(folder, name, passes, number)
    if "Traceback" in said:
        return f"wrong: a traceback after {number.name}: {said[-300:]}"
    if report is not None and any(value != expected[name] for name, value in _values(report).items()):
        return f"wrong: after {number.name} a value differs"
    if number == signal.SIGKILL:
        return "survived" if code == -signal.SIGKILL else f"wrong: exit code {code} after SIGKILL"
    if code != 128 + number and not (code == 0 and report is not None):
        return f"wrong: exit code {code} after {number.name}"
    late = passes > undisturbed.first
    return f"wrong: {number.name} keeps nothing of what was finished" if late and report is None else "survived"


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the study did not start")
        time.sleep(0.02)
