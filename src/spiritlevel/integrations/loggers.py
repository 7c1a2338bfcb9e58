"""Loggers for a tracker: each is a function of (flat names with numbers, step), made for one place to log to.

`Tracker(…, loggers=[CSVLogger("flatness.csv")])`. Names are flat: `flatness/rho_sum`, `flatness/rho_sum/layer/fc1.weight`.
Packages are imported when a logger that needs one is made.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spiritlevel.errors import SpiritLevelError


def imported(module: str, extra: str) -> Any:
    """A package that only some have, or a sentence that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SpiritLevelError(
            f"{module.partition('.')[0]} is not installed ({error}): pip install spiritlevel[{extra}]"
        ) from None


class CSVLogger:
    """One line for every number: step, name, value. The file can be read while the training runs, and grows.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     CSVLogger(f"{folder}/log.csv")({"flatness/rho_sum": 3.0}, 100)
    ...     print(Path(f"{folder}/log.csv").read_text().splitlines())
    ['step,name,value', '100,flatness/rho_sum,3.0']
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists() or not self.path.stat().st_size:
            self._write([("step", "name", "value")], "w")

    def __call__(self, numbers: Mapping[str, float], step: int) -> None:
        self._write([(step, name, repr(number)) for name, number in numbers.items()], "a")

    def _write(self, rows: list[tuple[Any, ...]], mode: str) -> None:
        with self.path.open(mode, encoding="utf-8", newline="") as stream:
            csv.writer(stream, lineterminator="\n").writerows(rows)


class JSONLinesLogger:
    """One object a point: `{"step": 100, "flatness/rho_sum": 3.0, …}`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     JSONLinesLogger(f"{folder}/log.jsonl")({"flatness/rho_sum": 3.0}, 100)
    ...     print(Path(f"{folder}/log.jsonl").read_text(), end="")
    {"step": 100, "flatness/rho_sum": 3.0}
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, numbers: Mapping[str, float], step: int) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, **numbers}) + "\n")


class TensorBoardLogger:
    """Scalars for TensorBoard: into a folder, or through a `SummaryWriter` that you have."""

    def __init__(self, target: Any) -> None:
        if isinstance(target, str | os.PathLike):
            target = imported("torch.utils.tensorboard", "tensorboard").SummaryWriter(os.fspath(target))
        self.writer = target

    def __call__(self, numbers: Mapping[str, float], step: int) -> None:
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, step)
        self.writer.flush()


class WandbLogger:
    """A run of Weights & Biases: the one you have, or a new one from the options of `wandb.init` (mode="offline", …).

    Points have an axis of their own, `flatness/step`, so that they mix with whatever else the run logs.
    """

    def __init__(self, run: Any = None, **options: Any) -> None:
        self.run = imported("wandb", "wandb").init(**options) if run is None else run
        self.run.define_metric("flatness/step", hidden=True)
        self.run.define_metric("flatness/*", step_metric="flatness/step")

    def __call__(self, numbers: Mapping[str, float], step: int) -> None:
        self.run.log({**numbers, "flatness/step": step})


class MLflowLogger:
    """A run of MLflow: `run_id` of one that you have, or a new one in `experiment`, at `tracking_uri`.

    Where MLflow keeps metrics in files, `flatness/rho_sum` cannot be a folder too: what belongs to a measure has dots here,
    `flatness/rho_sum.layer.fc1.weight`. Letters that MLflow does not take become underscores.
    """

    def __init__(
        self, run_id: str | None = None, *, tracking_uri: str | None = None, experiment: str = "flatness"
    ) -> None:
        mlflow = imported("mlflow", "mlflow")
        self.client = mlflow.MlflowClient(tracking_uri=tracking_uri)
        if run_id is None:
            known = self.client.get_experiment_by_name(experiment)
            place = self.client.create_experiment(experiment) if known is None else known.experiment_id
            run_id = self.client.create_run(place).info.run_id
        self.run_id = run_id

    def __call__(self, numbers: Mapping[str, float], step: int) -> None:
        for name, number in numbers.items():
            first, _, rest = name.partition("/")
            key = re.sub(r"[^\w\-. /]", "_", f"{first}/{rest.replace('/', '.')}" if rest else first)
            self.client.log_metric(self.run_id, key, number, step=step)
