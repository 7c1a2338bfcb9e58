"""Signals from outside: a study that is killed goes on where it was, a measurement leaves whole files or none."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STUDY = """\
title = "killed"
seeds = 1

[data]
name = "random:60,6,3,0"

[model]
name = "mlp:8"

[training]
optimizer = "sgd"
learning_rate = 0.2
batch_size = 16
epochs = 25
ensemble = 1

[factors]
training.batch_size = [16, 30]

[measure]
measures = ["hessian_trace", "kappa_trace_sum"]
"""
PATIENCE = 600.0


def spiritlevel(*arguments: str) -> "subprocess.Popen[bytes]":
    """The command line in a process group of its own, as a terminal would have it."""
    return subprocess.Popen(
        [sys.executable, "-m", "spiritlevel", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
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


def kill_measurement(folder: Path, name: str, number: signal.Signals, wait: float) -> str:
    """Send a signal to `spiritlevel measure`; what it has written is whole and says that it was interrupted."""
    out = folder / f"{name}.json"
    subject = ["mlp:64-64", "--data", "random:4000,64,10,0"]
    process = spiritlevel("measure", *subject, "--json", str(out), "--quiet", "--tolerance", "1e-6")
    ended = not interrupted(process, number, wait)
    said = finished(process)
    if "Traceback" in said:
        return f"wrong: a traceback after {number.name}: {said[-300:]}"
    if not out.exists():
        return "ended before" if ended else "survived, nothing finished"
    report = json.loads(out.read_text())
    if not ended and not (report["notes"] and report["notes"][0].startswith("interrupted")):
        return "survived, finished"
    return "ended before" if ended else "survived, reported"


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the study did not start")
        time.sleep(0.02)
