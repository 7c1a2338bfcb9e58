"""What is checked before anything is measured, with the message that says what to change.

A network must give the same finite outputs for the same inputs, sample by sample, and the loss must be a mean.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from spiritlevel.errors import NondeterministicError, SpiritLevelError
from spiritlevel.problem.apart import agree, check_apart, leaves_of
from spiritlevel.problem.batches import Batch
from spiritlevel.problem.contract import Checked
from spiritlevel.problem.loss_checks import FAILURES, check_loss, check_mean, check_scalar, told
from spiritlevel.problem.loss_curvature import check_second_derivative
from spiritlevel.problem.losses import AT_ZERO
from spiritlevel.problem.replica import watching
from spiritlevel.problem.shards import WHOLE, Shards

# What to do about an error that a model raises when it is called, by words of its message.
REMEDIES = {
    "does not require grad": ". Wrap what it differentiates in torch.enable_grad()",
    "got Long and Float": ". Convert the inputs with x.float()",
    "DTensor": (
        ". A module runs on its parts in a way of its own, as tensor parallelism does: divide the model by "
        "torch.distributed.fsdp.fully_shard alone, or measure the plain module"
    ),
}
# Besides the first samples, this many spread over the data are checked, and as many with other labels.
SPREAD = 8


def check_whole_number(name: str, value: Any, *, at_least: int | None = None) -> int:
    """An integer of Python or NumPy as one of Python; anything else is refused."""
    whole = None if isinstance(value, bool) or not hasattr(value, "__index__") else operator.index(value)
    if whole is None or (at_least is not None and whole < at_least):
        least = "" if at_least is None else f" of at least {at_least}"
        raise SpiritLevelError(f"{name} must be a whole number{least}, got {value!r}")
    return whole


def check_tolerance(tolerance: Any) -> float:
    if isinstance(tolerance, bool) or not isinstance(tolerance, numbers.Real) or not 0 < float(tolerance) < 1:
        raise SpiritLevelError(f"tolerance must be a number between 0 and 1, got {tolerance!r}")
    return float(tolerance)


def check_count(count: Any) -> float:
    """The weight that a loss of the form (model, batch) gives its batch."""
    try:
        weight = float(count)
    except (TypeError, ValueError, RuntimeError):
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise SpiritLevelError(
            f"a loss of the form (model, batch) must return (mean loss, count), with the number of samples or tokens that "
            f"the mean is over as count; got {count!r}"
        )
    return weight


def check_total(total: float) -> float:
    if not total > 0:
        raise SpiritLevelError(
            "the counts that the loss returns with its means are all zero: nothing would be measured"
        )
    return total


def check_model(problem: Checked) -> None:
    """One small batch through the network, several times: finite, deterministic, sample by sample, a mean."""
    check_devices({**problem.parameters, **problem.fixed})
    batch = problem.first_chunk()
    if problem.whole:
        _check_whole_loss(problem, batch)
        return
    batch = batch[:8].map(Tensor.clone)
    with torch.no_grad():
        outputs = _alone(problem, lambda: _first_outputs(problem, batch))
        _check_outputs(outputs)
        _check_deterministic(problem, outputs, batch)
        check_loss(problem, outputs, batch)
        for spread in problem.spread_samples(SPREAD):
            outputs = _alone(problem, functools.partial(problem.outputs, problem.parameters, spread))
            check_mean(problem, spread, outputs)
            check_second_derivative(problem, spread, outputs)


class ReachesPastTheStandIn(Exception):
    """The network reads these parameters from the caller's own model instead of from the stand-in for it."""

    def __init__(self, names: set[str]) -> None:
        super().__init__(min(names))


def _alone(problem: Checked, call: Callable[[], Any]) -> Any:
    """A call that must compute with the parameters it is given and write into none of them."""
    with _watching_buffers(problem), _watching_parameters(problem), watching(problem.callers_parameters()) as read:
        found = call()
    if read:
        raise ReachesPastTheStandIn(read)
    return found


@contextmanager
def _watching_buffers(problem: Checked) -> Iterator[None]:
    """Buffers that change inside are put back, now and before every call from then on."""
    kept = {name: tensor.clone() for name, tensor in problem.fixed.items()}
    yield
    changed = [name for name, tensor in problem.fixed.items() if not torch.equal(tensor, kept[name])]
    if changed:
        for name in changed:
            problem.fixed[name].copy_(kept[name])  # a frozen weight shares its memory with the caller's
        problem.fixed, problem.buffers_change = kept, True
        problem.notes.append("the model changes its own buffers when it runs; they are reset before every call")


@contextmanager
def _watching_parameters(problem: Checked) -> Iterator[None]:
    """Refuse a network that writes into the parameters it is given."""
    versions = {name: tensor._version for name, tensor in problem.parameters.items()}
    yield
    for name, tensor in problem.parameters.items():
        if tensor._version != versions[name]:
            raise SpiritLevelError(
                f"the network writes into its own weight {name!r} when it runs, so the loss is not a function of the parameters: "
                "do that outside of forward, or in train mode only (if self.training), and measure what it leaves"
            )


