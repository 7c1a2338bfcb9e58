"""What is checked of a loss before anything is measured: a mean over samples, a function of the outputs alone."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from spiritlevel.errors import SpiritLevelError
from spiritlevel.network.rewrites import with_plain_derivatives
from spiritlevel.problem.apart import leaves_of, picked, rows_among, shapes_of
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.contract import Checked
from spiritlevel.problem.replica import remembered, watching

# What code of the caller's own raises that does not fit what it is given.
FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ArithmeticError)
# Entries of outputs that the loss of a chunk is computed on, over and over, to see whether it is a mean.
MOST_HALVED = 30_000_000


def check_loss(problem: Checked, outputs: Any, batch: Batch) -> None:
    loss, targets = problem.loss_function, batch.targets
    if loss.check is not None:
        loss.check(outputs, targets, 0)
        _check_all_targets(problem, outputs)
    if loss.check_outputs is not None:
        loss.check_outputs(outputs, 0)
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_() if isinstance(outputs, Tensor) else None
        value = _loss_of_outputs(problem, outputs if leaf is None else leaf, targets)
    check_scalar(value)
    if leaf is not None and not value.requires_grad:
        raise SpiritLevelError(
            f"the loss {loss.name!r} does not depend on the outputs: it returned a constant, or left torch on the way "
            "(detach, item, numpy)"
        )
    if leaf is not None:
        _settle_second_derivative(problem, leaf, targets)
    _check_other_ways(problem, batch)
    value = value.detach()
    half = (len(batch) + 1) // 2
    if loss.check is None and half < len(batch):
        parts = [problem.chunk_loss(problem.parameters, part) for part in (batch[:half], batch[half:])]
        mean = (half * parts[0] + (len(batch) - half) * parts[1]) / len(batch)
        if not torch.allclose(mean, value, rtol=1e-3, atol=1e-6 * float(value.abs() + 1)):
            raise SpiritLevelError(
                f"the loss {loss.name!r} is not a mean over samples: {float(value):.6g} on {len(batch)} samples, but "
                f"its two halves average to {float(mean):.6g}. Return the mean over the batch (not the sum), or pass "
                "a loss of the form (model, batch) -> (mean, count), which is weighted by its own count"
            )


def _loss_of_outputs(problem: Checked, outputs: Any, targets: Any) -> Any:
    """The loss, which must see the parameters through the outputs only."""
    with watching({**problem.callers_parameters(), **_left_by_a_pass(problem)}) as read:
        try:
            value = problem.loss_function.mean(outputs, targets)
        except AttributeError as error:
            raise SpiritLevelError(
                f"the loss {problem.loss_function.name!r} cannot be computed: {error}. What a forward pass leaves in attributes "
                "of the model is found in the model that a loss of the form (model, batch) -> (mean, count) is given"
            ) from error
        except FAILURES as error:
            raise SpiritLevelError(
                f"the loss {problem.loss_function.name!r} cannot be computed from {_shapes(outputs)} as outputs and "
                f"{_shapes(targets)} as targets: {told(error)}"
            ) from error
    if read:
        _refuse_other_ways(problem, min(read))
    return value


def _shapes(values: Any) -> str:
    """What the loss was given, in short."""
    if isinstance(values, Tensor):
        return f"{str(values.dtype).removeprefix('torch.')} of shape {tuple(values.shape)}"
    return f"a {type(values).__name__}"


def told(error: Exception) -> str:
    """The error in one line; those that say little beside their name with it."""
    text = str(error)
    return (
        text if isinstance(error, RuntimeError | TypeError | ValueError) and text else f"{type(error).__name__}: {text}"
    )


def _left_by_a_pass(problem: Checked) -> dict[str, Tensor]:
    """Tensors in plain attributes of the caller's modules that differ from those of the module that ran."""
    ran = remembered(problem.module)
    return {name: tensor for name, tensor in remembered(problem.model).items() if ran.get(name) is not tensor}


def _check_other_ways(problem: Checked, batch: Batch) -> None:
    """Refuse a loss that depends on more of this pass than its outputs, such as a layer's result that a hook kept."""
    leaves = problem.leaves()
    with torch.enable_grad():
        outputs = problem.outputs(leaves, batch)
        if not isinstance(outputs, Tensor):
            return  # nothing is split at such outputs: all derivatives are taken through the whole pass
        value = problem.loss_function.mean(outputs.detach(), batch.targets)
        if isinstance(value, Tensor) and value.requires_grad:
            found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
            connected = [name for name, part in zip(leaves, found, strict=True) if part is not None]
            if connected:
                _refuse_other_ways(problem, connected[0])


def _refuse_other_ways(problem: Checked, name: str) -> None:
    raise SpiritLevelError(
        f"the loss {problem.loss_function.name!r} reads the model's own {name!r} past the outputs, as weight decay does, so "
        "the curvature that comes from there would be left out: pass a loss of the form (model, batch) -> (mean, count) "
        "that reads everything from the model it is given"
    )


