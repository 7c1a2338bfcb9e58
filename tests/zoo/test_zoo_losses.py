"""Losses of every kind, built in and given as a function, against the dense Hessian."""

import contextlib
import functools

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
    assert report["hessian_trace"].method == "exact sweep, whole blocks by products with unit vectors"
    assert set(report.problem["estimated_layers"]) == {"0.weight"}  # the last layer is exact


LABELS = torch.tensor([0, 0, 1, 1, 2, 2])  # sorted by class: every half has classes of its own
PARTLY = torch.tensor([0, 1, 2, 1, -100, 0])
WEIGHTS = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)


@pytest.mark.parametrize("divided", [False, True], ids=["pair", "loader"])
@pytest.mark.parametrize(
    ("loss", "y"),
    [
        (nn.CrossEntropyLoss(weight=WEIGHTS), LABELS),
        (nn.CrossEntropyLoss(weight=WEIGHTS.float()), LABELS),
        (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.3), LABELS),
        (nn.CrossEntropyLoss(), PARTLY),
        (nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=1, label_smoothing=0.1), LABELS),
        (functools.partial(F.cross_entropy, weight=WEIGHTS), PARTLY),
        (F.cross_entropy, PARTLY),
        (nn.CrossEntropyLoss(weight=WEIGHTS), F.one_hot(LABELS).double()),
    ],
    ids=["weights", "single", "smoothed", "ignored", "all of it", "partial", "function", "probabilities"],
)
def test_means_in_which_labels_have_weights(loss, y, divided):
    """The mean over all data is Σ w ℓ / Σ w over all data, however it is cut into batches."""
    data = [(X[:2], y[:2]), (X[2:3], y[2:3]), (X[3:], y[3:])] if divided else (X, y)
    if isinstance(loss, nn.CrossEntropyLoss):
        weight = None if loss.weight is None else WEIGHTS
        options = {"weight": weight, "ignore_index": loss.ignore_index, "label_smoothing": loss.label_smoothing}
        wanted = by_outputs(functools.partial(F.cross_entropy, **options), y)
    else:
        wanted = by_outputs(loss, y)
    zoo.check(network(), data, loss, wanted, exact=False)


