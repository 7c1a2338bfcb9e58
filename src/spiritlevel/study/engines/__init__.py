"""Where cells are computed: processes of this machine, tasks of a Ray cluster, jobs of a Slurm cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spiritlevel.errors import SpiritLevelError, suggest
from spiritlevel.study.engines.engine import Engine

ENGINES = ("local", "ray", "slurm")


def make_engine(
    name: str,
    *,
    logs: Path,
    workers: int | None = None,
    address: str | None = None,
    slurm: Mapping[str, Any] | None = None,
) -> Engine:
    """The engine of this name; what it needs is imported only here."""
    if name not in ENGINES:
        raise SpiritLevelError(f"unknown engine {name!r}{suggest(name, ENGINES)}; known: {', '.join(ENGINES)}")
    if address is not None and name != "ray":
        raise SpiritLevelError(f"an address is for engine 'ray'; engine {name!r} takes none")
    if slurm and name != "slurm":
        raise SpiritLevelError(f"settings of jobs are for engine 'slurm'; engine {name!r} takes none")
    if name == "local":
        from spiritlevel.study.engines.local import LocalEngine

        return LocalEngine(workers)
    if name == "ray":
        from spiritlevel.study.engines.ray import RayEngine

        return RayEngine(workers, address)
    from spiritlevel.study.engines.slurm import SlurmEngine

    return SlurmEngine(workers, logs, slurm or {})
