"""One cell, or several that differ in their seed only: settings in, results out. `python -m spiritlevel.study.worker cell.json`

Doing a cell twice does nothing the second time. A training that is complete is measured without training again.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.run import environment
from spiritlevel.saved import json_ready
from spiritlevel.study.along import write_kept
from spiritlevel.study.away import Away, scratch_folder
from spiritlevel.study.identity import code_of
from spiritlevel.study.live import AtWork
from spiritlevel.study.measuring import Pair, measure_along, measure_cell, measured_samples
from spiritlevel.study.naming import Contents, hash_of
from spiritlevel.study.objectstore import StoreError, is_url
from spiritlevel.study.samples import Samples, load_samples
from spiritlevel.study.settings import CellConfig
from spiritlevel.study.store import CellFolder, locked
from spiritlevel.study.train import Trained, arrived, build, train
from spiritlevel.study.unfinished import Unfinished
from spiritlevel.subjects.checkpoint import load_checkpoint, save_checkpoint

DONE, CRASHED, REFUSED, DISK_FULL, HELD, ORPHANED, NO_STORE = 0, 1, 2, 74, 75, 76, 77
"""Exit codes of a worker: refused input is not tried again, a cell that another process holds is looked at later.

Where the store of a study fails, the last line that the worker says tells why."""

UNTIL_STDIN_CLOSES, SCRATCH = "--until-stdin-closes", "--scratch="


def compute(paths: Sequence[str | os.PathLike[str]]) -> int:
    """Compute the cells whose `cell.json` are at `paths`; what went wrong is in each cell's `failed.json`."""
    folders = [CellFolder(Path(path).parent) for path in paths]
    if all(folder.done for folder in folders):
        return DONE
    try:
        with locked(folders) as held:
            return _compute_held(folders) if held else HELD
    except Exception as error:
        if is_disk_full(error):
            return DISK_FULL
        raise


def compute_away(urls: Sequence[str], scratch: str | None = None) -> int:
    """Compute cells of a study behind a URL: `compute` in a scratch folder, between bringing the cells and sending results."""
    try:
        with scratch_folder(scratch) as folder:
            away = Away(urls, folder)
            away.bring()
            if all(cell.done for cell in away.cells):
                return DONE
            if away.is_claimed():
                return HELD
            with away.sending():
                return compute(away.paths)
    except (StoreError, SpiritLevelError) as error:
        where = f"{error.filename}: {error.strerror}" if isinstance(error, StoreError) else str(error)
        _say(where)
        return NO_STORE
    except OSError as error:
        if is_disk_full(error):
            return DISK_FULL
        raise


def _compute_held(folders: list[CellFolder]) -> int:
    with AtWork(folders) as sign:
        return _compute(folders, sign)


def _compute(folders: list[CellFolder], sign: AtWork) -> int:
    pending = [folder for folder in folders if not folder.done]
    with _Failures(pending) as failures:
        settings = {folder: folder.settings() for folder in folders}
        configs = {folder: folder.config() for folder in folders}
        samples = _load(configs[folders[0]], folders[0].contents())
        for folder in folders:
            _check_name(folder, configs[folder])
        if any(folder.training() is None for folder in pending):
            _train(folders, configs, samples, sign)
        folders[0].unfinished.unlink(missing_ok=True)  # also of a run that was killed between the two
    if failures.outcome != DONE:
        return failures.outcome
    sign.say("measuring")
    outcomes = [_measure(folder, settings[folder], configs[folder], samples) for folder in pending]
    return next((outcome for outcome in outcomes if outcome != DONE), DONE)


class _Failures:
    """Writes what goes wrong inside to every one of the cells; a full disk and an interruption go through."""

    def __init__(self, folders: Sequence[CellFolder]) -> None:
        self.folders, self.outcome = folders, DONE

    def __enter__(self) -> _Failures:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None or not isinstance(error, Exception) or is_disk_full(error):
            return False
        self.outcome = REFUSED if isinstance(error, SpiritLevelError) else CRASHED
        text = "".join(traceback.format_exception(error))
        _say(text)
        said = str(error) if isinstance(error, SpiritLevelError) else f"{type(error).__name__}: {error}"
        for folder in self.folders:
            attempts = (folder.failure() or {}).get("attempts", 0)
            folder.write_failure(said, text, attempts + 1)
        return True


def is_disk_full(error: BaseException) -> bool:
    """Whether the disk or the quota is full; safetensors raises errors that only say so in their message."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or os.strerror(errno.ENOSPC) in str(error)


def _load(config: CellConfig, contents: Contents) -> Samples:
    """The data, if they and the code of the user's own are what they were when the study was started."""
    samples = load_samples(config.data)
    if samples.fingerprint != contents.data:
        raise SpiritLevelError(
            f"{config.data.spec} has other content than when the study was started; run the study again, "
            "which makes new cells for it"
        )
    found = code_of(config, samples.train)
    for now, then, name in zip(found, contents.code, (config.model.name, "the losses"), strict=True):
        if now != then:
            raise SpiritLevelError(
                f"the code behind {name} is not what it was when the study was started; run the study again, which makes "
                "new cells for it"
            )
    return samples


