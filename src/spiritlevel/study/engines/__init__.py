"""Where cells are computed: processes of this machine, tasks of a Ray cluster, jobs of a Slurm cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spiritlevel.errors import SpiritLevelError, suggest
from spiritlevel.study.engines.engine import Engine
from spiritlevel.study.store import Tell, silent

ENGINES = ("local", "ray", "slurm")
# Whose settings they are, and what to call them.
_SETTINGS = {
    "address": ("ray", "an address is", ""),
    "resources": ("ray", "resources of a cell are", "; say --slurm cpus_per_task=2 there"),
    "runtime_env": ("ray", "a runtime environment is", ""),
    "slurm": ("slurm", "settings of jobs are", ""),
}


def make_engine(
    name: str,
    *,
    logs: Path,
    workers: int | None = None,
    minutes: float | None = None,
    address: str | None = None,
    resources: Mapping[str, float] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    slurm: Mapping[str, Any] | None = None,
    tell: Tell = silent,
) -> Engine:
    """The engine of this name; what it needs is imported only here. A task may take so many `minutes`."""
    if name not in ENGINES:
        raise SpiritLevelError(f"unknown engine {name!r}{suggest(name, ENGINES) or '.'} Known: {', '.join(ENGINES)}")
    given = {"address": address, "resources": resources, "runtime_env": runtime_env, "slurm": slurm}
    for setting, (owner, words, instead) in _SETTINGS.items():
        if given[setting] and name != owner:
            hint = instead if name == "slurm" else ""
            raise SpiritLevelError(f"{words} for engine {owner!r}; engine {name!r} takes none{hint}")
    seconds = None if minutes is None else 60 * minutes
    if name == "local":
        from spiritlevel.study.engines.local import LocalEngine

        return LocalEngine(workers, seconds)
    if name == "ray":
        from spiritlevel.study.engines.ray import RayEngine

        return RayEngine(
            workers, address, logs=logs, resources=resources, runtime_env=runtime_env, seconds=seconds, tell=tell
        )
    from spiritlevel.study.engines.slurm import SlurmEngine

    return SlurmEngine(workers, logs, slurm or {}, seconds)
