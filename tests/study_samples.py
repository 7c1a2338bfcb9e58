"""Study folders made by hand: real reports of a tiny network, their numbers moved by what a study would find."""

from __future__ import annotations

import copy
import csv
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import spiritlevel as sl

PLAIN = ("hessian_trace", "hessian_spectral_norm")
INVARIANT = ("riemannian_spectral_norm", "normalized_sharpness", "kappa_max", "kappa_sum", "kappa_trace_max",
             "kappa_trace_sum", "rho_max", "rho_sum")  # fmt: skip

GRIDS: Mapping[str, dict[str, Any]] = {
    "petzka-mnist": {
        "title": "Layer measures at batch sizes from 1000 to 8000",
        "paper": "petzka2019",
        "gap": "loss",
        "factors": {"training.batch_size": [1000, 2000, 4000, 8000], "training.learning_rate": [0.02, 0.1, 0.4, 1.6],
                    "model.initialization": ["xavier_normal", "uniform"]},
        "tied": [["training.batch_size", "training.learning_rate"]],
        "seeds": 6,
    },
    "tsuzuku-mnist": {
        "title": "Random labels",
        "paper": "tsuzuku2019",
        "gap": "accuracy",
        "factors": {"data.label_noise": [round(0.1 * i, 1) for i in range(11)]},
        "tied": [],
        "seeds": 4,
    },
    "rangamani-mnist": {
        "title": "Small and large batches",
        "paper": "rangamani2019",
        "gap": "accuracy",
        "factors": {"model.name": ["fully_connected", "lenet"], "training.batch_size": [256, 5000]},
        "tied": [],
        "seeds": 5,
    },
    "dinh-attack": {
        "title": "Made sharp on purpose",
        "paper": "dinh2017",
        "gap": "accuracy",
        "factors": {},
        "tied": [],
        "seeds": 3,
    },
}  # fmt: skip


@cache
def real_report() -> str:
    """The saved report of a small trained network."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(60, 6, generator=generator), torch.randint(3, (60,), generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return json.dumps(sl.measure(model, (x, y), measures=[*PLAIN, *INVARIANT], tolerance=1e-3).to_dict())


def moved(factors: Mapping[str, float], layers: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The real report with every measure times its factor, and the layers of each also times their own."""
    report: dict[str, Any] = copy.deepcopy(json.loads(real_report()))
    for name, value in report["values"].items():
        factor = factors[name]
        value["value"], value["error"] = value["value"] * factor, value["error"] * factor
        value["layers"] = {k: v * factor * (layers or {}).get(k, 1.0) for k, v in value["layers"].items()}
        value["witness"] = None
    return report


def fabricate(
    folder: Path,
    kind: str = "petzka-mnist",
    *,
    excluded: int = 1,
    failed: int = 1,
    unfinished: int = 1,
    cells: int | None = None,
    measures: Sequence[str] = (*PLAIN, *INVARIANT),
    seed: int = 0,
) -> Path:
    """A study's folder in which invariant measures rank well, plain ones worse, and rescaling ruins the plain ones."""
    grid = GRIDS[kind]
    described = _cells(grid)[:cells]
    study = {"name": kind, "version": "0.1.0", **grid, "cells": described}
    del study["seeds"]
    study["config"] = {
        "model": "mlp",
        "data": "mnist",
        "training": {"optimizer": "sgd", "epochs": 100, "stop": "train_error"},
        "measures": [*PLAIN, *INVARIANT],
    }
    _write(folder / "study.json", study)
    generator = np.random.default_rng(seed)
    for number, cell in enumerate(described):
        place = folder / "cells" / cell["hash"]
        _write(place / "cell.json", {**cell, "config": {}})
        result = _result(cell, grid, kind, generator, reached=number >= excluded)
        if number >= len(described) - unfinished:
            continue
        if number >= len(described) - unfinished - failed:
            error = {"error": "RuntimeError: the worker was killed (signal 9)", "traceback": "…", "attempts": 2}
            _write(place / "failed.json", error)
            continue
        for report in (
            result["measures"],
            result["rescaled"],
            *(each["measures"] for each in result.get("attacks", ())),
        ):
            if report is not None:
                report["values"] = {name: report["values"][name] for name in measures}
        _write(place / "result.json", result)
        _curve(place / "curve.csv", result["training"])
    return folder


