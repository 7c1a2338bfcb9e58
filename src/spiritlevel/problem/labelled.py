"""Which form a loss has for the batches that come, and which loss of its logits a model's own one is.

Loaders of Hugging Face give dicts with `labels`, and their models compute a loss from them. Split into logits and labels the
same loss has an exact Gauss–Newton part. Which loss that is, is not guessed: candidates are compared with the model's
own loss.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spiritlevel.errors import SpiritLevelError
from spiritlevel.problem.batches import LABELS, Batch, Data, not_a_pair
from spiritlevel.problem.losses import IGNORED, Loss, check_scored_labels, logits_of, recording
from spiritlevel.problem.quiet import undisturbed
from spiritlevel.problem.weighted import weighting_of

# Names of a loss's first argument that mean the outputs of the network.
OUTPUTS = frozenset(
    {"outputs", "output", "logits", "predictions", "prediction", "preds", "pred", "input", "y_hat", "yhat"}
)
# How closely the model's own loss must be reproduced, in its own precision.
AGREEMENT = {torch.float64: 1e-6, torch.float32: 1e-4}
# How many samples are compared.
FEW = 8


def settled(loss: Loss, data: Data) -> Loss:
    """The loss in the form that the batches call for: of outputs and targets, or of the model and a batch."""
    if loss.whole_batch:
        return loss
    first = data.first
    if first.targets is not None and not (first.labelled and loss.given and not _takes_outputs(loss.given)):
        if data.unequal:
            raise SpiritLevelError(data.unequal)
        return loss
    if loss.check is not None or (loss.given is not None and _is_of_torch(loss.given)):
        raise SpiritLevelError(_needs_pairs(loss, first))
    return Loss(loss.name, recording(loss.mean), whole_batch=True)


def divides(loss: Loss, data: Data) -> bool:
    """Whether samples of the data count one by one under this loss, so that batches may be cut anywhere."""
    return not settled(loss, data).whole_batch


def _needs_pairs(loss: Loss, batch: Batch) -> str:
    if not isinstance(batch.inputs, dict):
        return not_a_pair(batch.inputs)
    return (
        f"the batches are dicts without {LABELS!r} for every sample, and the loss {loss.name!r} needs targets: pass a loss of the "
        "form (model, batch) -> (mean loss, count), for example "
        "`def loss(model, batch): return model(**batch).loss, int((batch['labels'] != -100).sum())`"
    )


def _is_of_torch(function: Any) -> bool:
    named = function.func if isinstance(function, functools.partial) else function
    module = type(named).__module__ if isinstance(named, nn.Module) else getattr(named, "__module__", "") or ""
    return module.startswith(("torch.nn", "torch._C"))


def _takes_outputs(function: Callable[..., Any]) -> bool:
    """Whether a callable's first argument is the outputs: a loss of torch, or an argument that says so."""
    if _is_of_torch(function):
        return True
    try:
        return next(iter(inspect.signature(function).parameters), "") in OUTPUTS
    except (TypeError, ValueError):
        return False


# --- the model's own loss ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """A way to compare a model's logits with the labels of a batch.

    select: Of what the model returns, the tensor that is compared. targets: The labels in its order.
    """

    said: str
    select: Callable[[Any], Any]
    targets: Callable[[Tensor], Tensor] = lambda labels: labels

    def pair(self, outputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.select(outputs), self.targets(labels)


def classes_second(outputs: Any) -> Any:
    """Logits with the classes last, as language models return them, in the order of torch's cross entropy."""
    return logits_of(outputs).movedim(-1, 1)


def next_labels(labels: Tensor) -> Tensor:
    """The labels moved by one position, for models that predict the next one; the last position predicts nothing.

    >>> next_labels(torch.tensor([[5, 6, 7]])).tolist()
    [[6, 7, -100]]
    """
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)


def one_column(labels: Tensor) -> Tensor:
    """Targets of regressions of one number, (samples,), in the shape of the outputs, (samples, 1)."""
    return labels.unsqueeze(-1)


PLAIN = View("cross entropy of its logits", logits_of)
POSITIONS = View("cross entropy at every position", classes_second)
NEXT = View("cross entropy of the next position", classes_second, next_labels)
NUMBER = View("the squared error of its one output", logits_of, one_column)


def recognized(model: nn.Module, loss: Loss, data: Data) -> tuple[Loss, Data]:
    """The loss and the data, split at the logits, where batches are dicts with labels; else both as they are."""
    kind = _kind(loss)
    if not data.first.labelled or loss.whole_batch or kind is None:
        return loss, data
    with undisturbed(model), _configuration_kept(model), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = _look(model, data.first[:FEW])
    if seen is None or not isinstance(logits_of(seen.outputs), Tensor):
        return loss, data  # the checks say what is wrong
    view = _chosen(seen, loss, kind)
    if view is None:
        return loss, data
    if seen.needs_labels or view.targets is not PLAIN.targets:
        keep = seen.needs_labels
        data = data.changed(lambda batch: _retargeted(batch, view, keep))
    if view in (POSITIONS, NEXT) and loss.given is None:  # some positions may not count
        loss = replace(loss, given=F.cross_entropy, check=check_scored_labels)
    return replace(loss, of_outputs=view.select), data


