"""Losses as a user passes them, each beside its terms sample by sample in a form in which nothing cancels."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Exact in every precision.
CLASS_WEIGHTS = (0.25, 1.0, 3.0)
Terms = Callable[[Tensor, Tensor], Tensor]


def cross_entropies(outputs: Tensor, targets: Tensor) -> Tensor:
    """−log p of every sample: the logits enter as differences to the largest, so that 1 − p keeps all its digits."""
    largest = outputs.argmax(1, keepdim=True)
    top = outputs.gather(1, largest)
    others = (outputs - top).exp().scatter(1, largest, 0.0).sum(1)
    shift = torch.zeros_like(outputs).scatter(1, largest, 1.0)
    chosen = F.one_hot(targets, outputs.shape[1]).to(outputs) if not targets.is_floating_point() else targets
    mass = chosen.sum(1)
    return mass * others.log1p() + (outputs * (shift * mass[:, None] - chosen)).sum(1)


def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
    classes = outputs.shape[1]
    return cross_entropies(outputs, 0.9 * F.one_hot(targets, classes).to(outputs) + 0.1 / classes)


def binary(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of two classes for every output, in the same form."""
    positive = outputs > 0
    small = torch.where(positive, -outputs, outputs).exp().log1p()
    return (small + torch.where(positive, outputs * (1 - targets), -outputs * targets)).mean(1)


def normalized(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropies(outputs / outputs.std(1, correction=0, keepdim=True), targets)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(1)


def hinges(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared margins by hand: torch's own has no second derivative."""
    own = outputs.gather(1, targets[:, None])
    return ((1 - own + outputs).clamp(min=0).square().scatter(1, targets[:, None], 0.0)).mean(1)


def hubers(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.huber_loss(outputs, targets, reduction="none").mean(1)


def quartic(outputs: Tensor, targets: Tensor) -> Tensor:
    """Indefinite at the outputs."""
    return outputs.square().sum(1) - outputs[:, 0] * outputs[:, 1] * targets.square()


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy that counts less where the network is right."""
    surprise = cross_entropies(outputs, targets)
    return surprise.neg().expm1().square() * surprise


def focal_with_fixed_factors(outputs: Tensor, targets: Tensor) -> Tensor:
    """The same, where autograd takes the factors for constants."""
    surprise = F.cross_entropy(outputs, targets, reduction="none")
    return (surprise.neg().expm1().square().detach() * surprise).mean()


class _Fused(torch.autograd.Function):
    """Cross entropy that makes its gradient on the way forward, as fused kernels do: the gradient is right, and a constant."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward((outputs.softmax(1) - F.one_hot(targets, outputs.shape[1])) / len(outputs))
        return F.cross_entropy(outputs, targets)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


def paired(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, and every two samples of the first class are drawn together: not a mean over samples."""
    first = outputs[:, 0] * (targets == 0)
    both = ((targets == 0)[:, None] & (targets == 0)[None]).to(outputs)
    return cross_entropies(outputs, targets) + (both * (first[:, None] - first[None]).square()).sum(1) / 4


@dataclass(frozen=True)
class FuzzLoss:
    """A loss.

    given: model → what is passed to `measure`. terms: ℓ_n by definition. labels: "classes", "probabilities", "numbers",
    "binary". weights: of each sample in the mean. penalty: what is added for the weights themselves. certain: whether
    labels can be chosen so that the loss becomes small. batches: the loss calls the model, batch by batch. coupled: the
    term of a sample depends on other samples.
    """

    given: Callable[[nn.Module], Any]
    terms: Terms
    labels: str = "classes"
    weights: Callable[[Tensor], Tensor] = field(default=lambda targets: torch.ones(len(targets), dtype=torch.float64))
    penalty: float = 0.0
    certain: bool = False
    batches: bool = False
    coupled: bool = False


def class_weights(targets: Tensor) -> Tensor:
    return torch.tensor(CLASS_WEIGHTS, dtype=torch.float64)[targets]


def counted(targets: Tensor) -> Tensor:
    return (targets != -100).double()


def ignoring(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropies(outputs, targets.clamp(min=0))


def _decayed(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Reads the weights of the caller's model beside the outputs it is given."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + 0.1 * sum(p.square().sum() for p in model.parameters())

    return loss


def _decayed_whole(model: nn.Module) -> Callable[[nn.Module, Any], tuple[Tensor, int]]:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        return F.cross_entropy(model(x), y) + 0.1 * sum(p.square().sum() for p in model.parameters()), len(y)

    return loss


def _whole(model: nn.Module) -> Callable[[nn.Module, Any], tuple[Tensor, int]]:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        return F.cross_entropy(model(x), y), len(y)

    return loss


def _whole_weighted(model: nn.Module) -> Callable[[nn.Module, Any], tuple[Tensor, float]]:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        x, y = batch
        outputs = model(x)
        weight = torch.tensor(CLASS_WEIGHTS).to(outputs)
        return F.cross_entropy(outputs, y, weight=weight), float(weight[y].sum())

    return loss


def _named(name: str) -> Callable[[nn.Module], str]:
    return lambda model: name


def _weighted_module(model: nn.Module) -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.tensor(CLASS_WEIGHTS).to(next(model.parameters())))


LOSSES: dict[str, FuzzLoss] = {
    "cross_entropy": FuzzLoss(_named("cross_entropy"), cross_entropies, certain=True),
    "mse": FuzzLoss(_named("mse"), squares, "numbers"),
    "normalized_cross_entropy": FuzzLoss(_named("normalized_cross_entropy"), normalized),
    "probabilities": FuzzLoss(_named("cross_entropy"), cross_entropies, "probabilities"),
    "module": FuzzLoss(lambda model: nn.CrossEntropyLoss(), cross_entropies, certain=True),
    "closure": FuzzLoss(lambda model: lambda f, y: F.cross_entropy(f, y), cross_entropies, certain=True),
    "weighted module": FuzzLoss(_weighted_module, cross_entropies, weights=class_weights, certain=True),
    "smoothed module": FuzzLoss(lambda model: nn.CrossEntropyLoss(label_smoothing=0.1), smoothed),
    "ignoring module": FuzzLoss(lambda model: nn.CrossEntropyLoss(), ignoring, "ignored", counted),
    "binary module": FuzzLoss(lambda model: nn.BCEWithLogitsLoss(), binary, "binary", certain=True),
    "hinge module": FuzzLoss(lambda model: nn.MultiMarginLoss(p=2), hinges),
    "huber module": FuzzLoss(lambda model: nn.HuberLoss(), hubers, "numbers"),
    "quartic": FuzzLoss(lambda model: lambda f, y: quartic(f, y).mean(), quartic, "scalars"),
    "whole": FuzzLoss(_whole, cross_entropies, certain=True, batches=True),
    "whole weighted": FuzzLoss(_whole_weighted, cross_entropies, weights=class_weights, certain=True, batches=True),
    "whole decayed": FuzzLoss(_decayed_whole, cross_entropies, penalty=0.1, batches=True),
    "decayed closure": FuzzLoss(_decayed, cross_entropies, penalty=0.1),
    "fused": FuzzLoss(lambda model: _Fused.apply, cross_entropies),
    "half detached": FuzzLoss(lambda model: focal_with_fixed_factors, focal),
    "paired": FuzzLoss(lambda model: lambda f, y: paired(f, y).mean(), paired, coupled=True),
    "summed module": FuzzLoss(lambda model: nn.CrossEntropyLoss(reduction="sum"), cross_entropies),
}
