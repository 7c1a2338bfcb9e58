"""What a cell is called: a hash of its settings, the bytes of its data, the code behind them and the version of this library."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

from spiritlevel._version import __version__
from spiritlevel.study.identity import NO_CODE, Code
from spiritlevel.study.settings import CellConfig


class Contents(NamedTuple):
    """What a cell's settings name and do not hold: the fingerprint of its data, the digests of the user's own code."""

    data: str
    code: Code = NO_CODE


def hash_of(config: CellConfig, fingerprint: str, code: Code = NO_CODE) -> str:
    """What a cell is, as 16 hexadecimal digits: its settings, the bytes of its data, the version that computes it.

    It depends on the code of the user's own networks and losses, but neither on the folder of the data nor on how many
    seeds are trained together.
    """
    settings = config.model_dump(mode="json", exclude=_NOT_IN_NAMES)
    settings["measure"] = {key: value for key, value in settings["measure"].items() if value or key not in _LATER}
    return _digest(settings, fingerprint, code)


def training_hash_of(config: CellConfig, fingerprint: str, code: Code = NO_CODE) -> str:
    """The name of a training: the same for cells that differ only in what they require of it and measure on it."""
    apart = {**_NOT_IN_NAMES, "training": {*_NOT_IN_NAMES["training"], "require"}, "measure": True}
    settings = config.model_dump(mode="json", exclude=apart)
    marks = config.model_dump(mode="json", include={"measure": {"at_loss", "at_epochs"}})["measure"]
    if any(marks.values()):  # weights are kept there, which another training does not have
        settings["measure"] = marks
    return _digest(settings, fingerprint, Code(code.network))


# Cells that are not measured along their training, or moved along their orbits, keep the names they always had.
_LATER = ("at_loss", "at_epochs", "measures_along", "orbit")
_NOT_IN_NAMES: dict[str, Any] = {"data": {"folder"}, "training": {"ensemble"}}


def _digest(settings: dict[str, Any], fingerprint: str, code: Code) -> str:
    whole: dict[str, Any] = {"config": settings, "data": fingerprint, "version": __version__}
    if any(code):  # cells that run no code of the user's keep the names they always had
        whole["code"] = code._asdict()
    canonical = json.dumps(whole, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