def _settle_second_derivative(problem: Checked, leaf: Tensor, targets: Any) -> None:
    """Some losses of torch have no second derivative; they are written with operations that have one."""
    loss = problem.loss_function
    plain = dataclasses.replace(loss, mean=with_plain_derivatives(loss.mean))
    for candidate in (loss, plain):
        try:
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(candidate.mean(leaf, targets), leaf, create_graph=True)
                if slope.requires_grad:
                    torch.autograd.grad(slope.sum(), leaf, allow_unused=True)
        except RuntimeError as error:
            failure = error
            continue
        problem.loss_function = candidate
        return
    raise SpiritLevelError(
        f"the loss {loss.name!r} has no second derivative in torch ({str(failure).splitlines()[0]}): write it with plain "
        "operations, or pass a loss of the form (model, batch) -> (mean, count), which differences of gradients can measure"
    ) from failure


def check_mean(problem: Checked, batch: Batch, outputs: Any) -> None:
    """A loss that is given as a function must be a mean over samples from all over the data, with every label in them.

    It is also checked on the outputs of other samples: where the network fits all samples well, their losses are too
    small to show how they are weighted.
    """
    _refuse_no_mean(problem, outputs, batch, "from all over the data")
    if isinstance(outputs, Tensor) and outputs.dim():  # a mask among several outputs belongs to its own targets
        for shift in range(1, 4):
            _refuse_no_mean(problem, outputs.roll(shift, 0), batch, "from all over the data")


def check_mean_of_chunk(problem: Checked, batch: Batch, outputs: Any) -> None:
    """The same for all samples of a chunk: those that a loss brings together may be few, and far apart in the data."""
    if not problem.whole:
        with torch.no_grad():
            _refuse_no_mean(problem, outputs, batch, "of one batch")


def _refuse_no_mean(problem: Checked, outputs: Any, batch: Batch, where: str) -> None:
    """Compare the loss with those of two halves of the samples, for so many halvings that any two samples are parted by one.

    What the network returns besides rows of samples goes to both halves as it is.
    """
    loss, targets = problem.loss_function, batch.targets
    if loss.check is not None or len(batch) < 2:
        return
    among = rows_among(problem, outputs, batch)
    if not among:
        return
    assert targets is not None
    total = _loss_of_outputs(problem, outputs, targets)
    for parts in _halvings(problem, outputs, len(batch)):
        counts = [float(loss.count(targets[part])) for part in parts]
        values = [float(loss.mean(picked(outputs, part, among), targets[part])) for part in parts]
        if not sum(counts) > 0:
            return
        mean, whole = sum(map(operator.mul, counts, values)) / sum(counts), float(total)
        if abs(mean - whole) > _tolerance(outputs, total) * max(map(abs, (*values, whole))):
            raise SpiritLevelError(
                f"the loss {loss.name!r} is not a mean over samples: {whole:.6g} on {len(batch)} samples {where}, "
                f"but two halves of them average to {mean:.6g}. With class weights or labels that do not count, pass "
                "torch.nn.CrossEntropyLoss or NLLLoss itself; else return the mean over the batch, or pass a loss of the form "
                "(model, batch) -> (mean, count), which is weighted by its own count"
            )


def _halvings(problem: Checked, outputs: Any, samples: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The samples in two halves by every digit of their number in random order; of very large outputs by the first digit only."""
    entries = sum(leaf.numel() for leaf in leaves_of(outputs) if isinstance(leaf, Tensor))
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    digits = (samples - 1).bit_length()
    for digit in range(digits if entries * digits <= MOST_HALVED else min(digits, 1)):
        high = (order >> digit) % 2 == 1
        yield high.nonzero().squeeze(1).to(problem.device), (~high).nonzero().squeeze(1).to(problem.device)


def _tolerance(outputs: Any, value: Tensor) -> float:
    """What rounding may leave of the mean: less where the loss is taken in double precision."""
    precise = all(leaf.dtype != torch.float32 for leaf in leaves_of(outputs) if isinstance(leaf, Tensor))
    return 1e-4 if value.dtype == torch.float32 else 1e-8 if precise else 1e-6


def _check_all_targets(problem: Checked, outputs: Any) -> None:
    """Labels are checked against the outputs on all the data, before any work is done.

    Batches may be of other shapes than the first, as sentences are of other lengths: of each shape one sample is run.
    """
    check, first = problem.loss_function.check, 0
    if check is None or not isinstance(outputs, Tensor):
        return
    known = {_of_one(problem.data.first): outputs.shape[1:]}
    for batch in problem.data:
        if batch.targets is not None:
            shape = _of_one(batch)
            if shape not in known:
                known[shape] = problem.outputs(problem.parameters, problem.placed(batch[:1])).shape[1:]
            check(outputs.new_zeros(1).expand(len(batch), *known[shape]), batch.targets.to(outputs.device), first)
            first += len(batch)


def _of_one(batch: Batch) -> tuple[torch.Size, ...]:
    return shapes_of(batch[:1])


def check_scalar(value: Any) -> None:
    if not isinstance(value, Tensor):
        raise SpiritLevelError(f"the loss must return a tensor, got {type(value).__name__}")
    if value.dim() != 0:
        raise SpiritLevelError(
            f"loss returned a tensor of shape {tuple(value.shape)}; `measure` needs the mean over the batch: "
            "return `loss.mean()`"
        )
    if not bool(torch.isfinite(value)):
        raise SpiritLevelError(f"the loss is {float(value)} on the first batch")