def check_gradient(problem: Checked) -> None:
    """Differentiate the loss of one sample, so that a loss without derivatives is refused now."""
    leaves = problem.leaves()
    try:
        with torch.enable_grad():
            value = problem.chunk_loss(leaves, problem.few_samples(1))
            if value.requires_grad:
                torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    except RuntimeError as error:
        raise SpiritLevelError(f"the loss cannot be differentiated by the parameters: {error}") from error


def _first_outputs(problem: Checked, batch: Batch) -> Any:
    """The outputs of the first call; a model that fails, or writes into its inputs, is not mistaken for a random one."""
    given = batch.map(Tensor.clone)
    try:
        outputs = problem.outputs(problem.parameters, given)
    except SpiritLevelError:
        raise
    except FAILURES as error:
        remedy = next((told for sign, told in REMEDIES.items() if sign in str(error)), "")
        raise SpiritLevelError(
            f"the model cannot be called on the first batch{_mismatch(problem, batch)}: {told(error)}{remedy}"
        ) from error
    pairs = zip(tree_leaves(given.inputs), tree_leaves(batch.inputs), strict=True)
    if any(isinstance(a, Tensor) and not torch.equal(a, b) for a, b in pairs):
        problem.inputs_change = True
        problem.notes.append("the model changes its inputs in place; it is given copies")
    return outputs


