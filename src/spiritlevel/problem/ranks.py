"""Several processes that share one measurement: each reads its part of the data, and sums are taken over all of them.

A process that fails tells the others at their next sum, so that they end with its error instead of waiting for it.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spiritlevel.errors import SpiritLevelError

# Tensors of fewer entries travel together in one message.
SMALL = 1 << 16


class ProcessFailed(SpiritLevelError):
    """Another process of the same measurement failed; the message carries its error."""


class Ranks:
    """The processes of a measurement. A single one, the default, exchanges nothing."""

    rank, size = 0, 1

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its sum over all processes."""

    def sum_named(self, arrays: dict[str, Tensor]) -> None:
        """The same for a dictionary whose keys may differ; a key that some process lacks counts as zero there."""

    def total(self, number: float) -> float:
        """The sum of a number over all processes."""
        return number

    def gather(self, entry: Any) -> list[Any]:
        """What every process has to say, in the order of their ranks."""
        return [entry]

    def check_same(self, what: str, numbers: Sequence[float]) -> None:
        """Refuse where the processes do not agree on these numbers."""

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All processes enter and leave together; if one fails inside, the others fail with its error."""
        yield


class Group(Ranks):
    """The processes of an initialized torch.distributed group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")  # where messages may lie

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        self._check()
        small = [tensor for tensor in tensors if tensor.numel() < SMALL]
        for dtype in {tensor.dtype for tensor in small}:
            members = [tensor for tensor in small if tensor.dtype == dtype]
            joined = torch.cat([tensor.reshape(-1) for tensor in members])
            _reduce(joined)
            for tensor, part in zip(members, torch.split(joined, [tensor.numel() for tensor in members]), strict=True):
                tensor.copy_(part.view_as(tensor))
        for tensor in tensors:
            if tensor.numel() >= SMALL:
                _reduce(tensor)

    def sum_named(self, arrays: dict[str, Tensor]) -> None:
        shapes: dict[str, Any] = {}
        for found in self.gather({name: (tuple(array.shape), array.dtype) for name, array in arrays.items()}):
            shapes |= found
        device = next((array.device for array in arrays.values()), self.device)
        for name, (shape, dtype) in shapes.items():
            arrays.setdefault(name, torch.zeros(shape, dtype=dtype, device=device))
        self.sum_([arrays[name] for name in sorted(shapes)])

    def total(self, number: float) -> float:
        tensor = torch.tensor([number], dtype=torch.float64, device=self.device)
        self.sum_([tensor])
        return float(tensor)

    def check_same(self, what: str, numbers: Sequence[float]) -> None:
        for rank, others in enumerate(self.gather(list(numbers))):
            if len(others) != len(numbers) or not all(map(_close, others, numbers)):
                raise SpiritLevelError(
                    f"process {self.rank} and process {rank} differ in {what}: every process must be given the same model "
                    "and all of the data; the measurement divides the data itself. To measure in one process only, pass "
                    "distributed=False"
                )

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except ProcessFailed:
            raise
        except BaseException as error:
            with contextlib.suppress(ProcessFailed):
                self._check(f"{type(error).__name__}: {error}")
            raise
        self._check()

    def gather(self, entry: Any) -> list[Any]:
        self._check()
        return _gather(entry, self.size)

    def largest(self, number: float) -> float:
        """The largest of what the processes say, NaN where one says that."""
        self._check()
        unknown = math.isnan(number)
        told = torch.tensor([-math.inf if unknown else number, float(unknown)], dtype=torch.float64, device=self.device)
        with _explained():
            dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return math.nan if float(told[1]) else float(told[0])

    def all_gather(self, whole: Tensor, part: Tensor) -> None:
        """Fill `whole` with the parts of all processes, one after the other."""
        self._check()
        with _explained():
            _collective("all_gather_single", "all_gather_into_tensor")(whole, part)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> None:
        """Fill `part` with this process's run of the sum over all processes."""
        self._check()
        with _explained():
            _collective("reduce_scatter_single", "reduce_scatter_tensor")(part, whole)

    def exchange(self, found: Tensor, sent: Tensor, takes: Sequence[int], gives: Sequence[int]) -> None:
        """Send each process its run of `sent`, and fill `found` with what each sends here, one run after the other.

        takes, gives: How many entries come from, and go to, each process.
        """
        self._check()
        with _explained():
            dist.all_to_all_single(found, sent, list(takes), list(gives))

    def _check(self, failure: str = "") -> None:
        """Learn whether any process has failed; every exchange begins with this, so all are at the same one."""
        failed = torch.tensor([float(bool(failure))], device=self.device)
        _reduce(failed)
        if float(failed) > 0:
            told = "; ".join(f"process {rank}: {each}" for rank, each in enumerate(_gather(failure, self.size)) if each)
            raise ProcessFailed(told)


def _close(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=1e-9, abs_tol=1e-9)


def current_ranks(distributed: bool = True) -> Ranks:
    """The processes of the initialized group, or this one alone where there is none or none is wanted."""
    if distributed and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Group()
    return Ranks()


def launched_processes() -> tuple[int, int]:
    """This process's rank and how many there are, as torchrun sets them; (0, 1) without torchrun."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def launched() -> Iterator[int]:
    """Join the processes that torchrun started, if it did; yields this process's rank."""
    if launched_processes()[1] < 2 or dist.is_initialized():
        yield 0
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def _collective(name: str, before: str) -> Any:
    """A function of torch.distributed by its present name, or by the one it had before torch 2.13."""
    return getattr(dist, name, None) or getattr(dist, before)


def _reduce(tensor: Tensor) -> None:
    with _explained():
        dist.all_reduce(tensor)


def _gather(entry: Any, size: int) -> list[Any]:
    found: list[Any] = [None] * size
    with _explained():
        dist.all_gather_object(found, entry)
    return found


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ProcessFailed(
            "another process of this measurement has ended or cannot be reached; what it printed last says why "
            f"({str(error).splitlines()[0]})"
        ) from error


__all__ = ["Group", "ProcessFailed", "Ranks", "current_ranks", "launched", "launched_processes"]