def _check_name(folder: CellFolder, config: CellConfig) -> None:
    """Refuse settings that are not those the folder is named by: what they give would be taken for something else."""
    if hash_of(config, *folder.contents()) != folder.hash:
        raise SpiritLevelError(
            f"{folder.cell} holds other settings than its folder is named by, or was written by another version of "
            "spiritlevel; run the study again, which makes a new cell for them"
        )


def _train(folders: list[CellFolder], configs: dict[CellFolder, CellConfig], samples: Samples, sign: AtWork) -> None:
    """Train all cells together, as the study has it, and keep those that were not trained yet."""
    for folder in folders:
        if damage := folder.training_damage():
            _say(f"cell {folder.hash}: {damage}; it is trained again")
    sign.say("training", epochs=configs[folders[0]].training.epochs)
    unfinished = Unfinished(folders[0].unfinished, [folder.hash for folder in folders], _say)
    trained = train([configs[folder] for folder in folders], samples, sign.after_epoch, unfinished)
    for folder, network in zip(folders, trained, strict=True):
        if folder.training() is None:
            folder.write_curve(network.curve)
            metadata = samples.metadata(configs[folder])
            save_checkpoint(network.model, folder.checkpoint, metadata)
            folder.write_training({**_described(network), "along": write_kept(network.along, folder.path, metadata)})


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _described(network: Trained) -> dict[str, Any]:
    last = asdict(network.curve[-1])
    outcomes = {key: last[key] for key in ("train_loss", "train_accuracy", "test_loss", "test_accuracy")}
    described: dict[str, Any] = {
        "reached": network.reached,
        "stop_reason": network.stop_reason,
        "epochs": last["epoch"],
        "steps": network.steps,
        "seconds": network.seconds,
        **outcomes,
        "train_error": 1 - last["train_accuracy"],
        "gradient_norm": network.gradient_norm,
        "ensemble": network.ensemble,
        "computed_with": network.computed_with,
    }
    return dict(json_ready(described))


def _measure(folder: CellFolder, settings: dict[str, Any], config: CellConfig, samples: Samples) -> int:
    with _Failures([folder]) as failures:
        training = _judged(folder, config)
        data = measured_samples(config, samples)
        found: dict[str, Any] = {"measures": None, "rescaled": None, "attacks": []}
        wanted = training["reached"] or config.measure.measure_excluded
        if wanted and training["stop_reason"] != "diverged":
            model = load_checkpoint(build(config, samples.train), folder.checkpoint).eval()
            found = measure_cell(config, model, data)
        found["along"] = _along(folder, config, samples, data, training.pop("along", []))
        folder.write_result(
            {
                "hash": folder.hash,
                "factors": settings["factors"],
                "seed": config.seed,
                "training": training,
                **found,
                "environment": {
                    **environment(),
                    "processor": torch.backends.cpu.get_cpu_capability(),
                    "host": platform.node(),
                },
                "data": {
                    "name": config.data.name,
                    "fingerprint": samples.fingerprint,
                    "samples_train": len(samples.train),
                    "samples_test": len(samples.test),
                    "samples_measured": len(data[0]),
                },
            }
        )
    return failures.outcome


def _along(
    folder: CellFolder, config: CellConfig, samples: Samples, data: Pair, marks: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What is measured at each mark of a training; marks that share their weights share what is measured."""
    measured: dict[str, dict[str, Any]] = {}
    for mark in marks:
        if (name := mark["file"]) not in measured:
            model = load_checkpoint(build(config, samples.train), folder.path / name).eval()
            measured[name] = measure_along(config, model, data)
    return [{**mark, **measured[mark["file"]]} for mark in marks]


def _judged(folder: CellFolder, config: CellConfig) -> dict[str, Any]:
    """How training ended, by what this study requires; it may have been trained for another."""
    training = folder.training()
    assert training is not None
    ended = (float(training[key]) for key in ("train_loss", "train_accuracy", "gradient_norm"))
    return {**training, "reached": arrived(config.training, training["stop_reason"], *ended)}


def _leave_when_stdin_closes(scratch: str | None) -> None:
    """End this process when the one that started it ends: even one that is killed closes its pipes."""

    def wait() -> None:
        while os.read(0, 1):  # not through sys.stdin, whose lock would be held when python ends
            pass
        if scratch is not None:  # nobody else is left to do so
            shutil.rmtree(scratch, ignore_errors=True)
        os._exit(ORPHANED)

    threading.Thread(target=wait, daemon=True).start()


def main(arguments: Sequence[str] | None = None) -> int:
    """The cells named on the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    scratch = next((argument.removeprefix(SCRATCH) for argument in given if argument.startswith(SCRATCH)), None)
    given = [argument for argument in given if not argument.startswith(SCRATCH)]
    if UNTIL_STDIN_CLOSES in given:
        given.remove(UNTIL_STDIN_CLOSES)
        _leave_when_stdin_closes(scratch)
    if not given or any(argument.startswith("-") for argument in given):
        print("usage: python -m spiritlevel.study.worker CELL.json|URL/cells/HASH/cell.json ...", file=sys.stderr)
        return REFUSED
    return compute_away(given, scratch) if is_url(given[0]) else compute(given)


if __name__ == "__main__":
    sys.exit(main())