def _cells(grid: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The crossed grid, tied factors moving together."""
    names: list[tuple[str, ...]] = []
    for name in grid["factors"]:
        group = next((tuple(tied) for tied in grid["tied"] if name in tied), (name,))
        if group not in names:
            names.append(group)
    levels: list[Sequence[tuple[Any, ...]]] = [
        list(zip(*(grid["factors"][n] for n in group), strict=True)) for group in names
    ]
    found = []
    for number, chosen in enumerate(itertools.product(*levels)):
        factors = {
            n: v for group, values in zip(names, chosen, strict=True) for n, v in zip(group, values, strict=True)
        }
        for seed in range(grid["seeds"]):
            place = number * grid["seeds"] + seed
            found.append({"hash": f"{place:04x}{7919 * place % 65536:04x}", "factors": factors, "seed": seed})
    return found


def _result(
    cell: dict[str, Any], grid: Mapping[str, Any], kind: str, generator: np.random.Generator, *, reached: bool
) -> dict[str, Any]:
    sharp = _sharpness(cell["factors"], grid) + 0.3 * generator.normal()
    gap = 0.02 + 0.03 * sharp + 0.008 * generator.normal()
    train_loss = float(np.exp(-6 + 0.3 * generator.normal()))
    training = {
        "reached": reached,
        "stop_reason": "train accuracy reached 1" if reached else "100 epochs passed",
        "epochs": 40 + int(20 * generator.random()),
        "steps": 4000,
        "seconds": 12.5,
        "train_loss": train_loss,
        "train_accuracy": 1.0 if reached else 0.83,
        "test_loss": train_loss + 4 * gap,
        "test_accuracy": (1.0 if reached else 0.83) - gap,
        "train_error": 0.0 if reached else 0.17,
        "gradient_norm": 1e-4,
    }
    noise = {name: 0.35 + 0.1 * i for i, name in enumerate((*INVARIANT, *PLAIN))}
    factors = {name: float(np.exp(2.5 * sharp + noise[name] * generator.normal())) for name in noise}
    depth = {f"{i}.weight": float(np.exp(0.3 * (i + 1) * generator.normal())) for i in (0, 2, 4)}
    twisted = {
        n: f * float(np.exp(3 * generator.normal())) if n in PLAIN else f * (1 + 1e-9) for n, f in factors.items()
    }
    result = {
        **cell,
        "training": training,
        "measures": moved(factors, depth) if reached else None,
        "rescaled": moved(twisted, depth) if reached and kind == "petzka-mnist" else None,
        "environment": {"python": "3.11.2", "torch": "2.13.0", "spiritlevel": "0.1.0", "threads": "1"},
        "data": {"name": "mnist", "fingerprint": "6b1f", "samples_train": 60000, "samples_test": 10000,
                 "samples_measured": 5000},
    }  # fmt: skip
    if kind == "dinh-attack" and reached:
        result["attacks"] = [
            {
                "target": target,
                "output_change": 1e-15,
                "measures": moved({n: f * (target if n in PLAIN else 1 + 1e-9) for n, f in factors.items()}),
            }
            for target in (1e2, 1e4, 1e6)
        ]
    return result


def _sharpness(factors: Mapping[str, Any], grid: Mapping[str, Any]) -> float:
    """From 0 to 1 along the first numeric factor."""
    name = next((n for n in ("training.batch_size", "data.label_noise") if n in factors), None)
    if name is None:
        return 0.5
    levels = grid["factors"][name]
    return float(levels.index(factors[name]) / (len(levels) - 1))


def _curve(path: Path, training: Mapping[str, Any]) -> None:
    epochs = training["epochs"]
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(("epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "learning_rate"))
        for epoch in range(1, epochs + 1):
            share = epoch / epochs
            loss = math.exp((1 - share) * math.log(2.3) + share * math.log(training["train_loss"]))
            accuracy = 0.1 + (training["test_accuracy"] - 0.1) * share**0.3
            writer.writerow((epoch, loss, min(1.0, accuracy + 0.02), loss + 0.1, accuracy, 0.1))


def _write(path: Path, plain: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain), encoding="utf-8")


def followed(folder: Path, levels: tuple[float, ...] = (1.0, 0.1)) -> Path:
    """A fabricated study in which every network was also measured at levels, where it was as it is at the end."""
    for path in sorted(folder.glob("cells/*/result.json")):
        result: dict[str, Any] = json.loads(path.read_text())
        training = result["training"]
        result["along"] = [
            {"kind": "loss", "level": level, "step": step, "epoch": step / 100, "train_loss": 0.9 * level,
             "test_loss": 0.9 * level + training["test_loss"] - training["train_loss"],
             "train_accuracy": training["train_accuracy"], "test_accuracy": training["test_accuracy"],
             "measures": result["measures"]}
            for step, level in enumerate(levels, 1)
        ]  # fmt: skip
        path.write_text(json.dumps(result))
    return folder
