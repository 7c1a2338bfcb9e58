"""Losses of every kind, built in and given as a function, against the dense Hessian."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spiritlevel as sl
import zoo
from refusals import refused

X = zoo.gaussian(6, 4)
WHOLE = "the loss does not split into outputs and targets"


def network(outputs=3, inputs=4):
    return zoo.seeded(lambda: nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs)))


def by_outputs(loss, y):
    return lambda model: loss(model(X), y)


# --- losses of outputs and targets: the exact Gauss–Newton part is used ---------------------------------------------


@pytest.mark.parametrize(
    ("loss", "outputs", "y"),
    [
        ("cross_entropy", 3, zoo.integers(3, 6)),
        ("mse", 2, zoo.gaussian(6, 2, seed=3)),
        (F.binary_cross_entropy_with_logits, 3, zoo.integers(2, 6, 3).double()),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0])), 3, zoo.integers(2, 6, 3).double()),
        (F.poisson_nll_loss, 2, zoo.integers(5, 6, 2).double()),
        (nn.CrossEntropyLoss(label_smoothing=0.1), 3, zoo.integers(3, 6)),
        (nn.HuberLoss(delta=0.3), 2, zoo.gaussian(6, 2, seed=3)),
    ],
    ids=["classes", "regression", "several labels", "weighted labels", "counts", "smoothed labels", "Huber"],
)
def test_losses_of_outputs_and_targets(loss, outputs, y):
    named = {"cross_entropy": F.cross_entropy, "mse": F.mse_loss}
    mean = by_outputs(named.get(loss, loss) if isinstance(loss, str) else loss, y)
    report = zoo.check(network(outputs), (X, y), loss, mean, exact=False)
    assert report["hessian_trace"].method == "exact Gauss–Newton part, remainder by random probes"
    assert set(report.problem["estimated_layers"]) == {"0.weight"}  # the last layer is exact


# --- losses of model and batch: probes only, and the report says so --------------------------------------------------


def check_whole(model, batches, loss, mean, **options):
    report = zoo.check(model, batches, loss, mean, exact=False, **options)
    assert set(report.problem["estimated_layers"].values()) == {WHOLE}
    assert set(report.problem["estimated_layers"]) == set(report.problem["layers"])
    for name in ("hessian_trace", "kappa_trace_sum"):
        assert report[name].method == "random probes of the Hessian"
        assert report[name].error > 0
    return report


def test_sequences_with_positions_that_do_not_count():
    """Every batch counts for its scored positions, so the whole is the mean over all of them."""
    x, y = zoo.gaussian(6, 4, 3), zoo.integers(3, 6, 4)
    y[0, 1:], y[1], y[4, 0] = -100, -100, -100
    model = network(3, inputs=3)

    def loss(model, batch):
        inputs, targets = batch
        return F.cross_entropy(model(inputs).mT, targets), (targets != -100).sum()

    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    check_whole(model, batches, loss, lambda model: F.cross_entropy(model(x).mT, y))
    with refused(
        "label -100 of sample 0 leaves out a position, so samples count for different numbers of positions: pass a loss of "
        "the form (model, batch) -> (mean over the scored positions, how many they are)"
    ):
        sl.measure(nn.Conv1d(4, 3, 1).double(), (x, y[:, :3]))


def test_pairs_that_belong_together():
    """A contrastive loss compares every sample of a batch with all others; batches count for their pairs."""

    def loss(model, batch):
        first, second = (F.normalize(model(side), dim=1) for side in (batch["first"], batch["second"]))
        return F.cross_entropy(first @ second.T / 0.5, torch.arange(len(first))), len(first)

    batches = [{"first": X[:4], "second": X[:4] + 0.1}, {"first": X[4:], "second": X[4:] - 0.1}]

    def mean(model):
        return sum(value * count for value, count in (loss(model, batch) for batch in batches)) / 6

    report = check_whole(network(), batches, loss, mean)
    assert report.problem["samples"] == 6


def test_triplets():
    def loss(model, batch):
        anchor, near, far = (model(part) for part in batch["triplet"])
        return F.triplet_margin_loss(anchor, near, far, margin=5.0), anchor.shape[0]

    batches = [{"triplet": (X[:2], X[2:4], X[4:])}]
    check_whole(network(), batches, loss, lambda model: loss(model, batches[0])[0])


def test_a_differential_equation():
    """u'' + u = 0 with u(0) = 1: the second derivative of the network by its inputs stands in the loss."""
    model = zoo.seeded(lambda: nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)))

    def loss(model, points):
        t = points["t"].detach().clone().requires_grad_()
        u = model(t)
        (slope,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), t, create_graph=True)
        return (bend + u).square().mean() + (model(torch.zeros_like(t[:1])) - 1).square().mean(), len(t)

    points = {"t": torch.linspace(-1, 1, 7, dtype=torch.float64).unsqueeze(1)}
    check_whole(model, [points], loss, lambda model: loss(model, points)[0])


class Force(nn.Module):
    """Minus the gradient of an energy."""

    def __init__(self, wrapped):
        super().__init__()
        self.energy, self.wrapped = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), wrapped

    def forward(self, x):
        with torch.enable_grad() if self.wrapped else contextlib.nullcontext():
            x = x.detach().requires_grad_()
            return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


def test_a_network_that_differentiates_by_its_inputs():
    y = zoo.gaussian(6, 4, seed=9)
    zoo.check(zoo.seeded(lambda: Force(True)), (X, y), "mse", by_outputs(F.mse_loss, y), exact=False)
    with refused(
        "the model cannot be called on the first batch: element 0 of tensors does not require grad and does not have a "
        "grad_fn. Wrap what it differentiates in torch.enable_grad()"
    ):
        sl.measure(zoo.seeded(lambda: Force(False)), (X, y), "mse")


def test_a_batch_that_scores_nothing_is_located():
    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1]), int((batch[1] != -100).sum())

    y = torch.tensor([0, 1, 2, -100, -100, -100])
    with refused("the loss of the batch that starts at sample 3 is nan: every sample needs a finite loss"):
        sl.measure(network(), [(X[:3], y[:3]), (X[3:], y[3:])], loss, measures=["hessian_spectral_norm"])


# --- what people try first --------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x):
        return self.inner(x), x


@pytest.mark.parametrize(("loss", "function"), [("cross_entropy", "cross_entropy"), ("mse", "mse_loss")])
def test_a_built_in_loss_for_a_model_that_returns_several_things(loss, function):
    with refused(
        f"the network returns a tuple, and {loss} needs one tensor of outputs: pass a loss that says which, for example "
        f"`lambda outputs, targets: torch.nn.functional.{function}(outputs[0], targets)`"
    ):
        sl.measure(Pair().double(), (X, zoo.integers(3, 6)), loss)


def test_classes_in_the_last_dimension():
    x, y = zoo.gaussian(6, 5, 4), zoo.integers(3, 6, 5)
    with refused(
        "cross entropy needs labels of shape (6, 3) for outputs of shape (6, 5, 3), got (6, 5): classes come second, and here "
        "they are last. Pass for example `lambda outputs, targets: torch.nn.functional.cross_entropy(outputs.movedim(-1, 1), "
        "targets)`"
    ):
        sl.measure(network(), (x, y))
    zoo.check(
        network(),
        (x, y),
        lambda outputs, targets: F.cross_entropy(outputs.movedim(-1, 1), targets),
        lambda model: F.cross_entropy(model(x).mT, y),
        exact=False,
    )