def test_negative_log_likelihood_with_weights():
    class Logs(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

        def forward(self, x):
            return self.inner(x).log_softmax(1)

    for loss, y in ((nn.NLLLoss(weight=WEIGHTS), LABELS), (nn.NLLLoss(weight=WEIGHTS, ignore_index=2), LABELS)):
        zoo.check(zoo.seeded(Logs), (X, y), loss, by_outputs(loss, y), exact=False)


def test_positions_that_do_not_count():
    """Images with labels at every position, some of which are left out: all that count weigh the same."""
    x, y = zoo.gaussian(6, 4, 3), zoo.integers(3, 6, 3)
    y[0, 1:], y[3], y[4, 0] = -100, -100, -100
    model, loss = (
        zoo.seeded(lambda: nn.Sequential(nn.Conv1d(4, 5, 1), nn.Tanh(), nn.Conv1d(5, 3, 1))),
        nn.CrossEntropyLoss(),
    )
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    for data in ((x, y), batches):
        zoo.check(model, data, loss, lambda model: loss(model(x), y), exact=False)


def test_weights_that_do_not_fit():
    with refused("label 2 is out of range: the loss has weights for classes 0 to 1"):
        sl.measure(network(), (X, LABELS), nn.CrossEntropyLoss(weight=torch.ones(2)))
    with refused("no label has a weight in the loss 'CrossEntropyLoss', so there is no mean to measure"):
        sl.measure(network(), (X, torch.full((6,), -100)), nn.CrossEntropyLoss())


@pytest.mark.parametrize("place", [11, 34, 399])
@pytest.mark.parametrize("certain", [1.0, 1e3], ids=["", "all but no loss"])
def test_a_function_with_weights_or_labels_left_out_is_no_mean(place, certain):
    """Wherever the one sample is that shows it, and however well the network fits them all."""
    x, y = zoo.gaussian(400, 3), zoo.integers(3, 400)
    x = F.one_hot(y).double() * certain + 0.1 * x
    y[place] = -100

    class Identity(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x):
            return x * self.scale

    def ignoring(outputs, targets):
        return F.cross_entropy(outputs, targets)

    with pytest.raises(
        sl.SpiritLevelError,
        match=r"^the loss 'ignoring' is not a mean over samples: .* from all over the data, but two",
    ):
        sl.measure(Identity(), (x, y), ignoring, measures=["hessian_trace"])

    def weighted(outputs, targets):
        return F.cross_entropy(outputs, targets, weight=WEIGHTS)

    order = y[y >= 0].argsort()
    with pytest.raises(sl.SpiritLevelError, match=r"^the loss 'weighted' is not a mean over samples"):
        sl.measure(Identity(), (x[y >= 0][order], y[y >= 0][order]), weighted, measures=["hessian_trace"])


@pytest.mark.parametrize(
    ("loss", "y"),
    [
        (nn.MultiMarginLoss(), LABELS),
        (nn.MultiMarginLoss(p=2, margin=0.7, weight=WEIGHTS), LABELS),
        (
            nn.MultiLabelMarginLoss(),
            torch.tensor([[0, 2, -1], [1, -1, 0], [2, 0, 1], [-1, 1, 1], [1, 0, -1], [2, -1, -1]]),
        ),
    ],
    ids=["margins", "squared margins", "several labels"],
)
def test_losses_without_a_second_derivative_in_torch(loss, y):
    """Compared with the same loss written out, since torch cannot form the Hessian itself."""

    def written(outputs):
        if isinstance(loss, nn.MultiMarginLoss):
            rises = (loss.margin - outputs.gather(1, y[:, None]) + outputs).clamp(min=0) ** loss.p
            rises = rises * (1 - F.one_hot(y, 3)) * (1 if loss.weight is None else loss.weight[y][:, None])
            return rises.sum() / 18
        total = 0
        for row, labels in zip(outputs, y.tolist(), strict=True):
            named = labels[: labels.index(-1)] if -1 in labels else labels
            total += sum((1 - row[a] + row[b]).clamp(min=0) for a in named for b in range(3) if b not in named)
        return total / 18

    model = network()
    assert float(loss(model(X), y).detach()) == pytest.approx(float(written(model(X)).detach()), rel=1e-12)
    zoo.check(model, (X, y), loss, lambda model: written(model(X)), exact=False)


def test_a_loss_that_nothing_can_differentiate_twice():
    def ctc(outputs, targets):
        lengths = torch.full((len(targets),), 5), torch.full((len(targets),), 2)
        return F.ctc_loss(outputs.log_softmax(2).transpose(0, 1), targets, *lengths)

    x, y = zoo.gaussian(6, 5, 4), 1 + zoo.integers(2, 6, 2)
    with refused(
        "the loss 'ctc' has no second derivative in torch (derivative for aten::_ctc_loss_backward is not implemented): write "
        "it with plain operations, or pass a loss of the form (model, batch) -> (mean, count), which differences of gradients "
        "can measure"
    ):
        sl.measure(network(), (x, y), ctc)


# --- losses that see more than the outputs -------------------------------------------------------------------------------


def refused_for_reading(loss, name):
    return refused(
        f"the loss {loss!r} reads the model's own {name!r} past the outputs, as weight decay does, so the curvature that comes "
        "from there would be left out: pass a loss of the form (model, batch) -> (mean, count) that reads everything from the "
        "model it is given"
    )


@pytest.mark.parametrize(
    "penalty",
    [
        lambda model: sum(p.square().sum() for p in model.parameters()),
        lambda model: float(sum(p.data.norm() for p in model.parameters())),
        lambda model: float((model[0].bias.detach().numpy() ** 2).sum()),
        lambda model: torch.no_grad()(lambda: model[0].bias.abs().sum())(),
        lambda model: sum(model[0].bias.tolist()),
        lambda model: model(X).square().mean(),
    ],
    ids=["weight decay", "data", "numpy", "no_grad", "list", "a pass of its own"],
)
def test_a_loss_that_reads_the_weights_past_the_outputs(penalty):
    model = network()

    def decayed(outputs, targets):
        return F.cross_entropy(outputs, targets) + 0.1 * penalty(model)

    with refused_for_reading("decayed", "0.bias"):
        sl.measure(model, (X, LABELS), decayed)


def test_weight_decay_in_a_loss_of_model_and_batch():
    def decayed(model, batch):
        decay = sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(model(batch[0]), batch[1]) + 0.1 * decay, len(batch[1])

    check_whole(network(), [(X, LABELS)], decayed, lambda model: decayed(model, (X, LABELS))[0])


def test_asking_the_model_for_shapes_is_no_reading():
    model = network()

    def scaled(outputs, targets):
        like = torch.zeros_like(model[0].bias).sum() + outputs.to(model[0].weight).sum() * 0
        return F.cross_entropy(outputs, targets) / model[0].weight.shape[0] + like * len(list(model.parameters()))

    zoo.check(model, (X, LABELS), scaled, lambda model: F.cross_entropy(model(X), LABELS) / 5, exact=False)


def test_a_loss_that_reads_what_a_pass_left_behind():
    class Leaving(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            self.size = (outputs := self.inner(x)).square().mean()
            return outputs

    model = zoo.seeded(Leaving)

    def sized(outputs, targets):
        return F.cross_entropy(outputs, targets) + model.size

    with refused(
        "the loss 'sized' cannot be computed: 'Leaving' object has no attribute 'size'. What a forward pass leaves in "
        "attributes of the model is found in the model that a loss of the form (model, batch) -> (mean, count) is given"
    ):
        sl.measure(model, (X, LABELS), sized)
    model(X)
    with refused_for_reading("sized", "size"):
        sl.measure(model, (X, LABELS), sized)

    def whole(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1]) + model.size, len(batch[1])

    before = model.size
    check_whole(model, [(X, LABELS)], whole, lambda model: whole(model, (X, LABELS))[0])
    assert before is not None

    plain, kept = network(), {}
    plain[0].register_forward_hook(lambda module, inputs, output: kept.update(hidden=output))

    def hooked(outputs, targets):
        return F.cross_entropy(outputs, targets) + kept["hidden"].square().mean()

    with refused_for_reading("hooked", "0.weight"):
        sl.measure(plain, (X, LABELS), hooked)


# --- losses of model and batch: probes only, and the report says so --------------------------------------------------


def check_whole(model, batches, loss, mean, **options):
    report = zoo.check(model, batches, loss, mean, exact=False, **options)
    assert set(report.problem["estimated_layers"].values()) == {WHOLE}
    assert set(report.problem["estimated_layers"]) == set(report.problem["layers"])
    for name in ("hessian_trace", "kappa_trace_sum"):
        assert report[name].method == "whole blocks by products with unit vectors"
        assert report[name].exact
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
        "label -100 of sample 0 is no class. Where it marks what does not count, pass loss=torch.nn.CrossEntropyLoss(), whose "
        "mean leaves it out"
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


@pytest.mark.parametrize("loss", ["mse", nn.BCEWithLogitsLoss(), nn.HuberLoss()])
def test_one_output_may_be_squeezed(loss):
    """Outputs of shape (N,) are those of shape (N, 1), whatever the loss."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1)).double()
    x, y = torch.randn(20, 4).double(), (torch.rand(20) > 0.5).double()
    names = [
        "hessian_trace",
        "hessian_spectral_norm",
        "normalized_sharpness",
        "rho_sum",
        "kappa_max",
        "fisher_rao_norm",
    ]
    column = sl.measure(network, (x, y.unsqueeze(1)), loss, measures=names)
    squeezed = sl.measure(nn.Sequential(network, nn.Flatten(0)), (x, y), loss, measures=names)
    for name in names:
        assert squeezed[name].value == pytest.approx(column[name].value, rel=1e-12)
