"""Extreme eigenpairs of a problem's curvature, several at once: processes that advance in step and share each pass.

Each starts from what a tenth of the data says, where that much is kept in memory, so that few full passes remain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.curvature.lanczos import FEWEST, Eigenpair, End, Lanczos, eigenpair

# Krylov vectors of one process; beyond this it restarts instead of growing.
BASIS_BUDGET = 512 << 20
# A start from part of the data: how well its vectors are known, and how many products over all data it needs at least.
PART_TOLERANCE, FEWEST_AFTER_PART = 1e-4, 4
# How much of the further Ritz vectors and of the random start stays in it, so that no eigenvector is shut out.
FURTHER, RANDOM = 0.1, 1e-3

Products = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def scaled_eigenpairs(
    products: HessianProducts, wanted: Sequence[tuple[Tensor, End]], start: Tensor, tolerance: float
) -> list[Eigenpair]:
    """One extreme eigenpair of S H S for every (diagonal of S, end) in `wanted`."""
    part = products.has_part()
    processes = []
    for scale, end in wanted:
        first = start.to(scale) * (scale > 0)
        if part and bool(first.any()):
            first = _from_part(lambda v, s=scale: s * products.on_part([s * v])[0], first, end)  # type: ignore[misc]
        processes.append((_process(first, end, tolerance, part), scale))
    while active := [(process, scale) for process, scale in processes if not process.done]:
        images = products([scale * process.request for process, scale in active])
        for (process, scale), image in zip(active, images, strict=True):
            process.advance(scale * image)
    return [finished(process) for process, _ in processes]


def block_eigenpairs(
    products: Products,
    part: Products | None,
    shapes: Mapping[str, torch.Size],
    start: Mapping[str, Tensor],
    tolerance: float,
) -> dict[str, Eigenpair]:
    """λ_max of every named diagonal block, all in step; `part` is the same product over part of the data."""
    firsts = dict(start)
    if part is not None:
        warm = {name: _process(vector, "largest", PART_TOLERANCE, part=False) for name, vector in start.items()}
        _in_step(warm, part, shapes)
        firsts = {name: _mixed(finished(process), start[name]) for name, process in warm.items()}
    processes = {name: _process(vector, "largest", tolerance, part is not None) for name, vector in firsts.items()}
    _in_step(processes, products, shapes)
    return {name: finished(process) for name, process in processes.items()}


def _in_step(processes: Mapping[str, Lanczos], products: Products, shapes: Mapping[str, torch.Size]) -> None:
    while active := {name: process for name, process in processes.items() if not process.done}:
        images = products({name: process.request.view(shapes[name]) for name, process in active.items()})
        for name, process in active.items():
            process.advance(images[name].reshape(-1))


def _process(start: Tensor, end: End, tolerance: float, part: bool) -> Lanczos:
    vectors = max(8, int(BASIS_BUDGET // max(1, start.numel() * start.element_size())))
    return Lanczos(
        start,
        tolerance=tolerance,
        end=end,
        most_vectors=min(200, vectors),
        fewest_products=FEWEST_AFTER_PART if part else FEWEST,
    )


def _from_part(matvec: Callable[[Tensor], Tensor], start: Tensor, end: End) -> Tensor:
    return _mixed(eigenpair(matvec, start, tolerance=PART_TOLERANCE, end=end, most_products=40), start)


def _mixed(pair: Eigenpair, start: Tensor) -> Tensor:
    """The eigenvector of the part, with a little of the next ones and of a random vector."""
    if not bool(pair.vector.any()):
        return start
    mixed: Tensor = pair.vector + FURTHER * pair.others.sum(0) + RANDOM * start / start.norm()
    return mixed


def finished(process: Lanczos) -> Eigenpair:
    """The result of a process that is done."""
    assert process.result is not None
    return process.result