def _mismatch(problem: Checked, batch: Batch) -> str:
    kinds = {leaf.dtype for leaf in tree_leaves(batch.inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()}
    if not kinds - {problem.dtype}:
        return ""
    name = str(problem.dtype).removeprefix("torch.")
    return f" (inputs of {', '.join(map(str, kinds))}, parameters of {problem.dtype}: convert one, or pass dtype=torch.{name})"


def _check_deterministic(problem: Checked, outputs: Any, batch: Batch) -> None:
    if not agree(outputs, problem.outputs(problem.parameters, batch)):
        raise NondeterministicError(
            "the network gives different outputs for the same inputs in eval mode. Likely cause: "
            f"{_random_modules(problem)}. Pass training=self.training to functional dropout, and draw no random "
            "numbers in forward when the module is in eval mode"
        )
    half, samples = (len(batch) + 1) // 2, len(batch)
    if half < samples:
        check_apart(problem, outputs, batch, torch.arange(half))
        check_apart(problem, outputs, batch, torch.arange(half, samples).flip(0))


def _random_modules(problem: Checked) -> str:
    names = [name for name, module in problem.model.named_modules() if "drop" in type(module).__name__.lower()]
    return f"dropout that ignores eval mode ({', '.join(names[:3])})" if names else "dropout or noise in forward"


def refuse_nonfinite_loss(problem: Checked) -> None:
    """Look for the sample on which the loss is NaN or infinite, and raise with its number; return where there is none.

    Where every loss is finite, its derivatives may not be: see `refuse_nonfinite_derivatives`.
    """
    first, check = 0, problem.loss_function.check_outputs
    with problem.undisturbed(), torch.no_grad():
        for chunk, _ in problem.chunks():
            if check is not None:
                check(problem.outputs(problem.parameters, chunk), first)
            if problem.whole or not bool(torch.isfinite(problem.chunk_loss(problem.parameters, chunk))):
                _point_out(problem, chunk, first)
            first += len(chunk)
    refuse_nonfinite_derivatives(problem)


def refuse_nonfinite_derivatives(problem: Checked) -> None:
    """Look for the sample and the parameter where the first or second derivative is NaN or infinite, and raise."""
    first = 0
    with problem.undisturbed(), torch.enable_grad():
        for chunk, _ in problem.chunks():
            if _unsound(problem, chunk) is not None:
                parts = [chunk] if problem.whole else [chunk[n : n + 1] for n in range(len(chunk))]
                for n, part in enumerate(parts):
                    found = _unsound(problem, part)
                    if found is not None:
                        where = "on the batch that starts at sample" if problem.whole else "at sample"
                        raise SpiritLevelError(f"{found[0]} {where} {first + n}{found[1]}")
            first += len(chunk)


def _unsound(problem: Checked, batch: Batch) -> tuple[str, str] | None:
    """Which derivative of the loss over a batch is not finite, and what to do about it; None where all are."""
    leaves = problem.leaves()
    names, values = list(leaves), list(leaves.values())
    loss = problem.chunk_loss(leaves, batch)
    if not loss.requires_grad:
        return None
    gradient = torch.autograd.grad(loss, values, create_graph=True, allow_unused=True)
    wrong = _first_nonfinite(names, gradient)
    if wrong is not None:
        return f"the gradient of the loss by {wrong!r} is NaN or infinite", ", though the loss is finite there"
    live = [part for part in gradient if part is not None and part.requires_grad]
    if not live:
        return None
    generator = torch.Generator().manual_seed(0)
    signs = [torch.randint(0, 2, part.shape, generator=generator).to(part) * 2 - 1 for part in live]
    try:
        second = torch.autograd.grad(live, values, signs, allow_unused=True)
    except RuntimeError:  # an operation has no second derivative: that is refused elsewhere
        return None
    wrong = _first_nonfinite(names, second)
    if wrong is None:
        return None
    return (
        f"the second derivative of the loss by {wrong!r} is NaN or infinite",
        f", though the loss and its gradient are finite there. {AT_ZERO}, or leave the sample out",
    )


def _first_nonfinite(names: Sequence[str], parts: Sequence[Tensor | None]) -> str | None:
    for name, part in zip(names, parts, strict=True):
        if part is not None and not bool(torch.isfinite(part).all()):
            return name
    return None


def _point_out(problem: Checked, chunk: Batch, first: int) -> None:
    parts = [chunk] if problem.whole else [chunk[n : n + 1] for n in range(len(chunk))]
    for n, part in enumerate(parts):
        value = float(problem.chunk_loss(problem.parameters, part))
        if not math.isfinite(value):
            where = "of the batch that starts at sample" if problem.whole else "of sample"
            raise SpiritLevelError(f"the loss {where} {first + n} is {value}: every sample needs a finite loss")


def _first_whole_loss(problem: Checked, batch: Batch) -> Any:
    try:
        return problem.whole_loss(problem.parameters, batch)[0]
    except SpiritLevelError:
        raise
    except FAILURES as error:
        raise SpiritLevelError(
            f"the loss {problem.loss_function.name!r} cannot be computed from the model and the first batch: {told(error)}"
        ) from error


def _check_whole_loss(problem: Checked, batch: Batch) -> None:
    with torch.no_grad():
        first = _alone(problem, lambda: _first_whole_loss(problem, batch))
        second = problem.whole_loss(problem.parameters, batch)[0]
    check_scalar(first)
    if not torch.allclose(first, second, rtol=1e-5, atol=0):
        raise NondeterministicError(
            f"the loss gives {float(first):.8g} and then {float(second):.8g} for the same batch in eval mode. Likely "
            f"cause: {_random_modules(problem)}"
        )


def check_arguments(model: nn.Module, patterns: Sequence[str] | None, dtype: torch.dtype | None) -> None:
    if next(model.parameters(), None) is None:
        quantized = next((part for part in model.modules() if "quantized" in type(part).__module__.split(".")), None)
        if quantized is not None:
            raise SpiritLevelError(
                f"the model is quantized ({type(quantized).__module__}.{type(quantized).__name__}), so it has no parameters to "
                "measure: measure it as it was before that"
            )
        raise SpiritLevelError("the model has no parameters, so there is nothing to measure")
    if any(not isinstance(pattern, str) for pattern in patterns or ()):
        raise SpiritLevelError(f"parameters must be names or patterns of parameters, got {patterns!r}")
    if patterns is not None and not patterns:
        raise SpiritLevelError(
            "parameters is empty, so there is nothing to measure: name some, or leave it out for all trainable ones"
        )
    if dtype not in (None, torch.float32, torch.float64):
        raise SpiritLevelError(
            f"dtype must be torch.float32 or torch.float64, got {dtype!r}"
            + (": half precision cannot carry second derivatives" if dtype in (torch.float16, torch.bfloat16) else "")
        )


def check_devices(tensors: Mapping[str, Tensor]) -> None:
    """All tensors on one device: curvature products are vectors over all parameters."""
    places: dict[torch.device, str] = {}
    for name, tensor in tensors.items():
        places.setdefault(tensor.device, name)
    if len(places) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in places.items())
        raise SpiritLevelError(
            f"the model is spread over several devices ({where}): move it to one with model.to(device)"
        )


def check_kind(name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise SpiritLevelError(
            f"{name!r} is on the meta device, which holds no numbers: load the model's weights before measuring"
        )
    if tensor.is_complex():
        raise SpiritLevelError(f"parameter {name!r} is complex; flatness is defined here for real parameters only")
    if torch.nn.parameter.is_lazy(tensor):
        raise SpiritLevelError(f"parameter {name!r} is not initialized: run the model once before measuring")


def check_finite(name: str, tensor: Tensor, shards: Shards = WHOLE, *, masks: bool = False) -> None:
    """Refuse NaN and infinity; with `masks` −∞ is allowed, which a causal mask adds to what it hides."""
    if not tensor.is_floating_point():
        return
    wrong = ~torch.isfinite(tensor)
    if masks:
        wrong &= tensor != -math.inf
    count = round(shards.total(float(wrong.sum()))) if not masks else int(wrong.sum())  # buffers are whole everywhere
    if count:
        raise SpiritLevelError(f"{name!r} contains NaN or infinity ({count} entries)")


def _check_outputs(outputs: Any) -> None:
    for leaf in leaves_of(outputs):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise SpiritLevelError("the network's outputs contain NaN or infinity on finite inputs")
