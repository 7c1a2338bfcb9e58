"""Losses: their mean over a batch, the weight of a batch, and the factors of their Hessian at the outputs.

A loss enters the exact statistics through ∇²ℓ at the outputs, written as Σ_k sign_k s_k s_kᵀ for every sample. The
columns s_k are what is pulled back through the network.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from spiritlevel.errors import SpiritLevelError, suggest
from spiritlevel.network.accurate import cross_entropy, log_softmax
from spiritlevel.network.rewrites import PlainDerivatives
from spiritlevel.problem.factors import BlockFactor, OutputFactor, SoftmaxFactor

# The label of a position that does not count, as torch and many libraries write it.
IGNORED = -100
# Why a second derivative may not be finite where value and gradient are.
AT_ZERO = "Likely cause: a square root, a norm or a power at zero; add a small constant inside it"


class NoCurvature(FloatingPointError):
    """∇²ℓ at the outputs is NaN or infinite."""


@dataclass(frozen=True)
class Loss:
    """A loss as the engine uses it.

    Attributes:
        name: What the report calls it.
        mean: `(outputs, targets) -> mean loss over the batch`, or `(model, batch) -> (mean, count)` if `whole_batch`.
        whole_batch: The loss calls the model itself; it does not split into outputs and ∇²ℓ.
        curvature: `(outputs, targets) -> OutputFactor` where the loss has one in closed form.
        check: `(outputs, targets, first)` raises for targets that do not fit, naming the sample; `first` is its number.
        check_outputs: `(outputs, first)` raises for outputs on which the loss is not defined.
        count: The weight of a batch in the mean over all data.
        given: What the caller passed as the loss, where that was a callable.
        of_outputs: Of what the network returns, the tensor that is compared with targets; all of it where None.
    """

    name: str
    mean: Callable[[Any, Any], Any]
    whole_batch: bool = False
    curvature: Callable[[Tensor, Tensor], OutputFactor] | None = None
    check: Callable[[Any, Any, int], None] | None = None
    check_outputs: Callable[[Tensor, int], None] | None = None
    count: Callable[[Any], int] = len
    given: Callable[..., Any] | None = None
    of_outputs: Callable[[Any], Any] | None = None

    def __call__(self, *given: Any) -> Any:
        return self.mean(*given)


def batch_loss(function: Callable[[Any, Any], Any]) -> Loss:
    """A loss of the form (model, batch) -> (mean, count), whatever its arguments are called.

    `batch` is what the data's batches are: a tensor, a dict, a graph, a tuple, a named tuple; a pair (x, y) of tensors is one
    batch. Batches stay whole and weigh by `count`; curvature is estimated by random probes, or formed where it is small.

    >>> import spiritlevel as sl
    >>> @sl.batch_loss
    ... def reconstruction(net, x):
    ...     return (net(x) - x).square().mean(), len(x)
    >>> autoencoder = torch.nn.Linear(3, 3, bias=False)
    >>> report = sl.measure(autoencoder, torch.eye(3), reconstruction, measures=["hessian_trace"])
    >>> round(report["hessian_trace"].value, 6)  # (2/9)·‖x‖² for each of nine weights' columns
    2.0
    """
    if not callable(function):
        raise SpiritLevelError(f"batch_loss needs a function of (model, batch), got {type(function).__name__}")
    return Loss(_name_of(function), recording(function), whole_batch=True, given=function)


def _name_of(function: Callable[..., Any]) -> str:
    named = function.func if isinstance(function, functools.partial) else function
    return str(getattr(named, "__name__", type(named).__name__))


def resolve_loss(loss: str | Callable[..., Any] | Loss) -> Loss:
    """The `Loss` that a name or a callable stands for."""
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        if loss not in BUILT_IN:
            raise SpiritLevelError(
                f"unknown loss {loss!r}{suggest(loss, BUILT_IN) or '.'} Known: {', '.join(BUILT_IN)}, or pass a callable."
            )
        return BUILT_IN[loss]
    if isinstance(loss, type):
        raise SpiritLevelError(f"loss is the class {loss.__name__}: pass what it makes, {loss.__name__}()")
    if not callable(loss):
        raise SpiritLevelError(f"loss must be a name or a callable, got {type(loss).__name__}")
    return batch_loss(loss) if _takes_the_model(loss) else Loss(name=_name_of(loss), mean=loss, given=loss)


def recording(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The same loss where gradients are switched off: one that differentiates the network by its inputs needs them."""

    @functools.wraps(loss)
    def mean(model: Any, batch: Any) -> Any:
        if torch.is_grad_enabled():
            return loss(model, batch)
        with torch.enable_grad():
            return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, loss(model, batch))

    return mean


