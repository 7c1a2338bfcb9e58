"""Products with the Hessian of a problem, several vectors in every pass over the data.

The graph of a chunk's gradient is built once and kept while it fits a memory budget; each vector is then pulled back
through it, which costs little more than a gradient. Chunks that do not fit are rebuilt at every pass. A preflight
compares one product with a central difference of gradients and picks a way that agrees.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from spiritlevel.curvature.convolutions import CheapConvolutions
from spiritlevel.errors import SpiritLevelError
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.checks import refuse_nonfinite_loss
from spiritlevel.problem.contract import Parameters
from spiritlevel.problem.problem import Problem, counting_saved_bytes, gradients_of
from spiritlevel.problem.ranks import Ranks

Method = Literal["kept graph", "jvp of the gradient", "central differences"]
Objective = Callable[[Problem, Parameters, Batch], Tensor]

# The graphs of gradients that are kept between products, all chunks together: so much, or an eighth of the machine's memory
# if that is less; a large model may keep as much as so many copies of itself.
GRAPH_BUDGET, GRAPH_COPIES = 1536 << 20, 4
# The part of the data that a search starts from has so many samples at least, up to a fifth of all. It is made of whole chunks,
# and of few samples there are few; a part of more than this share is not worth its products.
PART_SAMPLES, MOST_IN_PART = 200, 1 / 3


def loss_objective(problem: Problem, parameters: Parameters, chunk: Batch) -> Tensor:
    """The mean loss over a chunk: its Hessian is H."""
    return problem.chunk_loss(parameters, chunk)


def remainder_objective(problem: Problem, parameters: Parameters, chunk: Batch) -> Tensor:
    """Σ_n r_n·f_n with r = ∇ℓ held fixed: its Hessian is H less the Gauss–Newton matrix."""
    outputs = problem.outputs(parameters, chunk)
    probe = outputs.detach().requires_grad_()
    (slope,) = torch.autograd.grad(problem.loss_function.mean(probe, chunk.targets), probe)
    total: Tensor = (outputs * slope).sum()
    return total


class Flat:
    """Parameters as one vector and back."""

    def __init__(self, parameters: Parameters) -> None:
        self.names = list(parameters)
        self.shapes = [parameters[name].shape for name in self.names]
        self.sizes = [shape.numel() for shape in self.shapes]
        self.size = sum(self.sizes)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.reshape(-1) for part in parts])

    def split(self, vector: Tensor) -> list[Tensor]:
        pieces = torch.split(vector, self.sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def to_dict(self, vector: Tensor) -> Parameters:
        return dict(zip(self.names, self.split(vector), strict=True))

    def slices(self) -> dict[str, slice]:
        ends = torch.tensor(self.sizes).cumsum(0).tolist()
        return {name: slice(end - size, end) for name, end, size in zip(self.names, ends, self.sizes, strict=True)}


Edges = list[GradientEdge | None]


@dataclass
class _Kept:
    """The graph of one chunk's gradient: where vectors enter it and where they arrive. The gradient itself is not kept."""

    leaves: list[Tensor]
    edges: Edges
    weight: float


class _Sum:
    """The mean of images over chunks, in double precision; one chunk that is all of the data is taken as it is."""

    def __init__(self, like: Tensor, ranks: Ranks) -> None:
        self._like, self._alone = like, ranks.size == 1
        self._total: Tensor | None = None

    def add(self, image: Tensor, weight: float) -> None:
        """Add weight · image. The image may be the very vector it is an image of, as it is where H is the identity."""
        if self._total is None and self._alone and weight == 1:
            self._total = image.clone() if image.data_ptr() == self._like.data_ptr() else image
        else:
            self._total = self.value().add_(image, alpha=weight)

    def value(self) -> Tensor:
        if self._total is None:
            self._total = torch.zeros_like(self._like, dtype=torch.float64)
        return self._total