@contextmanager
def _configuration_kept(model: nn.Module) -> Iterator[None]:
    """Undoes that a classifier of Hugging Face writes the kind of problem it was called on into its configuration."""
    config = getattr(model, "config", None)
    kept = dict(vars(config)) if hasattr(config, "__dict__") else None
    try:
        yield
    finally:
        if kept is not None:
            vars(config).clear()
            vars(config).update(kept)


def _kind(loss: Loss) -> str | None:
    """What the loss compares: "cross entropy", "mse", "other" for those of torch that are neither; None for a caller's own."""
    if loss.name == "cross_entropy" or weighting_of(loss.given) is not None:
        return "cross entropy"
    if loss.name == "mse" or loss.given is F.mse_loss or isinstance(loss.given, nn.MSELoss):
        return "mse"
    return "other" if loss.given is not None and _is_of_torch(loss.given) else None


@dataclass(frozen=True)
class Seen:
    """A few samples through the model: what it returns, the labels, its own loss if it has one."""

    outputs: Any
    labels: Tensor
    own: Tensor | None
    needs_labels: bool


def _look(model: nn.Module, batch: Batch) -> Seen | None:
    reference = next(model.parameters(), None)
    batch = batch if reference is None else batch.map(lambda leaf: leaf.to(reference.device))
    labels = batch.targets
    assert labels is not None
    plain, with_labels = _called(model, batch.inputs), _called(model, batch.content)
    if plain is None and with_labels is None:
        return None
    own = getattr(with_labels, "loss", None)
    own = own if isinstance(own, Tensor) and own.dim() == 0 else None
    return Seen(with_labels if plain is None else plain, labels, own, plain is None)


def _called(model: nn.Module, inputs: Any) -> Any:
    try:
        return model(**inputs)
    except Exception:  # whatever a model raises without an argument it needs; the checks call it again
        return None


def _retargeted(batch: Batch, view: View, keep: bool) -> Batch:
    assert batch.targets is not None
    inputs = batch.content if keep else batch.inputs
    return replace(batch, inputs=inputs, targets=view.targets(batch.targets), form=None)


def _chosen(seen: Seen, loss: Loss, kind: str) -> View | None:
    """The view in which the loss is the model's own; where the model has none, the first that fits the shapes."""
    views = _fitting(seen, kind)
    if not views:
        return None
    own = seen.own
    if own is None or kind == "other":
        return views[0]
    function = F.mse_loss if kind == "mse" else F.cross_entropy
    values = [float(_value(function, *view.pair(seen.outputs, seen.labels))) for view in views]
    best = min(range(len(views)), key=lambda index: abs(values[index] - float(own)))
    if loss.given is None and not _agrees(values[best], own):
        raise SpiritLevelError(_not_its_own(seen, loss, dict(zip((v.said for v in views), values, strict=True))))
    return views[best]


def _fitting(seen: Seen, kind: str) -> list[View]:
    logits, labels = logits_of(seen.outputs), seen.labels
    if kind == "mse" and logits.shape == (*labels.shape, 1):
        return [NUMBER]
    if kind != "cross entropy" or labels.is_floating_point():
        return [PLAIN] if logits.shape == labels.shape else []
    second = [PLAIN] if logits.dim() > 1 and labels.shape == (len(logits), *logits.shape[2:]) else []
    last = logits.dim() == 3 and labels.shape == logits.shape[:-1]
    return [*second, POSITIONS, NEXT] if last else second


def _value(function: Callable[..., Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
    targets = targets.to(torch.float64) if targets.is_floating_point() else targets
    try:
        return function(outputs.double(), targets)
    except (RuntimeError, IndexError, ValueError):
        return torch.tensor(torch.nan)


def _agrees(value: float, own: Tensor) -> bool:
    return abs(value - float(own)) <= AGREEMENT.get(own.dtype, 3e-2) * max(abs(float(own)), 1e-3)


def _not_its_own(seen: Seen, loss: Loss, values: dict[str, float]) -> str:
    assert seen.own is not None
    others: dict[str, Callable[..., Tensor]] = {
        "loss='mse'": F.mse_loss,
        "loss=torch.nn.BCEWithLogitsLoss()": F.binary_cross_entropy_with_logits,
    }
    found = ", ".join(f"{said} {value:.6g}" for said, value in values.items())
    fits = [
        name
        for name, function in others.items()
        if logits_of(seen.outputs).shape == seen.labels.shape
        and _agrees(float(_value(function, logits_of(seen.outputs), seen.labels.float())), seen.own)
    ]
    remedy = f"pass {fits[0]}, which it is" if fits else "pass a loss of the form (model, batch) -> (mean loss, count)"
    return (
        f"the model's own loss is {float(seen.own):.6g} on the first samples, and the loss {loss.name!r} is another one ({found}): "
        f"{remedy}; to measure {loss.name} of its logits all the same, pass torch.nn.CrossEntropyLoss()"
    )