def in_double(loss: Loss) -> Loss:
    """The same loss with its derivatives at the outputs in double precision, which costs nothing: outputs are few.

    A loss that brings tensors of its own in single precision is left in the precision of the outputs.
    """
    if isinstance(loss.mean, _InDouble):
        return loss
    return replace(loss, mean=_InDouble(loss.mean, contextlib.nullcontext if loss.given is None else PlainDerivatives))


class _InDouble:
    """`(outputs, targets) -> mean` computed in float64; a caller's own with operations whose derivatives keep their digits."""

    def __init__(
        self, mean: Callable[[Any, Any], Any], around: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        self._mean, self._around = mean, around
        self._fits = True

    def __call__(self, outputs: Any, targets: Any) -> Any:
        with self._around():
            if not self._fits:
                return self._mean(outputs, targets)
            try:
                return self._mean(_doubled(outputs), _doubled(targets))
            except (RuntimeError, TypeError):
                value = self._mean(outputs, targets)  # an error with another cause will be raised again
                self._fits = False
                return value


def _doubled(values: Any) -> Any:
    def double(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(double, values)


def _takes_the_model(loss: Callable[..., Any]) -> bool:
    """A callable whose first argument is called `model` is of the form (model, batch) -> (mean, count)."""
    try:
        parameters = list(inspect.signature(loss).parameters)
    except (TypeError, ValueError):
        return False
    return bool(parameters) and parameters[0] == "model"


def output_factor(loss: Loss, outputs: Tensor, targets: Tensor) -> OutputFactor:
    """The factor of ∇²ℓ at `outputs`: in closed form where the loss has one, else by C×C eigendecompositions."""
    outputs = outputs.detach()
    if loss.curvature is not None:
        return loss.curvature(outputs, targets)
    hessians = output_hessians(loss, outputs, targets)
    if not bool(torch.isfinite(hessians).all()):
        raise NoCurvature(f"the second derivative of the loss by the outputs is NaN or infinite. {AT_ZERO}")
    eigenvalues, eigenvectors = torch.linalg.eigh(hessians)  # (N, C), (N, C, C)
    keep = eigenvalues.abs().amax(0) > 0
    keep[-1] |= not bool(keep.any())  # a loss that is linear in the outputs has one column of zeros
    blocks = (eigenvectors * eigenvalues.abs().sqrt().unsqueeze(1))[..., keep].unsqueeze(1).to(outputs.dtype)
    signs = torch.where(eigenvalues < 0, -1.0, 1.0)[:, keep].unsqueeze(1).to(outputs.dtype)
    return BlockFactor(blocks, signs, lambda vector: vector.reshape(outputs.shape))


def output_hessians(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """∇²ℓ_n for every sample, (N, C, C) with C all outputs of a sample, in float64 through second derivatives.

    ℓ_n is N times the n-th term of the mean, so that the mean over samples of ∇²ℓ_n belongs to the mean loss. A loss with tensors
    of its own in single precision is differentiated in that.
    """
    try:
        hessians = _output_hessians(loss, outputs.double(), _floating_as(targets, torch.float64))
    except (RuntimeError, TypeError):
        if outputs.dtype == torch.float64:
            raise
        hessians = _output_hessians(loss, outputs, targets).double()
    return (hessians + hessians.mT) / 2


def _output_hessians(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    count = len(outputs)
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        total = loss.mean(leaf, targets) * count
        gradient = _gradient(total, leaf).reshape(count, -1)
        rows = [_gradient(gradient[:, c].sum(), leaf, keep=True) for c in range(gradient.shape[1])]
    return torch.stack([row.reshape(count, -1) for row in rows], dim=1).detach()


def _gradient(scalar: Tensor, leaf: Tensor, keep: bool = False) -> Tensor:
    if not scalar.requires_grad:
        return torch.zeros_like(leaf)
    (gradient,) = torch.autograd.grad(scalar, leaf, create_graph=not keep, retain_graph=True, allow_unused=True)
    return torch.zeros_like(leaf) if gradient is None else gradient


def _floating_as(targets: Tensor, dtype: torch.dtype) -> Tensor:
    return targets.to(dtype) if targets.is_floating_point() else targets


def logits_of(outputs: Any) -> Any:
    """The outputs a built-in loss compares with targets: many models return them as the entry `logits` of a record."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    return logits if isinstance(logits, Tensor) else outputs


# --- cross entropy ---------------------------------------------------------------------------------------------


def _softmax_factor(outputs: Tensor, targets: Tensor) -> OutputFactor:
    doubled = _doubled(outputs)
    f = doubled.flatten(2).mT if outputs.dim() > 2 else doubled.unsqueeze(1)  # (N, D, C)
    root = (log_softmax(f, 2) / 2).exp().to(outputs.dtype)
    scale = root.new_full(root.shape[:2], root.shape[1] ** -0.5)
    if targets.is_floating_point():  # −Σ_c y_c log p_c has the Hessian (Σ_c y_c)(diag(p) − ppᵀ)
        scale = scale * targets.sum(1).reshape(root.shape[:2]).sqrt()
    return SoftmaxFactor(root, scale, lambda vector: vector.mT.reshape(outputs.shape).contiguous())


def _check_labels(outputs: Any, targets: Any, first: int) -> None:
    _check_tensor(outputs, "cross_entropy")
    if outputs.dim() < 2:
        raise SpiritLevelError(
            f"cross entropy needs outputs of shape (samples, classes, …), got {tuple(outputs.shape)}: return the logits, one "
            "row a sample"
        )
    if targets.is_floating_point():
        if targets.shape != outputs.shape:
            raise SpiritLevelError(
                f"cross entropy needs integer labels of shape {_label_shape(outputs)} or class probabilities of shape "
                f"{tuple(outputs.shape)}; got {targets.dtype} of shape {tuple(targets.shape)}: use y.long()"
            )
        if bool((targets < 0).any()):
            sample = int((targets < 0).nonzero()[0][0])
            raise SpiritLevelError(
                f"the class probabilities of sample {first + sample} are negative: {targets[sample].tolist()}"
            )
        return
    if targets.dtype not in (torch.int64, torch.uint8):
        raise SpiritLevelError(f"cross entropy needs labels of dtype int64, got {targets.dtype}: use y.long()")
    if tuple(targets.shape) != _label_shape(outputs):
        raise SpiritLevelError(
            f"cross entropy needs labels of shape {_label_shape(outputs)} for outputs of shape {tuple(outputs.shape)}, "
            f"got {tuple(targets.shape)}{_what_labels_are(outputs, targets)}"
        )
    wrong = (targets < 0) | (targets >= outputs.shape[1])
    if bool(wrong.any()):
        index = tuple(int(i) for i in wrong.nonzero()[0])
        if int(targets[index]) == IGNORED:
            raise SpiritLevelError(
                f"label {IGNORED} of sample {first + index[0]} is no class. Where it marks what does not count, pass "
                "loss=torch.nn.CrossEntropyLoss(), whose mean leaves it out"
            )
        raise SpiritLevelError(
            f"label {int(targets[index])} of sample {first + index[0]} is out of range: the network has {outputs.shape[1]} "
            f"outputs, so labels must be 0 to {outputs.shape[1] - 1}"
        )


def check_scored_labels(outputs: Any, targets: Any, first: int, ignored: int = IGNORED) -> None:
    """The same where positions with the label −100, or another that is said, do not count."""
    counts = targets != ignored
    _check_labels(outputs, targets.where(counts, 0), first)


def _check_tensor(outputs: Any, loss: str) -> None:
    if not isinstance(outputs, Tensor):
        function = "mse_loss" if loss == "mse" else "cross_entropy"
        entry = "outputs['logits']" if isinstance(outputs, Mapping) else "outputs[0]"
        raise SpiritLevelError(
            f"the network returns a {type(outputs).__name__}, and {loss} needs one tensor of outputs: pass a loss that says "
            f"which, for example `lambda outputs, targets: torch.nn.functional.{function}({entry}, targets)`"
        )


def _what_labels_are(outputs: Tensor, targets: Tensor) -> str:
    """What to do about labels of another shape, where that says what they are."""
    if targets.shape == outputs.shape:
        return ": as class probabilities, pass y.float(); as labels, y.argmax(1)"
    if targets.shape == (len(outputs), 1, *outputs.shape[2:]):
        return ": use y.squeeze(1)"
    if outputs.dim() < 3 or targets.shape != outputs.shape[:-1]:
        return ""
    return (
        ": classes come second, and here they are last. Pass for example "
        "`lambda outputs, targets: torch.nn.functional.cross_entropy(outputs.movedim(-1, 1), targets)`"
    )


def _label_shape(outputs: Tensor) -> tuple[int, ...]:
    return (outputs.shape[0], *outputs.shape[2:])


# --- squared error ---------------------------------------------------------------------------------------------


def _squared_factor(outputs: Tensor, _targets: Tensor) -> OutputFactor:
    """∇² of the mean over C outputs of (f−y)² is (2/C)·I: every output a block of its own."""
    size = outputs[0].numel()
    blocks = outputs.new_full((len(outputs), size, 1, 1), (2 / size) ** 0.5)
    return BlockFactor(blocks, None, lambda vector: vector.reshape(outputs.shape))


def _check_regression(outputs: Any, targets: Any, _first: int) -> None:
    _check_tensor(outputs, "mse")
    if outputs.shape != targets.shape:
        raise SpiritLevelError(
            f"mse needs targets of the outputs' shape {tuple(outputs.shape)}, got {tuple(targets.shape)}: broadcasting would compare "
            "every output with every target; use y.reshape(…) or y.unsqueeze(1)"
        )


# --- tsuzuku2019 (20) ------------------------------------------------------------------------------------------


def _normalized_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of f/std(f), std over the classes with 1/K: blind to the scale and shift of the outputs."""
    return cross_entropy(outputs / outputs.std(1, correction=0, keepdim=True), targets)


def _check_spread(outputs: Tensor, first: int) -> None:
    spread = outputs.detach().std(1, correction=0)
    if bool((spread == 0).any()):
        sample = int((spread == 0).nonzero()[0][0])
        raise SpiritLevelError(
            f"all outputs of sample {first + sample} are equal, so normalized_cross_entropy (which divides by their standard "
            "deviation) is not defined there: leave the sample out or use cross_entropy"
        )


BUILT_IN: dict[str, Loss] = {
    "cross_entropy": Loss(
        "cross_entropy", cross_entropy, curvature=_softmax_factor, check=_check_labels, count=Tensor.numel
    ),
    "mse": Loss("mse", F.mse_loss, curvature=_squared_factor, check=_check_regression),
    "normalized_cross_entropy": Loss(
        "normalized_cross_entropy",
        _normalized_cross_entropy,
        check=_check_labels,
        check_outputs=_check_spread,
        count=Tensor.numel,
    ),
}


LossLike = str | Callable[..., Any] | Loss
