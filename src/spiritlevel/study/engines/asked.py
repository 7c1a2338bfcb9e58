"""What a user asks of a cluster for every cell, read from the command line."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spiritlevel.errors import SpiritLevelError


def read_resources(given: Iterable[str]) -> dict[str, float]:
    """Amounts by name.

    >>> read_resources(["num_cpus=1,num_gpus=0.25"])
    {'num_cpus': 1.0, 'num_gpus': 0.25}
    """
    return dict(_read_amount(part) for text in given for part in text.split(",") if part.strip())


def _read_amount(text: str) -> tuple[str, float]:
    name, _, amount = (part.strip() for part in text.partition("="))
    try:
        found = float(amount)
    except ValueError:
        found = math.nan
    if not name or not (math.isfinite(found) and found >= 0):
        raise SpiritLevelError(f"--resources takes names with amounts, num_cpus=1,num_gpus=0.25, got {text!r}")
    return name, found


def read_runtime_env(given: str | None) -> dict[str, Any]:
    """Ray's runtime_env from a file, .json or .toml, or from JSON itself.

    >>> read_runtime_env('{"env_vars": {"MY_DATA": "/shared"}}')
    {'env_vars': {'MY_DATA': '/shared'}}
    """
    if given is None:
        return {}
    try:
        if given.lstrip().startswith("{"):
            found = json.loads(given)
        else:
            text = Path(given).read_text(encoding="utf-8-sig")
            found = tomllib.loads(text) if given.endswith(".toml") else json.loads(text)
    except OSError as error:
        raise SpiritLevelError(f"--runtime-env takes a file or JSON; {given}: {error.strerror}") from None
    except ValueError as error:
        raise SpiritLevelError(f"--runtime-env: {given} is neither JSON nor TOML: {error}") from None
    if not isinstance(found, dict):
        raise SpiritLevelError(f"--runtime-env takes an object, as ray.init(runtime_env=…) does, got {given}")
    return found
