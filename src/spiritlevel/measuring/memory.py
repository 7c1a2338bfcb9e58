"""A measure computed within the memory there is: where it runs out, in smaller chunks."""

from __future__ import annotations

import torch

from spiritlevel.errors import SpiritLevelError
from spiritlevel.measuring.evidence import Evidence
from spiritlevel.measuring.record import Measure
from spiritlevel.measuring.value import Value


def compute_within_memory(measure: Measure, evidence: Evidence) -> Value:
    """The measure's value. What evidence was complete when memory ran out is not gathered again."""
    problem = evidence.problem
    first = problem.chunk_size
    while True:
        try:
            return measure.compute(measure, evidence)
        except (RuntimeError, MemoryError) as error:
            # In a group the other processes are in the middle of the same sums and cannot begin again.
            if not is_out_of_memory(error):
                raise
            tried = problem.chunk_size
            if not problem.alone or not evidence.shrink():
                raise SpiritLevelError(_told(measure, evidence, tried)) from error
            note = f"out of memory in chunks of {first} samples, so smaller ones were used"
            if note not in problem.notes:
                problem.notes.append(note)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch or Python ran out of memory; on the CPU torch says so in words only."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _told(measure: Measure, evidence: Evidence, chunk: int) -> str:
    problem = evidence.problem
    count = sum(map(problem.count, problem.parameters))
    size = count * problem.parameters_like().element_size() / 2**20
    remedy = (
        "a loss of the form (model, batch) decides the size of a batch itself: pass smaller batches"
        if problem.whole
        else "measure fewer parameters (parameters=[…]) or fewer measures at a time"
    )
    return (
        f"out of memory while computing {measure.name}, with {count:,} parameters ({size:,.0f} MB a copy) and chunks of "
        f"{chunk} of {problem.samples} samples; {remedy}, or use a machine with more memory"
    )
