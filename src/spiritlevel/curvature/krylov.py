"""Extreme eigenpairs of a problem's curvature, several at once: processes that advance in step and share each pass.

Each starts from what a tenth of the data says, where that much is kept in memory, so that few full passes remain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spiritlevel.curvature.davidson import WIDE_GAP, Davidson, Known, known_from
from spiritlevel.curvature.hessian import HessianProducts
from spiritlevel.curvature.in_step import Key, Process, Product, Products, finished, in_step, shaped
from spiritlevel.curvature.lanczos import ORDINARY, Care, Eigenpair, End, Lanczos
from spiritlevel.curvature.operators import Divided, Scaled
from spiritlevel.curvature.rivals import doubtful, rivals_from, unaccounted
from spiritlevel.curvature.vectors import length
from spiritlevel.curvature.whole import Columns, is_worth, scaled_eigenpair, whole_hessian
from spiritlevel.problem.ranks import Group
from spiritlevel.problem.shards import WHOLE, Shards

# The Krylov vectors of all processes that advance in step: beyond this they restart instead of growing, and where so
# few vectors would not do, the processes take turns.
BASIS_BUDGET = 512 << 20
FEWEST_VECTORS = 10
# So many further Ritz vectors of an operator are kept for a search at nearby weights.
FURTHER = 3
# A start from part of the data: so many products on the part, and at least so many over all data. Every operator starts from
# its own part, so that an operator which rescaling leaves alone takes the same steps for every rescaled network.
ON_PART, AFTER_PART = 5, Care(fewest=4)
# Where the part is the samples that hold nearly all of the mass, the search ends there, and what the others add is found by
# corrections: so many products with all data at least prove it. Where corrections were made on a wider part, whose other samples
# together hold too little to change which eigenvector is the first, a single product shows that nothing is left to correct.
# Corrections go on until they leave so little of the error that is allowed: a product with all data costs several on the wider part.
ON_HEAVY, AFTER_HEAVY, AFTER_WIDER, CORRECTED_TO = 60, Care(fewest=2), Care(fewest=1), 0.1
FROM_FIRST = Care(fewest=10)
# A search on the part goes on from a second random vector for so many products; where a vector is found that may hide an
# eigenvector, a search goes on for so many at most.
BESIDE, MOST_BESIDE = 3, 40
# Of a small network products cost next to nothing: an eigenvector that hides at first comes up in so many of them, and so
# small a residual tells the members of a cluster apart, as weight decay makes them.
THOROUGH = Care(fewest=64, residual=1e-6)
# How much stronger the part's first Ritz vector is in the start than the others, and how much of a random vector is in it:
# no eigenvector is shut out.
POWER, RANDOM = 3, 0.1
# The same for a start from where a search at nearby weights ended: the order of near eigenvalues may have changed since.
WARM_POWER, WARM_RANDOM, WARM = 1, 0.3, Care(fewest=6)


def scaled_eigenpairs(
    products: HessianProducts,
    wanted: Sequence[tuple[Callable[[], Tensor], End]],
    start: Tensor,
    tolerance: float,
    warm: Sequence[Tensor | None] | None = None,
) -> list[Eigenpair]:
    """One extreme eigenpair of S H S for every (diagonal of S, end) in `wanted`.

    `warm` has for each of them the vectors (k, n) that a search at nearby weights ended with, or None.
    """
    warm = [None] * len(wanted) if warm is None else warm
    group = products.problem.ranks
    if not isinstance(group, Group):
        whole = _from_whole(products, wanted, start, tolerance)
        return whole or _in_turns(products, wanted, start, tolerance, warm)
    divided = Divided(products, group)
    parts = [(_part_of(divided, scaling), end) for scaling, end in wanted]
    warm = [None if vectors is None else divided.part(vectors.to(start)) for vectors in warm]
    return [divided.whole(pair) for pair in _in_turns(divided, parts, divided.part(start), tolerance, warm)]


def _from_whole(
    products: HessianProducts,
    wanted: Sequence[tuple[Callable[[], Tensor], End]],
    start: Tensor,
    tolerance: float,
) -> list[Eigenpair]:
    """The same from the whole Hessian, where that costs less; nothing where not.

    Also where a search has a good start: one from an eigenvector at nearby weights may certify it when another has overtaken.
    """
    if not (products.cheap and products.problem.alone and is_worth(start.numel(), len(wanted))):
        return []
    hessian = whole_hessian(products)
    if hessian is None:
        return []
    return [scaled_eigenpair(hessian, scaling().to(start), end, tolerance, FURTHER) for scaling, end in wanted]


def _part_of(divided: Divided, scaling: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: divided.part(scaling())


def _in_turns(
    products: HessianProducts | Divided,
    wanted: Sequence[tuple[Callable[[], Tensor], End]],
    start: Tensor,
    tolerance: float,
    warm: Sequence[Tensor | None],
) -> list[Eigenpair]:
    """The same for vectors as the products take them, as many searches at a time as fit into memory."""
    part = any(each is None for each in warm) and products.has_part()
    found: list[Eigenpair] = []
    shards = products.shards
    size = int(shards.largest(start.numel() * products.problem.parameters_like().element_size()))
    turns = _turns([size] * len(wanted), shards.size)
    for turn in turns:
        further = FURTHER if len(turns) == 1 else 0  # none where memory is short
        these, vectors = [wanted[index] for index in turn], [warm[index] for index in turn]
        most = _vectors(size * len(these), shards.size)
        found += _scaled_in_step(products, these, start, tolerance, part, further, vectors, most)
    return found


def _scaled_in_step(
    products: HessianProducts | Divided,
    wanted: Sequence[tuple[Callable[[], Tensor], End]],
    start: Tensor,
    tolerance: float,
    part: bool,
    further: int,
    warm: Sequence[Tensor | None],
    most_vectors: int,
) -> list[Eigenpair]:
    """The eigenpairs of one turn. Its bases are gone when it returns, before the next turn asks for its own."""
    processes: dict[int, Process] = {}
    learned: dict[int, Learned] = {}
    operators, makers, shards = {}, {}, products.shards
    for index, ((scaling, end), before) in enumerate(zip(wanted, warm, strict=True)):
        operator = operators[index] = Scaled(products, scaling())
        first = operator.reached(start)
        make = functools.partial(_process, end=end, tolerance=tolerance, vectors=most_vectors, shards=shards)
        make = functools.partial(make, further=further, cheap=products.cheap)
        if not shards.any(bool(first.any())) or (before is None and not part):
            processes[index] = make(Start(first))
        elif before is not None:
            processes[index] = make(_warmed(operator.reached(before), first, shards))
        else:
            learned[index] = _learned(_on_data(operator, first, end, tolerance), first, heavy=products.heavy_first)
            makers[index] = make
        del first  # as large as the model

    def moved(take: Callable[[Sequence[Tensor]], list[Tensor]]) -> Product[int]:
        """The products of all operators with all their vectors, in one pass."""

        def of(asked: dict[int, list[Tensor]]) -> dict[int, list[Tensor]]:
            images = take([moved for index, vectors in asked.items() for moved in operators[index].moved(vectors)])
            return {index: operators[index].moved([images.pop(0) for _ in each]) for index, each in asked.items()}

        return of

    ends = {index: end for index, (_, end) in enumerate(wanted)}
    wider = moved(products.on_wider_part) if products.is_wider else None
    rivals = {index: each.rivals for index, each in learned.items() if each.rivals is not None}
    processes |= _after_parts(learned, makers, wider, tolerance, ends, shards)
    in_step(processes, moved(products))
    warmed = (index for index, before in enumerate(warm) if before is not None)
    _look_beside(processes, ((index, operators[index].reached(start)) for index in warmed), moved(products))
    _defend(processes, rivals, moved(products), moved(products.on_other_part), ends, shards)
    return [finished(processes[index]) for index in range(len(wanted))]


def _look_beside(
    processes: Mapping[Key, Process], starts: Iterable[tuple[Key, Tensor]], products: Product[Key]
) -> None:
    """Searches that went on from nearby weights look from a random vector too: another eigenvalue may have overtaken."""
    for key, start in starts:
        search = processes[key]
        if isinstance(search, Lanczos):
            search.also([_another(start)], fewest=BESIDE, most=MOST_BESIDE)
    in_step(processes, products)


def _defend(
    processes: Mapping[Key, Process],
    rivals: Mapping[Key, Tensor],
    products: Product[Key],
    on_other_part: Product[Key],
    ends: Mapping[Key, End],
    shards: Shards,
) -> None:
    """Where a rival may hide beside what a search has ended with, it goes on from there as well."""
    searches = {key: each for key, each in processes.items() if key in rivals and isinstance(each, Lanczos)}
    outside = {key: unaccounted(search, rivals[key]) for key, search in searches.items()}
    doubted: dict[Key, list[Tensor]] = {}
    while asked := {key: [rest.pop(0)] for key, rest in outside.items() if rest}:
        images = on_other_part(asked)
        for key, (vector,) in asked.items():
            if doubtful(vector, images[key][0], finished(processes[key]).value, ends[key], shards):
                doubted.setdefault(key, []).append(vector)
    for key, search in searches.items():
        vectors = doubted.get(key, [])
        if vectors or (len(rivals[key]) > 1 and search.may_be_overtaken()):
            search.also(vectors, fewest=len(vectors), most=MOST_BESIDE)
    in_step(processes, products)


class Start(NamedTuple):
    """Where a search starts, and what it then does before it stops."""

    vector: Tensor
    care: Care = ORDINARY


def _on_data(operator: Scaled, start: Tensor, end: End, tolerance: float) -> Lanczos:
    """A search on part of the data."""
    shards = operator.products.shards
    search = _on_heavy(start, end, shards, tolerance) if operator.products.heavy_first else _on_part(start, end, shards)
    _driven(search, operator.on_part)
    _also_another(search, start, operator.products.heavy_first)
    return _driven(search, operator.on_part)


class Learned(NamedTuple):
    """What a search on part of the data leaves behind: all it has found in one vector, and its leading eigenpairs where the part
    holds nearly all of the mass. Its basis is gone."""

    blended: Start
    known: Known | None
    rivals: Tensor | None


def _learned(search: Lanczos, start: Tensor, *, heavy: bool) -> Learned:
    blended = _blended(search, start, search.shards)
    if not search.products:
        return Learned(blended, None, None)
    return Learned(blended, known_from(search), None) if heavy else Learned(blended, None, rivals_from(search))


def _after_parts(
    learned: dict[Key, Learned],
    makers: Mapping[Key, Callable[[Start], Lanczos]],
    wider: Product[Key] | None,
    tolerance: float,
    ends: Mapping[Key, End],
    shards: Shards,
) -> dict[Key, Process]:
    """The searches with all data after those on part of them, whose findings are first corrected on a wider part if there is one.

    What was learned is gone afterwards: it is several times as large as the model.
    """
    known = {key: each.known for key, each in learned.items() if each.known is not None}
    if wider is not None and known:
        known = _corrected(known, wider, tolerance, ends, shards)
    care = AFTER_HEAVY if wider is None else AFTER_WIDER
    processes: dict[Key, Process] = {}
    for key in list(learned):
        once_known, blended = learned[key].known is not None, learned.pop(key).blended
        if once_known and key not in known:  # the part was no part of this operator
            processes[key] = makers[key](blended._replace(care=ORDINARY))
        elif key in known:
            search = functools.partial(Davidson, tolerance=tolerance, end=ends[key], care=care, shards=shards)
            processes[key] = search(known.pop(key), functools.partial(makers[key], blended))
        else:
            processes[key] = makers[key](blended)
    return processes


def _corrected(
    known: Mapping[Key, Known], product: Product[Key], tolerance: float, ends: Mapping[Key, End], shards: Shards
) -> dict[Key, Known]:
    """What is known of operators, after corrections by products over more samples; nothing of those that it was wrong about."""
    tolerance *= CORRECTED_TO
    make = functools.partial(
        Davidson, otherwise=None, tolerance=tolerance, care=AFTER_WIDER, shards=shards, near=WIDE_GAP
    )
    searches = {key: make(each, end=ends[key]) for key, each in known.items()}
    in_step(searches, product)
    return {key: search.known() for key, search in searches.items() if not search.misled}


def _also_another(search: Lanczos, start: Tensor, heavy: bool) -> None:
    """A search on the part goes on from a second random vector: it may have ended with one of several near eigenvectors."""
    search.also([_another(start)], fewest=BESIDE, most=MOST_BESIDE if heavy else BESIDE)


def _driven(search: Lanczos, product: Callable[[Sequence[Tensor]], list[Tensor]]) -> Lanczos:
    while not search.done:
        search.advance(product([search.request])[0])
    return search


def block_eigenpairs(
    products: Products,
    part: Products | None,
    shapes: Mapping[str, torch.Size],
    start: Mapping[str, Tensor],
    tolerance: float,
    warm: Mapping[str, Tensor] | None = None,
    shards: Shards = WHOLE,
    *,
    cheap: bool,
    heavy: bool = False,
    other_part: Products | None = None,
    wider_part: Products | None = None,
) -> dict[str, Eigenpair]:
    """λ_max of every named diagonal block, all in step; `part` is the same product over part of the data.

    `heavy` says that this part holds nearly all of the mass, and `wider_part` is then the same over one that holds more. `warm` has the vectors (k, n) that a search at nearby weights ended with: for all blocks, or none. `cheap` says that
    products cost next to nothing.
    """
    found: dict[str, Eigenpair] = {}
    names = list(start)
    sizes = [int(shards.largest(start[name].numel() * start[name].element_size())) for name in names]
    for turn in _turns(sizes, shards.size):
        starts = {names[index]: start[names[index]] for index in turn}
        vectors = _vectors(sum(sizes[index] for index in turn), shards.size)
        search = functools.partial(
            _blocks_in_step, products, part, shapes, starts, tolerance, warm or {}, vectors, shards
        )
        found |= search(cheap=cheap, heavy=heavy, other_part=other_part, wider_part=wider_part)
    return found


def _blocks_in_step(
    products: Products,
    part: Products | None,
    shapes: Mapping[str, torch.Size],
    start: Mapping[str, Tensor],
    tolerance: float,
    known: Mapping[str, Tensor],
    vectors: int,
    shards: Shards,
    *,
    cheap: bool,
    heavy: bool,
    other_part: Products | None,
    wider_part: Products | None,
) -> dict[str, Eigenpair]:
    """The blocks of one turn, whose bases are gone when it returns."""
    make = functools.partial(_process, end="largest", tolerance=tolerance, vectors=vectors, further=0, shards=shards)
    make = functools.partial(make, cheap=cheap)
    written: dict[str, Process] = {}
    if cheap and not shards.divided:
        small = [name for name, vector in start.items() if is_worth(vector.numel(), searches=1)]
        written = {name: Columns(start[name], end="largest", tolerance=tolerance) for name in small}
        start = {name: vector for name, vector in start.items() if name not in written}
    processes: dict[str, Process] = {}
    rivals: dict[str, Tensor] = {}
    ends: dict[str, End] = dict.fromkeys(start, "largest")
    if known:
        processes = {name: make(_warmed(known[name].to(vector), vector, shards)) for name, vector in start.items()}
    elif part is not None:
        make_search = functools.partial(_on_heavy, tolerance=tolerance) if heavy else _on_part
        searches = {name: make_search(vector, "largest", shards) for name, vector in start.items()}
        _search_part(searches, shaped(part, shapes), start, heavy)
        learned = {name: _learned(searches.pop(name), start[name], heavy=heavy) for name in start}
        rivals = {name: each.rivals for name, each in learned.items() if each.rivals is not None}
        wider = None if wider_part is None else shaped(wider_part, shapes)
        processes = _after_parts(learned, dict.fromkeys(start, make), wider, tolerance, ends, shards)
    else:
        processes = {name: make(Start(vector)) for name, vector in start.items()}
    processes |= written
    in_step(processes, flat := shaped(products, shapes))
    _look_beside(processes, start.items() if known else (), flat)
    look = shaped(other_part or products, shapes)
    _defend(processes, rivals, flat, look, ends, shards)
    return {name: finished(process) for name, process in processes.items()}


def _search_part(
    searches: Mapping[str, Lanczos], product: Product[str], start: Mapping[str, Tensor], heavy: bool
) -> None:
    """Searches on part of the data, from two random vectors each."""
    in_step(searches, product)
    for name, search in searches.items():
        _also_another(search, start[name], heavy)
    in_step(searches, product)


def _turns(sizes: Sequence[int], processes: int = 1) -> list[list[int]]:
    """Which processes advance in step: as many at a time as keep the fewest vectors each within the budget."""
    turns: list[list[int]] = []
    spent = 0
    for index, size in enumerate(sizes):
        spent += FEWEST_VECTORS * size
        if not turns or spent > BASIS_BUDGET // processes:
            turns.append([])
            spent = FEWEST_VECTORS * size
        turns[-1].append(index)
    return turns


def _vectors(size: int, processes: int = 1) -> int:
    """How many vectors each of the searches in step may keep, if one of each take `size` bytes together.

    Where vectors are divided among several processes of the machine, so is the budget.
    """
    return min(200, max(FEWEST_VECTORS, int(BASIS_BUDGET // processes // max(1, size))))


def _process(
    start: Start, *, end: End, tolerance: float, vectors: int, further: int, shards: Shards, cheap: bool
) -> Lanczos:
    care = THOROUGH if cheap else start.care
    make = functools.partial(Lanczos, most_vectors=vectors, care=care, further=further, shards=shards)
    return make(start.vector, tolerance=tolerance, end=end)


def _on_part(start: Tensor, end: End, shards: Shards) -> Lanczos:
    """A search that never converges and ends after a fixed number of products."""
    most = ON_PART + BESIDE + 2
    return Lanczos(start, tolerance=0, end=end, most_products=ON_PART, most_vectors=most, further=0, shards=shards)


def _another(start: Tensor) -> Tensor:
    """A second random vector, from the first: with other signs."""
    signs = torch.randint(0, 2, start.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return start * signs.to(start)


def _on_heavy(start: Tensor, end: End, shards: Shards, tolerance: float) -> Lanczos:
    """A search on the part as thorough as one on all data."""
    most = ON_HEAVY + MOST_BESIDE + 2
    make = functools.partial(Lanczos, most_products=ON_HEAVY, most_vectors=most, further=0, shards=shards)
    return make(start, tolerance=tolerance, end=end, care=FROM_FIRST)


def _blended(search: Lanczos, start: Tensor, shards: Shards) -> Start:
    """What a search on the part has found, with a little of the random vector it started from."""
    if not shards.any(bool(finished(search).vector.any())):
        return Start(start, AFTER_PART)
    blended = search.blend(POWER)
    return Start(blended.add(start, alpha=RANDOM * length(blended, shards) / length(start, shards)), AFTER_PART)


def _warmed(vectors: Tensor, start: Tensor, shards: Shards) -> Start:
    """What a search at nearby weights ended with, the first vector the strongest, with some of the random start."""
    strengths = 1 / torch.arange(1, len(vectors) + 1).to(vectors) ** WARM_POWER
    blended = strengths @ vectors
    size = length(blended, shards)
    warmed = blended.add(start, alpha=WARM_RANDOM * size / length(start, shards)) if size > 0 else start
    return Start(warmed, WARM)
