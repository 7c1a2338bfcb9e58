"""Searches that advance in step: one pass over the data serves all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from spiritlevel.curvature.davidson import Davidson
from spiritlevel.curvature.lanczos import Eigenpair, Lanczos
from spiritlevel.curvature.whole import Columns

Products = Callable[[dict[str, Tensor]], dict[str, Tensor]]
Process = Lanczos | Davidson | Columns

Key = TypeVar("Key", int, str)
# Of every operator the images of its vectors in one pass: of all of them, or of the first where a pass takes no more.
Product = Callable[[dict[Key, list[Tensor]]], dict[Key, list[Tensor]]]


def in_step(processes: Mapping[Key, Process], products: Product[Key]) -> None:
    """Advance all until they are done."""
    while active := {key: process for key, process in processes.items() if not process.done}:
        images = products({key: _requests(process) for key, process in active.items()})
        for key, process in active.items():
            for image in images.pop(key):
                process.advance(image)


def _requests(process: Process) -> list[Tensor]:
    return process.requests if isinstance(process, Davidson) else [process.request]


def shaped(products: Products, shapes: Mapping[str, torch.Size]) -> Product[str]:
    """The same products for flat vectors, of every block the first."""

    def flat(asked: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        images = products({name: vectors[0].view(shapes[name]) for name, vectors in asked.items()})
        return {name: [image.reshape(-1)] for name, image in images.items()}

    return flat


def finished(process: Process) -> Eigenpair:
    """The result of a process that is done."""
    assert process.result is not None
    return process.result