class HessianProducts:
    """H·v for a problem, or the Hessian of another objective of the same network.

    Args:
        problem: The problem.
        objective: What is differentiated twice; the loss by default.
        budget: Bytes that kept graphs may take; by default 1.5 GB (or an eighth of the memory), or four copies of the model if
            that is more.
        method: How products are made; decided by a preflight where None.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        objective: Objective = loss_objective,
        budget: int | None = None,
        method: Method | None = None,
    ) -> None:
        self.problem, self.objective = problem, objective
        self.flat = Flat(problem.parameters)
        self.notes: list[str] = []
        problem.check_derivatives()
        self.method = method or self._preflight()
        copies = GRAPH_COPIES * self.flat.size * problem.parameters_like().element_size()
        self._budget = max(min(GRAPH_BUDGET, _memory(problem.device) // 8), copies) if budget is None else budget
        self._chunk_size = problem.part_chunk_size()
        self._kept: list[_Kept] = []
        self._prepared = False
        self._weight = self._part_share = 0.0  # of this process's data, and of all processes' parts, in the mean
        self._bytes_per_sample: float | None = None
        self.loss: float | None = None
        self.gradient: Tensor | None = None

    def __call__(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """H times every vector, in one pass over the data."""
        found = self._sum(vectors, self._chunks())
        self.problem.work.add(passes=1, products=len(vectors))
        return found

    def on_part(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """H times every vector over about a tenth of the data only: a cheap stand-in to start a search from."""
        share = self._part_share
        found = self._sum(vectors, ((kept, kept.weight / share) for kept in self._part()))
        self.problem.work.add(passes=share, products=share * len(vectors))
        return found

    def release(self) -> None:
        """Let go of the kept graphs; the next product builds them again."""
        self._kept, self._prepared = [], False

    def has_part(self) -> bool:
        """Whether a tenth of the data is kept; builds the graphs if that has not happened yet."""
        if self.method == "kept graph" and not self._prepared:
            with self.problem.undisturbed():
                for _ in self._prepare():
                    pass
            self.problem.work.add(passes=1)
        self._part_share = self.problem.ranks.total(sum(kept.weight for kept in self._part()))
        return 0 < self._part_share <= MOST_IN_PART

    def _part(self) -> list[_Kept]:
        """About a tenth of this process's data."""
        return spread_part(self._kept, self._weight, self.problem.samples)

    def _sum(self, vectors: Sequence[Tensor], chunks: Iterable[tuple[Any, float]]) -> list[Tensor]:
        sums = [_Sum(vector, self.problem.ranks) for vector in vectors]
        parts = [self.flat.split(vector) for vector in vectors]
        with self.problem.undisturbed():
            for chunk in chunks:
                for total, part in zip(sums, parts, strict=True):
                    total.add(self.flat.join(self._chunk_product(chunk, part)), chunk[1])
        self.problem.ranks.sum_([total.value() for total in sums])
        return [total.value().to(vector.dtype) for total, vector in zip(sums, vectors, strict=True)]

    def within(self, requests: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """H_SS v for every request, a vector on a set S of parameters, all in one pass over the data.

        With a single parameter this is its diagonal block.
        """
        ranks = self.problem.ranks
        sums = [{name: _Sum(vector, ranks) for name, vector in request.items()} for request in requests]
        with self.problem.undisturbed():
            for chunk in self._chunks():
                for total, request in zip(sums, requests, strict=True):
                    for name, image in self._restricted_product(chunk, request).items():
                        total[name].add(image, chunk[1])
        ranks.sum_([part.value() for total in sums for part in total.values()])
        self.problem.work.add(passes=1, products=len(requests))
        dtype = self.problem.dtype
        return [{name: part.value().to(dtype) for name, part in total.items()} for total in sums]

    # --- one chunk -----------------------------------------------------------------------------------------------

    def _chunk_product(self, chunk: tuple[Any, float], parts: list[Tensor]) -> list[Tensor]:
        content = chunk[0]
        if isinstance(content, _Kept):
            return _pull_back(content.edges, content.leaves, parts)
        return self._directional(content, parts)

    def _restricted_product(self, chunk: tuple[Any, float], vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        content = chunk[0]
        if isinstance(content, _Kept):
            chosen = [self.flat.names.index(name) for name in vectors]
            edges, leaves = [content.edges[index] for index in chosen], [content.leaves[index] for index in chosen]
            return dict(zip(vectors, _pull_back(edges, leaves, list(vectors.values())), strict=True))
        like = self.problem.parameters_like()
        parts = [
            vectors[name] if name in vectors else like.new_zeros(shape)
            for name, shape in zip(self.flat.names, self.flat.shapes, strict=True)
        ]
        found = dict(zip(self.flat.names, self._directional(content, parts), strict=True))
        return {name: found[name] for name in vectors}

    def _directional(self, chunk: Batch, parts: list[Tensor]) -> list[Tensor]:
        if self.method == "jvp of the gradient":
            return self._forward_over_reverse(self.problem.parameters, chunk, parts)
        return self._difference(self.problem.parameters, chunk, parts)

    def _chunks(self) -> Iterator[tuple[Any, float]]:
        """The chunks of one pass: kept graphs first, fresh ones after them."""
        if self.method != "kept graph":
            yield from self.problem.chunks(self._chunk_size)
            return
        if not self._prepared:
            yield from self._prepare()
            return
        for kept in self._kept:
            yield kept, kept.weight
        if len(self._kept) < self._num_chunks:
            for index, (chunk, weight) in enumerate(self.problem.chunks(self._chunk_size)):
                if index >= len(self._kept):
                    yield self._graph(chunk, weight)[0], weight

    def _prepare(self) -> Iterator[tuple[_Kept, float]]:
        """The first pass: build every graph, keep those that fit, and have the gradient on the way."""
        spent, loss, self._weight = 0, 0.0, 0.0
        gradient = torch.zeros(self.flat.size, dtype=torch.float64, device=self.problem.device)
        count = 0
        for chunk, weight in self.problem.chunks(self._chunk_size):
            kept, value, slope = self._graph(chunk, weight)
            spent += self._graph_bytes(len(chunk))
            if spent <= self._budget and len(self._kept) == count:
                self._kept.append(kept)
            gradient.add_(self.flat.join([part.detach() for part in slope]), alpha=weight)
            loss += weight * value
            del slope
            count += 1
            self._weight += weight
            yield kept, weight
        self._num_chunks, self._prepared = count, True
        self.problem.ranks.sum_([gradient])
        self.loss, self.gradient = self.problem.ranks.total(loss), gradient.to(self.problem.dtype)
        self.problem.work.add(gradients=1)

    def _graph_bytes(self, samples: int) -> int:
        """What keeping the graph of a chunk takes: what autograd saves for every sample."""
        if self._bytes_per_sample is None:
            few = self.problem.few_samples(4)
            with counting_saved_bytes(self.problem.known_storages()) as saved:
                self._graph(few, 1.0)
            self._bytes_per_sample = saved.bytes / len(few)
        return int(samples * self._bytes_per_sample)

    def _graph(self, chunk: Batch, weight: float) -> tuple[_Kept, float, list[Tensor]]:
        """The graph of a chunk's gradient, the chunk's mean of the objective, and the gradient."""
        leaves = list(self.problem.leaves().values())
        with torch.enable_grad(), CheapConvolutions():
            value = self.objective(self.problem, dict(zip(self.flat.names, leaves, strict=True)), chunk)
            gradient = gradients_of(value, leaves, create_graph=True)
        return _Kept(leaves, _edges(gradient), weight), float(value.detach()), gradient

    def _forward_over_reverse(self, parameters: Parameters, chunk: Batch, parts: list[Tensor]) -> list[Tensor]:
        names = self.flat.names

        def gradient(*tensors: Tensor) -> tuple[Tensor, ...]:
            def value(*point: Tensor) -> Tensor:
                return self.objective(self.problem, dict(zip(names, point, strict=True)), chunk)

            found: tuple[Tensor, ...] = torch.func.grad(value, argnums=tuple(range(len(names))))(*tensors)
            return found

        point = tuple(parameters[name].detach() for name in names)
        return list(torch.func.jvp(gradient, point, tuple(parts))[1])

    def _difference(
        self, parameters: Parameters, chunk: Batch, parts: list[Tensor], stretch: float = 1.0
    ) -> list[Tensor]:
        """(∇L(θ+hv) − ∇L(θ−hv)) / 2h with h at the cube root of the precision, relative to θ and v."""
        values = [parameters[name] for name in self.flat.names]
        size, length = _distance(values), _distance(parts)
        if length == 0:
            return [torch.zeros_like(part) for part in parts]
        step = torch.finfo(values[0].dtype).eps ** (1 / 3) * max(size, 1e-30) / length * 0.1 * stretch
        sides = []
        for sign in (1, -1):
            moved = [value + sign * step * part for value, part in zip(values, parts, strict=True)]
            sides.append(self._gradient(dict(zip(self.flat.names, moved, strict=True)), chunk))
        return [(plus - minus) / (2 * step) for plus, minus in zip(*sides, strict=True)]

    @property
    def order(self) -> float:
        """The power of the precision that the error of a product goes with."""
        return 2 / 3 if self.method == "central differences" else 1.0

    def forms(self, batch: Batch, vectors: Sequence[Mapping[str, Tensor]]) -> list[float]:
        """vᵀHv of one batch's mean for every vector on some parameters, in the problem's present precision."""
        like = self.problem.parameters_like()
        content = self._graph(batch, 1.0)[0] if self.method == "kept graph" else batch
        found = []
        for vector in vectors:
            fitted = {name: part.to(like) for name, part in vector.items()}
            images = self._restricted_product((content, 1.0), fitted)
            found.append(sum(float((part.double() * images[name].double()).sum()) for name, part in fitted.items()))
        return found

    # --- preflight -----------------------------------------------------------------------------------------------

    def _preflight(self) -> Method:
        """One product of a few samples, each way, against a central difference of gradients in double precision.

        It is taken at a slightly moved point, so that a ReLU that sits exactly at its kink proves nothing. Among a million
        of them one may still have its kink within the step, and where the loss is all but zero the gradient has few digits
        left: later trials take shorter and longer steps.
        """
        few = self.problem.telling_samples(2)
        with self.problem.undisturbed():
            try:
                with self.problem.in_precision(torch.float64) as double:
                    return self._choose(double(few), torch.float64, 1e-3)
            except RuntimeError as error:
                if "dtype" not in str(error) and "type" not in str(error):
                    raise
                return self._choose(few, self.problem.dtype, 0.1)  # the network insists on its own precision

    def _choose(self, batch: Batch, dtype: torch.dtype, tolerance: float) -> Method:
        failures: list[str] = []
        ways: dict[Method, Callable[[Parameters, Batch, list[Tensor]], list[Tensor]]] = {
            "kept graph": self._graph_product,
            "jvp of the gradient": self._forward_over_reverse,
        }
        generator = torch.Generator().manual_seed(0)
        for stretch in (1.0, 1e-1, 1e-2, 1e2, 3e2):
            point, direction = self._trial(generator, dtype)
            gradient = self._gradient(point, batch)
            # Without entries of zero gradient: autograd holds the row of an embedding's padding fixed.
            direction = [step * (part != 0) for step, part in zip(direction, gradient, strict=True)]
            expected = self._difference(point, batch, direction, stretch)
            # What rounding can leave in a difference of gradients where the true product is zero.
            relative = _distance(direction) / max(_distance(list(point.values())), 1e-30)
            noise = torch.finfo(dtype).eps ** 0.5 * _distance(gradient) * relative
            for method, product in ways.items():
                try:
                    found = product(point, batch, direction)
                except (RuntimeError, NotImplementedError) as error:
                    told = str(error).splitlines() or [type(error).__name__]
                    failures.append(f"{method} failed ({told[0]})")
                    continue
                if _distance(found, expected) <= tolerance * _distance(expected) + noise:
                    if method != "kept graph":
                        self.notes.append(f"curvature products by {method}: {failures[0]}")
                    return method
                failures.append(f"{method} differs from a central difference of gradients")
        return self._only_differences(failures)

    def _gradient(self, point: Parameters, batch: Batch) -> list[Tensor]:
        leaves = self.problem.leaves(point)
        with torch.enable_grad():
            return gradients_of(self.objective(self.problem, leaves, batch), list(leaves.values()))

    def _trial(self, generator: torch.Generator, dtype: torch.dtype) -> tuple[Parameters, list[Tensor]]:
        point, direction = {}, []
        for name, value in self.problem.parameters.items():
            value = value.to(dtype)
            scale = value.square().mean().sqrt() + 1e-3
            shift, step = (
                torch.randn(value.shape, generator=generator, dtype=dtype).to(value.device) for _ in range(2)
            )
            point[name] = value + 1e-3 * scale * shift
            direction.append(scale * step)
        return point, direction

    def _graph_product(self, point: Parameters, batch: Batch, direction: list[Tensor]) -> list[Tensor]:
        leaves = {name: value.detach().requires_grad_() for name, value in point.items()}
        with torch.enable_grad(), CheapConvolutions():
            value = self.objective(self.problem, leaves, batch)
            found = list(leaves.values())
            return _pull_back(_edges(gradients_of(value, found, create_graph=True)), found, direction)

    def _only_differences(self, failures: list[str]) -> Method:
        refuse_nonfinite_loss(self.problem)  # says where, if that is why
        told = "; ".join(dict.fromkeys(failures))
        if "failed" not in told:
            raise SpiritLevelError(
                f"the second derivative of this network cannot be trusted: {told}. Some operation of the network has a "
                "wrong double backward, or its gradient jumps where it should be smooth. torch's old "
                "torch.nn.utils.weight_norm is a known case: fold it into the weight with remove_weight_norm. Or the loss is "
                "written so that rounding leaves nothing of its slope where it is small: use torch's cross_entropy, "
                "log_softmax or binary_cross_entropy_with_logits, whose digits are kept"
            )
        self.notes.append(f"curvature products by central differences of gradients: {told}")
        return "central differences"


def _memory(device: torch.device) -> int:
    """Bytes of the machine, or of the accelerator that the model is on."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class _Weighted(Protocol):
    weight: float


Chunks = TypeVar("Chunks", bound=_Weighted)


def spread_part(chunks: Sequence[Chunks], whole: float, samples: int) -> list[Chunks]:
    """About a tenth of the weight `whole`, or all there is, in chunks spread evenly: data may be sorted by class.

    Of few `samples` it is up to a fifth: a hundred say little about the others, and cost more products than they save.
    """
    if not chunks:
        return []
    share = min(0.2, max(0.1, PART_SAMPLES / max(1, samples)))
    mean = sum(chunk.weight for chunk in chunks) / len(chunks)
    count = min(len(chunks), max(1, math.ceil(0.999 * share * whole / mean)))
    return [chunks[(2 * index + 1) * len(chunks) // (2 * count)] for index in range(count)]


def _edges(gradient: list[Tensor]) -> Edges:
    """Where vectors enter the graph of a gradient; nowhere for a part that does not depend on the parameters."""
    return [get_gradient_edge(part) if part.requires_grad else None for part in gradient]


def _pull_back(edges: Edges, leaves: list[Tensor], vectors: list[Tensor]) -> list[Tensor]:
    """∂(gradient·vectors)/∂leaves."""
    live = [(edge, vector) for edge, vector in zip(edges, vectors, strict=True) if edge is not None]
    if not live:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(
        [edge for edge, _ in live], leaves, [vector for _, vector in live], retain_graph=True, allow_unused=True
    )
    return [torch.zeros_like(leaf) if part is None else part for leaf, part in zip(leaves, found, strict=True)]


def _distance(first: list[Tensor], second: list[Tensor] | None = None) -> float:
    parts = first if second is None else [a - b for a, b in zip(first, second, strict=True)]
    return math.hypot(*(float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in parts))
