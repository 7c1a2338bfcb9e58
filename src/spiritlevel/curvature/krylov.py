"""Extreme eigenpairs of a problem's curvature, several at once: processes that advance in step and share each pass.

Each starts from what a tenth of the data says, where that much is kept in memory, so that few full passes remain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.curvature.lanczos import FEWEST, HELD, Eigenpair, End, Lanczos, eigenpair

# The Krylov vectors of all processes that advance in step: beyond this they restart instead of growing, and where so
# few vectors would not do, the processes take turns.
BASIS_BUDGET = 512 << 20
FEWEST_VECTORS = 10
# A start from part of the data: how well its vectors are known and after how many products it is given up; how many
# products over all data it needs at least, and for how many in a row the bound must hold.
PART_TOLERANCE, PART_PRODUCTS = 1e-3, 30
FEWEST_AFTER_PART, HELD_AFTER_PART = 4, 2
# What the part's picture of H lacks for another scaling, a few products with that one add.
POLISH_TOLERANCE, POLISH_PRODUCTS = 1e-2, 8
# How much of the further Ritz vectors and of the random start stays in it, so that no eigenvector is shut out.
FURTHER, RANDOM = 0.1, 1e-3

Products = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def scaled_eigenpairs(
    products: HessianProducts, wanted: Sequence[tuple[Callable[[], Tensor], End]], start: Tensor, tolerance: float
) -> list[Eigenpair]:
    """One extreme eigenpair of S H S for every (diagonal of S, end) in `wanted`."""
    part = products.has_part()
    found: list[Eigenpair] = []
    size = start.numel() * products.problem.parameters_like().element_size()
    turns = _turns([size] * len(wanted))
    picture = _picture(products, start, _vectors(size)) if part else None
    for turn in turns:
        vectors = _vectors(size * len(turn))
        processes = []
        for scaling, end in (wanted[index] for index in turn):
            scale = scaling()
            first = start.to(scale) * (scale > 0)
            if picture is not None and bool(first.any()):
                first = _from_part(products, picture, scale, first, end, vectors)
            processes.append((_process(first, end, tolerance, part, vectors), scale))
        while active := [(process, scale) for process, scale in processes if not process.done]:
            images = products([scale * process.request for process, scale in active])
            for (process, scale), image in zip(active, images, strict=True):
                process.advance(scale * image)
        pairs = [finished(process) for process, _ in processes]
        found += pairs if len(turns) == 1 else [pair.alone() for pair in pairs]  # where memory is short
    return found


@dataclass(frozen=True)
class Picture:
    """What a Krylov space says of an operator: H ≈ VᵀTV with the rows of V orthonormal."""

    basis: Tensor
    matrix: Tensor

    def scaled(self, scale: Tensor, end: End, count: int = 4) -> Tensor:
        """The extreme eigenvectors of S VᵀTV S, the outermost first: (count, n)."""
        rows = self.basis * scale
        gram = (rows @ rows.mT).double()
        lengths, axes = torch.linalg.eigh(gram)
        live = lengths > 1e-10 * lengths[-1]
        root = axes[:, live] * lengths[live].sqrt()  # gram = root rootᵀ, and rowsᵀ root / lengths is orthonormal
        values, vectors = torch.linalg.eigh(root.mT @ self.matrix.to(root.device) @ root)
        order = values.argsort(descending=True) if end == "largest" else values.argsort()
        if end == "magnitude":
            order = values.abs().argsort(descending=True)
        found: Tensor = ((root / lengths[live]) @ vectors[:, order[:count]]).mT.to(rows) @ rows
        return found


def _picture(products: HessianProducts, start: Tensor, vectors: int) -> Picture:
    """One Krylov space of H over part of the data, from which every scaled operator starts."""
    process = Lanczos(
        start.to(products.problem.parameters_like()),
        tolerance=PART_TOLERANCE,
        end="magnitude",
        most_products=PART_PRODUCTS,
        most_vectors=vectors,
    )
    while not process.done:
        process.advance(products.on_part([process.request])[0])
    return Picture(*process.space())


def block_eigenpairs(
    products: Products,
    part: Products | None,
    shapes: Mapping[str, torch.Size],
    start: Mapping[str, Tensor],
    tolerance: float,
) -> dict[str, Eigenpair]:
    """λ_max of every named diagonal block, all in step; `part` is the same product over part of the data."""
    found: dict[str, Eigenpair] = {}
    names = list(start)
    sizes = [start[name].numel() * start[name].element_size() for name in names]
    for turn in _turns(sizes):
        vectors = _vectors(sum(sizes[index] for index in turn))
        firsts = {names[index]: start[names[index]] for index in turn}
        if part is not None:
            warm = {
                name: _process(vector, "largest", PART_TOLERANCE, part=False, vectors=vectors)
                for name, vector in firsts.items()
            }
            _in_step(warm, part, shapes)
            firsts = {name: _mixed(finished(process), start[name]) for name, process in warm.items()}
        processes = {
            name: _process(vector, "largest", tolerance, part is not None, vectors) for name, vector in firsts.items()
        }
        _in_step(processes, products, shapes)
        found |= {name: finished(process).alone() for name, process in processes.items()}
    return found


def _turns(sizes: Sequence[int]) -> list[list[int]]:
    """Which processes advance in step: as many at a time as keep the fewest vectors each within the budget."""
    turns: list[list[int]] = []
    spent = 0
    for index, size in enumerate(sizes):
        spent += FEWEST_VECTORS * size
        if not turns or spent > BASIS_BUDGET:
            turns.append([])
            spent = FEWEST_VECTORS * size
        turns[-1].append(index)
    return turns


def _vectors(size: int) -> int:
    """How many vectors each of the processes in step may keep, if all of theirs together take `size` bytes."""
    return min(200, max(FEWEST_VECTORS, int(BASIS_BUDGET // max(1, size))))


def _in_step(processes: Mapping[str, Lanczos], products: Products, shapes: Mapping[str, torch.Size]) -> None:
    while active := {name: process for name, process in processes.items() if not process.done}:
        images = products({name: process.request.view(shapes[name]) for name, process in active.items()})
        for name, process in active.items():
            process.advance(images[name].reshape(-1))


def _process(start: Tensor, end: End, tolerance: float, part: bool, vectors: int) -> Lanczos:
    return Lanczos(
        start,
        tolerance=tolerance,
        end=end,
        most_vectors=vectors,
        fewest_products=FEWEST_AFTER_PART if part else FEWEST,
        held=HELD_AFTER_PART if part else HELD,
    )


def _from_part(
    products: HessianProducts, picture: Picture, scale: Tensor, start: Tensor, end: End, vectors: int
) -> Tensor:
    """The start of S H S: what the picture says, polished by a few products over part of the data."""
    guess = picture.scaled(scale, end)
    if not bool(guess[0].any()):
        return start
    first: Tensor = guess[0] / guess[0].norm() + RANDOM * start / start.norm()
    if bool((scale == scale[0]).all()):  # H itself: there is nothing to add
        first += FURTHER * guess[1:].sum(0) / guess[0].norm()
        return first
    pair = eigenpair(
        lambda vector: scale * products.on_part([scale * vector])[0],
        first,
        tolerance=POLISH_TOLERANCE,
        end=end,
        most_products=POLISH_PRODUCTS,
        most_vectors=vectors,
        fewest_products=3,
        held=1,
    )
    return _mixed(pair, start)


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
